"""States of loaders and planners in the middle of a run, with the samples that follow on 1, 2 and 4 ranks.

A case names the settings of a run. `stored_state` runs it to a step, and returns its state as JSON; `following` reads
on from a state with the code of today. Tests read on from the states that 67b50f60 wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan, own_seeds
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.types import World

from .datasets import open_stored
from .digests import array_digest
from .pack_cases import chat_lengths, plan_of

WORLDS = {"1 rank": World(), "2 ranks": World(world_size=2), "4 ranks on 2 nodes": World(world_size=4, num_nodes=2)}
GLOBAL_BATCH = 4
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LoaderCase:
    """A run over stored datasets. step: finished steps at the state; num_steps: steps to read from there."""

    datasets: tuple[str, ...]
    step: int
    num_steps: int = 6
    dataset: Settings = field(default_factory=dict)  # changed settings of the datasets
    loader: Settings = field(default_factory=dict)  # changed settings of the loader
    later: Settings = field(default_factory=dict)  # settings of the loader after the state

    def open(self, root: Path) -> dict[str, PackedDataset]:
        return {name: open_stored(name, root, **self.dataset) for name in self.datasets}

    def loader_of(self, opened: Mapping[str, PackedDataset], world: World, *, is_later: bool) -> PackedLoader:
        settings = {"global_batch": GLOBAL_BATCH, **self.loader, **(self.later if is_later else {})}
        return PackedLoader(opened if len(opened) > 1 else opened[self.datasets[0]], world=world, **settings)


BOTH = ("numbers", "others")
SCHEDULE = {0: {"numbers": 3, "others": 1}, 4: {"numbers": 1, "others": 2}, 9: {"others": 1}}
GROWING = PackingConfig(packing_length=64, later_lengths=((3, 96), (7, 128)), window=16, overlong="split")
LANES = OrderConfig(seed=3, num_canonical_nodes=4, shuffle_block_size=16)

LOADERS = {
    "deal": LoaderCase(datasets=("numbers",), step=2),
    "deal, next epoch": LoaderCase(datasets=("numbers",), step=6),
    "deal, two sources": LoaderCase(datasets=BOTH, step=3),
    "deal, stored order": LoaderCase(
        datasets=("numbers",), step=2, dataset={"order": OrderConfig(shuffle=False, shuffle_block_size=16)}
    ),
    "deal, fixed packs": LoaderCase(
        datasets=("numbers",),
        step=7,
        dataset={"order": OrderConfig(seed=1, num_canonical_nodes=2, shuffle_block_size=16, reshuffle=False)},
    ),
    "deal, chats": LoaderCase(datasets=("chat",), step=1, num_steps=4),
    "deal, a dataset that has grown": LoaderCase(datasets=("grown",), step=1, num_steps=4),
    "deal, images": LoaderCase(datasets=("images",), step=1, num_steps=3),
    "window": LoaderCase(datasets=("numbers",), step=3, loader={"balance": 5}),
    "window, two sources": LoaderCase(datasets=BOTH, step=4, loader={"balance": "window"}),
    "window, weights": LoaderCase(
        datasets=BOTH, step=5, loader={"balance": 4, "weights": {"numbers": 2, "others": 1}}, num_steps=9
    ),
    "window that began with other weights": LoaderCase(
        datasets=BOTH,
        step=5,
        loader={"balance": 4, "weights": {"numbers": 2, "others": 1}},
        later={"weights": {"numbers": 1, "others": 5}},
        num_steps=9,
    ),
    "window, read on by deal": LoaderCase(
        datasets=("numbers",), step=3, loader={"balance": 5}, later={"balance": "deal"}
    ),
    "across_sources": LoaderCase(
        datasets=BOTH, step=7, loader={"balance": "across_sources", "weights": {"numbers": 2, "others": 1}}
    ),
    "across_sources, without weights": LoaderCase(datasets=BOTH, step=3, loader={"balance": "across_sources"}),
    "weights": LoaderCase(datasets=BOTH, step=5, loader={"weights": {"numbers": 3, "others": 1.5}}, num_steps=20),
    "weights, another global batch later": LoaderCase(
        datasets=BOTH, step=5, loader={"weights": {"numbers": 3, "others": 1}}, later={"global_batch": 8}
    ),
    "a schedule of weights": LoaderCase(datasets=BOTH, step=3, loader={"weights": SCHEDULE}, num_steps=9),
    "a source that ends": LoaderCase(
        datasets=BOTH,
        step=6,
        loader={"weights": {"numbers": 1, "others": 4}, "max_epochs": {"others": 1, "numbers": 3}},
        num_steps=30,
    ),
    "a source that joins": LoaderCase(
        datasets=BOTH, step=4, loader={"weights": {"numbers": 1}}, later={"weights": {"numbers": 1, "others": 1}}
    ),
    "mixed samples": LoaderCase(datasets=BOTH, step=4, loader={"mixing": "samples"}, num_steps=8),
    "mixed samples, weights": LoaderCase(
        datasets=BOTH, step=4, loader={"mixing": "samples", "weights": {"numbers": 1, "others": 3}}, num_steps=8
    ),
    "packing_length that changes": LoaderCase(datasets=BOTH, step=5, dataset={"packing": GROWING}, num_steps=8),
    "packing_length that changes, in a window": LoaderCase(
        datasets=BOTH, step=5, dataset={"packing": GROWING}, loader={"balance": 3}, num_steps=8
    ),
    "lanes": LoaderCase(datasets=("numbers",), step=3, dataset={"packing_mode": "lanes", "order": LANES}, num_steps=8),
    "lanes, split samples": LoaderCase(
        datasets=("numbers",),
        step=4,
        num_steps=8,
        dataset={
            "packing_mode": "lanes",
            "order": LANES,
            "packing": PackingConfig(packing_length=24, window=8, overlong="split"),
        },
    ),
    "lanes, window_N": LoaderCase(
        datasets=("chat",),
        step=2,
        num_steps=5,
        dataset={
            "packing_mode": "lanes",
            "order": LANES,
            "packing": PackingConfig(packing_length=320, strategy="window_6", overlong="drop"),
        },
    ),
}


def _read(loader: PackedLoader, num_steps: int) -> Iterator[Any]:
    """Yield the batches of the next steps, epoch after epoch, up to the end of all sources."""
    stop = loader.step + num_steps
    while loader.step < stop:
        before = loader.step
        for batch in loader:
            yield batch
            if loader.step == stop:
                return
        if loader.step == before:
            return


def stored_state(case: LoaderCase, root: Path) -> dict[str, Any]:
    """Return the state of a run on one rank after the steps of a case."""
    loader = case.loader_of(case.open(root), World(), is_later=False)
    for _ in _read(loader, case.step):
        pass
    assert loader.step == case.step
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def following(case: LoaderCase, root: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the samples of each step after a state: on one rank in full, and a digest of the packs of all ranks."""
    found: dict[str, Any] = {}
    opened = case.open(root)
    for label, world in WORLDS.items():
        packs: list[Any] = []
        steps: dict[str, list[Any]] = {}
        for rank in range(world.world_size):
            loader = case.loader_of(opened, dataclasses.replace(world, rank=rank), is_later=True)
            loader.load_state_dict(state)
            for batch in _read(loader, case.num_steps):
                packs += [[rank, batch.step, batch.micro_batch], batch.sample_ids, batch.cu_seqlens, batch.input_ids]
                packs.append([ord(letter) for letter in batch.source])
                steps.setdefault(str(batch.step), []).append([batch.source, *batch.sample_ids.tolist()])
        if world.world_size == 1:
            found["steps"] = {step: " | ".join(" ".join(map(str, pack)) for pack in of) for step, of in steps.items()}
        found[label] = array_digest(packs)
    return found


