"""Samples -> groups for rollouts, numbered over the whole run; groups that were not finished come back first."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from ..checks import plain_path
from ..errors import CheckpointError, ConfigError, CursorError, DataError, ObjectMissingError
from ..storage.storage import open_storage
from .arguments import refuse_unheard, setting
from .base import BaseDataset
from .dataset import Dataset
from .sample import Sample
from .saved import load_state, save_state
from .streaming import StreamingDataset

Group = list[Sample]
BufferFilter = Callable[[Any, int | None, list[Group], int], list[Group]]
_NAME = "dataset/global_dataset_state_dict"


class RolloutDataSource:
    """Groups of n_samples_per_prompt copies of a prompt. args: what add_data_arguments gives, and hf_checkpoint (the
    tokenizer's folder or hub id), save and load (folders or URLs of states).

    group_index and index count up over the whole run, and go on after `load`. Without a dataset
    (--disable-rollout-global-dataset) samples are empty. dataset: instead of the one that args name.
    """

    has_buffer = False  # of groups that were put back

    def __init__(self, args: Any, *, dataset: BaseDataset | None = None):
        self.args = args
        self.num_per_group = int(setting(args, "n_samples_per_prompt"))
        if self.num_per_group < 1:
            raise ConfigError(f"n_samples_per_prompt must be at least 1, got {self.num_per_group}")
        self.sample_group_index = 0
        self.sample_index = 0
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
        """Rows of the epoch that were passed, dropped ones among them."""
        return 0 if self.dataset is None else self.dataset.position

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def lengths(self) -> int:
        return len(self)

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next groups, always so many."""
        if num_samples < 0:
            raise ConfigError(f"the number of groups must be at least 0, got {num_samples}")
        if self.dataset is None:
            prompts = [Sample() for _ in range(num_samples)]
        else:
            prompts, _ = self.dataset.get_batch(num_samples)
        return [self._group(prompt) for prompt in prompts]

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
        """Values that are saved along; JSON, arrays or tensors."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    # States

    def save(self, rollout_id: int) -> None:
        """Where it stands, below args.save; it is the old state or the new one, whenever the process is killed."""
        if setting(self.args, "save") is None:
            raise ConfigError("there is no folder to save to: set save (--save)")
        if not isinstance(rollout_id, int) or rollout_id < 0:
            raise ConfigError(f"rollout_id must be a number of at least 0, got {rollout_id!r}: count rollouts from 0")
        save_state(open_storage(setting(self.args, "save")), f"{_NAME}_{rollout_id}", self._state())

    def load(self, rollout_id: int | None = None) -> None:
        """Go on from the state of a rollout below args.load; None: from the latest, and where there is none, anew.

        Without args.load, and for a rollout before the first, it begins anew. CheckpointError for a state that is not
        there or damaged, CursorError for one of other data.
        """
        if setting(self.args, "load") is None or (rollout_id is not None and rollout_id < 0):
            return
        store = open_storage(setting(self.args, "load"))
        if rollout_id is None:
            saved = [re.fullmatch(rf"{_NAME}_(\d+)\.json", each.key) for each in store.list_objects(f"{_NAME}_")]
            rollout_id = max((int(name[1]) for name in saved if name), default=None)
            if rollout_id is None:
                return
        try:
            state = load_state(store, f"{_NAME}_{rollout_id}")
        except ObjectMissingError as error:
            raise CheckpointError(
                f"{store.url} holds no state of rollout {rollout_id} ({_NAME}_{rollout_id}.json): name a rollout that "
                "was saved; a .pt file of Relax's is a pickle, which is not read"
            ) from error
        self._restore(state)

    def _state(self) -> dict[str, Any]:
        return {
            "dataset": None if self.dataset is None else self.dataset.state_dict(),
            "n_samples_per_prompt": self.num_per_group,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
        }

    def _restore(self, state: dict[str, Any]) -> None:
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
                raise CursorError(f"the state was saved {how} --rollout-shuffle: set it as it was, or begin anew")
            self.dataset.load_state_dict(state["dataset"])
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, with a buffer of groups that were put back: they come first, and are saved too.

    buffer_filter: (args, rollout_id, buffer, num_samples) -> groups, which it takes out of the buffer; pop_first
    without --buffer-filter-path.
    """

    has_buffer = True

    def __init__(self, args: Any, *, dataset: BaseDataset | None = None):
        super().__init__(args, dataset=dataset)
        self.buffer: list[Group] = []
        path = setting(args, "buffer_filter_path")
        self.buffer_filter: BufferFilter = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups of the buffer, and as many of the dataset as these are too few. After an error none is gone."""
        before = [*self.buffer]
        try:
            groups = self._from_buffer(num_samples) if self.buffer and num_samples > 0 else []
            return [*groups, *super().get_samples(num_samples - len(groups))]
        except BaseException:
            self.buffer[:] = before
            raise

    def _from_buffer(self, num_samples: int) -> list[Group]:
        groups = [*self.buffer_filter(self.args, None, self.buffer, num_samples)]
        if len(groups) > num_samples:
            raise ConfigError(
                f"the buffer filter gave {len(groups)} groups where {num_samples} were asked for: correct "
                "--buffer-filter-path"
            )
        if {*map(id, groups)} & {*map(id, self.buffer)}:
            raise ConfigError(
                "the buffer filter left a group that it gave in the buffer, so it would be given again: let the "
                "function of --buffer-filter-path delete it there"
            )
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back. DataError for one that is not n_samples_per_prompt samples; then none is put back."""
        for group in samples:
            if not isinstance(group, list) or not all(isinstance(each, Sample) for each in group):
                raise DataError(f"a group must be a list of samples, got {type(group).__name__}: give lists of lists")
            if len(group) != self.num_per_group:
                raise DataError(
                    f"a group has {len(group)} samples and n_samples_per_prompt is {self.num_per_group}: put whole "
                    "groups back"
                )
        self.buffer += samples

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "buffer": self.buffer}

    def _restore(self, state: dict[str, Any]) -> None:
        buffer = state.get("buffer", [])
        if buffer and state["n_samples_per_prompt"] != self.num_per_group:
            raise CursorError(
                f"the state's buffer holds groups of {state['n_samples_per_prompt']} samples and n_samples_per_prompt "
                f"is {self.num_per_group}: set it as it was, or begin anew"
            )
        super()._restore(state)
        self.buffer = buffer


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The groups that were put back first, taken out of the buffer."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def load_function(path: str) -> Any:
    """What MODULE.NAME names; ConfigError where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported ({error}): name a function as MODULE.NAME") from error


def open_dataset(args: Any) -> BaseDataset:
    """The dataset that args name."""
    refuse_unheard(args)
    if setting(args, "prompt_data") is None:
        raise ConfigError("there are no prompts: set --prompt-data, or --disable-rollout-global-dataset")
    template, max_length = setting(args, "apply_chat_template"), setting(args, "rollout_max_prompt_len")
    checkpoint, keys = setting(args, "hf_checkpoint"), setting(args, "multimodal_keys")
    if checkpoint is None and (template or max_length is not None or keys):
        raise ConfigError(
            "--apply-chat-template, --rollout-max-prompt-len and --multimodal-keys need hf_checkpoint "
            "(--hf-checkpoint): name the folder or hub id of the model"
        )
    function = setting(args, "custom_prompt_path")
    settings = {
        "tokenizer": checkpoint,
        "processor": _processor(checkpoint) if keys else None,
        "max_length": max_length,
        "prompt_key": setting(args, "input_key"),
        "multimodal_keys": keys,
        "label_key": setting(args, "label_key"),
        "tool_key": setting(args, "tool_key"),
        "metadata_key": setting(args, "metadata_key"),
        "system_prompt": setting(args, "system_prompt"),
        "seed": setting(args, "rollout_seed"),
        "apply_chat_template": template,
        "apply_chat_template_kwargs": setting(args, "apply_chat_template_kwargs"),
        "use_audio_in_video": setting(args, "use_audio_in_video"),
        "custom_prompt_func": None if function is None else load_function(function),
        "cache_limit": setting(args, "prompt_cache_limit"),
    }
    if not setting(args, "use_streaming_dataset"):
        return Dataset(setting(args, "prompt_data"), **settings)
    return StreamingDataset(
        setting(args, "prompt_data"),
        **settings,
        buffer_size=setting(args, "streaming_buffer_size"),
        prefetch_chunk_size=setting(args, "prefetch_chunk_size"),
        prefetch_max_cached=setting(args, "prefetch_max_cached"),
        prefetch_num_workers=setting(args, "prefetch_num_workers"),
    )


def _processor(path: str) -> Any:
    """A processor of transformers', which counts the tokens of images."""
    from transformers import AutoProcessor

    path = str(plain_path("hf_checkpoint", path))
    try:
        return AutoProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"processor {path!r} cannot be loaded ({str(error).splitlines()[0]}): name another"
        ) from error
