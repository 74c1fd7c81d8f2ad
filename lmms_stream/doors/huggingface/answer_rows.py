"""Rows of a datasets.Dataset with answers to compare -> the tokens of TRL's DPOTrainer and KTOTrainer (1.16).

A row is a pair (`chosen`, `rejected`) or a single answer (`completion`, `label`), of texts or of messages, after a
`prompt`; without `prompt`, the common beginning of both answers is the prompt. For KTO, pairs are split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...converters.rows.preference_kinds import num_shared
from ...errors import ConfigError, DataError
from ...processors.base import IGNORED_LABEL, Compared, Memory
from ...processors.multimodal import MultimodalProcessor
from ...processors.preference import MediaPreferenceProcessor
from ...processors.text import TokensProcessor
from ...processors.tokenizers import FastTokenizer
from ...types import Processed, Role, Sample
from .rows import Kind, Row, RowSettings, RowTokenizer, is_chat
from .tokenizer import tokenizer_of

Answers = list[tuple[Role, Any]]  # answers of a row, each a text or messages
NEEDED: Mapping[Compared, str] = {
    "dpo": "chosen and rejected, and a prompt where the two do not begin with it",
    "kto": "prompt, completion and label, or chosen and rejected",
}


class AnswersReader(RowTokenizer):
    """Tokenizer of rows for DPO or KTO, several rows at once.

    sequences: for each answer of a sample, its number of tokens with the prompt, and its Role, one after another. Each
    sequence is cut to settings.max_length tokens; a row with a longer or equal prompt is left out (unless keeps_end),
    like in TRL. ConfigError for rows without answers.
    """

    columns = ("input_ids", "labels", "sequences")

    def __init__(self, processing_class: Any, settings: RowSettings, *, first: Row, objective: Compared):
        self._objective = objective
        super().__init__(processing_class, settings, first=first)

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[list[int]]]:
        """See RowTokenizer; for split pairs, the chosen answers come first, like in TRL."""
        made = super().__call__(columns, numbers)
        if self._objective == "kto":
            order = sorted(range(len(made["sequences"])), key=lambda index: -made["sequences"][index][1])
            if "chosen" in columns:
                made = {name: [values[index] for index in order] for name, values in made.items()}
        return made

    def samples(self, row: Row) -> list[dict[str, list[int]]]:
        """Return the samples of a row: the pair, or each answer separately."""
        prompt, answers = _parts(row)
        if isinstance(prompt, str):
            before = self._encode(prompt)["input_ids"]
            wholes = [self._encode(prompt + self._ended(answer))["input_ids"] for _, answer in answers]
        else:
            details = self._of_chat(row)
            before = self._encode(prompt, add_generation_prompt=True, **details)["input_ids"]
            wholes = [self._encode(prompt + answer, **details)["input_ids"] for _, answer in answers]
        roles = [role for role, _ in answers]
        if self._objective == "kto":
            return [
                sample
                for ids, role in zip(wholes, roles, strict=True)
                for sample in self._sample([ids], [role], self._num_prompt(before, ids))
            ]
        return self._sample(wholes, roles, min(self._num_prompt(before, ids) for ids in wholes))

    def _sample(
        self, wholes: Sequence[list[int]], roles: Sequence[Role], num_prompt: int
    ) -> list[dict[str, list[int]]]:
        limit, keeps_end = self._settings.max_length, self._settings.keeps_end
        if limit is not None and num_prompt >= limit and not keeps_end:
            return []
        kept = slice(None) if limit is None else slice(-limit, None) if keeps_end else slice(None, limit)
        made: dict[str, list[int]] = {name: [] for name in self.columns}
        for ids, role in zip(wholes, roles, strict=True):
            cut = ids[kept]
            made["input_ids"] += cut
            made["labels"] += [*[IGNORED_LABEL] * num_prompt, *ids[num_prompt:]][kept]
            made["sequences"] += [len(cut), int(role)]
        return [made]

    def _kind_of(self, first: Row) -> Kind:
        has_pair = "chosen" in first and "rejected" in first
        if not has_pair and not (self._objective == "kto" and {"prompt", "completion", "label"} <= first.keys()):
            raise ConfigError(
                f"the rows have the columns {', '.join(first)}, and {self._objective.upper()} compares answers: they "
                f"are to have {NEEDED[self._objective]}"
            )
        return "prompt" if isinstance(_parts(first)[0], str) else "prompt messages"

    def _check(self) -> None:
        if self.kind == "prompt" and not tokenizer_of(self._processing_class).eos_token:
            raise ConfigError("the tokenizer has no end-of-text token: set its eos_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersProcessor:
    """Processor of answers after their prompts, with the end of each; see answer_rows."""

    columns: ClassVar[tuple[str, ...]] = (*TokensProcessor.columns, "sequences")
    schema: ClassVar[str] = "tokens"
    objective: Compared
    tokenizer: FastTokenizer | None = None

    @property
    def description(self) -> Mapping[str, Any]:
        """The description of TokensProcessor, because lengths are the same."""
        return TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        sequences = np.asarray(sample["sequences"], np.int64).reshape(-1, 2)
        made: Any = {**TokensProcessor().process(sample), "sequences": sequences}
        return made  # type: ignore[no-any-return]


def _parts(row: Row) -> tuple[Any, Answers]:
    """Return the prompt and the answers of a row: all texts, or all messages; DataError for a mixture."""
    if "chosen" in row:
        chosen, rejected = _messages(row["chosen"]), _messages(row["rejected"])
        prompt = row.get("prompt")
        if prompt is None or (isinstance(prompt, str) and _is_whole(chosen) and _is_whole(rejected)):
            if isinstance(chosen, str):
                num = num_shared(chosen, rejected)
            else:
                last = min(len(chosen), len(rejected)) - 1
                num = next((index for index in range(last) if chosen[index] != rejected[index]), last)
            if not num:
                raise DataError("chosen and rejected begin differently, and there is no prompt: add the column prompt")
            prompt, chosen, rejected = chosen[:num], chosen[num:], rejected[num:]
        answers = [(Role.CHOSEN, chosen), (Role.REJECTED, rejected)]
    else:
        prompt, answers = row["prompt"], [(Role(int(row["label"])), _messages(row["completion"]))]
    if isinstance(prompt, str) and not isinstance(answers[0][1], str):
        prompt = [{"role": "user", "content": prompt}]
    if any(isinstance(answer, str) is not isinstance(prompt, str) for _, answer in answers):
        raise DataError("prompt and answers must all be texts, or all be messages: correct the row")
    return prompt, answers


def _messages(value: Any) -> Any:
    """Return a text, or a list of messages; DataError for other values."""
    found = [value] if isinstance(value, Mapping) else value
    if not isinstance(found, str) and not is_chat(found):
        raise DataError(f"an answer is {str(value)[:80]!r}: give a text or messages")
    return found


def _is_whole(answer: Any) -> bool:
    """Whether messages are a complete conversation, beginning with the prompt."""
    return not isinstance(answer, str) and answer[0].get("role") != "assistant"


# Rows of a datasets.Dataset with images: detection, and processors of their stored chats.


def holds_media(dataset: Any) -> bool:
    """Whether rows have a column `image` or `images`, or an image in their messages."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping) or "input_ids" in features:
        return False
    return bool({"image", "images"} & {*features}) or any(type(each).__name__ == "Image" for each in _leaves(features))


