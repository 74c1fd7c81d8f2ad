"""`lmms-stream audit`: options, and the report in a terminal, in JSON or in an HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.command import (
    add_command,
    add_processor_options,
    at_least,
    local_file,
    processor_choice,
    stored_processor,
)
from ...errors import ConfigError, LmmsStreamError

if TYPE_CHECKING:
    from ...cli.command import Commands
    from ...mds.dataset_config import DatasetConfig
    from .checks import Example, Finding, Place
    from .report import AuditedDataset, AuditReport

EXAMPLES = (
    "lmms-stream audit s3://bucket/chats --tokenizer path/to/tokenizer --limit 100000",
    "lmms-stream audit run.yaml --expect dropped-reasoning --json audit.json --html audit.html",
)
IN_RUN_FILES = ("tokenizer", "processor", "setting", "packing_length", "overlong")
FAILS = ("wrong", "look", "never")
MAX_SOURCES = 3  # of a finding, in a terminal
_STYLES = {"ok": "green", "look": "yellow", "wrong": "bold red"}


def add_commands(commands: Commands) -> None:
    summary = "Look for faults of supervision: masked rows, trained prompts, lost ends, lost content, repeats."
    parser = add_command(commands, "audit", _audit, summary, example=EXAMPLES, page="audit.md")
    add = parser.add_argument
    add(
        "remotes",
        nargs="+",
        metavar="DATASET",
        help="read the samples of these datasets, in folders or at URLs; or the YAML file of a run; words after the "
        "file change its settings, as dataset.packing_length=2048",
    )
    add("--tokenizer", metavar="PATH", help="read the samples by this tokenizer: folder or hub id")
    add_processor_options(parser)
    add("--packing-length", type=at_least(1), metavar="TOKENS", help="count samples that are longer than a pack")
    add(
        "--overlong",
        choices=("error", "drop", "truncate", "split", "keep"),
        help="do this with longer samples, as the run does; default: error",
    )
    add("--limit", type=at_least(1), metavar="N", help="read N samples of each dataset, drawn evenly; default: all")
    add(
        "--near",
        action="store_true",
        help="count near duplicates, too, by MinHash; about 500 bytes of memory per sample",
    )
    add("--expect", action="append", default=[], metavar="CHECK", help="take the findings of CHECK for intended")
    add(
        "--fail-on",
        choices=FAILS,
        default="wrong",
        help="exit with status 1 from this verdict on; default: %(default)s",
    )
    add("--workers", type=at_least(1), metavar="N", help="read in N processes; default: one for each core")
    add("--json", metavar="FILE", help="write one JSON object to FILE; - prints it instead of tables")
    add("--html", type=local_file, metavar="FILE", help="write findings and their samples as one page, too")


def _audit(options: argparse.Namespace) -> int:
    import json
    import sys

    from ...cli.console import bar
    from ..inspect.page import write_text
    from .checks import VERDICTS
    from .report import audit, report_json

    datasets = _datasets(options)
    is_printed = options.json != "-"
    with bar("auditing", unit="samples", shown=is_printed) as progress:
        report = audit(
            datasets,
            limit=options.limit,
            expected=options.expect,
            num_workers=options.workers,
            on_start=progress.begin,
            on_samples=progress.advance,
        )
    if is_printed:
        print_report(report)
    if options.json is not None:
        text = json.dumps(report_json(report), indent=1) + "\n"
        if is_printed:
            write_text(text, local_file(options.json), option="--json")
        else:
            sys.stdout.write(text)
    if options.html:
        write_text(render_report(report, datasets), options.html, option="--html")
    fails = options.fail_on != "never" and VERDICTS.index(report.verdict) >= VERDICTS.index(options.fail_on)
    return 1 if fails else 0


# Datasets of the command line, or of a run's file


def _datasets(options: argparse.Namespace) -> list[AuditedDataset]:
    from ..plan.command import refuse_given, run_and_settings

    run, overrides = run_and_settings(options.remotes)
    if run is not None:
        refuse_given(options, IN_RUN_FILES, run)
        return _of_run(run, overrides, near=options.near)
    if options.overlong is not None and options.packing_length is None:
        raise ConfigError("--overlong needs --packing-length, the tokens of a pack: pass both")
    found: list[AuditedDataset] = []
    for remote in options.remotes:
        name = remote.rstrip("/").rsplit("/", 1)[-1]
        is_known = any(each.name == name for each in found)
        found.append(_of_remote(f"{name} ({len(found) + 1})" if is_known else name, remote, options))
    return found


def _of_remote(name: str, remote: str, options: argparse.Namespace) -> AuditedDataset:
    from ...converters.stored.catalog import read_catalog
    from ...mds.core import PackedDataset
    from ...mds.streams import StreamConfig
    from ...plan.packing import PackingConfig
    from ...processors.text import TokensProcessor
    from ...storage.storage import open_storage
    from .report import AuditedDataset

    if Path(remote).is_file():
        raise ConfigError(
            f"{remote} is a file, and a dataset is a folder or URL with shards: convert the file first, lmms-stream "
            f"convert {remote} FOLDER"
        )
    is_tokens = options.processor is None and read_catalog(open_storage(remote)).schema == TokensProcessor.schema
    if is_tokens and options.setting:
        processor_choice(None, None, options.setting)  # an error that names the setting
    packing = None
    if options.packing_length is not None:
        packing = PackingConfig(packing_length=options.packing_length, overlong=options.overlong or "error")
    processor = None if is_tokens else stored_processor(remote, options)
    dataset = PackedDataset([StreamConfig(remote=remote)], processor=processor, packing=packing)
    return AuditedDataset.of(name, dataset, tokenizer=options.tokenizer, near=options.near)


def _of_run(path: Path, overrides: Sequence[str], *, near: bool) -> list[AuditedDataset]:
    from ...config import build_config, load_mapping
    from ...plan.cursor import SOURCE
    from ...train.launch import RUN_LENGTHS, is_launch_file
    from ...train.run_config import RunConfig
    from ..ledger.opening import model_positions
    from .report import AuditedDataset

    data = load_mapping(path, overrides, one_of=RUN_LENGTHS)
    if is_launch_file(data):
        said = data.get("dataset_config") or {}
        raise _not_stored(SOURCE, said.get("dataset_type"), said.get("dataset_path"))
    config = build_config(RunConfig, data, source=str(path))
    configs: dict[str, DatasetConfig] = dict(config.datasets) if config.dataset is None else {SOURCE: config.dataset}
    if config.eval_dataset is not None:
        configs["eval_dataset" if "eval_dataset" not in configs else "eval_dataset (evaluated)"] = config.eval_dataset
    for name, each in configs.items():
        if each.source_type is not None:
            raise _not_stored(name, each.source_type, getattr(each, "dataset_path", None))
    positions = model_positions(path, overrides)
    return [AuditedDataset.of(name, each.open(), positions=positions, near=near) for name, each in configs.items()]


def _not_stored(name: str, dataset_type: Any, path: Any) -> ConfigError:
    """Error for a dataset of LMMS Engine's config: its run makes the samples, at once or while it streams."""
    return ConfigError(
        f"the samples of dataset {name!r} (dataset_type {dataset_type}) are made by the run from {path or 'sources'}, "
        "and audit reads stored samples: convert the rows with lmms-stream convert, and audit the new folder; existing "
        "shards are audited by their path, with --tokenizer or --processor"
    )


