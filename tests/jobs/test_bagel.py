"""Jobs on the CPU that learn texts and images in one sequence: one by one, killed, resumed."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.loader.collate import collate
from lmms_stream.plugins.tasks.bagel import Bagel
from lmms_stream.tools.demo.jobs import read_run
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.tasks.task import Draw

from tests.conftest import last_words
from tests.datasets.streamed import Readers
from tests.rounds import in_long_rounds, rounds
from tests.train.bagel import (
    build_model,
    build_processor,
    conversation,
    dataset_of,
    save_words,
    write_conversations,
    write_rows,
)

from .launcher import run_job
from .runs import differences, last_step

MODULE = "tests.jobs.bagel_job"
NUM_STEPS = 6
SETTINGS = (f"max_steps={NUM_STEPS}", "save_steps=1")
OTHER_WORLD = 1e-3  # sums of gradients are of other parts
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bagel")
    save_words(made / "words")
    write_conversations(made / "data", 60)
    write_rows(made / "rows", 100)
    return made


def run(folder: Path, output: Path, *settings: str, nproc: int) -> None:
    done = run_job(nproc, MODULE, str(folder), str(output), *settings, timeout_s=200)
    assert done.returncode == 0, last_words(done.stderr)


def kill(folder: Path, output: Path) -> None:
    """A run of two processes that are killed in the fourth step, while the third is saved."""
    done = run_job(2, MODULE, str(folder), str(output), *SETTINGS, "killed_at=3", timeout_s=200)
    assert done.returncode == -signal.SIGKILL, last_words(done.stderr)
    assert last_step(output) == 3
    assert checkpoints(output / "checkpoints") != []


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The output of a run of two processes that was never interrupted; in short rounds its first step."""
    run(folder, folder / "whole", *rounds(("max_steps=1", "save_steps=0"), SETTINGS), nproc=2)
    return folder / "whole"


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_step_is_that_of_its_samples_one_by_one_whatever_ranks_hold(
    folder: Path, tmp_path: Path, nproc: int, request: pytest.FixtureRequest
) -> None:
    if nproc == 2:
        output: Path = request.getfixturevalue("whole")
    else:
        output = tmp_path / "whole"
        run(folder, output, "max_steps=1", "save_steps=0", "per_device_batch=2", nproc=1)
    made: dict[str, Any] = torch.load(output.with_suffix(".pt"))
    record = read_log(output)[0]
    packs = [pack for of_rank in made["packs"] for pack in of_rank]
    assert len({len(ids) for _, ids in packs}) > 1
    processor = build_processor(folder / "words", text_dropout=0.2, vit={"dropout": 0.2}, vae={"dropout": 0.2})
    model, task = build_model().train(), Bagel()
    wrapped, draw = task.wrap(model), Draw(seed=5, step=0)
    totals: dict[str, Any] = {"ce": 0, "mse": 0}
    units = {"ce": 0, "mse": 0}
    for source, ids in packs:
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
        assert record[f"loss/{name}"] == pytest.approx(float(mean.detach()), rel=1e-5)
    assert record["loss"] == pytest.approx(float(sum(means.values()).detach()), rel=1e-5)


@in_long_rounds
def test_a_run_that_is_killed_goes_on_bit_by_bit_and_with_one_process_on_the_same_samples(
    folder: Path, whole: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    kill(folder, killed)
    run(folder, killed, *SETTINGS, nproc=2)
    assert differences(whole, killed) == []
    by_two = checkpoints(whole / "checkpoints")[2]
    run(folder, tmp_path / "one", *SETTINGS, f'resume="{by_two}"', nproc=1)
    assert differences(whole, tmp_path / "one", first_step=4, tolerance=OTHER_WORLD) == []
    assert [record["step"] for record in read_log(tmp_path / "one")] == list(range(4, NUM_STEPS + 1))


@in_long_rounds
def test_a_streamed_run_is_killed_and_goes_on_with_one_process_and_no_row_is_lost_or_read_twice(
    folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "streamed"
    kill(folder, output)
    run(folder, output, *SETTINGS, nproc=1)
    records = read_run(output, name="", tolerance=0).records
    assert sorted(records) == list(range(1, NUM_STEPS + 1))
    trained = Counter(sample_id for record in records.values() for sample_id in record["sample_ids"])
    saved = output / f"checkpoints/step-{NUM_STEPS:08d}/trainer.json"
    config = dataset_of(folder, "bagel_iterable", num_canonical_nodes=4)
    rest = Readers(config, 2, 1, state=json.loads(saved.read_text())["cursor"]).rest()
    left = Counter(sample_id for batch in rest for sample_id in batch.sample_ids.tolist())
    every = Counter(sample_id for batch in Readers(config, 1, 1).rest() for sample_id in batch.sample_ids.tolist())
    assert len(every) == 100
    assert trained + left == every
