"""tiktoken returns the tokens of `tokenizers`; other texts and tokenizers are left to `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from lmms_stream.processors import byte_pairs
from lmms_stream.processors.base import keep, read_kept
from lmms_stream.processors.byte_pairs import BytePairs
from lmms_stream.processors.tokenizers import FastTokenizer
from tokenizers import AddedToken, Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from ..rounds import in_long_rounds
from ..strategies import examples
from .test_byte_tokens import CUT, TEMPLATE, WORDS, byte_level, fast, texts, with_tokens

BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = Sequence([*(Split(Regex(each), "isolated") for each in next(iter(byte_pairs._JOINED))), BYTES])
Described = dict[str, Any]


def with_all_merges(described: Described) -> Described:
    """The form of Llama 3: whole parts of a text are tokens first, and all halves of tokens are merges."""
    vocab: dict[str, int] = described["model"]["vocab"]
    merges = [
        [token[:at], token[at:]]
        for token in sorted(vocab, key=vocab.__getitem__)
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    return {**described, "model": {**described["model"], "merges": merges, "ignore_merges": True}}


TAKEN: dict[str, Callable[[], Described]] = {
    "GPT-2": byte_level,
    "Qwen": lambda: byte_level(cuts=Sequence([Split(Regex(QWEN), "isolated"), BYTES]), normalizer=normalizers.NFC()),
    "Llama 3": lambda: with_all_merges(byte_level(cuts=Sequence([Split(CUT, "isolated"), BYTES]), post=TEMPLATE)),
    "DeepSeek V3": lambda: byte_level(cuts=DEEPSEEK, normalizer=normalizers.Sequence([])),
    "tokens of white space": lambda: byte_level(with_tokens("\n\n", "é ", "\t中")),
}


def merging(*merges: tuple[str, str], **model: Any) -> Described:
    """A tokenizer of bytes and merges; ids of results are in the order of the alphabet."""
    results = sorted({left + right for left, right in merges})
    vocab = {token: number for number, token in enumerate([*sorted(ByteLevel.alphabet()), *results])}
    described = byte_level()
    changed = {**described["model"], "vocab": vocab, "merges": merges, **model}
    return {**described, "added_tokens": [], "model": changed}


def in_pieces(*steps: Any) -> Callable[[], Described]:
    return lambda: byte_level(cuts=Sequence([*steps, BYTES]))


NORMAL, RAW = AddedToken("b<", normalized=True), AddedToken("<x", normalized=False)
LEFT: dict[str, Callable[[], Described]] = {
    "a token that its bytes do not become": lambda: merging(("a", "b"), ("b", "c"), ("a", "bc")),
    "merges in another order": lambda: merging(("b", "c"), ("a", "b")),
    "a token before its halves": lambda: merging(("a", "bb"), ("b", "b"), ("a", "b")),
    "merges left out by chance": lambda: merging(("a", "b"), dropout=0.5),
    "a token that takes white space with it": lambda: byte_level(with_tokens(AddedToken("<mask>", lstrip=True))),
    "a token that begins another": lambda: byte_level(with_tokens("<a>", "<a>b")),
    "tokens that overlap, one of the normalized text": lambda: byte_level(with_tokens(NORMAL, RAW)),
    "a token that is normalized": lambda: byte_level(with_tokens("e\u0301"), normalizer=normalizers.NFC()),
    "digits": in_pieces(Digits(individual_digits=True)),
    "text left out": in_pieces(Split(" ", "removed")),
    "unknown patterns": in_pieces(Split(CUT, "isolated"), Split(Regex("a+"), "isolated")),
    "a pattern of another language": in_pieces(Split(Regex(r"\X"), "isolated")),
    "a pattern of the gaps": in_pieces(Split(CUT, "isolated", invert=True)),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def pairs_of(tokenizer: FastTokenizer) -> BytePairs | None:
    assert tokenizer._byte_tokens is not None
    return BytePairs.of(json.loads(tokenizer.model), tokenizer._tokenizer, tokenizer._byte_tokens.num_bytes)


@pytest.mark.parametrize("splits_special", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_both_encoders_return_the_same_tokens(name: str, splits_special: bool) -> None:
    tokenizer = replace(fast(TAKEN[name]()), splits_special=splits_special)
    pairs = pairs_of(tokenizer)
    assert pairs is not None
    assert byte_pairs._are_one_function(json.loads(tokenizer.model)["model"])
    num_told = 0

    @examples(120, many=3000)
    @given(text=texts)
    def check(text: str) -> None:
        nonlocal num_told
        ids = pairs.ids(text)
        num_told += ids is not None
        assert ids is None or ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids

    check()
    assert num_told > 20


@pytest.mark.parametrize("name", LEFT)
def test_another_form_is_left_to_tokenizers(name: str) -> None:
    tokenizer = fast(LEFT[name]())
    assert (
        tokenizer._byte_tokens is None
        or pairs_of(tokenizer) is None
        or not byte_pairs._are_one_function(json.loads(tokenizer.model)["model"])
    )


def test_a_trial_finds_an_encoder_that_differs() -> None:
    tokenizer = fast(TAKEN["GPT-2"]())
    pairs = pairs_of(fast(TAKEN["Qwen"]()))
    assert pairs is not None
    assert not pairs.agrees(json.loads(tokenizer.model), tokenizer._tokenizer)


@pytest.mark.parametrize("text", ["a" + " " * 1_000_000 + "b", "cafe\u0301", "a\u0338<|end|>\u0338"])
def test_a_text_that_the_encoder_cannot_take_is_left_to_tokenizers(text: str) -> None:
    tokenizer = used(TAKEN["Qwen"]())
    pairs = tokenizer._lazy_pairs.pairs
    assert pairs is not None
    assert pairs.ids(text) is None
    (ids,) = tokenizer.ids([text], add_special_tokens=False)
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_half_of_a_surrogate_pair_is_the_error_of_tokenizers() -> None:
    tokenizer = used(TAKEN["Qwen"]())
    with pytest.raises(Exception) as error:
        tokenizer.ids(["\ud800"], add_special_tokens=False)
    with pytest.raises(type(error.value)) as known:
        tokenizer.encode("\ud800", add_special_tokens=False)
    assert str(error.value) == str(known.value)


def used(described: Described) -> FastTokenizer:
    """A tokenizer with a kept trial, after enough characters for the encoder."""
    tokenizer = fast(described)
    lazy = tokenizer._lazy_pairs
    keep("byte_pairs", lazy.described, True)
    lazy.num_chars = byte_pairs.USED_AFTER
    assert lazy.look() is not None
    return tokenizer


@pytest.mark.parametrize("name", ["Llama 3", "GPT-2"])
@pytest.mark.parametrize("adds", [True, False])
def test_ids_are_the_same_with_the_encoder(name: str, adds: bool) -> None:
    described = TAKEN[name]()
    for method in ("ids", "num_tokens"):
        made, known = (
            getattr(tokenizer, method)([WORDS, "", "<|end|>", "e\u0301 "], add_special_tokens=adds)
            for tokenizer in (used(described), fast(described))
        )
        assert [*map(np.ndarray.tolist, made)] == [*map(np.ndarray.tolist, known)] if method == "ids" else made == known


@in_long_rounds
def test_the_encoder_is_made_after_its_trial_or_after_a_kept_one() -> None:
    def asked(num_chars: int, tokenizer: FastTokenizer) -> BytePairs | None:
        tokenizer._lazy_pairs.num_chars += num_chars
        return tokenizer._lazy_pairs.look()

    tokenizer = fast(byte_level(with_tokens("<only here>")))
    assert asked(byte_pairs.USED_AFTER, tokenizer) is None
    assert asked(byte_pairs.TRIED_AFTER - byte_pairs.USED_AFTER - 1, tokenizer) is None
    assert read_kept("byte_pairs", tokenizer._lazy_pairs.described) is None
    assert asked(1, tokenizer) is not None
    assert read_kept("byte_pairs", tokenizer._lazy_pairs.described) is True
    later = fast(byte_level(with_tokens("<only here>")))
    assert asked(byte_pairs.USED_AFTER - 1, later) is None
    assert asked(1, later) is not None
    left = fast(LEFT["digits"]())
    assert asked(byte_pairs.TRIED_AFTER, left) is None
    assert read_kept("byte_pairs", left._lazy_pairs.described) is False
