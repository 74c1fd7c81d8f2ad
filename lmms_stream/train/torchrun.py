"""torchrun, which passes SIGUSR1 on to its ranks. torchrun alone is ended by it, and nothing is saved."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ..processes.ending import end_process


def main() -> None:
    gc.disable()  # what imports make stays; to look for garbage in it takes a tenth of a second and more
    from torch.distributed.run import main as torchrun

    gc.enable()
    signal.signal(signal.SIGUSR1, _tell_ranks)
    torchrun()


def _tell_ranks(number: int, _: FrameType | None) -> None:
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            with suppress(ProcessLookupError, FileNotFoundError):  # the process has ended meanwhile
                if b"lmms_stream.train" in Path("/proc", child, "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(child), number)


if __name__ == "__main__":
    main()
    end_process(0)
