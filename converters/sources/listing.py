"""Which files of a folder are data, of which format, and what changes when they do."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from ...errors import DataError
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage
from ...types import StoredObject
from .detect import COMPRESSIONS, FORMATS, format_of, named_format
from .specs import glob_pattern
from .table import Location

ALIKE = {  # formats -> what files of them are often named as
    "jsonl": "json", "json": "jsonl", "tsv": "csv", "csv": "tsv", "lines": "text"
}  # fmt: skip


_OWN_FILE = re.compile(r"(parts/\d{5}/)?(index\.json|shard\.\d{5,}\.mds(\.\w+)?)|datasets\.yaml")  # of a dataset
_NUMBERED = re.compile(r"(.*)(?<!\d)(\d{3,6})([-_]of[-_]\d{3,6})(?!\d)", re.DOTALL)
_FINGERPRINT = re.compile(r"-[0-9a-f]{16}(?=\.)")  # that `datasets` wrote behind the count
_CACHED = re.compile(r"(.*/)?cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow", re.DOTALL)  # what map of `datasets` made of rows
_PACKED = (".zip", ".7z", ".rar", ".lz4", ".br", ".part", ".crdownload", ".incomplete", ".aria2")
_LOGS = {"_delta_log", ".hoodie"}  # of tables of Delta and Hudi: they say which files count
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json")  # files that describe a dataset and lie beside its data


def path_inside(target: str | None, url: str) -> str | None:
    """The path of a target below a folder or URL, "" for the folder itself; None where the target is elsewhere."""
    if target is None or ("://" in target) != ("://" in url):
        return None
    if "://" not in url:
        target, url = str(Path(target).resolve()), str(Path(url).resolve())
    url = url.rstrip("/")
    return target.rstrip("/")[len(url) :].lstrip("/") if f"{target.rstrip('/')}/".startswith(f"{url}/") else None


def without_target(files: Sequence[StoredObject], target: str | None, url: str) -> list[StoredObject]:
    """Files of a folder that are not of the dataset that is written to a target in it."""
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
    """Names below a folder that match a glob, sorted; in place of ** each folder that is linked stands once."""
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
    """Files of a folder that hold its rows, all of one format. DataError where there is none, or a mixture of formats.

    With a format that is insisted on: those whose names say it, or else one that is often named so. Text may be in
    files of any name then. Files of unknown kinds are no data: descriptions, licences and programs lie beside it. Nor
    are images beside rows of another format, whose media they are; images beside texts are a mixture. together: formats
    that are read together. by: how some files of the folder are named, for errors.
    """
    for file in files:
        if ".." in PurePosixPath(file.key).parts:
            raise DataError(f"{name}: object {file.key!r} would lie outside of it: rename it")
        if not _LOGS.isdisjoint(PurePosixPath(file.key).parts):
            raise DataError(
                f"{name}: is a table whose log ({file.key}) says which of its files count, and the log is not read: "
                f"write the table as Parquet files, or name those that count {by}"
            )
    shown = [file for file in files if is_shown(file.key)]
    packed = [file.key for file in shown if _packs_data(file.key)]
    if packed:
        raise DataError(
            f"{name}: holds {packed[0]}, which is not read as it is: unpack it or end its download, or name the files "
            f"to be read {by}"
        )
    shown = [file for file in shown if not _CACHED.fullmatch(file.key)] or shown
    if insisted == "text" and shown:
        return shown
    kinds = [named_format(file.key)[0] for file in shown]
    counts = Counter(kind for kind in kinds if kind)
    wanted = insisted if insisted in counts else ALIKE.get(insisted or "")
    if insisted and wanted not in counts:
        raise DataError(f"{name}: no file below it is named as {insisted}: {_found(counts)}: name its files one by one")
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
    """Whether a name is that of a file of rows in an archive that is not read, or of a part of a download."""
    path = PurePosixPath(key)
    return path.suffix.lower() in _PACKED and named_format(path.stem)[0] in FORMATS


def check_once(name: str, files: Sequence[StoredObject], *, by: str = BY_GLOB) -> None:
    """DataError if a file of a folder is there compressed, or in another format of rows, as well."""
    keys: dict[str, str] = {}
    for file in files:
        path = PurePosixPath(file.key)
        path = path.with_suffix("") if path.suffix in COMPRESSIONS else path
        plain = str(path.with_suffix("") if named_format(path.name)[0] in FORMATS else path)
        if (other := keys.setdefault(plain, file.key)) != file.key:
            raise DataError(
                f"{name}: holds {other} and {file.key}, as where a file was unpacked or written in another "
                f"format, and would read its rows twice: remove one, or name those to be read {by}"
            )


def check_numbered(name: str, files: Sequence[StoredObject], *, by: str = BY_GLOB) -> None:
    """DataError if files of a folder are numbered, as in train-00000-of-00002.parquet, and some are missing.

    Also if some are there twice: with another count, or another fingerprint at the end of the name.
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
                        f"{name}: holds {' and '.join(both)}, as where a dataset was downloaded again after it had "
                        f"changed: remove the older files, or name those to be read {by}"
                    )
    for (head, of_count), there in numbers.items():
        if len(there) < (count := int(of_count[4:])):
            raise DataError(
                f"{name}: holds {len(there)} of the {count} files {head}{of_count}: download the others, or name these "
                f"{by}"
            )


def _found(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no data files are there"


def checked_format(location: Location, *, insisted: str | None) -> str:
    """The format of a location's file; DataError where it is none, or has no members and one is asked for."""
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
