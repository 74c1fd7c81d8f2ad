"""Values of Arrow columns -> values of rows, by the columns' types and the features of `datasets`.

Arrow gives each struct of a column the fields of all structs, with null for a missing field: null fields are removed.
JSON is parsed, maps of texts become objects, class labels become names, and decimals become texts of digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
import pyarrow

from ...processors.json_text import parsed

Convert = Callable[[Any], Any]  # a non-null value of pyarrow -> a value of the row

_MEDIA_FIELDS = {"bytes", "path"}  # a struct of these fields is an image, audio or video, and stays unchanged


def converters(schema: Any) -> dict[str, Convert]:
    """Return column -> conversion of its values; columns whose values stay unchanged are left out."""
    features = _features(schema)
    found = {field.name: _convert(field.type, features.get(field.name)) for field in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def _features(schema: Any) -> Mapping[str, Any]:
    """Return column -> feature from the metadata that `datasets` writes into a schema; {} without this metadata."""
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
    """Return the pairs of a map in an object; the unchanged pairs if a key occurs twice."""
    found = {key: value if value is None or convert is None else convert(value) for key, value in pairs}
    return found if len(found) == len(pairs) else pairs


class ClassName(str):
    """Name of a class, with the number that `datasets` stores for it."""

    number: int

    @staticmethod
    def of(name: str, number: int) -> ClassName:
        made = ClassName(name)
        made.number = number
        return made


def _label(value: int, *, names: list[str]) -> str | None:
    """Return the name of a class; None for -1, the number for no class in `datasets`."""
    return ClassName.of(names[value], value) if 0 <= value < len(names) else None


def _parse(text: str) -> Any:
    return parsed(text.encode())
