"""Relax's functions for rows of files and for making a sample of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import BaseDataset
from ...prompts import KINDS, OVERLONG, Prompts, messages_of, plain_parts, with_media
from ...rows import sliced_path
from ...sample import Sample
from .. import refused_names
from .streaming_dataset import CompositeStreamingReader

__all__ = [
    "BaseDataset",
    "build_messages",
    "check_sample_length",
    "collect_message_multimodal_data",
    "filter_long_prompts",
    "parse_generalized_path",
    "process_raw_sample",
    "read_file",
]
_TOGETHER = 1024  # rows


def parse_generalized_path(s: str) -> tuple[str, slice | None]:
    """Return a path and the slice of rows written after it.

    >>> parse_generalized_path("data.jsonl@[0:100]")
    ('data.jsonl', slice(0, 100, None))
    """
    path, rows = sliced_path(s)
    return path, None if rows == slice(None) else rows


def read_file(path: str | Path | Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows named by a path. DataError for an unreadable row."""
    reader = CompositeStreamingReader(path)
    for start in range(0, len(reader), _TOGETHER):
        for _, row in reader.iter_batch(range(start, min(start + _TOGETHER, len(reader)))):
            yield row


def build_messages(
    data: Mapping[str, Any],
    prompt_key: str,
    system_prompt: str | None,
    as_conversation: bool,
    multimodal_keys: Mapping[str, str] | None = None,
    custom_prompt_func: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Return a row's prompt as messages with media; keep a text unchanged unless as_conversation is set."""
    prompt = data.get(prompt_key)
    if custom_prompt_func is not None:
        prompt = custom_prompt_func(prompt, data)
    if isinstance(prompt, str) and not as_conversation:
        return prompt
    messages = messages_of(prompt or "", system_prompt=system_prompt)
    return plain_parts(with_media(messages, data, multimodal_keys) if multimodal_keys else messages)


def collect_message_multimodal_data(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the media in messages by kind, in their order."""
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") in found:
                found[part["type"]].append(part.get(part["type"]))
    return found


def process_raw_sample(data: dict[str, Any], tokenizer: Any, processor: Any, **settings: Any) -> Sample:
    """Return the sample of a row. settings: fields of Prompts."""
    return Prompts(tokenizer=tokenizer, processor=processor, **settings).sample(data, None)


def filter_long_prompts(samples: Sequence[Sample], tokenizer: Any, processor: Any, max_length: int) -> list[Sample]:
    """Return the samples of at most max_length tokens, in their order."""
    measured = Prompts(tokenizer=tokenizer, processor=processor, max_length=max_length).measured([*samples])
    return [sample for sample, outcome in zip(samples, measured, strict=True) if outcome != OVERLONG]


def check_sample_length(sample: Sample, tokenizer: Any, processor: Any, max_length: int) -> bool:
    """Whether a sample has at most max_length tokens."""
    return bool(filter_long_prompts([sample], tokenizer, processor, max_length))


__getattr__ = refused_names(
    __name__, {"resolve_path_plan": "read_file, the readers and the datasets take the path as it is"}
)
