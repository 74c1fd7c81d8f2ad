"""Any dataset to MDS shards, full packs of samples from object storage, exact resumption; see README.md.

Public names are imported when they are first used: `import lmms_stream` itself loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import load_config as load_config
    from .converters.convert import convert as convert
    from .cursor import Cursor as Cursor
    from .dataset import PackedStreamingDataset as PackedStreamingDataset
    from .dataset_config import DatasetConfig as DatasetConfig
    from .errors import ConfigError as ConfigError
    from .errors import LmmsStreamError as LmmsStreamError
    from .lengths import LengthIndex as LengthIndex
    from .loader import PackedLoader as PackedLoader
    from .order import OrderConfig as OrderConfig
    from .pack_range import PackRange as PackRange
    from .packing import PackingConfig as PackingConfig
    from .packing import Packs as Packs
    from .packing import pack as pack
    from .plan import PackPlan as PackPlan
    from .prefetch import FetchConfig as FetchConfig
    from .processors import ProcessorConfig as ProcessorConfig
    from .processors.base import Processor as Processor
    from .processors.chat import ChatProcessor as ChatProcessor
    from .processors.text import TextProcessor as TextProcessor
    from .processors.text import TokensProcessor as TokensProcessor
    from .streams import Stream as Stream
    from .train.model import ModelConfig as ModelConfig
    from .train.settings import RunConfig as RunConfig
    from .train.settings import TrainConfig as TrainConfig
    from .train.trainer import FSDP2SFTTrainer as FSDP2SFTTrainer
    from .types import Batch as Batch
    from .types import World as World

_HOME = {
    "Batch": "types",
    "ChatProcessor": "processors.chat",
    "ConfigError": "errors",
    "Cursor": "cursor",
    "DatasetConfig": "dataset_config",
    "FSDP2SFTTrainer": "train.trainer",
    "FetchConfig": "prefetch",
    "LengthIndex": "lengths",
    "LmmsStreamError": "errors",
    "ModelConfig": "train.model",
    "OrderConfig": "order",
    "PackPlan": "plan",
    "PackRange": "pack_range",
    "PackedLoader": "loader",
    "PackedStreamingDataset": "dataset",
    "PackingConfig": "packing",
    "Packs": "packing",
    "Processor": "processors.base",
    "ProcessorConfig": "processors",
    "RunConfig": "train.settings",
    "Stream": "streams",
    "TextProcessor": "processors.text",
    "TokensProcessor": "processors.text",
    "TrainConfig": "train.settings",
    "World": "types",
    "convert": "converters.convert",
    "load_config": "config",
    "pack": "packing",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
