"""Output of `lmms-stream ledger`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from ...cli.console import console, print_records, visible

if TYPE_CHECKING:
    from ...mds.provenance import SourceRow
    from ...plan.ledger import PackEntry, PieceEntry, StepEntry
    from .opening import Retraining, Verified
    from .run import Ledger, LoggedLedger

SHOWN_IDS = 12  # of a pack, in the table
AMOUNTS = {  # labels of SourceAmounts
    "num_samples": "samples read, with repeats",
    "num_tokens": "tokens read, with repeats",
    "num_seen": "distinct samples so far",
    "num_unseen": "distinct samples to come",
    "num_overlong": "overlong samples in no pack",
}
Sample = tuple[str, int]  # its source and id


def print_step(ledger: Ledger, entry: StepEntry, *, as_json: bool) -> None:
    rows = [ledger.origins.of(pack.source, pack.sample_ids.tolist()) for pack in entry.packs]
    if as_json:
        packs = [_pack_record(pack, of_pack) for pack, of_pack in zip(entry.packs, rows, strict=True)]
        record = {"step": entry.number, "is_skipped": entry.is_skipped, "packs": packs}
        _print_json(record | {"identities": ledger.identities})
        return
    table = _table("rank", "micro-batch", "source", "epoch", "pack", "tokens", "samples")
    ids = _table("rank", "micro-batch", "ids (source rows)" if any(rows) else "ids")
    for pack, of_pack in zip(entry.packs, rows, strict=True):
        turn = (_ranks(ledger, entry.number, pack.group), str(pack.micro_batch))
        amounts = (f"{pack.lengths.sum():,}", str(len(pack.sample_ids)))
        table.add_row(*turn, Text(visible(pack.source)), str(pack.epoch), str(pack.number), *amounts)
        ids.add_row(*turn, Text(visible(_shown(ledger, pack, of_pack))))
    console.print(Text(visible(f"step {entry.number}, {_when(ledger, entry)}")), soft_wrap=True)
    console.print(table)
    console.print(ids)
    if any(len(pack.sample_ids) > SHOWN_IDS for pack in entry.packs):
        console.print(Text("--json prints all ids"))
    _print_notes(ledger)


def _table(*names: str) -> Table:
    """Return a table whose cells are wrapped, never cut."""
    return Table(*(Column(name, overflow="fold") for name in names))


def _when(ledger: Ledger, entry: StepEntry) -> str:
    if ledger.end is not None and entry.number >= max(ledger.end, ledger.stop):
        return f"beyond the end of the run, which ends before step {ledger.end}"
    computed = f", computed from {ledger.where}" if ledger.history.is_computed else ""
    if entry.is_skipped:
        return f"passed over by skip_steps{computed}"
    if computed:
        return computed.removeprefix(", ")
    return "trained" if entry.number < ledger.stop else "not trained yet"


def print_samples(
    ledger: Ledger, samples: Sequence[Sample], *, stop: int | None, renamed: str | None, as_json: bool
) -> None:
    """Print past and future positions of samples, their ids in another dataset, and the first step trained on any."""
    found = [ledger.sample(*sample, stop=stop) for sample in samples]
    names = [
        None if renamed is None else ledger.origins.renamed(source, [id], url=renamed)[0] for source, id in samples
    ]
    first = ledger.first_step(samples)
    if as_json:
        records = [
            _sample_record(ledger, sample, entries) | ({} if ids is None else {"renamed": ids})
            for sample, entries, ids in zip(samples, found, names, strict=True)
        ]
        retraining = None if first is None else dataclasses.asdict(first)
        _print_json((records[0] if len(records) == 1 else {"samples": records}) | {"retraining": retraining})
        return
    for sample, entries, ids in zip(samples, found, names, strict=True):
        _print_sample(ledger, sample, entries)
        if ids is not None:
            called = ", ".join(map(str, ids)) or "no sample is made of its row"
            console.print(Text(visible(f"in {renamed}: {called}")), soft_wrap=True)
    if not ledger.history.is_computed:
        console.print(Text(visible(_retraining_line(ledger, first, samples))), soft_wrap=True)
    _print_notes(ledger)


def print_first_step(ledger: Ledger, samples: Sequence[Sample], *, as_json: bool) -> None:
    """Print the first step with an effect of some samples on the run."""
    first = ledger.first_step(samples)
    if as_json:
        _print_json({"samples": len(samples), "retraining": None if first is None else dataclasses.asdict(first)})
        return
    if not ledger.history.is_computed:
        console.print(Text(visible(_retraining_line(ledger, first, samples))), soft_wrap=True)
    _print_notes(ledger)


def print_verified(found: Verified, *, as_json: bool) -> int:
    """Print the comparison of a run with the arithmetic; return the exit status, 1 for a difference."""
    if as_json:
        _print_json(found._asdict())
    else:
        counts = (
            f"{found.num_steps} steps, {found.num_digests} of them with a digest, {found.num_records} with a record"
        )
        result = "no difference" if found.difference is None else f"first difference: {found.difference}"
        console.print(Text(visible(f"{counts} in the log: {result}")), soft_wrap=True)
    return int(found.difference is not None)


def print_amounts(ledger: Ledger, stop: int | None, *, as_json: bool) -> None:
    """Print the amounts read before step `stop`; default: the checkpoint's steps, or all steps before a run starts."""
    if stop is None:
        stop = ledger.stop or ledger.end or 0
    amounts = ledger.amounts(stop)
    if as_json:
        sources = {name: dataclasses.asdict(each) for name, each in amounts.items()}
        record = {"until": stop, "end": ledger.end, "sources": sources}
        _print_json(record | {"identities": ledger.identities, "num_added": dict(ledger.num_added)})
        return
    planned = ""
    if stop > ledger.stop and not ledger.history.is_computed:
        planned = f"; steps {ledger.stop:,} to {stop - 1:,} are planned, not read"
    print_records(f"{ledger.where}, steps before {stop:,}{planned}", list(amounts.items()), labels=AMOUNTS)
    _print_notes(ledger)


