"""Lists of sources in YAML -> specs, each with the settings of its entry; LLaMA-Factory's lists, read by its door."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import ConfigError, DataError, did_you_mean
from ...registry import imported
from ...storage.failures import disk_error
from ...yaml_text import read_yaml
from .specs import ROW_KEYS, SETTING_KEYS, Spec, parse_spec, resolved, settings_of

LISTS = (".yaml", ".yml")
DATASET_INFO = "dataset_info.json"  # the end of the name of LLaMA-Factory's lists
SOURCE_KEYS = ("path", "data_folder", "data_type")  # LMMS Engine's names
# Beginnings of files of rows: a list of objects, InstructLab's qna.yaml, ChatterBot's conversations, Rasa's intents.
OF_ROWS = rb"(?s)(- [^\n]*:|(.*\n)?(seed_examples|conversations|nlu)\s*:)"
YAML_KEYS = (*SOURCE_KEYS, *SETTING_KEYS)


def is_list(spec: Spec) -> bool:
    """Return whether a spec names a local list, by its name or the requested format."""
    is_named = Path(spec.path).suffix.lower() in LISTS or spec.format == "yaml"
    if not is_named or spec.is_hub or spec.is_remote:
        return False
    path = Path(spec.path)
    return spec.format is not None or not path.is_file() or re.match(OF_ROWS, path.read_bytes()) is None


def yaml_specs(path: Path, *, format: str | None, chosen: str | None = None) -> list[Spec]:
    """Return the entries of a list in LMMS Engine's format: `datasets: - {path, data_folder, data_type}`.

    chosen: dataset names of a file in LLaMA-Factory v1's format.

    data_folder: folder of the entry's media (default: the folder of the data). data_type: format of the data. Relative
    paths start from the YAML file's folder. An entry may have more settings, see SETTING_KEYS.
    """
    content = _content(path)
    if _is_v1(content):
        described: list[Spec] = imported("doors.llama_factory:v1_specs")(path, content, chosen)
        return described
    if chosen is not None:
        raise DataError(f"{path}#{chosen}: a list of sources has no names to choose from: leave out #{chosen}")
    entries = enumerate(list_entries(path), start=1)
    specs = [entry_spec(entry, format=format, where=_where(path, number)) for number, entry in entries]
    for number, spec in enumerate(specs, start=1):
        if spec.path.endswith(LISTS) or spec.format == "yaml":
            raise DataError(f"{_where(path, number)}: {spec.path} is a list itself: name the sources of it here")
    return specs


def _is_v1(content: Any) -> bool:
    """Return whether a YAML file describes datasets by name, in LLaMA-Factory v1's format."""
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(entry, dict) and "path" in entry for entry in content.values())
    )


def is_dataset_info(path: Path) -> bool:
    """Return whether a file is a dataset_info.json of LLaMA-Factory; `datasets` writes other files of this name."""
    if not path.name.endswith(DATASET_INFO) or not path.is_file():
        return False
    is_described: bool = imported("doors.llama_factory:describes_datasets")(path)
    return is_described


def dataset_info_specs(
    path: Path, chosen: str | None, *, refused: Callable[[DataError], None] | None = None
) -> list[Spec]:
    """Return the datasets of a dataset_info.json that `chosen` names: see doors/llama_factory.py."""
    specs: list[Spec] = imported("doors.llama_factory:dataset_info_specs")(path, chosen, refused=refused)
    return specs


def list_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a list with the keys of YAML_KEYS, and paths that do not start from the file's folder any more."""
    content = _content(path)
    entries = content.get("datasets") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f"{path}: expected a list `datasets` of entries with a path each: write datasets: [{{path: …}}]"
        )
    for number, entry in enumerate(entries, start=1):
        check_entry(entry, where=_where(path, number))
    entries = [_resolved(entry, path.parent) for entry in entries]
    _check_together(path, entries)
    return entries


def _content(path: Path) -> Any:
    try:
        return read_yaml(path.read_bytes())
    except ConfigError as error:
        raise DataError(f"{path}: not valid YAML ({error}): correct it") from error
    except OSError as error:
        raise disk_error(str(path), error) from error


def _check_together(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    for number, entry in enumerate(entries, start=1):
        taken = [key for key in ROW_KEYS if entry.get(key) is not None]
        if taken and is_dataset_info(Path(parse_spec(entry["path"]).path)):
            raise DataError(
                f"{_where(path, number)}: {entry['path']} already sets how its rows are read: leave out "
                f"{', '.join(taken)}"
            )
    weighted = [entry.get("weight") is not None for entry in entries]
    if any(weighted) and not all(weighted):
        where = _where(path, weighted.index(False) + 1)
        raise DataError(f"{where}: has no weight, and other entries have weights: give all entries weights, or none")


def check_entry(entry: Any, *, where: str) -> None:
    """Raise DataError, starting with `where`, unless the entry is a mapping of a path and known keys."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise DataError(f"{where}: expected a mapping with a path, found {entry!r}: write {{path: …}}")
    for key in entry:
        if key not in YAML_KEYS:
            raise DataError(f"{where}: unknown key {key!r}: {did_you_mean(key, YAML_KEYS)}")
    for key in SOURCE_KEYS:
        if entry.get(key) is not None and not isinstance(entry[key], str):
            raise DataError(f"{where}: {key} is {entry[key]!r}: expected text")
    settings_of(entry, where=where)


def entry_spec(entry: Mapping[str, Any], *, format: str | None = None, where: str) -> Spec:
    """Return the spec of a checked entry, with unchanged paths. DataError starts with `where`."""
    spec = parse_spec(entry["path"], format=entry.get("data_type") or format, folder=entry.get("data_folder") or None)
    spec, split = replace(spec, settings=settings_of(entry, where=where)), entry.get("split")
    if split is None:
        return spec
    if spec.split is not None or (spec.is_hub and "split=" in spec.path):
        raise DataError(f"{where}: split is {split!r}, and the path {entry['path']} names a split, too: leave one out")
    if spec.is_hub:
        return replace(spec, path=f"{spec.path}{'&' if '?' in spec.path else '?'}split={quote(split)}")
    return replace(spec, split=split)


def _resolved(entry: Mapping[str, Any], base: Path) -> dict[str, Any]:
    path, is_hub = entry["path"], entry.get("data_type") == "hf_dataset" and not entry["path"].startswith("hf:")
    path = resolved(f"hf:{path}", base).removeprefix("hf:") if is_hub else resolved(path, base)
    folders = {key: resolved(entry[key], base) for key in ("data_folder", "media_root") if entry.get(key)}
    return {**entry, "path": path, **folders}


def _where(path: Path, number: int) -> str:
    return f"{path}: entry {number} of datasets"
