"""YAML and overrides -> a frozen dataclass. Strict; the only names known here are the sections of a launch file."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """Build a `config_class` from a plain mapping. source: name for errors. Numbers in strings are accepted."""
    return _built(config_class, data, path="", source=source)


def _built(config_class: type[T], data: Mapping[str, Any], *, path: str, source: str) -> T:
    import pydantic

    data = _with_known_keys(config_class, data, path=path, source=source)
    try:
        return pydantic.TypeAdapter(config_class).validate_python(data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except pydantic.ValidationError as error:
        for problem in error.errors():
            ours = problem.get("ctx", {}).get("error")
            if isinstance(ours, ConfigError):  # a rule of a section, which pydantic takes for a ValueError
                raise ConfigError(f"{source}: {ours}") from error
        problems = "; ".join(
            path + _problem(each["loc"], each["msg"], each["type"], each["input"]) for each in error.errors()
        )
        raise ConfigError(f"{source}: {problems}") from None


def _refuse_truth_value(hint: Any, value: Any, *, path: str, source: str) -> None:
    """ConfigError for a truth value (true, yes, on) in place of a number, which pydantic takes for 1 or 0."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = {*typing.get_args(hint)} if is_union else {hint}
    if any(each is value for kind in kinds for each in typing.get_args(kind)):  # of a Literal
        return
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
        raise ConfigError(f"{source}: {path} must be a number, got {value}")


def _problem(at: Sequence[int | str], message: str, kind: str, value: Any) -> str:
    got = "" if kind == "missing" else f", got {value!r}"
    remedy = ": write it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
    keys = [str(key) for key in at if str(key) != "int" and "[" not in str(key)]  # others name a type of a union
    return f"{'.'.join(keys)}: {message}{got}{remedy}"


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
    """Return the mapping with a dotted key; an empty mapping if missing."""
    for parent in key.split(".")[:-1]:
        data = data.get(parent) or {}
        if not isinstance(data, dict):
            return {}
    return data


def _with_known_keys(config_class: Any, data: Any, *, path: str, source: str) -> Any:
    """Return the data with new keys in place of old keys; ConfigError for an unknown key."""
    if not dataclasses.is_dataclass(config_class) or not isinstance(data, Mapping):
        return data
    choose = getattr(config_class, "class_for", None)  # of these settings: the class or a subclass
    if choose is not None and (chosen := choose(data)) is not config_class:
        return _built(chosen, data, path=path, source=source)
    data = with_new_keys(config_class, data, path=path, source=source)
    hints = typing.get_type_hints(config_class)
    valid = [field.name for field in dataclasses.fields(config_class)]
    for key, value in data.items():
        if key not in valid:
            none_near = "look for its name in docs/settings.md" if valid else "this section has no settings"
            remedy = did_you_mean(key, valid, otherwise=none_near, prefix=path)
            raise ConfigError(f"{source}: unknown key {path + str(key)!r}: {remedy}")
        data[key] = _with_known_keys_of(hints[key], value, path=f"{path}{key}", source=source)
    return data


def _with_known_keys_of(hint: Any, value: Any, *, path: str, source: str) -> Any:
    """Look for dataclasses inside Optional, list[…] and dict[str, …]."""
    if isinstance(value, bool):
        _refuse_truth_value(hint, value, path=path, source=source)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            value = _with_known_keys_of(option, value, path=path, source=source)
    elif isinstance(value, list | tuple) and typing.get_args(hint):
        of_items = typing.get_args(hint)[0]
        value = [
            _with_known_keys_of(of_items, item, path=f"{path}.{number}", source=source)
            for number, item in enumerate(value)
        ]
    elif isinstance(value, Mapping) and len(typing.get_args(hint)) == 2:
        key_hint, of_values = typing.get_args(hint)
        for key in value:
            _refuse_truth_value(key_hint, key, path=f"{path}: a key", source=source)
            if key_hint is int and isinstance(key, float) and not key.is_integer():
                raise ConfigError(f"{source}: {path}: a key must be a whole number, got {key}")
        value = {
            key: _with_known_keys_of(of_values, item, path=f"{path}.{key}", source=source)
            for key, item in value.items()
        }
    else:
        value = _with_known_keys(hint, value, path=f"{path}.", source=source)
    return value