def check_media(processing_class: Any, formatting_func: Any) -> None:
    """Raise ConfigError if the processing_class or formatting_func cannot read images."""
    if formatting_func is not None:
        raise ConfigError("the rows have images, and a formatting_func returns only text: leave it out")
    if not hasattr(processing_class, "image_processor"):
        raise ConfigError(
            f"the rows have images, and processing_class is a {type(processing_class).__name__}, which reads none: "
            "give the model's processor, or remove the columns of images"
        )


def as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with prompt and completion joined to messages; answers in the prompt are not trained on.

    Images without a place in the messages are put before the user's first text, like in TRL.
    """
    if "messages" in row:
        others, messages = dict(row), list(row["messages"])
    else:
        others = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        asked = [{**turn, "learn": False} if turn["role"] == "assistant" else turn for turn in row["prompt"]]
        messages = [*asked, *row["completion"]]
    given = row.get("images", row.get("image"))
    count = len(given) if isinstance(given, list) else int(given is not None)
    first = next((number for number, turn in enumerate(messages) if turn["role"] == "user"), None)
    if count and first is not None and isinstance(text := messages[first]["content"], str):
        parts = [*[{"type": "image"}] * count, {"type": "text", "text": text}]
        messages[first] = {**messages[first], "content": parts}
    return {**others, "messages": messages}


class WholeChatsProcessor(MultimodalProcessor):
    """Processor of media that trains on all tokens of a chat except media tokens, for rows of messages, like in TRL.

    TRL also trains on the placeholder tokens of media, which no model can predict.
    """

    @staticmethod
    def of(path: str, *, trust_remote_code: bool) -> WholeChatsProcessor:
        """Load the processor of a folder."""
        made = MultimodalProcessor.from_pretrained(path, learn_stop=None, trust_remote_code=trust_remote_code)
        return WholeChatsProcessor(made.tokenizer, made.family, learn_stop=None)

    @property
    def description(self) -> Mapping[str, Any]:
        return {**super().description, "class": "WholeChatsProcessor"}

    def process_into(self, sample: Sample, memory: Memory) -> Processed:
        """See ProcessInto."""
        made: Any = super().process_into(sample, memory)
        input_ids = made["input_ids"]
        made["labels"] = np.where(self.is_learnable(input_ids), input_ids, IGNORED_LABEL)
        return made  # type: ignore[no-any-return]


def media_processor(path: str, *, objective: Compared | None, learns_all: bool, trust_remote_code: bool) -> Any:
    """Return the processor of chats with media. learns_all: train on all messages, instead of only the assistant's."""
    if learns_all and objective is None:
        return WholeChatsProcessor.of(path, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {} if objective is None else {"learn": "last", "learn_stop": None}
    made = MultimodalProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    return made if objective is None else MediaPreferenceProcessor(made, objective=objective)


def _leaves(feature: Any) -> Iterator[Any]:
    """Yield the leaf types of a datasets type."""
    if isinstance(feature, Mapping):
        for each in feature.values():
            yield from _leaves(each)
    elif isinstance(feature, list):
        yield from _leaves(feature[0])
    elif hasattr(feature, "feature"):
        yield from _leaves(feature.feature)
    else:
        yield feature
