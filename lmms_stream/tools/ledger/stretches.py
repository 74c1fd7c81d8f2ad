"""Stretches as a checkpoint keeps them (see loader/loader.py) -> those of a plan's ledger, their datasets opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointError, CursorError, LmmsStreamError
from ...mds.core import PackCountsFolder
from ...mds.streams import StoredDataset, StreamConfig
from ...plan.cursor import FINGERPRINT_FIELDS, Cursor, explain_other_plan
from ...plan.ledger import Stretch
from ...plan.mixture import Mixture
from ...plan.order import OrderConfig
from ...plan.pack_plan import PackPlan, short_digest
from ...plan.packing import PackingConfig
from ...storage.fetch_config import FetchConfig
from ...types import World


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