# Keys of earlier releases. Each is read for one release; a warning names the key to write instead.

Settings = dict[str, Any]
_TOLD: dict[Any, Any] = {}  # the registry of warnings
_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class OldKey:
    """A key of an earlier release.

    new: the replacement key. move: puts the value into the settings. is_old: whether a value is old, for a key with new
    values in this release.
    """

    new: str
    move: Callable[[Settings, Any], None]
    is_old: Callable[[Any], bool] = lambda _: True


def moved(new: str, changed: Callable[[Any], Any] = lambda value: value, *, default: Any = _NO_DEFAULT) -> OldKey:
    """Return the OldKey for a renamed or moved key.

    new: new dotted key. changed: old value -> new value. default: old value to leave out.
    """

    def move(settings: Settings, value: Any) -> None:
        if value != default:
            put(settings, new, changed(value))

    return OldKey(new, move)


def put(settings: Settings, key: str, value: Any) -> None:
    """Set a dotted key; ConfigError if the section has another value for it."""
    *sections, last = key.split(".")
    for name in sections:
        settings = opened_section(settings, name)
    if settings.get(last) and settings[last] != value:
        raise ConfigError(f"{key} is {settings[last]!r}, and an old key of it {value!r}: leave the old key out")
    settings[last] = value


def opened_section(settings: Settings, name: str) -> Settings:
    """Return a section of settings as a dictionary of its own, set in place of the mapping or dataclass given."""
    section: Any = settings.get(name) or {}
    if dataclasses.is_dataclass(section):  # given as a keyword
        section = _given_values(section)
    settings[name] = opened = dict(section)
    return opened


def _given_values(section: Any) -> Settings:
    """Values of a section other than the defaults."""
    default = type(section)()
    names = [each.name for each in dataclasses.fields(section)]
    return {name: getattr(section, name) for name in names if getattr(section, name) != getattr(default, name)}


def old_keys(keys: Mapping[str, OldKey]) -> Callable[[type[T]], type[T]]:
    """Let a dataclass take keys of an earlier release, in files and as keywords, and a dict for a section."""

    def decorate(config_class: type[T]) -> type[T]:
        decorated: Any = config_class
        made: Any = config_class.__init__

        @functools.wraps(made)
        def init(self: T, **given: Any) -> None:
            given = with_new_keys(config_class, given, source=config_class.__name__)
            for name, value in given.items():
                if isinstance(value, Mapping) and (section := section_of(config_class, name)) is not None:
                    given[name] = build_config(section, value, source=f"{config_class.__name__}: {name}")
            made(self, **given)

        decorated.__init__, decorated.OLD_KEYS = init, keys
        return config_class

    return decorate


def section_of(config_class: type[Any], name: str) -> type[Any] | None:
    """Return the dataclass of a field with a section, optional ones included; None for other fields."""
    hint = typing.get_type_hints(config_class).get(name)
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return next((each for each in options if isinstance(each, type) and dataclasses.is_dataclass(each)), None)


def with_new_keys(
    config_class: Any, settings: Mapping[str, Any], *, path: str = "", source: str = "", tells: bool = True
) -> Settings:
    """Return the settings with new keys in place of old keys. tells: warn once for each old key, on rank 0."""
    keys: Mapping[str, OldKey] = getattr(config_class, "OLD_KEYS", {})
    old = [name for name, key in keys.items() if name in settings and key.is_old(settings[name])]
    found = {name: value for name, value in settings.items() if name not in old}
    for name in old:
        if tells:
            _tell_old_key(f"{source}: {path}{name}", path + keys[name].new)
        try:
            keys[name].move(found, settings[name])
        except ConfigError as error:
            raise ConfigError(f"{source}: {path}{error}") from None
    return found


def _tell_old_key(old: str, new: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        message = f"{old} is an old key, which the next release does not read: write {new}"
        warnings.warn_explicit(message, FutureWarning, "lmms_stream", 1, registry=_TOLD)
