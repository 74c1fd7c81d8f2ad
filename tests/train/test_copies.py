"""Copies of saved tensors, on a simulated GPU: whatever a schedule does, a checkpoint holds the values of its step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import CheckpointError
from lmms_stream.plugins.tasks.dpo import DPO
from lmms_stream.train.checkpoint.checkpoint import Checkpointer, checkpoints
from lmms_stream.train.run import copies
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.optimizers import Average, local
from lmms_stream.train.tasks.reference import FrozenWeights
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from ..rounds import rounds
from .answers import pairs, trainer_of, write_answers
from .streams import COPIES_LATE, EARLY, LATE, Gpu, Schedule, Stream, simulated_gpu

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
REAL: Schedule = "real"  # of a real GPU
Saved = dict[str, dict[str, torch.Tensor]]  # by checkpoint, then by the name of a tensor
ACTIONS = ("step", "step", "average", "save", "save", "wait")
LIFE = ("step", "average", "step", "save", "step", "average", "save", "wait")


@pytest.fixture(autouse=True)
def _group() -> None:
    """A process group of this process alone."""
    init_distributed(60)


def saved_in(folder: Path) -> Saved:
    return {path.name: dict(_flat(_read(path))) for path in checkpoints(folder)}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield prefix + name, value


def differing(saved: Saved, expected: Saved) -> list[str]:
    assert saved.keys() == expected.keys()
    assert all(saved[step].keys() == expected[step].keys() for step in expected)
    return [
        f"{step} {name}"
        for step, tensors in expected.items()
        for name, tensor in tensors.items()
        if not torch.equal(saved[step][name], tensor)
    ]


def parts(seed: int, *, buffers: bool, width: int = 16) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    norm = torch.nn.BatchNorm1d(width) if buffers else torch.nn.LayerNorm(width)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), norm, torch.nn.Linear(width, 3))
    if torch.cuda.is_available():
        model.cuda()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def hold(saver: Checkpointer) -> threading.Event:
    """Let the thread of the next save wait for an event before it waits for the copies: the slowest thread."""
    event = threading.Event()

    def wait() -> None:
        assert event.wait(600)  # longer than a test may take

    saver.check_owner = wait
    return event


def live(folder: Path, seed: int, schedule: Schedule | None, *, actions: Sequence[str] = ()) -> Gpu | None:
    """A run of updates, averages and saves, in an order of its seed by default; no schedule: saves are synchronous."""
    rng, width = np.random.default_rng(seed), 2048 if torch.cuda.is_available() else 16
    model, optimizer = parts(seed, buffers=bool(seed % 2), width=width)
    device = next(model.parameters()).device
    average = Average(model, decay=0.9)
    gpu, event = None, threading.Event()
    with ExitStack() as stack:
        if schedule not in (None, REAL):
            gpu = stack.enter_context(simulated_gpu(schedule))
            gpu.owns([*model.parameters(), *model.buffers(), *average.tensors.values()])
        saver = Checkpointer(
            str(folder), staging=folder / "staging", asynchronous=schedule is not None, timeout_s=60, average=average
        )
        stack.enter_context(saver)
        stack.callback(lambda: event.set())
        for number, action in enumerate(actions or rng.choice(ACTIONS, 12)):
            if action == "step":
                inputs = torch.from_numpy(rng.standard_normal((4, width), np.float32))
                update(model, optimizer, inputs.to(device))
                if gpu is not None:
                    gpu.owns(each for state in optimizer.state.values() for each in state.values())
            elif action == "average":
                average.update()
            elif action == "save":
                event.set()
                saver.wait()
                event = hold(saver)
                if schedule not in (LATE, COPIES_LATE, REAL):
                    event.set()
                saver.save(model, optimizer, step=number, state={"cursor": number}, documents={})
            else:
                event.set()
                saver.wait()
    return gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of machines with CUDA")
@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_holds_the_values_of_its_step_on_a_gpu(seed: int, tmp_path: Path) -> None:
    for name, schedule in (("expected", None), ("real", REAL)):
        live(tmp_path / name, seed, schedule)
    assert differing(saved_in(tmp_path / "real"), saved_in(tmp_path / "expected")) == []


@without_gpu
@pytest.mark.parametrize("seed", range(rounds(3, 60)))
def test_a_checkpoint_holds_the_values_of_its_step_in_any_schedule(seed: int, tmp_path: Path) -> None:
    live(tmp_path / "expected", seed, None)
    expected = saved_in(tmp_path / "expected")
    assert expected
    for schedule in (COPIES_LATE, LATE, EARLY, *range(rounds(1, 10))):
        gpu = live(tmp_path / f"{schedule}", seed, schedule)
        assert gpu is not None
        assert differing(saved_in(tmp_path / f"{schedule}"), expected) == []
        assert gpu.num_waits == 0, "a host waited for all work of a stream"
        assert gpu.on_wrong_device == set()


FAULTS: dict[str, tuple[object, str, Any]] = {
    "nothing is fenced": (copies.Stager, "fence", lambda self: None),
    "copies do not wait for training": (Stream, "wait_stream", lambda self, other: None),
    "the reader does not wait": (copies.Stager, "synchronize_staging", lambda self: None),
    "memory is not page-locked": (copies, "_memory", lambda num, is_locked: np.empty(num, np.uint8)),
    "a thread stays on the first device": (copies, "_enter", lambda device: None),
}


@without_gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_notices_a_missing_rule(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(tmp_path / "expected", 0, None, actions=LIFE)
    schedule = COPIES_LATE if fault == "nothing is fenced" else LATE
    monkeypatch.setattr(copies, "_watched", lambda values, keeps_values: [])
    monkeypatch.setattr(*FAULTS[fault])
    gpu = live(tmp_path / "late", 0, schedule, actions=LIFE)
    assert gpu is not None
    noticed = bool(differing(saved_in(tmp_path / "late"), saved_in(tmp_path / "expected")))
    assert (noticed, gpu.num_waits > 0, bool(gpu.on_wrong_device)).count(True) == 1


class Shrinks(TrainerCallback):
    """Writes to a saved tensor when a step begins: a user's code."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        with torch.no_grad():
            next(given["model"].parameters()).mul_(0.5)


