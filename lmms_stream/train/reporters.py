"""Where records go: always to train_log.jsonl, by report_to also to TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from ..errors import ConfigError, StorageError
from .settings import Reporter

LOG_NAME = "train_log.jsonl"
_BLOCK = 1 << 16


class Report(Protocol):
    """Takes the records of a run, each with its step, in their order; after a resume steps may come again."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A line for each record. What an earlier run wrote is kept, but for half a line that it was killed at."""

    def __init__(self, path: Path):
        self._path = path
        with self._failures():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.truncate(_end_of_lines(self._file))

    def write(self, record: Mapping[str, Any]) -> None:
        with self._failures():
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with self._failures():  # it tries again to write what could not be
            self._file.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written ({error.strerror}): correct what is wrong with train.output_dir, or "
                "name another"
            ) from error


class TensorBoard:
    """Event files of the records' numbers. Of an earlier run, steps from `first_step` on are hidden."""

    def __init__(self, folder: Path, *, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(folder), purge_step=purged)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the records' numbers over their steps, with the settings; a resumed run goes on under its id.

    Where it goes is said by WANDB_PROJECT, WANDB_MODE (offline: to files in the output folder alone) and its other
    variables.
    """

    def __init__(self, output_dir: Path, *, settings: Mapping[str, Any]):
        import wandb

        id_path = output_dir / "wandb" / "run-id.txt"
        if not id_path.exists():
            id_path.parent.mkdir(parents=True, exist_ok=True)
            id_path.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lmms_stream"),
            name=os.environ.get("WANDB_NAME", output_dir.name),
            id=id_path.read_text(),
            resume="allow",
            dir=str(output_dir),
            config=dict(settings),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **_numbers(record)})

    def close(self) -> None:
        self._run.finish()


def check_reporters(report_to: Sequence[Reporter]) -> None:
    """ConfigError for one whose package is not installed."""
    for name in report_to:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # no file: a folder of that name, which W&B itself makes
            raise ConfigError(f"train.report_to {name} needs the package {name}: pip install 'lmms-stream[{name}]'")


def open_reports(
    output_dir: Path, report_to: Sequence[Reporter], *, first_step: int, settings: Mapping[str, Any]
) -> list[Report]:
    """What the records of a run are to be written to, from first_step on."""
    reports: list[Report] = [JsonLines(output_dir / LOG_NAME)]
    if "tensorboard" in report_to:
        reports.append(TensorBoard(output_dir / "tensorboard", first_step=first_step))
    if "wandb" in report_to:
        reports.append(WeightsAndBiases(output_dir, settings=settings))
    return reports


def _end_of_lines(file: IO[bytes]) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
