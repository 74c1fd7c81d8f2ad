"""Offsets of tokens that are told from their ids are those that the tokenizer itself says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.processors.byte_tokens import ByteTokens
from lmms_stream.processors.tokenizers import FastTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split, WhitespaceSplit

from ..strategies import examples

WORDS = "def read(self, size: int) -> bytes:\n    return 12345 + naïve café 中文字符 é\n\n\t<|end|> a  b   c"
CUT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
Change = Callable[[Tokenizer], None]


def byte_level(*changes: Change, post: Any = None, cuts: Any = None, normalizer: Any = None) -> dict[str, Any]:
    """What tokenizer.json has of a BPE tokenizer that is trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cuts or ByteLevel(add_prefix_space=False)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(
        [WORDS] * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    if post:
        tokenizer.post_processor = post
    tokenizer.add_special_tokens(["<|end|>"])
    for change in changes:
        change(tokenizer)
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    return described


def with_tokens(*tokens: str | AddedToken) -> Change:
    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens(list(tokens))

    return add


TEMPLATE = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
TOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": byte_level,
    "trimmed": lambda: byte_level(post=processors.ByteLevel(trim_offsets=True)),
    "framed": lambda: byte_level(post=processors.Sequence([processors.ByteLevel(trim_offsets=True), TEMPLATE])),
    "cut as Llama 3 does": lambda: byte_level(
        cuts=Sequence([Split(CUT, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]), post=TEMPLATE
    ),
    "digits": lambda: byte_level(cuts=Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])),
    "composed": lambda: byte_level(normalizer=normalizers.NFC(), post=processors.ByteLevel(trim_offsets=True)),
    "tokens of white space": lambda: byte_level(
        with_tokens("\n\n", "  ", "é ", "\t中"), post=processors.ByteLevel(trim_offsets=True)
    ),
    "takes white space with it": lambda: byte_level(with_tokens(AddedToken("<mask>", lstrip=True))),
    "left out": lambda: byte_level(cuts=Sequence([Split(" ", "removed"), ByteLevel(add_prefix_space=False)])),
}
UNTOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "a space in front": lambda: byte_level(cuts=ByteLevel(add_prefix_space=True)),
    "changed": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "not of bytes": lambda: byte_level(cuts=Metaspace()),
    "no cut into bytes": lambda: byte_level(cuts=WhitespaceSplit()),
    "not all bytes": lambda: json.loads(Tokenizer(models.BPE({"a": 0}, [])).to_str()),
    "words": lambda: json.loads(Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str()),
}
pieces = st.sampled_from(
    ["<|end|>", "<mask>", " ", "\n", "\n\n", "  ", "é", "e\u0301", "中文", "😀", "\u00a0", "read", "12", "\u0323"]
)
texts = st.lists(pieces | st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=12).map("".join)


def fast(described: dict[str, Any]) -> FastTokenizer:
    return FastTokenizer(name="x", model=json.dumps(described), chat_templates={}, special_tokens={}, eos_token_id=None)


@pytest.mark.parametrize("name", TOLD)
def test_spans_are_those_that_the_tokenizer_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = TOLD[name]()
    tokens, tokenizer = ByteTokens.of(described), Tokenizer.from_str(json.dumps(described))
    assert tokens is not None
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    ours, by_offsets = fast(described), fast(described)
    by_offsets.__dict__["_byte_tokens"] = None
    num_told = 0

    @examples(360, many=1200)
    @given(text=texts.filter(bool), data=st.data())
    def check(text: str, data: st.DataObject) -> None:
        nonlocal num_told
        start = data.draw(st.integers(0, len(text) - 1))
        stop = data.draw(st.integers(start + 1, len(text)))
        encoding = tokenizer.encode(text, add_special_tokens=False)
        found = tokens.spans(text, np.array(encoding.ids, np.int32), [(start, stop)])
        num_told += found is not None
        other = "<|end|>" + text[::-1]
        asked = [(text, [(start, stop)]), (other, [])]
        (ids, (span,)), (other_ids, none) = ours.ids_and_spans(asked)
        assert ids.tolist() == encoding.ids == ours.ids([text], add_special_tokens=False)[0].tolist()
        assert other_ids.tolist() == tokenizer.encode(other, add_special_tokens=False).ids
        assert not none
        assert [span] == by_offsets.ids_and_spans(asked)[0][1] == (found or [span])

    check()
    assert num_told > 50


@pytest.mark.parametrize("name", UNTOLD)
def test_a_tokenizer_that_may_add_bytes_is_left_to_the_tokenizer(name: str) -> None:
    assert ByteTokens.of(UNTOLD[name]()) is None


def test_a_text_that_is_not_composed_is_left_to_the_tokenizer() -> None:
    described = TOLD["composed"]()
    tokens, tokenizer = ByteTokens.of(described), Tokenizer.from_str(json.dumps(described))
    assert tokens is not None
    for text, is_told in (("café", True), ("cafe\u0301", False)):
        found = tokens.spans(text, np.array(tokenizer.encode(text).ids, np.int32), [(0, len(text))])
        assert (found is not None) == is_told


def test_ids_are_the_same_with_threads_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    described = TOLD["framed"]()
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (with_threads,) = fast(described).ids([WORDS], add_special_tokens=True)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (without,) = fast(described).ids([WORDS], add_special_tokens=True)
    assert with_threads.dtype == without.dtype == np.int32
    assert with_threads.tolist() == without.tolist()
    assert len(without) == 1 + len(fast(described).ids([WORDS], add_special_tokens=False)[0])
