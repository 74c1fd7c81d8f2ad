"""Slow parts of a run are named: a worker, a disk, a store, a rank; in its log, in `watch`, as an alert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.watch.run import WatchedRun
from lmms_stream.tools.watch.source import open_run
from lmms_stream.train.report.rank_figures import PartFigures, slow_parts
from lmms_stream.train.report.train_log import ALERTS_NAME, read_log

from ..conftest import last_words, write_samples
from ..proxy import FaultProxy, Rule
from ..rounds import LONG
from ..train.runs import write_run
from .launcher import run_job
from .runs import with_one_layer
from .test_run_log import READ_EVENTS, READ_WANDB, read

JOB_S = 120.0
PLANTED = {
    "worker": (1, 2, "slow_worker", "worker 1 of rank 0 ", "s a pack, and the median of the other workers is "),
    "data": (2, 1, "slow_worker", "worker 0 of rank 1 ", "s a pack, and the median of the other workers is "),
    "disk": (
        1,
        0,
        "slow_disk",
        "the disk of data on ",
        "ms to read a sample, and the rest of the work on a ",
    ),
    "store": (1, 1, "throttling_store", "the store of s3://", "requests were repeated, with "),
    "rank": (2, 0, "straggling_rank", "rank 1 ", "s a step, and the median of the other ranks is "),
}


@pytest.mark.parametrize("how", PLANTED if LONG else ["worker", "rank"])
def test_a_planted_slow_part_is_named(
    how: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on until the alert is there, and ends by itself."""
    num_ranks, num_workers, kind, begin, middle = PLANTED[how]
    remote, data = str(tmp_path / "data"), tmp_path / "data"
    tokens = np.arange(20, dtype=np.int32)
    write_samples(data, [(tokens, np.array([[0, 20]], np.int32))] * 3000)
    if how == "store":
        remote = request.getfixturevalue("s3_folder")
        for each in data.rglob("*.*"):
            open_storage(remote).upload(each, str(each.relative_to(data)))
    monkeypatch.setenv("WANDB_MODE", "offline")
    is_reported = LONG and how == "rank"
    path = write_run(
        tmp_path / "run.yaml", remote, max_steps=100_000, global_batch=2, num_workers=num_workers, log_sample_ids=False,
        report_to=["tensorboard", "wandb"] * is_reported,
    )  # fmt: skip
    with_one_layer(path)
    proxy: FaultProxy | None = request.getfixturevalue("proxy") if how == "store" else None
    if proxy is not None:
        proxy.set_rules(Rule(path=r"shard\.", times=5, status=503))
    done = run_job(num_ranks, "tests.jobs.slow_job", how, f": {begin}", str(path), timeout_s=JOB_S)
    assert done.returncode == 0, last_words(done.stderr)
    alerts = [each for line in read_log(tmp_path / "default" / ALERTS_NAME) for each in line["alerts"]]
    (alert,) = (each for each in alerts if f": {begin}" in each["message"])  # a busy machine may be slow elsewhere too
    assert alert["kind"] == kind
    assert middle in alert["message"]
    assert done.stderr.count(alert["message"]) == 1
    run = WatchedRun(open_run(tmp_path / "default"))
    run.update()
    traces = sorted(path.name for path in (tmp_path / "default" / "profile").iterdir())
    step = int(traces[0].removesuffix(".json").rpartition("-")[2])
    assert traces == [f"rank-{rank}-step-{step}.json" for rank in range(num_ranks)]  # of one step, which was ahead
    assert step > 2
    assert json.loads((tmp_path / "default" / "profile" / traces[-1]).read_text())["traceEvents"]
    assert alert in [each for record in read_log(tmp_path / "default") for each in record.get("alerts", [])]
    assert [shown["message"] for shown in run.view()["alerts"]].count(alert["message"]) == 1
    if is_reported:
        events = read(READ_EVENTS, tmp_path / "default" / "tensorboard").items()
        assert alert["message"] in [text for name, found in events if kind in name for _, text in found]
        (offline,) = (tmp_path / "default" / "wandb").glob("offline-run-*/run-*.wandb")
        assert [kind, alert["message"]] in read(READ_WANDB, offline)["alerts"]


def figures_of(seconds: float, **changed: Any) -> PartFigures:
    """Figures of a rank whose workers are busy and whose steps wait for data, after some seconds."""
    us = round(1e6 * seconds)
    doing_s = {"data": 0.5 * seconds, "ranks": 0.1 * seconds, "work": 0.4 * seconds}
    figures = PartFigures(
        node="a", at_s=seconds, num_steps=round(10 * seconds), doing_s=doing_s,
        workers=[[round(10 * seconds), us, 10_000, "chats:7"]] * 2, reads={"chats": [us // 500, us // 10, 2 * us]},
        stores={"s3://b": [round(10 * seconds), round(seconds), round(20 * seconds)]},
    )  # fmt: skip
    return figures._replace(**{name: value(figures) for name, value in changed.items()})


def test_busy_parts_that_are_alike_are_not_named() -> None:
    alike = (figures_of(10), figures_of(15))
    assert slow_parts([alike] * 3) == []
    slower = figures_of(15, workers=lambda each: [[110, 15_000_000, 10_000, "chats:7"], each.workers[1]])
    assert [(each.kind, each.part) for each in slow_parts([alike, (figures_of(10), slower)])] == [
        ("slow_worker", "worker 0 of rank 1")
    ]
    waits = figures_of(15, doing_s=lambda _: {"data": 5.0, "ranks": 4.0, "work": 6.0})  # for ranks, all of 3 s more
    works = figures_of(15, doing_s=lambda _: {"data": 5.0, "ranks": 1.0, "work": 9.0})
    found = slow_parts([(figures_of(10), each) for each in (waits, works, waits)])
    assert [(each.kind, each.part) for each in found] == [("straggling_rank", "rank 1")]
    assert slow_parts([(figures_of(10), each) for each in (waits, waits, waits)]) == []
