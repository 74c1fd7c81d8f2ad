"""A simulation in a terminal, or as one HTML page with plots over the run, which loads nothing from anywhere."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Column, Table
from rich.text import Text

from ...checks import shown_bytes
from ...cli.console import console, print_table, shown_seconds, visible
from .cluster import shown_bandwidth
from .measured import Series, Simulation

WIDTH, HEIGHT, MARGIN = 640, 200, 64
NUM_POINTS = 480
_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --ink: #1c2127; --dim: #59636e; --line: #d5dae0;
  --c0: #2563c9; --c1: #b8471b; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1c2026; --ink: #e4e8ec; --dim: #9aa5b1;
  --line: #353c45; --c0: #6aa5ff; --c1: #ff9466; } }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1400px; margin: 0 auto; padding: 12px 16px 40px; }
h1 { font-size: 1.15rem; } h2 { font-size: 1rem; margin: 0 0 4px; }
.advice { font-weight: 600; }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; margin: 12px 0;
  overflow-x: auto; }
svg { display: block; width: 100%; } svg text { fill: var(--dim); font-size: 12px; }
@media (max-width: 700px) { svg text { font-size: 19px; } }
.axis { stroke: var(--line); } .c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); }
.curve { fill: none; stroke-width: 1.6; } .key { font-size: .85rem; color: var(--dim); }
.key .c0 { color: var(--c0); } .key .c1 { color: var(--c1); }
.charts .card { margin: 0; }
table { border-collapse: collapse; }
td, th { padding: 3px 14px 3px 0; min-width: 7em; text-align: left; font-weight: 400; }
td { font-variant-numeric: tabular-nums; } th { color: var(--dim); }
"""


class FigureRow(NamedTuple):
    """A figure of a table: its name, and its value for people in each column."""

    name: str
    values: Sequence[str]


def page(simulation: Simulation, *, title: str, advice: str, columns: Sequence[str], rows: Sequence[FigureRow]) -> str:
    """The page. columns: names of the simulations that the rows have values of."""
    series = simulation.series.thinned(NUM_POINTS)
    charts = "".join(_charts(series, simulation))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="advice">{html.escape(advice)}</p>'
        f'<div class="charts">{charts}</div>{_table(columns, rows)}{_nodes(simulation)}</main></body></html>\n'
    )


def _charts(series: Series, simulation: Simulation) -> list[str]:
    steps = series.step
    mb = 1 << 20
    return [
        _chart(
            "MiB downloaded for a step",
            steps,
            {"busiest node": series.node_bytes / mb, "mean of the nodes": series.mean_bytes / mb},
        ),
        _chart(
            "GiB downloaded so far, by a node in the mean",
            steps,
            {"mean of the nodes": _so_far(simulation.series.mean_bytes, steps) / (mb << 10)},
        ),
        _chart("seconds waited so far", steps, {"all nodes together": np.cumsum(series.wait_s)}),
        _chart("shards that nodes read in a step", steps, {"all nodes": series.shards.astype(np.float64)}),
        _chart("cost of the busiest rank over the mean", steps, {"imbalance": series.imbalance}, base=1.0),
    ]


