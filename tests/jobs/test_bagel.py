"""Jobs on the CPU that learn texts and images in one sequence: one by one, killed, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.loader.collate import collate
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.tasks.bagel import Bagel
from lmms_stream.train.tasks.noise import Draw

from tests.conftest import last_words
from tests.train.bagel import build_model, build_processor, conversation, save_words, write_conversations

from .launcher import run_job, start_job
from .runs import differences, last_step, wait_until

MODULE = "tests.jobs.bagel_job"
NUM_STEPS = 8
OTHER_WORLD = 1e-3  # sums of gradients are of other parts
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bagel")
    save_words(made / "words")
    write_conversations(made / "data", 60)
    return made


def run(folder: Path, output: Path, *settings: str, nproc: int) -> None:
    done = run_job(nproc, MODULE, str(folder), str(output), *settings, timeout_s=200)
    assert done.returncode == 0, last_words(done.stderr)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_step_is_that_of_its_samples_one_by_one_whatever_ranks_hold(folder: Path, tmp_path: Path, nproc: int) -> None:
    output = tmp_path / "gradients"
    run(folder, output, "max_steps=1", f"per_device_batch={3 - nproc}", nproc=nproc)
    made: dict[str, Any] = torch.load(output.with_suffix(f".{nproc}.pt"))
    packs = [pack for of_rank in made["packs"] for pack in of_rank]
    assert len({len(ids) for _, ids, _ in packs}) > 1
    processor = build_processor(folder / "words", text_dropout=0.2, vit_dropout=0.2, vae_dropout=0.2)
    model, task = build_model().train(), Bagel()
    wrapped, draw = task.wrap(model), Draw(seed=5, step=0)
    totals: dict[str, Any] = {"ce": 0, "mse": 0}
    units = {"ce": 0, "mse": 0}
    for source, ids, _ in packs:
        for number in ids:
            alone = collate([processor.process(conversation(number))], [number], source=source)
            for name, each in task.losses(wrapped, alone, [alone], draw=draw).items():
                totals[name] = totals[name] + each.total
                units[name] += task.units(alone)[name]
    means = {name: total / units[name] for name, total in totals.items()}
    (means["ce"] + means["mse"]).backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    wrong = [name for name, each in expected.items() if (made["gradients"][name] - each).norm() > 1e-5 * each.norm()]
    assert wrong == []
    for name, mean in means.items():
        assert made["record"][f"loss/{name}"] == pytest.approx(float(mean.detach()), rel=1e-5)
    assert made["record"]["loss"] == pytest.approx(float(sum(means.values()).detach()), rel=1e-5)


def test_a_run_that_is_killed_goes_on_bit_by_bit_and_with_one_process_on_the_same_samples(
    folder: Path, tmp_path: Path
) -> None:
    settings = [f"max_steps={NUM_STEPS}", "save_steps=1"]
    run(folder, tmp_path / "whole", *settings, nproc=2)
    killed = tmp_path / "killed"
    with start_job(2, MODULE, str(folder), str(killed), *settings) as job:
        wait_until(lambda: last_step(killed) >= 3 and checkpoints(killed / "checkpoints") != [], job)
        for process in job.processes:
            process.kill()
    assert last_step(killed) < NUM_STEPS
    run(folder, killed, *settings, nproc=2)
    assert differences(tmp_path / "whole", killed) == []
    by_two = checkpoints(tmp_path / "whole" / "checkpoints")[3]
    run(folder, tmp_path / "one", *settings, f'resume="{by_two}"', nproc=1)
    assert differences(tmp_path / "whole", tmp_path / "one", first_step=5, tolerance=OTHER_WORLD) == []
    assert [record["step"] for record in read_log(tmp_path / "one")] == list(range(5, NUM_STEPS + 1))
