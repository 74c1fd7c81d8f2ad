from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lmms_stream
import pytest

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_imported_from_its_home() -> None:
    assert len(set(lmms_stream.__all__)) == len(lmms_stream.__all__)
    for name in lmms_stream.__all__:
        value = getattr(lmms_stream, name)
        assert name == "__version__" or value.__name__ == name
    assert dir(lmms_stream) == sorted(lmms_stream.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Smell'"):
        _ = lmms_stream.Smell


def test_what_type_checkers_see_is_what_is_exported() -> None:
    tree = ast.parse((ROOT / "lmms_stream" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == lmms_stream._HOME


def test_public_classes_and_functions_have_docstrings() -> None:
    for name in lmms_stream.__all__:
        value = getattr(lmms_stream, name)
        if not isinstance(value, str):
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), f"{name} has a dataclass's default docstring"


@pytest.mark.parametrize("name", ["FSDP2SFTTrainer", "PackedStreamingDataset", "PackPlan", "convert"])
def test_a_public_name_is_the_first_thing_that_can_be_imported(name: str) -> None:
    script = f"from lmms_stream import {name}; assert {name}.__name__ == {name!r}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
