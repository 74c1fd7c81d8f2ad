"""Typed text and entries of lists -> specs: names (with slices, globs, members), and settings of one source.

An existing file, folder, object or prefix of exactly the typed name comes before any other meaning. The conversion's
options apply to settings that a source does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ...checks import plain_path
from ...errors import ConfigError, DataError, StorageError, did_you_mean
from ...storage.storage import shared_storage
from .csv import delimited_of_entry
from .table import Delimited

# LLaMA-Factory's tags: keys of a message, and names of speakers.
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a source. rows: fields of SchemaOptions and their values. limit: maximum rows of all files of the
    entry.

    weight: share of the training tokens. delimited: settings of its CSV; None for the conversion's settings.
    """

    rows: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    weight: float | None = None
    delimited: Delimited | None = None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r}: expected text")
    return value


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise ConfigError(f"{value!r}: expected names and texts, as {{NAME: TEXT}}")
    return dict(value)


def _tags(value: Any) -> dict[str, str]:
    for name in _texts(value):
        if name not in TAGS:
            raise ConfigError(f"{value!r}: there is no tag {name!r}: {did_you_mean(name, TAGS)}")
    return dict(value)


def _kept(value: Any) -> tuple[str, ...] | bool:
    if isinstance(value, bool):
        return value
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{value!r}: expected names of columns, or true for all")
    return tuple(names)


def num_rows_of(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{value!r}: expected a number of rows, at least 1")
    return value


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{value!r}: expected a share of the tokens, above 0")
    return float(value)


# Keys of an entry about its rows, which are fields of SchemaOptions.
ROW_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "columns": _texts, "roles": _texts, "tags": _tags, "system": _text, "media_root": _text, "kind": _text,
    "learn": _text, "keep": _kept, "map": _text, "filter": _text,
}  # fmt: skip
OTHER_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "split": _text, "limit": num_rows_of, "weight": _weight, "csv": delimited_of_entry
}  # fmt: skip
SETTING_KEYS = (*ROW_KEYS, *OTHER_KEYS)


def settings_of(entry: Mapping[str, Any], *, where: str) -> Settings:
    """Return the settings of an entry, by SETTING_KEYS. DataError, starting with `where`, for an invalid value.

    >>> settings_of({"path": "a.csv", "limit": 10, "columns": {"prompt": "q"}}, where="").rows
    {'columns': {'prompt': 'q'}}
    """
    said: dict[str, Any] = {}
    for key, check in {**ROW_KEYS, **OTHER_KEYS}.items():
        if entry.get(key) is None:
            continue
        try:
            said[key] = check(entry[key])
        except ConfigError as error:
            raise DataError(f"{where}: {'' if key == 'csv' else f'{key} is '}{error}") from error
    rows = {key: said[key] for key in ROW_KEYS if key in said}
    return Settings(rows=rows, limit=said.get("limit"), weight=said.get("weight"), delimited=said.get("csv"))


