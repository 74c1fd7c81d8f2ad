"""Packs made straight from the shards against packs made sample by sample; damaged shards end in named errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, LmmsStreamError, ShardError
from lmms_stream.loader.collate import collate
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.index import parse_index
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.reader import ShardReader
from lmms_stream.mds.shard import Shard
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.processors import token_kernels
from lmms_stream.processors.base import IGNORED_LABEL, PackFiller, SegmentError
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Batch, PackSegments, TokenRows
from numpy.typing import NDArray
from streaming import MDSWriter

from ..conftest import write_tokens
from ..rounds import in_long_rounds
from ..strategies import examples

Ids = NDArray[np.int64]

COLUMNS = {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
EXTRA = {"a_name": "str", "input_ids": "ndarray:int32", "kind": "int", "loss_spans": "ndarray:int32", "z": "bytes"}


class SampleBySample(TokensProcessor):
    """The same processor without fill_packs, so that the loader takes the other way."""

    fill_packs = None  # type: ignore[assignment]


def same(first: Batch, second: Batch) -> bool:
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "sample_ids"):
        a, b = getattr(first, name), getattr(second, name)
        if a.dtype != b.dtype or not np.array_equal(a.numpy(), b.numpy()):
            return False
    return (first.max_seqlen, first.num_loss_tokens) == (second.max_seqlen, second.num_loss_tokens)


@pytest.mark.parametrize("pad_to", [None, 300])
@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_a_loader_gives_what_it_gives_sample_by_sample(tmp_path: Path, overlong: Overlong, pad_to: int | None) -> None:
    write_tokens(tmp_path, num_samples=700, longest=400)
    assert isinstance(TokensProcessor(), PackFiller)
    assert not isinstance(SampleBySample(), PackFiller)

    def batches(processor: TokensProcessor) -> list[Batch]:
        packing = PackingConfig(packing_length=256, overlong=overlong)
        dataset = PackedStreamingDataset(tmp_path, processor=processor, packing=packing)
        return list(PackedLoader(dataset, global_batch=4, pad_to=pad_to))

    direct, by_sample = batches(TokensProcessor()), batches(SampleBySample())
    assert len(direct) == len(by_sample) > 50
    assert all(same(a, b) for a, b in zip(direct, by_sample, strict=True))


def fill(shard: Shard, indices: list[int], starts: list[int], lengths: list[int]) -> tuple[Ids, Ids]:
    """The rows of these segments, and the loss tokens of each."""
    rows = np.full((3, sum(lengths)), 99)
    at, begins, sizes, expected = (np.array(values) for values in (indices, starts, lengths, [-1] * len(indices)))
    segments = PackSegments(
        sample_ids=at, starts=begins, lengths=sizes, shard_ids=np.zeros_like(at), indices=at, expected=expected
    )
    addresses = np.full(len(indices), shard.address, np.int64)
    written = TokenRows(*(row[None] for row in rows))  # views
    return rows, TokensProcessor().fill_packs(shard.info.columns, addresses, segments, written)


@examples(80)
@given(data=st.data())
def test_any_segments_of_any_samples_are_written_as_process_and_collate_do(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    columns = data.draw(st.sampled_from([COLUMNS, EXTRA]))
    samples: list[dict[str, Any]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 600))
        bounds = st.lists(st.integers(0, length), min_size=2, max_size=6, unique=True)
        edges = sorted(data.draw(bounds))[: 2 * (data.draw(st.integers(1, 3)))]
        spans = np.array(edges[: len(edges) // 2 * 2], np.int32).reshape(-1, 2)
        tokens = np.array(data.draw(st.binary(min_size=4 * length, max_size=4 * length)), "S")
        ids = np.frombuffer(tokens.tobytes().ljust(4 * length, b"\1"), np.int32, length).copy()
        samples.append({"input_ids": ids, "loss_spans": spans, "a_name": "é" * length, "kind": -length, "z": b"z"})
    with MDSWriter(columns=columns, out=str(folder)) as writer:
        for sample in samples:
            writer.write(sample)
    (info,) = parse_index((folder / "index.json").read_bytes(), source="index.json")
    shard = Shard(folder / info.name, info)
    indices = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=8))
    starts = [data.draw(st.integers(0, len(samples[index]["input_ids"]) - 1)) for index in indices]
    lengths = [
        data.draw(st.integers(1, len(samples[index]["input_ids"]) - start))
        for index, start in zip(indices, starts, strict=True)
    ]
    rows, num_loss_tokens = fill(shard, indices, starts, lengths)
    whole = [TokensProcessor().process(shard[index]) for index in indices]
    parts = [
        {name: values[start : start + length] for name, values in sample.items()}
        for sample, start, length in zip(whole, starts, lengths, strict=True)
    ]
    expected = collate(parts, list(range(len(parts))))
    for row, name in zip(rows, ("input_ids", "labels", "position_ids"), strict=True):
        assert np.array_equal(row, getattr(expected, name)[0].numpy()), name
    assert num_loss_tokens.tolist() == [int(np.count_nonzero(part["labels"][1:] != IGNORED_LABEL)) for part in parts]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_tokens(folder, num_samples=8)
    return folder


@examples(300)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_bytes_never_leave_the_sample(
    small: Path, flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    (info,) = parse_index((small / "index.json").read_bytes(), source="index.json")
    data = bytearray((small / info.name).read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    path = tmp_path_factory.mktemp("damaged") / info.name
    path.write_bytes(data)
    try:
        shard = Shard(path, info)
    except ShardError:
        return
    for index in range(info.num_samples):
        try:
            processed = TokensProcessor().process(shard[index])
            length = len(processed["input_ids"])
        except LmmsStreamError:
            length = 0
        try:
            rows, _ = fill(shard, [index], [0], [max(length, 1)])
        except SegmentError:
            continue
        if length:  # both took it: then both read the same
            assert np.array_equal(rows[0], processed["input_ids"])


def test_spans_that_do_not_ascend_and_lengths_that_differ_are_named(tmp_path: Path) -> None:
    with MDSWriter(columns=COLUMNS, out=str(tmp_path)) as writer:
        for spans in ([[0, 3]], [[2, 3], [0, 1]], [[1, 9]], [[2, 2]]):
            writer.write({"input_ids": np.arange(1, 6, dtype=np.int32), "loss_spans": np.array(spans, np.int32)})
    (info,) = parse_index((tmp_path / "index.json").read_bytes(), source="index.json")
    shard = Shard(tmp_path / info.name, info)
    for index in (1, 2, 3):
        with pytest.raises(SegmentError, match="its loss spans lie outside the sample, or do not ascend") as error:
            fill(shard, [0, index], [0, 0], [5, 5])
        assert error.value.segment == 1
        with pytest.raises(LmmsStreamError, match="loss span"):
            TokensProcessor().process(shard[index])
    with pytest.raises(SegmentError) as error:
        fill(shard, [0], [3], [3])
    assert error.value.num_tokens == 5


def test_packs_are_read_right_with_fewer_open_shards_than_they_touch(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path, num_samples=2000)
    dataset = PackedStreamingDataset(tmp_path, processor=TokensProcessor(), packing=PackingConfig(packing_length=4096))
    reader: ShardReader = dataset.core.pack_reader
    reader._max_open = 2
    assert len(dataset.core.shard_infos) > 10
    seen: list[int] = []
    for batch in PackedLoader(dataset, global_batch=2):
        ids = batch.sample_ids.tolist()
        assert batch.input_ids[0].tolist() == [n for n in ids for _ in range(lengths[n])]
        seen += ids
    assert sorted(seen) == list(range(2000))


ARRAYS = (
    "addresses", "indices", "starts", "lengths", "expected", "column_sizes", "input_ids", "labels", "position_ids",
    "num_loss_tokens",
)  # fmt: skip


def arrays_of(shard: Shard, *, num_segments: int, num_tokens: int) -> dict[str, Any]:
    """Arguments of the compiled loop: each segment is the first token of sample 0."""
    arrays = {name: np.zeros(num_segments, np.int64) for name in ARRAYS}
    arrays |= {name: np.full(num_tokens, 99) for name in ("input_ids", "labels", "position_ids")}
    arrays |= {"addresses": np.full(num_segments, shard.address, np.int64), "lengths": np.ones(num_segments, np.int64)}
    arrays |= {"expected": np.full(num_segments, -1), "column_sizes": np.array([-1, -1])}
    return {**arrays, "ids_column": 0, "spans_column": 1, "ignored_label": IGNORED_LABEL}


def test_the_loop_names_an_array_of_another_dtype_length_or_layout(small: Path) -> None:
    (info,) = parse_index((small / "index.json").read_bytes(), source="index.json")
    shard = Shard(small / info.name, info)
    arrays = arrays_of(shard, num_segments=3, num_tokens=3)
    assert token_kernels.fill(**arrays) == (token_kernels.FITS, 0, 0)
    assert arrays["num_loss_tokens"].tolist() == [0, 0, 0]
    written = {"input_ids", "labels", "position_ids", "num_loss_tokens"}
    for name in ARRAYS:
        array = arrays[name]
        sealed = array.copy()
        sealed.flags.writeable = False
        faults: list[Any] = [array.astype(np.int32), array.astype(np.float64), array.repeat(2)[::2], array[None], None]
        faults += [sealed] * (name in written)
        faults += [np.append(array, 0)] * (name not in ("column_sizes", "addresses", "input_ids"))
        for fault in faults:
            with pytest.raises(ConfigError, match=f"^{name} is .*, expected .* int64 values, contiguous"):
                token_kernels.fill(**{**arrays, name: fault})
        if name not in written:
            assert token_kernels.fill(**{**arrays, name: sealed}) == (token_kernels.FITS, 0, 0)


def test_a_pack_of_no_segment_leaves_its_rows_as_they_are(small: Path) -> None:
    (info,) = parse_index((small / "index.json").read_bytes(), source="index.json")
    shard = Shard(small / info.name, info)
    for num_tokens in (0, 4):
        arrays = arrays_of(shard, num_segments=0, num_tokens=num_tokens)
        assert token_kernels.fill(**arrays) == (token_kernels.FITS, 0, 0)
        assert arrays["labels"].tolist() == [99] * num_tokens


@in_long_rounds
@examples(400)
@given(data=st.data())
def test_the_loop_never_writes_outside_its_rows(small: Path, data: st.DataObject) -> None:
    """Numbers of a plan that do not fit the samples, and rows that are too short, between guarded values."""
    (info,) = parse_index((small / "index.json").read_bytes(), source="index.json")
    num_segments, num_tokens = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40))
    shard = Shard(small / info.name, info)
    arrays = arrays_of(shard, num_segments=num_segments, num_tokens=num_tokens)
    numbers = st.integers(0, 40) | st.sampled_from([2**31, 2**40])
    for name, values in (("starts", numbers), ("lengths", numbers), ("expected", st.integers(-1, 40))):
        arrays[name][:] = data.draw(st.lists(values, min_size=num_segments, max_size=num_segments))
    arrays["indices"][:] = data.draw(
        st.lists(st.integers(0, info.num_samples - 1), min_size=num_segments, max_size=num_segments)
    )
    rows = {name: np.full(num_tokens + 64, 99) for name in ("input_ids", "labels", "position_ids")}
    arrays |= {name: row[32 : 32 + num_tokens] for name, row in rows.items()}
    outcome, segment, _ = token_kernels.fill(**arrays)
    assert (outcome == token_kernels.FITS) or 0 <= segment < num_segments
    for row in rows.values():
        assert (row[:32] == 99).all()
        assert (row[32 + num_tokens :] == 99).all()
