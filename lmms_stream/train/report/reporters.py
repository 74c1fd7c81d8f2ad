"""Where records go: always to train_log.jsonl, by report_to also to TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import ConfigError
from ...storage.disk_errors import disk_errors
from ..run.settings import Reporter
from .train_log import LOG_NAME, ROOM, JsonLines

logger = logging.getLogger("lmms_stream")


class Report(Protocol):
    """Takes the records of a run, each with its step, in their order; after a resume some steps come again."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes the records' numbers to event files. Steps of an earlier run from `first_step` on are hidden."""

    def __init__(self, folder: Path, *, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step if first_step > 1 else None
        self._folder = str(folder)
        with disk_errors(self._folder, room=ROOM):
            self._writer = SummaryWriter(self._folder, purge_step=purged)

    def write(self, record: Mapping[str, Any]) -> None:
        with disk_errors(self._folder, room=ROOM):
            for name, value in _numbers(record).items():
                self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()

    def close(self) -> None:
        with disk_errors(self._folder, room=ROOM):
            self._writer.close()


class WeightsAndBiases:
    """Logs the records' numbers and the settings to a run of W&B; a resumed run goes on under its id.

    WANDB_PROJECT, WANDB_MODE (offline: only to files in the output folder) and its other variables say where.
    """

    def __init__(self, output_dir: Path, *, settings: Mapping[str, Any]):
        import wandb

        id_path = output_dir / "wandb" / "run-id.txt"
        with disk_errors(str(id_path), room=ROOM):
            if not id_path.exists():
                id_path.parent.mkdir(parents=True, exist_ok=True)
                id_path.write_text(uuid.uuid4().hex)
            run_id = id_path.read_text()
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "lmms_stream"),
                name=os.environ.get("WANDB_NAME", output_dir.name),
                id=run_id,
                resume="allow",
                dir=str(output_dir),
                config=dict(settings),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases takes no records ({' '.join(str(error).split())}): run `wandb login`, set "
                "WANDB_MODE=offline, or leave wandb out of report_to"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **_numbers(record)})

    def close(self) -> None:
        self._run.finish()


def check_reporters(report_to: Sequence[Reporter]) -> None:
    """ConfigError for a reporter whose package is not installed."""
    for name in report_to:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # no package, but a folder of that name, such as W&B makes
            raise ConfigError(f"train.report_to {name} needs the package {name}: pip install 'lmms-stream[{name}]'")


def open_reports(
    output_dir: Path, report_to: Sequence[Reporter], *, first_step: int, settings: Mapping[str, Any]
) -> Iterator[Report]:
    """The reports that take the records of a run from first_step on; each is opened when it is yielded."""
    log = JsonLines(output_dir / LOG_NAME)
    if log.is_shared:
        logger.warning(
            "another run writes %s: two runs in one output_dir mix their logs and remove each other's checkpoints; end "
            "one of them, or name another output_dir",
            output_dir / LOG_NAME,
        )
    yield log
    if "tensorboard" in report_to:
        yield TensorBoard(output_dir / "tensorboard", first_step=first_step)
    if "wandb" in report_to:
        yield WeightsAndBiases(output_dir, settings=settings)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
