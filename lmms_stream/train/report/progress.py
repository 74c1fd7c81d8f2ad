"""Shows how far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_S = 60.0  # seconds between lines where there is no terminal
_REFRESH_S = 0.2
_SHOWN = (
    ("epoch", "epoch {:.2f}"),
    ("loss", "loss {:.4f}"),
    ("eval_loss", "eval loss {:.4f}"),
    ("perf/tokens_per_s", "{:,.0f} tokens/s"),
    ("perf/mfu", "MFU {:.1%}"),
)


class RunProgress:
    """While entered, shows the position of a run of `length`, in `unit` (steps or tokens), with the latest figures.

    It has no thread: it draws only when it is called.
    """

    def __init__(self, length: int, *, unit: str, done: int, shown: bool, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._shown = shown
        self._length = length
        self._unit = unit
        self._figures: dict[str, str] = {}
        self._drawn = self._line_at = -float("inf")
        self._begun_at, self._begun = time.monotonic(), done
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            auto_refresh=False,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task(self._where(done), total=length, completed=done, figures="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def move(self, position: int) -> None:
        """Show that the run is at `position`."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=position, description=self._where(position))
            if time.monotonic() - self._drawn >= _REFRESH_S or position >= self._length:
                self._drawn = time.monotonic()
                self._bar.refresh()

    def tell(self, record: Mapping[str, Any], position: int) -> None:
        """Show the figures of a record."""
        if not self._shown:
            return
        self._figures |= {name: form.format(record[name]) for name, form in _SHOWN if name in record}
        figures = "  ".join(self._figures[name] for name, _ in _SHOWN if name in self._figures)
        if not self._bar.disable:
            self._bar.update(self._task, figures=figures)
            return
        if time.monotonic() - self._line_at >= LINE_S or position >= self._length:
            self._line_at = time.monotonic()
            left_s = (self._length - position) * (self._line_at - self._begun_at) / max(1, position - self._begun)
            line = f"{self._where(position)}  {figures}  {timedelta(seconds=round(left_s))} left"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _where(self, position: int) -> str:
        return f"{self._unit} {position:,} of {self._length:,}"
