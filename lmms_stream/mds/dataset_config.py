"""A dataset, its processor, its order and its packs, as one section of a YAML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..plan.order import OrderConfig
from ..plan.packing import Overlong, PackingConfig
from ..processors import ProcessorConfig
from ..storage.fetch_config import FetchConfig
from ..types import World
from .core import PackedDataset, PackingMode
from .streams import StreamConfig

if TYPE_CHECKING:
    from .packed import PackedStreamingDataset

DEFAULT_LANE_WINDOW = 512  # samples a lane measures before its first pack


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """What `open` and `build` make a dataset of.

    The names are those of LMMS Engine's DatasetConfig where it has the setting. packing_window: samples that are
    packed together (default: 16384 with a lengths index, 512 in lanes, which measure that many before they give packs).
    """

    remote: str
    local: str | None = None
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)
    packing_mode: PackingMode = "auto"
    packing_length: int = 4096
    packing_strategy: str = "best_fit"
    packing_window: int | None = None
    overlong: Overlong = "error"
    max_samples_per_pack: int | None = None
    seed: int = 0
    shuffle: bool = True
    num_canonical_nodes: int | None = None
    shuffle_block_size: int = 1 << 18
    fetch: FetchConfig = field(default_factory=FetchConfig)

    def open(self, world: World | None = None) -> PackedDataset:
        """The dataset as loaders, trainers and commands take it, which needs nothing of MosaicML's package."""
        dataset = PackedDataset([StreamConfig(remote=self.remote, local=self.local)], world=world, **self._settings())
        self._choose_window(dataset)
        return dataset

    def build(self, world: World | None = None) -> PackedStreamingDataset:
        """The same as a StreamingDataset, whose samples can be read by number, and iterated unpacked."""
        from .packed import PackedStreamingDataset

        dataset = PackedStreamingDataset(self.remote, self.local, world=world, **self._settings())
        self._choose_window(dataset.core)
        return dataset

    def _settings(self) -> dict[str, Any]:
        packing = PackingConfig(
            packing_length=self.packing_length,
            strategy=self.packing_strategy,
            overlong=self.overlong,
            max_samples_per_pack=self.max_samples_per_pack,
        )
        if self.packing_window is not None:
            packing = dataclasses.replace(packing, window=self.packing_window)
        order = OrderConfig(
            seed=self.seed,
            shuffle=self.shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
            shuffle_block_size=self.shuffle_block_size,
        )
        return {
            "processor": self.processor.build(), "packing": packing, "packing_mode": self.packing_mode, "order": order,
            "fetch": self.fetch,
        }  # fmt: skip

    def _choose_window(self, dataset: PackedDataset) -> None:
        if self.packing_window is None and dataset.mode == "lanes":
            dataset.packing = dataclasses.replace(dataset.needed_packing, window=DEFAULT_LANE_WINDOW)
