"""Any dataset to MDS shards, full packs of samples from object storage, exact resumption; see README.md.

Public names are imported when they are first used: `import lmms_stream` itself loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lazy import keep_names, lazy_names
from .version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from .config import load_config as load_config
    from .converters.convert import convert as convert
    from .converters.options import ConvertOptions as ConvertOptions
    from .converters.rows.options import SchemaOptions as SchemaOptions
    from .converters.stored.merge import merge_index as merge_index
    from .converters.writing.mosaic_writers import CSVWriter as CSVWriter
    from .converters.writing.mosaic_writers import JSONWriter as JSONWriter
    from .converters.writing.mosaic_writers import MDSWriter as MDSWriter
    from .converters.writing.mosaic_writers import TSVWriter as TSVWriter
    from .converters.writing.mosaic_writers import XSVWriter as XSVWriter
    from .doors.huggingface.trainer import FSDP2SFTTrainer as FSDP2SFTTrainer
    from .errors import ConfigError as ConfigError
    from .errors import LmmsStreamError as LmmsStreamError
    from .loader.loader import PackedLoader as PackedLoader
    from .mds.core import PackedDataset as PackedDataset
    from .mds.dataset_config import DatasetConfig as DatasetConfig
    from .mds.lengths import LengthIndex as LengthIndex
    from .mds.mosaic import StreamingDataLoader as StreamingDataLoader
    from .mds.mosaic import StreamingDataset as StreamingDataset
    from .mds.mosaic import clean_stale_shared_memory as clean_stale_shared_memory
    from .mds.mosaic_shards import LocalDataset as LocalDataset
    from .mds.mosaic_streams import Stream as Stream
    from .mds.packed import PackedStreamingDataset as PackedStreamingDataset
    from .plan.cursor import Cursor as Cursor
    from .plan.order import OrderConfig as OrderConfig
    from .plan.pack_plan import PackPlan as PackPlan
    from .plan.packing import PackingConfig as PackingConfig
    from .plan.packing import PackRange as PackRange
    from .plan.packing import Packs as Packs
    from .plan.packing import pack as pack
    from .plugins.peers.nodes import join_peers as join_peers
    from .plugins.peers.nodes import meet_peers as meet_peers
    from .processors import ProcessorConfig as ProcessorConfig
    from .processors.base import Processor as Processor
    from .processors.chat import ChatProcessor as ChatProcessor
    from .processors.multimodal import MultimodalProcessor as MultimodalProcessor
    from .processors.preference import MediaPreferenceProcessor as MediaPreferenceProcessor
    from .processors.preference import PreferenceProcessor as PreferenceProcessor
    from .processors.text import DocumentsProcessor as DocumentsProcessor
    from .processors.text import TextProcessor as TextProcessor
    from .processors.text import TokensProcessor as TokensProcessor
    from .storage.fetch_config import FetchConfig as FetchConfig
    from .train.model.build import ModelConfig as ModelConfig
    from .train.model.choice import check_isolation as check_isolation
    from .train.run.settings import TrainConfig as TrainConfig
    from .train.run_config import RunConfig as RunConfig
    from .types import Batch as Batch
    from .types import World as World

_HOME = {
    "Batch": "types",
    "CSVWriter": "converters.writing.mosaic_writers",
    "ChatProcessor": "processors.chat",
    "ConfigError": "errors",
    "ConvertOptions": "converters.options",
    "Cursor": "plan.cursor",
    "DatasetConfig": "mds.dataset_config",
    "DocumentsProcessor": "processors.text",
    "FSDP2SFTTrainer": "doors.huggingface.trainer",
    "FetchConfig": "storage.fetch_config",
    "JSONWriter": "converters.writing.mosaic_writers",
    "LengthIndex": "mds.lengths",
    "LmmsStreamError": "errors",
    "LocalDataset": "mds.mosaic_shards",
    "MDSWriter": "converters.writing.mosaic_writers",
    "MediaPreferenceProcessor": "processors.preference",
    "ModelConfig": "train.model.build",
    "MultimodalProcessor": "processors.multimodal",
    "OrderConfig": "plan.order",
    "PackPlan": "plan.pack_plan",
    "PackRange": "plan.packing",
    "PackedDataset": "mds.core",
    "PackedLoader": "loader.loader",
    "PackedStreamingDataset": "mds.packed",
    "PackingConfig": "plan.packing",
    "Packs": "plan.packing",
    "PreferenceProcessor": "processors.preference",
    "Processor": "processors.base",
    "ProcessorConfig": "processors",
    "RunConfig": "train.run_config",
    "SchemaOptions": "converters.rows.options",
    "Stream": "mds.mosaic_streams",
    "StreamingDataLoader": "mds.mosaic",
    "StreamingDataset": "mds.mosaic",
    "TSVWriter": "converters.writing.mosaic_writers",
    "TextProcessor": "processors.text",
    "TokensProcessor": "processors.text",
    "TrainConfig": "train.run.settings",
    "World": "types",
    "XSVWriter": "converters.writing.mosaic_writers",
    "check_isolation": "train.model.choice",
    "clean_stale_shared_memory": "mds.mosaic",
    "convert": "converters.convert",
    "join_peers": "plugins.peers.nodes",
    "load_config": "config",
    "meet_peers": "plugins.peers.nodes",
    "merge_index": "converters.stored.merge",
    "pack": "plan.packing",
}

__all__ = ["__version__", *_HOME]

# Former names of modules, which programs and pages use.
_TASKS = (
    "bagel", "bagel_model", "dft", "dpo", "flow_matching", "images", "kto", "masked_diffusion", "reconstruction",
)  # fmt: skip
keep_names(
    __name__,
    {
        **{name: f"doors.{name}" for name in ("lmms_engine", "relax", "trl")},
        "datasets": "doors.lmms_engine.datasets",
        "rl": "doors.relax",
        "datasets.multimodal": "doors.lmms_engine.datasets.naive",
        "converters.stored.inspect": "tools.inspect",
        "mds.peers": "plugins.peers.nodes",
        **{name: f"tools.{name}" for name in ("demo", "ledger", "simulate", "watch")},
        "processors.preference_media": "processors.preference",
        "processors.families.asked": "processors.families.probe",
        "processors.blocks": "processors.bagel",
        **{
            f"{demo}.{name}": "tools.demo.vision"
            for demo in ("demo", "tools.demo")
            for name in ("charts", "pictures", "tiny_vlm")
        },
        "train.habits": "doors.huggingface",
        "train.tasks.terms": "plugins.tasks.reconstruction",
        "train.model.own_loop": "train.model.choice",
        "train.model.block_attention": "plugins.tasks.bagel_model",
        **{f"train.tasks.{name}": f"plugins.tasks.{name}" for name in _TASKS},
        **{f"{tasks}.sampling": "plugins.tasks.flow_matching" for tasks in ("train.tasks", "plugins.tasks")},
        "plan.pack_range": "plan.packing",
        "converters.engines": "processes",
    },
)

_imported, __dir__ = lazy_names(__name__, _HOME)


def __getattr__(name: str) -> Any:
    """A public name; if MosaicML's package is imported, four names are our classes derived from its classes."""
    if name in {"PackedStreamingDataset", "Stream", "StreamingDataLoader", "StreamingDataset"}:
        from .mds.mosaic_streams import package

        if package() is not None:
            from .doors import mosaicml

            return getattr(mosaicml, name)
    return _imported(name)
