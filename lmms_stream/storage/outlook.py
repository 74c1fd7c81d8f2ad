"""What is known of when the files of a limited cache are needed next, so that those needed last give way first.

Each process that follows a plan knows it for itself; nothing is written down. Where nobody knows, files give way by
least recent use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

NEEDED_NOW = 0.0


class Outlook(Protocol):
    """When files are needed next, as one process sees it.

    version: changes with what is foretold. since_ns: of the clock of records; a file that was used later is in use
    by somebody, whatever is foretold (a rank that is behind, or another run).
    """

    @property
    def version(self) -> int: ...

    @property
    def since_ns(self) -> int: ...

    def next_uses(self, folder: Path, names: list[str]) -> list[float]:
        """Of the files of these records in a folder of the cache: NEEDED_NOW, or larger the later; inf: never."""
        ...
