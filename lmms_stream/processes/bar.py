"""A progress bar of work that a library does unasked; on a terminal alone, so that logs stay readable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def terminal_bar(title: str, *, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more units are done. total: of them; 0 where that is not known.

    unit: "bytes", which are shown as MB, or what is counted.
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
