"""Concatenated documents -> samples of equal numbers of tokens. documents -> [concatenation] -> samples. Pure.

The tokens of documents stay in their encoded units; this module makes the other columns of a sample: the starts of its
documents, and its loss spans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...types import Sample
from ..rows.tokens import NO_SPANS, checked_spans
from .encoding import array_head, encode_int32
from .unit_files import PlacedSamples, inner_numbers

MADE = -1  # unit of a run whose bytes are made here
_TOKEN_BYTES = 4
_NO_PIECES, _NO_SPANS = np.empty((0, 5), np.int64), np.empty((0, 2), np.int64)


def document_of(sample: Sample) -> tuple[bytes, NDArray[np.int32]]:
    """Return a sample of tokens as a document: its tokens, 4 bytes each, and its loss spans, int32[k, 2].

    DataError for a sample without tokens, and for spans outside of the tokens or not in ascending order.
    """
    ids = np.asarray(sample["input_ids"])
    if ids.ndim != 1 or not len(ids):
        raise DataError(
            f"it has input_ids of the shape {list(ids.shape)}, and a document needs at least one token: leave it out"
        )
    spans = checked_spans(np.asarray(sample["loss_spans"], np.int64), len(ids))
    return ids.astype("<i4").tobytes(), spans


@dataclass(frozen=True, slots=True)
class _Made:
    """Samples that are not in a shard yet.

    pieces: int64[p, 3], the tokens of all samples: unit, first byte in the unit, bytes. counts: int64[n], pieces of
    each sample. heads, tails: of each sample, the bytes before and behind its tokens.
    """

    pieces: NDArray[np.int64]
    counts: NDArray[np.int64]
    heads: list[bytes]
    tails: list[bytes]

    def split(self, num_samples: int) -> tuple[_Made, _Made]:
        """Return the first `num_samples` samples, and the rest."""
        at = int(self.counts[:num_samples].sum())
        first, others = slice(num_samples), slice(num_samples, None)
        return (
            _Made(self.pieces[:at], self.counts[first], self.heads[first], self.tails[first]),
            _Made(self.pieces[at:], self.counts[others], self.heads[others], self.tails[others]),
        )

    def runs(self) -> tuple[NDArray[np.int64], bytes]:
        """Return the bytes of the samples in order, as in ShardTask: runs int64[r, 3], and the bytes made here."""
        parts = [part for pair in zip(self.heads, self.tails, strict=True) for part in pair]
        sizes = np.array([len(part) for part in parts], np.int64).reshape(-1, 2)
        firsts = (np.cumsum(sizes.ravel()) - sizes.ravel()).reshape(-1, 2)
        runs = np.full((len(self.pieces) + len(parts), 3), MADE, np.int64)
        heads = np.cumsum(self.counts + 2) - (self.counts + 2)
        tails = heads + self.counts + 1
        runs[heads, 1], runs[heads, 2] = firsts[:, 0], sizes[:, 0]
        runs[tails, 1], runs[tails, 2] = firsts[:, 1], sizes[:, 1]
        runs[np.repeat(heads + 1, self.counts) + inner_numbers(self.counts)] = self.pieces
        return runs, b"".join(parts)


class Concatenation:
    """Concatenates documents and cuts them into samples of num_tokens tokens.

    DOCUMENTS of rows/schemas.py defines a sample. num_tail_tokens: tokens of the last sample, if shorter than the
    others; num_dropped_tokens: tokens of this last sample, if it was left out. Both are known after `finish`.
    """

    def __init__(self, num_tokens: int):
        self.num_documents = 0
        self.num_tail_tokens = 0
        self.num_dropped_tokens = 0
        self._num_tokens = num_tokens
        # Tokens after the last full sample, counted from the first token: pieces (unit, first byte, bytes, first token,
        # packed row) and loss spans.
        self._pieces = _NO_PIECES
        self._spans = _NO_SPANS
        self._made: list[_Made] = []

    @property
    def num_waiting(self) -> int:
        """Number of tokens after the last full sample."""
        return int(self._pieces[:, 2].sum()) // _TOKEN_BYTES

    def add(self, documents: PlacedSamples) -> PlacedSamples:
        """Add the next documents; return the samples that they complete."""
        assert documents.spans is not None
        self.num_documents += len(documents.samples)
        tokens = documents.samples[:, 2] // _TOKEN_BYTES
        firsts = self.num_waiting + np.cumsum(tokens) - tokens
        bounds = documents.spans.bounds + np.repeat(firsts, documents.spans.counts)[:, None]
        self._spans = _merged(np.concatenate([self._spans, bounds]))
        self._pieces = np.concatenate([self._pieces, self._cut(documents.samples, firsts)])
        return self._take(self.num_waiting // self._num_tokens)

    def finish(self, *, drop_tail: bool) -> PlacedSamples:
        """Return the last sample, which may be shorter; no sample if it is dropped."""
        num_left = self.num_waiting
        self.num_tail_tokens, self.num_dropped_tokens = (0, num_left) if drop_tail else (num_left, 0)
        return self._take(1 if num_left and not drop_tail else 0)

    def runs(self, num_samples: int) -> tuple[NDArray[np.int64], bytes]:
        """Return the bytes of the next samples without a shard, in the format of ShardTask."""
        made = self._made if len(self._made) == 1 else [_joined(self._made)]
        taken, others = made[0].split(num_samples)
        self._made = [others]
        return taken.runs()

    def _cut(self, documents: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cut documents into pieces at the bounds of samples. firsts: first token of each document."""
        stop = firsts[-1] + documents[-1, 2] // _TOKEN_BYTES if len(firsts) else 0
        begins = np.union1d(firsts, np.arange(self._num_tokens, stop, self._num_tokens))
        of = np.searchsorted(firsts, begins, side="right") - 1
        sizes = np.diff(begins, append=stop) * _TOKEN_BYTES
        first_bytes = documents[of, 1] + (begins - firsts[of]) * _TOKEN_BYTES
        return np.stack([documents[of, 0], first_bytes, sizes, begins, documents[of, 3]], axis=1)

    def _take(self, num_samples: int) -> PlacedSamples:
        """Take the first samples from the waiting tokens."""
        if not num_samples:
            return PlacedSamples(np.empty((0, 4), np.int64), np.empty(0, np.uint32))
        stop = num_samples * self._num_tokens
        pieces, self._pieces = _parted(self._pieces, self._pieces[:, 3] < stop)
        self._pieces[:, 3] -= stop
        spans = _cut_spans(self._spans, self._num_tokens)
        spans, self._spans = _parted(spans, spans[:, 0] < stop)
        self._spans -= stop
        counts = np.bincount(pieces[:, 3] // self._num_tokens, minlength=num_samples)
        ends = np.cumsum(counts)
        lengths = np.add.reduceat(pieces[:, 2], ends - counts) // _TOKEN_BYTES
        self._made.append(_made(pieces, counts, spans, lengths, num_tokens=self._num_tokens))
        made = self._made[-1]
        sizes = np.array([len(head) + len(tail) for head, tail in zip(made.heads, made.tails, strict=True)], np.int64)
        rows = pieces[ends - counts, 4]
        unit, first_byte = np.full(num_samples, MADE), np.zeros(num_samples, np.int64)  # samples span several units
        samples = np.stack([unit, first_byte, sizes + lengths * _TOKEN_BYTES, rows], axis=1)
        return PlacedSamples(samples, lengths.astype(np.uint32))


def _made(
    pieces: NDArray[np.int64],
    counts: NDArray[np.int64],
    spans: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    num_tokens: int,
) -> _Made:
    """Return samples. pieces: of all samples. counts, lengths: pieces and tokens per sample. spans: loss spans."""
    starts = np.split((pieces[:, 3] % num_tokens).astype(np.int32), np.cumsum(counts)[:-1])
    sample_of = spans[:, 0] // num_tokens
    own = (spans - (sample_of * num_tokens)[:, None]).astype(np.int32)
    learnt = np.split(own, np.cumsum(np.bincount(sample_of, minlength=len(counts)))[:-1])
    heads, tails = [], []
    for begins, bounds, length in zip(starts, learnt, lengths.tolist(), strict=True):
        document_starts, ids_head = encode_int32(begins), array_head((length,))
        loss_spans = encode_int32(bounds if len(bounds) else NO_SPANS)
        sizes = (len(document_starts), len(ids_head) + length * _TOKEN_BYTES, len(loss_spans))
        heads.append(struct.pack("<3I", *sizes) + document_starts + ids_head)  # columns are in the order of their names
        tails.append(loss_spans)
    return _Made(pieces[:, :3], counts, heads, tails)


def _joined(parts: Sequence[_Made]) -> _Made:
    return _Made(
        np.concatenate([part.pieces for part in parts]),
        np.concatenate([part.counts for part in parts]),
        [head for part in parts for head in part.heads],
        [tail for part in parts for tail in part.tails],
    )


def _parted(rows: NDArray[np.int64], is_first: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return rows[is_first], rows[~is_first]


def _merged(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge spans that touch or overlap; starts must ascend.

    >>> _merged(np.array([[0, 2], [2, 5], [3, 4], [6, 7]])).tolist()
    [[0, 5], [6, 7]]
    """
    if not len(spans):
        return spans
    reach = np.maximum.accumulate(spans[:, 1])
    firsts = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > reach[:-1]]))
    return np.stack([spans[firsts, 0], reach[np.append(firsts[1:], len(spans)) - 1]], axis=1)


def _cut_spans(spans: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64]:
    """Cut spans at the bounds of samples.

    >>> _cut_spans(np.array([[1, 3], [5, 21]]), 10).tolist()
    [[1, 3], [5, 10], [10, 20], [20, 21]]
    """
    firsts = spans[:, 0] // num_tokens
    counts = (spans[:, 1] - 1) // num_tokens - firsts + 1
    samples = np.repeat(firsts, counts) + inner_numbers(counts)
    starts = np.maximum(np.repeat(spans[:, 0], counts), samples * num_tokens)
    stops = np.minimum(np.repeat(spans[:, 1], counts), (samples + 1) * num_tokens)
    return np.stack([starts, stops], axis=1)
