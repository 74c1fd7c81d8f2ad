"""The demo's corpus and tokenizer, which are made without what takes seconds to import."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from lmms_stream.demo.corpus import CHAT_TEMPLATE, _statements
from transformers import PreTrainedTokenizerFast


def test_the_files_of_the_tokenizer_are_those_that_transformers_saves(tokenizer: Path, tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"), pad_token="<|pad|>", eos_token="<|end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(tmp_path)
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert saved == {path.name: path.read_bytes() for path in tokenizer.iterdir()}


def test_functions_and_classes_are_found_in_the_order_of_ast_walk() -> None:
    found = 0
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "asyncio").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        expected = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert [node for node in _statements(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)] == expected
        found += len(expected)
    assert found > 500