# The report in a terminal


def summary_of(report: AuditReport) -> dict[str, str]:
    """Summary lines: label -> value."""
    read = f"{report.num_read:,}" + (f" of {report.num_samples:,}" if report.num_read < report.num_samples else "")
    shares = report.trained_shares
    trained = f"{report.num_trained:,} of {report.num_tokens:,}"
    if report.num_tokens:
        trained += f" ({report.num_trained / report.num_tokens:.1%})"
    spread = f"{shares[0]:.1%} to {shares[-1]:.1%}, median {shares[3]:.1%}" if shares else "-"
    return {
        "datasets": ", ".join(report.datasets.values()),
        "samples": read,
        "tokens trained on": trained,
        "trained share of a sample": spread,
        **({"near duplicates": f"{report.near_s:.1f} s of all processes"} if report.near_s else {}),
        "verdict": report.verdict,
    }


def print_report(report: AuditReport) -> None:
    """Print the summary, the trained shares, and a line and examples for each finding."""
    from rich.table import Table
    from rich.text import Text

    from ...cli.console import console, print_table, visible
    from ..inspect.page import print_bars

    table = Table("", "", show_header=False)
    for name, value in summary_of(report).items():
        table.add_row(name, Text(visible(value), style=_STYLES.get(value, "")))
    print_table("audit", table)
    if any(report.histogram):
        console.print("trained share of a sample's tokens: samples")
        print_bars(_plot(report))
    for each in report.findings:
        if each.count and each.verdict == "ok" and not each.is_expected:
            console.print(Text(f"ok  {each.check}: {_counted(each)}; {each.what}", style="green"), soft_wrap=True)
        elif each.count:
            verdict = f"{each.verdict} (expected)" if each.is_expected else each.verdict
            head = Text.assemble((verdict, _STYLES[each.verdict]), f"  {each.check}: {_counted(each)}; {each.what}")
            console.print(head, soft_wrap=True)
            for line in (f"rule: {each.rule}", *_lines_of(each)):
                console.print(Text(f"    {visible(line)}", style="dim"), soft_wrap=True)
    found_nothing = [each.check for each in report.findings if not each.count]
    if found_nothing:
        console.print(Text(f"ok  nothing found by {', '.join(found_nothing)}", style="green"), soft_wrap=True)


