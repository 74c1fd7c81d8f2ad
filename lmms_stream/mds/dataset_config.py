"""A dataset, its processor, its order and its packs, as one section of a YAML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from ..plan.order import OrderConfig
from ..plan.packing import Overlong, PackingConfig
from ..processors import ProcessorConfig
from ..storage.fetch_config import FetchConfig
from ..types import World
from .dataset import PackedStreamingDataset, PackingMode

DEFAULT_LANE_WINDOW = 512  # samples a lane measures before its first pack


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """What `build` makes a PackedStreamingDataset of.

    The names are those of LMMS Engine's DatasetConfig where it has the setting. packing_mode: "auto" measures a dataset
    that has no lengths index once, up to 2 million samples; "plan" needs an index, "lanes" none. packing_window:
    samples that are packed together (default: 16384 with a lengths index, 512 in lanes, which measure that many before
    they give packs).
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

    def build(self, world: World | None = None) -> PackedStreamingDataset:
        packing = PackingConfig(
            packing_length=self.packing_length,
            strategy=self.packing_strategy,
            overlong=self.overlong,
            max_samples_per_pack=self.max_samples_per_pack,
        )
        if self.packing_window is not None:
            packing = dataclasses.replace(packing, window=self.packing_window)
        dataset = PackedStreamingDataset(
            self.remote,
            self.local,
            processor=self.processor.build(),
            packing=packing,
            packing_mode=self.packing_mode,
            order=OrderConfig(
                seed=self.seed,
                shuffle=self.shuffle,
                num_canonical_nodes=self.num_canonical_nodes,
                shuffle_block_size=self.shuffle_block_size,
            ),
            world=world,
            fetch=self.fetch,
        )
        if self.packing_window is None and dataset.mode == "lanes":
            dataset.packing = dataclasses.replace(packing, window=DEFAULT_LANE_WINDOW)
        return dataset
