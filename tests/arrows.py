"""Which file imports which: `python -m tests.arrows` prints the rooms and the arrows between them.

A room is a folder of the package, named by its path below lmms_stream ("plan", "train/model"); what lies directly in
the package is a room each ("errors"). All imports count: those of a function, and those for type checkers alone.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "lmms_stream"


@cache
def files() -> dict[str, Path]:
    """Dotted name -> file, of all modules and packages, those of converters/ as lmms_stream.converters."""
    found = {}
    for folder, package in ((ROOT / PACKAGE, PACKAGE), (ROOT / "converters", f"{PACKAGE}.converters")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == PACKAGE and parts[0] == "converters":
                continue  # the link for type checkers
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def room_of(module: str) -> str:
    """Where a module lies: "plan", "train/model"; its own name where it lies in no folder."""
    names = module.split(".")[1:]
    is_folder = files()[module].name == "__init__.py"
    return "/".join(names if is_folder or len(names) < 2 else names[:-1]) or "__init__"


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax trees of all modules. Collections of garbage would only walk them."""
    gc.disable()
    parsed = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in files().items()}
    gc.enable()
    return parsed


@cache
def imports(module: str, *, at_start: bool = False) -> tuple[frozenset[str], frozenset[str]]:
    """Modules of this project that a module imports, and the top names of other libraries.

    at_start: only imports that run when the module itself is imported.
    """
    ours, theirs = set(), set()
    package = module if files()[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in trees()[module].body if at_start else ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*base, *([node.module] if node.module else [])])
            ours |= {name if (name := f"{source}.{alias.name}") in files() else source for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            theirs.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            theirs |= {alias.name.split(".")[0] for alias in node.names}
    return frozenset(ours - {module}), frozenset(theirs)


def arrows() -> Counter[tuple[str, str]]:
    """How many imports lead from one room to another."""
    found: Counter[tuple[str, str]] = Counter()
    for module in files():
        for other in imports(module)[0]:
            pair = room_of(module), room_of(other)
            found[pair] += pair[0] != pair[1]
    return +found


def circles() -> list[list[str]]:
    """Groups of files that import each other, directly or through others."""
    reached = {module: reached_from(module) for module in files()}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other]) or ()) for module in files()}
    return [list(group) for group in sorted(groups) if group]


def reached_from(module: str, *, at_start: bool = False) -> set[str]:
    """Modules that a module imports, directly or through others. at_start: see imports."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for other in imports(waiting.pop(), at_start=at_start)[0] - found:
            found.add(other)
            waiting.append(other)
    return found


def main() -> None:
    rooms = Counter(room_of(module) for module, path in files().items() if path.name != "__init__.py")
    for room in sorted({room_of(module) for module in files()}):
        targets = ", ".join(f"{b} {count}" for (a, b), count in sorted(arrows().items()) if a == room)
        sys.stdout.write(f"{room} ({rooms[room]}){' -> ' if targets else ''}{targets}\n")
    sys.stdout.write(f"circles between files: {circles() or 'none'}\n")


if __name__ == "__main__":
    main()
