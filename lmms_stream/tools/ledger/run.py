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
from ...mds.core import PackCountsFolder
from ...mds.streams import StoredDataset, StreamConfig
from ...plan.cursor import FINGERPRINT_FIELDS, Cursor, explain_other_plan
from ...plan.ledger import PieceEntry, StepEntry, Stretch
from ...plan.ledger import StepLookup as PlanLedger
from ...plan.left_out import LeftOut
from ...plan.mixture import Mixture
from ...plan.order import OrderConfig
from ...plan.pack_plan import PackPlan, short_digest
from ...plan.packing import PackingConfig
from ...storage.fetch_config import FetchConfig
from ...train.checkpoint.store import CHECKPOINTS_NAME
from ...train.report.train_log import LOG_NAME, history, read_log
from ...types import World
from .amounts import SourceAmounts, amounts_of, step_after, steps_to_end
from .opening import RunHistory, open_history
from .origins import Origins
from .retrain import Retraining, retraining

When = Literal["trained", "passed over", "planned", "beyond the end", "not read", "quarantined", "dropped"]


class Ledger:
    """What the steps of a run held and will hold, whichever settings and ranks it had on the way.

    run: a checkpoint, or the output_dir or the checkpoint folder of a run, whose latest is taken; paths or URLs. Or the
    YAML file of a run, of which nothing is trained then; world: the ranks that it will have (default: one), overrides:
    settings as `key.sub=value`. urls: where sources lie now, by name, if that changed. Steps are counted as skip_steps
    and the plan count them: from 0, those that were passed over among them. No shard is read, and no log.

    stop: the first step that is not trained. left_out: samples that are padding from a step on. num_added: samples that
    the datasets of sources have grown by since.

    CheckpointError for what is no checkpoint, and for one without a history: of an earlier release, or of a run whose
    packs lanes make, which are not known beforehand (see LoggedLedger). LengthsError, StorageError, CursorError where a
    dataset is gone or is another. ConfigError for a config that cannot be.
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
                f"{self.history.where} keeps no history of its run: it is of an earlier release, or its packs are made "
                "in lanes, which are not known beforehand; log_sample_ids in the settings of a run has its log say them"
            )
        self._sources = OpenedSources(urls)
        self.plans = PlanLedger(open_stretches(self.history.stretches, self._sources, where=self.history.where))
        self.where, self.stop = self.history.where, self.history.stop
        self.left_out = LeftOut.load(self.history.state.get("left_out", ()))
        self.origins = Origins(self._sources.stored)
        self.num_added: Mapping[str, int] = self._sources.num_added

    @cached_property
    def end(self) -> int | None:
        """The step that the run ends before, by its settings; None where they do not say it (max_tokens)."""
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
        """The packs of a step, trained or not yet; CursorError for one that the run has not, nor will have."""
        return self.plans.step(number)

    def sample(self, source: str, sample_id: int, *, stop: int | None = None) -> list[PieceEntry]:
        """Where a sample was and will be, each piece in each epoch: see PlanLedger.sample.

        stop: steps before it alone. Otherwise those of all of the run, and of the epoch in which it ends, by its
        settings; where its end is not known, of the epoch that it stands in. See `when`.
        """
        if stop is not None:
            return self.plans.sample(source, sample_id, stop=stop)
        until = max(self.stop, self.end or 0)
        entries = self.plans.sample(source, sample_id, stop=until, ahead=True)
        num_epochs = max(1, self.plans.num_epochs(source, until, ahead=self.end is None))
        return [entry for entry in entries if entry.epoch < num_epochs]

    def when(self, entry: PieceEntry, sample: tuple[str, int] | None = None) -> When:
        """What became of a piece of a sample, or will: "beyond the end" is a step that the run will not have.

        sample: its source and id, to tell steps in which it is left out, as padding.
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
        """What would have to be trained again had some samples not been there; None where none of them was trained.

        samples: each as its source and id. PackingError for one that is not there.
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
        """The samples of a drop list as a run reads it, each as its source and id; ConfigError where it names none."""
        samples = dropped(str(file), self.origins.named).samples
        if not samples:
            raise ConfigError(f"the drop list {file} names no samples: write a line for each, SOURCE:ID or FILE:ROW")
        return [(each.source, each.sample_id) for each in samples]

    def amounts(self, stop: int | None = None) -> dict[str, SourceAmounts]:
        """What was read of each source before a step (default: the checkpoint's)."""
        return amounts_of(self.plans, self.stop if stop is None else stop, left_out=self.left_out)

    def tokens_of(self, source: str, sample_id: int) -> int:
        """The length of a sample; PackingError for one that is not there."""
        plan = self.plans.plan(source)
        plan.check_sample(sample_id)
        return int(plan.lengths[sample_id])

    def why_nowhere(self, source: str, sample_id: int) -> str:
        """Why no step reads anything of a sample, or of a piece of it, for people."""
        tokens, plan = self.tokens_of(source, sample_id), self.plans.plan(source)
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
        """Where each source lies."""
        return {name: stored.url for name, stored in self._sources.stored.items()}

    @property
    def identities(self) -> dict[str, str]:
        """What the dataset of each source is known by (StoredDataset.identity): an id names a sample of that dataset.

        Where a dataset has grown since, as it was: its ids are the same now.
        """
        return {name: stored.identity for name, stored in self._sources.stored.items()}


# What the log of a run in lanes says of its samples. Lanes pack samples as they are read, so no plan tells them.

CANNOT = (
    "the packs of this run are made in lanes, as samples are read: of steps to come, of ranks and micro-batches, and "
    "of what is left of an epoch nothing is known"
)


class LoggedLedger:
    """The samples of the steps that a run in lanes has logged; it had log_sample_ids.

    output_dir: of the run, where its log lies. Steps are counted from 0, as by Ledger. ConfigError where the log is
    not there, or has no ids.
    """

    def __init__(self, run: RunHistory, *, output_dir: Path):
        self.where, self.stop = run.where, run.stop
        self.tokens_seen, self.samples_seen = (int(run.state.get(name, 0)) for name in ("tokens_seen", "samples_seen"))
        self._log = output_dir / LOG_NAME

    @cached_property
    def steps(self) -> Mapping[int, tuple[int, ...]]:
        """Ids of the samples of each logged step that the checkpoint has, each as often as it is in the step."""
        records = history(read_log(self._log)).steps
        found = {
            record["step"] - 1: tuple(map(int, record["sample_ids"]))
            for record in records
            if "sample_ids" in record and record["step"] <= self.stop
        }
        if not found:
            raise ConfigError(
                f"{self._log} has no sample ids: {CANNOT}, and of steps that are done it is what the log keeps with "
                "train.log_sample_ids"
            )
        return found

    def step(self, number: int) -> tuple[int, ...]:
        """The ids of the samples of a step; CursorError for one that is not in the log."""
        if number not in self.steps:
            raise CursorError(
                f"step {number} is not in {self._log}, which has the samples of {len(self.steps)} steps: {CANNOT}"
            )
        return self.steps[number]

    def sample(self, sample_id: int) -> list[int]:
        """The logged steps that read something of a sample."""
        return [number for number, ids in sorted(self.steps.items()) if sample_id in ids]


def output_dir_of(run: str) -> Path:
    """The output_dir of what a user names: itself, its folder of checkpoints, or one of these."""
    path = Path(run)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / LOG_NAME).is_file():
            return folder
    raise ConfigError(
        f"{run}: {CANNOT}, and there is no {LOG_NAME} beside it: name the output_dir of the run, where its "
        f"{CHECKPOINTS_NAME} lie"
    )


