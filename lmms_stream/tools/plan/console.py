"""Figures of a plan, and of a change of settings, as tables, or as one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...cli.console import console, label_of, print_record, print_records, print_table, shown_value, visible
from ...errors import ConfigError
from .report import EpochReport, KindsReport, StepsReport, StreamReport, TrainedReport

if TYPE_CHECKING:
    from ...train.run.settings import TrainConfig
    from ..ledger.remix import Change, SourceChange, WeightPhase


COMPARED_FIELDS = ("num_packs", "lower_bound", "efficiency", "samples_per_pack")


def print_plan(
    epochs: Sequence[EpochReport],
    steps: StepsReport,
    comparison: Sequence[EpochReport],
    kinds: Sequence[KindsReport] = (),
    trained: Sequence[TrainedReport] = (),
    streams: Sequence[StreamReport] = (),
    *,
    is_weighted: bool = False,
    as_json: bool,
) -> None:
    """Print the figures of `lmms-stream plan` as tables or as one JSON object. is_weighted: sources have weights."""
    if as_json:
        tables: dict[str, Sequence[Any]] = {
            "epochs": epochs,
            "comparison": comparison,
            "kinds": kinds,
            "trained": trained,
            "streams": streams,
        }
        records = {name: [dataclasses.asdict(record) for record in table] for name, table in tables.items()}
        sys.stdout.write(json.dumps(records | {"steps": dataclasses.asdict(steps)}, indent=1) + "\n")
        return
    of_media: tuple[str, ...] = () if kinds else ("num_overlong_media", "tower_imbalance", "tower_imbalance_in_order")
    if all(report.num_beyond_positions is None for report in epochs):
        of_media = (*of_media, "num_beyond_positions")
    print_records("epochs", [(report.source, report) for report in epochs], left_out=of_media)
    if streams:
        print_records("streams of an epoch", [(report.stream, report) for report in streams], left_out=["stream"])
    if kinds:
        print_records("text and media", [(report.source, report) for report in kinds])
    of_runs = ("num_run_steps", "run_end") if steps.run_end is None else ()
    num_steps = "steps until all sources end" if is_weighted else "steps of an epoch"
    with_others = ("imbalance_with_windows", "imbalance_across_sources", "imbalance_with_even_fit")
    not_compared = tuple(name for name in with_others if getattr(steps, name) is None)
    print_record("steps", steps, left_out=(*of_media, *of_runs, *not_compared), labels={"num_steps": num_steps})
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


# What a run reads, repeats and leaves after a change of settings: plan RUN.yaml --from CHECKPOINT.


def plan_change(options: argparse.Namespace) -> int:
    """Print what is read from a checkpoint on, with the settings of a run's YAML file and those of the options."""
    from ...loader.drop_list import dropped
    from ..ledger.opening import open_run
    from ..ledger.remix import changed, describe_change
    from ..ledger.run import Ledger

    planned = open_run(options.run, overrides=settings_of(options))
    datasets, train = planned.datasets, planned.train
    urls = {
        name: stored.url
        for source, each in datasets.items()
        for name, stored in zip(each.names if each.is_mixed else [source], each.stored, strict=True)
    }
    run = Ledger(options.checkpoint, urls=urls)
    left_out = run.left_out.merge([dropped(train.bad_samples.drop, datasets)])
    ledger = changed(
        run.plans, planned.mixture, first=run.stop, global_batch=train.global_batch, skipped=train.skip_steps
    )
    stop = _stop(run, ledger.stretches[-1], train, num_steps=options.steps)
    change = describe_change(run.plans, ledger, stop=stop, left_out=left_out)
    print_change(change, as_json=options.json)
    return 0


def settings_of(options: argparse.Namespace) -> list[str]:
    """Return the settings after a run's YAML file, and then the options with changes of the run, as settings."""
    overrides = list(options.overrides)
    for name, text in (("weights", options.weights), ("max_epochs", options.max_epochs)):
        if text:
            values = _named_numbers(text, option=f"--{name.replace('_', '-')}")
            overrides.append(f"train.{name}={json.dumps(values)}")
    if options.global_batch is not None:
        overrides.append(f"train.global_batch={options.global_batch}")
    return overrides


def _named_numbers(words: Sequence[str], *, option: str) -> dict[str, float]:
    """NAME=NUMBER, with commas or as several words."""
    found: dict[str, float] = {}
    for each in ",".join(words).split(","):
        name, separator, number = each.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            separator = ""
        if not (name and separator):
            raise ConfigError(
                f"{option} {' '.join(words)}: with --from the option needs NAME=NUMBER,…, for example a=3,b=1, got "
                f"{each!r}"
            )
        found[name] = int(value) if value == int(value) else value
    return found


def _stop(run: Any, stretch: Any, train: TrainConfig, *, num_steps: int | None) -> int:
    """The step before which the run ends, or num_steps steps after the checkpoint."""
    from ...train.checkpoint.store import split_path
    from ..ledger.amounts import step_after, steps_to_end

    if num_steps is not None:
        return int(run.stop) + num_steps
    if train.max_steps is not None:
        num_trained = split_path(run.where)[1] or 0
        return step_after(run.stop, train.max_steps - num_trained, skipped=train.skip_steps)
    to_end = steps_to_end(stretch, num_epochs=train.num_train_epochs)
    if to_end is None:
        raise ConfigError(
            "train.max_tokens ends the run, and no max_epochs ends its sources: say with --steps N how many steps "
            "from the checkpoint on to plan"
        )
    return int(run.stop) + to_end


def print_change(change: Change, *, as_json: bool) -> None:
    """The change as a table and a line a source, or as one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(change), indent=1) + "\n")
        return
    batch = f"{change.global_batch:,} packs a step"
    if change.global_batch != change.global_batch_before:
        batch += f" (before: {change.global_batch_before:,})"
    title = f"steps {change.first:,} to {change.stop - 1:,}, {batch}"
    seldom = ("num_skipped_tokens", "num_left_out_samples", "num_left_out_tokens")
    hidden = [name for name in seldom if not any(getattr(each, name) for each in change.sources.values())]
    print_records(title, list(change.sources.items()), left_out=hidden)
    for name, source in change.sources.items():
        console.print(Text(visible(_line(name, source))), soft_wrap=True)
    for phase in change.phases if len(change.phases) > 1 else ():
        console.print(Text(visible(_phase_line(phase))), soft_wrap=True)
    if change.is_end:
        console.print(Text(f"no source has packs left after step {change.stop - 1:,}"), soft_wrap=True)


def _line(name: str, source: SourceChange) -> str:
    """Describe the change of a source in words."""
    before = "" if source.status == "added" else f" (before: {source.token_share_before:.1%})"
    words = [f"{name}, {source.status}: {source.token_share:.1%} of the tokens{before}"]
    words.append(f"reads {source.num_samples:,} samples, {source.num_tokens:,} tokens")
    words.append(f"{source.num_repeated_samples:,} samples were read before")
    words.append(f"{source.num_unread_samples:,} samples stay unread")
    if source.num_left_out_samples:
        words.append(f"{source.num_left_out_samples:,} of those read are left out, as padding")
    if source.ends_at_step is not None:
        words.append(f"its max_epochs end with step {source.ends_at_step:,}")
    return "; ".join(words)


def _phase_line(phase: WeightPhase) -> str:
    """Describe the reads of a phase of the schedule in words."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in phase.token_shares.items())
    return f"steps {phase.first:,} to {phase.stop - 1:,}: {shares} of the tokens"
