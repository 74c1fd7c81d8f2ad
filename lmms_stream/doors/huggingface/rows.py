"""Rows of a datasets.Dataset -> the input_ids and labels of TRL's SFTTrainer (1.16).

Only null content differs: it becomes no text, where a template may write None. A row is a conversation (`messages`, or
`conversations` of from and value), a `prompt` and `completion` (texts or messages), a text, or tokens (`input_ids`,
with `labels`, `completion_mask` or `assistant_masks`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ...errors import ConfigError, DataError, LmmsStreamError
from ...processors.base import IGNORED_LABEL
from ...processors.chat_template import ChatTemplate, without_nulls
from .tokenizer import tokenizer_of

Kind = Literal["tokens", "text", "messages", "prompt", "prompt messages"]
Row = Mapping[str, Any]
FORMS = "messages, prompt and completion, text (dataset_text_field), or input_ids"
logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of reading rows. Together with the tokenizer they determine the tokens.

    completion_only: train only on completions; None: only for rows of prompt and completion. max_length: cut longer
    samples to this number of tokens; None if packs cut. keeps_end: keep the end of a cut sample instead of the start.
    """

    text_field: str = "text"
    completion_only: bool | None = None
    assistant_only: bool = False
    max_length: int | None = None
    keeps_end: bool = False


