"""Media of samples and positions on axes of their own, from a processor to the batch."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.loader.collate import collate, join
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.media_memory import SharedBlocks
from lmms_stream.loader.wire import WireBatch, from_wire, to_wire
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Batch, Processed, Sample, World

from ..conftest import write_tokens


def seen(num_tokens: int, *, num_images: int = 1, value: float = 0.0) -> Processed:
    """A sample whose images have two patches each; its positions on three axes are 10 to 12 times the tokens'."""
    at = np.arange(num_tokens)
    media: dict[str, Any] = {}
    if num_images:
        media["pixel_values"] = np.full((2 * num_images, 5), value, np.float32)
        media["image_grid_thw"] = np.tile([[1, 1, 2]], (num_images, 1))
    return {
        "input_ids": at + 10,
        "labels": at + 10,
        "position_ids": np.stack([at * 10, at * 11, at * 12]),
        "media": media,
    }


def same(one: Batch, two: Batch) -> bool:
    assert one.inputs.keys() == two.inputs.keys()
    pairs = [(one.inputs[name], two.inputs[name]) for name in one.inputs]
    pairs += [(getattr(one, each.name), getattr(two, each.name)) for each in fields(Batch) if each.name != "inputs"]
    tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
    assert all(a.dtype == b.dtype for a, b in tensors)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_media_stand_one_after_another_in_the_order_of_tokens() -> None:
    video = {**seen(2, num_images=0), "media": {"pixel_values_videos": np.ones((4, 5), np.float32)}}
    batch = collate([seen(3, value=1), seen(2, num_images=0), video, seen(4, num_images=2, value=2)], range(4))
    assert batch.inputs["pixel_values"][:, 0].tolist() == [1, 1, 2, 2, 2, 2]
    assert batch.inputs["pixel_values"].dtype == torch.float32
    assert batch.inputs["image_grid_thw"].tolist() == [[1, 1, 2]] * 3
    assert batch.inputs["pixel_values_videos"].shape == (4, 5)
    assert collate([seen(3, num_images=0)], [0]).inputs == collate([], []).inputs == {}


def test_positions_that_restart_stand_before_those_of_the_family() -> None:
    batch = collate([seen(3), seen(2)], range(2), pad_to=7)
    assert batch.position_ids.shape == (4, 1, 7)
    assert batch.position_ids[:, 0].tolist() == [
        [0, 1, 2, 0, 1, 0, 1], [0, 10, 20, 0, 10, 0, 1], [0, 11, 22, 0, 11, 0, 1], [0, 12, 24, 0, 12, 0, 1],
    ]  # fmt: skip
    text = {"input_ids": np.arange(2), "labels": np.arange(2)}
    assert collate([seen(2), text], range(2)).position_ids[:, 0, 2:].tolist() == [[0, 1]] * 4
    assert collate([{**text, "position_ids": np.zeros((0, 2), np.int64)}], [0]).position_ids.tolist() == [[0, 1]]


def test_packs_of_text_and_of_media_are_joined() -> None:
    text = collate([{"input_ids": np.arange(2), "labels": np.arange(2)}], [7])
    joined = join([text, collate([seen(3, value=1)], [8], pad_to=4), collate([], []), collate([seen(2, value=2)], [9])])
    assert joined.position_ids.shape == (4, 1, 10)
    assert joined.position_ids[0, 0].tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 0, 1]
    assert joined.position_ids[3, 0].tolist() == [0, 1, 0, 12, 24, 0, 0, 1, 0, 12]
    assert joined.inputs["pixel_values"][:, 0].tolist() == [1, 1, 2, 2]
    assert joined.sample_ids.tolist() == [7, 8, 9]
    of_one_axis = collate([{**seen(2), "position_ids": np.zeros((1, 2), np.int64)}], [1])
    with pytest.raises(
        ConfigError, match="packs with 1 and 3 axes of positions cannot be one sequence: use processors"
    ):
        join([of_one_axis, collate([seen(2)], [2])])


def test_media_go_where_the_batch_goes() -> None:
    batch = collate([seen(3, value=1)], [0], source="charts", step=4)
    assert same(batch.to(torch.device("cpu")), batch)
    assert batch.to(torch.device("meta")).inputs["pixel_values"].is_meta


