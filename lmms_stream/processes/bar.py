"""Progress bar for a library's implicit work; only on a terminal, to keep logs readable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def terminal_bar(title: str, *, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of newly finished units. total: number of units; 0 if unknown.

    unit: "bytes", shown as MB, or another name of the units.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )  # fmt: skip

    counts: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn(unit)]
    if unit == "bytes":
        counts = [DownloadColumn()]
    columns = (TextColumn(title), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total or None)
        yield lambda count: progress.advance(task, count)
