"""Compare the compiled loops with their sources; `python -m tests.compiled` fails after a change of the sources."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def outdated(folder: Path) -> list[str]:
    """Return the sources of compiled loops that are newer than the library beside them, or without it."""
    return [
        str(source.relative_to(folder))
        for types in sorted(folder.glob("lmms_*/**/*.pxd"))
        for source in (types, types.with_suffix(".py"))
        for library in [source.with_suffix(".abi3.so")]
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime
    ]


if __name__ == "__main__":
    sys.exit(len(outdated(ROOT)))