def print_logged(ledger: LoggedLedger, *, step: int | None, samples: Sequence[int], as_json: bool) -> None:
    """Print the log of a run in lanes on a step, on samples or on the amounts read, and a note on its limits."""
    from .run import CANNOT

    record: dict[str, Any] = {"until": ledger.stop, "samples": ledger.samples_seen, "tokens": ledger.tokens_seen}
    if step is not None:
        record = {"step": step, "sample_ids": list(ledger.step(step))}
    elif samples:
        record = {"steps": {str(each): ledger.sample(each) for each in samples}}
    if as_json:
        _print_json(record | {"note": CANNOT})
        return
    for name, value in record.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        lines = [f"{name}: {shown}"]
        if isinstance(value, dict):
            found = {id: f"steps {', '.join(map(str, steps))}" for id, steps in value.items() if steps}
            lines = [f"sample {id}: {found.get(id, 'in no step of the log')}" for id in value]
        for line in lines:
            console.print(Text(line), soft_wrap=True)
    console.print(Text(f"note: {CANNOT}", style="yellow"), soft_wrap=True)


def _print_sample(ledger: Ledger, sample: Sample, entries: Sequence[PieceEntry]) -> None:
    source, sample_id = sample
    rows = ledger.origins.of(source, [sample_id])
    made_of = f", made of {rows[0]}" if rows else ""
    stream, number = ledger.named(source, sample_id)
    of_stream = f", {stream}:{number}" if stream != source else ""
    named = f"sample {sample_id} of {source}{of_stream} (dataset {ledger.identities[source]})"
    console.print(Text(visible(f"{named}, {ledger.tokens_of(*sample):,} tokens{made_of}")), soft_wrap=True)
    table = Table("epoch", "piece", "pack", "step", "when", "rank", "micro-batch")
    for entry in entries:
        where = ("", "", "")
        if entry.step is not None:
            ranks = _ranks(ledger, entry.step, entry.group or 0)
            where = (str(entry.step), ranks, str(entry.micro_batch))
        cells = (entry.epoch, entry.piece, entry.pack, where[0], ledger.when(entry, sample), *where[1:])
        table.add_row(*map(str, cells))
    if entries:
        console.print(table)
    if (left_out := ledger.left_out.get(*sample)) is not None:
        line = f"{left_out.kind} from step {left_out.since_step} on: {left_out.reason}"
        console.print(Text(visible(line), style="yellow"), soft_wrap=True)
    if all(entry.step is None for entry in entries):
        console.print(Text(ledger.why_nowhere(*sample), style="yellow"))


