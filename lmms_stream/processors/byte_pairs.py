"""tiktoken as the encoder of byte-level BPE, in a third of the time of `tokenizers`, for equal tokens.

The form of a tokenizer's merges and pattern proves equal tokens. A trial with all characters and hostile texts confirms
this proof; its result is kept for later processes. The bytes of the tokens of each text must add up to the bytes of the
text. Other texts, and other tokenizers, are encoded by `tokenizers`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .base import keep, read_kept
from .byte_tokens import ByteTokens

if TYPE_CHECKING:
    from tiktoken import Encoding
    from tokenizers import Tokenizer

USED_AFTER = 1 << 21  # characters of texts; making the encoder takes about as long as encoding them
TRIED_AFTER = 1 << 25  # characters of texts, if no result of a trial is kept: a trial takes some 5 seconds

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = "一-龥\u3040-ヿ"
_JOINED = {  # patterns of several splits, each of the parts between matches of the former -> one pattern
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ): rf"\p{{N}}{{1,3}}|[{_CJK}]+|[!-/:-@\[-`{{-~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_CJK}]?[[\p{{L}}\p{{M}}]&&[^{_CJK}]]+"
    rf"| ?[[\p{{P}}\p{{S}}]&&[^{_CJK}]]+[\r\n]*|\s*[\r\n]+|\s+(?![^\s\p{{N}}{_CJK}])|\s+"
    rf"|(?:[^\s\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}{_CJK}](?![[\p{{L}}\p{{M}}]&&[^{_CJK}]]))+"  # DeepSeek V3
}
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in a vocabulary
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + at): byte for at, byte in enumerate(_HIDDEN)}


@dataclass(frozen=True, slots=True)
class BytePairs:
    """Encoder of texts, without special tokens around them. num_bytes: of each token, int64[num_ids]."""

    encoding: Encoding
    added: frozenset[str]  # tokens that are looked for in a text before all else
    num_bytes: NDArray[np.int64]
    normalizer: Any  # of `tokenizers`, or None

    @staticmethod
    def of(described: Mapping[str, Any], tokenizer: Tokenizer, num_bytes: NDArray[np.int64]) -> BytePairs | None:
        """Make the encoder of a byte-level tokenizer; None for another form. described: content of tokenizer.json."""
        from tiktoken import Encoding

        pattern = _pattern_of(described["pre_tokenizer"] or {})
        splits = tokenizer.encode_special_tokens
        added = [each for each in described["added_tokens"] if not (splits and each["special"])]
        if pattern is None or not _are_found_alike(added, tokenizer):
            return None
        tokens = {each["content"]: each["id"] for each in added}
        ranks = {bytes(map(_BYTES.__getitem__, token)): rank for token, rank in _tokens_of(described["model"]).items()}
        try:
            encoding = Encoding("byte pairs", pat_str=pattern, mergeable_ranks=ranks, special_tokens=tokens)
        except ValueError:  # the pattern is in another language
            return None
        return BytePairs(encoding, frozenset(tokens), num_bytes, tokenizer.normalizer)

    def ids(self, text: str) -> NDArray[np.int32] | None:
        """Return the tokens of a text, int32[T]; None for a text to be encoded by `tokenizers`."""
        size = len(text)
        try:
            if not text.isascii():
                if self.normalizer is not None and self.normalizer.normalize_str(text) != text:
                    return None
                size = len(text.encode())
            ids = self.encoding.encode_to_numpy(text, allowed_special=self.added, disallowed_special=())
        except ValueError:  # half of a surrogate pair, or a match that takes too many steps
            return None
        return ids.astype(np.int32) if self.num_bytes.take(ids).sum() == size else None

    def agrees(self, described: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
        """Return whether the merges are tiktoken's merges, and a trial finds only the tokens of `tokenizers`."""
        return _are_one_function(described["model"]) and all(
            (ids := self.ids(text)) is None or ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
            for text in _hostile_texts(tokenizer)
        )


class LazyBytePairs:
    """The encoder of a tokenizer, made after many texts, because of the cost. pairs: the encoder, if made.

    num_chars: characters of all texts so far. next_look: number of characters before the next call of `look`. model:
    content of tokenizer.json. digest, parts: return the tokenizer's digest, and its parts, at the first look.
    """

    def __init__(
        self, model: str, *, digest: Callable[[], str], parts: Callable[[], tuple[Tokenizer, ByteTokens | None]]
    ):
        self._model, self._digest, self._parts = model, digest, parts
        self.pairs: BytePairs | None = None
        self.num_chars = 0
        self.next_look: float = USED_AFTER

    @property
    def described(self) -> dict[str, Any]:
        """Description of the trial."""
        return {"tokenizer": self._digest(), "encoders": [version("tiktoken"), version("tokenizers")], "trial": 1}

    def look(self) -> BytePairs | None:
        """Make the encoder if a trial is kept or due, and return the encoder; None for `tokenizers`."""
        if self.num_chars < self.next_look:
            return self.pairs
        self.next_look = math.inf
        with suppress(ImportError):  # tiktoken is not installed
            trial = self.described
            agrees = read_kept("byte_pairs", trial)
            if agrees is None and self.num_chars < TRIED_AFTER:
                self.next_look = TRIED_AFTER
            elif agrees is not False:
                self.pairs = self._made(is_tried=agrees is not None)
                if agrees is None:
                    keep("byte_pairs", trial, self.pairs is not None)
        return self.pairs

    def _made(self, *, is_tried: bool) -> BytePairs | None:
        """Make the encoder; None for a tokenizer of another form, or after a trial that finds a difference."""
        tokenizer, byte_tokens = self._parts()
        if byte_tokens is None:
            return None
        described = json.loads(self._model)
        pairs = BytePairs.of(described, tokenizer, byte_tokens.num_bytes)
        return pairs if pairs is not None and (is_tried or pairs.agrees(described, tokenizer)) else None


