"""Base class of eager and lazy datasets: the order of an epoch, samples by number, batches, counts of dropped rows."""

from __future__ import annotations

import inspect
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ...checks import NamedLikeTheirs, check_collator, whole_number
from ...errors import ConfigError, CursorError, DataError, did_you_mean
from .cursor import ORDERS, IndexManager, Order, Permutation
from .prompts import OVERLONG, MultimodalConfig, Outcome, Prompts
from .rows import open_rows
from .sample import Sample

STEP = 64  # rows read together while samples are counted
MARK_EVERY = 256  # the position of each MARK_EVERY-th sample is kept
OnError = Literal["error", "skip"]


class BaseDataset(NamedLikeTheirs, ABC):
    """Samples of rows in the order of an epoch.

    path: .jsonl and .parquet files, folders, MDS datasets, in folders or stores, lists of them, each with @[START:STOP]
    (see open_rows). tokenizer: a fast tokenizer of transformers, or its folder or hub id. processor: None for prompts
    without media; with a processor, the media of prompts become multimodal_inputs, with images as PIL images.
    max_length: in tokens; rows with longer prompts are dropped, never cut, and counted (num_overlong). prompt_key,
    label_key, tool_key, metadata_key: columns. multimodal_keys: kind of media -> column. system_prompt: system message
    added before each prompt. apply_chat_template: render prompts as text; apply_chat_template_kwargs: variables of the
    template. custom_prompt_func: (prompt, row) -> prompt. seed: seed of shuffle. multimodal_config: limits on images.
    teacher_prompt_key: column of the teacher's prompt, rendered into metadata["opd_teacher_prompt"] like the prompt.
    teacher_multimodal_keys: kind of media -> column of the teacher's media (teacher_multimodal_inputs). on_error:
    "skip" drops unreadable rows and counts them (num_unreadable); "error" raises a DataError that names the row. order:
    order of shuffled epochs: "own", or "relax" for Relax's permutation (8 bytes a row).
    cache_limit: space on this node for copies of remote data, as bytes or "500mb" (None: no limit). JSON-lines files
    that do not fit are read from the store by byte ranges; the least recently used shards are evicted.

    Rows keep their order until `shuffle` is called. Do not change samples: `copy` them first.
    Raises ConfigError, DataError, StorageError.
    """

    NOT_CALLED: ClassVar = {
        **dict.fromkeys(("_process_data", "_process_raw_data", "_prefetch_process_single"), "give custom_prompt_func"),
        **dict.fromkeys(("_get_batch_prefetch", "_get_batch_no_prefetch"), "override get_batch"),
    }

    _has_looked = False  # at the columns of the first rows

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        tokenizer: Any = None,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        system_prompt: str | None = None,
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        use_audio_in_video: bool = False,
        multimodal_config: MultimodalConfig | None = None,
        custom_prompt_func: Callable[[Any, dict[str, Any]], Any] | None = None,
        teacher_prompt_key: str | None = None,
        teacher_multimodal_keys: Mapping[str, str] | None = None,
        on_error: OnError = "error",
        order: Order = "own",
        cache_limit: int | str | None = None,
        **unknown: Any,
    ):
        for name in unknown:
            parameters = {**inspect.signature(type(self)).parameters, **inspect.signature(BaseDataset).parameters}
            known = [
                each.name for each in parameters.values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            ]
            raise ConfigError(f"{type(self).__name__} takes no {name}: {did_you_mean(name, known)}")
        seed = whole_number("seed", seed, least=0)
        if use_audio_in_video:
            raise ConfigError("use_audio_in_video is not supported: leave it out; videos are read as stored")
        if multimodal_config is not None and not isinstance(multimodal_config, MultimodalConfig):
            raise ConfigError(f"multimodal_config must be a MultimodalConfig, got {multimodal_config!r}: make one")
        if on_error not in ("error", "skip"):
            raise ConfigError(f"on_error must be 'error' or 'skip', got {on_error!r}")
        self.seed = seed
        self.max_length = max_length
        self._prompts = Prompts(
            tokenizer=tokenizer,
            processor=processor,
            max_length=max_length,
            prompt_key=prompt_key,
            multimodal_keys=multimodal_keys,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            system_prompt=system_prompt,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs,
            custom_prompt_func=custom_prompt_func,
            multimodal_config=multimodal_config,
            teacher_prompt_key=teacher_prompt_key,
            teacher_multimodal_keys=teacher_multimodal_keys,
        )
        self._rows = open_rows(path, columns=self._prompts.columns, cache_limit=cache_limit)
        self._on_error = on_error
        self.may_drop = max_length is not None or on_error == "skip"
        self._dropped = np.zeros(self.num_rows // 8 + 1 if self.may_drop else 0, np.uint8)  # one bit per row
        self.num_overlong = 0
        self.num_unreadable = 0
        self.num_processed = 0  # rows made into samples, counted each time
        self.epochs_crossed = 0  # ends of epochs passed by the last batch
        self._marks_of: Permutation | None = None  # the order for which the marks were counted
        self.index_manager = IndexManager(self.num_rows, seed, shuffle=False, order=order)

    @property
    def num_rows(self) -> int:
        """Number of rows in path, including dropped rows."""
        return self._rows.num_rows

    @property
    def digest(self) -> str:
        """Digest that identifies the rows, independent of their location."""
        return self._rows.digest

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _outcomes(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """Return the outcomes of rows, in the order of `rows`."""

    def _outcomes_at(self, start: int, stop: int) -> list[Outcome]:
        """Return the outcomes at positions start <= position < stop, for a pass through the epoch from start to end."""
        return self._outcomes(self.index_manager.permutation.between(start, stop))

    def _made(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """Read rows and return their outcomes, uncached; safe to call from several threads."""
        read = self._rows.read(rows)
        if not self._has_looked:
            self._has_looked = True
            self._prompts.look_at(read.rows)
        return self._prompts.make(read)

    # The order

    @property
    def epoch_id(self) -> int:
        return self.index_manager.current_epoch

    @property
    def is_shuffled(self) -> bool:
        return self.index_manager.is_shuffled

    @property
    def position(self) -> int:
        """Rows of the epoch passed by batches, including dropped rows."""
        return self.index_manager.position

    def shuffle(self, epoch_id: int) -> None:
        """Begin an epoch in the order determined by seed and epoch; do nothing if this shuffled epoch is current."""
        self.index_manager.shuffle(epoch_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of batches as JSON values, valid for eager and lazy datasets of the same rows.

        The first call reads all local Parquet files and all local shards without checksums.
        """
        return {
            "digest": self.digest,
            "all_bytes": self._rows.all_bytes,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "epoch_id": self.epoch_id,
            "is_shuffled": self.is_shuffled,
            "order": self._order,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; CursorError for other rows, for another seed if shuffled, and for an invalid state."""
        keys = {*state} if isinstance(state, Mapping) else set()
        if missing := sorted(self.state_dict().keys() - keys - {"order", "all_bytes"}):
            raise CursorError(f"the state is not a dataset's: it has no {missing[0]!r}; pass the result of state_dict")
        all_bytes = state.get("all_bytes"), self._rows.all_bytes
        is_other = None not in all_bytes and all_bytes[0] != all_bytes[1]
        if is_other or state["digest"] not in (self.digest, self._rows.old_digest):
            raise CursorError(
                f"the state belongs to other data ({state['num_rows']} rows, {state['digest']}; these are "
                f"{self.num_rows} rows, {self.digest}): name the files of the saved run, or start over"
            )
        if state["seed"] != self.seed and state["is_shuffled"]:
            raise CursorError(
                f"the state follows seed {state['seed']} and this dataset has seed {self.seed}: set the state's seed, "
                "or start over"
            )
        self.index_manager.check(state["epoch_id"], state["position"])
        self.follow(state.get("order", "own"))
        self.index_manager.begin(state["epoch_id"], is_shuffled=state["is_shuffled"], position=state["position"])

    @property
    def _order(self) -> str:
        """Name of the order of shuffled epochs in states."""
        return self.index_manager.order

    def follow(self, order: str) -> None:
        """Use the order named by a state for shuffled epochs; CursorError for an unsupported order."""
        known = next((each for each in ORDERS if each == order), None)
        if known is None:
            raise CursorError(
                f"the state follows the order {order!r}, which {type(self).__name__} does not support: load it with "
                "the class and max_length of the saved run, or start over"
            )
        self.index_manager.order, self.index_manager.last = known, None

    def get_state(self) -> dict[str, Any]:
        """Return the state under Relax's name, with counts of rows."""
        return {**self.state_dict(), "filter_count": self.num_overlong, "total_processed": self.num_processed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of get_state, or from a state of Relax's StreamingDataset and follow Relax's order."""
        if not isinstance(state, Mapping) or "digest" in state:
            self.load_state_dict(state)
            return
        if missing := sorted({"epoch_id", "position"} - state.keys()):
            raise CursorError(f"the state is not a dataset's: it has no {missing[0]!r}; pass the result of get_state")
        self.index_manager.check(state["epoch_id"], state["position"])
        self.follow("relax")
        self.index_manager.reset(state["position"], state["epoch_id"])

    # Batches

    def get_batch(self, num_samples: int) -> tuple[list[Sample], bool]:
        """Return the next num_samples samples, and whether the batch passed the end of an epoch.

        epochs_crossed is the number of ends passed. If an epoch was read to its last row, the next batch passes its
        end. After `shuffle`, each epoch has its own order. After an error the same batch can be requested again.
        """
        num_samples = whole_number("the number of samples", num_samples, least=0)
        cursor = self.index_manager
        before = cursor.current_epoch, cursor.position
        batch: list[Sample] = []
        of_epoch = crossed = 0
        try:
            while len(batch) < num_samples:
                if cursor.position == self.num_rows:
                    if not self.num_rows or (crossed and not of_epoch):
                        raise DataError(
                            f"no sample is left of {self.num_rows} rows ({self.num_overlong} have more tokens than "
                            f"max_length {self.max_length}, {self.num_unreadable} cannot be read): check the path, its "
                            "slices, and max_length"
                        )
                    cursor.next_epoch()
                    crossed, of_epoch = crossed + 1, 0
                stop = min(cursor.position + num_samples - len(batch), self.num_rows)
                found = self._kept(cursor.position, self._outcomes_at(cursor.position, stop))
                batch += found
                of_epoch += len(found)
                cursor.position = stop
        except BaseException:
            cursor.begin(before[0], is_shuffled=cursor.is_shuffled, position=before[1])
            raise
        self.epochs_crossed = crossed
        return batch, crossed > 0

    def _kept(self, start: int, outcomes: list[Outcome]) -> list[Sample]:
        """Return the samples among the outcomes at positions from `start` on; count each dropped row once."""
        if {*map(type, outcomes)} <= {Sample}:
            return outcomes  # type: ignore[return-value]
        return [sample for _, sample in self._numbered(start, outcomes)]

    def _numbered(self, start: int, outcomes: Sequence[Outcome]) -> list[tuple[int, Sample]]:
        """Return positions and samples; count each dropped row once."""
        kept = []
        for position, outcome in enumerate(outcomes, start):
            if isinstance(outcome, Sample):
                kept.append((position, outcome))
            elif isinstance(outcome, DataError) and self._on_error == "error":
                raise outcome
            else:
                self._count(int(self.index_manager.permutation(np.array([position]))[0]), outcome)
        return kept

    def _count(self, row: int, outcome: Outcome) -> None:
        bit = 128 >> row % 8
        if not self._dropped[row // 8] & bit:
            self._dropped[row // 8] |= bit
            if outcome == OVERLONG:
                self.num_overlong += 1
            else:
                self.num_unreadable += 1

    # Samples by number

    @property
    def samples(self) -> Samples:
        """The samples in the order of the epoch: `samples[3]`, `samples[0:32]`."""
        return Samples(self)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample with this number in the order of the epoch; negative numbers count from the end."""
        if index < 0:
            index += sum(1 for _ in self) if self.may_drop else self.num_rows
        if index < 0:
            raise IndexError("a sample before the first")
        for _, sample in self._from(index):
            return sample
        dropped = self.num_overlong + self.num_unreadable
        remedy = f", {dropped} of them dropped: call get_batch, or open a Dataset, whose len counts samples"
        raise IndexError(f"sample {index} of a dataset of {self.num_rows} rows{remedy if dropped else ''}")

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """Return the samples of a DataLoader's batch; ConfigError if the DataLoader has no collate_fn."""
        check_collator(
            f"{type(self).__name__} of prompts",
            loader="pass collate_fn=list",
            trainer="pass a data_collator that makes a model's inputs of prompts",
        )
        return [self[number] for number in numbers]

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples of the epoch, independent of the position of batches."""
        return (sample for _, sample in self._from(0))

    def _from(self, index: int) -> Iterator[tuple[int, Sample]]:
        """Yield positions and samples from this number on. If rows are dropped, count the samples before it."""
        if not self.may_drop:
            yield from self._walk(index, 1)
            return
        if self._marks_of is not self.index_manager.permutation:
            self._marks_of = self.index_manager.permutation
            self._marks = [0]  # the position of each MARK_EVERY-th sample counted up to now
            self._last = (0, 0)  # number and position of the last yielded sample
        number, start = max(
            (MARK_EVERY * (mark := min(index // MARK_EVERY, len(self._marks) - 1)), self._marks[mark]),
            self._last if self._last[0] <= index else (0, 0),
        )
        for position, sample in self._walk(start, STEP):
            if number == MARK_EVERY * len(self._marks):
                self._marks.append(position)
            if number >= index:
                self._last = number, position
                yield position, sample
            number += 1

    def _walk(self, position: int, step: int) -> Iterator[tuple[int, Sample]]:
        while position < self.num_rows:
            stop = min(position + step, self.num_rows)
            yield from self._numbered(
                position, self._outcomes(self.index_manager.permutation(np.arange(position, stop)))
            )
            position, step = stop, min(2 * step, STEP)


class Samples(Sequence[Sample]):
    """Sequence of a dataset's samples; supports slices and reads samples on access."""

    def __init__(self, dataset: BaseDataset):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if not isinstance(index, slice):
            return self._dataset[operator.index(index)]
        bounds = (index.start or 0, 0 if index.stop is None else index.stop)
        if min(bounds) < 0 or (index.step or 1) < 0:
            return list(self._dataset)[index]
        stop = sys.maxsize if index.stop is None else index.stop
        found = self._dataset._from(bounds[0])
        return [sample for _, sample in islice(found, 0, max(0, stop - bounds[0]), index.step)]
