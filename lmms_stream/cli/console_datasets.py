"""Output of `lmms-stream verify`, `merge` and `convert --dry-run`.

Text of a dataset is escaped, and cannot control the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..checks import shown_bytes
from ..converters.report import EMPTY, KEY_OF_MESSAGES, MORE_FRAMES, REPEATED, SPEAKER
from ..processors.not_shown import counts_text
from .console import (
    clip,
    console,
    print_found,
    print_next,
    print_record,
    print_records,
    print_table,
    shown_seconds,
    visible,
)

if TYPE_CHECKING:
    from ..converters.dry_run import DryRun
    from ..converters.report import ConvertReport, RowCounts, Unread, UnreadNames
    from ..converters.stored.sample_view import MediaView, SampleView
    from ..converters.stored.verify import VerifyReport


ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
TRAINED_STYLE = "bold green"
PLAIN_MARKS = ("⟦", "⟧")  # around text trained on, without colours
MAX_TEXT = 8000  # characters of one text; --html shows more
MAX_REJECTS = 20  # of a dry run


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(f"note: {visible(note)}", style="yellow"), soft_wrap=True)


def print_verification(remote: str, report: VerifyReport, *, as_json: bool) -> None:
    """Print one line for each problem, and the amounts checked."""
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    for problem in report.problems:
        line = Text.assemble((visible(problem.where), "bold red"), " ", visible(problem.what))
        console.print(line, soft_wrap=True)
    print_notes(report.notes)
    print_record(remote, report)
    if not report.problems:
        console.print(Text("no problems", style="green"))


def print_dry_run(found: DryRun, *, on_error: str, name: str = "") -> None:
    """Print the result of a dry run: kind, samples and rejects of the first rows, and an estimate for all rows.

    name: name of the dataset, for several datasets.
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
    for heading, line in unread_lines(found.unread):
        console.print(Text(visible(f"{heading}: {line}"), style="yellow"), soft_wrap=True)
    if found.not_shown:
        console.print(Text(counts_text(found.not_shown), style="yellow"), soft_wrap=True)
    if found.expected is None:
        print_notes(["a source does not tell how large it is: nothing is said of the whole"])
        return
    print_record("all of it" if found.expected.is_exact else "expected", found.expected, left_out=["is_exact"])


def print_json(record: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=1) + "\n")


def print_view(sample: SampleView, *, total: int) -> None:
    """Print a sample, for `inspect`. total: number of samples in the dataset."""
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
    """Print the model's input for a sample; text trained on has its own style."""
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


# The report of `lmms-stream convert`: samples written, rows left out, next command.

# Schemas of samples with tokens, and the arguments for `lmms-stream index` to count the tokens.
_COUNTED_BY = {**dict.fromkeys(("messages", "preference", "text"), " --tokenizer PATH"), "tokens": ""}
_SLOTS = ("<image>", "<audio>", "<video>")  # placeholders for media of a column
_OF_DOCUMENTS = ("num_documents", "num_tail_tokens", "num_dropped_tokens")  # of a SplitReport


def print_summary(target: str, report: ConvertReport, *, packing_length: int | None = None) -> None:
    """Print a table of the stored data, with omissions in yellow, and the next command.

    packing_length: tokens per pack, for samples made for packs of a fixed length.
    """
    first = f"{target.rstrip('/')}/{next(iter(report.splits))}" if report.splits else target
    table = Table("", "", show_header=False)
    table.add_row("rows", Text(visible(report.kind)))
    if report.num_documents is not None:
        table.add_row("documents", f"{report.num_documents:,}")
    table.add_row("samples", f"{report.num_rows:,}{_tail(report)}")
    table.add_row("tokens", Text(visible(_tokens(first, report))))
    table.add_row("size", f"{shown_bytes(report.num_bytes)} in {_counted(report.num_shards, 'shard')}")
    if not report.was_there:
        table.add_row("time", _time(report))
    for line in left_out_lines(report):
        table.add_row("left out", Text(line), style="yellow")
    for heading, line in unread_lines(report.unread):
        table.add_row(heading, Text(visible(line)), style="yellow")
    if report.num_dropped_tokens:
        reason = "after the last whole sample, dropped by --drop-tail"
        table.add_row("left out", f"{_counted(report.num_dropped_tokens, 'token')} {reason}", style="yellow")
    if report.not_shown:
        table.add_row("supervision", counts_text(report.not_shown), style="yellow")
    print_table(target, table)
    if report.splits:
        left_out = () if report.num_documents is not None else _OF_DOCUMENTS
        print_records("splits", list(report.splits.items()), left_out=left_out)
    print_next(_next_command(first, report, packing_length or 4096))


