"""`lmms-stream plan RUN.yaml --from CHECKPOINT`: what a run reads, repeats and leaves once its settings are changed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..converters.stored.inspect.visible import visible
from ..errors import ConfigError
from .console import console, print_records

if TYPE_CHECKING:
    from ..ledger.remix import Change, SourceChange
    from ..mds.core import PackedDataset
    from ..plan.mixture import Mixture
    from ..train.run.settings import TrainConfig
    from ..train.run_config import RunConfig


def plan_change(options: argparse.Namespace) -> int:
    """Print what is read from a checkpoint on, with the settings of a run's YAML file and those of the options."""
    from ..config import load_config
    from ..ledger.remix import changed, describe_change
    from ..ledger.run import Ledger
    from ..train.run_config import RunConfig

    if len(options.remotes) != 1:
        raise ConfigError(f"--from takes the YAML file of one run, got {' '.join(options.remotes)}")
    config = load_config(RunConfig, Path(options.remotes[0]), _overrides(options))
    datasets = _open(config)
    run = Ledger(options.checkpoint, urls={name: each.one.url for name, each in datasets.items()})
    train = config.train
    ledger = changed(
        run.plans,
        _mixture(datasets, train),
        first=run.stop,
        global_batch=train.global_batch,
        skipped=train.skip_steps,
    )
    stop = _stop(run, ledger.stretches[-1], train, num_steps=options.steps)
    change = describe_change(run.plans, ledger, stop=stop)
    print_change(change, as_json=options.json)
    return 0


def _overrides(options: argparse.Namespace) -> list[str]:
    """The options that change the run, as settings of its YAML file."""
    overrides = []
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
                f"{option} {' '.join(words)}: with --from it takes NAME=NUMBER,… as a=3,b=1, got {each!r}"
            )
        found[name] = int(value) if value == int(value) else value
    return found


def _open(config: RunConfig) -> dict[str, PackedDataset]:
    """The datasets of a run by the names that its cursor has; ConfigError for one whose packs lanes make."""
    from ..mds.core import core_of, opens_loader
    from ..plan.cursor import SOURCE
    from ..types import World

    opened: Any = config.build_datasets(World())
    named = opened if isinstance(opened, dict) else {SOURCE: opened}
    cores = {name: None if opens_loader(each) else core_of(each) for name, each in named.items()}
    for name, each in cores.items():
        if each is None or each.mode == "lanes":
            raise ConfigError(
                f"the packs of {name!r} are made in lanes and are not known beforehand: write its lengths index with "
                "lmms-stream index, and leave its packing_mode auto"
            )
    return {name: each for name, each in cores.items() if each is not None}


def _mixture(datasets: dict[str, PackedDataset], train: TrainConfig) -> Mixture:
    from ..plan.mixture import Mixture

    plans = {name: each.plan for name, each in datasets.items()}
    return Mixture(plans, weights=train.weights, max_epochs=train.max_epochs)


def _stop(run: Any, stretch: Any, train: TrainConfig, *, num_steps: int | None) -> int:
    """The step before which the run ends, or num_steps steps after the checkpoint."""
    from ..ledger.ends import step_after, steps_to_end
    from ..train.checkpoint.paths import split_path

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
    left_out = [] if any(each.num_skipped_tokens for each in change.sources.values()) else ["num_skipped_tokens"]
    print_records(title, list(change.sources.items()), left_out=left_out)
    for name, source in change.sources.items():
        console.print(Text(visible(_line(name, source))), soft_wrap=True)
    if change.is_end:
        console.print(Text(f"no source has packs left after step {change.stop - 1:,}"), soft_wrap=True)


def _line(name: str, source: SourceChange) -> str:
    """What becomes of a source, in words."""
    before = "" if source.status == "added" else f" (before: {source.token_share_before:.1%})"
    words = [f"{name}, {source.status}: {source.token_share:.1%} of the tokens{before}"]
    words.append(f"reads {source.num_samples:,} samples, {source.num_tokens:,} tokens")
    words.append(f"{source.num_repeated_samples:,} samples were read before")
    words.append(f"{source.num_unread_samples:,} samples stay unread")
    if source.ends_at_step is not None:
        words.append(f"its max_epochs end with step {source.ends_at_step:,}")
    return "; ".join(words)
