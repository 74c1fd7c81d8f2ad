"""Tables and progress bars of the command line (rich)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from ..checks import shown_bytes

console = Console()
BAR_WIDTH = 40  # columns, if the terminal is wide enough
_WHOLE = Column(no_wrap=True)  # of a bar: in a narrow terminal only the bar itself shrinks

_LABELS = {
    "num_bytes": "size",
    "seconds": "time",
    "lower_bound": "fewest packs possible",
    "shards_per_step_median": "shards of a step, median",
    "shards_per_step_max": "shards of a step, most",
    "num_spilled_packs": "packs of other nodes",
    "num_run_steps": "steps of the run",
    "run_end": "end of the run",
    "num_seen": "steps looked at",
    "num_overlong": "overlong samples",
    "num_beyond_positions": "samples beyond the model's positions",
    "num_quarantined": "quarantined samples",
    "num_dropped": "dropped samples",
    "num_without": "samples with nothing trained on",
    "num_refused": "refused samples",
    "num_looked_at": "samples looked at",
}


class _RateColumn(ProgressColumn):
    def __init__(self, unit: str):
        super().__init__(_WHOLE)
        self._unit = unit

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        return Text(f"{_amount(rate, self._unit)}/s" if rate else "")


class _CountColumn(ProgressColumn):
    def __init__(self, unit: str):
        super().__init__(_WHOLE)
        self._unit = unit

    def render(self, task: Task) -> Text:
        if not task.total:
            return Text(_amount(task.completed, self._unit))
        done = shown_bytes(task.completed) if self._unit == "bytes" else f"{task.completed:,.0f}"
        return Text(f"{done} of {_amount(task.total, self._unit)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """Progress bar. `begin` sets the end, 0 for unknown; earlier work is excluded from the rate."""

    _progress: Progress
    _task: TaskID

    def begin(self, total: int, *, done: int = 0) -> None:
        self._progress.reset(self._task, total=total, completed=done, visible=True)

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def count_rows(self, count: int) -> None:
        """Count finished rows, in addition to the bar's own unit."""
        task = self._progress.tasks[self._task]
        num_rows = task.fields["num_rows"] + count
        rate = f", {num_rows / task.elapsed:,.0f}/s" if task.elapsed else ""
        self._progress.update(self._task, num_rows=num_rows, also=f"{num_rows:,} row{'s' * (num_rows != 1)}{rate}")


@contextmanager
def bar(description: str, *, unit: str, shown: bool = True) -> Iterator[Bar]:
    """Yield a bar with count, rate and remaining time, on a line of a terminal, shown after its `begin`."""
    is_narrow = console.width < 2 * BAR_WIDTH + 20
    columns = (
        TextColumn("{task.description}", table_column=_WHOLE),
        BarColumn(bar_width=None if is_narrow else BAR_WIDTH),
        _CountColumn(unit),
        _RateColumn(unit),
        TextColumn("{task.fields[also]}", table_column=_WHOLE),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=_WHOLE),
    )
    with Progress(*columns, console=console, expand=is_narrow, disable=not (shown and console.is_terminal)) as progress:
        yield Bar(progress, progress.add_task(description, total=0, visible=False, num_rows=0, also=""))


def print_record(
    title: str, record: Any, *, left_out: Sequence[str] = (), labels: Mapping[str, str] | None = None
) -> None:
    """Print the fields of a dataclass as a table of two columns, without arrays, mappings and fields in `left_out`.

    labels: labels of fields with unclear names.
    """
    table = Table("", "", show_header=False)
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name not in left_out and (value is None or isinstance(value, int | float | str)):
            label = (labels or {}).get(field.name, label_of(field.name))
            table.add_row(label, Text(visible(shown_value(field.name, value))))
    print_table(title, table)


def print_table(title: str, table: Table) -> None:
    """Print a table below its title. The title has its own line: long titles do not fit the table's width."""
    console.print(Text(visible(title), style="bold"), soft_wrap=True)
    console.print(table)


def print_next(command: str) -> None:
    """Print the next command on one line of any length, for copying."""
    console.print(Text(f"next: {visible(command)}"), soft_wrap=True)


def print_found(text: str) -> None:
    """Print a finding in a source; omissions are yellow."""
    shown = Text(visible(text))
    shown.highlight_regex(r"leaves out .*", "yellow")
    console.print(shown, soft_wrap=True)


def print_records(
    title: str,
    records: Sequence[tuple[str, Any]],
    *,
    left_out: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> None:
    """Print named dataclasses, one column per record, to fit long names and many fields.

    left_out: fields to hide. labels: labels of fields with unclear names.
    """
    table = Table("", *(Column(Text(visible(name))) for name, _ in records))
    for field in dataclasses.fields(records[0][1]):
        if field.name not in ("source", *left_out):
            values = (shown_value(field.name, getattr(record, field.name)) for _, record in records)
            table.add_row((labels or {}).get(field.name, label_of(field.name)), *values)
    print_table(title, table)


def shown_seconds(seconds: float) -> str:
    """Return a time in readable units.

    >>> shown_seconds(7.24), shown_seconds(3700)
    ('7.2 s', '1 h 1 min 40 s')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = f"{minutes // 60:,} h " if minutes >= 60 else ""
    return f"{hours}{minutes % 60} min {rest} s"


def _amount(value: float, unit: str) -> str:
    return shown_bytes(value) if unit == "bytes" else f"{value:,.0f} {unit}"


def label_of(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " ").removeprefix("num "))


def shown_value(name: str, value: int | float | str | None) -> str:
    if value is None:
        return {"num_steps": "no end", "num_run_steps": "not known"}.get(name, "-")
    if isinstance(value, str):
        return value
    if name == "efficiency" or name.endswith(("_share", "_share_before")):
        return f"{value:.2%}"
    if "imbalance" in name:
        return f"{value:.4f}"
    if name == "num_bytes":
        return shown_bytes(value)
    if name == "seconds":
        return shown_seconds(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


# Text of a dataset -> visible text: escapes replace characters that would control a terminal or reorder lines.

# Control characters but tab and newline; marks that turn the direction of text, or hide (joiners stay: emoji and a few
# scripts need them); line separators; halves of surrogate pairs, which cannot be encoded.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text with control characters escaped.

    >>> visible("a\\tb\\x1b[31m\\u202e")
    'a\\tb\\\\x1b[31m\\\\u202e'
    """
    return _UNSEEN.sub(lambda match: _escape(ord(match[0])), text)


def clip(text: str, limit: int) -> str:
    """Return the text; for a longer text than `limit`, its beginning and the size of the rest."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
