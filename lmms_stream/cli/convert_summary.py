"""What `lmms-stream convert` says when it is done: what was written, what was left out, and what to do next."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..converters.report import KEY_OF_MESSAGES, MORE_FRAMES, SPEAKER
from ..converters.stored.inspect.visible import visible
from ..processors.not_shown import counts_text
from ..storage.sizes import shown_bytes
from .console import print_next, print_records, print_table, shown_seconds

if TYPE_CHECKING:
    from ..converters.report import ConvertReport, RowCounts, Unread, UnreadNames

# Schemas whose samples have tokens, and what `lmms-stream index` needs to count them.
_COUNTED_BY = {**dict.fromkeys(("messages", "preference", "text"), " --tokenizer PATH"), "tokens": ""}
_SLOTS = ("<image>", "<audio>", "<video>")  # which media of a column fill
_OF_DOCUMENTS = ("num_documents", "num_tail_tokens", "num_dropped_tokens")  # of a SplitReport


def print_summary(target: str, report: ConvertReport, *, packing_length: int | None = None) -> None:
    """Print a table of what is stored at the target, what was left out in yellow, and the next command.

    packing_length: tokens of a pack that the samples were made for, if they were.
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
    for line in unread_lines(report.unread):
        table.add_row("not read", Text(visible(line)), style="yellow")
    if report.num_dropped_tokens:
        reason = "after the last whole sample, dropped by --drop-tail"
        table.add_row("left out", f"{_counted(report.num_dropped_tokens, 'token')} {reason}", style="yellow")
    if report.not_shown:
        table.add_row("not shown", counts_text(report.not_shown), style="yellow")
    print_table(target, table)
    if report.splits:
        left_out = () if report.num_documents is not None else _OF_DOCUMENTS
        print_records("splits", list(report.splits.items()), left_out=left_out)
    print_next(_next_command(first, report, packing_length or 4096))


def plan_command(target: str, packing_length: int = 4096) -> str:
    """The command that says what packs of a dataset amount to."""
    return f"lmms-stream plan {quote(target)} --packing-length {packing_length} --overlong drop"


def left_out_lines(counts: RowCounts) -> list[str]:
    """How many rows are not stored, a line for each reason."""
    return [f"{_counted(count, 'row')} {reason}" for reason, count in counts.left_out.items()]


def unread_lines(names: UnreadNames) -> list[str]:
    """The columns that nothing reads and that the first rows do not have, and the keys of messages that nothing reads,
    a line for each.
    """
    return [_unread_line(name, unread) for name, unread in names.items()]


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
    """Return the line for what a message holds and what is no key; None for a key."""
    if key in _SLOTS:
        role = f"{key[1:-1]}s"
        return (
            f"{key} of messages {where}: it stays text, for no column of {role} is read (--columns {role}=COLUMN "
            "reads one)"
        )
    if key == MORE_FRAMES:
        return f"images of several frames or pages {where}: only the first is read (store others as images or a video)"
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
    """Tokens first, since packs are planned by them."""
    if report.num_tokens is not None:
        return plan_command(target, packing_length)
    if report.schema in _COUNTED_BY:
        return f"lmms-stream index {quote(target)}{_COUNTED_BY[report.schema]}"
    return f"lmms-stream inspect {quote(target)}"
