"""Places of the tokens of a byte-level tokenizer in a text, from their ids only.

`tokenizers` takes a fifth longer to report offsets. Byte-level BPE (GPT-2, Llama 3, Qwen) cuts an unchanged text into
tokens of known bytes: the sums of their lengths are the offsets.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]

_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # Split's behaviors that keep matches


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """Byte lengths of tokens. num_bytes: of each token, int64[num_ids]. added: ids of tokens that are matched before a
    text is cut.

    composed: the tokenizer normalizes texts to Unicode's NFC; only texts in NFC are unchanged.
    """

    num_bytes: NDArray[np.int64]
    added: frozenset[int]
    composed: bool

    @staticmethod
    def of(tokenizer: Mapping[str, Any]) -> ByteTokens | None:
        """Read the content of tokenizer.json. Return None for a tokenizer that is not byte-level, or may change a
        text.
        """
        from tokenizers.pre_tokenizers import ByteLevel

        model, added = tokenizer["model"], tokenizer["added_tokens"]
        normalizer = (tokenizer["normalizer"] or {}).get("type")
        alphabet = set(ByteLevel.alphabet())
        if (
            model["type"] != "BPE"
            or model.get("dropout")
            or any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
            or not alphabet <= model["vocab"].keys()  # other vocabularies leave bytes out
            or normalizer not in (None, "NFC")
            or not _only_cuts(tokenizer["pre_tokenizer"])
            or not _only_frames(tokenizer["post_processor"])
            or not all(_is_found_as_it_is(token) for token in added)
        ):
            return None
        vocab = model["vocab"]
        contents = {token["id"]: token["content"] for token in added}
        if not set("".join(token for token, number in vocab.items() if number not in contents)) <= alphabet:
            return None
        numbers = np.fromiter(vocab.values(), np.int64, len(vocab))
        num_bytes = np.zeros(1 + max(int(numbers.max()), *contents, 0), np.int64)
        num_bytes[numbers] = np.fromiter(map(len, vocab), np.int64, len(vocab))  # a character is a byte
        for number, content in contents.items():  # but in added tokens
            num_bytes[number] = len(content.encode())
        return ByteTokens(num_bytes, frozenset(contents), normalizer == "NFC")

    def spans(self, text: str, ids: NDArray[np.int32], spans: Sequence[Span]) -> list[Span] | None:
        """Convert non-empty spans of characters to spans of the tokens that have bytes of these characters.

        The tokens of a character are all in a span or all outside. None for a text that the tokenizer changes.
        """
        is_ascii = text.isascii()
        if self.composed and not is_ascii and not unicodedata.is_normalized("NFC", text):
            return None
        data = b"" if is_ascii else text.encode()
        stops = self.num_bytes.take(ids).cumsum()
        if not len(ids) or stops[-1] != len(data or text):
            return None
        if is_ascii:
            bounds = [(start, stop) for start, stop in spans]
        else:
            bounds = [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans]
        firsts = stops.searchsorted([start for start, _ in bounds], "right").tolist()
        lasts = stops.searchsorted([stop - 1 for _, stop in bounds], "right").tolist()
        if is_ascii:
            return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
        return [_of_whole_characters(data, stops, first, last) for first, last in zip(firsts, lasts, strict=True)]


def _of_whole_characters(data: bytes, stops: NDArray[np.int64], first: int, last: int) -> Span:
    """Extend the tokens from first to last by adjacent tokens that have bytes of the same characters.

    stops: the end of each token in the UTF-8 data.
    """
    while first and _is_inside_character(data, int(stops[first - 1])):
        first -= 1
    while _is_inside_character(data, int(stops[last])):
        last += 1
    return first, last + 1


def _is_inside_character(data: bytes, offset: int) -> bool:
    """Return whether an offset of UTF-8 data is behind the first byte of a character and before its end."""
    return offset < len(data) and data[offset] & 0xC0 == 0x80


def _only_cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer is byte-level and keeps all of a text."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    keeps = all(
        (step["type"] == "ByteLevel" and not step["add_prefix_space"])
        or (step["type"] == "Split" and step["behavior"] in _KEEPING)
        or step["type"] == "Digits"
        for step in steps
    )
    return keeps and [step["type"] for step in steps].count("ByteLevel") == 1


def _only_frames(post_processor: Mapping[str, Any] | None) -> bool:
    """Return whether a post-processor only puts special tokens around tokens; callers do not request special tokens."""
    kinds = {step["type"] for step in _steps(post_processor, "processors")}
    return kinds <= {"ByteLevel", "TemplateProcessing"}


def _is_found_as_it_is(added: Mapping[str, Any]) -> bool:
    """Return whether an added token matches its own content, without adjacent white space."""
    content = added["content"]
    return bool(content) and unicodedata.is_normalized("NFC", content) and not (added["lstrip"] or added["rstrip"])


def _steps(of: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    if of is None:
        return []
    return list(of[name]) if of["type"] == "Sequence" else [of]
