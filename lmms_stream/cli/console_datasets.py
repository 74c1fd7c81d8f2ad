"""What `lmms-stream verify`, `inspect`, `merge` and `convert --dry-run` print.

Text of a dataset is shown, never obeyed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..converters.stored.inspect.visible import clip, visible
from ..processors.not_shown import counts_text
from .console import console, print_found, print_record, print_table
from .convert_summary import left_out_lines, unread_lines

if TYPE_CHECKING:
    from ..converters.dry_run import DryRun
    from ..converters.stored.inspect.sample import MediaView, SampleView
    from ..converters.stored.inspect.summary import Inspection, LengthsView
    from ..converters.stored.verify import VerifyReport

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
TRAINED_STYLE = "bold green"
PLAIN_MARKS = ("⟦", "⟧")  # of what is trained on, where there are no colours
MAX_TEXT = 8000  # characters of one text; --html shows more
BAR_CELLS = 40
MAX_REJECTS = 20  # rows that do not fit, of a dry run


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(f"note: {visible(note)}", style="yellow"), soft_wrap=True)


def print_verification(remote: str, report: VerifyReport, *, as_json: bool) -> None:
    """One line for each problem, and what was looked at."""
    if as_json:
        _print_json(dataclasses.asdict(report))
        return
    for problem in report.problems:
        line = Text.assemble((visible(problem.where), "bold red"), " ", visible(problem.what))
        console.print(line, soft_wrap=True)
    print_notes(report.notes)
    print_record(remote, report)
    if not report.problems:
        console.print(Text("no problems", style="green"))


def print_inspection(inspection: Inspection, saved: Sequence[Path], *, as_json: bool) -> None:
    """The dataset in tables, its lengths as bars, and the samples that were chosen."""
    if as_json:
        record = dataclasses.asdict(inspection, dict_factory=_without_bytes)
        _print_json(record | {"saved": [str(path) for path in saved]})
        return
    from ..converters.stored.inspect.summary import describe_lengths, summary

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


def print_dry_run(found: DryRun, *, on_error: str, name: str = "") -> None:
    """What the first rows of a conversion say: their kind, samples, rejects, and what to expect of all of it.

    name: of the dataset, where there are several.
    """
    if name:
        console.print(Rule(Text(visible(name))))
    for line in found.found:
        print_found(line)
    for sample in found.samples:
        print_view(sample, total=found.num_samples)
    for reject in found.rejects[:MAX_REJECTS]:
        console.print(Text(visible(reject), style="yellow"), soft_wrap=True)
    if len(found.rejects) > MAX_REJECTS:
        console.print(Text(f"and {len(found.rejects) - MAX_REJECTS:,} other rows that do not fit", style="yellow"))
    if found.rejects and on_error == "fail":
        print_notes(
            ["the conversion would end at the first row that does not fit: pass --on-error skip, or correct it"]
        )
    print_record("rows that were read", found, left_out=list(found.as_dict()))
    for line in left_out_lines(found):
        console.print(Text(f"left out: {line}", style="yellow"), soft_wrap=True)
    for line in unread_lines(found.unread):
        console.print(Text(visible(f"not read: {line}"), style="yellow"), soft_wrap=True)
    if found.not_shown:
        console.print(Text(counts_text(found.not_shown), style="yellow"), soft_wrap=True)
    if found.expected is None:
        print_notes(["a source does not tell how large it is: nothing is said of the whole"])
        return
    print_record("all of it" if found.expected.is_exact else "expected", found.expected, left_out=["is_exact"])


def _print_json(record: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=1) + "\n")


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


def print_view(sample: SampleView, *, total: int) -> None:
    """A sample, as `inspect` shows it. total: samples of its dataset."""
    title = f"sample {sample.number:,} of {total:,}, in {visible(sample.shard)}, {sample.num_bytes:,} bytes"
    console.print(Rule(Text(title)))
    if sample.source:
        console.print(Text(f"made of {visible(sample.source)}", style="dim"), soft_wrap=True)
    if sample.tokens is not None and not sample.media:
        _print_tokens(sample)
        _print_values(sample)
        return
    if sample.tools:
        console.print(Text("tools", style="bold"))
    for tool in sample.tools:
        console.print(Text(_shown(tool)), soft_wrap=True)
    for message in sample.messages:
        style = ROLE_STYLES.get(message.role, "white")
        console.print(Text(visible(message.role), style=f"bold {style}"))
        for block in message.blocks:
            if block.media is None:
                console.print(Text(_shown(block.text), style=style), soft_wrap=True)
            else:
                _print_media(block.media, sample.media[block.media])
    if not sample.messages:
        for number, medium in enumerate(sample.media):
            _print_media(number, medium)
    _print_values(sample)
    if sample.tokens is not None:
        _print_tokens(sample)
    print_notes([sample.note] if sample.note else [])


def _print_values(sample: SampleView) -> None:
    for name, value in sample.values.items():
        console.print(Text.assemble((visible(name), "bold"), ": ", _shown(value)), soft_wrap=True)


def _print_media(number: int, medium: MediaView) -> None:
    console.print(Text(f"[media {number}: {visible(medium.label)}]", style="blue"), soft_wrap=True)


def _print_tokens(sample: SampleView) -> None:
    """The sample as a model reads it; what is trained on is in another style than the rest."""
    tokens = sample.tokens
    assert tokens is not None
    begin, end = ("", "") if console.color_system and not console.no_color else PLAIN_MARKS
    told = f"{tokens.num_trained:,} of them trained on{f', between {begin} and {end}' if begin else ''}"
    console.print(Text.assemble(f"{tokens.num_tokens:,} tokens, ", (told, TRAINED_STYLE)))
    text = Text()
    for run in tokens.runs:
        if run.heading:
            above = "\n" if text else ""
            text.append(f"{above}{run.heading}\n", style="bold")
        if run.seen is not None:
            text.append(f"[{visible(sample.seen[run.seen].label)}]", style="blue")
        elif run.trained:
            text.append(f"{begin}{_shown(run.text)}{end}", style=TRAINED_STYLE)
        else:
            text.append(_shown(run.text), style="dim")
    console.print(text, soft_wrap=True)


def _shown(text: str) -> str:
    return visible(clip(text, MAX_TEXT))
