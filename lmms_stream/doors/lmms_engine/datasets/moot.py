"""Settings of a config with an error or without an effect for its class. config -> [moot] -> reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ....errors import ConfigError
from ....mds.dataset_config import check_names
from ....plan.packing import PackingConfig
from ....types import World
from .names import LIST, EngineDatasetConfig, is_shards, reads_videos
from .streaming_packs import MOOT_KEYS, PACKING_KEYS

logger = logging.getLogger("lmms_stream")
_NOT_CONVERTED = "sources are read as they lie, and nothing is converted"
_OF_ROWS, _BY_PLAN = "change rows in load_from_json", "packs are made of all lengths: set packing_strategy"
NOT_CALLED: Mapping[str, str] = {  # members of LMMS Engine's datasets that nothing here calls -> remedy
    **dict.fromkeys(("_build_from_config", "build", "load_from_csv"), _OF_ROWS),
    **dict.fromkeys(
        ("load_image", "load_audio", "load_videos", "load_video_decord", "load_video_qwen_vl_utils",
         "load_video_qwen_omni_utils", "load_video_lmms_video_utils"),
        "media are read from the rows, and by the processor: change rows in load_from_json, or register a processor",
    ),
    "_build_processor": "register a processor (register_processor)",
    **dict.fromkeys(
        ("estimate_data_tokens_per_row", "_estimate_data_tokens", "filter_overlong", "_overlong_filter_limit",
         "_sample_token_length"),
        "lengths are exact: set filter_overlong and max_length",
    ),
    **dict.fromkeys(
        ("_pack_by_first_fit", "_pack_by_window", "load_from_packing", "get_one_sample", "modality_length", "__len__",
         "__getitem__", "__iter__"), _BY_PLAN,
    ),
    **dict.fromkeys(("state_dict", "load_state_dict"), "a trainer's checkpoint has the position"),
}  # fmt: skip
OF_BUCKET = ("object_storage", "bucket_name")
OF_CONVERSION = ("cache_dir", *OF_BUCKET)
OF_SHARDS = ("local", "packing_window")  # settings of shards, and of sources converted to shards
_VIDEO = ("video_sampling_strategy", "video_max_pixels", "video_min_pixels", "video_max_frames", "frame_num", "fps")


def strategy_of(config: EngineDatasetConfig, *, streams: bool) -> str:
    """Return the packing strategy: the config's, or the nearest supported strategy.

    streams: whether rows are packed during reading. ConfigError for an unknown strategy.
    """
    strategy = config.packing_strategy
    if strategy not in PACKING_KEYS:
        PackingConfig(packing_length=1, strategy=strategy)
    if streams:
        return strategy if strategy in PACKING_KEYS else "first_fit"
    return "best_fit" if strategy == "balanced" else strategy


def check_packing_kwargs(config: EngineDatasetConfig) -> None:
    """Raise ConfigError for unknown keys of packing_kwargs."""
    options = (config.extra_kwargs or {}).get("packing_kwargs") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"extra_kwargs.packing_kwargs must be a mapping, got {options!r}: write its keys as a section"
        )
    check_names(options, sorted({name for names in PACKING_KEYS.values() for name in names}), "packing_kwargs")


def moot_fields(config: EngineDatasetConfig, *, streams: bool) -> dict[str, str]:
    """Return the set fields without effect, each with a reason. streams: whether rows are packed during reading."""
    return dict(_moot(config, streams=streams))


def _moot(config: EngineDatasetConfig, *, streams: bool) -> Iterator[tuple[str, str]]:
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
    if config.longest != config.max_length:
        yield "max_length", "filter_overlong: false keeps all samples"
    yield from _moot_packing(config, extra.get("packing_kwargs") or {}, streams=streams and not is_shards(config))
    if not reads_videos(config):
        yield from ((name, "the processor reads no videos") for name in are_set(_VIDEO))
    if config.datasets is not None:
        for name in ("dataset_path", "dataset_format", "extra_kwargs.data_folder"):
            said = extra.get("data_folder") if "." in name else getattr(config, name)
            if said and said != LIST:
                yield name, "datasets lists the sources"
    if extra.get("force_sample") and extra.get("frames_upbound"):
        fixed = ("video_sampling_strategy", "fps", "frame_num", "video_max_frames", "video_max_pixels")
        yield from ((name, "extra_kwargs.force_sample reads frames_upbound frames of each") for name in are_set(fixed))
    if is_shards(config):
        yield from ((name, "these are shards, and nothing is converted") for name in are_set(OF_CONVERSION))
    elif streams:
        of_media = OF_BUCKET if config.HAS_MEDIA_IN_BUCKET else ()
        unused = (name for name in are_set((*OF_CONVERSION, *OF_SHARDS)) if name not in of_media)
        yield from ((name, _NOT_CONVERTED) for name in unused)


def _moot_packing(
    config: EngineDatasetConfig, options: Mapping[str, Any], *, streams: bool
) -> Iterator[tuple[str, str]]:
    name, strategy = "extra_kwargs.packing_kwargs", config.packing_strategy
    if not config.packing:
        if options:
            yield name, "without packing each pack is one sample"
        return
    taken = strategy_of(config, streams=streams)
    if taken != strategy:
        how = "while rows are read" if streams else "of all lengths, and dealt to ranks by cost"
        yield "packing_strategy", f"packs are made {how}: {strategy} is taken as {taken}"
    if options and not streams:
        yield name, "packs are made of all lengths: packing_window says how many samples are packed together"
    elif options and taken == "balanced" and (moot := [each for each in options if each in MOOT_KEYS]):
        yield f"{name}.{', '.join(moot)}", "balanced packs num_buckets packs together"


def tell(config: EngineDatasetConfig, *, streams: bool) -> None:
    """Log one warning on rank 0 that names all set fields without effect."""
    found = moot_fields(config, streams=streams)
    if found and World.detect().rank == 0:
        reasons = "; ".join(f"{name} ({why})" for name, why in found.items())
        logger.warning("fields of the dataset that are set and cannot matter here: %s", reasons)
