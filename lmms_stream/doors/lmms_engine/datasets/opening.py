"""A DatasetConfig -> the dataset that a trainer reads: shards, or sources in the way of LMMS Engine."""

from __future__ import annotations

from typing import Any

from ....errors import ConfigError
from ....mds.dataset_config import DatasetConfig
from ....train.run.settings import Packed
from ....types import World
from ...huggingface.models import name_of
from .names import EngineDatasetConfig, dataset_type_of, lacks_processor, with_processor


def opened(config: DatasetConfig, world: World) -> Packed:
    """The dataset of a config; with a dataset_type its sources are converted where they are not yet, or streamed."""
    if not isinstance(config, EngineDatasetConfig) or config.dataset_type is None:
        return config.open(world)
    found = dataset_type_of(config)
    if found.is_iterable:
        from .iterable import MultiModalIterableDataset

        streamed: MultiModalIterableDataset = (found.made_by or MultiModalIterableDataset)(config)
        return streamed
    from .naive import MultiModalDataset

    made: MultiModalDataset = (found.made_by or MultiModalDataset)(config)
    return made.opened(world)


def with_processor_of(model: Any, given: Any) -> Any:
    """Return a dataset, or a config of one, that names the type of its processor alone with the processor of a model.

    Others as they are. ConfigError for a model without a folder or name.
    """
    if isinstance(given, EngineDatasetConfig) and given.dataset_type is not None:
        return with_processor(given, _name_of(model)) if lacks_processor(given) else given
    if getattr(given, "lacks_processor", False):
        given.take_processor(_name_of(model))
    return given


def _name_of(model: Any) -> str:
    name = name_of(model)
    if not name:
        raise ConfigError(
            "processor_config has no processor_name, and the model has no folder or name that may have a processor: "
            "give processor_name"
        )
    return name