def plan_command(target: str, packing_length: int = 4096, *, of_texts: bool) -> str:
    """Command line for a report on a dataset's packs; texts may be split, chats may not."""
    overlong = "split" if of_texts else "drop"
    return f"lmms-stream plan {quote(target)} --packing-length {packing_length} --overlong {overlong}"


def left_out_lines(counts: RowCounts) -> list[str]:
    """Number of rows left out, one line for each reason."""
    return [f"{_counted(count, 'row')} {reason}" for reason, count in counts.left_out.items()]


def unread_lines(names: UnreadNames) -> list[tuple[str, str]]:
    """Return a heading and a line for each unread column missing in the first rows, for each unread key of messages,
    and for each probable mistake in messages.
    """
    return [(_heading(name), _unread_line(name, unread)) for name, unread in names.items()]


def _heading(name: str) -> str:
    key = name.removeprefix(KEY_OF_MESSAGES)
    return "trained on" if key != name and (key == REPEATED or key.startswith(EMPTY)) else "not read"


def _unread_line(name: str, unread: Unread) -> str:
    where = f"in {_counted(unread.num_rows, 'row')}, first in {unread.first}"
    key = name.removeprefix(KEY_OF_MESSAGES)
    if key != name and (told := _noted_in_messages(key, where)) is not None:
        return told
    if key != name:
        return f"key {key} of messages {where}: nothing here reads it"
    return (
        f"column {name} {where}: the first rows of its source have none, or another column is read in its place "
        f"(--keep {quote(name)}:json keeps text, numbers, lists and objects)"
    )


def _noted_in_messages(key: str, where: str) -> str | None:
    """Return the line for a finding in the content of messages; None for a key of messages."""
    if key in _SLOTS:
        role = f"{key[1:-1]}s"
        return (
            f"{key} of messages {where}: it stays text, for no column of {role} is read (--columns {role}=COLUMN "
            "reads one)"
        )
    if key == MORE_FRAMES:
        return f"images of several frames or pages {where}: only the first is read (store others as images or a video)"
    if key == REPEATED:
        return (
            f"answers that begin with the whole text of their question {where} (if it is there by mistake, cut it off "
            "with --map)"
        )
    if key.startswith(EMPTY):
        what = "questions" if key == f"{EMPTY}user" else "answers"
        return f"{what} without text or media {where} (--filter leaves such rows out)"
    if key.startswith("<"):
        instead = " (write <image> in its place, and the path into a column images, with --map)" * (key == "<img>")
        return f"{key} of messages {where}: it stays text{instead}"
    if key.startswith(SPEAKER):
        speaker = key.removeprefix(SPEAKER)
        return (
            f"messages of {speaker!r} {where}: only the assistant's are trained on (--roles "
            f"{quote(f'{speaker}=assistant')} if they are)"
        )
    return None


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _tail(report: ConvertReport) -> str:
    if not report.num_tail_tokens:
        return ""
    which = "the last ones of all splits are shorter, with" if len(report.splits) > 1 else "the last is shorter, with"
    return f"; {which} {_counted(report.num_tail_tokens, 'token')}"


def _tokens(target: str, report: ConvertReport) -> str:
    if report.num_tokens is not None:
        return f"{report.num_tokens:,}, {report.num_tokens / max(report.num_rows, 1):,.0f} a sample"
    return "not counted" if report.schema in _COUNTED_BY else "none"


def _time(report: ConvertReport) -> str:
    seconds = max(report.seconds, 1e-9)
    rates = f"{report.num_rows / seconds:,.0f} samples/s, {shown_bytes(report.num_bytes / seconds)}/s"
    return f"{shown_seconds(report.seconds)}, {rates}"


def _next_command(target: str, report: ConvertReport, packing_length: int) -> str:
    """Return the next command: `plan` with counted tokens, else `index`, else `inspect`."""
    if report.num_tokens is not None:
        return plan_command(target, packing_length, of_texts=report.schema == "text")
    if report.schema in _COUNTED_BY:
        return f"lmms-stream index {quote(target)}{_COUNTED_BY[report.schema]}"
    return f"lmms-stream inspect {quote(target)}"
