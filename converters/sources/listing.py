"""Data files of a folder: their format, their identity, and the files of one configuration or split.

Configurations follow from the folder's README.md or its sub-folders:
https://huggingface.co/docs/hub/datasets-manual-configuration
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

import xxhash

from ...errors import ConfigError, DataError
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage
from ...types import StoredObject
from ...yaml_text import read_yaml
from .detect import COMPRESSIONS, FORMATS, format_of, named_format
from .specs import ALL, Spec, glob_pattern, literal_prefix
from .table import Location

ALIKE = {  # format -> format of files that often have its name
    "jsonl": "json", "json": "jsonl", "tsv": "csv", "csv": "tsv", "lines": "text"
}  # fmt: skip


_OWN_FILE = re.compile(r"(parts/\d{5}/)?(index\.json|shard\.\d{5,}\.mds(\.\w+)?)|datasets\.yaml")  # of a dataset
_NUMBERED = re.compile(r"(.*)(?<!\d)(\d{3,6})([-_]of[-_]\d{3,6})(?!\d)", re.DOTALL)
_FINGERPRINT = re.compile(r"-[0-9a-f]{16}(?=\.)")  # written by `datasets` after the count
_CACHED = re.compile(r"(.*/)?cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow", re.DOTALL)  # results of map in `datasets`
_PACKED = (".zip", ".7z", ".rar", ".lz4", ".br", ".part", ".crdownload", ".incomplete", ".aria2")
_LOGS = {"_delta_log", ".hoodie"}  # of Delta and Hudi tables: logs of the valid files
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json")  # descriptions next to the data


def path_inside(target: str | None, url: str) -> str | None:
    """Return the path of a target below a folder or URL, "" for the folder itself; None for a target elsewhere."""
    if target is None or ("://" in target) != ("://" in url):
        return None
    if "://" not in url:
        target, url = str(Path(target).resolve()), str(Path(url).resolve())
    url = url.rstrip("/")
    return target.rstrip("/")[len(url) :].lstrip("/") if f"{target.rstrip('/')}/".startswith(f"{url}/") else None


def without_target(files: Sequence[StoredObject], target: str | None, url: str) -> list[StoredObject]:
    """Return the files of a folder without the files of a target dataset inside the folder."""
    inside = path_inside(target, url)
    if inside is None:
        return list(files)
    if inside:
        return [file for file in files if not file.key.startswith(f"{inside}/")]
    return [file for file in files if not _OWN_FILE.fullmatch(file.key)]


def is_shown(key: str) -> bool:
    """Hidden files (.git, .cache, …), marks of other programs (_SUCCESS, _metadata) and descriptions are no data."""
    names = PurePosixPath(key).parts
    return not any(name.startswith((".", "_")) for name in names) and names[-1] not in DESCRIPTIONS


def matching_files(base: Path, pattern: str) -> list[str]:
    """Return the sorted names below a folder that match a glob; ** enters each linked folder once."""
    try:
        paths = [path for path in base.glob(pattern) if path.is_file() or (path.is_symlink() and not path.exists())]
    except ValueError as error:
        raise DataError(f"{base}/{pattern}: {error}: write ** between slashes, as in **/*.jsonl") from error
    keys = {path.relative_to(base).as_posix() for path in paths}
    if "**" in pattern:
        matches = glob_pattern(pattern)
        keys |= {file.key for file in LocalStorage(base).list_objects("", linked=True) if matches.fullmatch(file.key)}
    return sorted(key for key in keys if is_shown(key))


BY_GLOB = "by a glob"  # how some files of a folder are named, for errors


def data_files(
    name: str,
    files: Sequence[StoredObject],
    *,
    insisted: str | None,
    together: Collection[str] = (),
    by: str = BY_GLOB,
) -> list[StoredObject]:
    """Return the files of a folder with rows, all of one format. DataError for no file, or for a mixture of formats.

    For a requested format: files with its extension, else with an extension often used for it. A requested "text" takes
    files of any name. Files of unknown kinds are left out: descriptions, licences and programs are next to the data.
    Images next to rows of another format are media of these rows, and are left out; images next to texts are a mixture.
    together: formats that may be mixed. by: way to name some files of the folder, for errors.
    """
    for file in files:
        if ".." in PurePosixPath(file.key).parts:
            raise DataError(f"{name}: object {file.key!r} would be outside of it: rename it")
        if not _LOGS.isdisjoint(PurePosixPath(file.key).parts):
            raise DataError(
                f"{name}: is a table whose log ({file.key}) lists its valid files, and the log is not read: write the "
                f"table as Parquet files, or name the valid files {by}"
            )
    shown = [file for file in files if is_shown(file.key)]
    packed = [file.key for file in shown if _packs_data(file.key)]
    if packed:
        raise DataError(
            f"{name}: holds {packed[0]}, which cannot be read directly: unpack it or complete its download, or name "
            f"the files to read {by}"
        )
    shown = [file for file in shown if not _CACHED.fullmatch(file.key)] or shown
    if insisted == "text" and shown:
        return shown
    kinds = [named_format(file.key)[0] for file in shown]
    counts = Counter(kind for kind in kinds if kind)
    wanted = insisted if insisted in counts else ALIKE.get(insisted or "")
    if insisted and wanted not in counts:
        raise DataError(f"{name}: no file in it has a name like {insisted}: {_found(counts)}: name each of its files")
    if not counts:
        raise DataError(f"{name}: holds no data files ({len(shown)} others): name a folder of data, or pass --format")
    if not insisted and counts.keys() - {"images", "text"}:
        counts.pop("images", None)
    if not insisted and len(counts) > 1 and not counts.keys() <= {*together}:
        remedy = "name one by --format, or use a glob" if by == BY_GLOB else f"name the files to be read {by}"
        if "text" in counts:
            others = " or ".join(sorted(counts.keys() - {"text"}))
            texts = f"{name.rstrip('/')}/**/*.txt"
            remedy = f"pass --format {others}, or the glob {texts} (--format text takes files of all names for texts)"
        raise DataError(f"{name}: holds several formats: {_found(counts)}: {remedy}")
    chosen = {wanted} if insisted else {*counts}
    return [file for file, kind in zip(shown, kinds, strict=True) if kind in chosen]


def _packs_data(key: str) -> bool:
    """Return whether a file is an unreadable archive of rows, or an incomplete download."""
    path = PurePosixPath(key)
    return path.suffix.lower() in _PACKED and named_format(path.stem)[0] in FORMATS


def check_once(name: str, files: Sequence[StoredObject], *, by: str = BY_GLOB) -> None:
    """Raise DataError if a file of a folder also exists compressed, or in another format of rows."""
    keys: dict[str, str] = {}
    for file in files:
        path = PurePosixPath(file.key)
        path = path.with_suffix("") if path.suffix in COMPRESSIONS else path
        plain = str(path.with_suffix("") if named_format(path.name)[0] in FORMATS else path)
        if (other := keys.setdefault(plain, file.key)) != file.key:
            raise DataError(
                f"{name}: holds {other} and {file.key}, possibly the same rows unpacked or in another format, and rows "
                f"would be read twice: remove one, or name the files to read {by}"
            )


def check_numbered(name: str, files: Sequence[StoredObject], *, by: str = BY_GLOB) -> None:
    """Raise DataError if files are numbered, such as train-00000-of-00002.parquet, and some are missing.

    Also if some exist twice: with another count, or with another fingerprint at the end of the name.
    """
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    versions: dict[str, str] = {}
    for file in files:
        if matched := _NUMBERED.match(file.key):
            head, number, of_count = matched.groups()
            head += "N" * len(number)
            numbers[head, of_count].add(int(number))
            for part, version in (head, of_count), (_FINGERPRINT.sub("", file.key), file.key):
                if (other := versions.setdefault(part, version)) != version:
                    both = [f"{head}{each}" if part == head else each for each in (other, version)]
                    raise DataError(
                        f"{name}: holds {' and '.join(both)}, possibly from two versions of the dataset: remove the "
                        f"older files, or name the files to read {by}"
                    )
    for (head, of_count), there in numbers.items():
        if len(there) < (count := int(of_count[4:])):
            raise DataError(
                f"{name}: holds {len(there)} of the {count} files {head}{of_count}: download the missing files, or "
                f"name the existing files {by}"
            )


def _found(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no data files are there"


def checked_format(location: Location, *, insisted: str | None) -> str:
    """The format of a location's file; DataError if the file is invalid, or if a member is requested and it has no
    members.
    """
    with disk_errors(location.name):
        name, encoding = location.name.removesuffix(f"#{location.key}"), location.delimited.encoding
        format = format_of(location.file, name=name, insisted=insisted, encoding=encoding)
    if location.key is not None and format != "json":
        raise DataError(f"{location.name}: {format} has no members to choose from: leave out #{location.key}")
    return format


def identity_of(name: str, files: Sequence[StoredObject]) -> Mapping[str, Any]:
    """Name, size, and the tag of one file, or a hash of the names, sizes and tags of several."""
    tag = files[0].tag
    if len(files) != 1:
        digest = xxhash.xxh3_64()
        for file in files:
            digest.update(f"{file.key}\0{file.num_bytes}\0{file.tag}\0".encode(errors="surrogateescape"))
        tag = digest.hexdigest()
    return {"name": name, "num_files": len(files), "size": sum(file.num_bytes for file in files), "tag": tag}


# Files of one configuration, by a folder's README.md or its sub-folders; files of one split.


README = "README.md"
_FRONT_MATTER = re.compile(rb"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
_TABLE_OF_SPLIT = re.compile(r"(?:.*/)?annotations/(\w+)_(?:train|val|test)\d{4}\.json")
_SHOWN = 10  # configurations in an error message

Configurations = Mapping[str, Mapping[str, str | None]]  # name -> key of a file -> its split, or None if unknown


def configurations_of(keys: Iterable[str], readme: bytes | None) -> Configurations:
    """Return the configurations with files: described by a README, else folders with their own splits.

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
        if table := _TABLE_OF_SPLIT.fullmatch(key):  # COCO's captions_train2017.json
            folder = table[1]
        else:
            folder = "" if named_format(key)[0] in (None, "text", "images") else _folder_of_splits(key)
        if folder:
            found.setdefault(folder, {})[key] = None
    return found