def _pattern_of(step: Mapping[str, Any]) -> str | None:
    """Return a pre-tokenizer's pattern of the parts of a text; None for another pre-tokenizer."""
    *splits, last = step.get("pretokenizers", [step])
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return _GPT2 if last["use_regex"] else None
    patterns = tuple(
        each["pattern"].get("Regex")
        for each in splits
        if each["type"] == "Split" and each["behavior"] == "Isolated" and not each["invert"]
    )
    if last["use_regex"] or len(patterns) < len(splits):
        return None
    return patterns[0] if len(patterns) == 1 else _JOINED.get(patterns)


def _are_found_alike(added: list[dict[str, Any]], tokenizer: Tokenizer) -> bool:
    """Return whether both encoders find the same added tokens in every text.

    tiktoken takes the first token in the text; `tokenizers` the longest, and tokens of normalized texts last.
    """
    contents = sorted(each["content"] for each in added)
    if any(each[flag] for each in added for flag in ("lstrip", "rstrip", "single_word")) or not all(contents):
        return False
    if any(longer.startswith(token) for token, longer in pairwise(contents)):
        return False
    if tokenizer.normalizer and any(tokenizer.normalizer.normalize_str(each) != each for each in contents):
        return False
    first, last = ([each["content"] for each in added if each["normalized"] is flag] for flag in (False, True))
    return not any(_overlap(*pair) or _overlap(*reversed(pair)) for pair in product(first, last))


def _overlap(one: str, other: str) -> bool:
    """Return whether a text can hold both with common characters, the first token first."""
    return other in one or any(one.endswith(other[:size]) for size in range(1, min(len(one), len(other))))


def _pairs_of(model: Mapping[str, Any]) -> dict[tuple[str, str], None]:
    """Return the merges in their order."""
    return dict.fromkeys(tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])


def _tokens_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of bytes, of merges, and of whole parts of a text -> id."""
    vocab, alphabet = model["vocab"], {*_BYTES}
    if model.get("ignore_merges"):
        return {token: number for token, number in vocab.items() if alphabet >= {*token}}
    return {token: vocab[token] for token in (*_BYTES, *map("".join, _pairs_of(model)))}


def _are_one_function(model: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer's merges are tiktoken's merges: any two tokens whose bytes together are a token.

    The merges must be in the order of their results. Further, all halves of all tokens must be merges, or each token
    must be merged from its own bytes and after its halves.
    """
    from tokenizers import Tokenizer

    vocab, pairs, ranks = model["vocab"], _pairs_of(model), _tokens_of(model)
    made = [vocab["".join(pair)] for pair in pairs]
    if model.get("dropout") or made != sorted(made):
        return False
    halves = ((token[:at], token[at:]) for token in ranks for at in range(1, len(token)))
    if all(pair in pairs for pair in halves if ranks.keys() >= {*pair}):
        return True
    bare = {"version": "1.0", "added_tokens": [], "model": {**model, "ignore_merges": False}}
    tokenizer = Tokenizer.from_str(json.dumps(bare))
    return all(
        vocab[part] < token for pair, token in zip(pairs, made, strict=True) for part in pair if len(part) > 1
    ) and all(len(tokenizer.encode(token).ids) == 1 for token in ranks)


def _hostile_texts(tokenizer: Tokenizer) -> Iterator[str]:
    chance = random.Random(0)
    for token in sorted(each.content for each in tokenizer.get_added_tokens_decoder().values()):
        yield from (f"a{token}{token}b {token} \n", f"{token[:-1]}{token}\u0338", token[1:] + token[:-1], token)
    for letters in product(" \n\r\t\u00a0\u3000a1!'", repeat=4):
        yield "".join(letters)
    numbers = range(tokenizer.get_vocab_size(with_added_tokens=True))
    for _ in range(1000):
        yield tokenizer.decode(chance.choices(numbers, k=20), skip_special_tokens=False)
        yield bytes(chance.choices(range(256), k=40)).decode(errors="replace")
    for first in range(0, 0x40000, 16):  # planes with letters; of the others, a part
        chars = [chr(code) for code in range(first, first + 16) if not 0xD800 <= code < 0xE000]
        yield "".join(f"a{char}a {char}'{char}1" for char in chars)
    for code in range(0x40000, 0x110000, 61):
        yield f"a{chr(code)}a {chr(code)}'{chr(code)}1"
