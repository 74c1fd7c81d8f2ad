"""Where the tokens of a byte-level tokenizer lie in a text, told from their ids alone.

`tokenizers` takes a fifth longer when it keeps track of that. Byte-level BPE (GPT-2's, Llama 3's, Qwen's) changes
nothing of a text and cuts it into tokens of known bytes, so that adding these up finds the same offsets.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]

_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # what Split does with its matches


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """num_bytes: of each token, int64[num_ids]. added: ids of tokens that are found in a text before it is cut.

    composed: the tokenizer brings texts into Unicode's form NFC first, so that only those in it are unchanged.
    """

    num_bytes: NDArray[np.int64]
    added: frozenset[int]
    composed: bool

    @staticmethod
    def of(tokenizer: Mapping[str, Any]) -> ByteTokens | None:
        """tokenizer: as tokenizer.json has it. None for one that is not byte-level, or may change a text."""
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
        num_bytes = np.zeros(1 + max([*vocab.values(), *contents]), np.int64)
        for token, number in vocab.items():  # each character of a token is a byte; only added tokens have others
            num_bytes[number] = len(token)
        for number, content in contents.items():
            num_bytes[number] = len(content.encode())
        if not all(set(token) <= alphabet for token, number in vocab.items() if number not in contents):
            return None
        return ByteTokens(num_bytes, frozenset(contents), normalizer == "NFC")

    def spans(self, text: str, ids: NDArray[np.int32], spans: Sequence[Span]) -> list[Span] | None:
        """Spans of characters, none empty, as spans of the tokens that have bytes of these characters.

        The tokens of one character are all in a span or all outside. None for a text that the tokenizer changes.
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
    """The tokens from first to last, and those next to them that have bytes of the same characters.

    stops: the end of each token in the UTF-8 data.
    """
    while first and _is_inside_character(data, int(stops[first - 1])):
        first -= 1
    while _is_inside_character(data, int(stops[last])):
        last += 1
    return first, last + 1


def _is_inside_character(data: bytes, offset: int) -> bool:
    """Whether an offset of UTF-8 data is behind the first byte of a character and before its end."""
    return offset < len(data) and data[offset] & 0xC0 == 0x80


def _only_cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether it is byte-level and keeps all of a text."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    keeps = all(
        (step["type"] == "ByteLevel" and not step["add_prefix_space"])
        or (step["type"] == "Split" and step["behavior"] in _KEEPING)
        or step["type"] == "Digits"
        for step in steps
    )
    return keeps and [step["type"] for step in steps].count("ByteLevel") == 1


def _only_frames(post_processor: Mapping[str, Any] | None) -> bool:
    """Whether it does nothing to tokens but put special ones around them, which nobody asks for here."""
    kinds = {step["type"] for step in _steps(post_processor, "processors")}
    return kinds <= {"ByteLevel", "TemplateProcessing"}


def _is_found_as_it_is(added: Mapping[str, Any]) -> bool:
    """Whether an added token stands for its own content, without white space beside it."""
    content = added["content"]
    return bool(content) and unicodedata.is_normalized("NFC", content) and not (added["lstrip"] or added["rstrip"])


def _steps(of: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    if of is None:
        return []
    return list(of[name]) if of["type"] == "Sequence" else [of]
