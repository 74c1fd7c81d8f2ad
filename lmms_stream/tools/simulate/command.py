"""`lmms-stream simulate`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...cli.command import add_command, add_processor_options, at_least, given_options, local_file, stored_processor
from ...errors import ConfigError
from ..plan.command import DEFAULT_GLOBAL_BATCH

if TYPE_CHECKING:
    from ...cli.command import Commands
    from ...plan.order import OrderConfig
    from ...plan.packing import PackingConfig
    from .cluster import Cluster
    from .run import Steps
    from .sources import Sources

EXAMPLES = (
    "lmms-stream simulate s3://bucket/chats --packing-length 4096 --global-batch 512 --nodes 16 --gpus 8 --workers 4 "
    "--bandwidth 5gbit --cache 500gb --step-time 1.2s --compare num_canonical_nodes=16,64 --html run.html",
    "lmms-stream simulate run.yaml --nodes 4 --gpus 8 --bandwidth 5gbit --json",
    "lmms-stream simulate sources.yaml --packing-length 8192 --overlong split --global-batch 4096 --nodes 512 "
    "--canonical-nodes 512 --block-size 65536 --bandwidth 10gbit --compare shard_bytes=32mb,256mb",
)
OF_PROCESSORS = ("tokenizer", "processor", "setting")
# Options that the YAML file of a run has settings for.
IN_RUN_FILES = (
    "packing_length", "global_batch", "overlong", "canonical_nodes", "block_size", "seed", *OF_PROCESSORS,
)  # fmt: skip
DESCRIPTION = """\
a dataset that does not exist yet is described in a YAML file (sources.yaml):
  sources:
    web: {tokens: 10t, percentiles: {5: 120, 95: 4600}, shard_bytes: 64mb}
    code: {samples: 1.5b, mean_length: 2000, compression: 0.6}
  weights: {web: 0.7, code: 0.3}  # as in a run; without, each is read once"""


def add_commands(commands: Commands) -> None:
    summary = "Say what a cluster would do with a run: downloads, waiting, requests, memory and cost; no shard is read."
    parser = add_command(commands, "simulate", _simulate, summary, example=EXAMPLES, page="planning.md")
    parser.more = lambda: DESCRIPTION
    add = parser.add_argument
    add(
        "dataset",
        metavar="DATASET",
        help="read the index and the lengths of this folder or URL; for several datasets, of those in a run's YAML "
        "file; or take the sources that a YAML file describes, which need not exist",
    )
    add("--nodes", type=at_least(1), default=1, metavar="N", help="spread the ranks over N nodes; default: %(default)s")
    add("--gpus", type=at_least(1), default=8, metavar="N", help="put N ranks on each node; default: %(default)s")
    add("--workers", type=at_least(0), metavar="N", help="give each rank N loader workers; default: the run's, or 2")
    add("--bandwidth", metavar="RATE", help="give each node a link of RATE to the store, as 5gbit; default: no limit")
    add(
        "--cache",
        metavar="SIZE",
        help="keep at most SIZE of each source's shards on a node, as 500gb; default: its cache_limit, or all",
    )
    add(
        "--step-time",
        default="1s",
        metavar="TIME",
        help="take TIME for a step whose batches are there; default: %(default)s",
    )
    add(
        "--latency",
        default="50ms",
        metavar="TIME",
        help="wait TIME for the first byte of a request; default: %(default)s",
    )
    add(
        "--request-price",
        type=float,
        default=0.0004,
        metavar="DOLLARS",
        help="count DOLLARS for 1000 requests; default: %(default)s",
    )
    add(
        "--egress-price",
        type=float,
        default=0.0,
        metavar="DOLLARS",
        help="count DOLLARS for 10^9 bytes that leave the store; default: %(default)g",
    )
    add(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="share shards between nodes, each from the store once; default: as the run's file says, or not",
    )
    add("--epochs", type=at_least(1), metavar="N", help="run N epochs, caches kept; default: the run's, or 1")
    add("--max-steps", type=at_least(1), metavar="N", help="end after N steps; default: the run's")
    add(
        "--max-samples",
        type=at_least(1),
        metavar="N",
        help="read every step of a run of at most N samples, and some of a longer one; default: 2^25",
    )
    add(
        "--compare",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="compare values of num_canonical_nodes, shuffle_block_size, packing_length, shard_bytes, num_nodes, "
        "num_workers, bandwidth or cache, each by itself",
    )
    add("--html", type=local_file, metavar="FILE", help="write one page with plots over the run")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    of_dataset = parser.add_argument_group("of a dataset, or described sources; a run's file says these itself")
    add = of_dataset.add_argument
    add("--packing-length", type=at_least(1), metavar="TOKENS", help="fill packs up to so many tokens")
    add(
        "--global-batch",
        type=at_least(1),
        metavar="PACKS",
        help=f"read so many packs a step; default: {DEFAULT_GLOBAL_BATCH}",
    )
    add(
        "--overlong",
        choices=("error", "drop", "truncate", "split", "keep"),
        help="do this with samples that are longer than a pack; default: error",
    )
    add(
        "--canonical-nodes",
        type=at_least(1),
        metavar="C",
        help="cut the order into C canonical nodes; default: by its size",
    )
    add(
        "--block-size",
        type=at_least(1),
        metavar="SAMPLES",
        help=f"shuffle blocks of so many; default: {1 << 18}",
    )
    add("--seed", type=at_least(0), metavar="SEED", help="shuffle by this seed; default: 0")
    add(
        "--tokenizer",
        metavar="PATH",
        help="take the lengths that this folder or hub id measured; default: those written last",
    )
    add_processor_options(of_dataset)


