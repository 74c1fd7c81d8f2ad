"""Samples with media that are padding: no tensor of theirs is left in the batch, and all others are as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import DataError
from lmms_stream.loader.bad_samples import BadSamples
from lmms_stream.loader.drop_list import read_left_out
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.media_memory import FREE, LENT, PackMemory, SharedBlocks
from lmms_stream.mds.core import PackingMode
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.types import Batch, Processed, World

from ..media_words import MediaWords, chat, write_chats
from ..processors.tiny_sound import clip, save_sound_processor
from ..processors.tiny_vlm import film, picture, save_processor, stored
from ..rounds import LONG

NUM_SAMPLES = 18
BAD = BadSamples(on_bad_sample="quarantine")


def images(number: int) -> list[tuple[str, bytes]]:
    return [("image", picture(60 + 5 * number, 70, seed=number))] * (number % 3)


def videos(number: int) -> list[tuple[str, bytes]]:
    return [("video", film(64, 48, num_frames=4 + number))] if number % 2 else images(number)


def sounds(number: int) -> list[tuple[str, bytes]]:
    return [("audio", clip(6000 + 900 * number, seed=number))] if number % 3 else []


FAMILIES: dict[str, tuple[Callable[..., Any], Callable[[int], list[tuple[str, bytes]]]]] = {
    "qwen2_5_vl": (save_processor, videos),
    "qwen3_vl": (save_processor, images),
    "qwen2_audio": (save_sound_processor, sounds),
}


def write_media(folder: Path, media: Callable[[int], list[tuple[str, bytes]]], *, bad: frozenset[int]) -> Path:
    """Chats with media. bad: those whose media are zeros, and whose facts are as they were."""
    samples = []
    for number in range(NUM_SAMPLES):
        sample = stored(("user", ["What is it? ", *media(number)]), ("assistant", f"It is {number}, or no more."))
        if number in bad:
            sample["media"] = bytes(len(sample["media"]))
        samples.append(sample)
    return write_chats(folder, samples, size_limit=1 << 26)


def open_dataset(folder: Path, processor: Any, *, mode: PackingMode = "plan", length: int = 1024) -> Any:
    return PackedStreamingDataset(
        folder,
        processor=processor,
        packing=PackingConfig(packing_length=length, overlong="drop", window=8),
        packing_mode=mode,
        order=OrderConfig(num_canonical_nodes=2),
    )


CASES = [("qwen3_vl", 1), *([("qwen2_5_vl", 0), ("qwen2_audio", 0)] if LONG else [])]


@pytest.mark.parametrize(("family", "num_workers"), CASES)
def test_nothing_of_the_media_of_bad_samples_is_left_in_a_batch(family: str, num_workers: int, tmp_path: Path) -> None:
    save, media = FAMILIES[family]
    save(tmp_path / "processor", family)
    processor = MultimodalProcessor.from_pretrained(str(tmp_path / "processor"))
    bad = frozenset([1, 4, 5, 11])
    good_folder = write_media(tmp_path / "good", media, bad=frozenset())
    folder = write_media(tmp_path / "bad", media, bad=bad)
    for each in (good_folder, folder):
        index_dataset(str(each), processor, num_workers=1)
    good = open_dataset(good_folder, processor)
    plain = list(PackedLoader(good, global_batch=2, num_workers=0))
    loader = PackedLoader(open_dataset(folder, processor), global_batch=2, num_workers=num_workers, bad=BAD)
    found = list(loader)
    assert {each.sample_id for each in loader.left_out.samples} == bad
    assert len(found) == len(plain)
    for batch, expected in zip(found, plain, strict=True):
        kept = [each for each in batch.sample_ids.tolist() if each not in bad]
        check_media(batch, [processor.process(good[each]) for each in kept])
        check_tokens(batch, expected, bad=bad)


def check_media(batch: Batch, kept: list[Processed]) -> None:
    """A batch has the media of these samples alone."""
    names = {name for each in kept for name in each.get("media") or {}}
    assert set(batch.inputs) == names
    for name in names:
        arrays = [each["media"][name] for each in kept if name in (each.get("media") or {})]
        assert torch.equal(batch.inputs[name], torch.from_numpy(np.concatenate(arrays)))


def check_tokens(batch: Batch, expected: Batch, *, bad: frozenset[int]) -> None:
    """Padding stands for bad samples, placeholders of media among it, and its positions count up on all axes."""
    assert batch.sample_ids.tolist() == expected.sample_ids.tolist()
    assert batch.sample_bounds == expected.sample_bounds
    own, others = (each.position_ids.reshape(-1, each.num_tokens) for each in (batch, expected))
    for sample_id, (start, stop) in zip(batch.sample_ids.tolist(), batch.sample_bounds, strict=True):
        at = slice(start, stop)
        if sample_id in bad:
            assert not batch.input_ids[0, at].any()
            assert set(batch.labels[0, at].tolist()) == {-100}
            assert (own[:, at] == torch.arange(stop - start)).all()
            continue
        assert torch.equal(batch.input_ids[0, at], expected.input_ids[0, at])
        assert torch.equal(batch.labels[0, at], expected.labels[0, at])
        assert torch.equal(own[:, at], others[: len(own), at])


def test_shared_memory_of_packs_whose_media_are_incomplete_or_small_is_free_again() -> None:
    blocks = SharedBlocks()
    memory = PackMemory(blocks, 10)
    memory("pixel_values", (3, 4), np.float32)  # of a sample that failed then
    kept = memory("pixel_values", (2, 4), np.float32)
    assert memory.joined("pixel_values", [kept]) is None
    assert [each.state[0] for each in blocks._blocks] == [LENT]
    memory.give_back()
    assert [each.state[0] for each in blocks._blocks] == [FREE]
    memory = PackMemory(blocks, 5)
    kept = memory("pixel_values", (5, 4), np.float32)
    kept[:] = 3
    joined = memory.joined("pixel_values", [kept])
    assert joined is not None
    memory.give_back()
    assert [each.state[0] for each in blocks._blocks] == [LENT]  # until the tensor is gone, or was copied
    copied = blocks.copied(torch.from_numpy(joined))
    joined[:] = 0
    assert copied.tolist() == [[3] * 4] * 5
    assert [each.state[0] for each in blocks._blocks] == [FREE]


def write_unmeasured(folder: Path) -> Path:
    """Chats without stored facts: of two the image is too small to be measured, of one its size is no number."""
    samples = [chat(5 + number % 9, [(28, 56, 1)] * (number % 3), facts=False) for number in range(120)]
    for number in (13, 57):
        samples[number] = chat(4, [(5, 5, 1)], facts=False)
    samples[88] = {**samples[88], "media": b"404 Not Found".ljust(len(samples[88]["media"]))}
    return write_chats(folder, samples)


UNMEASURED = {13, 57, 88}


def lanes_loader(dataset: Any, *, rank: int = 0, world_size: int = 1, num_workers: int = 0, **options: Any) -> Any:
    world = World(rank=rank, world_size=world_size)
    return PackedLoader(dataset, global_batch=2, world=world, num_workers=num_workers, **options)


def taken(loader: PackedLoader, count: int) -> tuple[list[list[int]], list[int]]:
    """The samples of so many packs, and those that were passed over on the way."""
    packs, passed_over = [], []
    for batch in loader:
        packs.append(batch.sample_ids.tolist())
        passed_over += [each.sample_id for each in batch.left_out]
        if len(packs) == count:
            break
    return packs, passed_over


def test_samples_that_lanes_cannot_measure_take_no_room_on_any_ranks(tmp_path: Path) -> None:
    folder = write_unmeasured(tmp_path / "data")
    dataset = open_dataset(folder, MediaWords(), mode="lanes", length=64)
    with pytest.raises(DataError, match=r"sample (13|57) of .*too small"):
        taken(lanes_loader(dataset), 40)
    bad = BadSamples(on_bad_sample="quarantine", folder=str(tmp_path / "left_out"))
    alone = lanes_loader(dataset, bad=bad)
    whole, passed_over = taken(alone, 40)
    assert not {each for ids in whole for each in ids} & UNMEASURED
    assert sorted(passed_over) == sorted(UNMEASURED)  # each is told once
    assert read_left_out(tmp_path / "left_out", alone.identities).left_out.samples == alone.left_out.samples
    in_workers, passed_over = taken(lanes_loader(dataset, num_workers=2, bad=bad), 40)
    assert in_workers == whole
    assert {*passed_over} == UNMEASURED  # by one worker, or in a later epoch by the other, too
    ranks = [taken(lanes_loader(dataset, rank=rank, world_size=2, bad=bad), 20) for rank in range(2)]
    assert [ids for step in zip(ranks[0][0], ranks[1][0], strict=True) for ids in step] == whole
    assert {*ranks[0][1], *ranks[1][1]} == UNMEASURED


def test_lanes_pass_over_dropped_samples_that_cannot_be_measured(tmp_path: Path) -> None:
    dataset = open_dataset(write_unmeasured(tmp_path / "data"), MediaWords(), mode="lanes", length=64)
    expected = taken(lanes_loader(dataset, bad=BAD), 40)[0]
    (tmp_path / "drop").write_text("".join(f"data:{each}\n" for each in sorted(UNMEASURED)))
    assert taken(lanes_loader(dataset, drop=str(tmp_path / "drop")), 40)[0] == expected
