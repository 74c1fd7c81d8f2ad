"""Samples -> groups for rollouts, numbered over the whole run; unfinished groups come back first."""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, ClassVar

import numpy as np

from ...checks import NamedLikeTheirs, whole_number
from ...errors import CheckpointError, ConfigError, CursorError, DataError, LmmsStreamError, ObjectMissingError
from ...extras import need
from ...storage.storage import Storage, open_storage
from .arguments import setting
from .base import BaseDataset
from .cursor import MAX_EPOCHS
from .dataset import Dataset
from .in_flight import Group, InFlight, number_of
from .opening import load_function, load_processor, open_dataset
from .sample import Sample, load_state, save_state

BufferFilter = Callable[[Any, int | None, list[Group], int], list[Group]]
_FILE = "global_dataset_state_dict"
_NAME = f"dataset/{_FILE}"
_MAX_INDEX = 1 << 62


class RolloutDataSource(NamedLikeTheirs):
    """Groups of n_samples_per_prompt copies of a prompt.

    args: the namespace of add_data_arguments, with hf_checkpoint (the tokenizer's folder or hub id), save and load
    (folders or URLs of states). dataset: replaces the dataset named by args.

    group_index and index count up over the whole run and continue after `load`. Without a dataset
    (--disable-rollout-global-dataset) samples are empty.
    """

    NOT_CALLED: ClassVar = {"_get_samples_from_buffer": "give a function of --buffer-filter-path"}
    has_buffer = False  # whether groups can be put back

    def __init__(self, args: Any, *, dataset: BaseDataset | None = None):
        self.args = args
        self.num_per_group = whole_number("n_samples_per_prompt", setting(args, "n_samples_per_prompt"), least=1)
        self.sample_group_index = 0
        self.sample_index = 0
        self._lock = threading.RLock()  # keeps calls of other threads out of a save
        self.metadata: dict[str, Any] = {}
        self.dataset = dataset
        if dataset is None and setting(args, "rollout_global_dataset"):
            self.dataset = open_dataset(args)
        if self.dataset is not None and setting(args, "rollout_shuffle"):
            self.dataset.shuffle(0)

    @property
    def epoch_id(self) -> int:
        return 0 if self.dataset is None else self.dataset.epoch_id

    @property
    def sample_offset(self) -> int:
        """Rows of the epoch passed by batches, including dropped rows."""
        return 0 if self.dataset is None else self.dataset.position

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def lengths(self) -> int:
        return len(self)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next num_samples groups; with --sort-prompts-by-length, long prompts first."""
        num_samples = whole_number("the number of groups", num_samples, least=0)
        with self._lock:
            if self.dataset is None:
                prompts = [Sample() for _ in range(num_samples)]
            else:
                prompts, _ = self.dataset.get_batch(num_samples)
            return self._by_length([self._group(prompt) for prompt in prompts])

    def _by_length(self, groups: list[Group]) -> list[Group]:
        if not setting(self.args, "sort_prompts_by_length"):
            return groups
        texts = [group[0].prompt if isinstance(group[0].prompt, str) else "" for group in groups]
        return [groups[index] for index in sorted(range(len(groups)), key=lambda index: -len(texts[index]))]

    def _group(self, prompt: Sample) -> Group:
        group = []
        for _ in range(self.num_per_group):
            sample = prompt.copy()
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[Group]) -> None:
        raise ConfigError(
            f"{type(self).__name__} takes no groups back: use RolloutDataSourceWithBuffer (--data-source-path)"
        )

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add values to the metadata saved in states: JSON values, arrays or tensors."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    # States

    def save(self, rollout_id: int) -> None:
        """Save the state below args.save, atomically: a kill leaves the old state or the new state."""
        if setting(self.args, "save") is None:
            raise ConfigError("no folder for states is set: set save (--save)")
        if not isinstance(rollout_id, int) or rollout_id < 0:
            raise ConfigError(f"rollout_id must be a number of at least 0, got {rollout_id!r}: count rollouts from 0")
        with self._lock:
            save_state(open_storage(setting(self.args, "save")), f"{_NAME}_{rollout_id}", self._state(rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        """Resume from the state of a rollout below args.load; None: from the latest state.

        Without args.load, without a saved state, or for a negative rollout_id, do nothing. If our state is missing,
        read Relax's state (.pt) without running its pickled code, and follow Relax's order from then on.
        CheckpointError for a missing or damaged state, CursorError for a state of other data.
        """
        if setting(self.args, "load") is None or (rollout_id is not None and rollout_id < 0):
            return
        store = open_storage(setting(self.args, "load"))
        if rollout_id is None:
            names = [each.key for folder in FOLDERS for each in store.list_objects(f"{folder}/")]
            saved = [re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/{_FILE}_(\d+)\.(?:json|pt)", name) for name in names]
            rollout_id = max((int(name[1]) for name in saved if name), default=None)
            if rollout_id is None:
                return
        try:
            try:
                self._restore(load_state(store, f"{_NAME}_{rollout_id}"))
            except ObjectMissingError:
                self._restore_relax(store, rollout_id)
        except LmmsStreamError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            where = f"the state of rollout {rollout_id} in {store.url}"
            raise CursorError(f"{where} is damaged ({error!r}): load another state, or start over") from error

    def _restore_relax(self, store: Storage, rollout_id: int) -> None:
        for folder in FOLDERS:
            try:
                state = read_relax_state(store, f"{folder}/{_FILE}_{rollout_id}.pt")
            except ObjectMissingError:
                continue
            state = {"sample_group_index": 0, "metadata": {}} | state
            _check_numbers(state)
            if self.dataset is not None:
                measures = not state.get("use_streaming") and setting(self.args, "rollout_max_prompt_len") is not None
                checkpoint, trusts = (setting(self.args, name) for name in ("hf_checkpoint", "trust_remote_code"))
                has_processor = measures and checkpoint and load_processor(checkpoint, trust_remote_code=trusts)
                is_shuffled = bool(setting(self.args, "rollout_shuffle"))
                requests = (setting(self.args, name) for name in ("rollout_batch_size", "over_sampling_batch_size"))
                follow_relax(
                    self.dataset,
                    state,
                    is_shuffled=is_shuffled,
                    drops_unordered=bool(has_processor),
                    largest_request=max(each or 0 for each in requests),
                )
            self._count_on(state)
            return
        raise CheckpointError(
            f"{store.url} holds no state of rollout {rollout_id} ({_NAME}_{rollout_id}.json, or Relax's .pt): name a "
            "rollout that was saved"
        )

    def _state(self, rollout_id: int) -> dict[str, Any]:
        return {
            "dataset": None if self.dataset is None else self.dataset.state_dict(),
            "n_samples_per_prompt": self.num_per_group,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        _check_numbers(state)
        if not self.has_buffer and state.get("buffer"):
            raise CursorError(
                f"the state's buffer holds {len(state['buffer'])} groups, and {type(self).__name__} has no buffer: use "
                "RolloutDataSourceWithBuffer (--data-source-path), or begin anew"
            )
        if (state["dataset"] is None) != (self.dataset is None):
            has, wants = ("no", "a") if state["dataset"] is None else ("a", "no")
            raise CursorError(
                f"the state is of {has} dataset and this run has {wants} dataset: set --prompt-data as then"
            )
        if self.dataset is not None:
            if state["dataset"]["is_shuffled"] != bool(setting(self.args, "rollout_shuffle")):
                how = "with" if state["dataset"]["is_shuffled"] else "without"
                raise CursorError(
                    f"the state was saved {how} --rollout-shuffle: use the setting of the saved run, or start over"
                )
            self.dataset.load_state_dict(state["dataset"])
        self._count_on(state)

    def _count_on(self, state: Mapping[str, Any]) -> None:
        self.sample_group_index, self.sample_index = state["sample_group_index"], state["sample_index"]
        self.metadata = state["metadata"]


def _check_numbers(state: Mapping[str, Any]) -> None:
    """Raise CursorError for numbers of groups and samples out of range, and without metadata."""
    for name in ("sample_group_index", "sample_index"):
        if not isinstance(number := state.get(name), int) or not 0 <= number < _MAX_INDEX:
            raise CursorError(f"the state has {name} {number!r}: it is damaged; load another state, or start over")
    if not isinstance(state["metadata"], Mapping):
        raise TypeError(f"metadata is {state['metadata']!r}")


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """RolloutDataSource with a buffer of groups put back; buffered groups come first and are saved in states.

    buffer_filter: (args, rollout_id, buffer, num_samples) -> groups, removed from the buffer; pop_first without
    --buffer-filter-path.

    Groups handed out to a holder are in flight. A state holds them in the order of delivery, and a source that loads
    the state hands them out first. They are in flight until `add_samples` or `put_back` puts them back, or `finish`
    delivers them.
    """

    has_buffer = True

    def __init__(self, args: Any, *, dataset: BaseDataset | None = None):
        super().__init__(args, dataset=dataset)
        self.buffer: list[Group] = []
        self._in_flight = InFlight()
        path = setting(args, "buffer_filter_path")
        self.buffer_filter: BufferFilter = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int, *, holder: str | None = None) -> list[Group]:
        """Return groups of the buffer, filled up with groups of the dataset. An error leaves the buffer unchanged.

        holder: name of the generating process; its groups are in flight until they come back. None: not tracked.
        """
        with self._lock:
            before = [*self.buffer]
            try:
                groups = self._from_buffer(num_samples) if self.buffer and num_samples > 0 else []
                groups = self._by_length([*groups, *super().get_samples(num_samples - len(groups))])
            except BaseException:
                self.buffer[:] = before
                raise
            if holder is not None:
                self._in_flight.hand_out(groups, holder=holder)
            return groups

    def _from_buffer(self, num_samples: int) -> list[Group]:
        groups = [*self.buffer_filter(self.args, None, self.buffer, num_samples)]
        if len(groups) > num_samples:
            raise ConfigError(
                f"the buffer filter gave {len(groups)} groups, expected {num_samples}: correct --buffer-filter-path"
            )
        after = [*map(id, groups), *map(id, self.buffer)]
        if len({*after}) < len(after):
            raise ConfigError(
                "the buffer filter returned a group twice, or without deleting it from the buffer, so the group would "
                "be used again: return each group once, and delete it, in the function of --buffer-filter-path"
            )
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back, all or none.

        DataError unless each is a list of n_samples_per_prompt samples, and not in the buffer.
        """
        for group in samples:
            if not isinstance(group, list) or not all(isinstance(each, Sample) for each in group):
                raise DataError(f"a group must be a list of samples, got {type(group).__name__}: give lists of lists")
            if len(group) != self.num_per_group:
                raise DataError(
                    f"a group has {len(group)} samples and n_samples_per_prompt is {self.num_per_group}: put whole "
                    "groups back"
                )
        with self._lock:
            numbers = [number_of(group) for group in samples]
            counts = Counter([*numbers, *(group[0].group_index for group in self.buffer)])
            if twice := [number for number in numbers if counts[number] > 1]:
                raise DataError(
                    f"group {twice[0]} is already in the buffer: its holder was considered lost, or the group was "
                    "returned twice; leave it out"
                )
            self._in_flight.came_back(samples)
            self.buffer += samples

    def finish(self, samples: Sequence[Group | int], rollout_id: int | None = None) -> None:
        """Deliver groups, or groups with these numbers, generated by a holder.

        rollout_id: the rollout that trains on the groups. Until `save` is called for this rollout or a later rollout,
        the groups are part of saved states: a run resumed from an earlier rollout generates them again. None: done at
        once. DataError for a group that is not in flight; then no group is delivered.
        """
        with self._lock:
            self._in_flight.finish(samples, rollout_id=None if setting(self.args, "save") is None else rollout_id)

    def put_back(self, holder: str | None = None) -> int:
        """Put the groups in flight of a lost holder (None: all holders) in front of the buffer; return their number."""
        with self._lock:
            groups = self._in_flight.take(holder)
            self.buffer[:0] = groups
            return len(groups)

    def get_num_in_flight(self) -> int:
        """Return the number of groups in flight, including delivered groups of unsaved rollouts."""
        return len(self._in_flight)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def save(self, rollout_id: int) -> None:
        with self._lock:
            super().save(rollout_id)
            self._in_flight.saved(rollout_id)

    def _state(self, rollout_id: int) -> dict[str, Any]:
        return {**super()._state(rollout_id), "buffer": [*self._in_flight.after(rollout_id), *self.buffer]}

    def _restore(self, state: dict[str, Any]) -> None:
        buffer = state.get("buffer", [])
        if buffer and state["n_samples_per_prompt"] != self.num_per_group:
            raise CursorError(
                f"the state's buffer holds groups of {state['n_samples_per_prompt']} samples and n_samples_per_prompt "
                f"is {self.num_per_group}: set the state's number, or start over"
            )
        if not all(isinstance(group, list) and all(isinstance(each, Sample) for each in group) for group in buffer):
            raise TypeError("its buffer holds other values than groups of samples")
        super()._restore(state)
        self.buffer, self._in_flight = buffer, InFlight()


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the groups at the front of the buffer, oldest first."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


