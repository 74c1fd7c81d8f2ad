"""Section of a YAML file: a dataset, the processor of samples, their order and packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..checks import check_fields
from ..errors import ConfigError, did_you_mean
from ..plan.order import OrderConfig
from ..plan.packing import Overlong, PackingConfig
from ..processors import ProcessorConfig
from ..storage.fetch_config import FetchConfig
from ..types import World
from .core import PackedDataset, PackingMode
from .streams import StreamConfig

if TYPE_CHECKING:
    from .packed import PackedStreamingDataset


# The fields of LMMS Engine's DatasetConfig, which a dataset with a dataset_type is described by.

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


DEFAULT_LANE_WINDOW = 512  # samples a lane measures before its first pack


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(EngineFields):
    """What `open` and `build` make a dataset of; with a dataset_type, what the classes of lmms_stream.datasets do.

    The names are those of LMMS Engine's DatasetConfig where it has the setting; so are the defaults with a dataset_type
    (see EngineFields). None: the default depends on dataset_type, and is filled in by construction: packing True
    (theirs False), packing_length 4096 (32000), packing_strategy "best_fit" ("first_fit"), overlong "error" ("drop"),
    seed 0 (42). packing_mode: "auto" measures a dataset that has no lengths index once, up to 2 million samples; "plan"
    needs an index, "lanes" none. packing_window: samples that are packed together (default: 16384 with a lengths index,
    512 in lanes, which measure that many before they give packs). num_parts: a dataset that has grown by lmms-stream
    convert --append is read as it was with so many parts (0: before it grew).
    """

    remote: str = ""
    local: str | None = None
    num_parts: int | None = None
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    packing_mode: PackingMode = "auto"
    packing_length: int = None  # type: ignore[assignment]
    packing_strategy: str = None  # type: ignore[assignment]
    packing_window: int | None = None
    overlong: Overlong = None  # type: ignore[assignment]
    max_samples_per_pack: int | None = None
    seed: int = None  # type: ignore[assignment]
    shuffle: bool = True
    num_canonical_nodes: int | None = None
    shuffle_block_size: int = 1 << 18
    fetch: FetchConfig = field(default_factory=FetchConfig)

    def __new__(cls, *_: Any, **given: Any) -> DatasetConfig:
        check_names(given, [each.name for each in dataclasses.fields(cls)], "DatasetConfig")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, paths=("remote", "local", "cache_dir", "dataset_path", "eval_dataset_path"))
        self.check_given(self.remote)
        if self.seed is not None and self.data_seed is not None and self.seed != self.data_seed:
            raise ConfigError(f"seed {self.seed} and data_seed {self.data_seed} say the same: leave one of them out")
        names = ("packing", "packing_length", "packing_strategy", "overlong", "seed", "reshuffle")
        given = {name: getattr(self, name) for name in names}
        for name, value in engine_defaults(self, given).items():
            object.__setattr__(self, name, value)

    def open(self, world: World | None = None) -> PackedDataset:
        """The dataset as loaders, trainers and commands take it, which needs nothing of MosaicML's package."""
        self._check_shards()
        stream = StreamConfig(remote=self.remote, local=self.local, num_parts=self.num_parts)
        dataset = PackedDataset([stream], world=world, **self._settings())
        self._choose_window(dataset)
        return dataset

    def build(self, world: World | None = None) -> PackedStreamingDataset:
        """The same as a StreamingDataset, whose samples can be read by number, and iterated unpacked."""
        from .packed import PackedStreamingDataset

        self._check_shards()
        if self.num_parts is not None:
            raise ConfigError("num_parts is read by open alone, as trainers and loaders do: call that")
        dataset = PackedStreamingDataset(self.remote, self.local, world=world, **self._settings())
        self._choose_window(dataset.core)
        return dataset

    @property
    def evaluated(self) -> DatasetConfig | None:
        """The config of eval_dataset_path, with all other settings; None where there is none."""
        if self.eval_dataset_path is None:
            return None
        return dataclasses.replace(self, dataset_path=self.eval_dataset_path, datasets=None, eval_dataset_path=None)

    @property
    def order(self) -> OrderConfig:
        """The order of each epoch."""
        return OrderConfig(
            seed=self.seed,
            shuffle=self.shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
            shuffle_block_size=self.shuffle_block_size,
            reshuffle=bool(self.reshuffle),
        )

    def _check_shards(self) -> None:
        if self.dataset_type is not None:
            raise ConfigError(
                f"a dataset with dataset_type {self.dataset_type!r} is made of its sources: give the config to "
                "lmms_stream.doors.lmms_engine.datasets.MultiModalDataset or MultiModalIterableDataset"
            )

    def _settings(self) -> dict[str, Any]:
        packing = PackingConfig(
            packing_length=self.packing_length,
            strategy=self.packing_strategy,
            overlong=self.overlong,
            max_samples_per_pack=self.max_samples_per_pack if self.packing else 1,
        )
        if self.packing_window is not None:
            packing = dataclasses.replace(packing, window=self.packing_window)
        return {
            "processor": self.processor.build(),
            "packing": packing,
            "packing_mode": self.packing_mode,
            "order": self.order,
            "fetch": self.fetch,
        }

    def _choose_window(self, dataset: PackedDataset) -> None:
        if self.packing_window is None and self.packing_mode == "lanes":
            dataset.packing = dataclasses.replace(dataset.needed_packing, window=DEFAULT_LANE_WINDOW)
