"""Sources that name the same rows: rows are stored twice only if the user allows repeats (allow_repeats).

Files are the same file if their paths lead to one inode, and copies if their sizes and all of their bytes agree. Bytes
are read only for local files of equal size; for S3 stores the entity tags are compared. For folders of texts and images
and for MDS datasets, the names of files and shards are compared. Slices of a file may not intersect. One file with
different settings of a list (columns, map, csv, a member of its object) counts as several sources; the only array of an
object is the same source with and without its name.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from ..errors import ConfigError, DataError
from ..storage.cache import default_cache_folder
from ..storage.failures import disk_errors
from .identity import content_of, described
from .options import ConvertOptions
from .rows.chat import MEDIA_COLUMNS
from .rows.content import PART_KINDS
from .rows.options import SchemaOptions
from .rows.references import is_data
from .sources.files import content_digest, joint_digest, sampled_digest, status_of
from .sources.json_array import JsonTable
from .sources.table import Location, TableSource
from .sources.units import UNIT_BYTES, Source
from .writing.work import place_of

SETTINGS = ("csv", "settings", "ids")  # keys of a source's description that specify how rows are read
_CONTENT_TAG = re.compile(r"[0-9a-f]{32}(-\d+)?")  # S3's, made from the content, unlike other tags
_MEDIA_PATH = re.compile(
    r"\.(jpe?g|png|webp|gif|bmp|tiff?|avif|hei[cf]|wav|mp[23]|flac|m4[abv]|og[agv]|opus|mp4|webm|mkv|avi|mov|3gp|m2?ts|mpe?g|"
    r"flv|wm[av]|aac|ai(f|ff|fc)|au|amr|caf|w64|wv|tta)(?![a-z0-9])",
    re.IGNORECASE,
)
_WEB_ADDRESS = re.compile(r"https?://\S+", re.IGNORECASE)
Interval = tuple[int, int | None]  # rows of a file: first, and one past the last; None for the end of the file


@dataclass(frozen=True)
class SourceRecord:
    """Description of a source in the current conversion or in a dataset.json."""

    said: Mapping[str, Any]

    @cached_property
    def name(self) -> str:
        return str(self.said["name"])

    @cached_property
    def at(self) -> str:
        return str(self.said.get("at") or place_of(self.name))

    @cached_property
    def _local(self) -> tuple[Path, str] | None:
        """The local file or folder with links resolved, and the member of its object; None for a remote source."""
        if "://" in self.at or "size" not in self.said:
            return None
        path, member = Path(self.at), ""
        if "#" in path.name and not path.exists():
            base, _, member = self.at.rpartition("#")
            path = Path(base)
        return path.resolve(), member

    @property
    def place(self) -> str:
        """The path without links, the URL, or the content's description of a source without a path."""
        if "size" not in self.said:  # a source of the hub, or rows of a program
            return json.dumps(content_of(self.said), sort_keys=True)
        return self.at if self._local is None else str(self._local[0])

    @property
    def member(self) -> str:
        """The member that the source names in a local JSON object; "" for other sources."""
        return "" if self._local is None else self._local[1]

    @cached_property
    def _read_member(self) -> str:
        """The member to read: the named member, or the only array of a local JSON object."""
        if self.member or self.file is None:
            return self.member
        name = self.name
        location = Location(path=self.file, name=name, folder=None, key=None, scratch=self.file, unit_bytes=UNIT_BYTES)
        try:
            return JsonTable(location).only_array()
        except DataError:  # an array, or a file of another format
            return ""

    def is_read_as(self, other: SourceRecord) -> bool:
        """Whether rows are read in the same way. Sources that are read in different ways are different sources."""
        if any(self.said.get(name) != other.said.get(name) for name in SETTINGS):
            return False
        return self.member == other.member or self._read_member == other._read_member

    @property
    def content_said(self) -> dict[str, Any]:
        """Fields that change with the source's content, not with the way of reading rows."""
        return {name: value for name, value in content_of(self.said).items() if name not in SETTINGS}

    @cached_property
    def file(self) -> Path | None:
        """The local file; None for a folder, a remote source, and a missing file."""
        return self._local[0] if self._local is not None and self._local[0].is_file() else None

    @cached_property
    def is_as_described(self) -> bool:
        """Return whether the local file still has the described size and modification time."""
        if self.file is None:
            return False
        status = self.file.stat()
        return (status.st_size, str(status.st_mtime_ns)) == (self.said["size"], self.said["tag"])

    @cached_property
    def sample(self) -> str | None:
        """Digest of a sample of a local file's content, now or at its conversion; None if unknown."""
        if "sample" in self.said:
            return str(self.said["sample"])
        return sampled_digest(self.file) if self.file is not None and self.is_as_described else None

    @cached_property
    def content(self) -> str | None:
        """Digest of all content of a local file; None if the file is missing or has changed since its description."""
        return content_digest(self.file) if self.file is not None and self.is_as_described else None

    @property
    def rows(self) -> slice:
        return slice(*self.said.get("rows", (None, None)))

    @property
    def is_untouched(self) -> bool:
        """Whether a limit ended before this source; the source's description then has no rows."""
        return "limit" in self.said and self.rows.start == self.rows.stop

    def __str__(self) -> str:
        start, stop = ("" if bound is None else bound for bound in (self.rows.start, self.rows.stop))
        return f"{self.name}@[{start}:{stop}]" if "rows" in self.said else self.name


