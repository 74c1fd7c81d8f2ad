"""Datasets whose samples are mixed before packing: several datasets -> [mixed] -> one dataset of several streams."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError, CursorError
from ..plan.pack_plan import PackPlan, own_seeds, packed_tokens
from ..plan.sample_order import StreamShare, samples_chosen
from ..processors.base import processor_fingerprint
from .core import PackedDataset

logger = logging.getLogger("lmms_stream")
Mixing = Literal["packs", "samples"]


def check_mixing(weights: Mapping[Any, Any] | None, max_epochs: Mapping[str, int] | None) -> None:
    """Raise ConfigError for settings that do not go with the mixing of samples."""
    if weights is not None and not all(isinstance(each, int | float) for each in weights.values()):
        raise ConfigError(
            "mixing: samples packs an epoch with the same shares throughout, and weights is a schedule: name a single "
            "weight for each dataset, or take mixing: packs"
        )
    if max_epochs is not None:
        raise ConfigError(
            "mixing: samples has epochs of all datasets together, and max_epochs ends single datasets: leave it out, "
            "or take mixing: packs"
        )


def mixed(datasets: Mapping[str, PackedDataset], *, weights: Mapping[str, float] | None = None) -> PackedDataset:
    """Return the dataset of the samples of several datasets, as streams of these names.

    weights: shares of the tokens of packs; an epoch then has as many samples as all datasets, of each in proportion to
    its weight divided by the mean tokens of its samples. Datasets without a weight are not read. Default: an epoch has
    each sample once. Raises ConfigError for datasets with differing settings, for unknown names, and for lanes.
    """
    names, cores = [*datasets], [*datasets.values()]
    for name, core in datasets.items():
        if len(core.stored) > 1:
            raise ConfigError(f"dataset {name!r} has {len(core.stored)} streams: name each stream as a dataset")
        first, own = _settings(cores[0]), _settings(core)
        if key := next((key for key, value in first.items() if own[key] != value), None):
            raise ConfigError(
                f"mixing: samples packs the samples of all datasets together, and {key} is {first[key]!r} for "
                f"{names[0]!r} and {own[key]!r} for {name!r}: set one value, or take mixing: packs"
            )
    found = copy.copy(cores[0])
    found.__dict__ = {key: value for key, value in cores[0].__getstate__().items() if key != "mode"}
    found.stored, found.names = [each.one for each in cores], tuple(names)
    found.num_samples = sum(each.num_samples for each in cores)
    found.counts = tuple(each.num_samples for each in cores)
    found._limit_cache()
    found.reader = found._open_reader(None)
    _ = found.mode  # measures missing lengths; refuses lanes
    if weights is not None:
        found.counts = _counts(found, weights)
    return found


def plans_of(datasets: Mapping[str, PackedDataset]) -> dict[str, PackPlan]:
    """Return the plans of a new run's sources, see own_seeds."""
    return own_seeds({name: each.plan for name, each in datasets.items()})


def warn_of_shared(datasets: Mapping[str, PackedDataset], *, rank: int = 0) -> None:
    """Warn of equal shards in datasets of two names, by checksums: for example of a dataset that is named twice."""
    found: dict[tuple[str, int, int], str] = {}  # a shard -> the first dataset with it
    shared: Counter[tuple[str, str]] = Counter()
    for name, dataset in datasets.items() if len(datasets) > 1 and not rank else ():
        for stored in dataset.stored:
            for info in stored.shards:
                checksum = info.checksum or f"{stored.url}/{info.name}"
                shared[found.setdefault((checksum, info.size, info.num_samples), name), name] += 1
    for (first, name), count in shared.items():
        if first != name:
            logger.warning(
                f"{count} of {len(datasets[name].samples_per_shard)} shards of dataset {name!r} are also shards of "
                f"{first!r}: these samples come under both names; to repeat a dataset, name it once, with a weight"
            )