# Stretches as a checkpoint keeps them (see loader/loader.py) -> those of a plan's ledger, their datasets opened.


class OpenedSources:
    """The datasets of a run, each opened once. urls: of each by name, where it lies now, if that changed.

    stored: each by name, as the last stretch that has it read it. num_added: of datasets that have grown since, how
    many samples.
    """

    def __init__(self, urls: Mapping[str, str] | None = None):
        self._urls = dict(urls or {})
        self._opened: dict[str, StoredDataset] = {}  # by URL, as they are now
        self._stored: dict[tuple[str, str], StoredDataset] = {}  # by URL, and by its shards' digest in the plan
        self._plans: dict[str, PackPlan] = {}
        self.stored: dict[str, StoredDataset] = {}
        self.num_added: dict[str, int] = {}

    def url(self, name: str, saved: Mapping[str, Any]) -> str:
        return self._urls.get(name, str(saved["url"]))

    def plan(self, name: str, saved: Mapping[str, Any], *, followed: str) -> PackPlan:
        """The plan of a source, as the checkpoint describes it. followed: the fingerprint of its plan then.

        LengthsError, StorageError for what is gone, CursorError where another dataset lies there.
        """
        key = repr((name, sorted(saved.items())))
        stored = self.stored[name] = self._as_it_was(
            name, self.url(name, saved), num_parts=saved.get("num_parts"), shards=_shards_of(followed)
        )
        if key not in self._plans:
            counts = PackCountsFolder(stored.cache.folder / "_lmms" / "counts")
            built = PackPlan(
                stored.lengths_of(saved["lengths"]),
                stored.shards.samples,
                order=OrderConfig(**saved["order"]),
                packing=PackingConfig(**saved["packing"]),
                counts_cache=counts,
                counting=counts.counting,
            )
            _check_same(name, built, stored, followed=followed, saved=saved)
            self._plans[key] = built
        return self._plans[key]

    def _as_it_was(self, name: str, url: str, *, num_parts: int | None, shards: str) -> StoredDataset:
        """The dataset at a URL; where it has grown, without the parts that it had not when these were its shards.

        num_parts: those that it had; None in checkpoints of earlier releases, which did not say.
        """
        if (url, shards) in self._stored:
            return self._stored[url, shards]
        if url not in self._opened:
            self._opened[url] = StoredDataset(StreamConfig(remote=url), config=FetchConfig())
        now = self._opened[url]
        first = [num_parts] if num_parts is not None and num_parts <= now.num_parts else []
        cut = (now.as_of(number) for number in (*first, *reversed(range(now.num_parts + 1))))
        found = next((each for each in cut if _digest(each) == shards), now)
        if found.num_samples < now.num_samples:
            self.num_added[name] = now.num_samples - found.num_samples
        self._stored[url, shards] = found
        return found


