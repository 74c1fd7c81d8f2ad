"""Documents laid end to end: the samples that plain Python cuts, byte for byte, however they come."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.rows.schemas import DOCUMENTS
from lmms_stream.converters.writing.documents import MADE, Concatenation, document_of
from lmms_stream.converters.writing.encoding import ShardFormat
from lmms_stream.converters.writing.shards import Output, ShardTask
from lmms_stream.converters.writing.unit_files import LossSpans, PlacedSamples
from lmms_stream.errors import DataError

from ...strategies import examples

FORMAT = ShardFormat(DOCUMENTS.columns, shard_bytes=1 << 10)


class Document(NamedTuple):
    ids: list[int]
    spans: list[tuple[int, int]]  # ascending; they may touch and overlap


class Expected(NamedTuple):
    ids: list[int]
    starts: list[int]
    learnt: list[bool]
    row: int  # of the document that it begins with


@st.composite
def documents(draw: st.DrawFn) -> list[Document]:
    made: list[Document] = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 40))
        starts = sorted(draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4)))
        spans = [(start, draw(st.integers(start + 1, length))) for start in starts]
        made.append(Document([100 * len(made) + each for each in range(length)], spans))
    return made


def reference(docs: list[Document], num_tokens: int) -> list[Expected]:
    """The samples, one token at a time."""
    stream = [
        (token, at == 0, any(start <= at < stop for start, stop in doc.spans), row)
        for row, doc in enumerate(docs)
        for at, token in enumerate(doc.ids)
    ]
    cut = [stream[first : first + num_tokens] for first in range(0, len(stream), num_tokens)]
    return [
        Expected(
            [token for token, *_ in sample],
            [at for at, (_, begins, *_) in enumerate(sample) if begins or at == 0],
            [learnt for *_, learnt, _ in sample],
            sample[0][3],
        )
        for sample in cut
    ]


def encoded(expected: Expected) -> bytes:
    """As a shard holds it, its spans apart from each other; one of no consequence where nothing is learnt."""
    edges = np.flatnonzero(np.diff([False, *expected.learnt, False])).reshape(-1, 2)
    return FORMAT.encode(
        {
            "input_ids": np.array(expected.ids, np.int32),
            "document_starts": np.array(expected.starts, np.int32),
            "loss_spans": (edges if len(edges) else np.array([[0, 1]])).astype(np.int32),
        }
    )


def placed(docs: list[Document], unit: int, first_row: int) -> PlacedSamples:
    sizes = np.array([4 * len(doc.ids) for doc in docs], np.int64)
    rows = np.arange(first_row, first_row + len(docs))
    samples = np.stack([np.full(len(docs), unit), np.cumsum(sizes) - sizes, sizes, rows], axis=1)
    return PlacedSamples(samples, None, LossSpans.of([np.array(doc.spans, np.int32) for doc in docs]))


def samples_of(tasks: list[ShardTask], units: list[bytes]) -> list[bytes]:
    found = []
    for task in tasks:
        data = b"".join(
            (task.made if unit == MADE else units[unit])[first : first + size]
            for unit, first, size in task.runs.tolist()
        )
        ends = np.cumsum(task.sizes)
        assert ends[-1] == len(data)
        found += [data[stop - size : stop] for stop, size in zip(ends.tolist(), task.sizes.tolist(), strict=True)]
    return found


@examples(150)
@given(docs=documents(), num_tokens=st.integers(2, 50), drop=st.booleans(), data=st.data())
def test_samples_are_those_of_plain_python_however_documents_come(
    docs: list[Document], num_tokens: int, drop: bool, data: st.DataObject
) -> None:
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(docs)), max_size=3))), len(docs)]
    output = Output(number=0, format=FORMAT, concatenation=Concatenation(num_tokens))
    tasks: list[ShardTask] = []
    units: list[bytes] = []
    for unit, (first, stop) in enumerate(pairwise(bounds)):
        units.append(b"".join(np.array(doc.ids, "<i4").tobytes() for doc in docs[first:stop]))
        if stop > first:
            tasks += output.add(placed(docs[first:stop], unit, first))
    tasks += [*output.end_documents(drop_tail=drop), *output.finish()]
    expected = reference(docs, num_tokens)
    num_tail = len(expected[-1].ids) % num_tokens
    expected = expected[: len(expected) - (drop and num_tail > 0)]
    assert samples_of(tasks, units) == [encoded(each) for each in expected]
    assert [int(each) for part in output.lengths for each in part] == [len(each.ids) for each in expected]
    assert [int(each) for part in output.rows for each in part] == [each.row for each in expected]
    joined = output.concatenation
    assert joined is not None
    assert joined.num_documents == len(docs)
    assert (joined.num_tail_tokens, joined.num_dropped_tokens) == ((0, num_tail) if drop else (num_tail, 0))


def test_documents_in_another_order_keep_what_is_learnt_of_them() -> None:
    docs = [Document([1, 2, 3], [(0, 1), (2, 3)]), Document([4], [(0, 1)]), Document([5, 6], [(1, 2)])]
    parts = [placed(docs[:1], 0, 0), placed(docs[1:], 1, 1)]
    taken = PlacedSamples.join(parts).take(np.array([2, 0]))
    assert taken.samples[:, 3].tolist() == [2, 0]
    assert taken.spans is not None
    assert (taken.spans.counts.tolist(), taken.spans.bounds.tolist()) == ([1, 2], [[1, 2], [0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("ids", "spans", "message"),
    [
        ([[1, 2]], [[0, 1]], r"input_ids of the shape \[1, 2\], and a document needs at least one token: leave it"),
        ([], [[0, 1]], r"input_ids of the shape \[0\], and a document needs at least one token: leave it out"),
        ([1, 2], [[0, 3]], r"loss span \[0, 3\) lies outside the row's 2 tokens"),
    ],
)
def test_what_is_no_document_is_refused(ids: list[int], spans: list[list[int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        document_of({"input_ids": np.array(ids, np.int32), "loss_spans": np.array(spans, np.int32)})
