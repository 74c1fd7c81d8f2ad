"""Reports of a conversion: progress, and the final result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from ..processors.not_shown import added
from .rows.content import EMPTY as EMPTY
from .rows.content import REPEATED as REPEATED
from .rows.references import MORE_FRAMES as MORE_FRAMES
from .rows.speakers import SPEAKER as SPEAKER
from .stored.row_counts import KEY_OF_MESSAGES as KEY_OF_MESSAGES
from .stored.row_counts import RowCounts as RowCounts
from .stored.row_counts import Unread as Unread
from .stored.row_counts import UnreadNames as UnreadNames
from .stored.row_counts import joined_unread, unread_of_dataset
from .writing.shards import Output
from .writing.work import Finished


class DocumentCounts(TypedDict, total=False):
    """See SplitReport."""

    num_documents: int
    num_tail_tokens: int
    num_dropped_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport:
    """Result for one of several datasets. num_tokens is None without a measuring processor.

    num_documents: number of concatenated documents. num_tail_tokens: tokens of a shorter last sample.
    num_dropped_tokens: tokens of a last sample that was not stored.
    """

    num_rows: int
    num_tokens: int | None
    num_shards: int
    num_documents: int | None = None
    num_tail_tokens: int = 0
    num_dropped_tokens: int = 0

    @staticmethod
    def of(output: Output) -> SplitReport:
        tokens = (
            sum(int(np.atleast_2d(each.T)[0].sum(dtype=np.int64)) for each in output.lengths)
            if output.lengths
            else None
        )
        return SplitReport(
            num_rows=output.num_samples, num_tokens=tokens, num_shards=output.num_shards, **documents_of(output)
        )


def documents_of(output: Output) -> DocumentCounts:
    """Counts of concatenated documents in a report; empty without concatenation."""
    joined = output.concatenation
    if joined is None:
        return {}
    return {
        "num_documents": joined.num_documents,
        "num_tail_tokens": joined.num_tail_tokens,
        "num_dropped_tokens": joined.num_dropped_tokens,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport(RowCounts):
    """Result of a conversion, all outputs together, and each of its `splits` by name, if splits were requested.

    kind: kind of the rows, and the columns that are read and kept. schema: schema of the stored samples. Rows that are
    not stored: see RowCounts. num_tokens: None without a measuring processor. num_documents, num_tail_tokens,
    num_dropped_tokens: as in SplitReport, over all outputs. was_there: an earlier call had finished the conversion.
    unread: names of columns that a source's first rows do not have and that no reader uses, with their first row and
    number of rows. not_shown: number of samples with content that the chat template does not show, by kind of content.
    """

    kind: str
    schema: str
    num_rows: int
    num_tokens: int | None
    num_shards: int
    num_bytes: int
    seconds: float
    splits: Mapping[str, SplitReport]
    num_documents: int | None = None
    num_tail_tokens: int = 0
    num_dropped_tokens: int = 0
    was_there: bool = False
    unread: UnreadNames = field(default_factory=dict)
    not_shown: Mapping[str, int] = field(default_factory=dict)


def added_documents(reports: Iterable[SplitReport]) -> DocumentCounts:
    """Sum of the document counts of all datasets; empty if no dataset has them."""
    counted = [report for report in reports if report.num_documents is not None]
    if not counted:
        return {}
    return {
        "num_documents": sum(report.num_documents or 0 for report in counted),
        "num_tail_tokens": sum(report.num_tail_tokens for report in counted),
        "num_dropped_tokens": sum(report.num_dropped_tokens for report in counted),
    }


def report_of(finished: Sequence[Finished], splits: Iterable[str], *, seconds: float) -> ConvertReport:
    """Return the report of a conversion that an earlier run finished, from the datasets at its targets."""
    described = [each.description for each in finished]
    reports = [
        SplitReport(
            num_rows=each.description["num_samples"],
            num_tokens=each.num_tokens,
            num_shards=len(each.description["shards"]),
            num_documents=each.description.get("num_documents"),
            num_tail_tokens=each.description.get("num_tail_tokens", 0),
            num_dropped_tokens=each.description.get("num_dropped_tokens", 0),
        )
        for each in finished
    ]
    tokens = [report.num_tokens for report in reports if report.num_tokens is not None]
    return ConvertReport(
        kind=str(described[0]["schema"]),
        schema=str(described[0]["schema"]),
        num_rows=sum(report.num_rows for report in reports),
        **RowCounts.total(map(RowCounts.of_dataset, described)).as_dict(),
        num_tokens=sum(tokens) if tokens else None,
        num_shards=sum(report.num_shards for report in reports),
        num_bytes=sum(shard.get("file_size", shard["size"]) for each in described for shard in each["shards"]),
        seconds=seconds,
        splits=dict(zip(splits, reports, strict=False)),
        **added_documents(reports),
        not_shown=added(each.get("not_shown", {}) for each in described),
        was_there=True,
        unread=joined_unread(map(unread_of_dataset, described)),
    )


class CountedBytes:
    """Progress in bytes of the sources: never more than the total, and at the end exactly the total.

    Units of a slice have fewer bytes than their file, and datasets of the hub have other sizes than their files. total:
    0 if unknown.
    """

    def __init__(self, total: int, *, tell: Callable[[int], None]):
        self._tell = tell
        self._is_known = total > 0
        self._left = total

    def advance(self, num_bytes: int) -> None:
        if self._is_known:
            num_bytes = min(num_bytes, self._left)
            self._left -= num_bytes
        self._tell(num_bytes)

    def finish(self) -> None:
        self.advance(self._left)
