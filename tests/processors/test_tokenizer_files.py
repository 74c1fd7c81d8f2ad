"""A tokenizer that is read from its files alone is the tokenizer of transformers' AutoTokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.processors import tokenizers as product
from lmms_stream.processors.tokenizers import FastTokenizer, load_tokenizer
from lmms_stream.versions.transformers import RULES_OF_TOKENIZERS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from ..rounds import LONG
from ..versions import IS_5

WORDS = 'a "quoted\\" word, {"a": [1, 2]}\\\\": and \\" more\\\\ 中文 😀 \t\n' * 3
CUT = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDS = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": None}
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def of_qwen() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(CUT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def of_gemma() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


KINDS = {
    "PreTrainedTokenizerFast": byte_level,
    "TokenizersBackend": byte_level,
    "LlamaTokenizerFast": byte_level,
    "Qwen2Tokenizer": of_qwen,
    "GemmaTokenizer": of_gemma,
}
if not IS_5:  # its classes read some of these files otherwise, and all are asked
    KINDS = {"PreTrainedTokenizerFast": byte_level}


def written(folder: Path, kind: str, *, change: Change | None = None, model: dict[str, Any] | None = None) -> Path:
    """Write the files of a tokenizer trained here, changed, beside a config.json of a model."""
    tokenizer = KINDS[kind]()
    special = ["<unk>", "<|end|>", "<|pad|>", '<"\\>', "<pad>", "<eos>", "<bos>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens([AddedToken("<mask>", normalized=False), AddedToken("<|user|>", special=True)])
    described = json.loads(tokenizer.to_str())
    added = {str(token.pop("id")): token for token in json.loads(tokenizer.to_str())["added_tokens"]}
    config = {"tokenizer_class": kind, "added_tokens_decoder": added, **ENDS}
    if kind == "Qwen2Tokenizer":  # training takes them away
        described["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    if kind == "GemmaTokenizer":
        config |= {"unk_token": "<unk>"}
    if change is not None:
        change(config, described)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return folder


def extras(config: dict[str, Any], described: dict[str, Any]) -> None:
    config |= {"additional_special_tokens": ["<|user|>", "<new>"], "image_token": "<image>", "bos_token": "<bos>"}


def named_extras(config: dict[str, Any], described: dict[str, Any]) -> None:
    config |= {"extra_special_tokens": {"boi_token": "<|user|>", "eoi_token": "<new>"}, "add_bos_token": True}


def templates(config: dict[str, Any], described: dict[str, Any]) -> None:
    config |= {"chat_template": [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "2"}]}


def one_template(config: dict[str, Any], described: dict[str, Any]) -> None:
    config |= {"chat_template": "{{ messages }}", "split_special_tokens": True}


def without_tokens(config: dict[str, Any], described: dict[str, Any]) -> None:
    del config["added_tokens_decoder"]
    config |= {"eos_token": {"__type": "AddedToken", **described["added_tokens"][1]}, "legacy": True}
    del config["eos_token"]["id"]


def plain(config: dict[str, Any], described: dict[str, Any]) -> None:
    described |= {"truncation": {"max_length": 9, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}


CHANGES = {change.__name__: change for change in (plain, extras, named_extras, templates, one_template, without_tokens)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_files_alone_make_the_tokenizer_of_transformers(kind: str, change: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "tokenizer", kind, change=CHANGES[change])
    read, theirs = (
        product._read(folder, False),
        FastTokenizer.of(AutoTokenizer.from_pretrained(folder), name=str(folder)),
    )
    assert read == theirs if RULES_OF_TOKENIZERS else read is None
    assert load_tokenizer(str(folder)) == theirs
    assert load_tokenizer(str(folder)).digest == theirs.digest
    for text in (WORDS, "<|end|> <|user|>\n<mask>", "  x <new><image>  ", "\u0301e"):
        if read is not None:
            assert read.encode(text, add_special_tokens=False).offsets == (
                theirs.encode(text, add_special_tokens=False).offsets
            )
            assert [*read.ids([text], add_special_tokens=True)[0]] == [*theirs.ids([text], add_special_tokens=True)[0]]
            assert read.decode(read.encode(text, add_special_tokens=False).ids) == (
                theirs.decode(theirs.encode(text, add_special_tokens=False).ids)
            )


def other_flags(config: dict[str, Any], described: dict[str, Any]) -> None:
    config["added_tokens_decoder"]["1"]["lstrip"] = True


def padded(config: dict[str, Any], described: dict[str, Any]) -> None:
    described["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 4, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    del config["pad_token"]


def other_end(config: dict[str, Any], described: dict[str, Any]) -> None:
    config["eos_token"] = {"__type": "AddedToken", "content": "<new>", "lstrip": True, "normalized": True}


def spaces_in_front(config: dict[str, Any], described: dict[str, Any]) -> None:
    config["add_prefix_space"] = True


def other_cuts(config: dict[str, Any], described: dict[str, Any]) -> None:
    described["normalizer"] = {"type": "NFD"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [other_flags, padded, other_end, spaces_in_front, other_cuts])
def test_files_that_leave_a_question_are_given_to_transformers(kind: str, change: Change, tmp_path: Path) -> None:
    folder = written(tmp_path / "tokenizer", kind, change=change)
    theirs = FastTokenizer.of(AutoTokenizer.from_pretrained(folder), name=str(folder))
    assert product._read(folder, False) in (None, theirs)
    assert load_tokenizer(str(folder)) == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_the_type_of_the_model_decides_as_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    few = ["llama", "qwen2", "qwen3", "gemma3_text", "deepseek_v3", "gpt_oss", "mistral", "phi3", "siglip2"]
    folder = written(tmp_path / "tokenizer", kind)
    for model_type in sorted(TOKENIZER_MAPPING_NAMES) if LONG else few:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        read = product._read(folder, False)
        if read is not None:
            theirs = FastTokenizer.of(AutoTokenizer.from_pretrained(folder), name=str(folder))
            assert read == theirs, model_type


def test_transformers_is_asked_once_about_files_that_leave_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = written(tmp_path / "tokenizer", "PreTrainedTokenizerFast", change=other_flags)
    asked = load_tokenizer(str(folder))
    monkeypatch.setattr(product, "_load", lambda path, trusts: pytest.fail("asked again"))
    assert load_tokenizer(str(folder)) == asked
    (folder / "chat_template.jinja").write_text("{{ other }}", encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        load_tokenizer(str(folder))


def test_reading_the_files_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokenizer", "Qwen2Tokenizer" if IS_5 else "PreTrainedTokenizerFast")
    program = (
        "import sys; from lmms_stream.processors.tokenizers import _read; from pathlib import Path;"
        "assert _read(Path(sys.argv[1]), False) is not None; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    if RULES_OF_TOKENIZERS:
        subprocess.run([sys.executable, "-c", program, str(folder)], timeout=60, check=True)
