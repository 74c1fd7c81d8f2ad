"""Figures of a plan as tables, or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ...cli.console import console, label_of, print_record, print_records, print_table, shown_value, visible
from .report import EpochReport, KindsReport, StepsReport, TrainedReport

COMPARED_FIELDS = ("num_packs", "lower_bound", "efficiency", "samples_per_pack")


def print_plan(
    epochs: Sequence[EpochReport],
    steps: StepsReport,
    comparison: Sequence[EpochReport],
    kinds: Sequence[KindsReport] = (),
    trained: Sequence[TrainedReport] = (),
    *,
    as_json: bool,
) -> None:
    """What `lmms-stream plan` found, as tables or as one JSON object."""
    if as_json:
        tables: dict[str, Sequence[Any]] = {
            "epochs": epochs,
            "comparison": comparison,
            "kinds": kinds,
            "trained": trained,
        }
        records = {name: [dataclasses.asdict(record) for record in table] for name, table in tables.items()}
        sys.stdout.write(json.dumps(records | {"steps": dataclasses.asdict(steps)}, indent=1) + "\n")
        return
    of_media = () if kinds else ("num_overlong_media", "tower_imbalance", "tower_imbalance_in_order")
    if all(report.num_beyond_positions is None for report in epochs):
        of_media = (*of_media, "num_beyond_positions")
    print_records("epochs", [(report.source, report) for report in epochs], left_out=of_media)
    if kinds:
        print_records("text and media", [(report.source, report) for report in kinds])
    print_record("steps", steps, left_out=of_media, labels={"num_seen": "steps looked at"})
    if comparison:
        table = Table("", *map(label_of, COMPARED_FIELDS))
        for record in comparison:
            table.add_row(record.source, *(shown_value(name, getattr(record, name)) for name in COMPARED_FIELDS))
        print_table("strategies, epoch 0", table)
    _print_trained(trained)


def _print_trained(trained: Sequence[TrainedReport]) -> None:
    """The sources whose trained tokens are known as a table; a line for each other one, and for each without any."""
    known = [(report.source, report) for report in trained if report.unknown is None]
    if known:
        print_records("trained on", known, left_out=["unknown"])
    for report in trained:
        line = ""
        if report.unknown is not None:
            line = f"the share of trained tokens of {report.source} is not known: {report.unknown}"
        elif report.num_without == report.num_looked_at - report.num_refused:
            line = (
                f"nothing is trained on in any of the {report.num_looked_at:,} samples of {report.source} that were "
                "looked at: correct what is trained on, or leave the source out"
            )
        if line:
            console.print(Text(visible(line), style="yellow"))
