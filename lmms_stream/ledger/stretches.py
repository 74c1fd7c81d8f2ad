"""Stretches as a checkpoint keeps them (see loader/stretches.py) -> those of a plan's ledger, their datasets opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError
from ..mds.pack_counts import PackCountsFolder
from ..mds.streams import StoredDataset, StreamConfig
from ..plan.cursor import Cursor
from ..plan.ledger import Stretch
from ..plan.mixture import Mixture
from ..plan.order import OrderConfig
from ..plan.pack_plan import PackPlan
from ..plan.packing import PackingConfig
from ..storage.fetch_config import FetchConfig
from ..types import World


class OpenedSources:
    """Plans of datasets, each opened once. urls: of each source by name, where it lies now, if that changed."""

    def __init__(self, urls: Mapping[str, str] | None = None):
        self._urls = dict(urls or {})
        self._stored: dict[str, StoredDataset] = {}
        self._plans: dict[str, PackPlan] = {}

    def url(self, name: str, saved: Mapping[str, Any]) -> str:
        return self._urls.get(name, str(saved["url"]))

    def plan(self, name: str, saved: Mapping[str, Any]) -> PackPlan:
        """The plan of a source, as the checkpoint describes it; LengthsError, StorageError for what is gone."""
        key = repr((name, sorted(saved.items())))
        if key not in self._plans:
            url = self.url(name, saved)
            if url not in self._stored:
                self._stored[url] = StoredDataset(StreamConfig(remote=url), config=FetchConfig())
            stored = self._stored[url]
            counts = PackCountsFolder(stored.cache.folder / "_lmms" / "counts")
            self._plans[key] = PackPlan(
                stored.lengths_of(saved["lengths"]),
                stored.shards.samples,
                order=OrderConfig(**saved["order"]),
                packing=PackingConfig(**saved["packing"]),
                counts_cache=counts,
                counting=counts.counting,
            )
        return self._plans[key]


def open_stretches(saved: Sequence[Mapping[str, Any]], sources: OpenedSources, *, where: str) -> list[Stretch]:
    """The stretches of a run, as its checkpoint `where` keeps them; CheckpointError for what cannot be read.

    CursorError where a dataset is not the one that was trained on.
    """
    try:
        return [_opened(each, sources) for each in saved]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the history of the run in {where} is damaged ({error!r}): use another of its checkpoints"
        ) from error


def _opened(saved: Mapping[str, Any], sources: OpenedSources) -> Stretch:
    plans = {name: sources.plan(name, source) for name, source in saved["sources"].items()}
    weights = saved["weights"]
    mixture = Mixture(
        plans,
        weights=None if weights is None else {int(step): shares for step, shares in weights},
        max_epochs=saved["max_epochs"] or None,
    )
    return Stretch(
        mixture=mixture,
        cursor=mixture.adopt(Cursor.from_dict(saved["cursor"])),
        global_batch=saved["global_batch"],
        world=World(**saved["world"]),
        skipped=[(first, stop) for first, stop in saved["skip_steps"]],
    )
