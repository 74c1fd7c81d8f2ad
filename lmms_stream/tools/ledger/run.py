"""The ledger of a run, from one of its checkpoints, or from its config before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import CheckpointError, ConfigError, CursorError, LmmsStreamError
from ...loader.drop_list import dropped
from ...mds.core import PackCountsFolder, PackedDataset
from ...mds.lengths import concatenated
from ...mds.streams import StoredDataset, StreamConfig
from ...plan.cursor import FINGERPRINT_FIELDS, Cursor, explain_other_plan
from ...plan.ledger import PieceEntry, StepEntry, Stretch
from ...plan.ledger import StepLookup as PlanLedger
from ...plan.left_out import LeftOut
from ...plan.order import OrderConfig
from ...plan.pack_plan import PackPlan, short_digest
from ...plan.packing import PackingConfig
from ...plan.windows import DEAL, WindowedMixture
from ...storage.fetch_config import FetchConfig
from ...train.checkpoint.store import CHECKPOINTS_NAME
from ...train.report.train_log import LOG_NAME, history, read_log
from ...types import World
from .amounts import SourceAmounts, amounts_of, step_after, steps_to_end
from .opening import Retraining, RunHistory, open_history, retraining
from .origins import Origins

When = Literal["trained", "passed over", "planned", "beyond the end", "not read", "quarantined", "dropped"]


class Ledger:
    """Samples of past and future steps of a run, across all changes of settings and ranks.

    run: a checkpoint; or a run's output_dir or checkpoint folder, for its latest checkpoint (path or URL); or the YAML
    file of a run before its first step. world: ranks of the run in a YAML file (default: one). overrides: settings of
    the YAML file as `key.sub=value`. urls: new URLs of moved sources, by name. Steps are counted from 0, including
    skipped steps, like in skip_steps and in the plan. Shards and logs are not read.

    stop: the first untrained step. left_out: samples replaced by padding from a given step. num_added: samples added to
    each source's dataset after training.

    CheckpointError if `run` is not a checkpoint or has no history: written by an earlier release, or packs made in
    lanes (see LoggedLedger). LengthsError, StorageError, CursorError if a dataset is missing or differs. ConfigError
    for an invalid config.
    """

    def __init__(
        self,
        run: str | Path | RunHistory,
        *,
        urls: Mapping[str, str] | None = None,
        world: World | None = None,
        overrides: Sequence[str] = (),
    ):
        self.history = run if isinstance(run, RunHistory) else open_history(str(run), world=world, overrides=overrides)
        if not self.history.stretches:
            raise CheckpointError(
                f"{self.history.where} has no history of its run: it was saved by an earlier release, or its packs are "
                "made in lanes, which are unknown before reading; with the setting log_sample_ids a run logs its ids"
            )
        self._sources = OpenedSources(urls)
        self.plans = PlanLedger(open_stretches(self.history.stretches, self._sources, where=self.history.where))
        self.where, self.stop = self.history.where, self.history.stop
        self.left_out = LeftOut.load(self.history.state.get("left_out", ()))
        self.origins = Origins(self._sources.stored)
        self.num_added: Mapping[str, int] = self._sources.num_added

    @cached_property
    def end(self) -> int | None:
        """Number of steps of the run by its settings; None if the settings do not determine the number (max_tokens)."""
        last, settings = self.plans.stretches[-1], self.history.settings
        rest, is_weighted = replace(last, cursor=self.plans.cursor(self.stop)), last.mixture.schedule is not None
        if settings.num_train_epochs is not None and not is_weighted:
            return self.stop + (steps_to_end(rest, num_epochs=settings.num_train_epochs) or 0)
        if settings.max_steps is None:
            return None
        end = step_after(self.stop, settings.max_steps - self.history.num_trained, skipped=last.skipped)
        left = steps_to_end(rest) if is_weighted else None
        return end if left is None else min(end, self.stop + left)

    def step(self, number: int) -> StepEntry:
        """Packs of a past or future step; CursorError for a step outside the run."""
        return self.plans.step(number)

    def sample(self, source: str, sample_id: int, *, stop: int | None = None) -> list[PieceEntry]:
        """Past and future positions of a sample, each piece in each epoch: see PlanLedger.sample.

        stop: only steps before `stop`. Default: all steps up to the end of the epoch in which the run ends by its
        settings; if the end is unknown, up to the end of the current epoch. See `when`.
        """
        if stop is not None:
            return self.plans.sample(source, sample_id, stop=stop)
        until = max(self.stop, self.end or 0)
        entries = self.plans.sample(source, sample_id, stop=until, ahead=True)
        num_epochs = max(1, self.plans.num_epochs(source, until, ahead=self.end is None))
        return [entry for entry in entries if entry.epoch < num_epochs]

    def when(self, entry: PieceEntry, sample: tuple[str, int] | None = None) -> When:
        """Past or future state of a piece of a sample; "beyond the end": the run ends before the step.

        sample: its source and id, to recognize steps in which the sample is replaced by padding.
        """
        if entry.step is None:
            return "not read"
        if entry.is_skipped:
            return "passed over"
        left_out = None if sample is None else self.left_out.get(*sample)
        if left_out is not None and left_out.since_step <= entry.step:
            return left_out.kind
        if entry.step < self.stop:
            return "trained"
        return "planned" if self.end is None or entry.step < self.end else "beyond the end"

    def first_step(self, samples: Iterable[tuple[str, int]]) -> Retraining | None:
        """Steps to retrain for a run without some samples; None if no step trained on the samples.

        samples: source and id of each sample. PackingError for an unknown sample.
        """
        ids: dict[str, list[int]] = {}
        for source, sample_id in samples:
            ids.setdefault(source, []).append(sample_id)
        return retraining(
            self.plans,
            {source: np.unique(np.array(each, np.int64)) for source, each in ids.items()},
            history=self.history,
            left_out=self.left_out,
        )

    def listed(self, file: str | Path) -> list[tuple[str, int]]:
        """Return source and id of each sample in a drop list, read like in a run; ConfigError if the list is empty."""
        samples = dropped(str(file), self.origins.named).samples
        if not samples:
            raise ConfigError(f"the drop list {file} names no samples: write a line for each, SOURCE:ID or FILE:ROW")
        return [(each.source, each.sample_id) for each in samples]

    def amounts(self, stop: int | None = None) -> dict[str, SourceAmounts]:
        """Amount of data read from each source before a step (default: the checkpoint's)."""
        return amounts_of(self.plans, self.stop if stop is None else stop, left_out=self.left_out)

    def tokens_of(self, source: str, sample_id: int) -> int:
        """Length of a sample in tokens; PackingError for an unknown sample."""
        plan = self.plans.plan(source)
        plan.check_sample(sample_id)
        return int(plan.lengths[sample_id])

    def why_nowhere(self, source: str, sample_id: int) -> str:
        """Explain to the user why no step reads a sample or a piece of the sample."""
        tokens, plan = self.tokens_of(source, sample_id), self.plans.plan_before(source, self.stop)
        limit = plan.packing.packing_length
        if tokens > limit and not len(plan.packs_of(0, sample_id)):
            return f"it is in no pack: it has more than the {limit:,} tokens of one, and such samples are dropped"
        last = self.plans.stretches[-1]
        if source not in last.mixture.plans:
            return f"{source} ended before: from step {last.cursor.step} on the run has no such source"
        most = last.mixture.max_epochs.get(source)
        if most is not None and self.plans.cursor(max(self.stop, self.end or 0)).sources[source].epoch >= most:
            return f"{source} ended before: max_epochs gives it {most}"
        if last.mixture.schedule is not None:
            return f"no step reads it: the weights of {source} give it no steps"
        return f"no step reads {source} before step {self.stop}"

    @property
    def urls(self) -> dict[str, str]:
        """URL of each source, and instead of a source of several streams of each stream."""
        return {
            name: one.url
            for source, each in self._sources.stored.items()
            for name, one in _streams(source, each).items()
        }

    def located(self, name: str, number: int) -> tuple[str, int]:
        """Return source and id of a sample, by the name of its source, or of its stream."""
        for source in self._sources.stored if name not in self._sources.stored else ():
            if (sample_id := self.origins.sample_named(source, name, number)) is not None:
                return source, sample_id
        return name, number

    def named(self, source: str, sample_id: int) -> tuple[str, int]:
        """Return the stream of a sample and its number in the stream; source and id for a source without streams."""
        stored = self._sources.stored[source]
        if not isinstance(stored, PackedDataset):
            return source, sample_id
        stream, number = stored.place_of(sample_id)
        return stored.names[stream], number

    @property
    def identities(self) -> dict[str, str]:
        """Identity of each source's dataset (StoredDataset.identity): sample ids are valid for this dataset.

        For a dataset with added samples: the identity before the addition; sample ids are unchanged.
        """
        return {name: stored.identity for name, stored in self._sources.stored.items()}


# Samples in the log of a run in lanes. Lanes pack samples during reading, without a plan.

CANNOT = (
    "the packs of this run are made in lanes, as samples are read: of steps to come, of ranks and micro-batches, and "
    "of what is left of an epoch nothing is known"
)


class LoggedLedger:
    """Samples of the logged steps of a run in lanes with log_sample_ids.

    output_dir: the run's folder, with its log. Steps are counted from 0, like in Ledger. ConfigError if the log is
    missing or has no ids.
    """

    def __init__(self, run: RunHistory, *, output_dir: Path):
        self.where, self.stop = run.where, run.stop
        self.tokens_seen, self.samples_seen = (int(run.state.get(name, 0)) for name in ("tokens_seen", "samples_seen"))
        self._log = output_dir / LOG_NAME

    @cached_property
    def steps(self) -> Mapping[int, tuple[int, ...]]:
        """Sample ids of each logged step before the checkpoint, with repetitions."""
        records = history(read_log(self._log)).steps
        found = {
            record["step"] - 1: tuple(map(int, record["sample_ids"]))
            for record in records
            if "sample_ids" in record and record["step"] <= self.stop
        }
        if not found:
            raise ConfigError(
                f"{self._log} has no sample ids: {CANNOT}; for finished steps only the log has ids, with "
                "train.log_sample_ids"
            )
        return found

    def step(self, number: int) -> tuple[int, ...]:
        """Sample ids of a step; CursorError for a step without an entry in the log."""
        if number not in self.steps:
            raise CursorError(
                f"step {number} is not in {self._log}, which has the samples of {len(self.steps)} steps: {CANNOT}"
            )
        return self.steps[number]

    def sample(self, sample_id: int) -> list[int]:
        """Logged steps with at least one piece of a sample."""
        return [number for number, ids in sorted(self.steps.items()) if sample_id in ids]


def output_dir_of(run: str, *, names: Sequence[str] = (LOG_NAME,), why: str = CANNOT) -> Path:
    """Return the output_dir for a path of the user: output_dir, checkpoint folder or checkpoint.

    names: files, any of which is there. why: for the error.
    """
    path = Path(run)
    for folder in (path, path.parent, path.parent.parent):
        if any((folder / name).is_file() for name in names):
            return folder
    raise ConfigError(
        f"{run}: {why}, and there is no {' or '.join(names)} next to it: name the output_dir of the run, with its "
        f"{CHECKPOINTS_NAME}"
    )


# Stretches stored in a checkpoint (see loader/loader.py) -> stretches of a plan's ledger, with opened datasets.


class OpenedSources:
    """Datasets of a run, each opened once. urls: new URLs of moved datasets, by name.

    stored: datasets by name, in the version of the last stretch with the dataset. num_added: number of samples added
    later to each grown dataset.
    """

    def __init__(self, urls: Mapping[str, str] | None = None):
        self._urls = dict(urls or {})
        self._opened: dict[str, StoredDataset] = {}  # current versions, by URL
        self._stored: dict[tuple[str, str], StoredDataset] = {}  # by URL and the shards' digest in the plan
        self._plans: dict[str, PackPlan] = {}
        self.stored: dict[str, StoredDataset | PackedDataset] = {}
        self.num_added: dict[str, int] = {}

    def url(self, name: str, saved: Mapping[str, Any]) -> str:
        return self._urls.get(name, str(saved["url"]))

    def plan(self, name: str, saved: Mapping[str, Any], *, followed: str) -> PackPlan:
        """Plan of a source by the checkpoint's description. followed: fingerprint of the plan in the run.

        LengthsError, StorageError for missing data, CursorError if the URL has a different dataset.
        """
        key = repr((name, sorted(saved.items())))
        if "streams" in saved and key in self._plans:
            return self._plans[key]
        fields = followed.split("-")
        shards = fields[2] if len(fields) == len(FINGERPRINT_FIELDS) else ""  # "": of another release
        stored = self.stored[name] = (
            self._mixed(saved["streams"])
            if "streams" in saved
            else self._as_it_was(name, self.url(name, saved), num_parts=saved.get("num_parts"), shards=shards)
        )
        if key not in self._plans:
            parts = list(_streams(name, stored).values())
            counts = PackCountsFolder(parts[0].cache.folder / "_lmms" / "counts")
            indexes = [each.lengths_of(saved["lengths"]) for each in parts]
            built = PackPlan(
                indexes[0] if len(indexes) == 1 else concatenated(indexes),
                stored.samples_per_shard if isinstance(stored, PackedDataset) else stored.shards.samples,
                order=OrderConfig(**saved["order"]),
                packing=PackingConfig(**saved["packing"]),
                counts_cache=counts,
                counting=counts.counting,
                streams=stored.streams if isinstance(stored, PackedDataset) else None,
            )
            _check_same(name, built, stored, followed=followed, saved=saved)
            self._plans[key] = built
        return self._plans[key]

    def _mixed(self, listed: Sequence[Mapping[str, Any]]) -> PackedDataset:
        """Return the dataset of a source of several streams."""
        configs = [
            StreamConfig(remote=self._urls.get(each["name"], each["url"]), num_parts=each["num_parts"])
            for each in listed
        ]
        names, counts = [[each[field] for each in listed] for field in ("name", "count")]
        return PackedDataset(configs, names=names, counts=counts, world=World())

    def _as_it_was(self, name: str, url: str, *, num_parts: int | None, shards: str) -> StoredDataset:
        """Dataset at a URL, without the parts added after the run read it.

        num_parts: number of parts during the run; None in checkpoints of earlier releases, without the number.
        shards: digest of the shards during the run.
        """
        if (url, shards) in self._stored:
            return self._stored[url, shards]
        if url not in self._opened:
            self._opened[url] = StoredDataset(StreamConfig(remote=url), config=FetchConfig())
        now = self._opened[url]
        first = [num_parts] if num_parts is not None and num_parts <= now.num_parts else []
        cut = (now.as_of(number) for number in (*first, *reversed(range(now.num_parts + 1))))
        found = next((each for each in cut if short_digest(each.shards.samples.tobytes()) == shards), now)
        if found.num_samples < now.num_samples:
            self.num_added[name] = now.num_samples - found.num_samples
        self._stored[url, shards] = found
        return found


def _streams(source: str, stored: StoredDataset | PackedDataset) -> dict[str, StoredDataset]:
    """Return the stored datasets of a source: by name of the stream, or of the source without streams."""
    if isinstance(stored, PackedDataset):
        return dict(zip(stored.names, stored.stored, strict=True))
    return {source: stored}


def _check_same(
    name: str, built: PackPlan, stored: StoredDataset | PackedDataset, *, followed: str, saved: Mapping[str, Any]
) -> None:
    """Raise CursorError if a dataset differs from the run's dataset: sample ids are then invalid."""
    differs = explain_other_plan(name, followed, built.fingerprint) if built.fingerprint != followed else ""
    identity = saved.get("identity", stored.identity)  # missing in checkpoints of earlier releases
    if not differs and identity != stored.identity:
        differs = f"the run read a dataset {identity} as {name!r}, and {stored.identity} lies at {stored.url} now"
    if differs:
        raise CursorError(
            f"{differs}. The run's ids belong to the dataset of that time: name a copy of that dataset with --url "
            f"{name}=URL (urls); --renamed translates its ids to ids of another dataset"
        )


def open_stretches(saved: Sequence[Mapping[str, Any]], sources: OpenedSources, *, where: str) -> list[Stretch]:
    """Open the stretches stored in the run's checkpoint `where`; CheckpointError for a damaged history.

    CursorError if a dataset differs from the run's dataset.
    """
    try:
        return [_opened(each, sources) for each in saved]
    except LmmsStreamError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the history of the run in {where} is damaged ({error!r}): use another of its checkpoints"
        ) from error


def _opened(saved: Mapping[str, Any], sources: OpenedSources) -> Stretch:
    cursor = Cursor.from_dict(saved["cursor"])
    plans = {
        name: sources.plan(name, source, followed=cursor.sources[name].plan)
        for name, source in saved["sources"].items()
    }
    weights = saved["weights"]
    mixture = WindowedMixture(
        plans,
        weights=None if weights is None else {int(step): shares for step, shares in weights},
        max_epochs=saved["max_epochs"] or None,
        balance=saved.get("balance", DEAL),
    )
    return Stretch(
        mixture=mixture,
        cursor=mixture.adopt(cursor),
        global_batch=saved["global_batch"],
        world=World(**saved["world"]),
        skipped=[(first, stop) for first, stop in saved["skip_steps"]],
    )
