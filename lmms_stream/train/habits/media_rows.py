"""Rows of a datasets.Dataset that hold images: how they are told, and what reads the chats that are stored of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...processors.base import IGNORED_LABEL, Compared, Memory
from ...processors.multimodal import MultimodalProcessor
from ...processors.preference_media import MediaPreferenceProcessor
from ...types import Processed, Sample


def holds_media(dataset: Any) -> bool:
    """Whether rows have a column `image` or `images`, or an image somewhere in their messages."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping) or "input_ids" in features:
        return False
    return bool({"image", "images"} & {*features}) or any(type(each).__name__ == "Image" for each in _leaves(features))


def check_media(processing_class: Any, formatting_func: Any) -> None:
    """ConfigError for what cannot read images."""
    if formatting_func is not None:
        raise ConfigError("the rows have images, of which a formatting_func makes no text: leave it out")
    if not hasattr(processing_class, "image_processor"):
        raise ConfigError(
            f"the rows have images, and processing_class is a {type(processing_class).__name__}, which reads none: "
            "give the model's processor, or remove the columns of images"
        )


def as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as one of messages: of prompt and completion, of which answers in the prompt are not trained on.

    Images of a row that its messages do not point to stand before the user's first text, as in TRL.
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
    """A processor of media that trains on all tokens of a chat but those of media: a row's messages, as TRL reads them.

    TRL also trains on the tokens that stand for media, which no model can predict.
    """

    @staticmethod
    def of(path: str) -> WholeChatsProcessor:
        """The processor in a folder."""
        made = MultimodalProcessor.from_pretrained(path, learn_stop=None)
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


def media_processor(path: str, *, objective: Compared | None, learns_all: bool) -> Any:
    """What reads chats with media. learns_all: whether all of a chat is trained on, or what the assistant says."""
    if objective is not None:
        made = MultimodalProcessor.from_pretrained(path, learn="last", learn_stop=None)
        return MediaPreferenceProcessor(made, objective=objective)
    return WholeChatsProcessor.of(path) if learns_all else MultimodalProcessor.from_pretrained(path)


def _leaves(feature: Any) -> Iterator[Any]:
    """The types that a type of datasets consists of."""
    if isinstance(feature, Mapping):
        for each in feature.values():
            yield from _leaves(each)
    elif isinstance(feature, list):
        yield from _leaves(feature[0])
    elif hasattr(feature, "feature"):
        yield from _leaves(feature.feature)
    else:
        yield feature
