"""A DatasetConfig -> the dataset that it names: shards, or sources in the way of LMMS Engine."""

from __future__ import annotations

from ...mds.dataset_config import DatasetConfig
from ...types import World
from ..run.settings import Packed


def opened(config: DatasetConfig, world: World) -> Packed:
    """The dataset of a config; with a dataset_type its sources are converted where they are not yet, or streamed."""
    if config.dataset_type is None:
        return config.open(world)
    from ...datasets.names import dataset_type_of

    if dataset_type_of(config).is_iterable:
        from ...datasets.iterable import MultiModalIterableDataset

        return MultiModalIterableDataset(config)
    from ...datasets.multimodal import MultiModalDataset

    return MultiModalDataset(config).opened(world)
