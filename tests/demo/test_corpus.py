"""The demo's corpus and tokenizer, which are made without what takes seconds to import."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from lmms_stream.tools.demo.corpus import CHAT_TEMPLATE, _statements
from transformers import PreTrainedTokenizerFast

from tests.versions import IS_5


def test_the_files_of_the_tokenizer_are_those_that_transformers_saves(tokenizer: Path, tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"), pad_token="<|pad|>", eos_token="<|end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    if IS_5:  # which says the same otherwise
        loaded.save_pretrained(tmp_path / "loaded")
        tokenizer = tmp_path / "loaded"
    fast.save_pretrained(tmp_path / "saved")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    if IS_5:
        del saved["tokenizer_config.json"]
    assert saved == {name: (tokenizer / name).read_bytes() for name in saved}
    for name in ("special_tokens_map", "model_max_length", "clean_up_tokenization_spaces"):
        assert getattr(loaded, name) == getattr(fast, name)


def test_functions_and_classes_are_found_in_the_order_of_ast_walk() -> None:
    found = 0
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "asyncio").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        expected = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert [node for node in _statements(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)] == expected
        found += len(expected)
    assert found > 500
