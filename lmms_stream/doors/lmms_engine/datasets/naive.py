"""MultiModalDataset: sources as numbered packs. config -> build -> packs, for a DataLoader or our trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ....checks import NamedLikeTheirs, check_collator, whole_number
from ....config import build_config
from ....errors import ConfigError
from ....loader.batch_maker import BatchMaker, LoaderSettings
from ....loader.collate import PackCollator
from ....mds.core import PackedDataset
from ....mds.dataset_config import DatasetConfig
from ....mds.streams import StoredDataset, StreamConfig
from ....plan.mixture import Mixture
from ....plan.packing import MAX_PACKING_LENGTH, PackingConfig
from ....plan.planner import StepConfig, StepPlanner, Work
from ....processes.shared_tensors import SharesTensors, shared_zeros
from ....processors.base import Processor
from ....types import Batch, World
from .building import RowLoader, build_once
from .moot import NOT_CALLED, check_packing_kwargs, strategy_of, tell
from .names import EngineDatasetConfig, check, is_shards, lacks_processor, processor_of, with_processor
from .source_files import sources_of

_SOURCE = "dataset"


class OwnRows(NamedLikeTheirs):
    """Members of LMMS Engine's datasets for users to override: reading of rows."""

    NOT_CALLED: ClassVar = NOT_CALLED
    config: EngineDatasetConfig

    def load_from_json(self, data: dict[str, Any], data_folder: str | None = None) -> Any:
        """Return the row unchanged. Override to return another row, several rows ([…]), or None."""
        return data

    def load_from_hf(self, data: dict[str, Any]) -> Any:
        """Return the row unchanged, like load_from_json, for dataset_format hf_dataset."""
        return data

    @property
    def row_loader(self) -> RowLoader | None:
        """The overridden method for rows of the format; None to read rows unchanged."""
        name = "load_from_hf" if self.config.dataset_format == "hf_dataset" else "load_from_json"
        if getattr(type(self), name) is getattr(OwnRows, name):
            return None
        loader = RowLoader(self, name)
        if is_shards(self.config):
            raise ConfigError(
                f"the data are shards, whose samples {loader.name} cannot change: convert the sources with --map, or "
                "name the sources"
            )
        return loader


