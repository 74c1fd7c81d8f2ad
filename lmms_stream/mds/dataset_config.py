"""A dataset, its processor, its order and its packs, as one section of a YAML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checks import check_fields
from ..config import OldKey, Settings, old_keys
from ..errors import ConfigError, did_you_mean
from ..plan.order import OrderConfig
from ..plan.packing import Overlong, PackingConfig
from ..processors import ProcessorConfig
from ..registry import imported
from ..storage.fetch_config import FetchConfig
from ..types import World
from .core import PackedDataset, PackingMode
from .streams import StreamConfig

if TYPE_CHECKING:
    from .packed import PackedStreamingDataset

DEFAULT_LANE_WINDOW = 512  # samples a lane measures before its first pack
_OF_SOURCES = "doors.lmms_engine.datasets.names:EngineDatasetConfig"  # the config of a dataset made of sources


def check_names(given: Collection[str], known: Collection[str], what: str) -> None:
    """ConfigError for a name that is not known, with the nearest one."""
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
        raise ConfigError(f"seed {settings['seed']} and data_seed {seed} say the same: leave one of them out")
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
    """What `open` and `build` make a dataset of.

    With the names of LMMS Engine's DatasetConfig, among them dataset_type, it is an EngineDatasetConfig, of which the
    classes of lmms_stream.datasets make a dataset.
    """

    # Shards
    remote: str = ""  # folder or URL of the shards
    local: str | None = None  # folder of this node for copies of remote shards
    num_parts: int | None = None  # number of parts to read of a dataset that has grown (convert --append); default: all
    fetch: FetchConfig = field(default_factory=FetchConfig)  # how shards come to a node

    # Samples
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)  # what makes tokens of samples

    # Packs
    # "auto" measures a dataset without a lengths index once, up to 2 million samples; "plan" needs an index, "lanes"
    # needs none
    packing_mode: PackingMode = "auto"
    packing_length: int = 4096  # tokens of a pack
    packing_strategy: str = "best_fit"  # or first_fit, next_fit, window_N
    # samples that are packed together (default: 16384 with a lengths index, 512 in lanes, which measure that many
    # before they give packs)
    packing_window: int | None = None
    # samples longer than a pack: "error", "drop", "truncate", "split" or "keep" (see docs/packing.md)
    overlong: Overlong = "error"
    max_samples_per_pack: int | None = None  # at most; 1: packs are single samples

    # Order
    seed: int = 0  # of the order of each epoch
    shuffle: bool = True  # each epoch has an order of its own
    reshuffle: bool = True  # packs are made anew in each epoch; false: the same packs in another order
    num_canonical_nodes: int | None = None  # sections of the order, or lanes (see docs/planning.md)
    shuffle_block_size: int = 1 << 18  # samples that are shuffled together

    def __new__(cls, *_: Any, **given: Any) -> DatasetConfig:
        chosen = cls.class_for(given) if cls is DatasetConfig else cls
        names = [each.name for each in dataclasses.fields(chosen)]
        check_names(given, [*names, *getattr(chosen, "OLD_KEYS", ())], "DatasetConfig")
        return object.__new__(chosen)

    @classmethod
    def class_for(cls, given: Collection[str]) -> type[DatasetConfig]:
        """The class of a config with these names: that of LMMS Engine's if it has a name that this class lacks."""
        more = [name for name in given if name not in OLD_KEYS and name not in cls.__dataclass_fields__]
        if cls is not DatasetConfig or not more:
            return cls
        of_sources: type[DatasetConfig] = imported(_OF_SOURCES)
        return of_sources if any(name in of_sources.__dataclass_fields__ for name in more) else cls

    def __post_init__(self) -> None:
        check_fields(self, paths=("remote", "local"))
        if not self.remote:
            raise ConfigError("a dataset needs remote, the folder or URL of its shards, or dataset_type: give one")

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
        """The config of the dataset that is evaluated beside this one, for kinds of datasets that name it."""
        return None

    @property
    def source_type(self) -> str | None:
        """The kind of sources that the dataset is made of; None for shards."""
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
        packing = PackingConfig(
            packing_length=self.packing_length,
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
