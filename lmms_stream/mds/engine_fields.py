"""The fields of LMMS Engine's DatasetConfig, which a dataset with a dataset_type is described by."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, did_you_mean

ENGINE_PACKING_LENGTH = 32000  # theirs
ENGINE_SEED = 42


def check_names(given: Collection[str], known: Collection[str], what: str) -> None:
    """ConfigError for a name that is not known, with the nearest one."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{what} has no {name!r}: {did_you_mean(name, known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFields:
    """What sources hold, how their samples are read, and where their shards are kept. docs/datasets.md has each field.

    dataset_type: names the kind of dataset; what follows is for a dataset that has one. dataset_format: of what
    dataset_path names, or "yaml" for a list of sources in that file or in `datasets`; "mds", or none, for shards that
    are there. processor_config: processor_name, processor_type, extra_kwargs. packing: whether samples share packs;
    documents (fineweb_edu) do unless it says no. filter_overlong: samples that are longer than a pack are left out and
    counted (True), or kept, each a pack of its own (False). max_length: longer samples are left out and counted,
    whatever is done with those that are longer than a pack. cache_dir: where sources are kept as shards, unless
    object_storage and bucket_name name a store. reshuffle: packs are made anew in each epoch. on_error: a row that does
    not fit ends the run, or is left out and counted.
    """

    dataset_type: str | None = None
    dataset_format: str | None = None
    dataset_path: str | None = None
    datasets: list[dict[str, Any]] | None = field(default=None, hash=False)
    processor_config: dict[str, Any] | None = field(default=None, hash=False)
    packing: bool | None = None
    filter_overlong: bool | None = None
    filter_overlong_workers: int | None = None
    max_length: int | None = None
    data_seed: int | None = None
    eval_dataset_path: str | None = None
    object_storage: str | None = None
    bucket_name: str | None = None
    video_sampling_strategy: Literal["fps", "frame_num"] | None = None
    video_max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_frames: int | None = None
    frame_num: int | None = None
    fps: float | None = None
    video_backend: str | None = None
    extra_kwargs: dict[str, Any] | None = field(default=None, hash=False)
    cache_dir: str | None = None
    reshuffle: bool | None = None
    on_error: Literal["fail", "skip"] = "fail"

    def check_given(self, remote: str) -> None:
        """ConfigError for fields that are for a dataset_type, where there is none, and the other way round."""
        if self.dataset_type is not None:
            if remote:
                raise ConfigError(
                    f"remote {remote!r} names shards, and dataset_type {self.dataset_type!r} has dataset_path for "
                    "that: leave one of them out"
                )
            return
        for each in dataclasses.fields(EngineFields):
            if each.name not in _FOR_ALL and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"{each.name} is for a dataset with a dataset_type: add dataset_type, or leave {each.name} out"
                )
        if not remote:
            raise ConfigError("a dataset needs remote, the folder or URL of its shards, or dataset_type: give one")


CUT_TYPES = ("fineweb_edu", "fineweb_edu_iterable")  # whose documents are cut and packed, and nothing is left out
_FOR_ALL = ("packing", "filter_overlong", "data_seed", "reshuffle")  # also of shards without a dataset_type


def engine_defaults(config: EngineFields, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields whose defaults depend on dataset_type. given: those that are not None."""
    of_engine = config.dataset_type is not None
    are_cut = config.dataset_type in CUT_TYPES
    packing = not of_engine or are_cut if config.packing is None else config.packing
    kept = "keep" if packing else "error"  # without packing no sample is longer than its pack
    overlong = {True: "drop", False: kept, None: "drop" if of_engine else "error"}[config.filter_overlong]
    if are_cut:
        overlong = "split"
    defaults = {
        "packing": packing,
        "packing_length": ENGINE_PACKING_LENGTH if of_engine else 4096,
        "packing_strategy": "first_fit" if of_engine else "best_fit",
        "overlong": overlong,
        "seed": config.data_seed if config.data_seed is not None else (ENGINE_SEED if of_engine else 0),
        "reshuffle": not of_engine,
    }
    return defaults | {name: value for name, value in given.items() if value is not None}
