"""Claim: with asynchronous saving the training loop waits less than a third of what a synchronous save takes.

One model is trained in one process, and saved again and again, in turns whose order changes: asynchronously,
synchronously, and with torch's own `save` of DCP and `torch.save` of the same tensors, which make no checksums and, the
latter, do not force them to disk. Counted is what the loop waits in the call; of an asynchronous save also how long
steps take while it is written, against steps with nothing beside them, and when it is on the disk. Before each save all
that was written is forced to disk, so that no save pays for another.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --parameters 200000000 --folder /scratch
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.tensors import tensors_of
from lmms_stream.train.run.distributed import init_distributed
from measure import MIB, print_table, verdict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

MAX_SHARE = 1 / 3
WIDTH = 1024
OURS, SYNCHRONOUS, DCP, TORCH = "asynchronous", "synchronous", "DCP's save alone", "torch.save"


class Training:
    """A model whose step takes time in proportion to its size."""

    def __init__(self, num_parameters: int):
        torch.manual_seed(0)
        layers = max(1, num_parameters // WIDTH**2)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.randn(64, WIDTH)
        self.num_bytes = layers * WIDTH**2 * 4 * 3  # weights and two moments

    def step(self) -> float:
        started = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def save_beside(training: Training, made: Checkpointer, step: int, disturbed: list[float]) -> tuple[float, float]:
    """Seconds that the loop waits for an asynchronous save, and until it is on the disk; steps go on meanwhile."""
    started = time.perf_counter()
    waited = seconds_of(lambda: made.save(training.model, training.optimizer, step=step, state={}, documents={}))
    while made.is_saving:
        disturbed.append(training.step())
    on_disk = time.perf_counter() - started
    return waited + seconds_of(made.wait), on_disk


def measure(training: Training, folder: Path, args: argparse.Namespace) -> None:
    waits: dict[str, list[float]] = {name: [] for name in (OURS, SYNCHRONOUS, DCP, TORCH)}
    alone: list[float] = []
    disturbed: list[float] = []
    on_disk: list[float] = []
    makers = {
        name: Checkpointer(str(folder / name), staging=folder / "staging", keep=1, asynchronous=name == OURS)
        for name in (OURS, SYNCHRONOUS)
    }

    def save_ours(step: int) -> None:
        makers[SYNCHRONOUS].save(training.model, training.optimizer, step=step, state={}, documents={})

    def save_dcp(step: int) -> None:
        shutil.rmtree(folder / DCP, ignore_errors=True)
        save(tensors_of(training.model, training.optimizer), checkpoint_id=str(folder / DCP))

    def save_torch(step: int) -> None:
        torch.save(tensors_of(training.model, training.optimizer), folder / "torch.pt")

    calls: dict[str, Callable[[int], None]] = {SYNCHRONOUS: save_ours, DCP: save_dcp, TORCH: save_torch}
    for number in range(args.rounds + 1):  # the first is not counted: pages and caches are filled
        names = list(waits)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            alone += [training.step() for _ in range(args.steps)]
            os.sync()
            if name == OURS:
                waited, done = save_beside(training, makers[OURS], number, disturbed)
                waits[OURS].append(waited)
                on_disk.append(done)
            else:
                waits[name].append(seconds_of(partial(calls[name], number)))
    show(training, waits, statistics.median(on_disk[1:]), alone[args.steps :], disturbed)


def show(
    training: Training, waits: dict[str, list[float]], on_disk: float, alone: list[float], disturbed: list[float]
) -> None:
    median = {name: statistics.median(seconds[1:]) for name, seconds in waits.items()}
    rows = [
        [
            name,
            f"{median[name]:.3f}",
            f"{min(seconds[1:]):.3f} to {max(seconds[1:]):.3f}",
            f"{median[name] / median[SYNCHRONOUS]:.3f}",
            f"{on_disk if name == OURS else median[name]:.3f}",
        ]
        for name, seconds in waits.items()
    ]
    print_table(
        f"seconds that training waits for a checkpoint of {training.num_bytes / MIB:,.0f} MiB",
        ["", "waits", "", "of synchronous", "on disk after"],
        rows,
    )
    share = median[OURS] / median[SYNCHRONOUS]
    slower = statistics.median(disturbed) / statistics.median(alone)
    print(f"a step takes {statistics.median(alone):.3f} s, and {slower:.2f} times that while a checkpoint is written")
    print(f"asynchronous saving waits less than {MAX_SHARE:.2f} of synchronous: {verdict(share < MAX_SHARE)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="between saves")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: the temporary folder")
    args = parser.parse_args()
    init_distributed(600)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(Training(args.parameters), Path(folder), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
