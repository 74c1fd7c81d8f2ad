"""`lmms-stream profile`: is data the limit of a run? Three measurements, and one sentence.

Each rank is a process of this module: `torchrun … -m lmms_stream.tools.profile.command OUT.json STEPS WARMUP_STEPS
SECONDS CONFIG.yaml key.sub=value …`. The first rank writes the rates as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...cli.command import add_command, at_least, local_file
from ...errors import LmmsStreamError

if TYPE_CHECKING:
    from ...cli.command import Commands
    from .rates import LoaderRates, Rates, RateSpread

MODULE = "lmms_stream.tools.profile.command"
EXAMPLE = "lmms-stream profile run.yaml train.num_workers=4 --steps 20"


def add_commands(commands: Commands) -> None:
    summary = "Measure a run's loader alone, its model alone, and both: which of them is the limit, and by how much."
    parser = add_command(commands, "profile", _profile, summary, example=EXAMPLE, page="profiling.md")
    parser.add_argument(
        "config", type=local_file, metavar="RUN.yaml", help="measure what this YAML file says: dataset, model, train"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="SETTING=VALUE", help="change a setting of the file, as train.num_workers=4"
    )
    parser.add_argument(
        "--nproc", type=at_least(1), default=1, metavar="N", help="start N processes, a GPU each; default: %(default)s"
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=10,
        metavar="N",
        help="measure three rounds of N steps or a few more; default: %(default)s",
    )
    parser.add_argument(
        "--warmup-steps",
        type=at_least(1),
        default=3,
        metavar="N",
        help="do N steps before each measurement; default: %(default)s",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="end each measurement after SECONDS; default: %(default)g",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _profile(options: argparse.Namespace) -> int:
    from ...train.torchrun import check_not_in_torchrun, module_command, without_rank
    from .rates import check_measured

    check_not_in_torchrun(os.environ, remedy="start it without torchrun; --nproc N starts its ranks")
    check_measured(steps=options.steps, warmup_steps=options.warmup_steps, seconds=options.seconds)
    with tempfile.TemporaryDirectory(prefix="lmms-profile-") as folder:
        out = Path(folder) / "rates.json"
        measured = map(str, (out, options.steps, options.warmup_steps, options.seconds, options.config))
        command = module_command(MODULE, [*measured, *options.overrides], nproc=options.nproc)
        sys.stdout.flush()
        status = _run(command, without_rank(os.environ))
        if status == 0:
            _show(json.loads(out.read_text()), as_json=options.json)
    return status


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The exit status of a command, whose words go to standard error; it ends with this process."""
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            return process.wait()
        finally:
            process.terminate()


def _show(found: dict[str, object], *, as_json: bool) -> None:
    from .rates import rates_from, verdict_of

    rates = rates_from(found)
    verdict = verdict_of(rates)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(rates) | {"verdict": verdict._asdict()}, indent=1) + "\n")
        return
    _print_table(rates)
    sys.stdout.write(f"{verdict.sentence}.\nTo change: {verdict.change}.\n")


def _print_table(rates: Rates) -> None:
    from rich.table import Table

    from ...cli.console import print_table

    table = Table("", "tokens/s", "rounds", "steps/s", "waits for data", "MFU")
    for each in _loaders(rates):
        tokens = each.tokens_per_s
        table.add_row(f"loader, {each.num_workers} workers a rank", f"{tokens.mean:,.0f}", _rounds(tokens), "", "", "")
    for name, steps in (("model", rates.model), ("both", rates.both)):
        waits, mfu = f"{steps.wait_share.mean:.0%}", "" if steps.mfu is None else f"{steps.mfu:.1%}"
        tokens, rate = steps.tokens_per_s, f"{steps.steps_per_s.mean:,.2f}"
        table.add_row(name, f"{tokens.mean:,.0f}", _rounds(tokens), rate, waits, mfu)
    print_table("what limits the run", table)
    for each in _loaders(rates):
        sys.stdout.write(
            f"{each.num_workers} workers a rank: {each.packs_per_s.mean:,.1f} packs/s, busy on {each.busy_cpus:.1f} "
            f"CPUs, {each.fetched_mb_per_s:.1f} MB/s fetched; the node's cache: {each.cache}\n"
        )


def _loaders(rates: Rates) -> list[LoaderRates]:
    return [each for each in (rates.loader, rates.more_workers) if each is not None]


def _rounds(figure: RateSpread) -> str:
    return f"{figure.lowest:,.0f} to {figure.highest:,.0f}"


# The process of a rank.


def main(arguments: Sequence[str]) -> int:
    out, steps, warmup_steps, seconds, config, *overrides = arguments
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmms_stream").setLevel(logging.INFO)
    limits = {"steps": int(steps), "warmup_steps": int(warmup_steps), "seconds": float(seconds)}
    try:
        _measure(Path(out), limits, Path(config), overrides)
    except LmmsStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _measure(out: Path, limits: dict[str, float], config: Path, overrides: Sequence[str]) -> None:
    from ...train.launch import lost_ranks_named, prepare

    prepared = prepare(config, overrides)
    from ...train.run.distributed import end_distributed
    from .measure import MeasureConfig, measure

    def tell(line: str) -> None:
        if prepared.rank == 0:
            sys.stderr.write(f"{line}\n")

    try:
        with lost_ranks_named(prepared):
            rates = measure(prepared.trainer(), MeasureConfig(**limits), tell)  # type: ignore[arg-type]
            if prepared.rank == 0:
                out.write_text(json.dumps(dataclasses.asdict(rates)))
    finally:
        end_distributed()


if __name__ == "__main__":
    from ...processes.family import end_process

    end_process(main(sys.argv[1:]))
