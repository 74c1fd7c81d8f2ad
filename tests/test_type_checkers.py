"""Public names in the eyes of mypy and basedpyright, which read files and import nothing.

`__getattr__` of a package gives its names at run time. A type checker takes a name from an import below TYPE_CHECKING
or from a stub, and sees Any if both lack the name.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from .docs.pages import DOCS, ROOT, pages

MODULES = (
    "lmms_stream", "lmms_stream.converters", "lmms_stream.datasets", "lmms_stream.rl", "lmms_stream.tools.simulate",
    "lmms_stream.train", "lmms_stream.trl",
)  # fmt: skip
# Paths of other projects' modules, below names that exist only at run time.
AT_RUN_TIME = ("lmms_stream.lmms_engine.", "lmms_stream.relax.")
# The core imports no door; other names of lmms_stream.trl are TRL's.
WITHOUT_TYPES = {
    ("lmms_stream.train", "FSDP2SFTTrainer"), ("lmms_stream.trl", "DPOConfig"), ("lmms_stream.trl", "SFTConfig"),
}  # fmt: skip
# Of the pinned packages, without the older ones of `make test-oldest`.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Message(NamedTuple):
    """line: of the file, from 1."""

    line: int
    text: str
    is_error: bool


def exported_names() -> list[tuple[str, str]]:
    return [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


def names_of_pages() -> list[tuple[str, str]]:
    """Names of the reference, and names that the code of a page imports."""
    blocks = [block.text for page in pages() for block in page.blocks if block.language in {"python", "py"}]
    imports = [node for text in blocks for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = {(node.module or "", alias.name) for node in imports for alias in node.names}
    names |= set(re.findall(r"^::: (\S+)\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE))
    return sorted(pair for pair in names if pair[0].startswith("lmms_stream") and not pair[0].startswith(AT_RUN_TIME))


def write_program(path: Path, names: Sequence[tuple[str, str]]) -> None:
    """Write a program that imports a name in each line, and reveals its type."""
    path.write_text(
        "".join(
            f"from {module} import {name} as name_{number}; reveal_type(name_{number})\n"
            for number, (module, name) in enumerate(names)
        )
    )


def messages_of_mypy(program: Path) -> list[Message]:
    """Run mypy with the settings and the cache of `make check`: mypy reads only the program anew."""
    command = [sys.executable, "-m", "mypy", "--output", "json", str(program)]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert run.stderr == ""
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    return [
        Message(row["line"], row["message"], row["severity"] == "error")
        for row in rows
        if Path(row["file"]).name == program.name  # the cache has the messages of an equal program, with its folder
    ]


def messages_of_basedpyright(program: Path) -> list[Message]:
    """Run basedpyright on the program alone. Its Node.js is a package: it downloads nothing."""
    settings = {
        "include": [program.name],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "basic",
        "useLibraryCodeForTypes": False,  # packages without types need not be read
        "stubPath": "stubs",
        "reportMissingModuleSource": False,  # a former name has a stub, and no module
    }
    stub = program.with_name("stubs") / "transformers" / "__init__.pyi"  # its thousands of files take 10 CPU s
    stub.parent.mkdir(parents=True)
    stub.write_text("from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n")
    file = program.with_name("pyrightconfig.json")
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(file), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    rows = json.loads(run.stdout)["generalDiagnostics"]
    return [
        Message(row["range"]["start"]["line"] + 1, row["message"], row["severity"] in {"error", "warning"})
        for row in rows
    ]


@pytest.mark.parametrize("read", [messages_of_mypy, messages_of_basedpyright])
def test_a_type_checker_sees_every_public_name(read: Callable[[Path], list[Message]], tmp_path: Path) -> None:
    names = sorted({*exported_names(), *names_of_pages()} - WITHOUT_TYPES)
    write_program(tmp_path / "public_names.py", names)
    messages = read(tmp_path / "public_names.py")
    assert [(names[line - 1], text) for line, text, is_error in messages if is_error] == []
    types = {names[line - 1]: re.sub(r'^.*? is "(.*)"$', r"\1", text, flags=re.DOTALL) for line, text, _ in messages}
    assert [*types] == names
    assert [name for name, text in types.items() if text == "Any" or "Unknown" in text] == []