# Mixtures of plans without any dataset, so that many sources and worlds cost little.


@dataclass(frozen=True, kw_only=True)
class MixtureCase:
    """A run over plans. step: of the state; num_steps: steps to plan from there, and from the start."""

    sources: tuple[str, ...] = ("text", "code", "few")
    weights: Any = None
    max_epochs: Mapping[str, int] | None = None
    balance: str | int = "deal"
    global_batch: int = 8
    step: int = 5
    num_steps: int = 12


MIXTURES = {
    "one source": MixtureCase(sources=("code",)),
    "one long source, window": MixtureCase(sources=("long",), balance="window", global_batch=16, num_steps=40),
    "three sources": MixtureCase(num_steps=60),
    "three sources, window of 7": MixtureCase(balance=7, num_steps=20),
    "three sources, across_sources": MixtureCase(balance="across_sources", num_steps=20),
    "weights": MixtureCase(weights={"text": 5, "code": 3, "few": 1}, num_steps=80),
    "weights, window": MixtureCase(weights={"text": 5, "code": 3, "few": 1}, balance="window", num_steps=20),
    "weights, across_sources": MixtureCase(
        weights={"text": 5, "code": 3, "few": 1}, balance="across_sources", num_steps=20
    ),
    "schedule": MixtureCase(
        weights={0: {"text": 1, "few": 1}, 7: {"code": 1, "text": 0.3}, 11: {"few": 1}}, num_steps=16
    ),
    "schedule, window of 4": MixtureCase(
        weights={0: {"text": 1, "few": 1}, 7: {"code": 1, "text": 0.3}, 11: {"few": 1}}, balance=4, num_steps=16
    ),
    "sources that end": MixtureCase(
        weights={"text": 1, "code": 1, "few": 3}, max_epochs={"text": 1, "code": 1, "few": 4}, num_steps=300
    ),
    "with media": MixtureCase(sources=("media", "code"), weights={"media": 2, "code": 1}),
    "with media, window of 6": MixtureCase(sources=("media", "code"), weights={"media": 2, "code": 1}, balance=6),
    "seventy sources": MixtureCase(
        sources=tuple(f"s{n}" for n in range(70)),
        weights={f"s{n}": 1 + n % 5 for n in range(70)},
        global_batch=64,
        num_steps=4,
    ),
    "seventy sources, window of 3": MixtureCase(
        sources=tuple(f"s{n}" for n in range(70)), global_batch=64, balance=3, step=1, num_steps=3
    ),
}
MIXTURE_WORLDS: dict[str, tuple[World, int]] = {  # and loader workers of a rank
    "1 rank": (World(), 1),
    "2 ranks of 2 workers": (World(world_size=2), 2),
    "4 ranks on 2 nodes": (World(world_size=4, num_nodes=2), 1),
    "8 ranks, pairs read alike": (World(world_size=8, num_nodes=2, replication=2), 1),
}


