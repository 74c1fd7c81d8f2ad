"""Conversations -> tokens through a tokenizer's chat template; the loss is on what the assistant says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, DataError
from ..types import Processed, Sample
from .base import IGNORED_LABEL
from .stored_chat import read_chat
from .tokenizers import check_fast, digest, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]  # characters of the rendered text, half-open


class ChatProcessor:
    """Renders `messages` with the tokenizer's chat template, whose generation marks say what is learnt.

    The template must wrap what the assistant says in {% generation %} … {% endgeneration %} (transformers'
    convention for assistant masks); ConfigError otherwise, and for a tokenizer that is not a fast one. It is given
    the tools of the sample, and arguments of tool calls as objects. Messages with "learn": false are not learnt.
    """

    columns = ("messages",)
    schema = "messages"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, source: str = ""):
        name = source or tokenizer.name_or_path
        check_fast(tokenizer, name, why="assistant masks need")
        if not tokenizer.chat_template:
            raise ConfigError(f"tokenizer {name} has no chat template: set tokenizer.chat_template and save it")
        if "{% generation %}" not in str(tokenizer.chat_template).replace("{%-", "{%").replace("-%}", "%}"):
            raise ConfigError(
                f"the chat template of tokenizer {name} has no {{% generation %}} marks, so what the assistant says "
                "cannot be told from the rest: wrap it in {% generation %} and {% endgeneration %}"
            )
        self.tokenizer = tokenizer

    @staticmethod
    def from_pretrained(path: str) -> ChatProcessor:
        """A processor with the tokenizer at a local path or hub id."""
        return ChatProcessor(load_tokenizer(path), source=path)

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "class": "ChatProcessor",
            "version": 2,
            "tokenizer": digest(self.tokenizer.backend_tokenizer.to_str()),
            "chat_template": digest(str(self.tokenizer.chat_template)),
        }

    def measure(self, sample: Sample) -> int:
        text = self._apply_template(_parse(sample["messages"]), tokenize=False)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def process(self, sample: Sample) -> Processed:
        chat = _parse(sample["messages"])
        encoded = self._apply_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        input_ids = np.array(encoded["input_ids"], dtype=np.int64)
        learnt = np.array(encoded["assistant_masks"], dtype=bool)
        spans_left_out = self._spans_left_out(chat)
        if spans_left_out:
            first, last = np.array(encoded.encodings[0].offsets).T  # characters of each token
            for start, stop in spans_left_out:
                learnt &= (last <= start) | (first >= stop)
        return {"input_ids": input_ids, "labels": np.where(learnt, input_ids, IGNORED_LABEL)}

    def _apply_template(self, chat: _Chat, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(chat.messages, tools=chat.tools, **options)
        except (TemplateError, TypeError) as error:  # what templates raise, and what they meet in data of other kinds
            raise DataError(
                f"the chat template refuses the conversation ({error}): correct it, or use another template"
            ) from error

    def _spans_left_out(self, chat: _Chat) -> list[Span]:
        """What the template marks of messages that are not learnt."""
        if not chat.left_out:
            return []
        spans = self._marked_spans(chat.messages, chat.tools)
        speakers = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(spans) != len(speakers):
            speakers = self._speakers_of(spans, chat, speakers)
        return [span for span, place in zip(spans, speakers, strict=True) if place in chat.left_out]

    def _speakers_of(self, spans: Sequence[Span], chat: _Chat, speakers: Sequence[int]) -> list[int]:
        """The message of each span, for templates that mark one several times, or not at all.

        The spans that a message adds to those before it are its own.
        """
        places: list[int] = []
        for place in speakers:
            upto = self._marked_spans(chat.messages[: place + 1], chat.tools)
            if upto != spans[: len(upto)]:
                break
            places += [place] * (len(upto) - len(places))
        if len(places) != len(spans):
            raise DataError(
                f"the chat template marks {len(spans)} spans that are not those of single messages, so what is not "
                'learnt cannot be told: use another template, or a dataset without "learn": false'
            )
        return places

    def _marked_spans(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            conversations=[messages],  # type: ignore[list-item]
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **special_tokens,
        )
        spans: list[Span] = rendered[1][0]
        return spans


@dataclass(frozen=True, slots=True)
class _Chat:
    """messages and tools as templates take them; left_out: places of messages that are not learnt."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    left_out: frozenset[int]


def _parse(stored: str) -> _Chat:
    """The stored conversation with the text of its parts joined: templates of text models take plain strings."""
    messages, tools = read_chat(stored)
    for message in messages:
        if isinstance(message.get("content"), list):
            kinds = {part["type"] for part in message["content"]} - {"text"}
            if kinds:
                raise DataError(
                    f"a message holds {', '.join(sorted(kinds))}, which the chat processor does not read: "
                    "use a processor for that kind of media"
                )
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or ():
            _read_arguments(call)
    left_out = frozenset(place for place, message in enumerate(messages) if not message.pop("learn", True))
    return _Chat(messages, tools, left_out)


def _read_arguments(call: Any) -> None:
    """Arguments of a tool call as an object, where OpenAI's JSON text of one is stored: templates write the JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return  # the template sees the text
        if isinstance(arguments, dict):
            function["arguments"] = arguments
