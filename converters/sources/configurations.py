"""Configurations of a folder, by its README.md or its sub-folders -> files of one of them.

Several data sets lie in one folder so: https://huggingface.co/docs/hub/datasets-manual-configuration
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Any

from ...errors import ConfigError, DataError
from ...types import StoredObject
from ...yaml_text import read_yaml
from .detect import named_format
from .listing import is_shown
from .specs import ALL, Spec, glob_pattern, literal_prefix

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


# Splits of a folder -> its files of one of them, by the names that `datasets` knows splits by.

# Names that stand alone in the path of a file, see https://huggingface.co/docs/datasets/repository_structure
_NAMES = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
_MARKED = re.compile(rf"(?<![^/\-._ 0-9=])({'|'.join(_NAMES)})(?![^/\-._ 0-9])", re.IGNORECASE)
# Numbered files of a split whose name says more, as `datasets` writes those of train_sft and train_prefs.
_NUMBERED = re.compile(rf"(?:.*/)?((?:{'|'.join(_NAMES)})[_.]\w+)-\d{{5}}-of-\d{{5}}\b[^/]*", re.IGNORECASE | re.DOTALL)


def split_of(key: str) -> str | None:
    """The split that a file is of, by its path; of several marks the last, which is nearest to its name.

    >>> split_of("data/train-00000-of-00002.parquet"), split_of("dev/a.jsonl"), split_of("latest.csv")
    ('train', 'validation', None)
    """
    found = _MARKED.findall(key)
    return _NAMES[found[-1].lower()] if found else None


def files_of_split(
    spec: Spec,
    files: Sequence[StoredObject],
    *,
    only_if_all: bool = False,
    are_rows: bool = False,
    told: Mapping[str, str] | None = None,
    several: str = "all files by a glob",
) -> list[StoredObject]:
    """The files of the split that is wanted, or all where they are not of several.

    only_if_all: some without a split mean that there are none. are_rows: files are rows, whose names mean little.
    told: splits of files by key, whatever their names are. several: how to name several, for the error. DataError for
    several of which none is wanted, and for one that is wanted and not there.
    """
    told, wanted = told or {}, spec.split
    splits = [_usual(told[file.key]) if file.key in told else split_of(file.key) for file in files]
    named = [told.get(file.key) or _named(file.key) or split for file, split in zip(files, splits, strict=True)]
    chosen, is_mixed = list(files), not (only_if_all and None in splits)
    if wanted is not None:
        known = named if wanted in named else splits
        split = wanted if wanted in named else _usual(wanted)
        if split not in known:
            raise DataError(
                f"{spec.path}: holds no files of split {wanted}, found {_listed(Counter(filter(None, named)))}: "
                "correct ?split="
            )
        chosen, is_mixed = [file for file, each in zip(files, known, strict=True) if each == split], True
        named = [each for each, of in zip(named, known, strict=True) if of == split]
    counts = Counter(split for split in named if split)
    if None in named and not are_rows and not all(split.startswith("train") for split in counts):
        counts["none"] = named.count(None)  # data to train on, next to data to test with
    if len(counts) > 1 and is_mixed:
        first = next((each for each in sorted(counts) if each.startswith("train")), min(counts.keys() - {"none"}))
        raise DataError(
            f"{spec.path}: holds splits {_listed(counts)}: name one, as {quote(spec.folder_text(split=first))}, or "
            f"{several}"
        )
    return chosen


def _usual(split: str) -> str:
    return _NAMES.get(split.lower(), split)


def _named(key: str) -> str | None:
    """The whole name of the split of a numbered file, if it says more than those of all datasets."""
    found = _NUMBERED.fullmatch(key)
    return found[1] if found else None


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{split} ({count} files)" for split, count in sorted(counts.items())) or "none"
