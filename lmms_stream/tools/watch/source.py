"""Path of the user -> log, checkpoints and settings of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...config import load_mapping
from ...errors import ConfigError, DataError
from ...storage.failures import disk_errors
from ...train.checkpoint.store import COMPLETE_NAME, STATE_NAME, checkpoints_of, checkpoints_url, step_of
from ...train.report.train_log import LOG_NAME, record_of

_CONFIGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSource:
    """Files of a run. checkpoints: None for checkpoints in an object store. datasets: settings of datasets by name,
    empty without the run's config; the name of a single dataset is "".
    """

    name: str
    log: Path
    checkpoints: Path | None
    settings: Mapping[str, Any] | None
    datasets: Mapping[str, Mapping[str, Any]]

    def settings_now(self) -> Mapping[str, Any]:
        """Training settings of the run's config, or of the latest checkpoint; empty without either."""
        if self.settings is not None:
            return self.settings
        return next(filter(None, map(_saved_settings, reversed(self.saved))), {})

    @property
    def saved(self) -> list[Path]:
        """Complete local checkpoints, oldest first."""
        if self.checkpoints is None:
            return []
        named = (path for path in self.checkpoints.glob("*") if step_of(path.name) is not None)
        return sorted(path for path in named if (path / COMPLETE_NAME).exists())


def open_run(path: Path) -> RunSource:
    """Open the run of an output_dir, of a log, or of a run's YAML file.

    DataError for other paths; ConfigError for a file without output_dir. The run of a file may be before its first
    step.
    """
    with disk_errors(str(path)):
        if path.suffix in _CONFIGS and path.is_file():
            return _configured(path)
        folder = path.parent if path.name == LOG_NAME else path
        if not (folder / LOG_NAME).is_file():
            raise DataError(
                f"{path}: no run found: name the output_dir of a started run, its {LOG_NAME}, or its YAML file"
            )
    kept_at = checkpoints_of(str(folder))
    checkpoints = None if "://" in kept_at else Path(kept_at)
    return RunSource(name=str(path), log=folder / LOG_NAME, checkpoints=checkpoints, settings=None, datasets={})


def _configured(path: Path) -> RunSource:
    data = load_mapping(path)
    train, launched = data.get("train"), data.get("trainer_args")  # ours, or LMMS Engine's launch file
    settings = train if isinstance(train, Mapping) else launched if isinstance(launched, Mapping) else {}
    output_dir = settings.get("output_dir")
    if not isinstance(output_dir, str):
        raise ConfigError(f"{path} names no train.output_dir: name the YAML file of a run, or its folder")
    kept_at = checkpoints_url(output_dir, settings.get("checkpoint_dir"))
    datasets = data.get("datasets") or {"": data.get("dataset")}
    return RunSource(
        name=str(path),
        log=Path(output_dir) / LOG_NAME,
        checkpoints=None if "://" in kept_at else Path(kept_at),
        settings=settings,
        datasets={str(name): each for name, each in datasets.items() if isinstance(each, Mapping)},
    )


def _saved_settings(checkpoint: Path) -> Mapping[str, Any]:
    try:
        state = json.loads((checkpoint / STATE_NAME).read_bytes())
        settings = state["fingerprint"]["train"]
    except (OSError, ValueError, KeyError, TypeError):  # being removed, or from another program: unknown
        return {}
    return settings if isinstance(settings, Mapping) else {}


# The growing log of a run: new records at each read.


class NewRecords(NamedTuple):
    """Records since the last read. is_new_log: the log was replaced; `records` are the new log's first records."""

    records: list[dict[str, Any]]
    is_new_log: bool


class LogTail:
    """Reader of a log written by another process. An incomplete last line is left for the next read.

    num_damaged: number of invalid lines, left out. written_s: time of the last write; None without a log.
    """

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0  # end of the last complete line
        self._inode: int | None = None
        self.num_damaged = 0
        self.written_s: float | None = None

    def read(self) -> NewRecords:
        """Return new records; empty without a log. StorageError for errors of the disk."""
        with disk_errors(str(self._path)):
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                is_new_log = self._inode is not None
                self._begin(None)
                self.written_s = None
                return NewRecords([], is_new_log)
            with file:
                status = os.fstat(file.fileno())
                is_new_log = self._inode != status.st_ino or status.st_size < self._offset
                if is_new_log:
                    self._begin(status.st_ino)
                self.written_s = status.st_mtime
                file.seek(self._offset)
                records = []
                for line in file:
                    if line.endswith(b"\n"):
                        self._offset += len(line)
                        records += self._record(line[:-1])
        return NewRecords(records, is_new_log)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset, self.num_damaged = inode, 0, 0

    def _record(self, line: bytes) -> list[dict[str, Any]]:
        try:
            return [record_of(line, where=str(self._path))]
        except DataError:
            self.num_damaged += 1
            return []
