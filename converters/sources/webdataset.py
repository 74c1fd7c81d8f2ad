"""A WebDataset tar -> units: the places of each sample's files; other processes read them."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import DataError, LmmsStreamError
from ...processors.json_text import parsed
from .files import more_than_zeros
from .table import BOM, Location, in_units
from .units import Row, Unit

MAX_SAMPLE_BYTES = 1 << 30
BLOCK_BYTES = 512  # block size of a tar
NAME = re.compile(
    r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL
)  # key, and the rest of the file name after its first dot
_OF_MACOS = re.compile(r"(^|/)\._[^/]*$")  # macOS's tar writes attributes of a file before the file, under this name


@dataclass(frozen=True, slots=True)
class TarSample:
    """files: extension, offset in bytes, size in bytes. error: why the sample cannot be read."""

    key: str
    files: tuple[tuple[str, int, int], ...]
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self.files)


@dataclass(frozen=True, slots=True)
class TarSamples:
    path: Path
    name: str
    samples: tuple[TarSample, ...]
    num_bytes: int
    folder: str | None

    def rows(self) -> Iterator[Row]:
        with self.path.open("rb") as file:
            for number, sample in enumerate(self.samples):
                if sample.error:
                    yield Row(number, None, sample.error)
                else:
                    yield self._row(file, number, sample)

    def _row(self, file: Any, number: int, sample: TarSample) -> Row:
        values: dict[str, Any] = {"__key__": sample.key}
        for extension, offset, size in sample.files:
            file.seek(offset)
            data = file.read(size)
            if len(data) < size:
                raise DataError(f"{self.name}: ends within {sample.key}.{extension}: copy it again")
            try:
                values[extension] = _decoded(extension, data)
            except LmmsStreamError:
                raise
            except ValueError as error:
                return Row(number, None, f"{sample.key}.{extension} is not what its name says ({error}): correct it")
        return Row(number, {name: _with_members(value, values) for name, value in values.items()})

    def count(self) -> int:
        return len(self.samples)


def _decoded(extension: str, data: bytes) -> Any:
    """JSON and text by their last extension, without a byte order mark; bytes of everything else, whatever it is."""
    kind = extension.rpartition(".")[2]
    if kind == "json":
        return parsed(data.removeprefix(BOM))
    return data.removeprefix(BOM).decode() if kind in ("txt", "cls", "caption") else data


def _with_members(value: Any, members: Mapping[str, Any]) -> Any:
    """Replace {"url": EXTENSION} and {"path": EXTENSION} in JSON by the bytes of the sample's own file."""
    if isinstance(value, list):
        return [_with_members(each, members) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: _with_members(each, members) for name, each in value.items()}
    for key in ("url", "path"):
        named = members.get(name) if isinstance(name := value.get(key), str) else None
        if isinstance(named, bytes):
            found[key] = named
    return found


class TarTable:
    """Adjacent files with equal names up to the first dot are a row {"__key__": the equal part, extension: value}."""

    def __init__(self, location: Location):
        self._location = location

    def num_rows(self) -> int:
        return sum(1 for _ in self._samples())

    def _once(self) -> Iterator[TarSample]:
        """Yield the samples; an error for a repeated key, as in an updated archive (tar -u, tar -r)."""
        seen: set[int] = set()
        for sample in self._samples():
            known = hash(sample.key)
            if known in seen and not sample.error:
                error = (
                    f"sample {sample.key!r} is there before, as where an archive was updated, or its files are apart"
                )
                sample = TarSample(sample.key, (), f"{error}: write the archive again")
            seen.add(known)
            yield sample

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        location = self._location
        found = islice(self._once(), start, stop)
        for samples in in_units(found, _num_bytes, unit_bytes=location.unit_bytes):
            num_bytes = sum(map(_num_bytes, samples))
            yield TarSamples(location.path, location.name, tuple(samples), num_bytes, location.folder)

    def _samples(self) -> Iterator[TarSample]:
        key: str | None = None
        files: list[tuple[str, int, int]] = []
        for member in self._members():
            error = _refusal(member)
            matched = NAME.fullmatch(member.name.removeprefix("./"))
            if error or matched is None:
                if key is not None:
                    yield _sample(key, files)
                key, files = None, []
                yield TarSample(member.name, (), error or f"{member.name!r} has no extension: name it KEY.EXTENSION")
                continue
            if key is not None and key != matched[1]:
                yield _sample(key, files)
                files = []
            key = matched[1]
            files.append((matched[2].lower(), member.offset_data, member.size))
        if key is not None:
            yield _sample(key, files)

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """Yield all members in order, except folders and macOS's attributes; only the last member is kept in memory."""
        name, num_bytes = self._location.name, self._location.path.stat().st_size
        try:
            with tarfile.open(self._location.path, "r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]
                    if member.offset_data + (member.size if member.isreg() else 0) > num_bytes:
                        raise DataError(f"{name}: ends within {member.name}: copy it again")
                    if not member.isdir() and not _OF_MACOS.search(member.name):
                        yield member
                # tarfile takes a damaged header for the end of the archive; the end is zeros
                assert archive.fileobj is not None
                archive.fileobj.seek(archive.offset)
                if any(archive.fileobj.read(BLOCK_BYTES)):
                    raise DataError(f"{name}: the header at byte {archive.offset} is damaged: write the archive again")
                if more_than_zeros(archive.fileobj):
                    raise DataError(
                        f"{name}: more data follows the end of the archive at byte {archive.offset}, for example "
                        "another archive, and would not be read: write each archive to a separate file"
                    )
        except tarfile.TarError as error:
            raise DataError(f"{name}: not readable as a tar ({error}): copy it again, or write it again") from error


def _num_bytes(sample: TarSample) -> int:
    return sample.num_bytes


def _refusal(member: tarfile.TarInfo) -> str:
    if not member.isreg() or member.issparse():
        return f"{member.name!r} is not a plain file of the archive: write it as one, without links or holes"
    return ""


def _sample(key: str, files: list[tuple[str, int, int]]) -> TarSample:
    extensions = [extension for extension, _, _ in files]
    twice = sorted({extension for extension in extensions if extensions.count(extension) > 1})
    sample = TarSample(key, tuple(files))
    if twice:
        return TarSample(key, (), f"sample {key!r} has .{twice[0]} more than once: give its files names of their own")
    if sample.num_bytes > MAX_SAMPLE_BYTES:
        return TarSample(key, (), f"sample {key!r} is larger than {MAX_SAMPLE_BYTES >> 20} MiB: store its media beside")
    return sample
