"""Sources -> shards, once. sources + settings -> [building] -> the URL of a complete dataset.

All processes may call it together: on a node, the process with the lock converts; the others wait and use its result. A
killed process leaves its work, and the next process resumes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....converters.convert import Progress, convert
from ....converters.identity import schemas_of
from ....converters.options import ConvertOptions
from ....converters.report import ConvertReport
from ....converters.rows.mapper import ROWS_VERSION
from ....converters.rows.options import SchemaOptions
from ....converters.rows.user_functions import OF_OBJECTS, UserFunction, code_of, rows_of
from ....converters.sources.sources import open_sources
from ....converters.sources.units import UNIT_BYTES
from ....errors import ConfigError, DataError, ObjectMissingError
from ....mds.index import DATASET_NAME
from ....processes.bar import terminal_bar
from ....processes.interpreter import call_in_interpreter
from ....processes.own_code import class_source
from ....processes.pool import obstacle
from ....processors.base import Processor, processor_fingerprint
from ....storage.cache import home_folder
from ....storage.failures import disk_errors
from ....storage.locks import is_locked, locked, temporary_name, wait_for_other
from ....storage.storage import open_storage
from ....types import World
from ....yaml_text import write_yaml
from .names import EngineDatasetConfig, dataset_type_of
from .source_files import SourceEntry, bucket_of, sources_of

WAIT_S = 24 * 3600.0  # timeout for processes waiting for the conversion
_PREFIX = "lmms_stream"  # prefix of shards in a bucket
logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True)
class RowLoader:
    """A method of a user's dataset for rows: load_from_json or load_from_hf."""

    dataset: Any
    method: str

    @property
    def name(self) -> str:
        kind = type(self.dataset)
        return f"{self.method} of {kind.__module__}.{kind.__qualname__}"

    @property
    def code(self) -> str:
        """Hash of the source code of the dataset's own classes: see class_source."""
        return hashlib.blake2b(class_source(type(self.dataset), asked=self.name).encode(), digest_size=16).hexdigest()

    def named(self, folder: str | None) -> str:
        """Make the method known to conversions in this process, for rows with media in a folder; return its name."""
        name = self.name if folder is None else f"{self.name} with data_folder {folder}"
        OF_OBJECTS[name] = partial(self._row, folder=folder), f"{self.code} {self.dataset.config}"
        return name

    def rows(self, values: dict[str, Any], folder: str | None) -> list[dict[str, Any]]:
        return rows_of(UserFunction(*self.name.split(" ", 1)), partial(self._row, folder=folder), values)

    def _row(self, values: dict[str, Any], folder: str | None) -> Any:
        load = getattr(self.dataset, self.method)
        made = load(values) if self.method == "load_from_hf" else load(values, folder)
        if isinstance(made, Mapping) and "input_ids" in made and "input_ids" not in values:
            raise DataError(
                f"{self.method} returned {', '.join(made)}, expected a row: end it with `return "
                f"super().{self.method}(…)` of the row, and make tokens in a processor (register_processor)"
            )
        return made


@dataclass(frozen=True, kw_only=True)
class Building:
    """A conversion and its target. num_bytes: total bytes of the sources, 0 if unknown.

    is_own: a method of an object changes the rows; other processes cannot call the method.
    """

    listed: Path
    target: str
    options: ConvertOptions
    num_bytes: int
    is_own: bool

    @property
    def is_whole(self) -> bool:
        try:
            open_storage(self.target).read(DATASET_NAME)
        except ObjectMissingError:
            return False
        return True

    @property
    def home(self) -> Path:
        """Folder on this node with the locks of conversions to the target."""
        return home_folder(self.target)


def build_once(
    config: EngineDatasetConfig,
    processor: Processor,
    *,
    world: World,
    wait_s: float = WAIT_S,
    loader: RowLoader | None = None,
) -> str:
    """Return the URL of the shards of a config's sources; convert the sources if the shards do not exist.

    loader: changes the rows. Raises the errors of convert, and DataError if another process does not finish the
    conversion in time.
    """
    building = building_of(config, processor, loader)
    if building.is_whole:
        return building.target
    if (bucket := bucket_of(config)) and not config.HAS_MEDIA_IN_BUCKET:
        raise ConfigError(
            f"{building.target} has no dataset of these sources, and none is written into bucket_name "
            f"{config.bucket_name!r}, where LMMS Engine reads media: leave both keys of the bucket out, and write "
            f"data_folder: {bucket} in the source's entry of datasets for media there, or cache_dir: "
            f"{bucket}/{_PREFIX} to keep shards there"
        )
    with disk_errors(str(building.home)):
        building.home.mkdir(parents=True, exist_ok=True)
    if world.node > 0:
        _wait(lambda: building.is_whole, building, wait_s=wait_s)  # another node converts
    else:
        _convert_once(building, wait_s=wait_s)
    return building.target