class RowTokenizer:
    """Tokenizer of rows, several at once; can be pickled for other processes.

    first: the first row, which determines the kind of all rows. template: replaces the tokenizer's own. ConfigError for
    rows in none of the FORMS, and for settings that do not fit the rows. columns: output columns of a row.
    """

    columns: tuple[str, ...] = ("input_ids", "labels")

    def __init__(
        self,
        processing_class: Any,
        settings: RowSettings,
        *,
        first: Row,
        formatting_func: Callable[[Row], str] | None = None,
        template: str | None = None,
    ):
        self._processing_class, self._settings = processing_class, settings
        self._formatting_func, self._template = formatting_func, template
        self._text_field = "text" if formatting_func is not None else settings.text_field
        self.is_from_value = _is_from_value(first)
        self.kind = self._kind_of(_as_chat(first) if self.is_from_value else first)
        self.completion_only = settings.completion_only
        if self.completion_only is None:
            self.completion_only = "prompt" in first and "completion" in first
        self._end = tokenizer_of(processing_class).eos_token
        self._has_warned = False
        self._check()

    def __call__(self, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[list[int]]]:
        """Tokenize rows: columns and row numbers -> input_ids and labels of all rows with trained tokens.

        DataError, with the row's number, for an invalid row.
        """
        names = list(columns)
        made: list[dict[str, list[int]]] = []
        for number, *values in zip(numbers, *(columns[name] for name in names), strict=True):
            try:
                made += self.samples(dict(zip(names, values, strict=True)))
            except LmmsStreamError as error:
                raise type(error)(f"row {number}: {error}") from error
            except MemoryError:
                raise
            except Exception as error:  # any error of a chat template is an error of this row
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise DataError(
                    f"row {number} is not read as {self.kind} ({said}): correct or remove it, or name its columns"
                ) from error
        learnt = [each for each in made if any(label != IGNORED_LABEL for label in each["labels"])]
        return {name: [each[name] for each in learnt] for name in self.columns}

    def samples(self, row: Row) -> list[dict[str, list[int]]]:
        """Return the sample of a row: input_ids, and labels with IGNORED_LABEL for tokens that are not trained on."""
        if self._formatting_func is not None:
            text = self._formatting_func(dict(row))
            if not isinstance(text, str):
                raise ConfigError(
                    f"formatting_func returns {type(text).__name__} {str(text)[:80]}, but is called with a single row: "
                    "return the text of this row"
                )
            row = {"text": text}
        elif self.is_from_value:
            row = _as_chat(row)
        made = self._read(row)
        input_ids, labels = list(made["input_ids"]), made.get("labels")
        if labels is None:
            names = ("completion_mask", "assistant_masks") if self.completion_only else ("assistant_masks",)
            masks = [made[name] for name in names if made.get(name) is not None]
            learnt = [all(bits) for bits in zip(*masks, strict=True)] if masks else [True] * len(input_ids)
            labels = [each if is_learnt else IGNORED_LABEL for each, is_learnt in zip(input_ids, learnt, strict=True)]
        limit = self._settings.max_length
        if limit is not None:
            kept = slice(-limit, None) if self._settings.keeps_end else slice(None, limit)
            input_ids, labels = input_ids[kept], labels[kept]
        return [{"input_ids": input_ids, "labels": list(labels)}]

    def _kind_of(self, first: Row) -> Kind:
        if "input_ids" in first:
            return "tokens"
        if self._formatting_func is not None:
            return "text"
        if "prompt" in first and "completion" in first:
            return "prompt messages" if is_chat(first["prompt"]) else "prompt"
        if is_chat(first.get("messages")):
            return "messages"
        if isinstance(first.get(self._text_field), str):
            return "text"
        if "chosen" in first:
            raise ConfigError("the rows are pairs of answers: give them to DPOTrainer or KTOTrainer of lmms_stream.trl")
        raise ConfigError(
            f"the rows have the columns {', '.join(first)}, which do not make a sample: use {FORMS}, or pass a "
            "formatting_func"
        )

    def _check(self) -> None:
        settings = self._settings
        if self.kind == "tokens" and self._formatting_func is not None:
            logger.warning("formatting_func is not used: the rows have input_ids already")
        if settings.assistant_only and self.kind not in ("messages", "prompt messages", "tokens"):
            raise ConfigError(
                f"args.assistant_only_loss is for conversations, and the rows are {self.kind}: leave it False"
            )
        if self._formatting_func is not None and self.completion_only and self.kind != "tokens":
            raise ConfigError(
                "a formatting_func makes a single text of a row, and completion_only_loss cannot find the completion "
                "in it: set completion_only_loss=False, or format the dataset with map first"
            )
        if self.kind in ("text", "prompt") and not self._end:
            raise ConfigError("the tokenizer has no end-of-text token: set its eos_token, or args.eos_token")

    def _read(self, row: Row) -> Row:
        if self.kind == "tokens":
            return row
        if self.kind == "text":
            text = row[self._text_field]
            if not isinstance(text, str):
                raise DataError(f"column {self._text_field!r} holds {str(text)[:80]}, expected a text: correct the row")
            return {"input_ids": self._encode(self._ended(text))["input_ids"]}
        if self.kind == "messages":
            return self._encode(row["messages"], **self._of_chat(row), **self._of_assistant())
        prompt, completion = row["prompt"], row["completion"]
        if self.kind == "prompt":
            before = self._encode(prompt)["input_ids"]
            return self._completed(before, self._encode(prompt + self._ended(completion)))
        details = self._of_chat(row)
        before = self._encode(prompt, add_generation_prompt=True, **details)["input_ids"]
        return self._completed(before, self._encode(prompt + completion, **details, **self._of_assistant()))

    def _completed(self, prompt: Sequence[int], whole: Row) -> Row:
        """Return a sample whose completion begins at the end of the prompt's own tokens, or at the first difference."""
        ids = whole["input_ids"]
        num_prompt = self._num_prompt(prompt, ids)
        return {**whole, "completion_mask": [0] * num_prompt + [1] * (len(ids) - num_prompt)}

    def _num_prompt(self, prompt: Sequence[int], ids: Sequence[int]) -> int:
        """Return the number of common tokens of a prompt with and without its completion; warn once if some differ."""
        num_prompt = next((at for at, (one, other) in enumerate(zip(prompt, ids)) if one != other), None)  # noqa: B905
        if num_prompt is None:
            num_prompt = min(len(prompt), len(ids))
        if num_prompt < len(prompt) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the tokens of a prompt alone are no beginning of those of prompt and completion: what is learnt "
                "begins where they differ, before %r", self._processing_class.decode(list(prompt[num_prompt:]))
            )  # fmt: skip
        return num_prompt

    def _ended(self, text: str) -> str:
        return text if text.endswith(self._end) else text + self._end

    def _of_chat(self, row: Row) -> dict[str, Any]:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return {"chat_template": self._template, "tools": tools, **(row.get("chat_template_kwargs") or {})}

    @cached_property
    def _tests_null(self) -> bool:
        """Whether the template tests for null content, and therefore gets null."""
        source = self._template or self._processing_class.chat_template or ""
        return ChatTemplate(source if isinstance(source, str) else source.get("default", ""), {}).tests_null

    def _of_assistant(self) -> dict[str, Any]:
        return {"return_assistant_tokens_mask": True} if self._settings.assistant_only else {}

    def _encode(self, given: str | list[Any], **options: Any) -> Row:
        processing_class = self._processing_class
        is_processor = processing_class is not tokenizer_of(processing_class)
        if isinstance(given, str):
            made = processing_class(text=given)
        else:
            filled = without_nulls(given, but_of="assistant" if self._tests_null else None)
            messages = [_in_parts(message) for message in filled] if is_processor else filled
            made = processing_class.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        found = {name: values[0] for name, values in made.items()} if is_processor else dict(made)
        if "assistant_masks" in found and 1 not in found["assistant_masks"]:
            raise ConfigError(
                "args.assistant_only_loss is set, but the template marks no token of a conversation as the "
                "assistant's: mark the assistant's tokens by {% generation %} … {% endgeneration %}, or remove "
                "the row"
            )
        return found


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def _is_from_value(row: Row) -> bool:
    turns = row.get("conversations")
    return (
        isinstance(turns, list) and bool(turns) and isinstance(turns[0], Mapping) and {"from", "value"} <= {*turns[0]}
    )


def _as_chat(row: Row) -> Row:
    """Return a row of turns as a row of messages; names of speakers are unchanged."""
    names = {"from": "role", "value": "content"}
    messages = [{names.get(key, key): value for key, value in turn.items()} for turn in row["conversations"]]
    return {**{key: value for key, value in row.items() if key != "conversations"}, "messages": messages}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in the form of processors."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
