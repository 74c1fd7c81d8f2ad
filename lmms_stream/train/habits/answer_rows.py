"""Rows of a datasets.Dataset with answers to compare -> tokens, those that TRL's DPOTrainer and KTOTrainer make (1.16).

A row is a pair (`chosen`, `rejected`) or a single answer (`completion`, `label`), of texts or of messages, behind a
`prompt`; of a pair without one, what both answers begin with is the prompt. For KTO pairs are taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...converters.rows.whole_texts import num_shared
from ...errors import ConfigError, DataError
from ...processors.base import IGNORED_LABEL, Compared
from ...processors.text import TokensProcessor
from ...processors.tokenizers import FastTokenizer
from ...types import Processed, Role, Sample
from .rows import Kind, Row, RowReader, RowSettings, is_chat
from .tokenizer import tokenizer_of

Answers = list[tuple[Role, Any]]  # of a row, each a text or messages
NEEDED: Mapping[Compared, str] = {
    "dpo": "chosen and rejected, and a prompt where the two do not begin with it",
    "kto": "prompt, completion and label, or chosen and rejected",
}


class AnswersReader(RowReader):
    """Makes tokens of rows for DPO or KTO, several at once.

    sequences: of a sample, the number of tokens and the Role of each answer behind its prompt, one after another.
    Each sequence is cut to settings.max_length tokens; a row whose prompt alone has as many is left out, as TRL does.
    ConfigError for rows that have no answers.
    """

    columns = ("input_ids", "labels", "sequences")

    def __init__(self, processing_class: Any, settings: RowSettings, *, first: Row, objective: Compared):
        self._objective = objective
        super().__init__(processing_class, settings, first=first)

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[list[int]]]:
        """See RowReader; of pairs that are taken apart, the chosen answers come first, as in TRL."""
        made = super().__call__(columns, numbers)
        if self._objective == "kto":
            order = sorted(range(len(made["sequences"])), key=lambda index: -made["sequences"][index][1])
            if "chosen" in columns:
                made = {name: [values[index] for index in order] for name, values in made.items()}
        return made

    def samples(self, row: Row) -> list[dict[str, list[int]]]:
        """Return the samples of a row: the pair, or each answer by itself."""
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
    """Tokens of answers behind their prompts, and where each ends; see answer_rows."""

    columns: ClassVar[tuple[str, ...]] = (*TokensProcessor.columns, "sequences")
    schema: ClassVar[str] = "tokens"
    objective: Compared
    tokenizer: FastTokenizer | None = None

    @property
    def description(self) -> Mapping[str, Any]:
        """That of the tokens, since lengths are the same."""
        return TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        sequences = np.asarray(sample["sequences"], np.int64).reshape(-1, 2)
        made: Any = {**TokensProcessor().process(sample), "sequences": sequences}
        return made  # type: ignore[no-any-return]


def _parts(row: Row) -> tuple[Any, Answers]:
    """The prompt and the answers of a row: all texts, or all messages; DataError where they are neither."""
    if "chosen" in row:
        chosen, rejected = _messages(row["chosen"]), _messages(row["rejected"])
        prompt = row.get("prompt")
        if prompt is None or (isinstance(prompt, str) and _is_whole(chosen) and _is_whole(rejected)):
            prompt, chosen, rejected = _taken_apart(chosen, rejected)
        answers = [(Role.CHOSEN, chosen), (Role.REJECTED, rejected)]
    else:
        prompt, answers = row["prompt"], [(Role(int(row["label"])), _messages(row["completion"]))]
    if isinstance(prompt, str) and not isinstance(answers[0][1], str):
        prompt = [{"role": "user", "content": prompt}]
    if any(isinstance(answer, str) is not isinstance(prompt, str) for _, answer in answers):
        raise DataError("prompt and answers must all be texts, or all be messages: correct the row")
    return prompt, answers


def _messages(value: Any) -> Any:
    """A text, or messages; a single message is a list of one."""
    found = [value] if isinstance(value, Mapping) else value
    if not isinstance(found, str) and not is_chat(found):
        raise DataError(f"an answer is {str(value)[:80]!r}: give a text or messages")
    return found


def _is_whole(answer: Any) -> bool:
    """Whether messages are a whole conversation, which begins with what is asked."""
    return not isinstance(answer, str) and answer[0].get("role") != "assistant"


def _taken_apart(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """What two texts or conversations begin with, and what is left of them."""
    if isinstance(chosen, str):
        num = num_shared(chosen, rejected)
    else:
        last = min(len(chosen), len(rejected)) - 1
        num = next((index for index in range(last) if chosen[index] != rejected[index]), last)
    if not num:
        raise DataError("chosen and rejected begin differently, and there is no prompt: give the column prompt")
    return chosen[:num], chosen[num:], rejected[num:]
