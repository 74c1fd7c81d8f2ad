"""torch's flight recorder of NCCL's collectives: what each rank had begun when one of them timed out.

torch keeps the latest collectives in memory, and writes them to a file for each rank when one times out. The variables
have these names since torch 2.9 (FlightRecorder.hpp and ProcessGroupNCCL.hpp in torch/csrc/distributed/c10d).
"""

from __future__ import annotations

import os
from pathlib import Path

STACKS = "stacks"  # the folder in the output_dir of what ranks that stand still leave
NUM_COLLECTIVES = 2000  # that are kept, as torch itself does since 2.7
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second: as they were called before
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_begins: list[str] = []  # the beginning of the files' paths, where this process records


def record_collectives(folder: Path) -> None:
    """Have NCCL's collectives of this process recorded; call it before the process group is made.

    What is set in the environment stays. folder: of the files, unless another is set.
    """
    _set_default(_SIZE, str(NUM_COLLECTIVES))
    _set_default(_ON_TIMEOUT, "1")
    _set_default(_FILES, str((folder / "nccl-rank-").absolute()))
    _begins[:] = [next(os.environ[name] for name in _FILES if name in os.environ)]


def flight_recorder_files() -> str:
    """What is said of the files of this process's recorder; nothing where none records."""
    if not _begins:
        return ""
    return f"; NCCL's collectives of each rank N will be in {_begins[0]}N, which torchfrtrace reads"


def _set_default(names: tuple[str, str], value: str) -> None:
    """Set the first of two variables that mean the same, unless one of them is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value
