"""`lmms-stream ledger`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .command import add_command

if TYPE_CHECKING:
    from ..ledger.run import Ledger
    from .command import Commands

EXAMPLES = (
    "lmms-stream ledger runs/chats --step 1200",
    "lmms-stream ledger runs/chats --sample chats:123456",
    "lmms-stream ledger s3://bucket/runs/chats/step-00002000 --until 1500 --json",
)


def add_commands(commands: Commands) -> None:
    summary = "Say what was in a step of a run, where a sample was or will be, and what was read of each source."
    parser = add_command(commands, "ledger", _ledger, summary, example=EXAMPLES)
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="RUN",
        help="read this checkpoint, or the latest of this output_dir or checkpoint folder or URL",
    )
    add("--step", type=int, metavar="N", help="show the packs of step N, counted from 0, by rank and micro-batch")
    add("--sample", metavar="SOURCE:ID", help="show each step that reads sample ID of SOURCE")
    add("--until", type=int, metavar="N", help="count what steps before N read; default: those of the checkpoint")
    add("--show", action="store_true", help="print the samples of --step or --sample as inspect does")
    add(
        "--url",
        action="append",
        default=[],
        metavar="SOURCE=URL",
        help="read SOURCE from URL, where it lies elsewhere than when it was trained on",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _ledger(options: argparse.Namespace) -> int:
    from ..ledger.run import Ledger
    from .console_ledger import print_amounts, print_sample, print_step

    urls = dict(text.split("=", 1) for text in options.url if "=" in text)
    if len(urls) < len(options.url):
        raise ConfigError(f"--url {' '.join(options.url)}: expected SOURCE=URL")
    ledger = Ledger(options.checkpoint, urls=urls)
    if options.step is not None:
        entry = ledger.step(options.step)
        print_step(ledger, entry, as_json=options.json)
        if options.show:
            _show(ledger, [(pack.source, int(each)) for pack in entry.packs for each in pack.sample_ids])
        return 0
    if options.sample is not None:
        source, sample_id = _named(ledger, options.sample)
        print_sample(ledger, source, sample_id, stop=options.until, as_json=options.json)
        if options.show:
            _show(ledger, [(source, sample_id)])
        return 0
    print_amounts(ledger, options.until, as_json=options.json)
    return 0


def _named(ledger: Ledger, text: str) -> tuple[str, int]:
    """A sample as --sample names it: its source may be left out where there is one."""
    source, _, number = text.rpartition(":")
    if not source and len(ledger.urls) == 1:
        (source,) = ledger.urls
    if not source or not number.isdecimal():
        raise ConfigError(f"--sample {text}: expected SOURCE:ID, with one of the sources {', '.join(ledger.urls)}")
    return source, int(number)


def _show(ledger: Ledger, samples: list[tuple[str, int]]) -> None:
    from ..converters.stored.inspect.summary import inspect_sample
    from .console_datasets import print_view

    seen: dict[tuple[str, int], Any] = dict.fromkeys(samples)
    for source, sample_id in seen:
        view, num_samples = inspect_sample(ledger.urls[source], sample_id, processor=None)
        print_view(view, total=num_samples)
