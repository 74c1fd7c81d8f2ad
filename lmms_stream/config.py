"""YAML and overrides -> a frozen dataclass. Strict; the only names it knows are the sections of a launch file."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .checks import local_path
from .errors import ConfigError, did_you_mean
from .yaml_text import read_yaml

T = TypeVar("T")
# of LMMS Engine's launch file
LAUNCH_SECTIONS = ("trainer_type", "dataset_config", "model_config", "trainer_args", "extra_kwargs", "config_yaml")


def load_config(config_class: type[T], path: Path, overrides: Sequence[str] = (), *, one_of: Sequence[str] = ()) -> T:
    """The file at `path`, changed by `key.sub=value` overrides, as a `config_class`; one_of: see load_mapping.

    Raises ConfigError for a missing file, YAML that does not parse, an unknown key (with its dotted path and
    the closest valid key) and a value of the wrong type.
    """
    data = load_mapping(path, overrides, one_of=one_of)
    return build_config(config_class, data, source=str(path))


def load_mapping(path: Path, overrides: Sequence[str] = (), *, one_of: Sequence[str] = ()) -> dict[str, Any]:
    """The file at `path`, changed by overrides, as it is; see load_config for the errors.

    one_of: dotted keys that exclude each other: an override of one of them replaces the others of the file.
    """
    path = local_path("config", path)
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file: check the path") from None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: not a readable YAML file: {error}") from error
    data = _of_older_launch_file(data)
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise ConfigError(
            f"{path}: expected a mapping of settings at the top, found {found}: write sections, as docs/settings.md "
            "and docs/lmms_engine.md have them"
        )
    for override in overrides:
        _apply_override(data, override)
    named = {override.partition("=")[0] for override in overrides}
    if any(_section(data, key).get(key.rpartition(".")[2]) is not None for key in named & {*one_of}):
        for key in {*one_of} - named:
            _section(data, key).pop(key.rpartition(".")[2], None)
    return data


def _of_older_launch_file(data: Any) -> Any:
    """LMMS Engine's older launch file, a list of one {type: trainer, config: …}, as a newer one; others as they are.

    There the arguments of the trainer stand beside the sections, in no section of their own.
    """
    if not isinstance(data, list) or len(data) != 1 or not isinstance(data[0], dict):
        return data
    config = data[0].get("config")
    if data[0].get("type") != "trainer" or not isinstance(config, dict) or "trainer_args" in config:
        return data
    sections = {name: value for name, value in config.items() if name in LAUNCH_SECTIONS}
    return {**sections, "trainer_args": {name: value for name, value in config.items() if name not in sections}}


def build_config(config_class: type[T], data: Mapping[str, Any], *, source: str) -> T:
    """A plain mapping as a `config_class`; `source` names it in errors. Numbers in strings are accepted."""
    import pydantic

    _refuse_unknown_keys(config_class, data, path="", source=source)
    try:
        return pydantic.TypeAdapter(config_class).validate_python(dict(data))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except pydantic.ValidationError as error:
        for problem in error.errors():
            ours = problem.get("ctx", {}).get("error")
            if isinstance(ours, ConfigError):  # a rule of a section, which pydantic takes for a ValueError
                raise ConfigError(f"{source}: {ours}") from error
        problems = "; ".join(_problem(each["loc"], each["msg"], each["type"], each["input"]) for each in error.errors())
        raise ConfigError(f"{source}: {problems}") from None


def _refuse_truth_value(hint: Any, value: Any, *, path: str, source: str) -> None:
    """ConfigError for a truth value (true, yes, on) in place of a number, which pydantic takes for 1 or 0."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = {*typing.get_args(hint)} if is_union else {hint}
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
        raise ConfigError(f"{source}: {path} must be a number, got {value}")


def _problem(at: Sequence[int | str], message: str, kind: str, value: Any) -> str:
    got = "" if kind == "missing" else f", got {value!r}"
    remedy = ": write it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
    return f"{'.'.join(str(key) for key in at)}: {message}{got}{remedy}"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    try:
        value = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
    *parents, last = key.split(".")
    for parent in parents:
        if data.get(parent) is None:
            data[parent] = {}
        data = data[parent]
        if not isinstance(data, dict):
            raise ConfigError(f"override {override!r}: {parent!r} holds a value, not a mapping")
    data[last] = value


def _section(data: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping that holds a dotted key; an empty one where there is none."""
    for parent in key.split(".")[:-1]:
        data = data.get(parent) or {}
        if not isinstance(data, dict):
            return {}
    return data


def _refuse_unknown_keys(config_class: Any, data: Any, *, path: str, source: str) -> None:
    if not dataclasses.is_dataclass(config_class) or not isinstance(data, Mapping):
        return
    hints = typing.get_type_hints(config_class)
    valid = [field.name for field in dataclasses.fields(config_class)]
    for key, value in data.items():
        dotted = f"{path}{key}"
        if key not in valid:
            none_near = "look for its name in docs/settings.md" if valid else "this section has no settings"
            remedy = did_you_mean(key, valid, otherwise=none_near, prefix=path)
            raise ConfigError(f"{source}: unknown key {dotted!r}: {remedy}")
        _refuse_unknown_keys_of(hints[key], value, path=dotted, source=source)


def _refuse_unknown_keys_of(hint: Any, value: Any, *, path: str, source: str) -> None:
    """Look for dataclasses inside Optional, list[…] and dict[str, …]."""
    if isinstance(value, bool):
        _refuse_truth_value(hint, value, path=path, source=source)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            _refuse_unknown_keys_of(option, value, path=path, source=source)
    elif isinstance(value, list | tuple) and typing.get_args(hint):
        for number, item in enumerate(value):
            _refuse_unknown_keys_of(typing.get_args(hint)[0], item, path=f"{path}.{number}", source=source)
    elif isinstance(value, Mapping) and len(typing.get_args(hint)) == 2:
        for key, item in value.items():
            key_hint = typing.get_args(hint)[0]
            _refuse_truth_value(key_hint, key, path=f"{path}: a key", source=source)
            if key_hint is int and isinstance(key, float) and not key.is_integer():
                raise ConfigError(f"{source}: {path}: a key must be a whole number, got {key}")
            _refuse_unknown_keys_of(typing.get_args(hint)[1], item, path=f"{path}.{key}", source=source)
    else:
        _refuse_unknown_keys(hint, value, path=f"{path}.", source=source)
