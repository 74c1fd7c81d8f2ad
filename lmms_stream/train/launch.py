"""The command that starts a run on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def torchrun_command(config: Path, overrides: Sequence[str] = (), *, nproc: int) -> list[str]:
    """The command that trains with `nproc` processes on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, "-m", "lmms_stream.train", str(config), *overrides]