def _shards_of(followed: str) -> str:
    """The digest of the shards in a plan's fingerprint; "" for one that another release wrote."""
    fields = followed.split("-")
    return fields[2] if len(fields) == len(FINGERPRINT_FIELDS) else ""


def _digest(stored: StoredDataset) -> str:
    return short_digest(stored.shards.samples.tobytes())


def _check_same(name: str, built: PackPlan, stored: StoredDataset, *, followed: str, saved: Mapping[str, Any]) -> None:
    """CursorError where a dataset is not the one that was trained on, so that its ids name other samples."""
    differs = explain_other_plan(name, followed, built.fingerprint) if built.fingerprint != followed else ""
    identity = saved.get("identity", stored.identity)  # checkpoints of earlier releases have none
    if not differs and identity != stored.identity:
        differs = f"the run read a dataset {identity} as {name!r}, and {stored.identity} lies at {stored.url} now"
    if differs:
        raise CursorError(
            f"{differs}. The ids of the run's samples are those of the dataset as it was: name a copy of it "
            f"with --url {name}=URL (urls), and what its samples are called in another one is said by --renamed"
        )


def open_stretches(saved: Sequence[Mapping[str, Any]], sources: OpenedSources, *, where: str) -> list[Stretch]:
    """The stretches of a run, as its checkpoint `where` keeps them; CheckpointError for what cannot be read.

    CursorError where a dataset is not the one that was trained on.
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
    mixture = Mixture(
        plans,
        weights=None if weights is None else {int(step): shares for step, shares in weights},
        max_epochs=saved["max_epochs"] or None,
    )
    return Stretch(
        mixture=mixture,
        cursor=mixture.adopt(cursor),
        global_batch=saved["global_batch"],
        world=World(**saved["world"]),
        skipped=[(first, stop) for first, stop in saved["skip_steps"]],
    )
