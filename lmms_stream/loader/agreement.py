"""Comparison of the settings that decide the packs of each rank, before the first batch. settings -> ConfigError.

The trainer gathers the settings of all ranks. In other loops a rank compares with the first rank's settings, in the
store of torch's process group. No rank waits for another, unless the rank has loaded a state after a comparison:
ranks without a new state do not compare again. At the end of an iteration a rank compares in the same way the steps at
which iterations began: a rank that read a batch separately continued after the batch. Without a process group a rank
checks only the environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from ..errors import ConfigError, LmmsStreamError, WorkerError
from ..plan.cursor import differing_fields
from ..types import World
from ..version import VERSION

_NUMBERS = count()  # numbers of this process's comparisons: all ranks compare loaders in the same order
_POLL_S = 0.05
_KEY = "lmms_stream/agreement"
_STEPS = "the steps where iterations began"
_REMEDIES = {
    "lmms_stream": "install one version on all nodes",
    "world_size": "give the loader of each rank the same world, or a loader of one rank world=World()",
    "ranks_per_node": "give the loader of each rank world=World(rank=…, world_size=…, ranks_per_node=[…]), alike",
    "cursor": "load the same state on all ranks",
    _STEPS: "look at a batch on all ranks, or with a loader of its own that has world=World()",
}


class Agreement:
    """Comparison of a loader's settings between ranks, once per loaded state."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._num_states = 0  # number of loaded states
        self._is_done = False
        self._is_renewed = False
        self._began_at: list[int] = []  # since the last end
        self._num_ended = 0

    def renew(self) -> None:
        """Let the next iteration compare again, after loading a state."""
        self._num_states += 1
        self._began_at, self._num_ended = [], 0
        self._is_renewed |= self._is_done
        self._is_done = False

    def gather(self, settings: Mapping[str, Any], world: World, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Compare the settings of all ranks; all ranks call this. gather: returns the values of all ranks, in order.

        Raises ConfigError on all ranks if settings differ.
        """
        first, *others = gather(_described(settings, world))
        for rank, each in enumerate(others, 1):
            _check_equal(first, each, ranks=(0, rank))
        self._is_done = True

    def compare(self, settings: Mapping[str, Any], world: World) -> None:
        """Compare with the first rank that called this.

        Raises ConfigError if settings differ, if nodes are a guess, or, after the time limit of the process group's
        store, if only some ranks have loaded a state since the last comparison.
        """
        if self._is_done or world.world_size == 1 or get_worker_info() is not None:
            return
        if not _has_group(world):
            world.refuse_guess()
            self._is_done = True
            return
        if self._number is None:
            self._number = next(_NUMBERS)
        mine = _described(settings, world)
        key = f"{_KEY}/{self._number}/{self._num_states}"
        with _group_store() as store:
            rank, first = json.loads(store.compare_set(key, "", json.dumps([world.rank, mine])))
            _check_equal(first, mine, ranks=(rank, world.rank))
            num_here = store.add(f"{key}/here", 1) if self._num_states else 0
            if self._is_renewed:
                _wait_for_all(store, f"{key}/here", num_here, world.world_size)
        self._is_done, self._is_renewed = True, False

    def begin(self, step: int) -> None:
        """Note that an iteration begins at a step."""
        if step not in self._began_at:
            self._began_at.append(step)

    def end(self, world: World) -> None:
        """Compare the first steps of iterations with the first rank to reach this end; ConfigError if steps differ.

        Does nothing without an earlier comparison of settings in the store, or if the store no longer answers because
        its rank has ended.
        """
        began_at, self._began_at = self._began_at, []
        self._num_ended += 1
        if self._number is None:
            return
        key = f"{_KEY}/{self._number}/{self._num_states}/ended/{self._num_ended}"
        rank, first = world.rank, began_at
        with suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            rank, first = json.loads(store.compare_set(key, "", json.dumps([rank, first])))
        _check_equal({_STEPS: first}, {_STEPS: began_at}, ranks=(rank, world.rank))


@contextmanager
def _group_store() -> Iterator[Any]:
    """Yield the store of the process group; WorkerError if the store does not answer."""
    try:
        yield dist.distributed_c10d._get_default_store()
    except LmmsStreamError:
        raise
    except RuntimeError as error:
        raise WorkerError(
            f"the store of the process group did not answer ({' '.join(str(error).split())[:200]}): look for the first "
            "error of the other ranks"
        ) from error


def _wait_for_all(store: Any, key: str, num_here: int, num_ranks: int) -> None:
    """Return when all ranks are counted in the key, or raise ConfigError after the time limit of the store."""
    limit_s = store.timeout.total_seconds()
    deadline = time.monotonic() + limit_s
    while num_here < num_ranks:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{num_here} of {num_ranks} ranks resume from a state loaded after the first batch, and the others did "
                f"not within {limit_s:g} s, so packs would be read twice or never: load the same state on all ranks"
            )
        time.sleep(_POLL_S)
        num_here = store.add(key, 0)


# Collectives of all ranks of a world.


def sum_over_ranks(number: int, world: World) -> int:
    """Return the sum of a number of each rank; ranks of a replicated group have the same number, which counts once."""
    if world.world_size == 1:
        return number
    _check_group(world)
    group = dist.group.WORLD
    assert group is not None
    on_cpu = torch.device("cpu") in group._device_types
    total = torch.tensor(number, device="cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device()))
    dist.all_reduce(total)
    return int(total) // world.replication


def gather_over_ranks(value: Any, world: World) -> list[Any]:
    """Return the picklable values of all ranks, in order."""
    if world.world_size == 1:
        return [value]
    _check_group(world)
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value)
    return values


def _has_group(world: World) -> bool:
    """Return whether this process has a process group of the ranks of a world."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world.world_size


def _check_group(world: World) -> None:
    if not _has_group(world):
        raise ConfigError(
            f"the loader is one of {world.world_size} ranks, and this process has no process group of these ranks: "
            "call torch.distributed.init_process_group first, or give the loader world=World()"
        )


def _described(settings: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the settings as JSON values, with the values that decide every loader's deal."""
    named = {
        "lmms_stream": VERSION,
        "world_size": world.world_size,
        "replication": world.replication,
        "ranks_per_node": [groups * world.replication for groups in world.group_nodes],
        **settings,
    }
    described: dict[str, Any] = json.loads(json.dumps(named, default=int))  # NumPy's integers, too
    return described


def _check_equal(first: Mapping[str, Any], other: Mapping[str, Any], *, ranks: tuple[int, int]) -> None:
    for name in [*first, *(each for each in other if each not in first)]:
        one, two = first.get(name), other.get(name)
        if one == two:
            continue
        if name == "plans":
            one, two, name = _differing_plans(one, two)
        remedy = _REMEDIES.get(name, "give the loader of each rank the same dataset and settings")
        raise ConfigError(
            f"ranks do not agree on {name}: rank {ranks[0]} has {_shown(one)}, rank {ranks[1]} has {_shown(two)}, so "
            f"packs would be read twice or never: {remedy}"
        )


def _differing_plans(one: Any, two: Any) -> tuple[Any, Any, str]:
    """Return both fingerprints of the first source with differing plans, and a name with the differing settings."""
    one, two = one or {}, two or {}
    if list(one) != list(two):
        return list(one), list(two), "the sources"
    source = next(name for name in one if one[name] != two[name])
    differing = differing_fields(one[source], two[source])
    return one[source], two[source], f"the plan of {source!r}, which differs in {differing}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "…"
