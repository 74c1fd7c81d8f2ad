"""Tables of `lmms-stream simulate`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Column, Table
from rich.text import Text

from ...checks import shown_bytes
from ...cli.console import console, print_table, shown_seconds, visible
from .cluster import shown_bandwidth
from .measured import Simulation
from .page import FigureRow

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
        "nodes that download a shard": f"{of.copies:.2f} in the mean, more than one of {of.num_shared_shards:,}",
        "least cache_limit of a node": shown_bytes(of.least_cache_bytes),
        "in use at once on a node": shown_bytes(of.live_bytes),
        "bandwidth of a node, mean": shown_bandwidth(of.mean_bandwidth),
        "without waiting": shown_bandwidth(of.needed_bandwidth),
        "waiting": f"{shown_seconds(of.wait_s)} ({of.wait_share:.1%}), and {shown_seconds(of.first_wait_s)} at first",
        "requests": f"{of.requests_per_s:,.1f}/s, at most {of.peak_requests_per_s:,.0f}/s",
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
