"""Conversations -> tokens through a tokenizer's chat template; the loss is on what the assistant says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, DataError
from ..types import Processed, Sample
from .base import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatProcessor:
    """Renders `messages` with the tokenizer's chat template, whose generation marks say what is learnt.

    The template must wrap what the assistant says in {% generation %} … {% endgeneration %} (transformers'
    convention for assistant masks); ConfigError otherwise, and for a tokenizer that is not a fast one.
    """

    columns = ("messages",)
    schema = "messages"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, source: str = ""):
        name = source or tokenizer.name_or_path
        if not tokenizer.is_fast:
            raise ConfigError(f"tokenizer {name} is not a fast one: assistant masks need tokenizer.json")
        if not tokenizer.chat_template:
            raise ConfigError(f"tokenizer {name} has no chat template: set tokenizer.chat_template and save it")
        if "{% generation %}" not in tokenizer.chat_template.replace("{%-", "{%").replace("-%}", "%}"):
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
        def digest(text: str) -> str:
            return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

        return {
            "class": "ChatProcessor",
            "version": 1,
            "tokenizer": digest(self.tokenizer.backend_tokenizer.to_str()),
            "chat_template": digest(str(self.tokenizer.chat_template)),
        }

    def measure(self, sample: Sample) -> int:
        text = self.tokenizer.apply_chat_template(_parse(sample["messages"]), tokenize=False)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def process(self, sample: Sample) -> Processed:
        encoded: Any = self.tokenizer.apply_chat_template(
            _parse(sample["messages"]), return_dict=True, return_assistant_tokens_mask=True
        )
        input_ids = np.array(encoded["input_ids"], dtype=np.int64)
        learnt = np.array(encoded["assistant_masks"], dtype=bool)
        return {"input_ids": input_ids, "labels": np.where(learnt, input_ids, IGNORED_LABEL)}


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer at a local path or hub id; ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"tokenizer {path!r} cannot be loaded: {first_line}") from error
    return tokenizer


def _parse(messages: str) -> list[dict[str, Any]]:
    """The stored messages with their text joined: templates of text models take plain strings."""
    parsed = json.loads(messages)
    for message in parsed:
        if isinstance(message["content"], list):
            kinds = {part["type"] for part in message["content"]} - {"text"}
            if kinds:
                raise DataError(
                    f"a message holds {', '.join(sorted(kinds))}, which the chat processor does not read: "
                    "use a processor for that kind of media"
                )
            message["content"] = "".join(part["text"] for part in message["content"])
    return list(parsed)