class SlowThread(TrainerCallback):
    """Holds the thread of each save until the next update is queued."""

    def __init__(self, saver: Checkpointer):
        self.saver, self.event = saver, threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.event = hold(self.saver)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.event.set()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.event.set()


def prefer(folder: Path, output: Path, schedule: Schedule | None, *, shrinks: bool) -> Saved:
    """Checkpoints of a run whose reference takes the place of the trained weights in each step."""
    options = {"ema_decay": 0.9, "save_steps": 1, "max_steps": rounds(2, 8), "async_save": schedule is not None}
    trainer = trainer_of(folder, DPO(), output_dir=str(output), **options)
    with ExitStack() as stack:
        if schedule is not None:
            stack.enter_context(simulated_gpu(schedule))
            trainer.add_callback(SlowThread(trainer.saver._checkpointer))
        if shrinks:
            trainer.add_callback(Shrinks)
        trainer.train()
    return saved_in(output / "checkpoints")


@without_gpu
@pytest.mark.parametrize("shrinks", rounds([True], [False, True]))
def test_no_checkpoint_holds_the_weights_of_the_reference_or_of_a_callback(shrinks: bool, tmp_path: Path) -> None:
    write_answers(tmp_path / "data", pairs(32))
    expected = prefer(tmp_path, tmp_path / "expected", None, shrinks=shrinks)
    assert len(expected) == rounds(2, 8)
    schedules: list[Schedule] = [COPIES_LATE, 0, LATE, EARLY, *range(1, 20)]
    for schedule in schedules[: rounds(2, len(schedules))]:
        assert differing(prefer(tmp_path, tmp_path / f"{schedule}", schedule, shrinks=shrinks), expected) == []


@without_gpu
@pytest.mark.parametrize("is_fenced", [True, False])
def test_copies_between_two_swaps_hold_the_trained_weights_only_if_a_swap_is_fenced(
    is_fenced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fenced:
        monkeypatch.setattr(FrozenWeights, "_swap", FrozenWeights._swap.__wrapped__)  # type: ignore[attr-defined]
    model, optimizer = parts(0, buffers=False)
    trained = [local(each.detach()) for each in model.parameters()]
    expected = trained[0].clone()
    reference = FrozenWeights.__new__(FrozenWeights)
    reference._pairs = [(each, each + 1) for each in trained]
    with simulated_gpu(COPIES_LATE) as gpu:
        gpu.owns(trained)
        with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging", timeout_s=60) as saver:
            event = hold(saver)
            saver.save(model, optimizer, step=1, state={}, documents={})
            reference._swap()
            gpu.run_all()
            reference._swap()
            event.set()
    assert torch.equal(saved_in(tmp_path / "saved")["step-00000001"]["model.0.weight"], expected) == is_fenced


@without_gpu
@pytest.mark.parametrize("is_simulated", [True, False])
def test_a_write_without_a_fence_while_a_tensor_is_copied_fails(
    is_simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(copies.WATCH, "1")
    says = (
        r"model\.0\.weight was written to while it was copied for a checkpoint, .* call lmms_stream.*fence\(\) before"
    )
    model, optimizer = parts(0, buffers=False)
    with ExitStack() as stack:
        if is_simulated:
            stack.enter_context(simulated_gpu(LATE))
        saver = stack.enter_context(Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging", timeout_s=60))
        for step, is_fenced in ((1, True), (2, False)):
            event = hold(saver)
            saver.save(model, optimizer, step=step, state={}, documents={})
            if is_fenced:
                copies.fence()
            with torch.no_grad():
                next(model.parameters()).mul_(2)
            if is_fenced:
                event.set()
                saver.wait()
        with pytest.raises(CheckpointError, match=says):
            update(model, optimizer, torch.ones(4, 16))
        event.set()
        if is_simulated:
            with pytest.raises(CheckpointError, match=rf"step-00000002 was not saved.*{says}"):
                saver.wait()
            assert [path.name for path in checkpoints(tmp_path / "saved")] == ["step-00000001"]


def test_a_write_to_a_part_of_a_sharded_tensor_is_found_by_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(copies.WATCH, "1")
    model, optimizer = parts(0, buffers=False)
    part = local(next(model.parameters()).detach())
    part[0, 0] = torch.nan
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging", timeout_s=60) as saver:
        saver.save(model, optimizer, step=1, state={}, documents={})
        copies.fence()  # unchanged: NaN is NaN
        event = hold(saver)
        saver.save(model, optimizer, step=2, state={}, documents={})
        part[1, 1] += 1
        with pytest.raises(CheckpointError, match=r"model\.0\.weight was written to"):
            copies.fence()
        event.set()
        saver.wait()
        saver._stager.release()


def test_every_writer_of_saved_tensors_is_registered() -> None:
    """A new writer is marked with writes_saved and named here, with a test of it on a simulated GPU."""
    assert {name.removeprefix("lmms_stream.train.") for name in copies.WRITERS} == {
        "torch.optim.Optimizer.step",
        "tasks.reference.FrozenWeights._swap",
        "run.optimizers.Average.update",
        "run.optimizers.Average.begin",
        "checkpoint.tensors.set_tensors",
        "checkpoint.tensors.read_tensors",
    }
