"""Packs of samples with media, from a plan and in lanes: the same, with the patches that each has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lmms_stream.errors import DataError
from lmms_stream.loader.collate import join
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.media_memory import SharedBlocks
from lmms_stream.loader.wire import WireBatch, from_wire, to_wire
from lmms_stream.mds.core import PackingMode
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.processors.base import Measured
from lmms_stream.types import Batch, Sample, World

from ..media_words import MediaWords, chat, mixed_chats, write_chats
from ..rounds import rounds

NUM_LANES = 4
LIMIT = 128

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Of every third the facts of the media are not stored."""
    stored, bare = mixed_chats(400, seed=3), mixed_chats(400, seed=3, facts=False)
    return [bare[number] if number % 3 == 0 else stored[number] for number in range(400)]


@pytest.fixture(scope="module")
def folder(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chats(tmp_path_factory.mktemp("chats") / "data", samples, size_limit=1 << 14)
    index_dataset(str(folder), MediaWords(), num_workers=1)
    return folder


def open_dataset(folder: Path, mode: PackingMode, overlong: Overlong) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        folder,
        processor=MediaWords(),
        packing=PackingConfig(packing_length=LIMIT, window=64, overlong=overlong),
        packing_mode=mode,
        order=OrderConfig(seed=5, num_canonical_nodes=NUM_LANES, shuffle_block_size=60),
    )


def batches_of(dataset: PackedStreamingDataset, count: int, *, num_workers: int = 0) -> list[Batch]:
    found: list[Batch] = []
    loader = PackedLoader(dataset, global_batch=NUM_LANES, world=World(), num_workers=num_workers, timeout_s=60)
    for batch in loader:
        found.append(batch)
        if len(found) == count:
            break
    return found


def shown(batch: Batch) -> tuple[list[int], list[int], int]:
    return batch.sample_ids.tolist(), batch.cu_seqlens.tolist(), batch.num_patches


@pytest.mark.parametrize(
    ("overlong", "num_workers"), [("drop", 0), ("truncate", 0), ("split", 2), *rounds([], [("split", 0), ("drop", 2)])]
)
def test_plan_and_lanes_give_the_same_packs_of_media(
    folder: Path, samples: list[Sample], overlong: Overlong, num_workers: int
) -> None:
    plan, lanes = (open_dataset(folder, mode, overlong) for mode in ("plan", "lanes"))
    measured = [each for each in MediaWords().measure_media(samples) if isinstance(each, Measured)]
    # In rounds of all canonical nodes, until one has no packs left: lanes then begin its next epoch.
    nodes = plan.plan.packs(0, 0, plan.plan.num_packs(0)).canonical_nodes
    count = NUM_LANES * int(np.bincount(nodes).min())
    from_plan = batches_of(plan, count, num_workers=num_workers)
    from_lanes = batches_of(lanes, count, num_workers=num_workers)
    assert len(from_plan) == len(from_lanes) == count > 20
    for first in range(0, count, NUM_LANES):  # the plan deals a step's packs by cost, lanes come in turn
        step = slice(first, first + NUM_LANES)
        assert sorted(map(shown, from_plan[step])) == sorted(map(shown, from_lanes[step]))
    for batch in [*from_plan, *from_lanes]:
        assert batch.num_patches == sum(measured[number].patches for number in set(batch.sample_ids.tolist()))
        lengths = np.diff(batch.cu_seqlens.numpy())
        for number, length in zip(batch.sample_ids.tolist(), lengths.tolist(), strict=False):
            if measured[number].patches:  # never cut
                assert length == measured[number].tokens
    too_long = [each for each in measured if each.tokens > LIMIT]
    assert plan.plan.num_overlong(0) == len(too_long)
    assert plan.plan.num_overlong_media(0) == sum(each.patches > 0 for each in too_long) > 0


def test_a_lane_reads_the_media_of_those_samples_alone_that_lack_facts(folder: Path, samples: list[Sample]) -> None:
    dataset = open_dataset(folder, "lanes", "drop")
    batches_of(dataset, 40)
    reader = dataset.core.measure_reader
    assert set(reader[1]) == {"messages"}
    assert set(dataset.core.pack_reader[1]) == {"messages", "media"}


def test_an_error_of_a_sample_in_a_lane_names_it(tmp_path: Path) -> None:
    folder = write_chats(tmp_path / "data", [chat(5), chat(3, [(5, 5, 1)]), chat(2)])
    dataset = PackedStreamingDataset(
        folder,
        processor=MediaWords(),
        packing=PackingConfig(packing_length=LIMIT),
        packing_mode="lanes",
        order=OrderConfig(num_canonical_nodes=1),
    )
    with pytest.raises(DataError, match=r"^sample 1 of .*: an image of 5x5 pixels is too small: leave it out$"):
        batches_of(dataset, 1)


def test_packs_that_are_joined_have_the_patches_of_all(folder: Path) -> None:
    batches = batches_of(open_dataset(folder, "plan", "drop"), 8)
    assert join(batches).num_patches == sum(batch.num_patches for batch in batches) > 0
    for batch in batches:
        made = to_wire(batch, SharedBlocks())
        assert isinstance(made, WireBatch)
        assert from_wire(made).num_patches == batch.num_patches
