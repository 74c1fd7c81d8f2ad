"""Tokens of model makers' tokenizers, read from their files, equal transformers'."""

from __future__ import annotations

import random
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.processors import tokenizers as product
from lmms_stream.processors.base import IGNORED_LABEL
from lmms_stream.processors.byte_pairs import TRIED_AFTER
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.tokenizers import FastTokenizer
from lmms_stream.versions.transformers import RULES_OF_TOKENIZERS

from ..rounds import in_long_rounds
from . import makers

NUM_TEXTS = 1000
NUM_LINES, MIN_LINES_OF_SCRIPTS = 1_000_000, 50_000  # of foreign files, and of these those beyond ASCII
CHATS = {"qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gemma3": "<end_of_turn>", "gptoss": "<|return|>",
         "deepseek_v3": "<｜end▁of▁sentence｜>"}  # tokenizer -> the last token of an answer  # fmt: skip
SCRIPTS = (
    "aé ßñ ждё αβ हिन्दी 中文字 日本語ひらカナ 한국어 العربية עברית ไทย 🙂 👩\u200d👧 e\u0301 \u200b \ufeff \x00 "
    "\t\n\r\n  \U00010348"
)


def texts(loaded: FastTokenizer) -> list[str]:
    """Return texts of all scripts, with white space at their ends, and with added tokens inside."""
    rng = random.Random(1)
    own = [str(each) for each in loaded.special_tokens.values() if isinstance(each, str)]
    assigned = [chr(code) for code in range(1, 0x20000) if unicodedata.category(chr(code)) not in ("Cs", "Cn")]
    made = []
    for number in range(NUM_TEXTS):
        pieces = [rng.choice((*SCRIPTS, rng.choice(assigned), "word ", " 12,345.6", *own)) for _ in range(number % 40)]
        made.append("".join(pieces))
    return made


@in_long_rounds
@pytest.mark.parametrize("name", makers.TOKENIZERS)
def test_the_files_alone_make_the_tokenizer_of_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    folder = makers.files_of(name)
    theirs = FastTokenizer.of(AutoTokenizer.from_pretrained(folder), name=str(folder))
    read = product._read(folder, False)
    assert read == (theirs if name != "llama2" and RULES_OF_TOKENIZERS else None)  # Llama 2's has no rules
    assert makers.tokenizer(name) == theirs


@in_long_rounds
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*CHATS, "llama2"])
def test_a_conversation_has_the_ids_of_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    source = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    loaded = makers.tokenizer(name)
    source = {"gptoss": makers.templates()["gptoss"]}.get(name) or loaded.chat_templates.get("default", source)
    theirs: Any = AutoTokenizer.from_pretrained(makers.files_of(name))
    if "strftime_now" in source:  # a day in the text differs by design
        source = source.replace('strftime_now("%Y-%m-%d")', '"2024-07-26"')
    theirs.chat_template = source
    processor = ChatProcessor(replace(loaded, chat_templates={"default": source}))
    differ = []
    for text in texts(loaded):
        messages = [makers.user(text), makers.answer(text[::-1]), makers.user("x"), makers.answer(f" {text}\n")]
        ours = processor.process(makers.stored((messages, None)))["input_ids"].tolist()
        if ours != theirs.apply_chat_template(messages, tokenize=True, return_dict=False):
            differ.append(text)
    assert differ == []


def foreign_lines() -> list[str]:
    """Return lines of files in installed packages: code, messages in many languages, tables of characters."""
    lines: list[str] = []
    others: list[str] = []
    for path in sorted(Path(sys.prefix, "lib").rglob("*.*")):
        if path.suffix in (".py", ".json", ".js", ".html") and path.is_file() and path.stat().st_size < 1 << 22:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                if not line.isascii():
                    others.append(line)
                elif len(lines) < NUM_LINES:
                    lines.append(line)
    return [*others, *lines]


@in_long_rounds
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss", "deepseek_v3"])
def test_tiktoken_returns_the_tokens_of_a_makers_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without the result of an earlier trial
    loaded = replace(makers.tokenizer(name))
    loaded._lazy_pairs.num_chars = TRIED_AFTER
    pairs = loaded._lazy_pairs.look()
    assert pairs is not None
    lines = foreign_lines()
    assert len(lines) >= NUM_LINES
    assert sum(not line.isascii() for line in lines) >= MIN_LINES_OF_SCRIPTS
    given = [*texts(loaded), *("".join(lines[at : at + 16]) for at in range(0, len(lines), 16))]
    num_left = 0
    for text in given:
        ids = pairs.ids(text)
        num_left += ids is None
        assert ids is None or ids.tolist() == loaded.encode(text, add_special_tokens=False).ids
    assert num_left < len(given) / 50


@in_long_rounds
@pytest.mark.parametrize("name", CHATS)
def test_a_text_begins_as_the_template_has_it_and_the_end_of_an_answer_is_trained_on(name: str) -> None:
    loaded = makers.tokenizer(name)
    source = loaded.chat_templates.get("default") or makers.templates()["gptoss"]
    processed = ChatProcessor(replace(loaded, chat_templates={"default": source})).process(
        makers.stored(makers.CONVERSATIONS["turns"])
    )
    ids = processed["input_ids"].tolist()
    bos = loaded.special_tokens.get("bos_token")
    begins = loaded.token_id(bos) if bos and "bos_token" in source else None
    assert ids.count(begins) == (begins is not None)
    assert begins in (None, ids[0])
    trained = [token for token, label in zip(ids, processed["labels"].tolist(), strict=True) if label != IGNORED_LABEL]
    assert trained[-1] == loaded.token_id(CHATS[name])


@in_long_rounds
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_measured_without_transformers(name: str) -> None:
    program = (
        "import sys; from lmms_stream.processors.tokenizers import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(makers.files_of(name))], timeout=60, check=True)