def files_of_configuration(
    spec: Spec, files: Sequence[StoredObject], configurations: Configurations
) -> tuple[list[StoredObject], dict[str, str]]:
    """Return the files of the configuration that a spec names, and the splits that a README gives to files.

    With fewer than two configurations, return all files. DataError if several exist and the spec names none, or if the
    named configuration does not exist.
    """
    wanted = spec.config
    shown = ", ".join(list(configurations)[:_SHOWN]) + (", …" if len(configurations) > _SHOWN else "")
    if wanted is None and len(configurations) > 1:
        first, files_of_first = next(iter(configurations.items()))
        several = sorted({str(split or split_of(key)) for key, split in files_of_first.items()}, key="train".__ne__)
        split = {"split": several[0]} if len(several) > 1 and not spec.split else {}
        one, all_of_them = (quote(spec.folder_text(config=name, **split)) for name in (first, ALL))
        is_mixed = any(map(_TABLE_OF_SPLIT.fullmatch, files_of_first))  # captions and boxes are rows of two kinds
        raise DataError(
            f"{spec.path}: holds {len(configurations)} configurations, {shown}: name one, as {one}"
            f"{'' if is_mixed else f', or all of them, as {all_of_them}'}"
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
    """Return the folder before the first name of a split, without folders that name a value (lang=en)."""
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


# Files of a folder -> files of one split, by the names of splits in `datasets`.

# Names between separators in the path of a file, see https://huggingface.co/docs/datasets/repository_structure
_NAMES = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
_MARKED = re.compile(rf"(?<![^/\-._ 0-9=])({'|'.join(_NAMES)})(?![^/\-._ 0-9])", re.IGNORECASE)
# Numbered files with a longer split name; `datasets` writes such files for train_sft and train_prefs.
_NUMBERED_SPLIT = re.compile(
    rf"(?:.*/)?((?:{'|'.join(_NAMES)})[_.]\w+)-\d{{5}}-of-\d{{5}}\b[^/]*", re.IGNORECASE | re.DOTALL
)


def split_of(key: str) -> str | None:
    """Return the split of a file by its path; the last name of a split in the path counts.

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
    """Return the files of the requested split; without a request, all files if they belong to one split.

    only_if_all: if some files have no split, all files count as one split. are_rows: each file is a row, and names are
    weak evidence. told: key -> split of a file, regardless of its name. several: way to name several splits, for the
    error. DataError if several splits exist and none is named, or if the named split does not exist.
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
    """Return the full split name of a numbered file, if longer than the usual names."""
    found = _NUMBERED_SPLIT.fullmatch(key)
    return found[1] if found else None


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{split} ({count} files)" for split, count in sorted(counts.items())) or "none"
