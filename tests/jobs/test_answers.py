"""Jobs on the CPU that compare answers: any number of ranks takes the same step, and a run that is killed goes on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import last_words
from tests.rounds import in_long_rounds
from tests.train.answers import Step, pairs, single_answers, write_answers
from tests.train.tasks.test_preferences import assert_same, largest_difference
from tests.train.trl_answers import trl_step

from .answers_job import CASES
from .launcher import run_job, start_job
from .runs import differences, last_step, wait_until

MODULE = "tests.jobs.answers_job"
JOB_S = 240.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("answers")
    write_answers(found / "data", pairs(40))
    write_answers(found / "kto", single_answers(40))
    return found


def job(nproc: int, *arguments: str | Path) -> None:
    done = run_job(nproc, MODULE, *map(str, arguments), timeout_s=JOB_S)
    assert done.returncode == 0, last_words(done.stderr)


@pytest.fixture(scope="module")
def steps(folder: Path) -> list[dict[str, Step]]:
    """The first step of each case on 1 rank and on 2."""
    made: list[dict[str, Step]] = []
    for nproc in (1, 2):
        job(nproc, "steps", folder)
        with torch.serialization.safe_globals([Step]):
            made.append(torch.load(folder / f"steps-{nproc}.pt"))
    return made


@in_long_rounds
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "hinge", "robust", "stored", "unpacked"])
def test_dpo_on_one_rank_and_on_two_is_that_of_trl(steps: list[dict[str, Step]], name: str) -> None:
    rows, task = pairs(40), CASES[name]
    settings = {each: getattr(task, each) for each in ("loss_type", "beta", "label_smoothing")}
    for nproc, made in enumerate(steps, 1):
        samples = made[name].sample_ids
        assert len(samples) == len({*samples}) >= 12, nproc
        assert_same(made[name], *trl_step("DPO", [rows[number] for number in samples], **settings))


@in_long_rounds
def test_a_step_is_the_same_on_one_rank_and_on_two(steps: list[dict[str, Step]]) -> None:
    """With kl, which is estimated over the packs of both; of the stored reference, the second run reads the first's."""
    one, two = steps
    assert set(one) == set(two) == set(CASES)
    for name in CASES:
        assert two[name].figures == pytest.approx(one[name].figures, rel=1e-5, abs=1e-6)
        assert largest_difference(two[name].gradients, one[name].gradients) < 1e-5
    assert one["kto"].figures["kl"] > 0


@in_long_rounds
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("reference", ["model", "stored"])
def test_a_run_that_is_killed_goes_on_bit_by_bit_with_its_reference(reference: str, nproc: int, tmp_path: Path) -> None:
    """The starting weights are built again, though its checkpoints hold others."""
    write_answers(tmp_path / "data", pairs(40))
    job(nproc, "run", tmp_path / "whole", tmp_path, reference)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "data" / "_lmms").rglob("reference/*")}
    output = tmp_path / "killed"
    with start_job(nproc, MODULE, "run", str(output), str(tmp_path), reference) as started:
        wait_until(lambda: last_step(output) >= 3, started)
        processes = started.family()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10)
    assert last_step(output) < last_step(tmp_path / "whole")
    job(nproc, "run", output, tmp_path, reference)
    assert differences(tmp_path / "whole", output) == []
    assert len(stored) == (2 if reference == "stored" else 0)
    assert stored == {path: path.stat().st_mtime_ns for path in stored}