SLICE = re.compile(r"(.*)@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]", re.DOTALL)
CHOICE = re.compile(r"(.*)\?((config|split)=[^?&=]+)(?:&((?!\3=)(?:config|split)=[^?&=]+))?", re.DOTALL)
WILDCARD = re.compile(r"[*?\[]")
KEY = re.compile(r"(.*)(?<!\[)#(.*)", re.DOTALL)  # in a glob, [#] stands for the character
SYNTAX = re.compile(r"[*?\[#]")  # characters of names with a meaning in typed text
ALL = "*"  # configurations of a folder, datasets of a list


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A parsed source name. text: typed text, for messages. path: without slice and key. key: a member of a JSON object
    (file.json#key).

    rows: slice. config, split: of a folder (folder?config=main&split=train). format: requested format. folder: of its
    media, if named. settings: from a list. is_literal: whether a file or folder has exactly the name `path`, despite
    characters of globs.
    """

    text: str
    path: str
    rows: slice = field(default_factory=lambda: slice(None))
    key: str | None = None
    config: str | None = None
    split: str | None = None
    format: str | None = None
    folder: str | None = None
    settings: Settings = field(default_factory=Settings)
    is_literal: bool = False

    @property
    def nor_text(self) -> str:
        """Part of an error for a missing path: the typed text does not exist, either."""
        return "" if plain_path("source", self.text) == self.path else f", nor anything called {self.text!r}"

    def folder_text(self, **chosen: str) -> str:
        """Return the typed folder, with its config and split or with the given values."""
        said = {"config": self.config, "split": self.split, **chosen}
        query = "&".join(f"{key}={value}" for key, value in said.items() if value is not None)
        return f"{self.path.rstrip('/')}?{query}" if query else self.path.rstrip("/")

    @property
    def is_hub(self) -> bool:
        return self.path.startswith("hf:")

    @property
    def is_remote(self) -> bool:
        return "://" in self.path and not self.is_hub

    @property
    def is_glob(self) -> bool:
        return not self.is_literal and has_wildcard(self.path)

    @property
    def is_sliced(self) -> bool:
        return self.rows != slice(None)


def parse_spec(text: str, *, format: str | None = None, folder: str | None = None) -> Spec:
    """Parse one spec.

    >>> parse_spec("data/train.json#rows@[10:-5]").path
    'data/train.json'
    """
    path, rows, chosen, key = plain_path("source", text), slice(None), dict[str, str](), None
    is_literal = _is_literal(path)
    if not is_literal and (matched := SLICE.fullmatch(path)):
        path = matched[1]
        rows = slice(*(int(bound) if bound else None for bound in matched.groups()[1:]))
        is_literal = _is_literal(path)
    elif not is_literal and "@[" in path and path.endswith("]"):
        raise DataError(f"{text}: {text[text.rindex('@[') :]} is no slice of rows: write @[START:STOP]")
    folder = None if folder is None else plain_path("data_folder", folder)
    if path.startswith("hf:"):
        return Spec(text=text, path=path, rows=rows, format=format, folder=folder)
    if not is_literal and (named := CHOICE.fullmatch(path)):
        path, chosen = named[1], dict(each.split("=") for each in (named[2], named[4]) if each)
        is_literal = _is_literal(path)
    head = 0 if is_literal else _literal_head(path, is_there)
    if not is_literal and (member := KEY.fullmatch(path, head)):
        path, key = path[:head] + member[1], member[2]
        is_literal = _is_literal(path)
    if not path:
        raise DataError(f"{text!r} names no file, folder or dataset: name one")
    if format == "hf_dataset":
        path = f"hf:{path}?{urlencode(chosen)}" if chosen else f"hf:{path}"
    return Spec(
        text=text,
        path=path,
        rows=rows,
        key=key or None,
        config=chosen.get("config"),
        split=chosen.get("split"),
        format=format,
        folder=folder,
        is_literal=is_literal,
    )


def _is_literal(path: str) -> bool:
    """Return whether a name with special characters exists literally."""
    return SYNTAX.search(path) is not None and is_there(path)


def _literal_head(path: str, is_there: Callable[[str], bool]) -> int:
    """Number of leading characters that name existing folders; these characters are literal."""
    head = 0
    while (found := SYNTAX.search(path, head)) and (end := path.find("/", found.start())) >= 0:
        if not is_there(path[:end]):
            break
        head = end
    return head


def is_there(path: str) -> bool:
    """Return whether a file, folder, object or prefix has exactly this name; for a store, its names are listed.

    Errors of a store give False; reading the source raises them later.
    """
    if "://" not in path or path.startswith("hf:"):
        return Path(path).exists()
    parent, key = parent_and_key(path)
    if parent.endswith(":"):  # a bucket
        return False
    try:
        found = shared_storage(parent).list_objects(key)
    except StorageError:
        return False
    return any(file.key == key or file.key.startswith(f"{key}/") for file in found)


def parent_and_key(url: str) -> tuple[str, str]:
    """Return the URL of the store directly above an object, and the object's key; names may start with slashes.

    >>> parent_and_key("s3://bucket/chats//a.jsonl")
    ('s3://bucket/chats', '/a.jsonl')
    """
    before, _, name = url.rstrip("/").rpartition("/")
    parent = before.rstrip("/")
    return parent, before[len(parent) :] + name


def has_wildcard(path: str) -> bool:
    return WILDCARD.search(path) is not None


def glob_base(path: str, *, is_there: Callable[[str], bool] = lambda folder: False) -> tuple[str, str]:
    """Return the folder of a glob before its first wildcard, and the pattern below the folder.

    is_there: whether a folder exists whose name has wildcard characters; these are then literal.

    >>> glob_base("s3://bucket/chats/*/part-*.jsonl")
    ('s3://bucket/chats', '*/part-*.jsonl')
    >>> glob_base("runs/run[1]/*.jsonl", is_there=lambda folder: folder == "runs/run[1]")
    ('runs/run[1]', '*.jsonl')
    """
    matched = WILDCARD.search(path, _literal_head(path, is_there))
    base, separator, _ = (path[: matched.start()] if matched else path).rpartition("/")
    return base + separator if base in ("", "/") else base, path[len(base) + len(separator) :]


def literal_prefix(pattern: str) -> str:
    """Return the common beginning of all names that match a pattern."""
    matched = WILDCARD.search(pattern)
    return pattern[: matched.start()] if matched else pattern


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Return an expression for names: * and ? do not match a slash, ** does, [abc] and [!abc] are sets of characters.

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
    """Return a spec of a list with its relative path resolved from the list's folder `base`."""
    if text.startswith("hf:"):
        rest = text.removeprefix("hf:").removeprefix("//")
        name = re.split(r"[?]|@\[", rest, maxsplit=1)[0]
        return f"hf:{base / rest}" if (base / name).exists() else text
    return text if "://" in text else str(base / text)