@pytest.mark.parametrize("samples", [[seen(3, value=1), seen(2)], [seen(3, num_images=0)], [], [{**seen(2)}]])
def test_a_batch_with_media_crosses_from_workers_as_it_is(samples: list[Processed]) -> None:
    batch = collate(samples, range(len(samples)), pad_to=6, source="charts", step=4, micro_batch=2)
    wire = to_wire(batch, SharedBlocks())
    assert isinstance(wire, WireBatch)
    assert same(from_wire(wire), batch)
    far = [{**sample, "position_ids": sample["position_ids"] + (1 << 31)} for sample in samples]
    if far:
        assert isinstance(to_wire(collate(far, range(len(samples))), SharedBlocks()), Batch)  # no int32 holds it


def test_what_no_batch_would_hold_is_an_error_that_names_it() -> None:
    with pytest.raises(
        ConfigError, match="a processor gives 'pixel_values', which is not a part of batches: put tensors for"
    ):
        collate([{**seen(2), "pixel_values": np.zeros(3)}], [0])
    with pytest.raises(
        ConfigError, match=r"gives media 'pixel_values' as float32\[n, 3\] and float32\[n, 5\], which can"
    ):
        collate([seen(2), {**seen(2), "media": {"pixel_values": np.zeros((2, 3), np.float32)}}], [0, 1])
    with pytest.raises(ConfigError, match="gives media 'fps' as single values, which cannot be concatenated"):
        collate([{**seen(2), "media": {"fps": 2.0}}], [0])
    for positions in (np.zeros((3, 5), np.int64), np.zeros((2, 2), np.int64), np.zeros((3, 2)), np.arange(2)):
        shape = re.escape(f"{positions.dtype}{list(positions.shape)}")
        with pytest.raises(ConfigError, match=f"position_ids {shape} for a sample of 2 tokens, and others of the pack"):
            collate([seen(4), {**seen(2), "position_ids": positions}], [0, 1])


class Seeing(TokensProcessor):
    """Tokens as they are; a sample of more than 30 has an image, unless `is_text`."""

    is_text = False

    def process(self, sample: Sample) -> Processed:
        tokens = super().process(sample)
        length = len(tokens["input_ids"])
        num_images = 0 if self.is_text else int(length > 30)
        return {**tokens, **{name: seen(length, num_images=num_images)[name] for name in ("position_ids", "media")}}

    fill_packs = None  # type: ignore[assignment]


class Strange(Seeing):
    def process(self, sample: Sample) -> Processed:
        return {**super().process(sample), "second_per_grid_ts": np.ones(1)}


class Text(Seeing):
    is_text = True


def loader_of(
    folder: Path, processor: Any, *, packing_length: int, overlong: Any, num_workers: int = 0
) -> PackedLoader:
    dataset = PackedStreamingDataset(
        folder,
        processor=processor,
        packing=PackingConfig(packing_length=packing_length, overlong=overlong),
        order=OrderConfig(num_canonical_nodes=1),
    )
    return PackedLoader(dataset, global_batch=2, world=World(), num_workers=num_workers, timeout_s=60)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=60)
    return folder


def test_workers_give_the_batches_that_the_loader_makes(tokens: Path) -> None:
    here, there = (
        list(loader_of(tokens, Seeing(), packing_length=256, overlong="drop", num_workers=workers))
        for workers in (0, 2)
    )
    assert len(here) > 5
    assert all(same(one, two) for one, two in zip(here, there, strict=True))
    assert sum(len(batch.inputs.get("pixel_values", ())) for batch in here) > 20


def test_a_key_of_a_processor_is_named_with_its_class(tokens: Path) -> None:
    with pytest.raises(ConfigError, match="Strange gives 'second_per_grid_ts', which is not a part of batches"):
        list(loader_of(tokens, Strange(), packing_length=256, overlong="drop"))


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_a_sample_with_media_is_never_cut(tokens: Path, overlong: Any) -> None:
    with pytest.raises(
        DataError, match=r"sample \d+ of .*: it has media and \d+ tokens, more than a pack holds, and pic"
    ):
        list(loader_of(tokens, Seeing(), packing_length=32, overlong=overlong))


def test_positions_of_pieces_of_a_text_begin_at_0(tokens: Path) -> None:
    for batch in loader_of(tokens, Text(), packing_length=32, overlong="split"):
        if not len(batch.sample_ids):
            continue  # the padding of a short last step
        starts = batch.cu_seqlens[:-1].long()
        assert not batch.position_ids[:, 0, starts].any()
        assert torch.equal(batch.position_ids[1, 0], batch.position_ids[0, 0] * 10)
