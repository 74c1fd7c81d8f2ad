"""Answers to compare whose prompts have media -> tokens, positions and the tensors that a model's tower reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from ..types import Processed, Sample
from .base import IGNORED_LABEL, Compared, Measured, SeenMedium, measured_tokens, or_error, through
from .multimodal import MultimodalProcessor
from .preference import LEFT_OUT, checked_objective, sequences_of
from .stored_chat import StoredPreference, read_preference


class MediaPreferenceProcessor:
    """Sequences of answers as PreferenceProcessor makes them, of chats that a processor of media reads.

    Each sequence has the media of the prompt, because it sees no other; what the processor makes of one (positions,
    tensors) stands behind that of the one before. Samples of texts are a DataError.
    """

    columns = ("messages", "media")
    measured_columns = ("messages",)
    schema = "preference"

    def __init__(self, processor: MultimodalProcessor, *, objective: Compared = "dpo"):
        self.processor = processor
        self.objective = checked_objective(objective)
        self.tokenizer = processor.tokenizer

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "MediaPreferenceProcessor", "version": 1, "processor": dict(self.processor.description)}

    def measure(self, sample: Sample) -> int:
        return measured_tokens(self.measure_media, sample)

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        """See MeasureMedia."""
        made = [or_error(_chats, sample) for sample in samples]
        chats = [chat for each in made if not isinstance(each, DataError) for chat in each]
        found = iter(self.processor.measure_media(chats))
        return through(made, lambda of_samples: [_summed([next(found) for _ in each]) for each in of_samples])

    def not_shown(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See NotShownOf."""
        return [or_error(self._not_shown, sample) for sample in samples]

    def _not_shown(self, sample: Sample) -> int:
        bits = 0
        for each in self.processor.not_shown(_chats(sample)):
            if isinstance(each, DataError):
                raise each
            bits |= each
        return bits

    def process(self, sample: Sample) -> Processed:
        stored = _read(sample)
        prompt = self.processor.prompt_ids(_chat(stored, stored.prompt, sample))
        parts = [self.processor.process(chat) for chat in _chats(sample)]
        made = sequences_of(prompt, [part["input_ids"] for part in parts], stored.roles)
        made["labels"][~self.processor.is_learnable(made["input_ids"])] = IGNORED_LABEL
        for name in ("position_ids", "token_inputs"):
            if name in parts[0]:
                made[name] = _behind_each_other([part[name] for part in parts], axis=-1)
        made["media"] = _behind_each_other([part["media"] for part in parts], axis=0)
        return made

    def see_media(self, sample: Sample) -> list[SeenMedium]:
        """See SeeMedia."""
        seen: list[SeenMedium] = []
        first = 0
        for chat in _chats(sample):
            for medium in self.processor.see_media(chat):
                seen.append(medium._replace(spans=[(start + first, stop + first) for start, stop in medium.spans]))
            first += self.processor.measure(chat)
        return seen


def _read(sample: Sample) -> StoredPreference:
    stored = read_preference(sample["messages"])
    if isinstance(stored.prompt, str):
        raise DataError(
            "it is of texts, and a processor of media reads chats: name processor.tokenizer in place of processor.path"
        )
    return stored


def _chats(sample: Sample) -> list[Sample]:
    """The messages sample of each sequence."""
    stored = _read(sample)
    answers = [list(answer) for answer in stored.answers.values()]
    if any(isinstance(message, dict) and not message.get("learn", True) for each in answers for message in each):
        raise DataError(LEFT_OUT)
    return [_chat(stored, [*stored.prompt, *answer], sample) for answer in answers]


def _chat(stored: StoredPreference, messages: Any, sample: Sample) -> Sample:
    text = json.dumps({"messages": messages, "tools": stored.tools})
    return {"messages": text, **({"media": sample["media"]} if "media" in sample else {})}


def _summed(found: Sequence[Measured | DataError]) -> Measured | DataError:
    error = next((each for each in found if isinstance(each, DataError)), None)
    return error or Measured(*(sum(values) for values in zip(*found, strict=True)))


def _behind_each_other(values: Sequence[Any], *, axis: int) -> Any:
    """Arrays, or arrays by name, as one."""
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {
            name: _behind_each_other([value[name] for value in values if name in value], axis=axis) for name in names
        }
    return np.concatenate(values, axis=axis)