def order_of_streams(datasets: Iterable[PackedDataset]) -> dict[str, list[str]]:
    """Return the identities of mixed streams in order, as `streams` of a state; {} without any."""
    streams = [each.identity for dataset in datasets if dataset.is_mixed for each in dataset.stored]
    return {"streams": streams} if streams else {}


def check_order(datasets: Iterable[PackedDataset], state: Any) -> None:
    """Raise CursorError for a state of the same streams in another order: the ids of samples count through them.

    Warn of a mixed stream with other samples: its plan may be the same.
    """
    streams = state.get("streams") if isinstance(state, Mapping) else None
    if not isinstance(streams, list):
        return
    for dataset in datasets:
        now = [each.identity for each in dataset.stored]
        saved = [each for each in streams if each in now]  # a state has the streams of all datasets
        if saved != now and sorted(saved) == sorted(now):
            names = [dataset.names[now.index(each)] for each in saved]
            raise CursorError(
                f"the state is of the datasets in the order {', '.join(names)}, and they are named as "
                f"{', '.join(dataset.names)}: packs of samples of several datasets (mixing: samples) follow their "
                "order, name them as before"
            )
        for name, identity in zip(dataset.names, now, strict=True):
            if dataset.is_mixed and not dataset.world.rank and identity not in streams:
                logger.warning(
                    f"dataset {name!r} (identity {identity}) has other samples than the loaded state: restore it, or "
                    "start over in another output_dir"
                )


def _counts(dataset: PackedDataset, weights: Mapping[str, float]) -> tuple[int, ...]:
    if unknown := [name for name in weights if name not in dataset.names]:
        raise ConfigError(f"weights name {unknown[0]!r}, the datasets are {', '.join(dataset.names)}")
    shares = []
    for name, stored in zip(dataset.names, dataset.stored, strict=True):
        index = stored.length_index(dataset.processor)
        num_tokens = int(packed_tokens(index, slice(None), packing=dataset.needed_packing).sum(dtype=np.int64))
        index.release()
        weight = weights.get(name, 0)
        if weight and not num_tokens:
            raise ConfigError(f"dataset {name!r} has no packs: all its samples are dropped; raise packing_length")
        shares.append(StreamShare(proportion=weight * stored.num_samples / num_tokens if weight else 0))
    return tuple(samples_chosen([stored.num_samples for stored in dataset.stored], shares))


def _settings(dataset: PackedDataset) -> dict[str, Any]:
    parts: dict[str, Any] = {"": dataset.needed_packing, "order.": dataset.order, "fetch.": dataset.fetch}
    values = {
        f"{prefix}{field.name}": getattr(part, field.name)
        for prefix, part in parts.items()
        for field in dataclasses.fields(part)
    }
    processor = dataset.processor
    made_by = None if processor is None else f"{type(processor).__name__} {processor_fingerprint(processor)}"
    return {"processor": made_by, "packing_mode": dataset.packing_mode, **values}


def streams_of(dataset: PackedDataset) -> dict[str, PackedDataset]:
    """Return the streams of a dataset by name, each as a dataset of its own; a single stream is the dataset itself."""
    if len(dataset.stored) == 1:
        return {dataset.names[0]: dataset}
    found = {}
    for name, stored in zip(dataset.names, dataset.stored, strict=True):
        each = found[name] = copy.copy(dataset)
        each.__dict__ = dataset.__getstate__()
        each.stored, each.names, each.counts = [stored], (name,), (stored.num_samples,)
        each.num_samples = stored.num_samples
        each.reader = each._open_reader(None)
    return found


def described_streams(dataset: PackedDataset) -> dict[str, Any]:
    """Return the streams of a mixed dataset as a JSON value `streams`: name, url, identity, parts, samples an epoch."""
    if not dataset.is_mixed:
        return {}
    listed = [
        {"name": name, "url": one.url, "identity": one.identity, "num_parts": one.num_parts, "count": count}
        for name, one, count in zip(dataset.names, dataset.stored, dataset.counts, strict=True)
    ]
    return {"streams": listed}