def check_same_bytes(sources: Sequence[Source], known: Sequence[Mapping[str, Any]], *, url: str) -> None:
    """Raise ConfigError for a source with other bytes than at its conversion, at the same sizes and times.

    known: sources as a dataset describes them. Bytes are read once for each change of an inode or of a file's status.
    """
    by_name = {each["name"]: each for each in known}
    for source in sources:
        then = by_name.get(source.name, {})
        if not isinstance(source, TableSource) or not source.files or not {"bytes", "sample"} & then.keys():
            continue
        with disk_errors(source.name):
            if "bytes" not in then:  # of an earlier release, which kept only a sample
                is_same = sampled_digest(source.files[0]) == then["sample"]
            else:
                is_same = then["status"] == (status := status_of(source.files)) or _have_bytes(source, status, then)
        if not is_same:
            raise ConfigError(
                f"{source.name} was changed since it was converted to {url}, with the same size and time of change: "
                "pass --overwrite to convert it again"
            )


def _have_bytes(source: TableSource, status: str, known: Mapping[str, Any]) -> bool:
    folder = default_cache_folder("compared sources")
    compared = folder / xxhash.xxh3_128_hexdigest(f"{status} {known['bytes']} {source.name}")
    if not compared.exists():
        if joint_digest(source.files) != known["bytes"]:
            return False
        folder.mkdir(exist_ok=True)
        compared.touch()
    return True


def is_copy(source: SourceRecord, other: SourceRecord) -> bool | None:
    """Return whether sources at different places have equal content; None if only samples of the content agree.

    Files of different sizes are not read. A moved file is recognized by its size, time and a sample of its content.
    """
    ours, theirs = source.said, other.said
    if not ours.get("size") or any(ours.get(name) != theirs.get(name) for name in ("size", "num_files")):
        return False
    if source.file is None:
        is_content = ours["num_files"] > 1 or _CONTENT_TAG.fullmatch(ours["tag"]) is not None
        return is_content and source.content_said == other.content_said
    with disk_errors(source.name):
        if other.file is not None and source.file.samefile(other.file):
            return True
        if source.sample is None or source.sample != other.sample:
            return False
        if other.content is not None:
            return source.content == other.content
        return True if ours["tag"] == theirs["tag"] else None


def interval(rows: slice, num_rows: Callable[[], int]) -> Interval:
    """Return the first row and the end of a slice; None for no end. num_rows is called only for negative ends."""
    start, stop = rows.start or 0, rows.stop
    if start < 0 or (stop is not None and stop < 0):
        start, stop, _ = rows.indices(num_rows())
    return start, stop


def overlap(one: Interval, other: Interval) -> Interval | None:
    """Return the common rows of two intervals; None for disjoint intervals."""
    start = max(one[0], other[0])
    stops = [stop for stop in (one[1], other[1]) if stop is not None]
    return None if stops and min(stops) <= start else (start, min(stops, default=None))


def without(rows: Interval, taken: Sequence[Interval]) -> list[Interval]:
    """Return the rows of an interval that are outside of the taken intervals."""
    left: list[Interval] = []
    start = rows[0]
    for begin, end in sorted(taken, key=lambda each: each[0]):
        if (shared := overlap((start, rows[1]), (begin, end))) is None:
            continue
        if shared[0] > start:
            left.append((start, shared[0]))
        if shared[1] is None:
            return left
        start = shared[1]
    return [*left, (start, rows[1])] if rows[1] is None or start < rows[1] else left


def shown(rows: Interval) -> str:
    """An interval in the user's notation."""
    start, stop = rows
    return "" if rows == (0, None) else f"@[{start or ''}:{'' if stop is None else stop}]"


def check_repeats(sources: Sequence[Source], options: ConvertOptions, *, say: Callable[[str], None]) -> None:
    """Raise ConfigError for sources with common rows; if the options allow repeats, report the sources instead.

    With deduplication, nothing is compared.
    """
    for one, other, how in _repeated(sources, options.schema) if options.dedup is None else ():
        if not options.allow_repeats:
            raise ConfigError(
                f"{one} and {other} hold the same rows ({how}): leave one of them out, or pass --allow-repeats to "
                "store the rows more than once (to read them more often, give their dataset a weight in training)"
            )
        say(f"{one} and {other} hold the same rows ({how}), which are stored more than once")


