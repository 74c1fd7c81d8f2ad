"""Whose process group it is: a trainer takes one that is there, and leaves it."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lmms_stream.errors import TrainingError
from lmms_stream.train.report.train_log import history, read_log
from lmms_stream.train.run.distributed import (
    cpu_group,
    end_distributed,
    gather,
    group_timeout_s,
    init_distributed,
    seed_step,
    takes_cpu_tensors,
    tell_of_restarts,
    within,
)

from ..conftest import write_tokens
from .runs import trainer_of, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "data", num_samples=300)
    return write_run(tmp_path / "run.yaml", tmp_path / "data", eval_dataset={"shuffle": False}, max_steps=2)


def test_a_trainer_evaluates_before_it_resumes_and_after_it_has_trained(run: Path, tmp_path: Path) -> None:
    first = trainer_of(run)
    first.train()
    trainer = trainer_of(run, "train.max_steps=4")
    before = trainer.evaluate()
    trainer.train()
    logged = [record["eval_loss"] for record in history(read_log(tmp_path / "default")).evaluations]
    assert [first.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]] == logged
    assert before["eval_loss"] not in logged


def test_a_group_that_somebody_else_made_is_taken_and_left_with_a_word_on_its_timeout(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=50), store=store, rank=0, world_size=1)
    theirs = dist.group.WORLD
    try:
        trainer_of(run).train()
        assert dist.group.WORLD is theirs
        assert "the process group that is there has a timeout of 50 s, and train.timeout_s is 60" in caplog.text
    finally:
        dist.destroy_process_group()


def test_a_torchrun_that_keeps_the_addresses_of_ranks_that_are_gone_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = {"RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for other in ({"RANK": "1"}, {"TORCHELASTIC_MAX_RESTARTS": "0"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        tell_of_restarts(ranks | other)
    assert caplog.text == ""
    tell_of_restarts(ranks)
    assert (
        "start it as python -m lmms_stream.train.torchrun, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text
    )


def test_a_group_without_a_backend_for_cpus_has_one_of_gloo_beside_it_until_the_end() -> None:
    """As one of nccl alone, which transformers' arguments make on GPUs; gloo for GPUs needs none to be made."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
    try:
        theirs = dist.group.WORLD
        assert theirs is not None
        assert not takes_cpu_tensors(theirs)
        beside = cpu_group(50)
        assert beside is not theirs
        assert takes_cpu_tensors(beside)
        assert cpu_group() is beside
        assert group_timeout_s(beside, torch.device("cpu")) == 50
        assert gather([1.5, 2.0], 1).tolist() == [[1.5, 2.0]]
        end_distributed()
        assert dist.group.WORLD is theirs
        assert cpu_group(60) is not beside
        end_distributed()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_a_group_with_a_backend_for_cpus_is_that_of_gathers(backend: str) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        assert cpu_group() is dist.group.WORLD
        assert gather([3.0], 1).tolist() == [[3.0]]
    finally:
        dist.destroy_process_group()


def test_a_rank_that_does_not_come_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    message = r"^rank 0 waited for another rank, which ended or did not come within 0\.5 s \(.*: look for"
    with pytest.raises(TrainingError, match=message):
        init_distributed(0.5)
    assert not dist.is_initialized()


def test_what_waits_for_too_long_is_left_to_it_and_what_fails_is_raised() -> None:
    never = threading.Event()
    with pytest.raises(dist.DistError, match=r"^connecting took more than 0\.05 s$"):
        within(0.05, lambda: never.wait(20), what="connecting")
    never.set()

    def fail() -> None:
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        within(20, fail, what="connecting")


def test_each_step_of_each_group_of_ranks_has_random_numbers_of_its_own() -> None:
    seeds = set()
    for seed, step, group in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 0), (1, 2, 3)]:
        seed_step(seed, step=step, group=group)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 4
