"""What the user types -> what it names: slices, globs, members."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ...checks import plain_path
from ...errors import DataError
from .settings import Settings

SLICE = re.compile(r"(.*)@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]", re.DOTALL)
SPLIT = re.compile(r"(.*)\?split=([^/?&=]+)", re.DOTALL)
WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """text: as typed, for messages. path: without slice and key. key: a member of a JSON object (file.json#key).

    rows: of what it names. split: of a folder (folder?split=train). format: insisted on. folder: of its media, where it
    is said. settings: what a list says of it beside.
    """

    text: str
    path: str
    rows: slice = field(default_factory=lambda: slice(None))
    key: str | None = None
    split: str | None = None
    format: str | None = None
    folder: str | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def is_hub(self) -> bool:
        return self.path.startswith("hf:")

    @property
    def is_remote(self) -> bool:
        return "://" in self.path and not self.is_hub

    @property
    def is_sliced(self) -> bool:
        return self.rows != slice(None)


def parse_spec(text: str, *, format: str | None = None, folder: str | None = None) -> Spec:
    """What one spec says.

    >>> parse_spec("data/train.json#rows@[10:-5]").path
    'data/train.json'
    """
    path, rows, key = text, slice(None), None
    if not Path(text).exists() and (matched := SLICE.fullmatch(text)):
        path = matched[1]
        rows = slice(*(int(bound) if bound else None for bound in matched.groups()[1:]))
    elif "@[" in text and text.endswith("]") and not Path(text).exists():
        raise DataError(f"{text}: {text[text.rindex('@[') :]} is no slice of rows: write @[START:STOP]")
    folder = None if folder is None else plain_path("data_folder", folder)
    path = plain_path("source", path)
    if path.startswith("hf:"):
        return Spec(text=text, path=path, rows=rows, format=format, folder=folder)
    split = None
    if not Path(path).exists() and (named := SPLIT.fullmatch(path)):
        path, split = named[1], named[2]
    if "#" in path and not Path(path).exists():
        path, _, key = path.rpartition("#")
    if not path:
        raise DataError(f"{text!r} names no file, folder or dataset: name one")
    if format == "hf_dataset":
        path = f"hf:{path}?split={split}" if split else f"hf:{path}"
    return Spec(text=text, path=path, rows=rows, key=key or None, split=split, format=format, folder=folder)


def has_wildcard(path: str) -> bool:
    return WILDCARD.search(path) is not None


def glob_base(path: str) -> tuple[str, str]:
    """The folder of a glob before its first wildcard, and the pattern below it.

    >>> glob_base("s3://bucket/chats/*/part-*.jsonl")
    ('s3://bucket/chats', '*/part-*.jsonl')
    """
    matched = WILDCARD.search(path)
    assert matched is not None
    base, separator, _ = path[: matched.start()].rpartition("/")
    return base + separator if base in ("", "/") else base, path[len(base) + len(separator) :]


def literal_prefix(pattern: str) -> str:
    """What names that match a pattern begin with."""
    matched = WILDCARD.search(pattern)
    return pattern[: matched.start()] if matched else pattern


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Of names: * and ? do not cross a slash, ** does, [abc] and [!abc] are sets of characters.

    >>> bool(glob_pattern("**/part-?.jsonl").fullmatch("a/b/part-1.jsonl"))
    True
    """
    rules = {r"**/": r"(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = ""
    for token in re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])", pattern):
        if token.startswith("[") and token.endswith("]") and len(token) > 2:
            body = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            expression += f"[^/{body[1:]}]" if body.startswith("!") else f"[{body}]"
        else:
            expression += rules.get(token) or re.escape(token)
    return re.compile(expression, re.DOTALL)


def resolved(text: str, base: Path) -> str:
    """A spec of a list that lies in the folder `base`, whose relative paths start there."""
    if text.startswith("hf:"):
        rest = text.removeprefix("hf:").removeprefix("//")
        name = re.split(r"[?]|@\[", rest, maxsplit=1)[0]
        return f"hf:{base / rest}" if (base / name).exists() else text
    return text if "://" in text else str(base / text)
