"""Jobs on the CPU: runs on packs whose tokens lie on several ranks, against runs without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lmms_stream.train.report.train_log import history, read_log

from tests.conftest import last_words, write_tokens
from tests.rounds import in_long_rounds

from ..train.runs import write_run
from .launcher import run_job
from .runs import train

pytestmark = pytest.mark.timeout(400)  # for the jobs, of which each has a limit of its own


@in_long_rounds
def test_a_run_on_parts_of_packs_goes_on_without_them_at_the_same_ids_and_losses(tmp_path: Path) -> None:
    """Two groups of two ranks that share packs, then two ranks with packs of their own; evaluated in both."""
    write_tokens(tmp_path / "data", num_samples=200)
    config = write_run(
        tmp_path / "run.yaml", tmp_path / "data", eval_dataset={"packing_length": 128}, global_batch=4,
        lr_scheduler_type="constant", eval_steps=3,
    )  # fmt: skip
    train(config, tmp_path / "whole", "train.max_steps=6", nproc=2)
    train(config, tmp_path / "shared", "train.max_steps=3", "train.sequence_parallel=2", nproc=4)
    train(config, tmp_path / "shared", "train.max_steps=6", nproc=2)
    found, expected = (history(read_log(tmp_path / name)) for name in ("shared", "whole"))
    assert [each["sample_ids"] for each in found.steps] == [each["sample_ids"] for each in expected.steps]
    assert len(found.steps) == 6
    for name in ("loss", "grad_norm", "tokens_seen"):
        assert [each[name] for each in found.steps] == pytest.approx([each[name] for each in expected.steps], rel=1e-5)
    evaluated = [[each["eval_loss"] for each in run.evaluations] for run in (found, expected)]
    assert len(evaluated[0]) == 2
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@in_long_rounds
def test_a_users_loss_and_metrics_are_given_whole_packs(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=40)
    config = write_run(
        tmp_path / "run.yaml", tmp_path / "data", eval_dataset={"packing_length": 127}, global_batch=2, max_steps=2
    )
    done = run_job(2, "tests.jobs.sequence_job", str(config), timeout_s=300)
    assert done.returncode == 0, last_words(done.stderr)
    expected = np.load(tmp_path / "1-0.npz")
    for rank in range(2):
        found = np.load(tmp_path / f"2-{rank}.npz")
        assert set(found) == {"predictions", "labels", "losses", "norms", "figures"}
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
