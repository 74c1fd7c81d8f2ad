"""What of a config is refused or cannot matter for the class that it is given to. config -> [moot] -> reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigError
from ..mds.dataset_config import DatasetConfig
from ..mds.engine_fields import check_names
from ..types import World
from .names import is_shards, processor_config_of
from .streaming_packs import PACKING_KEYS

logger = logging.getLogger("lmms_stream")
_NOT_CONVERTED = "sources are read as they lie, and nothing is converted"
OF_CONVERSION = ("cache_dir", "object_storage", "bucket_name")
OF_SHARDS = ("local", "packing_window")  # of shards, and of what is converted to shards
_VIDEO = ("video_sampling_strategy", "video_max_pixels", "video_min_pixels", "video_max_frames", "frame_num", "fps")


def check_packing_kwargs(config: DatasetConfig, *, streams: bool) -> None:
    """ConfigError for keys of packing_kwargs that are unknown, or that packs of all lengths have no use for."""
    options = (config.extra_kwargs or {}).get("packing_kwargs") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"extra_kwargs.packing_kwargs must be a mapping, got {options!r}: write its keys as a section"
        )
    check_names(options, sorted({name for names in PACKING_KEYS.values() for name in names}), "packing_kwargs")
    if streams or not options or not config.packing:
        return
    raise ConfigError(
        f"packing_kwargs {', '.join(map(str, options))} is for packs that are made while rows are read, and these are "
        "made of all lengths: leave it out (packing_window says how many samples are packed together), or use "
        "MultiModalIterableDataset on sources (dataset_type vision_iterable)"
    )


def moot_fields(config: DatasetConfig, *, streams: bool) -> dict[str, str]:
    """Fields that are set and cannot matter, each with the reason. streams: whether rows are packed as they pass."""
    return dict(_moot(config, streams=streams))


def _moot(config: DatasetConfig, *, streams: bool) -> Iterator[tuple[str, str]]:
    def are_set(names: tuple[str, ...]) -> Iterator[str]:
        return (name for name in names if getattr(config, name) not in (None, "none", ""))

    extra: Mapping[str, Any] = config.extra_kwargs or {}
    if config.video_backend is not None:
        yield "video_backend", "PyAV reads videos"
    if config.num_parts is not None:
        yield "num_parts", "sources are read as they are now: it is for shards that have grown, named by remote alone"
    if config.filter_overlong_workers is not None:
        yield "filter_overlong_workers", "each sample is measured once, as its row is read"
    if extra.get("collator_type"):
        yield "extra_kwargs.collator_type", "get_collator() is the collator of every type"
    if extra.get("packing_kwargs") and not config.packing:
        yield "extra_kwargs.packing_kwargs", "without packing each pack is one sample"
    if processor_config_of(config).kind in ("chat", "text", "tokens"):
        yield from ((name, "the processor reads no videos") for name in are_set(_VIDEO))
    if config.datasets is not None and config.dataset_path:
        yield "dataset_path", "datasets lists the sources"
    if is_shards(config):
        yield from ((name, "these are shards, and nothing is converted") for name in are_set(OF_CONVERSION))
    elif streams:
        yield from ((name, _NOT_CONVERTED) for name in are_set((*OF_CONVERSION, *OF_SHARDS)))


def tell(config: DatasetConfig, *, streams: bool) -> None:
    """One warning of a dataset, by rank 0, that names all that is set and cannot matter."""
    found = moot_fields(config, streams=streams)
    if found and World.detect().rank == 0:
        reasons = "; ".join(f"{name} ({why})" for name, why in found.items())
        logger.warning("fields of the dataset that are set and cannot matter here: %s", reasons)
