"""Counts of the house that may only fall: its prose, files, names, settings. `python -m tests.house` prints them.

Plain sentences have few pointer words (that, which, where, it, one, …). In torchtitan, Grain, MosaicML Streaming, httpx
and TRL they are 2.8 to 3.9 % of the words of docstrings; a sentence of 12 words or more is hard if they are 26 % of it.
`python -m tests.house --list` prints the hard sentences, `--write` lowers house.json to the counts of today.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import sys
import tokenize
import types
import typing
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lmms_stream.train.run_config import RunConfig

from .arrows import ROOT, files, imports, room_of, trees

BASELINES = Path(__file__).with_suffix(".json")
POINTERS = re.compile(
    r"\b(?:that|those|what|which|where|whose|them|it|its|these|one|ones|others|such|so|as|none|there)\b", re.IGNORECASE
)
OPENERS = re.compile(r"(?:What|Where|Those|The same|Of|Have|That|As)\b")
HARD_WORDS, HARD_SHARE = 12, 0.26
CODE_OF_PAGES = re.compile(r"^```.*?^```|\]\([^)]*\)|`[^`]*`", re.DOTALL | re.MULTILINE)
SMALL_LINES = 60
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_of_python(text: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring, of each docstring and comment."""
    return _prose(ast.parse(text), text)


@cache
def prose_of_module(module: str) -> tuple[tuple[int, str, bool], ...]:
    """The same of a module; several counts need it, and tokens of all modules take seconds."""
    return tuple(_prose(trees()[module], files()[module].read_text()))


def _prose(parsed: ast.Module, text: str) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(parsed):
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string[1:], False


def prose_of_page(text: str) -> Iterator[tuple[int, str, bool]]:
    """The same of each paragraph of a page; tables and code are left out."""
    text = CODE_OF_PAGES.sub(lambda match: " x " + "\n" * match.group().count("\n"), text)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip() and not paragraph.lstrip().startswith("|"):
            yield line, paragraph, True
        line += paragraph.count("\n")


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def hard_sentences(text: str) -> list[str]:
    """Sentences of at least 12 words of which at least 26 % are pointers."""
    found = []
    for sentence in re.split(r"(?<=[.;:])\s+", text):
        words = len(sentence.split())
        if words >= HARD_WORDS and len(POINTERS.findall(sentence)) >= HARD_SHARE * words:
            found.append(sentence)
    return found


def prose(kind: str) -> tuple[dict[str, float], list[str]]:
    """Counts of "python" or "pages", and their hard sentences, each with its file and line."""
    words = pointers = openers = docs = 0
    hard = []
    parts = (
        [(files()[module], prose_of_module(module)) for module in files()]
        if kind == "python"
        else [(path, tuple(prose_of_page(path.read_text()))) for path in pages()]
    )
    for path, paragraphs in parts:
        for line, text, is_doc in paragraphs:
            flat = " ".join(text.split())
            hard += [f"{path.relative_to(ROOT)}:{line}: {sentence}" for sentence in hard_sentences(flat)]
            if is_doc:
                words, pointers, docs = words + len(flat.split()), pointers + len(POINTERS.findall(flat)), docs + 1
                openers += bool(OPENERS.match(flat))
    counts: dict[str, float] = {
        f"{kind}: hard sentences": len(hard),
        f"{kind}: percentage of pointer words": round(100 * pointers / words, 1),
    }
    if kind == "python":
        counts["python: docstrings that begin with a pointer"] = openers
    return counts, hard


def names_defined_twice() -> dict[str, list[str]]:
    """Class name -> modules that define it, of each that several modules define."""
    found = defaultdict(list)
    for module in files():
        for node in trees()[module].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def single_importers() -> list[str]:
    """Modules that a single module imports, from their own folder: they might be joined."""
    importers = defaultdict(set)
    for module in files():
        for other in imports(module)[0]:
            importers[other].add(module)
    found = []
    for module, users in importers.items():
        (user, *others) = users
        is_package = "__init__.py" in (files()[module].name, files()[user].name)
        if not others and not is_package and room_of(module) == room_of(user):
            found.append(module)
    return sorted(found)


def settings_of_a_run() -> list[str]:
    """Names of the settings of a run's YAML file, as Class.field.

    A setting is a field that holds a value. A field that only holds a section is none: the settings of its class count,
    once for all places of the section.
    """
    found: dict[str, None] = {}
    classes: list[type[Any]] = [RunConfig]
    for each in classes:
        hints = typing.get_type_hints(each)
        for field in dataclasses.fields(each):
            sections = sections_of(hints[field.name])
            classes += [section for section in sections if section not in classes]
            if _holds_a_value(hints[field.name]):
                found[f"{_first_of_fields(each, field.name).__name__}.{field.name}"] = None
    return list(found)


def sections_of(hint: Any) -> list[type[Any]]:
    """Dataclasses inside a type, such as Optional[…] and dict[str, …]."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [each for argument in typing.get_args(hint) for each in sections_of(argument)]


def _holds_a_value(hint: Any) -> bool:
    """Whether any option of a type, other than None, is no section."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = {*typing.get_args(hint)} - {type(None)} if is_union else {hint}
    return not all(map(sections_of, options))


def _first_of_fields(config: type[Any], name: str) -> type[Any]:
    """The class that a field is inherited from."""
    return next(each for each in reversed(config.__mro__) if name in getattr(each, "__annotations__", {}))


def counts() -> dict[str, float]:
    lines = Counter({module: len(path.read_text().splitlines()) for module, path in files().items()})
    return {
        **prose("python")[0],
        **prose("pages")[0],
        "files": len(lines),
        "files below 60 lines": sum(number < SMALL_LINES for number in lines.values()),
        "files with one importer, in their own folder": len(single_importers()),
        "class names defined twice": len(names_defined_twice()),
        "settings of a run": len(settings_of_a_run()),
    }


def main() -> None:
    now = counts()
    if "--list" in sys.argv:
        sys.stdout.write("".join(f"{each}\n" for kind in ("python", "pages") for each in prose(kind)[1]))
        sys.stdout.write("".join(f"{name}: {', '.join(each)}\n" for name, each in names_defined_twice().items()))
        sys.stdout.write("".join(f"{each}: one importer\n" for each in single_importers()))
        sys.stdout.write("".join(f"{each}: a setting\n" for each in settings_of_a_run()))
    sys.stdout.write("".join(f"{value:7g}  {name}\n" for name, value in now.items()))
    if "--write" in sys.argv:
        before = json.loads(BASELINES.read_text()) if BASELINES.exists() else now
        lowered = {name: min(value, before.get(name, value)) for name, value in now.items()}
        BASELINES.write_text(json.dumps(before | lowered, indent=2) + "\n")


if __name__ == "__main__":
    main()