@cache
def source_plan(name: str) -> PackPlan:
    if name.startswith("s"):
        number = int(name[1:])
        lengths = chat_lengths(10 + number, limit=200, seed=number)
        order, packing = OrderConfig(seed=number), PackingConfig(packing_length=256)
        return PackPlan(lengths, [4, 6 + number], order=order, packing=packing)
    orders = {
        "text": OrderConfig(seed=1, num_canonical_nodes=2, shuffle_block_size=64),
        "code": OrderConfig(seed=2, num_canonical_nodes=4, shuffle_block_size=100),
        "few": OrderConfig(seed=3),
        "long": OrderConfig(seed=4, num_canonical_nodes=4, shuffle_block_size=1000),
        "media": OrderConfig(seed=5, num_canonical_nodes=2, shuffle_block_size=200),
    }
    sizes = {"text": 500, "code": 1_000, "few": 70, "long": 9_000, "media": 600}
    strategies = {"text": "best_fit", "code": "even_fit", "few": "window_7", "long": "best_fit", "media": "first_fit"}
    return plan_of(sizes[name], orders[name], strategy=strategies[name], with_patches=name == "media")


def mixture_of(case: MixtureCase) -> WindowedMixture:
    plans = {name: source_plan(name) for name in case.sources}
    return WindowedMixture(plans, weights=case.weights, max_epochs=case.max_epochs, balance=case.balance)


def mixture_state(case: MixtureCase) -> dict[str, Any]:
    mixture = mixture_of(case)
    cursor = mixture.skip(mixture.start(), case.step, global_batch=case.global_batch)
    state: dict[str, Any] = json.loads(json.dumps(cursor.to_dict()))
    return state


NEW = ("weights", "weights, window", "weights, across_sources", "schedule", "sources that end", "three sources")


def new_digests() -> dict[str, Any]:
    """Return the first state and the packs of new runs of some cases: shares of tokens, each source with its seed."""
    found = {}
    for name in NEW:
        case = MIXTURES[name]
        plans = own_seeds({source: source_plan(source) for source in case.sources})
        mixture = WindowedMixture(plans, weights=case.weights, max_epochs=case.max_epochs, balance=case.balance)
        start = mixture.start()
        state = mixture.skip(start, case.step, global_batch=case.global_batch).to_dict()
        found[name] = {"state": state, "digest": planned_digest(mixture, start, case, World(), 1)}
    return found


def planned_digest(mixture: WindowedMixture, cursor: Cursor, case: MixtureCase, world: World, workers: int) -> str:
    """Return a digest of the packs of each rank and worker in the steps from a cursor on."""
    arrays: list[Any] = []
    for group in range(world.num_groups):
        rank = group * world.replication
        config = StepConfig(global_batch=case.global_batch, world=dataclasses.replace(world, rank=rank))
        for worker in range(workers):
            at = cursor
            step, last = 0, None
            while step < case.num_steps:
                first = step
                for planned in StepPlanner(mixture, config, worker=worker, num_workers=workers).plan(at):
                    work = planned.work
                    if first + work.step >= case.num_steps:
                        step = case.num_steps
                        break
                    segments = work.segments
                    arrays += [
                        [group, worker, first + work.step, *work.micro_batches],
                        [ord(letter) for letter in work.source],
                        *(work.bounds, segments.sample_ids, segments.starts, segments.lengths),
                        *(np.asarray(work.patches, np.int64), np.asarray(work.epochs, np.int64)),
                    ]
                    step, last = first + work.step + 1, planned.after or last
                if step == first or not isinstance(last, Cursor) or workers > 1:
                    break
                at = last
    return array_digest(arrays)


def mixture_digests(case: MixtureCase, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the packs from the start of a run, and from a state on, in each world.

    The start is that of 67b50f60, whose weights were shares of packs.
    """
    mixture = mixture_of(case)
    start = mixture.adopt(dataclasses.replace(mixture.start(), shares=""))
    found = {"from the start": planned_digest(mixture, start, case, World(), 1)}
    cursor = mixture.adopt(Cursor.from_dict(state))
    names = [*MIXTURE_WORLDS][: None if len(case.sources) < 70 else 1]  # seventy sources take long
    for name in names:
        world, workers = MIXTURE_WORLDS[name]
        found[f"from the state on, {name}"] = planned_digest(mixture, cursor, case, world, workers)
    return found