def _simulate(options: argparse.Namespace) -> int:
    from .page import as_json, page, print_simulations, rows_of
    from .run import advise, compare, parse_settings, simulate_sources

    settings = parse_settings(options.compare)
    sources, cluster, steps = _opened(options)
    simulation = simulate_sources(sources, cluster, steps)
    compared = dict(compare(sources, cluster, steps, settings=settings))
    advice = advise(simulation, sources, cluster, steps, compared=compared)
    everything = {"as given": simulation, **compared}
    title = f"{options.dataset} on {cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs"
    if options.html:
        from ...storage.failures import disk_errors

        text = page(simulation, title=title, advice=advice, columns=list(everything), rows=rows_of(everything))
        with disk_errors(str(options.html), room="free some, or name another file"):
            options.html.parent.mkdir(parents=True, exist_ok=True)
            options.html.write_text(text, encoding="utf-8")
    if options.json:
        shown = {"simulation": as_json(simulation), "advice": advice}
        shown["compared"] = {name: as_json(each) for name, each in compared.items()}
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    else:
        print_simulations(everything, title=title, advice=advice)
    return 0


def _opened(options: argparse.Namespace) -> tuple[Sources, Cluster, Steps]:
    """Return the sources of DATASET, the cluster, and the steps."""
    from ...config import load_mapping

    if not options.dataset.endswith((".yaml", ".yml")):
        return _of_dataset(options)
    return _of_description(options) if "sources" in load_mapping(Path(options.dataset)) else _of_run(options)


def _cluster(options: argparse.Namespace, *, num_workers: int, replication: int = 1, peers: bool = False) -> Cluster:
    from .cluster import Cluster, parse_seconds

    return Cluster(
        num_nodes=options.nodes,
        gpus_per_node=options.gpus,
        replication=replication,
        num_workers=num_workers if options.workers is None else options.workers,
        bandwidth=options.bandwidth,
        cache=options.cache,
        step_time_s=parse_seconds(options.step_time),
        latency_s=parse_seconds(options.latency),
        request_price=options.request_price,
        egress_price=options.egress_price,
        peers=peers if options.peers is None else options.peers,
    )


def _of_dataset(options: argparse.Namespace) -> tuple[Sources, Cluster, Steps]:
    """A dataset with the settings of the command line."""
    from ...mds.core import PackedDataset
    from ...mds.streams import StreamConfig
    from .sources import Sources

    packing, order = _packing_and_order(options)
    dataset = PackedDataset(
        [StreamConfig(remote=options.dataset)],
        processor=stored_processor(options.dataset, options),
        packing=packing,
        order=order,
    )
    return (
        Sources.of(dataset),
        _cluster(options, num_workers=2),
        _steps(options, options.global_batch or DEFAULT_GLOBAL_BATCH),
    )


def _of_description(options: argparse.Namespace) -> tuple[Sources, Cluster, Steps]:
    """Sources that a file describes, with the settings of the command line."""
    from ...config import load_config
    from .described import DescribedSources, describe

    if given := given_options(options, OF_PROCESSORS):
        raise ConfigError(f"{options.dataset} describes lengths, and nothing is measured: leave {given[0]} out")
    packing, order = _packing_and_order(options)
    described = load_config(DescribedSources, Path(options.dataset))
    sources = describe(described, packing=packing, order=order)
    return sources, _cluster(options, num_workers=2), _steps(options, options.global_batch or DEFAULT_GLOBAL_BATCH)


def _packing_and_order(options: argparse.Namespace) -> tuple[PackingConfig, OrderConfig]:
    from ...plan.order import OrderConfig
    from ...plan.packing import PackingConfig

    if options.packing_length is None:
        raise ConfigError("a dataset needs --packing-length: give it, or the YAML file of a run")
    block_size = {} if options.block_size is None else {"shuffle_block_size": options.block_size}
    order = OrderConfig(seed=options.seed or 0, num_canonical_nodes=options.canonical_nodes, **block_size)
    return PackingConfig(packing_length=options.packing_length, overlong=options.overlong or "error"), order


def _of_run(options: argparse.Namespace) -> tuple[Sources, Cluster, Steps]:
    """The datasets of a run's file, and what its section `train` says of steps and ranks."""
    from ..ledger.opening import open_run
    from .sources import Sources

    if given := given_options(options, IN_RUN_FILES):
        raise ConfigError(f"{options.dataset} already sets this: leave {given[0]} out")
    run = open_run(Path(options.dataset), is_stored=True)
    train = run.train
    weights = None if train.mixing == "samples" else train.weights  # the plan has them
    sources = Sources.of(run.datasets, weights=weights, max_epochs=train.max_epochs, balance=train.balance)
    epochs, max_steps = train.num_train_epochs or 1, train.max_steps
    peers = all(each.fetch.peers for each in run.datasets.values())
    cluster = _cluster(options, num_workers=train.num_workers, replication=train.group_ranks, peers=peers)
    return sources, cluster, _steps(options, train.global_batch, epochs=epochs, max_steps=max_steps)


def _steps(options: argparse.Namespace, global_batch: int, *, epochs: int = 1, max_steps: int | None = None) -> Steps:
    from .run import MAX_SAMPLES, Steps

    return Steps(
        global_batch=global_batch,
        epochs=options.epochs or epochs,
        max_steps=options.max_steps or max_steps,
        max_samples=options.max_samples or MAX_SAMPLES,
    )
