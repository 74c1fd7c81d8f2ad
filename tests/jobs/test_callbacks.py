"""Callbacks of transformers on two ranks: what one rank's decide, all ranks do, also after a kill."""

from __future__ import annotations

import json
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words, write_tokens
from tests.train.runs import write_run

from ..rounds import in_long_rounds
from .callbacks_job import BEST_STEP
from .launcher import run_job
from .runs import with_one_layer

JOB = "tests.jobs.callbacks_job"
KILLED_AT = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was killed after it saved step 8, and went on; and runs beside transformers' Trainer."""
    folder = tmp_path_factory.mktemp("callbacks")
    write_tokens(folder / "data", num_samples=200)
    write_tokens(folder / "held-out", num_samples=30)
    held_out = {"remote": str(folder / "held-out"), "shuffle": False}
    config = write_run(
        folder / "run.yaml", folder / "data", eval_dataset=held_out, max_steps=20, eval_steps=2, save_steps=4,
        save_total_limit=2, async_save=False, best={"load": True, "metric": "loss", "mode": "min"},
        log_sample_ids=False, global_batch=2, lr_scheduler_type="constant",
    )  # fmt: skip
    with_one_layer(config)
    by_distance = config.with_name("distance.yaml")
    by_distance.write_text(config.read_text().replace("metric: loss", "metric: distance"))
    for killed_at, expected in ((KILLED_AT, -signal.SIGKILL), (0, 0)):
        done = run_job(2, JOB, str(by_distance), str(folder), str(killed_at), timeout_s=200)
        assert done.returncode == expected, last_words(done.stderr)
    done = run_job(1, JOB, str(config), str(folder), "0", timeout_s=100)
    assert done.returncode == 0, last_words(done.stderr)
    return folder


def seen(folder: Path, run: str) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads((folder / f"{run}-{rank}.json").read_text()) for rank in range(2)]


@in_long_rounds
def test_a_run_stops_early_where_it_would_have_if_it_had_not_been_killed(folder: Path) -> None:
    """The patience that was used up before the kill is not given again."""
    stopped = BEST_STEP + 3 * 2
    for rank in seen(folder, "early"):
        assert rank["step"] == stopped
        assert rank["counter"] == 3
        assert rank["best"] == [0, BEST_STEP]
    steps = [record["step"] for record in read_log(folder / "early") if "eval_loss" not in record]
    assert steps == [*range(1, KILLED_AT), *range(KILLED_AT, stopped + 1)]


def test_the_best_model_is_loaded_at_the_end_and_its_checkpoint_is_kept(folder: Path) -> None:
    of_step = {each["step"]: each["eval_loss"] for each in read_log(folder / "early") if "eval_loss" in each}
    assert len(set(of_step.values())) == len(of_step) == 6
    for rank in seen(folder, "early"):
        assert rank["eval_loss"] == of_step[BEST_STEP]
    saved = sorted(path.name for path in (folder / "early" / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in (BEST_STEP, BEST_STEP + 6)]


def test_what_a_callback_wants_on_one_rank_is_done_by_all(folder: Path) -> None:
    """Also where the other rank has no callback at all."""
    for rank in seen(folder, "one"):
        assert rank["step"] == 3
    assert [record["step"] for record in read_log(folder / "one")] == [1, 2, 3]
    saved = sorted(path.name for path in (folder / "one" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003"]


def test_all_ranks_see_the_same_events_and_the_history_goes_on_after_a_kill(folder: Path) -> None:
    one, other = seen(folder, "early")
    assert one["events"] == other["events"]
    assert one["log_history"] == other["log_history"]
    logged = [step for step, names in one["log_history"] if "grad_norm" in names]
    assert logged == [*range(1, BEST_STEP + 7)]
    assert ["on_train_begin", 8] in one["events"]
    assert [step for name, step in one["events"] if name == "on_save"] == [12]


def test_events_come_in_the_order_of_transformers_trainer(folder: Path) -> None:
    """Evaluations have different numbers of steps."""
    events = json.loads((folder / "events.json").read_text())
    ours, theirs = ([each for each, _ in groupby(map(tuple, events[name]))] for name in ("ours", "theirs"))
    assert ours == theirs