def _counted(each: Finding) -> str:
    return f"{each.count:,} of {each.total:,} {each.unit} ({each.share:.2%})"


def _lines_of(each: Finding) -> Iterator[str]:
    """Yield the sources with the largest counts, and the examples."""
    sources = sorted(each.by_source.items(), key=lambda item: -item[1].num_found)
    if len(sources) > 1:
        shown = ", ".join(f"{name} {at.num_found:,} of {at.total:,}" for name, at in sources[:MAX_SOURCES])
        more = f" and {len(sources) - MAX_SOURCES:,} more" if len(sources) > MAX_SOURCES else ""
        yield f"by source: {shown}{more}"
    for example in each.examples:
        yield _line_of(example)


def _line_of(example: Example) -> str:
    return f"{example.place}: {example.excerpt}"


def _plot(report: AuditReport):  # type: ignore[no-untyped-def]
    from ..inspect.page import Plot
    from ..inspect.summary import Histogram

    edges = tuple(round(number / 10, 1) for number in range(11))
    histogram = Histogram(edges, tuple(report.histogram))
    return Plot("tokens that are trained on", histogram, "share of the sample's tokens", is_log=False)


# The report as an HTML page


def render_report(report: AuditReport, datasets: Sequence[AuditedDataset]) -> str:
    """Return the page of a report: each finding with the rule and samples, trained text marked."""
    from ..inspect.page import MAX_PAGE_IMAGE_BYTES, drawn_plots, escaped, table_lines, whole_page

    audited = {each.name: each for each in datasets}
    budget = [MAX_PAGE_IMAGE_BYTES]
    body = [table_lines(summary_of(report))]
    if any(report.histogram):
        body.append(f"<figure>{drawn_plots([_plot(report)])}</figure>")
    body.append(
        table_lines({f"{each.verdict}: {each.check}": f"{_counted(each)}; {each.what}" for each in report.findings})
    )
    for each in report.findings:
        if each.count:
            body.append(f"<h2>{escaped(f'{each.verdict}: {each.check}')}</h2>")
            body.append(f"<p>{escaped(f'{each.what}: {_counted(each)}')}</p>")
            body.append(f'<p class="note">{escaped(f"rule: {each.rule}")}</p>')
            if len(each.by_source) > 1:
                of_sources = {name: f"{at.num_found:,} of {at.total:,}" for name, at in each.by_source.items()}
                body.append(table_lines(of_sources))
            for example in each.examples:
                body.append(f'<p class="note">{escaped(_line_of(example))}</p>')
                for place in (example.place, example.like):
                    if place is not None:
                        body += _sample_lines(place, audited[place.dataset], budget)
    return whole_page("audit", body)


def _sample_lines(place: Place, audited: AuditedDataset, budget: list[int]) -> Iterator[str]:
    from ..inspect.page import escaped, sample_lines
    from ..inspect.summary import inspect_sample

    try:
        view, total = inspect_sample(audited.dataset.url, place.sample_id, processor=audited.processor)
    except LmmsStreamError as error:
        yield f'<p class="note">{escaped(f"the sample cannot be shown: {error}")}</p>'
    else:
        yield from sample_lines(view, total, budget)
