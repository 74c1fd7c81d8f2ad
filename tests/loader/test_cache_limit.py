"""A limited cache lets go of what the plan needs last, whoever of a node downloads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.loader.delivery import PlanDelivery
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.plan.lengths import Lengths
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig
from lmms_stream.plan.windows import WindowedMixture
from lmms_stream.storage.local import LocalStorage
from lmms_stream.tools.simulate.cluster import Cluster
from lmms_stream.tools.simulate.run import simulate
from lmms_stream.tools.simulate.sources import Sources
from lmms_stream.types import World

from ..conftest import write_tokens
from ..rounds import LONG, rounds
from ..simulate.accesses import accesses, least_downloads
from ..simulate.cluster_of_loaders import open_node

GLOBAL_BATCH, EPOCHS = 8, 3
ORDER = OrderConfig(seed=1, num_canonical_nodes=1, shuffle_block_size=300)
LIMITS = [0.25, 0.5, 0.9] if LONG else [0.5]
NUM_SAMPLES = rounds(6000, 15000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=NUM_SAMPLES)
    return folder


def open_limited(folder: Path, cache: Path, *, part: float) -> PackedDataset:
    sizes = [info.size for info in open_node(LocalStorage(folder), cache, order=ORDER).shard_infos]
    return open_node(LocalStorage(folder), cache, order=ORDER, cache_limit=int(part * sum(sizes)))


def downloads(cache: Path) -> int:
    return sum(line.endswith(".mds") for line in cache.with_suffix(".log").read_text().split())


def by_least_recent_use(shards: Sequence[int], sizes: Sequence[int], limit: int) -> int:
    kept: OrderedDict[int, int] = OrderedDict()
    missed = 0
    for shard in shards:
        if shard not in kept:
            missed += 1
            while sum(kept.values()) + sizes[shard] > limit:
                kept.popitem(last=False)
        kept[shard] = sizes[shard]
        kept.move_to_end(shard)
    return missed


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("part", LIMITS)
@pytest.mark.parametrize(("ranks", "num_workers"), [(1, 0), (2, 2)] if LONG else [(1, 0)])
def test_epochs_download_hardly_more_than_is_possible_and_as_foretold(
    folder: Path, tmp_path: Path, part: float, ranks: int, num_workers: int
) -> None:
    dataset = open_limited(folder, tmp_path / "cache", part=part)
    worlds = [World(rank=rank, world_size=ranks) for rank in range(ranks)]
    loaders = [
        PackedLoader(dataset, global_batch=GLOBAL_BATCH, world=world, num_workers=num_workers) for world in worlds
    ]
    for _ in range(EPOCHS):
        for _ in zip(*loaders, strict=True):
            pass
    found = downloads(tmp_path / "cache")
    shards, _ = accesses(dataset, global_batch=GLOBAL_BATCH, epochs=EPOCHS)
    sizes = [info.size for info in dataset.shard_infos]
    limit = dataset.fetch.limit_bytes
    assert limit is not None
    least = len(least_downloads(shards, sizes, limit))
    assert least <= found <= 1.1 * least
    assert found < 0.9 * by_least_recent_use(shards, sizes, limit)
    cluster = Cluster(gpus_per_node=ranks, num_workers=num_workers, cache=limit)
    told = simulate(dataset, cluster, global_batch=GLOBAL_BATCH, epochs=EPOCHS)
    assert found == pytest.approx(told.num_downloads, rel=0.02)


def test_windows_need_room_for_their_packs_and_then_download_each_shard_once_as_foretold(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"cache_limit is .* bytes, .* or the steps of balance") as refused:
        PackedLoader(open_limited(folder, tmp_path / "cache", part=0.3), global_batch=GLOBAL_BATCH, balance=20)
    sizes = [info.size for info in open_node(LocalStorage(folder), tmp_path / "cache", order=ORDER).shard_infos]
    least = int(str(refused.value).split("raise it to ")[1].split(",")[0])
    assert least < 0.9 * sum(sizes)
    dataset = open_node(LocalStorage(folder), tmp_path / "cache", order=ORDER, cache_limit=least)
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH, balance=20)
    for _ in loader:
        pass
    assert downloads(tmp_path / "cache") == len(sizes)
    cluster = Cluster(gpus_per_node=1, num_workers=0, cache=least)
    told = simulate(replace(Sources.of(dataset), balance=20), cluster, global_batch=GLOBAL_BATCH)
    assert told.num_downloads == len(sizes)
    assert told.least_cache_bytes == least


def test_a_rank_that_is_an_epoch_behind_finds_its_shards_while_it_reads_them(folder: Path, tmp_path: Path) -> None:
    """Its shards are used, so the cache keeps them, whatever the rank before it will need."""
    dataset = open_limited(folder, tmp_path / "cache", part=0.5)
    ahead, behind = (
        iter(PackedLoader(dataset, global_batch=GLOBAL_BATCH, world=World(rank=rank, world_size=2))) for rank in (0, 1)
    )
    first = [batch.sample_ids.tolist() for batch in ahead]
    second = [batch.sample_ids.tolist() for batch in behind]
    assert sorted(sample for batch in first + second for sample in batch) == list(range(NUM_SAMPLES))
    assert downloads(tmp_path / "cache") <= 2 * len(dataset.shard_infos)


def test_batches_are_those_without_a_limit_and_from_a_resume_in_the_middle(folder: Path, tmp_path: Path) -> None:
    free = open_node(LocalStorage(folder), tmp_path / "free", order=ORDER)
    expected = [batch.sample_ids.tolist() for batch in PackedLoader(free, global_batch=GLOBAL_BATCH)]
    first = PackedLoader(open_limited(folder, tmp_path / "cache", part=0.5), global_batch=GLOBAL_BATCH)
    found = [batch.sample_ids.tolist() for batch, _ in zip(first, range(len(expected) // 16 * 8), strict=False)]
    state = first.state_dict()
    again = PackedLoader(open_limited(folder, tmp_path / "cache", part=0.5), global_batch=GLOBAL_BATCH)
    again.load_state_dict(state)
    found = found[: state["step"] * GLOBAL_BATCH] + [batch.sample_ids.tolist() for batch in again]
    assert found == expected
    assert downloads(tmp_path / "cache") <= len(free.shard_infos) + 3  # an epoch needs each shard once


def test_without_a_plan_what_was_used_least_recently_gives_way(folder: Path, tmp_path: Path) -> None:
    dataset = open_limited(folder, tmp_path / "cache", part=0.5)
    starts = np.cumsum(dataset.samples_per_shard) - dataset.samples_per_shard
    for shard in range(len(starts)):
        dataset.read([int(starts[shard])])
        dataset.read([0])  # the first is always in use
    names = {path.name for path in (tmp_path / "cache").glob("*.mds")}
    infos = dataset.shard_infos
    assert names == {infos[0].name, *(info.name for info in infos[len(infos) - len(names) + 1 :])}


def test_workers_that_read_packs_ahead_read_the_samples_of_these_packs_ahead() -> None:
    def plan(num_samples: int, num_tokens: int) -> PackPlan:
        lengths = Lengths(lengths=np.full(num_samples, num_tokens), content_hash=f"{num_samples} {num_tokens}")
        return PackPlan(lengths, [num_samples], order=ORDER, packing=PackingConfig(packing_length=120))

    mixture = WindowedMixture({"pairs": plan(600, 60), "triples": plan(900, 40)})
    delivery = PlanDelivery(mixture, StepConfig(global_batch=4, world=World()))
    assert [delivery.samples_ahead(name, 7) for name in ("pairs", "triples")] == [14, 21]