def _so_far(values: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.cumsum(values)[steps]
    return total


def _chart(
    title: str, steps: NDArray[np.int64], curves: Mapping[str, NDArray[np.float64]], *, base: float = 0.0
) -> str:
    """A plot over steps as SVG. base: the value at the bottom."""
    top = max(base + 1e-9, *(float(values.max(initial=0)) for values in curves.values()))
    last = max(1, int(steps[-1]))
    right, bottom = WIDTH - 8, HEIGHT - 22
    lines = "".join(
        f'<polyline class="curve c{number}" points="'
        + " ".join(
            f"{MARGIN + (right - MARGIN) * step / last:.1f},{bottom - (bottom - 8) * (value - base) / (top - base):.1f}"
            for step, value in zip(steps.tolist(), values.tolist(), strict=True)
        )
        + '"/>'
        for number, values in enumerate(curves.values())
    )
    keys = " · ".join(f'<span class="c{number}">{html.escape(name)}</span>' for number, name in enumerate(curves))
    return (
        f'<section class="card"><h2>{html.escape(title)}</h2><div class="key">{keys}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f'<path class="axis" fill="none" d="M{MARGIN} 8V{bottom}H{right}"/>{lines}'
        f'<text x="{MARGIN - 6}" y="14" text-anchor="end">{_shown(top)}</text>'
        f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end">{_shown(base)}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 6}">step 0</text>'
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">step {last:,}</text></svg></section>'
    )


def _shown(value: float) -> str:
    """A number at an axis.

    >>> _shown(2412.7), _shown(1.0163), _shown(0.0)
    ('2,413', '1.016', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _table(columns: Sequence[str], rows: Sequence[FigureRow], *, of_rows: str = "") -> str:
    """of_rows: what the first column names."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (of_rows, *columns))
    body = "".join(
        f"<tr><th>{html.escape(row.name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in row.values)}</tr>"
        for row in rows
    )
    return f'<section class="card"><table><tr>{head}</tr>{body}</table></section>'


def _nodes(simulation: Simulation) -> str:
    """The nodes as a table."""
    rows = [
        FigureRow(
            str(each.node),
            [
                f"{each.num_downloads:,}", f"{each.num_again:,}", shown_bytes(each.download_bytes),
                shown_bytes(each.peer_bytes),
            ],
        )
        for each in simulation.nodes
    ]  # fmt: skip
    return _table(["shards downloaded", "of these again", "bytes", "from other nodes"], rows, of_rows="node")


def as_json(simulation: Simulation) -> dict[str, object]:
    """The figures as JSON values, the series thinned; without shard_downloads, which may be millions."""
    values = {
        field.name: getattr(simulation, field.name)
        for field in dataclasses.fields(simulation)
        if field.name not in ("series", "shard_downloads", "nodes")
    }
    series = simulation.series.thinned(NUM_POINTS)
    of_steps = {field.name: getattr(series, field.name).tolist() for field in dataclasses.fields(series)}
    values["least_cache_bytes"] = simulation.least_cache_bytes
    return values | {"nodes": [dataclasses.asdict(each) for each in simulation.nodes], "series": of_steps}


# Tables in a terminal.

NUM_NODES = 16  # shown in a table; all are in --json and on the page
NAME_WIDTH, COLUMN_WIDTH = 32, 24  # characters that figures' names take, and a column at least; more are further tables


def rows_of(simulations: Mapping[str, Simulation]) -> list[FigureRow]:
    """The figures of some simulations for people, a row each."""
    found = [_rows(each) for each in simulations.values()]
    return [FigureRow(name, [each[name] for each in found]) for name in found[0]]


def _rows(of: Simulation) -> dict[str, str]:
    looked = f" ({of.num_steps_seen:,} looked at)" if of.is_sampled else ""
    again = f", {of.num_again:,} of them again" if of.num_again else ""
    return {
        "nodes x ranks": f"{of.num_nodes:,} x {of.num_ranks // of.num_nodes:,}",
        "canonical nodes": f"{of.num_canonical_nodes:,}",
        "dataset": f"{of.num_samples:,} samples, {shown_bytes(of.dataset_bytes)} in {of.num_shards:,} shards",
        "steps": f"{of.num_steps:,}{looked}",
        "time": shown_seconds(of.total_s),
        "downloads": f"{of.num_downloads:,}{again}",
        "downloaded": shown_bytes(of.download_bytes),
        "taken from other nodes": f"{of.num_from_peers:,}, {shown_bytes(of.peer_bytes)}",
        "by the busiest node": shown_bytes(of.bytes_of_busiest_node),
        "nodes that download a shard": f"{of.copies:.2f} on average; "
        f"several for {of.num_shared_shards:,} of {of.num_shards:,} shards",
        "least cache_limit of a node": shown_bytes(of.least_cache_bytes),
        "in use at once on a node": shown_bytes(of.live_bytes),
        "bandwidth of a node, mean": shown_bandwidth(of.mean_bandwidth),
        "bandwidth of a node, needed": shown_bandwidth(of.needed_bandwidth),
        "waiting": f"{shown_seconds(of.wait_s)} ({of.wait_share:.1%}), and {shown_seconds(of.first_wait_s)} at first",
        "requests": f"{of.requests_per_s:,.1f}/s, {of.peak_requests_per_s:,.1f}/s in the busiest step",
        "cost of requests": f"${of.request_dollars:,.2f}",
        "cost of egress": f"${of.egress_dollars:,.2f}",
        "memory of a worker": f"{shown_bytes(of.worker_bytes)} beyond its libraries",
        "first batch, shards there": shown_seconds(of.first_batch_warm_s),
        "first batch, nothing there": shown_seconds(of.first_batch_cold_s),
        "imbalance of ranks": f"{of.imbalance:.4f}",
        "packs of other nodes": f"{of.num_spilled:,}",
    }


def print_simulations(simulations: Mapping[str, Simulation], *, title: str, advice: str) -> None:
    """Figures side by side with the first, as many as fit beside it, the nodes of the first, and the advice."""
    first_name, first = next(iter(simulations.items()))
    others = [name for name in simulations if name != first_name]
    at_once = max(1, (console.width - NAME_WIDTH) // COLUMN_WIDTH - 1)
    for begin in range(0, max(1, len(others)), at_once):
        names = [first_name, *others[begin : begin + at_once]]
        table = Table(Column("", no_wrap=True), *(Column(Text(visible(name))) for name in names))
        for row in rows_of({name: simulations[name] for name in names}):
            table.add_row(row.name, *row.values)
        print_table(title, table)
    nodes = Table("node", "shards", "again", "bytes", "from other nodes")
    for each in first.nodes[:NUM_NODES]:
        counts = f"{each.num_downloads:,}", f"{each.num_again:,}"
        nodes.add_row(str(each.node), *counts, shown_bytes(each.download_bytes), shown_bytes(each.peer_bytes))
    if len(first.nodes) > NUM_NODES:
        nodes.add_row(f"… {len(first.nodes) - NUM_NODES} more")
    print_table("nodes", nodes)
    console.print(Text(f"advice: {advice}"), soft_wrap=True)
