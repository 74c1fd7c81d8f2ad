"""Configurations of a folder, by its README.md or its sub-folders -> files of one of them.

Several data sets lie in one folder so: https://huggingface.co/docs/hub/datasets-manual-configuration
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Any

from ...errors import ConfigError, DataError
from ...types import StoredObject
from ...yaml_text import read_yaml
from .detect import named_format
from .listing import is_shown
from .specs import ALL, Spec, glob_pattern, literal_prefix
from .splits import split_of

README = "README.md"
_FRONT_MATTER = re.compile(rb"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
_SHOWN = 10  # configurations that an error names

Configurations = Mapping[str, Mapping[str, str | None]]  # name -> key of a file -> its split; None if that is not told


def configurations_of(keys: Iterable[str], readme: bytes | None) -> Configurations:
    """Return the configurations that have files: those that a README describes, else folders with splits of their own.

    >>> list(configurations_of(["main/train-0.jsonl", "socratic/train-0.jsonl", "LICENSE"], None))
    ['main', 'socratic']
    """
    shown = [key for key in keys if is_shown(key)]
    described = {name: _matching(patterns, shown) for name, patterns in _described(readme or b"").items()}
    described = {name: files for name, files in described.items() if files}
    if described:
        return described
    found: dict[str, dict[str, str | None]] = {}
    for key in shown:
        folder = "" if named_format(key)[0] in (None, "text", "images") else _folder_of_splits(key)
        if folder:
            found.setdefault(folder, {})[key] = None
    return found


def files_of_configuration(
    spec: Spec, files: Sequence[StoredObject], configurations: Configurations
) -> tuple[list[StoredObject], dict[str, str]]:
    """Return the files of the configuration that a spec names, and the splits that a README gives them.

    All files if there are no two configurations. DataError if none of several is named, or one that is not there.
    """
    wanted = spec.config
    shown = ", ".join(list(configurations)[:_SHOWN]) + (", …" if len(configurations) > _SHOWN else "")
    if wanted is None and len(configurations) > 1:
        one, all_of_them = (quote(spec.folder_text(config=name)) for name in (next(iter(configurations)), ALL))
        raise DataError(
            f"{spec.path}: holds {len(configurations)} configurations, {shown}: name one, as {one}, or all of them, as "
            f"{all_of_them}"
        )
    if wanted not in (None, ALL, *configurations):
        raise DataError(
            f"{spec.path}: holds no configuration {wanted}, found {shown or 'none'}: correct or leave out ?config="
        )
    splits: dict[str, str] = {}
    for name, each in configurations.items():
        if wanted in (None, ALL, name):
            splits = {**{key: split for key, split in each.items() if split}, **splits}
    if wanted not in (None, ALL):
        files = [file for file in files if file.key in configurations[str(wanted)]]
    return list(files), splits


def _folder_of_splits(key: str) -> str:
    """Return the folder in which the first name of a split stands, without folders that name a value (lang=en)."""
    names = key.split("/")
    at = next((number for number, name in enumerate(names) if split_of(name)), 0)
    return "/".join(name for name in names[:at] if "=" not in name)


def _matching(patterns: Sequence[tuple[str | None, str]], keys: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for split, pattern in patterns:
        pattern = pattern.removeprefix("./")
        matches, prefix = glob_pattern(pattern), literal_prefix(pattern)
        found = {**{key: split for key in keys if key.startswith(prefix) and matches.fullmatch(key)}, **found}
    return found


def _described(readme: bytes) -> dict[str, list[tuple[str | None, str]]]:
    """Return name -> splits and patterns of the configurations in the front matter of a README.md."""
    matched = _FRONT_MATTER.match(readme.removeprefix(b"\xef\xbb\xbf"))
    try:
        content = read_yaml(matched[1]) if matched else None
    except ConfigError:
        return {}  # a README is written for people: lines between two rules need not be YAML
    entries = content.get("configs") if isinstance(content, dict) else None
    return {
        str(entry["config_name"]): [
            (split, f"{entry['data_dir']}/{pattern}" if entry.get("data_dir") else pattern)
            for split, pattern in _patterns(entry.get("data_files", "**" if entry.get("data_dir") else None))
        ]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and "config_name" in entry
    }


def _patterns(data_files: Any, split: str | None = None) -> list[tuple[str | None, str]]:
    """Return the splits and patterns of `data_files`: a pattern, a list of patterns, or of splits with such."""
    if isinstance(data_files, str):
        return [(split, data_files)]
    if isinstance(data_files, list):
        return [found for each in data_files for found in _patterns(each, split)]
    if isinstance(data_files, dict) and "path" in data_files:
        return _patterns(data_files["path"], str(data_files["split"]) if "split" in data_files else None)
    return []
