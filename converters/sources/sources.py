"""The user's specs -> sources, which cut themselves into units. specs -> [sources] -> units."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import ConfigError, DataError, ObjectMissingError
from ...mds.index import INDEX_NAME
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage, missing
from ...storage.storage import Storage, open_storage
from ...types import StoredObject
from .detect import FORMATS, QUOTES, check_format, named_format, reads_ranges
from .files import Fetch, StoredFile
from .folders import FolderTable, MakeUnit, TableWithColumns, columns_of, image_unit, text_unit
from .hub import HubDataset, HubSpec, SavedTable, only_split, rows_of_split, saved_kind
from .listing import (
    README,
    check_numbered,
    check_once,
    checked_format,
    configurations_of,
    data_files,
    files_of_configuration,
    files_of_split,
    identity_of,
    is_shown,
    matching_files,
    path_inside,
    without_target,
)
from .lists import DATASET_INFO, LISTS, dataset_info_specs, is_dataset_info, is_list, yaml_specs
from .manifests import ManifestTable, Tables, folder_of, manifests_in
from .mds import DatasetFiles, StoredSource, StoredTable, datasets_below, read_ids
from .specs import Spec, glob_base, glob_pattern, is_there, literal_prefix, parent_and_key, parse_spec
from .table import USUAL, Delimited, Location, Table, TableSource, limited
from .units import UNIT_BYTES, NoRowsError, Source


def open_sources(
    specs: Sequence[str | Spec | Source],
    *,
    format: str | None = None,
    delimited: Delimited = USUAL,
    scratch: Path,
    unit_bytes: int | UnitBytes = UNIT_BYTES,
    refused: Callable[[str, DataError], None] | None = None,
    ids: Path | None = None,
    target: str | None = None,
    media_root: str | None = None,
) -> list[Source]:
    """Return the sources of the specs, in order; files of folders and globs are sorted by name. Sources stay.

    A spec is a file, a folder or a glob, local or in an object store (s3://…); hf:NAME?split=… (see HubSpec); the
    folder or URL of an MDS dataset, with a row per sample; a YAML list of specs, with settings per entry; or
    LLaMA-Factory's dataset_info.json#NAME,NAME. FOLDER?config=main&split=train selects a configuration and a split of a
    folder (config=* selects all configurations), PATH@[START:STOP] a slice of the rows of one source, FILE.json#KEY a
    member of an object.

    format: format of the specs, regardless of name and content. delimited: settings of CSV and TSV. scratch: folder for
    files fetched from object stores, each from its turn until its source is closed. unit_bytes: approximate bytes of a
    unit, or a function of the bytes of a source; the cuts depend on it. refused: receives the name and the error of
    each unreadable file of a folder or glob; without it the error is raised. ids: file of the sample ids to read of the
    only source, an MDS dataset; see read_ids. target: place of the dataset to write; its files are left out of a folder
    or glob around it. media_root: the user's folder of media.

    Raise DataError for empty, unknown or contradictory sources, StorageError for missing or unreadable sources. Files
    in object stores are opened at their turn, and `units` raises their errors. Units read ranges of a stored file if
    the format in its name allows ranges; other files are fetched first (see Source).
    """
    check_format(format)
    units = unit_bytes if callable(unit_bytes) else lambda num_bytes: unit_bytes
    opener = Opener(scratch, units, delimited, refused, target, media_root)
    for each in specs:
        if not isinstance(each, str | Spec):
            opener.sources.append(each)
            continue
        with disk_errors(each.text if isinstance(each, Spec) else each):
            opener.open(each if isinstance(each, Spec) else parse_spec(each, format=format))
    if ids is not None:
        opener.select(ids)
    return list(opener.sources)


# Spec -> sources: files, folders, globs, lists, datasets, local or in stores.

_Refused = Callable[[str, DataError], None] | None
UnitBytes = Callable[[int], int]  # bytes of a source -> approximate bytes of its units
_OTHER_TARGET = "choose another target"
FOLDER_FORMATS = ("text", "images")  # in these formats, all files of a folder are one source


class Opener:
    """Collects the sources of specs."""

    def __init__(
        self,
        scratch: Path,
        unit_bytes: UnitBytes,
        delimited: Delimited,
        refused: _Refused,
        target: str | None,
        media_root: str | None,
    ):
        self.sources: list[Source] = []
        self._scratch = scratch
        self._unit_bytes = unit_bytes
        self._delimited = delimited
        self._refused = refused
        self._target = target
        self._media_root = media_root
        self._stores: dict[str, Storage] = {}

    def open(self, spec: Spec) -> None:
        """Add the sources of a spec; for a list, the sources of its entries."""
        num_before = len(self.sources)
        self._open(spec)
        if spec.settings.limit is not None:
            added = [each for each in self.sources[num_before:] if isinstance(each, TableSource)]  # of the spec
            self.sources[num_before:] = limited(added, spec.settings.limit)

    def _open(self, spec: Spec) -> None:
        if spec.is_hub:
            self._open_hub(spec)
        elif spec.is_remote:
            self._open_remote(spec)
        elif Path(spec.path).exists():
            self._open_local(spec)
        elif spec.is_glob:
            self._open_glob(spec)
        elif Path(spec.path).is_symlink():
            raise missing(Path(spec.path))
        else:
            raise ObjectMissingError(f"{spec.path}: no such file or folder{spec.nor_text}: check the path")

    def select(self, path: Path) -> None:
        """Select samples of the only source, a dataset, by the ids of a file."""
        source = self.sources[0]
        if len(self.sources) != 1 or not isinstance(source, StoredSource):
            raise DataError(
                f"{path} lists ids of samples, which need exactly one source, an MDS dataset: name only this dataset "
                "as the source"
            )
        if source.rows != slice(None):
            raise DataError(f"{source.name}: a slice and ids both select samples: leave out one of them")
        source.select(read_ids(path))

    def _open_hub(self, spec: Spec) -> None:
        hub = HubSpec.parse(spec.path)
        if saved_kind(Path(hub.name)):
            self._open_part(replace(spec, format=None), Path(hub.name), hub.split)
            return
        dataset = HubDataset(hub, name=spec.path)
        folder = Path(hub.name)
        if folder.is_dir() and path_inside(self._target, hub.name) is not None:
            raise ConfigError(
                f"{self._target} is inside the source {spec.path}, and would be read as a part of it: {_OTHER_TARGET}"
            )
        num_bytes, at = dataset.num_bytes, folder if folder.is_dir() else None
        location = self._location(folder, spec, name=spec.path, num_bytes=num_bytes, folder=at)
        self._add(
            spec,
            partial(dataset.table, location),
            location,
            identity=dataset.identity,
            num_bytes=num_bytes,
            pieces=None if spec.is_sliced else dataset.files,
        )

    def _open_remote(self, spec: Spec) -> None:
        if spec.is_glob:
            self._open_glob(spec)
            return
        parent, key = parent_and_key(spec.path)
        is_folder = not named_format(key)[0] or spec.path.endswith("/")
        found = self._store(spec.path.rstrip("/")).list_objects("") if is_folder else []
        if any(file.key == INDEX_NAME for file in found) and self._open_stored(spec, spec.path.rstrip("/")):
            return
        if found:
            self._open_folder(spec, self._store(spec.path.rstrip("/")), found)
        elif parent.endswith(":"):  # s3://bucket
            raise ObjectMissingError(f"{spec.path}: holds no objects: check the URL")
        else:
            store = self._store(parent)
            try:
                described = store.stat(key)
            except ObjectMissingError as error:
                if not spec.nor_text:
                    raise
                raise type(error)(f"{spec.path} does not exist{spec.nor_text}: {error}") from error
            if not self._open_manifest(spec, store, [described], None):
                self._open_file(spec, store, described, name=spec.path)

    def _open_local(self, spec: Spec) -> None:
        path = Path(spec.path)
        if not path.is_dir():
            store = LocalStorage(path.parent)
            if self._open_manifest(spec, store, [store.stat(path.name)], None):
                return
            if is_list(spec):
                self._open_list(spec)
                return
            if spec.format is None and is_dataset_info(path):
                self._open_described(spec)
                return
            self._open_file(spec, store, store.stat(path.name), name=spec.path)
            return
        kind = saved_kind(path)
        if kind == "splits":
            self._open_part(spec, path, spec.split)
        elif kind == "dataset":
            self._open_saved(spec, path)
        elif not ((path / INDEX_NAME).is_file() and self._open_stored(spec, str(path.absolute()))):
            store = LocalStorage(path)
            self._open_folder(spec, store, store.list_objects("", linked=True))

    def _open_list(self, spec: Spec) -> None:
        _refuse_choice(spec)
        if spec.is_sliced:
            raise DataError(f"{spec.text}: a list of sources is not sliced: write the slice in its entries' paths")
        insisted = None if spec.format == "yaml" else spec.format
        for entry in yaml_specs(Path(spec.path), format=insisted, chosen=spec.key):
            if entry.settings.weight is not None:
                raise DataError(
                    f"{spec.path}: its entries have weights, so each entry becomes a separate dataset: pass only the "
                    "list to lmms-stream convert, which writes a new list with weights, or leave the weights out"
                )
            check_format(entry.format, f"{spec.path}: data_type {entry.format!r} of {entry.text}")
            self.open(entry)

    def _open_described(self, spec: Spec) -> None:
        """Add the datasets of LLaMA-Factory's file."""
        _refuse_choice(spec)
        if spec.is_sliced:
            raise DataError(f"{spec.text}: a list of datasets is not sliced: set num_samples of its entries")
        for each in dataset_info_specs(Path(spec.path), spec.key):
            self.open(each)

    def _open_part(self, spec: Spec, path: Path, split: str | None) -> None:
        """Open a split, or a slice of a split, of a folder saved by `datasets`."""
        base, rows = rows_of_split(split or "")
        if saved_kind(path) == "splits":
            path = path / base if base else only_split(path)
        spec = replace(spec, path=str(path), split=None)
        if rows.step in (None, 1) and not spec.is_sliced:
            self._open(replace(spec, rows=slice(rows.start, rows.stop)))
        elif saved_kind(path) == "dataset":
            self._open_saved(spec, path, rows)
        else:
            self._open(spec)  # raises the error

    def _open_saved(self, spec: Spec, path: Path, rows: slice = slice(None)) -> None:
        _refuse_choice(spec)
        files = without_target(LocalStorage(path).list_objects(""), self._target, str(path))
        num_bytes = sum(file.num_bytes for file in files if file.key.endswith(".arrow"))
        bounds = ("" if bound is None else str(bound) for bound in (rows.start, rows.stop, rows.step))
        name = spec.path if rows == slice(None) else f"{spec.path}[{':'.join(bounds)}]"
        location = self._location(path, spec, name=name, num_bytes=num_bytes, folder=path)
        if spec.key:
            raise DataError(f"{location.name}: a saved dataset has no members to choose from: leave out #{spec.key}")
        self._add(
            spec,
            partial(SavedTable, location, rows),
            location,
            identity=identity_of(name, files),
            num_bytes=num_bytes,
            files=[path / file.key for file in files],
        )

    def _open_stored(self, spec: Spec, url: str) -> bool:
        """Add an MDS dataset; return False if the URL has no dataset."""
        dataset = DatasetFiles.read(self._store(url)) if spec.format is None else None
        if dataset is None:
            return False
        _refuse_choice(spec)
        if spec.key:
            raise DataError(f"{spec.text}: a dataset of shards has no members: name its folder alone")
        location = self._location(Path(url), spec, name=spec.path.rstrip("/"), num_bytes=dataset.num_bytes)
        identity, num_bytes = dataset.identity(location.name), dataset.num_bytes
        open_table = partial(StoredTable, dataset, location)
        shards = [(info.name, info.num_samples) for info in dataset.shards]
        self._add(
            spec,
            open_table,
            location,
            identity=identity,
            num_bytes=num_bytes,
            dataset=dataset,
            pieces=partial(_pieces, dataset.storage, shards),
        )
        return True

    def _open_glob(self, spec: Spec) -> None:
        base, pattern = glob_base(spec.path, is_there=is_there)
        found: Sequence[StoredObject]
        if spec.is_remote:
            store = self._store(base)
            matches = glob_pattern(pattern)
            objects = store.list_objects(literal_prefix(pattern))
            found = [file for file in objects if is_shown(file.key) and matches.fullmatch(file.key)]
        else:
            store = LocalStorage(Path(base or "."))
            found = [store.stat(key) for key in matching_files(Path(base or "."), pattern)]
        found = without_target(found, self._target, base or ".")
        if not found:
            raise ObjectMissingError(
                f"{spec.path}: no file matches{spec.nor_text}: check the pattern and the path ([*], [?] and [[] stand "
                "for these characters themselves)"
            )
        _refuse_choice(replace(spec, split=None))
        if spec.split:
            found = files_of_split(spec, found)
        self._open_files(spec, store, found, base=base)

    def _open_folder(self, spec: Spec, store: Storage, files: Sequence[StoredObject]) -> None:
        if spec.format is None and path_inside(self._target, store.url) == "":
            raise ConfigError(f"{spec.path.rstrip('/')} is a source and the target: {_OTHER_TARGET}")
        files = without_target(files, self._target, store.url)
        datasets = [] if spec.format else datasets_below([file.key for file in files])
        if datasets:
            raise DataError(
                f"{spec.path} holds the datasets {', '.join(datasets[:5])}{', …' if len(datasets) > 5 else ''}: name "
                f"each of them, for example {spec.path.rstrip('/')}/{datasets[0]}"
            )
        readme = store.read(README) if any(file.key == README for file in files) else None
        configurations = configurations_of([file.key for file in files], readme)
        listed = files
        files, told = files_of_configuration(spec, files, configurations)
        shown = [file for file in files if is_shown(file.key) or file.key.endswith("_annotations.coco.json")]
        if self._open_manifest(spec, store, shown, listed):
            return
        chosen = data_files(spec.path, files, insisted=spec.format)
        format = spec.format or named_format(chosen[0].key)[0]
        are_rows = format in FOLDER_FORMATS
        chosen = files_of_split(spec, chosen, only_if_all=format == "text", are_rows=are_rows, told=told)
        check_numbered(spec.path.rstrip("/"), chosen)
        check_once(spec.path.rstrip("/"), chosen)
        self._open_files(spec, store, chosen, base=spec.path.rstrip("/"))

    def _open_manifest(
        self, spec: Spec, store: Storage, files: Sequence[StoredObject], listed: Sequence[StoredObject] | None
    ) -> bool:
        """Add the rows of manifests among files; return False without manifests. listed: the files around them."""
        if spec.format or spec.key:
            return False
        root = spec.folder or spec.settings.rows.get("media_root") or self._media_root
        tables = Tables(store=store, listed=listed, media_root=root, split=spec.split)
        if (found := manifests_in(tables, [file.key for file in files])) is None:
            return False
        manifest, keys = found
        if listed is None:
            _refuse_choice(spec)
        chosen = [file for file in files if file.key in keys]
        if not manifest.holds_splits:
            chosen = files_of_split(spec, chosen, several="each of them as a source of its own")
        keys, needs = [file.key for file in chosen], manifest.needs
        joined = [store.stat(key) for each in keys if needs and not (key := needs(folder_of(each), each)).endswith("/")]
        num_bytes = sum(file.num_bytes for file in chosen)
        name = spec.path.rstrip("/") + (f"/{keys[0]}" if listed is not None and len(keys) == 1 else "")
        location = self._location(Path(), spec, name=name, num_bytes=num_bytes)
        self._add(
            spec,
            partial(ManifestTable, location, manifest, tables, keys),
            location,
            identity=identity_of(name, [*chosen, *joined]),
            num_bytes=num_bytes,
            files=_local_files(store, [*chosen, *joined]),
        )
        return True

    def _open_files(self, spec: Spec, store: Storage, files: Sequence[StoredObject], *, base: str) -> None:
        kinds = {spec.format or named_format(file.key)[0] for file in files}
        if len(kinds) == 1 and kinds <= set(FOLDER_FORMATS):
            self._add_folder(spec, store, files, str(kinds.pop()))
            return
        if len(files) > 1 and (spec.is_sliced or spec.key):
            raise DataError(
                f"{spec.text}: names {len(files)} files, a slice and a #KEY are of one: write one spec for each file"
            )
        for file in files:
            name = f"{base.rstrip('/')}/{file.key}" if base else file.key
            try:
                self._open_file(spec, store, file, name=name, is_part=True)
            except DataError as error:
                if self._refused is None:
                    raise
                self._refused(name, error)

    def _open_file(self, spec: Spec, store: Storage, file: StoredObject, *, name: str, is_part: bool = False) -> None:
        if spec.path == name:
            _refuse_choice(spec)
        told = spec.format or named_format(name)[0]
        if spec.settings.delimited is not None and told is not None and told not in QUOTES:
            raise DataError(f"{name} is {told}, and csv says how CSV and TSV are written: leave csv out of its entry")
        if told in FOLDER_FORMATS:
            self._add_folder(spec, store, [file], str(told), name=name)
            return
        is_described = spec.is_remote and spec.format is None and name.endswith(DATASET_INFO)
        if is_described or (told not in FORMATS and (told or PurePosixPath(name).suffix.lower() in LISTS)):
            raise DataError(f"{name}: a list of sources is read from a file of this machine: download it first")
        fetch: Fetch | None = None
        if isinstance(store, LocalStorage):
            path = store.folder / file.key
            location = self._location(path, spec, name=name, num_bytes=file.num_bytes, folder=path.parent)
            open_table: Callable[[], Table] = partial(_found_table, location, spec.format)
            try:
                open_table = partial(FORMATS[checked_format(location, insisted=spec.format)].table, location)
            except NoRowsError:  # for a file of a folder, raised again at its turn, and then passed over
                if not is_part:
                    raise
        else:
            prefix, _, last = file.key.rpartition("/")
            folder = f"{store.url}/{prefix}" if prefix else store.url
            location = self._location(Path(last), spec, name=name, num_bytes=file.num_bytes, folder=folder)
            stored = StoredFile(store, file)
            if file.tag and reads_ranges(told, location.delimited) and named_format(name)[1] is None:
                location = replace(location, stored=stored)
            else:
                location = replace(location, path=location.scratch / "object")  # its name may be too long for a file
                fetch = Fetch(stored, location.path)
            open_table = partial(_found_table, location, spec.format)
        if is_part and (columns := columns_of(file.key)):
            open_table = partial(TableWithColumns, open_table, columns)
        identity = identity_of(name, [file])
        num_bytes = file.num_bytes
        self._add(
            spec,
            open_table,
            location,
            identity=identity,
            num_bytes=num_bytes,
            fetch=fetch,
            is_part=is_part,
            files=_local_files(store, [file]),
        )

    def _add_folder(
        self, spec: Spec, store: Storage, files: Sequence[StoredObject], format: str, *, name: str | None = None
    ) -> None:
        num_bytes = sum(file.num_bytes for file in files)
        location = self._location(Path(), spec, name=name or spec.path.rstrip("/"), num_bytes=num_bytes)
        if spec.key:
            raise DataError(f"{location.name}: a folder has no members to choose from: leave out #{spec.key}")
        make_unit: MakeUnit = partial(text_unit, store=store)
        if format == "images":
            if name is not None:
                raise DataError(f"{name}: a single image is not a source: name the folder of the class folders")
            location = replace(location, folder=spec.folder or store.url)
            make_unit = image_unit
        open_table = partial(FolderTable, files, make_unit=make_unit, location=location)
        pieces = partial(_pieces, store, [(file.key, 1) for file in files])
        identity = identity_of(location.name, files)
        local = _local_files(store, files)
        self._add(spec, open_table, location, identity=identity, num_bytes=num_bytes, pieces=pieces, files=local)

    def _location(
        self, path: Path, spec: Spec, *, name: str, num_bytes: int, folder: Path | str | None = None
    ) -> Location:
        """Return a source's location. folder: start of media paths, unless the spec names another folder."""
        return Location(
            path=path,
            name=f"{name}#{spec.key}" if spec.key else name,
            folder=spec.folder or (str(folder.absolute()) if isinstance(folder, Path) else folder),
            key=spec.key,
            scratch=self._scratch / f"source-{len(self.sources):06d}",
            unit_bytes=self._unit_bytes(num_bytes),
            delimited=spec.settings.delimited or self._delimited,
        )

    def _add(
        self,
        spec: Spec,
        open_table: Callable[[], Table],
        location: Location,
        *,
        identity: Mapping[str, Any],
        num_bytes: int,
        fetch: Fetch | None = None,
        dataset: DatasetFiles | None = None,
        is_part: bool = False,
        pieces: Callable[[], Iterator[tuple[str, int]]] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        if spec.settings.delimited is not None:  # the settings decide the rows
            settings = {
                key: value for key, value in asdict(spec.settings.delimited).items() if key != "header" or value
            }
            identity = {**identity, "csv": settings}
        if spec.settings.rows:  # and the samples
            identity = {**identity, "settings": json.loads(json.dumps(spec.settings.rows, default=asdict))}
        source = (TableSource if dataset is None else StoredSource)(
            location.name,
            open_table,
            identity=identity,
            num_bytes=num_bytes,
            rows=spec.rows,
            settings=spec.settings.rows,
            scratch=location.scratch,
            fetch=fetch,
            is_part=is_part,
            pieces=pieces,
            files=files,
        )
        if isinstance(source, StoredSource) and dataset is not None:
            source.dataset, source.location = dataset, location
        self.sources.append(source)

    def _store(self, url: str) -> Storage:
        if url not in self._stores:
            self._stores[url] = open_storage(url)
        return self._stores[url]


def _refuse_choice(spec: Spec) -> None:
    """Raise DataError for a config or a split of a source other than a folder."""
    if spec.config or spec.split:
        choice = spec.folder_text().removeprefix(spec.path.rstrip("/"))
        raise DataError(f"{spec.text}: only a folder has configurations and splits: leave out {choice}")


def _local_files(store: Storage, files: Sequence[StoredObject]) -> list[Path]:
    return [store.folder / file.key for file in files] if isinstance(store, LocalStorage) else []


def _pieces(store: Storage, files: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Places of the files of a source, and their numbers of rows."""
    base = str(store.folder.resolve()) if isinstance(store, LocalStorage) else store.url
    return ((f"{base}/{key}", num_rows) for key, num_rows in files)


def _found_table(location: Location, insisted: str | None) -> Table:
    """Return the table of an object, by its name and content."""
    return FORMATS[checked_format(location, insisted=insisted)].table(location)
