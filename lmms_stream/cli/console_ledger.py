"""What `lmms-stream ledger` prints."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..converters.stored.inspect.visible import visible
from .console import console, print_records

if TYPE_CHECKING:
    from ..ledger.run import Ledger
    from ..plan.ledger import PackEntry, StepEntry

SHOWN_IDS = 12  # of a pack, in the table


def print_step(ledger: Ledger, entry: StepEntry, *, as_json: bool) -> None:
    if as_json:
        packs = [_pack_record(pack) for pack in entry.packs]
        _print_json({"step": entry.number, "is_skipped": entry.is_skipped, "packs": packs})
        return
    passed_over = ", which was passed over" if entry.is_skipped else ""
    when = "trained" if entry.number < ledger.stop else "not trained yet"
    table = Table("rank", "micro-batch", "source", "epoch", "pack", "tokens", "samples")
    for pack in entry.packs:
        more = f" and {len(pack.sample_ids) - SHOWN_IDS} more" if len(pack.sample_ids) > SHOWN_IDS else ""
        shown = f"{len(pack.sample_ids)}: {', '.join(map(str, pack.sample_ids[:SHOWN_IDS].tolist()))}{more}"
        cells = (
            _ranks(ledger, entry.number, pack.group),
            pack.micro_batch,
            pack.source,
            pack.epoch,
            pack.number,
            f"{pack.lengths.sum():,}",
            shown,
        )
        table.add_row(*(Text(visible(str(cell))) for cell in cells))
    console.print(Text(f"step {entry.number}, {when}{passed_over}"))
    console.print(table)


def print_sample(ledger: Ledger, source: str, sample_id: int, *, stop: int | None, as_json: bool) -> None:
    found = ledger.sample(source, sample_id, stop=stop)
    tokens = ledger.tokens_of(source, sample_id)
    if as_json:
        entries = [dataclasses.asdict(entry) for entry in found]
        _print_json({"source": source, "sample": sample_id, "tokens": tokens, "entries": entries})
        return
    console.print(Text(visible(f"sample {sample_id} of {source}, {tokens:,} tokens")))
    if not found:
        console.print(Text(ledger.why_nowhere(source, sample_id), style="yellow"))
        return
    table = Table("epoch", "piece", "pack", "step", "rank", "micro-batch")
    for entry in found:
        step = "later" if entry.step is None else f"{entry.step}{' (passed over)' if entry.is_skipped else ''}"
        where = ("", "")
        if entry.step is not None:
            where = (_ranks(ledger, entry.step, entry.group or 0), str(entry.micro_batch))
        table.add_row(str(entry.epoch), str(entry.piece), str(entry.pack), step, *where)
    console.print(table)


def print_amounts(ledger: Ledger, stop: int | None, *, as_json: bool) -> None:
    amounts = ledger.amounts(stop)
    stop = ledger.stop if stop is None else stop
    if as_json:
        sources = {name: dataclasses.asdict(each) for name, each in amounts.items()}
        _print_json({"until": stop, "sources": sources})
        return
    print_records(f"{ledger.where}, steps before {stop:,}", list(amounts.items()))


def _ranks(ledger: Ledger, step: int, group: int) -> str:
    """The rank that reads the packs of a group, or the ranks that share them."""
    size = ledger.plans.stretch(step).world.replication
    return str(group) if size == 1 else f"{group * size} to {group * size + size - 1}"


def _pack_record(pack: PackEntry) -> dict[str, Any]:
    record: dict[str, Any] = pack._asdict()
    arrays = {name: record[name].tolist() for name in ("sample_ids", "starts", "lengths")}
    return record | arrays


def _print_json(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
