"""What the user names -> the log of a run, its checkpoints, and what its settings say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import load_mapping
from ..errors import ConfigError, DataError
from ..storage.disk_errors import disk_errors
from ..train.checkpoint.paths import checkpoints_url
from ..train.checkpoint.store import COMPLETE_NAME, STATE_NAME, step_of
from ..train.report.train_log import LOG_NAME

_CONFIGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSource:
    """Where a run writes. checkpoints: None where they lie in an object store. datasets: their settings by name, where
    the config of the run is known; that of one dataset is "".
    """

    name: str
    log: Path
    checkpoints: Path | None
    settings: Mapping[str, Any] | None
    datasets: Mapping[str, Mapping[str, Any]]

    def settings_now(self) -> Mapping[str, Any]:
        """How the run trains: what its config says, or its latest checkpoint; empty where neither is there."""
        if self.settings is not None:
            return self.settings
        return next(filter(None, map(_saved_settings, reversed(self.saved))), {})

    @property
    def saved(self) -> list[Path]:
        """The checkpoints that are there, the latest last."""
        if self.checkpoints is None:
            return []
        named = (path for path in self.checkpoints.glob("*") if step_of(path.name) is not None)
        return sorted(path for path in named if (path / COMPLETE_NAME).exists())


def open_run(path: Path) -> RunSource:
    """The run of an output_dir, of its log, or of the YAML file that it is trained by.

    DataError for what is none of these; ConfigError for a file that names no output_dir. A run of a file need not have
    begun.
    """
    with disk_errors(str(path)):
        if path.suffix in _CONFIGS and path.is_file():
            return _configured(path)
        folder = path.parent if path.name == LOG_NAME else path
        if not (folder / LOG_NAME).is_file():
            raise DataError(
                f"{path}: no run there: name the output_dir of a run that has begun, its {LOG_NAME}, or the YAML file "
                "that it is trained by"
            )
    checkpoints = Path(checkpoints_url(str(folder), None))
    return RunSource(name=str(path), log=folder / LOG_NAME, checkpoints=checkpoints, settings=None, datasets={})


def _configured(path: Path) -> RunSource:
    data = load_mapping(path)
    train, launched = data.get("train"), data.get("trainer_args")  # ours, or LMMS Engine's launch file
    settings = train if isinstance(train, Mapping) else launched if isinstance(launched, Mapping) else {}
    output_dir = settings.get("output_dir")
    if not isinstance(output_dir, str):
        raise ConfigError(f"{path} names no train.output_dir: name the file that a run is trained by, or its folder")
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
    except (OSError, ValueError, KeyError, TypeError):  # it is being removed, or is none of ours: nothing is known then
        return {}
    return settings if isinstance(settings, Mapping) else {}
