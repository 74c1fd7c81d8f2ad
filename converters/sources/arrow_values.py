"""Values of Arrow columns -> values of rows: what their types, and the features of `datasets`, say beyond Arrow's own.

Arrow gives every struct of a column the fields of all of them, null where a struct had none of its own: such fields are
left out again. JSON is parsed, maps of texts become objects, class labels their names, and decimals the texts of their
digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
import pyarrow

from ...processors.json_text import parsed

Convert = Callable[[Any], Any]  # a value that is not null, as pyarrow gives it -> as its row has it

_MEDIA_FIELDS = {"bytes", "path"}  # a struct of these is an image, audio or video, and read as a whole


def converters(schema: Any) -> dict[str, Convert]:
    """What the values of columns go through; columns whose values stay as pyarrow gives them are absent."""
    features = _features(schema)
    found = {field.name: _convert(field.type, features.get(field.name)) for field in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def _features(schema: Any) -> Mapping[str, Any]:
    """Column -> its feature as `datasets` writes it into the metadata of a schema; none where another wrote it."""
    try:
        features = orjson.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, LookupError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _convert(kind: Any, feature: Any) -> Convert | None:
    if pyarrow.types.is_dictionary(kind):
        return _convert(kind.value_type, feature)
    told = feature.get("_type") if isinstance(feature, dict) else None
    if isinstance(kind, pyarrow.JsonType) or (told == "Json" and pyarrow.types.is_string(kind)):
        return _parse
    if told == "ClassLabel" and pyarrow.types.is_integer(kind) and feature.get("names"):
        return partial(_label, names=feature["names"])
    if pyarrow.types.is_decimal(kind):
        return str
    if pyarrow.types.is_map(kind) and pyarrow.types.is_string(kind.key_type):
        return partial(_object, convert=_convert(kind.item_type, None))
    if pyarrow.types.is_struct(kind):
        return _convert_struct(kind, {} if isinstance(told, str) else feature)
    if _is_list(kind):
        inner = feature.get("feature") if isinstance(told, str) else None
        convert = _convert(kind.value_type, inner)
        return None if convert is None else partial(_each, convert=convert)
    return None


def _convert_struct(kind: Any, feature: Any) -> Convert | None:
    fields = {field.name: field.type for field in kind}
    if fields.keys() == _MEDIA_FIELDS:
        return None
    features = feature if isinstance(feature, dict) else {}
    found = {name: _convert(inner, features.get(name)) for name, inner in fields.items()}
    converts = {name: convert for name, convert in found.items() if convert is not None}
    return partial(_fields, converts=converts) if converts else _without_nulls


def _is_list(kind: Any) -> bool:
    types = pyarrow.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    for inner in value.values():
        if inner is None:
            return {name: inner for name, inner in value.items() if inner is not None}
    return value


def _fields(value: dict[str, Any], *, converts: Mapping[str, Convert]) -> dict[str, Any]:
    kept = _without_nulls(value)
    for name in converts.keys() & kept.keys():
        kept[name] = converts[name](kept[name])
    return kept


def _each(values: list[Any], *, convert: Convert) -> list[Any]:
    return [value if value is None else convert(value) for value in values]


def _object(pairs: list[tuple[str, Any]], *, convert: Convert | None) -> Any:
    """Return the object of a map's pairs; the pairs as they are if a key is there twice."""
    found = {key: value if value is None or convert is None else convert(value) for key, value in pairs}
    return found if len(found) == len(pairs) else pairs


class ClassName(str):
    """The name of a class, with its number, by which `datasets` stores it."""

    number: int

    @staticmethod
    def of(name: str, number: int) -> ClassName:
        made = ClassName(name)
        made.number = number
        return made


def _label(value: int, *, names: list[str]) -> str | None:
    """A class's name; None for -1, by which `datasets` says that there is none."""
    return ClassName.of(names[value], value) if 0 <= value < len(names) else None


def _parse(text: str) -> Any:
    return parsed(text.encode())
