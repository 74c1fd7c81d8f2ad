"""What eager and lazy datasets share: the order of an epoch, samples by number, batches, counts of what is dropped."""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError, DataError
from .permutation import Permutation
from .prompts import OVERLONG, Outcome, Prompts
from .rows import open_rows
from .sample import Sample

STEP = 64  # rows looked at together where samples are counted
MARK_EVERY = 256  # samples for each of which one position is kept
OnError = Literal["error", "skip"]


class BaseDataset(ABC):
    """Samples of rows in the order of an epoch.

    path: .jsonl and .parquet files, folders, MDS datasets, in folders or stores, lists of them, each with @[START:STOP]
    (see open_rows). tokenizer: a fast tokenizer of transformers', or its folder or hub id. processor: None for prompts
    without media; with one, the media of prompts become multimodal_inputs, images as PIL's. max_length: in tokens; rows
    whose prompts have more are dropped, never cut, and counted (num_overlong).
    prompt_key, label_key, tool_key, metadata_key: columns. multimodal_keys: kind of media -> column. system_prompt:
    comes before each prompt. apply_chat_template: prompts become texts, with apply_chat_template_kwargs as variables of
    the template. custom_prompt_func: (prompt, row) -> prompt. seed: of shuffle.
    on_error: "skip" drops and counts (num_unreadable) rows that cannot be read; "error" raises a DataError that
    names the row.
    cache_limit: room on this node for copies of what lies in stores, as bytes or "500mb" (None: no limit). Files of
    JSON lines that do not fit are read by ranges of their store instead, and shards not used for longest give way.

    The order is that of the rows until `shuffle` is called. Samples are not to be changed: `copy` them first.
    Raises ConfigError, DataError, StorageError.
    """

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
        multimodal_config: Any = None,
        custom_prompt_func: Callable[[Any, dict[str, Any]], Any] | None = None,
        on_error: OnError = "error",
        cache_limit: int | str | None = None,
    ):
        if use_audio_in_video or multimodal_config is not None:
            what = "use_audio_in_video" if use_audio_in_video else "multimodal_config"
            raise ConfigError(f"{what} is not supported: leave it out; media are given as they are stored")
        if seed < 0:
            raise ConfigError(f"seed must be at least 0, got {seed}")
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
        )
        self._rows = open_rows(path, columns=self._prompts.columns, cache_limit=cache_limit)
        self._on_error = on_error
        self._may_drop = max_length is not None or on_error == "skip"
        self._dropped = np.zeros(self.num_rows // 8 + 1 if self._may_drop else 0, np.uint8)  # a bit a row
        self.num_overlong = 0
        self.num_unreadable = 0
        self._begin(epoch_id=0, is_shuffled=False, position=0)

    @property
    def num_rows(self) -> int:
        """Rows that the path names, dropped ones among them."""
        return self._rows.num_rows

    @property
    def digest(self) -> str:
        """Names the rows, wherever they lie."""
        return self._rows.digest

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _outcomes(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """What rows became, in this order."""

    def _outcomes_at(self, start: int, stop: int) -> list[Outcome]:
        """The same of positions of the epoch, for those who go through it from its start to its end."""
        return self._outcomes(self._order.between(start, stop))

    def _made(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """What becomes of rows, read and made now."""
        return self._prompts.make(self._rows.read(rows))

    # The order

    def shuffle(self, epoch_id: int) -> None:
        """Begin an epoch, in an order that seed and epoch alone tell; nothing where it is that of this epoch."""
        if epoch_id < 0:
            raise ConfigError(f"an epoch's number must be at least 0, got {epoch_id}")
        if not self.is_shuffled or epoch_id != self.epoch_id:
            self._begin(epoch_id=epoch_id, is_shuffled=True, position=0)

    def _begin(self, *, epoch_id: int, is_shuffled: bool, position: int) -> None:
        self.epoch_id = epoch_id
        self.is_shuffled = is_shuffled
        self.position = position  # rows of the epoch that batches have passed
        self._order = self._order_of(epoch_id)
        self._marks = [0]  # the position of every MARK_EVERY-th sample, as far as they were counted
        self._last = (0, 0)  # a sample's number, and its position

    def _order_of(self, epoch_id: int) -> Permutation:
        return Permutation(self.num_rows, seed=self.seed, epoch=epoch_id if self.is_shuffled else None)

    def state_dict(self) -> dict[str, Any]:
        """Where batches stand, as JSON values; it fits eager and lazy datasets of the same rows."""
        return {
            "digest": self.digest,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "epoch_id": self.epoch_id,
            "is_shuffled": self.is_shuffled,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CursorError for a state of other rows, or of another seed where they are shuffled, and for what is none."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise CursorError(f"this is no state of a dataset, it has no {missing[0]!r}: give what state_dict gave")
        if state["digest"] != self.digest:
            raise CursorError(
                f"the state belongs to other data ({state['num_rows']} rows, {state['digest']}; these are "
                f"{self.num_rows} rows, {self.digest}): name the files it was saved with, or begin anew"
            )
        if state["seed"] != self.seed and state["is_shuffled"]:
            raise CursorError(
                f"the state follows seed {state['seed']} and this dataset has seed {self.seed}: set that one, or begin "
                "anew"
            )
        if not 0 <= state["position"] <= self.num_rows or state["epoch_id"] < 0:
            raise CursorError(
                f"the state stands at row {state['position']} of epoch {state['epoch_id']}, where there is none "
                f"({self.num_rows} rows): it is damaged; take another, or begin anew"
            )
        self._begin(epoch_id=state["epoch_id"], is_shuffled=state["is_shuffled"], position=state["position"])

    # Batches

    def get_batch(self, num_samples: int) -> tuple[list[Sample], int]:
        """The next samples, always so many, and how often the end of an epoch was passed for them.

        An epoch that was read to its last row is passed by the next batch. Where `shuffle` was called, each epoch has
        an order of its own. After an error the same batch can be asked for again.
        """
        if num_samples < 0:
            raise ConfigError(f"the number of samples must be at least 0, got {num_samples}")
        before = self.epoch_id, self.is_shuffled, self.position
        batch: list[Sample] = []
        crossed, of_epoch = 0, 0
        try:
            while len(batch) < num_samples:
                if self.position == self.num_rows:
                    self._refuse_empty(of_epoch if crossed else None)
                    self._begin(epoch_id=self.epoch_id + 1, is_shuffled=self.is_shuffled, position=0)
                    crossed, of_epoch = crossed + 1, 0
                stop = min(self.position + num_samples - len(batch), self.num_rows)
                found = self._kept(self.position, self._outcomes_at(self.position, stop))
                batch += found
                of_epoch += len(found)
                self.position = stop
        except BaseException:
            epoch_id, is_shuffled, position = before
            self._begin(epoch_id=epoch_id, is_shuffled=is_shuffled, position=position)
            raise
        return batch, crossed

    def _refuse_empty(self, num_of_epoch: int | None) -> None:
        """num_of_epoch: samples of an epoch that was read from its start to its end."""
        if self.num_rows and num_of_epoch != 0:
            return
        raise DataError(
            f"no sample is left of {self.num_rows} rows ({self.num_overlong} have more tokens than max_length "
            f"{self.max_length}, {self.num_unreadable} cannot be read): check the path, its slices, and max_length"
        )

    def _kept(self, start: int, outcomes: list[Outcome]) -> list[Sample]:
        """Of what the rows at positions from `start` on became, the samples; what is dropped is counted once."""
        if {*map(type, outcomes)} <= {Sample}:
            return outcomes  # type: ignore[return-value]
        return [sample for _, sample in self._numbered(start, outcomes)]

    def _numbered(self, start: int, outcomes: Sequence[Outcome]) -> list[tuple[int, Sample]]:
        """Samples and their positions; what is dropped is counted once."""
        kept = []
        for position, outcome in enumerate(outcomes, start):
            if isinstance(outcome, Sample):
                kept.append((position, outcome))
            elif isinstance(outcome, DataError) and self._on_error == "error":
                raise outcome
            else:
                self._count(int(self._order(np.array([position]))[0]), outcome)
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
        """The sample of this number in the order of the epoch; negative ones count from the end."""
        if index < 0:
            index += sum(1 for _ in self) if self._may_drop else self.num_rows
        if index < 0:
            raise IndexError("a sample before the first")
        for _, sample in self._from(index):
            return sample
        raise IndexError(f"sample {index} of a dataset of {self.num_rows} rows")

    def __iter__(self) -> Iterator[Sample]:
        """All samples of the epoch, wherever batches stand."""
        return (sample for _, sample in self._from(0))

    def _from(self, index: int) -> Iterator[tuple[int, Sample]]:
        """Samples from this number on, with their positions. Where rows are dropped, those before are counted."""
        if not self._may_drop:
            yield from self._walk(index, 1)
            return
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
            yield from self._numbered(position, self._outcomes(self._order(np.arange(position, stop))))
            position, step = stop, min(2 * step, STEP)


class Samples(Sequence[Sample]):
    """A dataset's samples as a sequence that can be sliced; they are read when they are asked for."""

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
