"""Lists of sources, in YAML -> specs, each with the settings of its entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ...errors import DataError, did_you_mean
from ...storage.disk_errors import disk_error
from .dataset_info import is_dataset_info
from .settings import SETTING_KEYS, settings_of
from .specs import Spec, parse_spec, resolved

LISTS = (".yaml", ".yml")
SOURCE_KEYS = ("path", "data_folder", "data_type")  # as LMMS Engine calls them
YAML_KEYS = (*SOURCE_KEYS, *SETTING_KEYS)


def yaml_specs(path: Path, *, format: str | None) -> list[Spec]:
    """The entries of a list as LMMS Engine reads it: `datasets: - {path, data_folder, data_type}`.

    data_folder: of the entry's media (default: where it lies). data_type: its format. Relative paths start from the
    YAML file's folder. An entry may have settings of its own, see SETTING_KEYS.
    """
    entries = _entries(path)
    specs = [_entry(path, number, entry, format) for number, entry in enumerate(entries, start=1)]
    weighted = [spec.settings.weight is not None for spec in specs]
    if any(weighted) and not all(weighted):
        raise DataError(
            f"{path}: entry {weighted.index(False) + 1} of datasets has no weight, and others have: give each one, or "
            "none"
        )
    return specs


def _entries(path: Path) -> list[Any]:
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise DataError(f"{path}: not valid YAML ({' '.join(str(error).split())}): correct it") from error
    except OSError as error:
        raise disk_error(str(path), error) from error
    entries = content.get("datasets") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f"{path}: expected a list `datasets` of entries with a path each: write datasets: [{{path: …}}]"
        )
    return entries


def _entry(path: Path, number: int, entry: Any, format: str | None) -> Spec:
    where = f"{path}: entry {number} of datasets"
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise DataError(f"{where}: expected a mapping with a path, found {entry!r}: write {{path: …}}")
    for key in entry:
        if key not in YAML_KEYS:
            raise DataError(
                f"{where}: unknown key {key!r}: {did_you_mean(key, YAML_KEYS)} (known: {', '.join(YAML_KEYS)})"
            )
    for key in SOURCE_KEYS:
        if entry.get(key) is not None and not isinstance(entry[key], str):
            raise DataError(f"{where}: {key} is {entry[key]!r}: expected text")
    spec = entry_spec(entry, format=format, where=where)
    if spec.path.endswith(LISTS) or spec.format == "yaml" or is_dataset_info(Path(resolved(spec.path, path.parent))):
        raise DataError(f"{where}: {spec.path} is a list itself: name the sources of it here")
    folder, rows = spec.folder and resolved(spec.folder, path.parent), dict(spec.settings.rows)
    if "media_root" in rows:
        rows["media_root"] = resolved(rows["media_root"], path.parent)
    settings = replace(spec.settings, rows=rows)
    return replace(spec, path=resolved(spec.path, path.parent), folder=folder, settings=settings)


def entry_spec(entry: Mapping[str, Any], *, format: str | None = None, where: str) -> Spec:
    """The spec of an entry whose keys are known, its paths as they stand. DataError, which begins with `where`."""
    spec = parse_spec(entry["path"], format=entry.get("data_type") or format, folder=entry.get("data_folder") or None)
    settings = settings_of(entry, where=where)
    split = entry.get("split")
    if split is None:
        return replace(spec, settings=settings)
    if spec.split is not None or (spec.is_hub and "split=" in spec.path):
        raise DataError(f"{where}: split is {split!r}, and the path {entry['path']} names one, too: leave one out")
    if spec.is_hub:
        joint = "&" if "?" in spec.path else "?"
        return replace(spec, path=f"{spec.path}{joint}split={quote(split)}", settings=settings)
    return replace(spec, split=split, settings=settings)
