"""An inspection as tables, bars and samples in a terminal, or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ...cli.console import console, print_table, visible
from ...cli.console_datasets import print_json, print_notes, print_view
from .summary import Inspection, LengthsView, describe_lengths, summary

BAR_CELLS = 40


def print_inspection(inspection: Inspection, saved: Sequence[Path], *, as_json: bool) -> None:
    """The dataset in tables, its lengths as bars, and the samples that were chosen."""
    if as_json:
        record = dataclasses.asdict(inspection, dict_factory=_without_bytes)
        print_json(record | {"saved": [str(path) for path in saved]})
        return
    _print_rows(inspection.url, summary(inspection))
    _print_rows("columns", inspection.columns)
    for lengths in inspection.lengths:
        _print_rows("lengths", describe_lengths(lengths))
        _print_bars(lengths)
    print_notes(inspection.notes)
    for sample in inspection.samples:
        print_view(sample, total=inspection.num_samples)
    for path in saved:
        console.print(Text(f"saved {path}"), soft_wrap=True)


def _without_bytes(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if not isinstance(value, bytes)}


def _print_rows(title: str, rows: Mapping[str, str]) -> None:
    table = Table("", "", show_header=False)
    for name, value in rows.items():
        table.add_row(Text(visible(name)), Text(visible(value)))
    print_table(title, table)


def _print_bars(lengths: LengthsView) -> None:
    most = max(lengths.counts)
    table = Table.grid(padding=(0, 1))
    for column in ("right", "left", "right"):
        table.add_column(justify=column)
    for first, stop, count in zip(lengths.edges, lengths.edges[1:], lengths.counts, strict=False):
        cells = -(-count * BAR_CELLS // most)  # a bar for any count but 0
        span = f"{first:,}" if stop - first == 1 else f"{first:,} to {stop - 1:,}"
        table.add_row(span, Text("█" * cells, style="cyan"), f"{count:,}")
    console.print(table)