def _repeated(sources: Sequence[Source], schema: SchemaOptions) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of sources with the same rows: both names with slices, and the relation between the sources."""
    known = [SourceRecord(each) for each in described(sources)]
    places = _first_places(known)
    seen: dict[str, list[tuple[Interval, int]]] = defaultdict(list)
    for number, (source, said) in enumerate(zip(sources, known, strict=True)):
        others: set[int] = set()
        for file, rows in _files_of(source, places[number]):
            for theirs, index in seen[file]:
                shared = overlap(rows, theirs)
                if shared is None or index in (number, *others) or not said.is_read_as(known[index]):
                    continue
                others.add(index)
                if file != places[number] or have_same_rows(source, sources[index], schema):
                    is_whole = file == places[number] == places[index]
                    yield str(known[index]), str(said), _how(shared, said, known[index], is_whole=is_whole)
            seen[file].append((rows, number))


def _how(shared: Interval, said: SourceRecord, other: SourceRecord, *, is_whole: bool) -> str:
    """Describe the relation of two sources with the same rows. is_whole: no rows come from one of several files."""
    if said.at == other.at:
        return f"rows {shown(shared)}" if shown(shared) else "all rows of it"
    return "they are copies" if is_whole and said.place != other.place else "they lead to one file"


def _first_places(known: Sequence[SourceRecord]) -> list[str]:
    """Return for each source the place of the first source with the same content."""
    alike: dict[Any, list[SourceRecord]] = defaultdict(list)
    for each in known:
        alike[each.said.get("size"), each.said.get("num_files")].append(each)
    places: dict[str, str] = {}
    firsts: dict[Any, list[SourceRecord]] = defaultdict(list)
    for each in known:
        if each.place in places:
            continue
        size = each.said.get("size")
        is_only = not size or len({other.place for other in alike[size, each.said.get("num_files")]}) == 1
        key = (size, None if is_only else each.sample)  # files are read only if another file has the same size
        first = None if is_only else next((other for other in firsts[key] if is_copy(each, other)), None)
        places[each.place] = each.place if first is None else first.place
        if first is None:
            firsts[key].append(each)
    return [places[each.place] for each in known]


def _files_of(source: Source, place: str) -> Iterator[tuple[str, Interval]]:
    """Yield the source, and each file of a source with several files, with the rows taken from each."""
    pieces = source.pieces if isinstance(source, TableSource) else None
    rows = interval(source.rows, source.num_rows) if isinstance(source, TableSource) else (0, None)
    yield place, rows
    before = 0
    for file, num_rows in pieces() if pieces is not None else ():
        if (inside := overlap(rows, (before, before + num_rows))) is not None:
            yield file, (inside[0] - before, (inside[1] or 0) - before)
        before += num_rows


def have_same_rows(one: Source, other: Source, schema: SchemaOptions) -> bool:
    """Return whether rows of two sources with equal content also have equal meaning.

    Files without rows often have equal bytes; a conversion passes over them. Equal paths of media in two folders name
    different media.
    """
    if not isinstance(one, TableSource) or not isinstance(other, TableSource):
        return True
    return _has_rows_below(one, other.first_rows(1)[0], schema)


def has_rows_of(source: Source, known: SourceRecord, schema: SchemaOptions) -> bool:
    """Whether a source has rows of a converted source; see have_same_rows."""
    if not isinstance(source, TableSource):
        return True
    is_there = known.file is not None or "://" in known.at
    return _has_rows_below(source, known.at.rpartition("/")[0], schema) if is_there else source.has_rows


def _has_rows_below(source: TableSource, folder: str | None, schema: SchemaOptions) -> bool:
    """Whether a source has rows, and these are the same if paths of media start from another folder."""
    schema = schema.changed(source.settings)
    if schema.media_root:  # both sources are read with this folder
        return source.has_rows
    named = _media_names(schema)
    has_rows = False
    with closing(source.all_rows()) as rows:
        for ours, row in rows:
            if ours == folder:
                return True
            if _names_media(row.values, named):
                return False
            has_rows = True
    return has_rows


def _media_names(schema: SchemaOptions) -> frozenset[str]:
    """Names of columns and keys that hold media: the usual names, and the names chosen by the user."""
    columns = [dict(schema.columns), schema.dataset_info.columns if schema.dataset_info else {}]
    named = [names[role] for names in columns for role in MEDIA_COLUMNS if names.get(role)]
    return frozenset([*PART_KINDS, *(name for names in MEDIA_COLUMNS.values() for name in names), *map(str, named)])


def _names_media(value: Any, named: frozenset[str], *, is_media: bool = False) -> bool:
    """Return whether a value of a row, or a value inside it, holds a path of media.

    is_media: a text in the value is a path unless it is base64 data; for an object with bytes, the path is not read.
    """
    if isinstance(value, str):
        if _WEB_ADDRESS.fullmatch(value):  # the same from every folder
            return False
        is_path = is_media and bool(value) and not is_data(value)
        return is_path or _MEDIA_PATH.search(value) is not None
    if isinstance(value, Mapping):
        if is_media and value.get("bytes") is not None:
            return _names_media(value["bytes"], named, is_media=True)
        is_part = value.get("type") in PART_KINDS if isinstance(value.get("type"), str) else is_media
        inner = ((each, is_part or name in named) for name, each in value.items() if name != "type")
    else:
        inner = ((each, is_media) for each in (value if isinstance(value, list) else ()))
    return any(_names_media(each, named, is_media=holds) for each, holds in inner)
