"""A rank that needs the lengths of a dataset: `python -m tests.mds.auto_job FOLDER LOG [DIES_AT]`; prints their sum."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lmms_stream.errors import ConfigError
from lmms_stream.mds.auto import ensure_lengths
from lmms_stream.mds.streams import StoredDataset, StreamConfig
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.types import World


@dataclass(frozen=True)
class Logged:
    """Measures tokens, and writes a byte to a log for each sample; at the sample dies_at its process ends."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "loss_spans")
    schema: ClassVar[str] = "tokens"
    log: Path
    dies_at: int = -1

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "Logged"}

    def measure(self, sample: Mapping[str, Any]) -> int:
        with self.log.open("ab") as file:
            file.write(b".")
        if int(sample["input_ids"][0]) == self.dies_at:
            time.sleep(1)  # the other ranks see it measure
            os._exit(3)
        return len(sample["input_ids"])

    def process(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"input_ids": sample["input_ids"], "labels": sample["input_ids"]}

    @property
    def num_measured(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


def stored_dataset(folder: Path) -> StoredDataset:
    return StoredDataset(StreamConfig(remote=folder), config=FetchConfig())


# Calls for processes of their own


def tells_of_it(on_progress: Callable[[int], None]) -> int:
    on_progress(1)
    on_progress(2)
    return os.getpid()


def fails(on_progress: Callable[[int], None]) -> None:
    raise ConfigError("not so")


def breaks(on_progress: Callable[[int], None]) -> None:
    raise KeyError("a")


def dies(on_progress: Callable[[int], None]) -> None:
    os._exit(3)


def main() -> None:
    folder, log, *dies_at = sys.argv[1:]
    stored, processor = stored_dataset(Path(folder)), Logged(Path(log), *map(int, dies_at))
    ensure_lengths(stored, processor, world=World.detect())
    sys.stdout.write(f"{stored.length_index(processor).num_tokens}\n")


if __name__ == "__main__":
    main()
