"""Spans of a text become the tokens that have their bytes, and no character is cut by an end."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lmms_stream.processors.base import IGNORED_LABEL
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.tokenizers import FastTokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import PreTrainedTokenizerFast

from ..rounds import rounds
from .bytes_of_tokens import ENDS, Unit, bytes_of, with_bytes

CORPUS = ["Hello wörld, naïve café 中文字符中文 😀😃😀 e\u0301x\u0323 ÀÉ İ\n\n ok  12 👩‍👩‍👧"] * 9


def byte_level(normalizer: Any = None, *, trimmed: bool = False, crosses: bool = False) -> Tokenizer:
    """crosses: tokens may have bytes of several words and characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=not crosses)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if trimmed:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(ENDS)
    return tokenizer


def metaspace(kind: str) -> Tokenizer:
    """As of sentencepiece: a space before each text, and a token a byte for unknown characters."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    known = ["Hello wörld, naïve 中文 ok  12 abc"] * 9
    if kind == "BPE":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.train_from_iterator(
            known, trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", *names], show_progress=False)
        )
        described = json.loads(tokenizer.to_str())
        described["added_tokens"] = []
        tokenizer = Tokenizer.from_str(json.dumps(described))
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
        tokenizer.train_from_iterator(known, trainer)
        described = json.loads(tokenizer.to_str())
        described["added_tokens"] = []
        described["model"]["vocab"] += [[name, -20.0] for name in names]
        described["model"]["byte_fallback"] = True
        tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(ENDS)
    return tokenizer


def plain(text: str) -> list[Unit]:
    return [Unit(at, at + 1, char.encode()) for at, char in enumerate(text)]


def lowered(text: str) -> list[Unit]:
    return [Unit(at, at + 1, char.lower().encode()) for at, char in enumerate(text)]


def stripped(text: str) -> list[Unit]:
    first, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    return [Unit(at, at + 1, char.encode() if first <= at < stop else b"") for at, char in enumerate(text)]


def composed(text: str) -> list[Unit]:
    """A character and the marks that are composed with it are one."""
    units: list[Unit] = []
    for at, char in enumerate(text):
        before = text[units[-1].start : at] if units else ""
        whole = unicodedata.normalize("NFC", before + char)
        if units and whole != unicodedata.normalize("NFC", before) + char:
            units[-1] = Unit(units[-1].start, at + 1, whole.encode())
        else:
            units.append(Unit(at, at + 1, char.encode() if not units else unicodedata.normalize("NFC", char).encode()))
    return units


def spaced(text: str, *, doubled: bool) -> list[Unit]:
    """The space before a text belongs to its first character. doubled: also before a text that begins with a space."""
    first, *others = plain(text)
    return [first if text[0] == " " and not doubled else first._replace(data=b" " + first.data), *others]


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], Callable[[str], list[Unit]]]] = {
    "bytes": (byte_level, plain),
    "bytes, of which tokens have several words": (lambda: byte_level(crosses=True), plain),
    "bytes, whose offsets have no spaces": (lambda: byte_level(trimmed=True), plain),
    "bytes, composed": (lambda: byte_level(normalizers.NFC(), crosses=True), composed),
    "bytes, in lower case": (lambda: byte_level(normalizers.Lowercase(), crosses=True), lowered),
    "bytes, stripped": (lambda: byte_level(normalizers.Strip()), stripped),
    "a space before each text": (lambda: metaspace("BPE"), lambda text: spaced(text, doubled=True)),
    "a space before each text, by Unigram": (lambda: metaspace("Unigram"), lambda text: spaced(text, doubled=False)),
}
PIECES = [
    *ENDS, " ", "  ", "\n", "\n\n", "Hello", "ok", "x", "É", "é", "e\u0301", "x\u0323\u0301", "\u0301", "İ", "中文",
    "字", "文中", "😀", "😃😀", "👩‍👩‍👧", "\u1100\u1161\u11a8", "각", "\u00a0", "𝄞", "12",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(st.characters(codec="utf-8"), max_size=3), min_size=1, max_size=9)


def units_of(text: str, units: Callable[[str], list[Unit]]) -> Iterator[Unit]:
    """Units of a text in which special tokens stand for themselves, and are found before all else is changed."""
    at = 0
    for piece in re.split("(" + "|".join(map(re.escape, ENDS)) + ")", text):
        for unit in [Unit(0, len(piece), piece.encode())] if piece in ENDS else units(piece) if piece else []:
            yield Unit(at + unit.start, at + unit.stop, unit.data)
        at += len(piece)


def fast(tokenizer: Tokenizer) -> FastTokenizer:
    return FastTokenizer(
        name="x", model=json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False), chat_templates={},
        special_tokens={}, eos_token_id=None,
    )  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spans_are_the_tokens_that_have_their_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    make, units_in = TOKENIZERS[name]
    tokenizer = make()
    ours = fast(tokenizer)
    num_compared = 0

    @settings(max_examples=rounds(100, 2000))
    @given(text=texts.map("".join).filter(bool), data=st.data())
    def check(text: str, data: st.DataObject) -> None:
        nonlocal num_compared
        units = list(units_of(text, units_in))
        pieces = [bytes_of(tokenizer, token) for token in tokenizer.encode(text, add_special_tokens=False).ids]
        assume(
            pieces and b"".join(pieces) == b"".join(unit.data for unit in units)
        )  # Rust's Unicode may be another than Python's
        first = data.draw(st.integers(0, len(units) - 1))
        last = data.draw(st.integers(first, len(units) - 1))
        ((ids, (found,)),) = ours.ids_and_spans([(text, [(units[first].start, units[last].stop)])])
        assert len(ids) == len(pieces)
        expected = with_bytes(pieces, units, first, last)
        assert [*range(*found)] == expected, (text, text[units[first].start : units[last].stop], pieces)
        num_compared += 1

    check()
    assert num_compared > rounds(50, 1000)


@pytest.mark.filterwarnings("ignore:the chat template of tokenizer")
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "a space before each text"])
def test_an_answer_without_an_end_token_is_trained_on_to_its_last_byte(kind: str, marks: bool, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind][0]())
    said = "{% generation %}{{ m.content }}{% endgeneration %}" if marks else "{{ m.content }}"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>"
        "{% else %}" + said + "{% endif %}{% endfor %}"
    )  # fmt: skip
    processor = ChatProcessor(tokenizer)
    answers = ["so 😀", "中", "𝄞x𝄞"]
    turns = [turn for each in answers for turn in (("user", "😃q😃"), ("assistant", each))]
    messages = [{"role": role, "content": content} for role, content in turns]
    for left_out in (None, 3):
        if left_out:
            messages[left_out]["learn"] = False  # type: ignore[assignment]
        made = processor.process({"messages": json.dumps(messages)})
        kept = made["input_ids"][made["labels"] != IGNORED_LABEL].tolist()
        bytes_kept = b"".join(bytes_of(tokenizer.backend_tokenizer, token) for token in kept).replace(b" ", b"")
        expected = "".join(each for number, each in enumerate(answers) if not left_out or number != 1)
        assert bytes_kept.decode() == expected.replace(" ", "")
