"""Share of the tokens of a source that is trained on. Lengths do not tell it: some samples are read and processed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from ..errors import DataError
from ..mds.core import PackedDataset
from ..mds.shard import open_shard
from ..processors.base import IGNORED_LABEL, Compared, Processor
from ..types import Sample

_MAX_TOKENS = 1 << 20  # of all samples that are read, so that a plan takes some seconds more
_MAX_SAMPLES, _MAX_WITH_MEDIA, _MIN_SAMPLES = 1024, 64, 16
_MAX_SHARDS = 64  # that are opened


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedReport:
    """Trained tokens of a source, in num_looked_at of its num_samples samples, which are evenly spread.

    trained_share: None if it is not known; unknown gives the reason. num_without: samples in which nothing is trained
    on. num_refused: samples that the processor refuses.
    """

    source: str
    num_samples: int
    num_looked_at: int = 0
    trained_share: float | None = None
    num_without: int = 0
    num_refused: int = 0
    unknown: str | None = None


def report_trained(
    dataset: PackedDataset, processor: Processor | None, *, source: str, num_sources: int = 1
) -> TrainedReport:
    """Process some samples of a source. num_sources: sources of the plan, which share the samples that are read."""
    unknown = _reason(dataset, processor)
    if processor is None or unknown is not None:
        return TrainedReport(source=source, num_samples=dataset.num_samples, unknown=unknown)
    counts: Counter[str] = Counter()
    for sample in _some_samples(dataset, processor, num_sources=num_sources):
        counts["samples"] += 1
        try:
            labels = processor.process(sample)["labels"]
        except DataError:
            counts["refused"] += 1
            continue
        num_trained = int(np.count_nonzero(np.asarray(labels)[1:] != IGNORED_LABEL))  # nothing predicts the first token
        counts["tokens"] += len(labels)
        counts["trained"] += num_trained
        counts["without"] += not num_trained
    return TrainedReport(
        source=source,
        num_samples=dataset.num_samples,
        num_looked_at=counts["samples"],
        trained_share=counts["trained"] / counts["tokens"] if counts["tokens"] else None,
        num_without=counts["without"],
        num_refused=counts["refused"],
        unknown=None if counts["tokens"] else "the processor refuses all samples that were read",
    )


def _reason(dataset: PackedDataset, processor: Processor | None) -> str | None:
    """Why the share of a source is not known; None if samples can be read."""
    if processor is None:
        return "pass --tokenizer, and what is trained on is found in some samples"
    objective = getattr(processor, "objective", None)
    if objective is not None and objective not in get_args(Compared):
        return f"its samples are not trained on as tokens only, but for {objective}"
    stored = dataset.one
    if stored.is_copied or not all((stored.folder_of_files / info.name).exists() for info in stored.shards[:1]):
        return (
            "its shards are not in a local folder as plain files, and a plan downloads none: "
            f"lmms-stream inspect {stored.url} --tokenizer … marks it in single samples"
        )
    return None


def _some_samples(dataset: PackedDataset, processor: Processor, *, num_sources: int) -> Iterator[Sample]:
    """Yield samples that are evenly spread over some shards, which are evenly spread over the dataset."""
    stored, index = dataset.one, dataset.plan.index
    most = _MAX_SAMPLES if index.patches is None else _MAX_WITH_MEDIA
    by_tokens = _MAX_TOKENS * dataset.num_samples // max(1, int(np.sum(index.lengths, dtype=np.int64)))
    num_samples = max(_MIN_SAMPLES, min(most, by_tokens) // num_sources)
    shards = [stored.shards[number] for number in _evenly(len(stored.shards), min(_MAX_SHARDS, num_samples))]
    found = [info for info in shards if (stored.folder_of_files / info.name).exists()]
    for info in found:
        shard = open_shard(stored.folder_of_files / info.name, info, columns=processor.columns)
        for within in _evenly(info.num_samples, -(-num_samples // len(found))):
            yield shard[within]


def _evenly(total: int, count: int) -> list[int]:
    """Return `count` numbers below `total`, or all of them, at equal distances.

    >>> _evenly(10, 3), _evenly(2, 3)
    ([0, 4, 9], [0, 1])
    """
    return np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)).tolist()  # type: ignore[no-any-return]
