"""Compare the compiled loops with their sources; `python -m tests.compiled` compiles them again after a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmms_stream

PACKAGE = Path(lmms_stream.__file__).parent


def outdated(folder: Path) -> list[str]:
    """Return the sources of compiled loops that are newer than the library beside them, or without it."""
    return [
        str(source.relative_to(folder))
        for types in sorted(folder.rglob("*.pxd"))
        for source in (types, types.with_suffix(".py"))
        for library in [source.with_suffix(".abi3.so")]
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime
    ]


if __name__ == "__main__" and outdated(PACKAGE):
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    sys.exit(subprocess.run(command, cwd=PACKAGE.parent, check=False).returncode)