def _retraining_line(ledger: Ledger, first: Retraining | None, samples: Sequence[Sample]) -> str:
    one = len(samples) == 1
    if first is None:
        return f"no step so far was trained on {'it' if one else 'any of them'}: there is nothing to repeat"
    back = (
        f"go back to {first.checkpoint}"
        if first.checkpoint
        else "there is no earlier checkpoint: start again from step 0"
    )
    which = "" if one else f" (the first is {first.source}:{first.sample_id})"
    return f"to train without {'it' if one else 'them'}{which}, repeat steps {first.step} to {ledger.stop - 1}: {back}"


def _print_notes(ledger: Ledger) -> None:
    if ledger.history.is_computed:
        line = (
            f"note: computed from {ledger.where}, which has no record of training: name the output_dir of the run for "
            "its trained steps"
        )
        console.print(Text(visible(line), style="yellow"), soft_wrap=True)
    for source, count in ledger.num_added.items():
        line = f"note: {source} has grown by {count:,} samples since: their ids follow, and those of the run stay"
        console.print(Text(visible(line), style="yellow"), soft_wrap=True)


def _shown(ledger: Ledger, pack: PackEntry, rows: Sequence[SourceRow] | None) -> str:
    """First samples of a pack, each with its stream, if the source has several, and with its source row if known.

    A row has the name of its file; its path is in --json, and where --sample tells of the sample.
    """
    names = [ledger.named(pack.source, each) for each in pack.sample_ids.tolist()]
    ids = [str(number) if name == pack.source else f"{name}:{number}" for name, number in names]
    more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    if rows is not None:
        ids = [f"{id} ({str(row).rpartition('/')[2]})" for id, row in zip(ids, rows, strict=True)]
    return f"{', '.join(ids[:SHOWN_IDS])}{more}"


def _ranks(ledger: Ledger, step: int, group: int) -> str:
    """Rank or ranks of a group, with shared packs."""
    size = ledger.plans.stretch(step).world.replication
    return str(group) if size == 1 else f"{group * size} to {group * size + size - 1}"


def _pack_record(pack: PackEntry, rows: Sequence[SourceRow] | None) -> dict[str, Any]:
    record: dict[str, Any] = pack._asdict()
    arrays = {name: record[name].tolist() for name in ("sample_ids", "starts", "lengths")}
    return record | arrays | ({} if rows is None else {"rows": list(map(str, rows))})


def _sample_record(ledger: Ledger, sample: Sample, entries: Sequence[PieceEntry]) -> dict[str, Any]:
    source, sample_id = sample
    rows = ledger.origins.of(source, [sample_id])
    nowhere = all(entry.step is None for entry in entries)
    left_out = ledger.left_out.get(*sample)
    return {
        "source": source,
        "sample": sample_id,
        "identity": ledger.identities[source],
        "tokens": ledger.tokens_of(*sample),
        "row": str(rows[0]) if rows else None,
        "entries": [dataclasses.asdict(entry) | {"when": ledger.when(entry, sample)} for entry in entries],
        "left_out": None if left_out is None else dataclasses.asdict(left_out),
        "why_nowhere": ledger.why_nowhere(*sample) if nowhere else None,
    }


def _print_json(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
