"""Splits of a folder -> its files of one of them, by the names that `datasets` knows splits by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from shlex import quote

from ...errors import DataError
from ...types import StoredObject
from .specs import Spec

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
