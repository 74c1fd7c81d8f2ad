"""MultiModalIterableDataset: sources read in place as packs. config -> packs, for a DataLoader or our trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from ....checks import check_collator, whole_number
from ....config import build_config
from ....converters.rows.options import SchemaOptions
from ....errors import ConfigError
from ....loader.collate import collate
from ....loader.loader import PackedLoader
from ....mds.core import PackedDataset
from ....mds.dataset_config import DEFAULT_LANE_WINDOW, DatasetConfig
from ....mds.streams import StreamConfig
from ....plan.lane_cursor import LaneState
from ....plan.lanes import check_lanes
from ....plan.packing import MAX_PACKING_LENGTH, PackingConfig
from ....processors.base import Processor
from ....processors.tokenizers import tokenize_in_one_thread
from ....types import Batch, World
from .epoch_turns import EpochTurns
from .moot import check_packing_kwargs, strategy_of, tell
from .naive import MemoryEstimate, OwnRows
from .names import (
    EngineDatasetConfig,
    check,
    dataset_type_of,
    is_shards,
    lacks_processor,
    processor_of,
    with_processor,
)
from .rows_of_sources import SourceRowSettings
from .source_files import SourcesOf, sources_of
from .source_loader import SourceLoader, StreamedBatch, StreamedCollator, batch_of
from .source_reader import check_state, choose_lanes, fingerprint_of, reader_lanes, reading_packs
from .source_state import Counts, SourcesState, merged_states
from .streaming_packs import PACKING_KEYS, StreamingPackConfig


class MultiModalIterableDataset(OwnRows, IterableDataset[Batch]):
    """Packs of a DatasetConfig's sources, read in place unit by unit; nothing is converted or measured before.

    Rows belong to num_canonical_nodes lanes, each with its own packer. A reader (a worker of a rank) reads complete
    lanes: ranks times workers must divide the number of lanes. The default number is chosen when a run begins, from the
    bytes of the sources and the number of readers (see choose_lanes), and kept in a state. Ranks with separate
    DataLoaders cannot compare, and choose it from the number of readers only. Exactly one lane reads each row. Packs
    are first_fit (one open pack, emitted when full), best_fit or balanced; see StreamingPacker. shuffle shuffles the
    files of an epoch and the rows of a unit (at most about 4000); the units of a file stay in order.

    Each iteration is the next epoch, with any number of DataLoader workers, persistent or not; a break drops the rest
    of its epoch; set_epoch selects another epoch. An epoch ends when a listing of the sources finds no new files; its
    number of packs may differ between ranks. The trainer reads epoch after epoch, until max_steps.

    Use get_collator() as a DataLoader's collate_fn. Call `deliver` for trained batches; state_dict() is then the
    position to resume from, with any number of readers that divides the lanes: open packs are refilled by reading their
    rows again, and no other row is read twice. The first iteration after load_state_dict resumes the epoch of the
    state, even if it is complete; after a complete epoch, call set_epoch with the next epoch before state_dict. Without
    workers, the iterator delivers its batches.

    Shards (dataset_format mds, or a URL) are read by the lanes of a PackedStreamingDataset, with the same `core`:
    endless, and each iteration begins with its epoch.
    """

    def __init__(self, config: DatasetConfig | Mapping[str, Any]):
        if isinstance(config, Mapping):
            config = build_config(EngineDatasetConfig, config, source="MultiModalIterableDataset")
        if not isinstance(config, EngineDatasetConfig):
            raise ConfigError(
                f"a MultiModalIterableDataset is made of a DatasetConfig with dataset_type, got a "
                f"{type(config).__name__}: give one"
            )
        check(config)
        self.config = config
        self.is_shards = is_shards(config)
        _ = self.row_loader
        if config.packing_mode == "plan":
            raise ConfigError(
                "packing_mode 'plan' makes packs of all lengths, and these are made while rows are read: leave it out, "
                "or use MultiModalDataset"
            )
        check_packing_kwargs(config)
        tell(config, streams=True)
        if not self.is_shards:
            _ = self.packing
        elif not self.lacks_processor:
            self.core = self._shards()
        self._loaded: SourcesState | None = None
        self._turns = EpochTurns()
        self._num_loads = 0

    def build(self) -> MultiModalIterableDataset:
        """Return the dataset: no build is needed."""
        return self

    @property
    def lacks_processor(self) -> bool:
        return lacks_processor(self.config)

    def take_processor(self, name: str) -> None:
        """Set the model's processor (folder or hub id) if the config specifies only the processor's type."""
        self.config = with_processor(self.config, name)
        if self.is_shards:
            self.core = self._shards()

    def get_collator(self) -> StreamedCollator:
        """Return the collator of several packs -> one Batch, also for the trainer's data_collator."""
        return StreamedCollator()

    def __getitem__(self, number: int) -> NoReturn:
        raise ConfigError(
            f"dataset[{number}]: packs of a MultiModalIterableDataset have no numbers, since none is known before "
            "it is read: iterate, or use MultiModalDataset"
        )

    def __iter__(self) -> Iterator[Batch]:
        num_joined = check_collator(type(self).__name__, loader="pass collate_fn=dataset.get_collator()")
        worker = get_worker_info()
        if worker is None:
            return self._iteration(self._turns.begin(), 0, 1, num_joined=num_joined)
        tokenize_in_one_thread()
        epoch = self._turns.begin_in_worker(
            seed=worker.seed - worker.id, worker=worker.id, num_workers=worker.num_workers
        )
        return self._iteration(epoch, worker.id, worker.num_workers)

    def _iteration(self, epoch: int, worker: int, num_workers: int, *, num_joined: int = 1) -> Iterator[Batch]:
        """Yield the batches of an epoch for worker `worker` of num_workers of this rank.

        num_joined: batches delivered together, because a DataLoader joins them: the request after them delivers them.
        Errors are raised while batches are read, not by __iter__. A persistent worker keeps its own state, and counts
        its next epoch from there.
        """
        world = World.detect()
        if self.is_shards:
            yield from self._batches_of_shards(epoch, world, worker, num_workers)
            return
        if self._num_loads != self._turns.num_loads:
            raise ConfigError(
                "load_state_dict was called while a DataLoader has persistent workers, which cannot receive the "
                "state: call it before the DataLoader is first iterated, or make a new DataLoader"
            )
        if self._loaded is None:
            self._loaded = self.begun(world.num_groups * num_workers, by_bytes=world.num_groups == 1)
        state = self._loaded
        state.set_epoch(epoch)
        joined: list[Batch] = []
        for batch in self.batches(
            state, world=world, worker=worker, num_workers=num_workers, endless=False, epoch=epoch
        ):
            yield batch
            joined.append(batch)
            if len(joined) == num_joined:
                for each in joined:
                    self.deliver(each)
                joined = []

    def batches(
        self,
        state: SourcesState,
        *,
        world: World,
        worker: int,
        num_workers: int,
        endless: bool,
        epoch: int | None = None,
        collator: Any = collate,
        **options: Any,
    ) -> Iterator[StreamedBatch]:
        """Yield the batches of worker `worker` of num_workers of a rank, from a state on.

        options: options of the collator. epoch: read only lanes in this epoch.
        """
        lanes = reader_lanes(state.num_lanes, world=world, worker=worker, num_workers=num_workers)
        if epoch is not None:
            lanes = [lane for lane in lanes if state.lane(lane).epoch == epoch]
            if not lanes:
                return
        reading = replace(self.reading, num_lanes=state.num_lanes)
        for pack in reading_packs(self._sources, reading, lanes=lanes, state=state, endless=endless):
            yield batch_of(pack, collator, **options)

    # Position of reading

    def begun(self, num_readers: int, *, by_bytes: bool = True) -> SourcesState:
        """Return the state before the first pack, with lanes for num_readers readers (ranks times workers).

        by_bytes: choose the number of lanes from the bytes of the sources; False for ranks that do not compare it,
        since sources may grow between their listings.
        """
        sources_of = self._sources if by_bytes else None
        choose = partial(choose_lanes, sources_of, self.reading, num_readers)
        return SourcesState(self.fingerprint, self.config.num_canonical_nodes or self._turns.lanes(num_readers, choose))

    @property
    def counts(self) -> Counts:
        """Counts of the rows of all delivered packs."""
        return Counts() if self._loaded is None else self._loaded.counts

    def deliver(self, batch: Batch) -> None:
        """Record a trained batch: state_dict() is then after its packs. The batch must come from get_collator()."""
        if not isinstance(batch, StreamedBatch):
            raise ConfigError(
                f"a {type(batch).__name__} has no record of its rows: pass get_collator() as the DataLoader's "
                "collate_fn, and deliver the batches of this function unchanged"
            )
        for after in batch.afters:
            if self._loaded is None:
                self._loaded = SourcesState(self.fingerprint, after.num_lanes)
            self._loaded.deliver(after)

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next iteration, from its beginning for all lanes in an earlier epoch.

        Warn and do nothing if the epoch has begun already. ConfigError for an epoch before a loaded state's epoch that
        no iteration has resumed.
        """
        self._turns.set(whole_number("epoch", epoch, least=0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the delivered batches: plain ints, strings and lists.

        Its epoch is the epoch of the last iteration, or of a later set_epoch.
        """
        self._refuse_shards("state_dict")
        here = self._loaded or self.begun(World.detect().num_groups)
        state = SourcesState.from_dict(here.to_dict())
        state.set_epoch(self._turns.floor)
        return state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next iteration resumes its epoch.

        With several ranks, every rank loads the result of merge_states. Raises CursorError for a state of other
        settings, or with another number of lanes than num_canonical_nodes.
        """
        self._refuse_shards("load_state_dict")
        self._loaded = self.checked(state)
        self._turns.load(min(self._loaded.lane(lane).epoch for lane in range(self._loaded.num_lanes)))
        self._num_loads = self._turns.num_loads

    def checked(self, state: Mapping[str, Any]) -> SourcesState:
        """Return a saved state as SourcesState; CursorError for a state of other settings."""
        return check_state(SourcesState.from_dict(state), self.fingerprint, num_lanes=self.config.num_canonical_nodes)

    merge_states = staticmethod(merged_states)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.reading)

    # Settings of reading

    @cached_property
    def processor(self) -> Processor:
        return processor_of(self.config)

    @cached_property
    def packing(self) -> StreamingPackConfig:
        """Packs of packing_length; without packing, one sample per pack."""
        config = self.config
        if config.packing:
            options = (config.extra_kwargs or {}).get("packing_kwargs") or {}
            return StreamingPackConfig.of(
                strategy_of(config, streams=True),
                packing_length=config.packing_length,
                options=options if config.packing_strategy in PACKING_KEYS else {},
                max_samples_per_pack=config.max_samples_per_pack,
            )
        length = MAX_PACKING_LENGTH if config.overlong in ("error", "keep") else config.packing_length
        if config.overlong == "drop":
            length = config.max_length or length
        return StreamingPackConfig(packing_length=length, max_samples_per_pack=1)

    @cached_property
    def reading(self) -> SourceRowSettings:
        config = self.config
        return SourceRowSettings(
            processor=self.processor,
            packing=self.packing,
            rows=SchemaOptions(kind=dataset_type_of(config).row_kind),
            overlong=config.overlong,
            max_length=config.longest,
            seed=config.seed if config.shuffle else None,
            on_error=config.on_error,
            loader=self.row_loader,
        )

    @property
    def _sources(self) -> SourcesOf:
        return partial(sources_of, self.config)

    def open_loader(self, **options: Any) -> SourceLoader:
        """Return batches for a trainer, step by step; see SourceLoader for the options."""
        return SourceLoader(self, **options)

    def estimate_memory(self, num_workers: int = 1) -> MemoryEstimate:
        """Return the memory of a run with num_workers workers per rank, without media; only sizes of files are read.

        plan: open packs in the lanes of a worker. largest_pack: a pack of packing_length tokens.
        """
        num_workers = max(1, whole_number("num_workers", num_workers, least=0))
        per_token = 8 * 3  # input_ids, labels, position_ids: int64
        if self.is_shards:
            lanes, most = int(self.core.lane_order.num_canonical_nodes or 1), self.core.needed_packing.packing_length
            num_open = self.core.needed_packing.window
        else:
            packing, readers = self.packing, World.detect().num_groups * num_workers
            lanes, most, num_open = self.begun(readers).num_lanes, packing.packing_length, 2 * packing.max_open
        per_worker = -(-lanes // (World.detect().num_groups * num_workers))
        pack = most * per_token
        return MemoryEstimate(disk=0, index=0, plan=per_worker * num_open * pack, pack=pack, largest_pack=pack)

    # Shards

    def _shards(self) -> PackedDataset:
        """Return the dataset of shards, packed in lanes."""
        config = self.config
        (source,) = sources_of(config)
        packing = PackingConfig(
            packing_length=config.packing_length
            if config.packing or config.overlong not in ("error", "keep")
            else MAX_PACKING_LENGTH,
            strategy=strategy_of(config, streams=False),
            overlong=config.overlong,
            max_samples_per_pack=config.max_samples_per_pack if config.packing else 1,
            window=config.packing_window or DEFAULT_LANE_WINDOW,
        )
        return PackedDataset(
            [StreamConfig(remote=source.path, local=config.local)],
            processor=self.processor,
            packing=packing,
            packing_mode="lanes",
            order=replace(config.order, reshuffle=True),  # lanes are packed again in each epoch
            fetch=config.fetch,
        )

    def _batches_of_shards(self, epoch: int, world: World, worker: int, num_workers: int) -> Iterator[Batch]:
        num_readers, reader = world.num_groups * num_workers, world.group + world.num_groups * worker
        num_lanes = int(self.core.lane_order.num_canonical_nodes or 1)
        check_lanes(num_lanes, world.num_groups, num_workers)
        loader = PackedLoader(self.core, global_batch=num_readers, world=World(rank=reader, world_size=num_readers))
        begun = {str(lane): LaneState(epoch=epoch).to_dict() for lane in range(num_lanes)}
        loader.load_state_dict(loader.state_dict() | {"lanes": begun})
        yield from loader

    def _refuse_shards(self, what: str) -> None:
        if self.is_shards:
            raise ConfigError(
                f"{what}: the state of a dataset of shards is kept by its loader: pass the dataset to PackedLoader or "
                "FSDP2SFTTrainer"
            )


BaseIterableDataset = MultiModalIterableDataset
VisionSFTIterableDataset = FinewebEduDataset = BagelIterableDataset = MultiModalIterableDataset
Qwen3VLIterableDataset = QwenOmniIterableDataset = MultiModalIterableDataset
