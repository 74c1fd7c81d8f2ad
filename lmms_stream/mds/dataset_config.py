"""Config of a dataset, with processor, order and packs: a section of a YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checks import check_fields
from ..config import OldKey, Settings, old_keys
from ..errors import ConfigError, did_you_mean
from ..plan.order import OrderConfig
from ..plan.packing import Overlong, PackingConfig, split_lengths
from ..processors import ProcessorConfig
from ..registry import imported
from ..storage.fetch_config import FetchConfig
from ..types import World
from .core import PackedDataset, PackingMode
from .streams import StreamConfig

if TYPE_CHECKING:
    from .packed import PackedStreamingDataset

DEFAULT_LANE_WINDOW = 512  # samples measured by a lane before the first pack
_OF_SOURCES = "doors.lmms_engine.datasets.names:EngineDatasetConfig"  # the config of a dataset made of sources


def check_names(given: Collection[str], known: Collection[str], what: str) -> None:
    """Raise ConfigError for an unknown name, with the nearest known name."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{what} has no {name!r}: {did_you_mean(name, known)}")


def _one_sample_a_pack(settings: Settings, packing: bool | None) -> None:
    if packing is False:
        settings["max_samples_per_pack"] = 1


def _overlong(settings: Settings, is_dropped: bool | None) -> None:
    if is_dropped is not None and settings.get("overlong") is None:
        settings["overlong"] = (
            "drop" if is_dropped else "error" if settings.get("max_samples_per_pack") == 1 else "keep"
        )


def _seed(settings: Settings, seed: int | None) -> None:
    if seed is not None and settings.get("seed", seed) not in (None, seed):
        raise ConfigError(f"seed {settings['seed']} and data_seed {seed} set the same value: leave one of them out")
    if seed is not None:
        settings["seed"] = seed


OLD_KEYS = {
    "packing": OldKey("max_samples_per_pack: 1 for false", _one_sample_a_pack),
    "filter_overlong": OldKey("overlong: drop for true, keep for false", _overlong),
    "data_seed": OldKey("seed", _seed),
}


@old_keys(OLD_KEYS)
@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """Settings of a dataset, for `open` and `build`.

    With names of LMMS Engine's DatasetConfig, for example dataset_type, the result is an EngineDatasetConfig, for the
    classes of lmms_stream.datasets.
    """

    # Shards
    remote: str = ""  # folder or URL of the shards
    local: str | None = None  # folder of this node for copies of remote shards
    num_parts: int | None = None  # number of parts to read of a dataset that has grown (convert --append); default: all
    fetch: FetchConfig = field(default_factory=FetchConfig)  # how shards are fetched to a node

    # Samples
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)  # processor that makes tokens of samples

    # Packs
    # "auto" measures a dataset without a lengths index once, up to 2 million samples; "plan" needs an index, "lanes"
    # works without an index
    packing_mode: PackingMode = "auto"
    packing_length: int | dict[int, int] = 4096  # maximum tokens per pack; by first step: {0: 4096, 20000: 32768}
    packing_strategy: str = "best_fit"  # or even_fit, first_fit, next_fit, window_N
    # number of samples packed together (default: 16384 with a lengths index, 512 in lanes, which measure a window
    # before the first pack)
    packing_window: int | None = None
    # samples longer than a pack: "error", "drop", "truncate", "split" or "keep" (see docs/packing.md)
    overlong: Overlong = "error"
    max_samples_per_pack: int | None = None  # maximum samples per pack; 1: packs are single samples

    # Order
    seed: int = 0  # seed of the order of each epoch
    shuffle: bool = True  # shuffle each epoch in another order
    reshuffle: bool = True  # pack again in each epoch; false: the same packs in another order
    num_canonical_nodes: int | None = None  # sections of the order, or lanes (see docs/planning.md)
    shuffle_block_size: int = 1 << 18  # number of samples shuffled together

    def __new__(cls, *_: Any, **given: Any) -> DatasetConfig:
        chosen = cls.class_for(given) if cls is DatasetConfig else cls
        names = [each.name for each in dataclasses.fields(chosen)]
        check_names(given, [*names, *getattr(chosen, "OLD_KEYS", ())], "DatasetConfig")
        return object.__new__(chosen)

    @classmethod
    def class_for(cls, given: Collection[str]) -> type[DatasetConfig]:
        """Return the class for a config with these keys: LMMS Engine's if any key is a field of only that class."""
        more = [name for name in given if name not in OLD_KEYS and name not in cls.__dataclass_fields__]
        if cls is not DatasetConfig or not more:
            return cls
        of_sources: type[DatasetConfig] = imported(_OF_SOURCES)
        return of_sources if any(name in of_sources.__dataclass_fields__ for name in more) else cls

    def __post_init__(self) -> None:
        check_fields(self, paths=("remote", "local"))
        split_lengths(self.packing_length)
        if not self.remote:
            raise ConfigError("a dataset needs remote, the folder or URL of its shards, or dataset_type: set one")

    def open(self, world: World | None = None) -> PackedDataset:
        """Open the dataset for loaders, trainers and commands, without MosaicML's package."""
        self._check_shards()
        stream = StreamConfig(remote=self.remote, local=self.local, num_parts=self.num_parts)
        dataset = PackedDataset([stream], world=world, **self._settings())
        self._choose_window(dataset)
        return dataset

    def build(self, world: World | None = None) -> PackedStreamingDataset:
        """Build the dataset with MosaicML's StreamingDataset: samples can be read by number, and iterated unpacked."""
        from .packed import PackedStreamingDataset

        self._check_shards()
        if self.num_parts is not None:
            raise ConfigError("num_parts has an effect only in open, which trainers and loaders call: call open")
        dataset = PackedStreamingDataset(self.remote, self.local, world=world, **self._settings())
        self._choose_window(dataset.core)
        return dataset

    @property
    def evaluated(self) -> DatasetConfig | None:
        """Config of the evaluation dataset, for kinds of datasets with an evaluation dataset."""
        return None

    @property
    def source_type(self) -> str | None:
        """Kind of sources of the dataset; None for shards."""
        return None

    @property
    def order(self) -> OrderConfig:
        """The order of each epoch."""
        return OrderConfig(
            seed=self.seed,
            shuffle=self.shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
            shuffle_block_size=self.shuffle_block_size,
            reshuffle=self.reshuffle,
        )

    def _check_shards(self) -> None:
        if self.source_type is not None:
            raise ConfigError(
                f"a dataset with dataset_type {self.source_type!r} is made of its sources: give the config to "
                "lmms_stream.doors.lmms_engine.datasets.MultiModalDataset or MultiModalIterableDataset"
            )

    def _settings(self) -> dict[str, Any]:
        length, later_lengths = split_lengths(self.packing_length)
        packing = PackingConfig(
            packing_length=length,
            later_lengths=later_lengths,
            strategy=self.packing_strategy,
            overlong=self.overlong,
            max_samples_per_pack=self.max_samples_per_pack,
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
