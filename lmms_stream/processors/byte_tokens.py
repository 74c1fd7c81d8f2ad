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


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """Byte lengths of tokens. num_bytes: of each token, int64[num_ids]. composed: the tokenizer normalizes texts to
    Unicode's NFC; only texts in NFC are unchanged.
    """

    num_bytes: NDArray[np.int64]
    composed: bool

    @staticmethod
    def of(tokenizer: Mapping[str, Any]) -> ByteTokens | None:
        """Read the content of tokenizer.json. Return None for a tokenizer that may add bytes to a text.

        Bytes that a tokenizer removes are noticed in each text: the bytes of its tokens do not add up.
        """
        from tokenizers.pre_tokenizers import ByteLevel

        model, steps = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
        normalizer = tokenizer["normalizer"] or {}
        normalizer = normalizer.get("type") if normalizer.get("normalizers") != [] else None  # DeepSeek V3's is empty
        if (
            model["type"] != "BPE"
            or any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
            or not set(ByteLevel.alphabet()) <= model["vocab"].keys()  # other vocabularies leave bytes out
            or normalizer not in (None, "NFC")
            or any(
                step.get("type") not in ("ByteLevel", "Split", "Digits") or step.get("add_prefix_space")
                for step in steps.get("pretokenizers", [steps])
            )
        ):
            return None
        vocab = model["vocab"]
        contents = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        numbers = np.fromiter(vocab.values(), np.int64, len(vocab))
        num_bytes = np.zeros(1 + max(int(numbers.max()), *contents, 0), np.int64)
        num_bytes[numbers] = np.fromiter(map(len, vocab), np.int64, len(vocab))  # a character is a byte
        for number, content in contents.items():  # but in added tokens
            num_bytes[number] = len(content.encode())
        return ByteTokens(num_bytes, normalizer == "NFC")

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
        bounds = (
            spans if is_ascii else [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans]
        )
        firsts = stops.searchsorted([start for start, _ in bounds], "right").tolist()
        lasts = stops.searchsorted([stop - 1 for _, stop in bounds], "right").tolist()

        def is_inside_character(token: int) -> bool:
            """Return whether a token of the text ends behind the first byte of a character and before its end."""
            return (offset := int(stops[token])) < len(data) and data[offset] & 0xC0 == 0x80

        made = []
        for first, last in zip(firsts, lasts, strict=True):
            while first and is_inside_character(first - 1):
                first -= 1
            while is_inside_character(last):
                last += 1
            made.append((first, last + 1))
        return made
