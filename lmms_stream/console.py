"""Tables and progress bars of the command line (rich)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console()


@contextmanager
def counter(description: str, *, unit: str) -> Iterator[Callable[[], None]]:
    """A progress display without a known end: calls of what it yields are counted and shown with their rate."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed:,.0f} " + unit),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TaskProgressColumn(show_speed=True), console=console) as progress:
        task = progress.add_task(description, total=None)
        yield lambda: progress.advance(task)


def print_record(title: str, record: Any) -> None:
    """The fields of a dataclass as a table of two columns; arrays and mappings are left out."""
    table = Table("", "", title=title, show_header=False)
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float | str):
            table.add_row(field.name.replace("_", " ").removeprefix("num "), _format(field.name, value))
    console.print(table)


def _format(name: str, value: int | float | str) -> str:
    if isinstance(value, str):
        return value
    if name == "efficiency":
        return f"{value:.2%}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
