"""A dataset, its processor, its order and its packs, as one section of a YAML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checks import check_fields
from ..errors import ConfigError
from ..plan.order import OrderConfig
from ..plan.packing import Overlong, PackingConfig
from ..processors import ProcessorConfig
from ..storage.fetch_config import FetchConfig
from ..types import World
from .core import PackedDataset, PackingMode
from .engine_fields import EngineFields, check_names, engine_defaults
from .streams import StreamConfig

if TYPE_CHECKING:
    from .packed import PackedStreamingDataset

DEFAULT_LANE_WINDOW = 512  # samples a lane measures before its first pack


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(EngineFields):
    """What `open` and `build` make a dataset of; with a dataset_type, what the classes of lmms_stream.datasets do.

    The names are those of LMMS Engine's DatasetConfig where it has the setting; so are the defaults with a
    dataset_type (see EngineFields). None is a default that depends on it, and the value is there after construction:
    packing True (theirs False), packing_length 4096 (32000), packing_strategy "best_fit" ("first_fit"), overlong
    "error" ("drop"), seed 0 (42). packing_mode: "auto" measures a dataset that has no lengths index once, up to 2
    million samples; "plan" needs an index, "lanes" none. packing_window: samples that are packed together (default:
    16384 with a lengths index, 512 in lanes, which measure that many before they give packs). num_parts: a dataset that
    has grown by lmms-stream convert --append is read as it was with so many parts (0: before it grew).
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
                "lmms_stream.datasets.MultiModalDataset or MultiModalIterableDataset"
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
