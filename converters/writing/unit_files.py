"""Files of an encoded unit in the work folder (its samples and their description), and the places of their bytes.

The description is written last: a unit without a description is unfinished. A unit that ends early, at a row that does
not fit, has a description of another name: a later run, which may skip the row, encodes the unit again.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from ...errors import StorageError
from ...processors.base import AMOUNTS
from ..stored.row_counts import REASONS, RowsLeftOut, UnreadRows


def inner_numbers(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the members of each group from 0. counts: members of each group.

    >>> inner_numbers(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class LossSpans:
    """Spans of tokens in the loss. counts: int64[n], spans of each document. bounds: int32[k, 2], tokens [start, stop)
    in their own document, in the order of documents.
    """

    counts: NDArray[np.int64]
    bounds: NDArray[np.int32]

    @staticmethod
    def of(documents: Sequence[NDArray[np.int32]]) -> LossSpans:
        """documents: the spans of each, int32[k, 2]."""
        bounds = np.concatenate(documents) if documents else np.empty((0, 2), np.int32)
        return LossSpans(np.array([len(each) for each in documents], np.int64), bounds)

    @staticmethod
    def join(parts: Sequence[LossSpans]) -> LossSpans:
        return LossSpans(
            np.concatenate([each.counts for each in parts]), np.concatenate([each.bounds for each in parts])
        )

    def take(self, numbers: NDArray[np.int64]) -> LossSpans:
        """Spans of documents by number, in the order of `numbers`."""
        counts = self.counts[numbers]
        firsts = (np.cumsum(self.counts) - self.counts)[numbers]
        return LossSpans(counts, self.bounds[np.repeat(firsts, counts) + inner_numbers(counts)])


@dataclass(frozen=True, slots=True)
class PlacedSamples:
    """Samples in order, or documents to concatenate.

    samples: int64[n, 4]: unit, first byte in the unit, size, and the packed row of the source. lengths: see
    EncodedUnit, None if nothing measures them. spans: of documents. not_shown: see EncodedUnit.
    """

    samples: NDArray[np.int64]
    lengths: NDArray[np.uint32] | None
    spans: LossSpans | None = None
    not_shown: NDArray[np.uint32] | None = None

    def take(self, numbers: NDArray[np.int64]) -> PlacedSamples:
        """Samples by number, in the order of `numbers`."""
        return PlacedSamples(
            self.samples[numbers],
            None if self.lengths is None else self.lengths[numbers],
            None if self.spans is None else self.spans.take(numbers),
            None if self.not_shown is None else self.not_shown[numbers],
        )

    @staticmethod
    def join(parts: Sequence[PlacedSamples]) -> PlacedSamples:
        """Concatenate all parts in order."""
        lengths = [part.lengths for part in parts if part.lengths is not None]
        spans = [part.spans for part in parts if part.spans is not None]
        not_shown = [part.not_shown for part in parts if part.not_shown is not None]
        return PlacedSamples(
            np.concatenate([part.samples for part in parts]),
            np.concatenate(lengths) if lengths else None,
            LossSpans.join(spans) if spans else None,
            np.concatenate(not_shown) if not_shown else None,
        )


_ARRAYS = ("sizes", "rows", "lengths", "hashes", "places", "not_shown")  # of an EncodedUnit
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedUnit:
    """Description of a unit's samples.

    sizes: int64[n], bytes of each sample. rows: int64[n], row number of each sample in the unit. lengths: uint32[n],
    tokens of each sample, or uint32[n, 6], the AMOUNTS of Measured, if the processor measures media; None without a
    processor. rejects: row number in the unit, and the error. left_out: reason -> rows left out. hashes: uint64[n, 2],
    of the stored bytes of each sample, for deduplication; else None. num_rows: rows and blank lines. spans: of samples
    that are documents, of which only the tokens are stored. unread: name -> rows with a value of this unread name.
    places: int64[n], first byte of each sample, if the file is a link to a shard; None for samples in order. not_shown:
    uint32[n], bits of the kinds of content that the chat template does not show; None without a chat template.
    """

    sizes: NDArray[np.int64]
    rows: NDArray[np.int64]
    lengths: NDArray[np.uint32] | None
    rejects: list[tuple[int, str]]
    left_out: RowsLeftOut
    hashes: NDArray[np.uint64] | None
    num_rows: int
    spans: LossSpans | None = None
    places: NDArray[np.int64] | None = None
    unread: UnreadRows = field(default_factory=dict)
    not_shown: NDArray[np.uint32] | None = None

    @property
    def first_bytes(self) -> NDArray[np.int64]:
        """First byte of each sample in the file."""
        return np.cumsum(self.sizes) - self.sizes if self.places is None else self.places

    def first(self, num_samples: int) -> EncodedUnit:
        """Return the unit up to the row of sample `num_samples`, counted from 1, with all samples of this row."""
        last_row = self.rows[num_samples - 1]
        num_samples = int(np.searchsorted(self.rows, last_row, side="right"))
        return EncodedUnit(
            sizes=self.sizes[:num_samples],
            rows=self.rows[:num_samples],
            lengths=None if self.lengths is None else self.lengths[:num_samples],
            rejects=[reject for reject in self.rejects if reject[0] < last_row],
            left_out={why: numbers[numbers <= last_row] for why, numbers in self.left_out.items()},
            hashes=None if self.hashes is None else self.hashes[:num_samples],
            num_rows=int(last_row) + 1,
            spans=None if self.spans is None else self.spans.take(np.arange(num_samples)),
            places=None if self.places is None else self.places[:num_samples],
            unread={name: numbers[numbers <= last_row] for name, numbers in self.unread.items()},
            not_shown=None if self.not_shown is None else self.not_shown[:num_samples],
        )

    def save(self, path: Path) -> None:
        said = {"rejects": self.rejects, "num_rows": self.num_rows, "unread": list(self.unread)}
        about = np.frombuffer(orjson.dumps(said), np.uint8)
        arrays = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        arrays |= {str(why): numbers for why, numbers in self.left_out.items()}
        arrays |= {f"unread_{number}": rows for number, rows in enumerate(self.unread.values())}
        if self.spans is not None:
            arrays |= {"span_counts": self.spans.counts, "span_bounds": self.spans.bounds}
        temporary = temporary_beside(path)
        with temporary.open("wb") as file:
            np.savez(file, about=about, **arrays)
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> EncodedUnit:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                about = orjson.loads(arrays["about"].tobytes())
                return EncodedUnit(
                    sizes=arrays["sizes"],
                    rows=arrays["rows"],
                    lengths=_of_today(arrays.get("lengths")),
                    rejects=[(int(number), str(reason)) for number, reason in about["rejects"]],
                    left_out={why: arrays.get(why, _NO_ROWS) for why in REASONS},
                    hashes=arrays.get("hashes"),
                    places=arrays.get("places"),
                    not_shown=arrays.get("not_shown"),
                    num_rows=about["num_rows"],
                    spans=LossSpans(arrays["span_counts"], arrays["span_bounds"]) if "span_counts" in arrays else None,
                    unread={name: arrays[f"unread_{at}"] for at, name in enumerate(about.get("unread", ()))},
                )
        except (ValueError, KeyError, EOFError, OSError) as error:
            raise StorageError(f"{path} is damaged ({error}): begin again with --overwrite") from error


def _of_today(lengths: NDArray[np.uint32] | None) -> NDArray[np.uint32] | None:
    """Pad lengths of earlier versions, with fewer amounts, with 0."""
    if lengths is None or lengths.ndim == 1:
        return lengths
    return np.pad(lengths, ((0, 0), (0, AMOUNTS - lengths.shape[1])))


def samples_path(folder: Path, number: int) -> Path:
    """The samples of an encoded unit."""
    return folder / f"{number:06}.samples"


def about_path(folder: Path, number: int) -> Path:
    """Description of a unit's samples."""
    return folder / f"{number:06}.npz"


def failed_path(folder: Path, number: int) -> Path:
    """Description of the samples of a unit that ended at a row that does not fit."""
    return folder / f"{number:06}.failed"


def temporary_beside(path: Path) -> Path:
    """Name of a temporary file that no other process uses, including processes that outlive a killed command."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