# Relax's saved states: a .pt file -> values -> a dataset's position. No pickled code is run.

FOLDERS = ("dataset", "rollout")  # folders used by Relax, newest first


def read_relax_state(store: Storage, key: str) -> dict[str, Any]:
    """Return the values of a .pt file; CheckpointError if it holds anything but plain values and tensors."""
    need("torch", by="states of Relax's")
    import torch

    where = f"{store.url}/{key}"
    try:
        state = torch.load(io.BytesIO(store.read(key)), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{where} cannot be read without running pickled code ({str(error).splitlines()[0][:200]}): load an "
            "earlier state, or a state whose metadata are only numbers and texts"
        ) from error
    if not isinstance(state, dict) or not {"sample_offset", "epoch_id", "sample_index"} <= state.keys():
        raise CheckpointError(f"{where} is not a state of Relax's data source: load another state")
    return state


def follow_relax(
    dataset: BaseDataset,
    state: Mapping[str, Any],
    *,
    is_shuffled: bool,
    drops_unordered: bool = False,
    largest_request: int = 0,
) -> None:
    """Move a dataset to the position of Relax's dataset, in Relax's order.

    is_shuffled: with --rollout-shuffle. drops_unordered: whether Relax's eager dataset measured prompts with a
    processor; its samples are then in the completion order of its processes. largest_request: prompts that a rollout
    asks for. CursorError for a position that cannot be reproduced, or is beyond the epoch.
    """
    if state.get("use_streaming"):
        _follow_streaming(dataset, state.get("streaming_state") or {}, is_shuffled=is_shuffled)
        return
    if drops_unordered:
        raise CursorError(
            "the state is of Relax's eager dataset with a processor and --rollout-max-prompt-len, whose order differs "
            "in each run: start over, or remove long prompts from the files and leave the flag out"
        )
    offset, epoch_id = index(state["sample_offset"]), index(state["epoch_id"])
    if offset < 0 or not 0 <= epoch_id < MAX_EPOCHS:
        raise CursorError(
            f"the state has sample_offset {offset} and epoch_id {epoch_id}: it is damaged; load another state"
        )
    drops = dataset.may_drop
    if drops and not isinstance(dataset, Dataset):
        raise CursorError(
            "the state is of Relax's eager dataset, which counts the samples it has kept, and --rollout-max-prompt-len "
            "drops some: load it without --use-streaming-dataset; states saved from then on fit both"
            if not is_shuffled
            else "the state is of Relax's eager dataset, which shuffles the samples it has kept, and "
            "--rollout-max-prompt-len drops some: load it without --use-streaming-dataset"
        )
    num_kept = len(dataset)
    if offset > max(num_kept, largest_request):  # Relax keeps counting if a request is larger than the dataset
        raise CursorError(
            f"the state has sample_offset {offset} of an epoch with {num_kept} samples: it is of other data, or "
            "damaged; name the files of the saved run (--prompt-data), or start over"
        )
    position = min(offset, num_kept)
    if isinstance(dataset, Dataset) and drops:
        dataset.follow_relax_order()
        kept = np.delete(np.arange(dataset.num_rows), dataset.dropped_rows)
        position = position if is_shuffled else int(kept[position]) if position < num_kept else dataset.num_rows
    else:
        dataset.follow("relax")
    dataset.index_manager.begin(epoch_id, is_shuffled=is_shuffled, position=position)


def _follow_streaming(dataset: BaseDataset, state: Mapping[str, Any], *, is_shuffled: bool) -> None:
    position = state.get("position", 0)
    if not is_shuffled and 0 < position < dataset.num_rows:
        raise CursorError(
            "the state's position is within an epoch of Relax's StreamingDataset, which most versions shuffle even "
            "without --rollout-shuffle: set --rollout-shuffle to resume in this order, or start over"
        )
    dataset.load_state(state)
    if not is_shuffled:
        dataset.index_manager.begin(dataset.epoch_id, is_shuffled=False, position=dataset.position)