def building_of(config: EngineDatasetConfig, processor: Processor, loader: RowLoader | None = None) -> Building:
    """Return the conversion of a config; its target is named by a hash of the sources and all output settings."""
    folder = cache_of(config)
    local = home_folder(folder) if "://" in folder else Path(folder).expanduser().absolute()
    listed = _listed([_loaded(each, loader) for each in sources_of(config)], local / "lists")
    options = ConvertOptions(
        schema=SchemaOptions(kind=dataset_type_of(config).row_kind),
        processor=processor,
        on_error=config.on_error,
        longest=config.longest,
        allow_repeats=True,  # LMMS Engine reads a file each time its list names the file
    )
    sources = open_sources([str(listed)], scratch=local / "scratch")
    described = {
        "sources": [{**source.identity, "name": source.name} for source in sources],
        "media": listed.name,
        "kind": asdict(options.schema),
        "rows": [options.schema.changed(source.settings).identity for source in sources if source.settings],
        "processor": processor_fingerprint(processor),
        "settings": [options.on_error, options.longest],
        "version of rows": ROWS_VERSION,
    }
    if code := code_of(schemas_of(sources, options)):  # code of functions named by entries of a list
        described["code"] = code
    key = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=12).hexdigest()
    target = f"{folder.rstrip('/')}/{key}" if "://" in folder else str(Path(folder).expanduser().absolute() / key)
    return Building(
        listed=listed,
        target=target,
        options=options,
        num_bytes=sum(each.num_bytes for each in sources),
        is_own=loader is not None,
    )


def _loaded(source: SourceEntry, loader: RowLoader | None) -> SourceEntry:
    if loader is None:
        return source
    if "map" in source.settings:
        raise ConfigError(f"map of {source.path} and {loader.name} both change its rows: leave one of them out")
    return replace(source, settings={**source.settings, "map": loader.named(source.data_folder)})


def cache_of(config: EngineDatasetConfig) -> str:
    """Return the folder or URL for shards; ConfigError for two settings of the folder."""
    if config.HAS_MEDIA_IN_BUCKET or not (bucket := bucket_of(config)):
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        return str(config.cache_dir or base / "lmms_stream" / "datasets")
    if config.cache_dir:
        raise ConfigError(
            f"cache_dir {config.cache_dir!r} and object_storage {config.object_storage!r} both set the folder of "
            "shards: leave one of them out"
        )
    return f"{bucket}/{_PREFIX}"


def _listed(sources: Sequence[SourceEntry], folder: Path) -> Path:
    """Write the list of sources to a file and return its path; equal sources give the same file."""
    entries = [
        {
            **source.entry,
            "path": _absolute(source.path, source.data_type),
            **{key: _absolute(source.entry[key], "") for key in ("data_folder", "media_root") if source.entry.get(key)},
        }
        for source in sources
    ]
    text = write_yaml({"datasets": entries}, sort_keys=True)
    path = folder / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.yaml"
    if not path.exists():
        with disk_errors(str(path)):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(path)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    return path


def _absolute(path: str, data_type: str) -> str:
    is_hub = path.startswith("hf:") or (data_type == "hf_dataset" and not Path(path).exists())
    return path if "://" in path or is_hub else str(Path(path).expanduser().absolute())


def _convert_once(building: Building, *, wait_s: float) -> None:
    with locked(building.home / "build.lock", timeout_s=wait_s) as ours:
        if ours is None:
            raise _late(building, wait_s)
        of_killed = building.home / "convert.lock"  # held by children of a killed process
        _wait(lambda: not is_locked(of_killed), building, wait_s=wait_s)
        if not building.is_whole:
            _convert(building)


def _convert(building: Building) -> None:
    started = time.monotonic()
    logger.warning("converting the sources in %s once, into %s", building.listed, building.target)
    call = partial(_converted, building)
    with terminal_bar("converting", total=building.num_bytes, unit="bytes") as advance:
        is_small = 0 < building.num_bytes <= UNIT_BYTES
        if is_small or building.is_own or obstacle(building) is not None:
            report: ConvertReport = call(1, advance)
        else:
            report = call_in_interpreter(partial(call, None), on_progress=advance)
    logger.info(
        "%d samples, %d tokens, in %.1f s; %d rows did not fit, %d were longer than max_length, %d had no text: %s",
        report.num_rows, report.num_tokens or 0, time.monotonic() - started, report.num_rejected, report.num_filtered,
        report.num_empty, building.target,
    )  # fmt: skip


def _converted(building: Building, num_workers: int | None, advance: Callable[[int], None]) -> ConvertReport:
    return convert(
        [building.listed],
        building.target,
        num_workers=num_workers,
        progress=Progress(advance=advance),
        options=building.options,
    )


def _wait(is_done: Callable[[], bool], building: Building, *, wait_s: float) -> None:
    """Wait until is_done; DataError after wait_s."""
    if wait_for_other(is_done, lock=None, begin_s=wait_s, end_s=wait_s).outcome != "done":
        raise _late(building, wait_s)


def _late(building: Building, wait_s: float) -> DataError:
    return DataError(
        f"no other process converted the sources into {building.target} within {wait_s:g} s: all nodes must see this "
        "folder: name another with cache_dir, or the URL of a store"
    )
