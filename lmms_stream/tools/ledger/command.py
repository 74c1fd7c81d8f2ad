"""`lmms-stream ledger`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...cli.command import add_command, at_least, given_options, local_file
from ...errors import ConfigError

if TYPE_CHECKING:
    from ...cli.command import Commands
    from ...types import World
    from .opening import RunHistory
    from .run import Ledger

EXAMPLES = (
    "lmms-stream ledger runs/chats --step 1200",
    "lmms-stream ledger runs/chats --sample chats:123456",
    "lmms-stream ledger s3://bucket/runs/chats/step-00002000 --until 1500 --json",
    "lmms-stream ledger runs/chats --verify",
    "lmms-stream ledger run.yaml --world-size 8 --step 0",
)


def add_commands(commands: Commands) -> None:
    summary = "Say what was in a step of a run, where a sample was or will be, and what was read of each source."
    parser = add_command(commands, "ledger", _ledger, summary, example=EXAMPLES, page="ledger.md")
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="RUN",
        help="read this checkpoint, or the latest of this output_dir or checkpoint folder or URL; or compute the steps "
        "of a run from its YAML file",
    )
    add(
        "overrides",
        nargs="*",
        metavar="SETTING=VALUE",
        help="change a setting of the YAML file, as train.max_steps=100",
    )
    add(
        "--step",
        type=at_least(0),
        metavar="N",
        help="show the packs of step N, counted from 0, by rank and micro-batch",
    )
    add(
        "--sample",
        action="append",
        default=[],
        metavar="SOURCE:ID",
        help="show each step that reads sample ID of SOURCE, or FILE:ROW, the samples made of that row; several times: "
        "say the first step of all",
    )
    add(
        "--drop",
        type=local_file,
        metavar="FILE",
        help="say from which step on the run would be another one without the samples of this drop list, a line each",
    )
    add(
        "--until",
        type=at_least(0),
        metavar="N",
        help="count what steps before N read; default: those of the checkpoint",
    )
    add(
        "--verify",
        action="store_true",
        help="compare every step before the checkpoint with the digest of its samples and the amounts that the run "
        "wrote; name the first difference",
    )
    add("--show", action="store_true", help="print the samples of --step or --sample as inspect does")
    add("--renamed", metavar="URL", help="say what --sample is called in the dataset there, made of the same rows")
    add(
        "--url",
        action="append",
        default=[],
        metavar="SOURCE=URL",
        help="read SOURCE from URL, where it lies elsewhere than when it was trained on",
    )
    add(
        "--world-size",
        type=at_least(1),
        metavar="RANKS",
        help="share the steps of a YAML file among so many ranks; default: 1",
    )
    add("--num-nodes", type=at_least(1), metavar="N", help="spread these ranks over N nodes; default: 1")
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _ledger(options: argparse.Namespace) -> int:
    from .console import print_amounts, print_first_step, print_samples, print_step, print_verified
    from .opening import open_history, verified
    from .run import Ledger, output_dir_of

    _check_questions(options)
    urls = dict(text.split("=", 1) for text in options.url if "=" in text)
    if len(urls) < len(options.url):
        raise ConfigError(f"--url {' '.join(options.url)}: expected SOURCE=URL")
    history = open_history(options.checkpoint, world=_world(options), overrides=options.overrides)
    if "lanes" in history.state.get("cursor", {}):
        return _logged(options, history)
    ledger = Ledger(history, urls=urls)
    if others := sorted({*urls} - {*ledger.urls}):
        raise ConfigError(f"--url {others[0]}: the run has no such source, only {', '.join(ledger.urls)}")
    if options.verify:
        written = ("step_digests.bin", "train_log.jsonl")
        output_dir = output_dir_of(options.checkpoint, names=written, why="--verify needs what the run wrote")
        return print_verified(verified(ledger.plans, run=history, output_dir=output_dir), as_json=options.json)
    if options.until is not None and options.until > ledger.stop and options.until > (ledger.end or options.until):
        raise ConfigError(f"--until {options.until}: the run ends before step {ledger.end}: choose at most that")
    if options.step is not None:
        entry = ledger.step(options.step)
        print_step(ledger, entry, as_json=options.json)
        if options.show:
            _show(ledger, [(pack.source, int(each)) for pack in entry.packs for each in pack.sample_ids])
        return 0
    if options.sample:
        samples = list(dict.fromkeys(each for text in options.sample for each in _named(ledger, text)))
        print_samples(ledger, samples, stop=options.until, renamed=options.renamed, as_json=options.json)
        if options.show:
            _show(ledger, samples)
        return 0
    if options.drop is not None:
        print_first_step(ledger, ledger.listed(options.drop), as_json=options.json)
        return 0
    print_amounts(ledger, options.until, as_json=options.json)
    return 0


def _check_questions(options: argparse.Namespace) -> None:
    """Raise ConfigError for conflicting options, and for options without their question."""
    given = {
        "--step": options.step is not None, "--sample": bool(options.sample), "--drop": options.drop is not None,
        "--verify": options.verify,
    }  # fmt: skip
    asked = [name for name, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are questions of their own: ask one at a time")
    if options.show and not (given["--step"] or given["--sample"]):
        raise ConfigError("--show prints samples of --step or --sample: name one of them")
    if options.until is not None and (given["--step"] or given["--drop"] or given["--verify"]):
        raise ConfigError(
            "--until selects steps, of a sample or of all samples: leave it out, or leave out the other options"
        )
    if options.renamed and not given["--sample"]:
        raise ConfigError("--renamed needs --sample: name a sample")


def _world(options: argparse.Namespace) -> World | None:
    """Ranks of the run; None if not given."""
    from ...types import World

    if options.world_size is None and options.num_nodes is None:
        return None
    given = {"world_size": options.world_size, "num_nodes": options.num_nodes}
    return World(**{name: value for name, value in given.items() if value is not None})


def _logged(options: argparse.Namespace, history: RunHistory) -> int:
    """Answer from the log of a run in lanes."""
    from .console import print_logged
    from .run import LoggedLedger, output_dir_of

    if options.show or options.renamed:
        raise ConfigError("--show and --renamed need the datasets, which a run in lanes does not keep: use inspect")
    if given := given_options(options, ("until", "drop", "verify", "url")):
        raise ConfigError(
            f"{given[0]} needs the contents of packs, but {options.checkpoint} belongs to a run in lanes, whose "
            "contents are only in the log: leave it out"
        )
    ledger = LoggedLedger(history, output_dir=output_dir_of(options.checkpoint))
    samples = [int(text.rpartition(":")[2]) for text in options.sample if text.rpartition(":")[2].isdecimal()]
    if len(samples) < len(options.sample):
        raise ConfigError(f"--sample {' '.join(options.sample)}: expected an ID; a run in lanes has one source")
    print_logged(ledger, step=options.step, samples=samples, as_json=options.json)
    return 0


def _named(ledger: Ledger, text: str) -> list[tuple[str, int]]:
    """Samples as --sample names them: a source may be left out where there is one, and FILE:ROW is any number."""
    source, _, number = text.rpartition(":")
    if not source and len(ledger.urls) == 1:
        (source,) = ledger.urls
    if not source or not number.isdecimal():
        raise ConfigError(
            f"--sample {text}: expected SOURCE:ID, with one of the sources {', '.join(ledger.urls)}, or FILE:ROW"
        )
    if source in {*ledger.urls, *ledger.identities} or not ledger.origins.are_known:
        return [ledger.located(source, int(number))]
    return ledger.origins.samples_of_row(source, int(number))


def _show(ledger: Ledger, samples: list[tuple[str, int]]) -> None:
    from ...cli.console_datasets import print_view
    from ..inspect.summary import inspect_sample

    seen: dict[tuple[str, int], Any] = dict.fromkeys(samples)
    for source, sample_id in seen:
        name, number = ledger.named(source, sample_id)
        view, num_samples = inspect_sample(ledger.urls[name], number, processor=None)
        print_view(view, total=num_samples)
