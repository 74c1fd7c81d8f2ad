"""Datasets -> the report of an audit, in worker processes. Nothing is trained, and nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ...converters.stored.catalog import read_catalog, schema_of
from ...errors import ConfigError, ShardError
from ...mds.core import PackedDataset
from ...mds.provenance import ROW_BITS, Provenance
from ...processes.pool import do_all, num_cores, open_pool
from ...processors.base import Compared, Processor
from ...processors.text import TokensProcessor
from ...processors.tokenizers import FastTokenizer, load_tokenizer
from ...storage.cache import LocalCache
from .checks import (
    MAX_EXAMPLES,
    NAMES,
    NUM_SHARES,
    ROWS,
    Example,
    Finding,
    Place,
    SourceView,
    Verdict,
    as_json,
    bars_of,
    check_names,
    finding,
    quantiles_of,
    with_overlong,
    worst,
)
from .repeats import NUM_HASHES, repeated_of, similar_of, similarity
from .samples import Auditor, AuditTask, ShardFacts

_COMPARED = ("messages", "preference", "text", "tokens")  # schemas with texts or tokens, for near duplicates
_SHARE_OF_SHARDS = 64  # samples drawn from a shard, or more, if not all samples are read


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedDataset:
    """A dataset to audit. tokenizer: of stored tokens. packing_length, positions of the model: optional. near: look for
    near duplicates.
    """

    name: str
    dataset: PackedDataset
    processor: Processor
    tokenizer: FastTokenizer | None
    schema: str | None
    packing_length: int | None = None
    overlong: str = "error"
    positions: int | None = None
    near: bool = False

    @staticmethod
    def of(
        name: str,
        dataset: PackedDataset,
        *,
        tokenizer: str | None = None,
        positions: int | None = None,
        near: bool = False,
    ) -> AuditedDataset:
        """Return a dataset with the processor of its samples; ConfigError if a tokenizer is missing, and for near
        duplicates of samples without texts and tokens.
        """
        catalog = read_catalog(dataset.one.storage)
        schema = schema_of(list(dataset.one.shards[:1]), catalog.dataset)
        processor = dataset.processor
        if processor is None:
            if schema != TokensProcessor.schema:
                held = "columns of no known schema" if schema is None else schema
                raise ConfigError(
                    f"{dataset.url} holds {held}, which only a processor turns into tokens: pass --tokenizer with the "
                    "folder or hub id of the run's tokenizer, or name the YAML file of the run"
                )
            processor = TokensProcessor()
        if near and processor.schema not in _COMPARED:
            raise ConfigError(
                f"--near compares texts or tokens, and dataset {name} holds {processor.schema}: leave --near out"
            )
        loaded = load_tokenizer(tokenizer) if tokenizer and isinstance(processor, TokensProcessor) else None
        packing = dataset.packing
        return AuditedDataset(
            name=name,
            dataset=dataset,
            processor=processor,
            tokenizer=loaded or getattr(processor, "tokenizer", None),
            schema=processor.schema,
            packing_length=None if packing is None else packing.packing_length,
            overlong="error" if packing is None else packing.overlong,
            positions=positions,
            near=near,
        )

    @property
    def trains_tokens(self) -> bool:
        """Whether the loss is on tokens, and labels have a meaning."""
        return getattr(self.processor, "objective", None) in (None, *get_args(Compared))

    @property
    def facts(self) -> set[str]:
        """Facts that checks need, see Check. "others" is added with several datasets."""
        known = {
            "labels": self.trains_tokens,
            "tokenizer": self.tokenizer is not None,
            "template": hasattr(self.processor, "not_shown"),
            "turns": hasattr(self.processor, "first_changed"),
            "chats": self.schema == "messages",
            "answers": self.schema in ("messages", "preference"),
            "pairs": self.schema == "preference",
            "texts": self.schema in ("messages", "preference", "text"),
            "spans": self.schema in ("messages", "text", "tokens"),
            "packs": self.packing_length is not None,
            "positions": self.positions is not None,
            "near": self.near,
        }
        return {name for name, is_known in known.items() if is_known}


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """Result of an audit. datasets: name -> URL. num_samples: of the datasets; num_read: samples that were read.
    trained_shares, histogram: see SourceView. tokenizing_s, near_s: seconds in processors, and for near duplicates, of
    all workers together.
    """

    datasets: Mapping[str, str]
    sources: Mapping[str, SourceView]
    findings: Sequence[Finding]
    num_samples: int
    num_read: int
    num_tokens: int
    num_trained: int
    trained_shares: Sequence[float]
    histogram: Sequence[int]
    tokenizing_s: float
    near_s: float

    @property
    def verdict(self) -> Verdict:
        return worst([each.verdict for each in self.findings])


def audit(
    datasets: Sequence[AuditedDataset],
    *,
    limit: int | None = None,
    expected: Collection[str] = (),
    num_workers: int | None = None,
    on_start: Callable[[int], None] = lambda count: None,
    on_samples: Callable[[int], None] = lambda count: None,
) -> AuditReport:
    """Read the samples of datasets by their processors; return all findings.

    limit: number of samples to read of each dataset, drawn evenly (default: all). expected: names of checks with the
    verdict "ok" in any case. on_start: called with the number of samples to read. on_samples: called with the number of
    newly read samples. Raises ConfigError, StorageError, ShardError, WorkerError; an error of a sample is a finding.
    """
    check_names(expected)
    totals = [_Totals(each, is_only=len(datasets) == 1) for each in datasets]
    tasks = [list(each.tasks(limit)) for each in totals]
    on_start(sum(each.num_read for each in totals))
    for total, of_dataset in zip(totals, tasks, strict=True):
        total.read(of_dataset, num_workers=num_workers, on_samples=on_samples)
    samples = _Samples(totals)
    samples.add_repeated()
    comparing_s = samples.add_near() if any(each.near for each in datasets) else 0.0
    return _report(totals, expected, comparing_s=comparing_s)


class _Totals:
    """Sums of a dataset's shards."""

    def __init__(self, audited: AuditedDataset, *, is_only: bool):
        self.audited = audited
        stored = audited.dataset.one
        self._provenance = Provenance.of(stored.storage, stored.cache.folder)
        sources = () if self._provenance is None else self._provenance.sources
        of_dataset = "" if is_only else f"{audited.name}: "
        self._names = [f"{of_dataset}{source}" for source in sources] if len(sources) > 1 else [audited.name]
        facts = audited.facts | (set() if is_only else {"others"})
        self.checks = {
            name: check for name, check in with_overlong(audited.overlong).items() if facts >= {*check.needs.split()}
        }
        self.counts: dict[str, NDArray[np.int64]] = {}
        self.histograms: dict[str, NDArray[np.int64]] = {}
        self.num_trained: dict[str, int] = {}
        self.examples: dict[str, list[Example]] = {}
        self.sample_ids: list[NDArray[np.int64]] = []  # in the order of their reading
        self.hashes: list[NDArray[np.uint64]] = []
        self.sketches: list[NDArray[np.uint16]] = []
        self.num_read = 0
        self.tokenizing_s = 0.0
        self.near_s = 0.0

    def tasks(self, limit: int | None) -> Iterator[AuditTask]:
        """Yield the shards to read, with the samples to read of each."""
        samples = self.audited.dataset.one.shards.samples
        first_ids = np.cumsum(samples) - samples
        shards = np.flatnonzero(samples)
        if limit is not None and limit < samples.sum():
            num_shards = min(len(shards), max(1, -(-limit // _SHARE_OF_SHARDS)))
            while samples[chosen := shards[np.linspace(0, len(shards) - 1, num_shards).astype(int)]].sum() < limit:
                num_shards = min(len(shards), 2 * num_shards)
            shards = chosen
            ends = np.cumsum(samples[shards])
            drawn = np.linspace(0, ends[-1] - 1, min(limit, int(ends[-1]))).astype(np.int64)
            for number, shard in enumerate(shards.tolist()):
                first = int(ends[number] - samples[shard])
                indices = drawn[(drawn >= first) & (drawn < ends[number])] - first
                if len(indices):
                    yield self._task(shard, int(first_ids[shard]), indices)
            return
        for shard in shards.tolist():
            yield self._task(shard, int(first_ids[shard]), np.arange(samples[shard]))

    def _task(self, shard: int, first_id: int, indices: NDArray[np.int64]) -> AuditTask:
        self.num_read += len(indices)
        return AuditTask(self.audited.dataset.one.shards[shard], first_id, indices, self._sources(first_id + indices))

    def _sources(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if self._provenance is None or len(self._names) == 1:
            return None
        numbers = (self._provenance.rows[sample_ids] >> np.uint64(ROW_BITS)).astype(np.int64)
        if len(numbers) and numbers.max() >= len(self._names):
            raise ShardError(
                f"{self.audited.dataset.url} names source {numbers.max()} of {len(self._names)}: convert the dataset "
                "again"
            )
        return numbers

    def read(self, tasks: Sequence[AuditTask], *, num_workers: int | None, on_samples: Callable[[int], None]) -> None:
        """Read the samples, in several processes."""
        audited, stored = self.audited, self.audited.dataset.one
        with TemporaryDirectory(prefix="lmms_stream-audit-", ignore_cleanup_errors=True) as folder:
            auditor = Auditor(
                processor=audited.processor,
                schema=audited.schema,
                tokenizer=audited.tokenizer,
                cache=LocalCache(stored.storage, Path(folder)),
                packing_length=audited.packing_length,
                overlong=audited.overlong,
                positions=audited.positions,
                trains_tokens=audited.trains_tokens,
                near=audited.near,
            )
            num_processes = max(1, min(num_workers or num_cores(), len(tasks)))
            done: list[tuple[AuditTask, ShardFacts]] = []
            with open_pool(auditor, num_processes, name=lambda task: task.info.name, on_progress=on_samples) as pool:
                done += do_all(pool, tasks)
        for task, facts in sorted(done, key=lambda each: each[0].first_id):
            self._add(task, facts)

    def _add(self, task: AuditTask, facts: ShardFacts) -> None:
        for number, counts in facts.counts.items():
            name = self._names[number]
            self.counts[name] = self.counts.get(name, np.zeros(len(ROWS), np.int64)) + counts
            histogram = self.histograms.get(name, np.zeros(NUM_SHARES + 1, np.int64))
            self.histograms[name] = histogram + facts.histograms[number]
            self.num_trained[name] = self.num_trained.get(name, 0) + facts.num_trained[number]
        for check, examples in facts.examples.items():
            shown = self.examples.setdefault(check, [])
            for sample_id, excerpt in examples[: MAX_EXAMPLES - len(shown)]:
                shown.append(Example(*self.place(sample_id), excerpt))
        self.sample_ids.append(task.first_id + task.indices)
        self.hashes.append(facts.hashes)
        self.sketches.append(facts.sketches)
        self.tokenizing_s += facts.tokenizing_s
        self.near_s += facts.near_s

    def place(self, sample_id: int) -> Place:
        """Return the place of a sample of the dataset."""
        source = "" if self._provenance is None else str(self._provenance.source_of(sample_id))
        return Place(self.audited.name, sample_id, source)

    def add_repeats(self, check: str, sample_ids: NDArray[np.int64], like: Sequence[tuple[str, Place]]) -> None:
        """Count samples that repeat earlier samples. like: the similarity and the earlier sample of the first few."""
        sources = self._sources(sample_ids)
        numbers = np.zeros(len(sample_ids), np.int64) if sources is None else sources
        for number, count in enumerate(np.bincount(numbers, minlength=1).tolist()):
            if count:
                self.counts[self._names[number]][ROWS[check]] += count
        self.examples[check] = [
            Example(*self.place(sample_id), f"{how} {earlier}", earlier)
            for sample_id, (how, earlier) in zip(sample_ids.tolist(), like, strict=False)
        ]


class _Samples:
    """All samples that were read, in the order of datasets and of their reading."""

    def __init__(self, totals: Sequence[_Totals]):
        self._totals = totals
        self._numbers = np.repeat(np.arange(len(totals)), [each.num_read for each in totals])  # of datasets
        self._sample_ids = np.concatenate([np.empty(0, np.int64), *(ids for each in totals for ids in each.sample_ids)])
        self._are_repeated = np.zeros(len(self._numbers), np.bool_)

    def add_repeated(self) -> None:
        """Count samples equal to an earlier sample of their dataset, or to a sample of an earlier dataset."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(each for total in self._totals for each in total.hashes)])
        for number in range(len(self._totals)):
            own = np.flatnonzero(self._numbers == number)
            later, firsts = repeated_of(hashes[own])
            self._add("repeated", own[later], own[firsts], lambda *_: "equal to")
        later, firsts = repeated_of(hashes)
        across = self._numbers[later] != self._numbers[firsts]
        self._add("repeated-across", later[across], firsts[across], lambda *_: "equal to")
        self._are_repeated[later] = True

    def add_near(self) -> float:
        """Count samples similar to an earlier sample, of any dataset, and not repeated; return the seconds."""
        begun = time.perf_counter()
        sketches = np.zeros((len(self._numbers), NUM_HASHES), np.uint16)
        at = 0
        for total in self._totals:
            while total.sketches:  # freed one after another
                each = total.sketches.pop(0)
                sketches[at : at + len(each)] = each
                at += len(each)
        sketches[self._are_repeated] = 0
        later, earlier = similar_of(sketches)
        self._add(
            "near-duplicates",
            later,
            earlier,
            lambda one, other: f"{similarity(sketches[one], sketches[other]):.0%} of the pieces like",
        )
        return time.perf_counter() - begun

    def _add(
        self, check: str, later: NDArray[np.int64], earlier: NDArray[np.int64], how: Callable[[int, int], str]
    ) -> None:
        """Count samples at the indices `later` that repeat the samples at `earlier`. how: of a pair, in words."""
        for number, total in enumerate(self._totals):
            own = np.flatnonzero(self._numbers[later] == number)
            pairs = zip(later[own[:MAX_EXAMPLES]].tolist(), earlier[own[:MAX_EXAMPLES]].tolist(), strict=True)
            like = [(how(one, other), self._place(other)) for one, other in pairs]
            if len(own):
                total.add_repeats(check, self._sample_ids[later[own]], like)

    def _place(self, index: int) -> Place:
        return self._totals[int(self._numbers[index])].place(int(self._sample_ids[index]))


def _report(totals: Sequence[_Totals], expected: Collection[str], *, comparing_s: float) -> AuditReport:
    findings = []
    for name in NAMES:
        made = [each for each in totals if name in each.checks]
        if not made:
            continue
        check = max((each.checks[name] for each in made), key=lambda one: one.wrong is not None)
        counts = {source: row for each in made for source, row in each.counts.items()}
        by_turns = zip_longest(*(each.examples.get(name, ()) for each in made))
        examples = [example for turn in by_turns for example in turn if example is not None]
        findings.append(finding(check, counts, examples=examples, expected=expected))
    sources = {
        source: SourceView(
            num_samples=int(row[ROWS["samples"]]),
            num_tokens=int(row[ROWS["tokens"]]),
            num_trained=each.num_trained[source],
            trained_shares=quantiles_of(each.histograms[source]),
            histogram=bars_of(each.histograms[source]),
        )
        for each in totals
        for source, row in each.counts.items()
    }
    histogram = sum((one for each in totals for one in each.histograms.values()), np.zeros(NUM_SHARES + 1, np.int64))
    return AuditReport(
        datasets={each.audited.name: each.audited.dataset.url for each in totals},
        sources=sources,
        findings=findings,
        num_samples=sum(each.audited.dataset.num_samples for each in totals),
        num_read=sum(each.num_read for each in totals),
        num_tokens=sum(each.num_tokens for each in sources.values()),
        num_trained=sum(each.num_trained for each in sources.values()),
        trained_shares=quantiles_of(histogram),
        histogram=bars_of(histogram),
        tokenizing_s=sum(each.tokenizing_s for each in totals),
        near_s=comparing_s + sum(each.near_s for each in totals),
    )


def report_json(report: AuditReport) -> dict[str, Any]:
    """Convert a report to a JSON object."""
    return (
        {"verdict": report.verdict}
        | {name: as_json(getattr(report, name)) for name in AuditReport.__dataclass_fields__ if name != "sources"}
        | {
            "sources": {
                name: {field: as_json(getattr(each, field)) for field in SourceView.__dataclass_fields__}
                for name, each in report.sources.items()
            }
        }
    )