class MultiModalDataset(OwnRows, SharesTensors, Dataset[Batch]):
    """Packs of a DatasetConfig's sources, by number: dataset[i] is a pack, one sequence of complete samples.

    Without packing, each pack is one sample. Every epoch has the same packs, reordered by a sampler or the trainer;
    with reshuffle, the packs change with the epoch given to set_epoch. Use get_collator() as a DataLoader's collate_fn.
    Without a call of `build`, the first access to a pack builds.
    """

    def __init__(self, config: DatasetConfig | Mapping[str, Any]):
        if isinstance(config, Mapping):
            config = build_config(EngineDatasetConfig, config, source="MultiModalDataset")
        if not isinstance(config, EngineDatasetConfig):
            raise ConfigError(
                f"the config of a MultiModalDataset is a {type(config).__name__}: give a DatasetConfig of "
                "lmms_stream.datasets, or a mapping of its fields"
            )
        check(config)
        check_packing_kwargs(config)
        tell(config, streams=False)
        self.config = config
        _ = self.row_loader
        self._epoch = shared_zeros(1, dtype=torch.int64)  # shared with persistent workers

    def build(self) -> MultiModalDataset:
        """Convert the sources to shards, once for all processes, and open them; return the dataset.

        Without processor_name in processor_config, the build waits for take_processor, called by a trainer.
        """
        if not lacks_processor(self.config):
            _ = self.core
        return self

    @property
    def lacks_processor(self) -> bool:
        return lacks_processor(self.config)

    def take_processor(self, name: str) -> None:
        """Set the model's processor (folder or hub id) if the config specifies only the processor's type."""
        self.config = with_processor(self.config, name)

    @cached_property
    def processor(self) -> Processor:
        return processor_of(self.config)

    @cached_property
    def core(self) -> PackedDataset:
        """The dataset for loaders and trainers."""
        return self.opened(World.detect())

    def opened(self, world: World) -> PackedDataset:
        """Open the dataset for a given world."""
        config = self.config
        (source,) = sources_of(config) if is_shards(config) else [None]
        url = source.path if source else build_once(config, self.processor, world=world, loader=self.row_loader)
        dataset = PackedDataset(
            [StreamConfig(remote=url, local=config.local)],
            processor=self.processor,
            packing=self._packing(),
            packing_mode=config.packing_mode,
            order=config.order,
            fetch=config.fetch,
            world=world,
        )
        if dataset.mode == "lanes":
            raise ConfigError(
                "packs of lanes have no numbers: leave packing_mode out, or use MultiModalIterableDataset"
            )
        return dataset

    def _packing(self) -> PackingConfig:
        """Return the packing config: packs of packing_length; without packing, one sample per pack."""
        config = self.config
        if config.packing:
            if config.longest is not None and is_shards(config):
                raise ConfigError(
                    f"max_length {config.max_length} leaves out samples during a conversion, but the data are already "
                    "shards: convert the sources again with --max-tokens, or leave max_length out"
                )
            length, most = config.packing_length, config.max_samples_per_pack
        else:
            is_whole = config.overlong in ("error", "keep")
            length = MAX_PACKING_LENGTH if is_whole else config.max_length or config.packing_length
            most = 1
        window: dict[str, Any] = {} if config.packing_window is None else {"window": config.packing_window}
        return PackingConfig(
            packing_length=length,
            strategy=strategy_of(config, streams=False),
            overlong=config.overlong,
            max_samples_per_pack=most,
            **window,
        )

    # Packs

    def set_epoch(self, epoch: int) -> None:
        """Select the packs of an epoch; they differ only with reshuffle."""
        self._epoch[0] = whole_number("epoch", epoch, least=0)

    @property
    def epoch(self) -> int:
        return int(self._epoch[0])

    def __len__(self) -> int:
        return self.core.plan.num_packs(self._packed_epoch)

    def __getitem__(self, number: int) -> Batch:
        """Return a pack; negative numbers count from the end."""
        total = len(self)
        if not -total <= number < total:
            raise IndexError(f"pack {number} of a dataset of {total} packs")
        (batch,) = self._batches.make(self._work(int(number) % total))
        return batch

    def __getitems__(self, numbers: Sequence[int]) -> list[Batch]:
        """Return the packs of a DataLoader's batch; ConfigError if the DataLoader has no collate_fn."""
        check_collator(type(self).__name__, loader="pass collate_fn=dataset.get_collator()")
        return [self[number] for number in numbers]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each pack: int64[len(self)]."""
        packs = self.core.plan.packs(self._packed_epoch, 0, len(self))
        return np.add.reduceat(packs.lengths, packs.offsets[:-1]) if len(packs) else np.empty(0, np.int64)

    @property
    def modality_length(self) -> list[int]:
        """Tokens of each pack, as a list for samplers that group by length."""
        return [int(length) for length in self.lengths]

    def get_collator(self) -> PackCollator:
        """Return the collator of several packs -> one Batch, also for the trainer's data_collator."""
        return PackCollator()

    @property
    def _packed_epoch(self) -> int:
        """Epoch of the plan's packs; without reshuffle always 0."""
        return self.epoch if self.config.reshuffle else 0

    @cached_property
    def _planner(self) -> StepPlanner:
        config = StepConfig(global_batch=1, world=World())
        return StepPlanner(Mixture({_SOURCE: self.core.plan}), config)

    @cached_property
    def _batches(self) -> BatchMaker:
        settings = LoaderSettings(steps=StepConfig(global_batch=1, world=World()))
        return BatchMaker({_SOURCE: self.core}, settings)

    def _work(self, number: int) -> Work:
        """Return the reads for a pack."""
        packs = self.core.plan.packs(self._packed_epoch, number, number + 1)
        patches: Sequence[int] = () if packs.patches is None else packs.patches.tolist()
        return Work(_SOURCE, 0, [0], packs.offsets, self._planner.locate(packs), patches, [self.epoch])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for loader workers, without objects each worker builds itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_planner", "_batches")}

    # Memory and disk of a run

    def estimate_memory(self) -> MemoryEstimate:
        """Return the disk and memory of a run, from the lengths of all samples; no sample is read."""
        core, plan = self.core, self.core.plan
        packs = plan.packs(self._packed_epoch, 0, len(self))
        tokens = self.lengths * 8 * 3  # input_ids, labels, position_ids: int64
        family = getattr(core.processor, "family", None)
        if family is not None:
            tokens = tokens + self.lengths * 8 * family.num_axes
        if packs.patches is not None and family is not None:
            arrays = [array for kind in family.dummy().values() for array in kind.values()]
            of_patch = max((int(each[0].nbytes) for each in arrays if each.dtype == np.float32), default=0)
            tokens = tokens + packs.patches * of_patch  # rows of the vision tower's input
        stored: StoredDataset = core.one
        return MemoryEstimate(
            disk=int(stored.shards.sizes.sum()),
            index=int(core.length_index().lengths.nbytes),
            plan=16 * min(core.num_samples, core.order.shuffle_block_size * plan.num_canonical_nodes),
            pack=int(tokens.mean()) if len(tokens) else 0,
            largest_pack=int(tokens.max(initial=0)),
        )


# Memory and disk of a run, without its model.


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of a run, without its model.

    disk: the shards. index: the lengths of all samples, mapped once per node. plan: the packs held by each process.
    pack, largest_pack: the tensors of the mean pack and of the largest pack, with media (float32). worker: a loader
    worker with two finished packs and a third in progress.
    """

    disk: int
    index: int
    plan: int
    pack: int
    largest_pack: int

    @property
    def worker(self) -> int:
        return self.plan + 3 * self.largest_pack


BaseDataset = MultiModalDataset
VisionSFTDataset = VisionAudioSFTDataset = QwenOmniSFTDataset = MultiModalDataset
Qwen3VLDataset = RaeDataset = SitDataset = LLaVAVideoDataset = MultiModalDataset
