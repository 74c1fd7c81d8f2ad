"""What a list says of one of its sources beside where it lies, checked; the conversion's options hold for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, DataError, did_you_mean
from .csv import delimited_of_entry
from .table import Delimited

# As LLaMA-Factory calls them: keys of a message, and what its speakers are called.
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """rows: fields of SchemaOptions and their values. limit: rows at most, of all files that the entry names.

    weight: share of the tokens in training. delimited: how its CSV is written; None as the conversion says it.
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


# What an entry may say of its rows, which are fields of SchemaOptions.
ROW_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "columns": _texts, "roles": _texts, "tags": _tags, "system": _text, "media_root": _text, "kind": _text,
    "learn": _text, "keep": _kept, "map": _text, "filter": _text,
}  # fmt: skip
OTHER_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "split": _text, "limit": num_rows_of, "weight": _weight, "csv": delimited_of_entry
}  # fmt: skip
SETTING_KEYS = (*ROW_KEYS, *OTHER_KEYS)


def settings_of(entry: Mapping[str, Any], *, where: str) -> Settings:
    """Of what an entry says by SETTING_KEYS. DataError, which begins with `where`, for what cannot be meant so.

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
