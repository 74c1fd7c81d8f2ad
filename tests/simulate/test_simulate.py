"""The arithmetic of the simulation, and what its command prints."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.__main__ import main
from lmms_stream.errors import ConfigError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, steps_asked_ahead
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.tools.plan.report import report_steps
from lmms_stream.tools.simulate import Cluster, simulate
from lmms_stream.tools.simulate.cluster import parse_bandwidth, parse_seconds
from lmms_stream.tools.simulate.links import Link, use_needed_last, wait_for_links
from lmms_stream.tools.simulate.measured import PAYLOAD
from lmms_stream.tools.simulate.run import Steps, advise, parse_settings, simulate_sources
from lmms_stream.tools.simulate.sources import Sources
from lmms_stream.types import World

from ..conftest import write_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=4000)
    return folder


def dataset_of(folder: Path, *, canonical_nodes: int = 4, block: int = 150, shuffle: bool = True) -> PackedDataset:
    order = OrderConfig(num_canonical_nodes=canonical_nodes, shuffle_block_size=block, shuffle=shuffle)
    return PackedDataset(
        [StreamConfig(remote=folder)], packing=PackingConfig(packing_length=256, window=64), order=order
    )


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(20, 60), st.lists(st.integers(0, 9), unique=True))
def test_what_is_needed_last_gives_way_then_what_was_used_least_recently(
    shards: list[int], limit: int, victims: list[int]
) -> None:
    sizes = np.random.default_rng(len(shards)).integers(1, 20, 10)
    order = np.array(victims, np.int64)
    order = order[np.cumsum(sizes[order]) <= limit]  # they are there, and were read before
    held, missed = np.isin(np.arange(10), order), np.zeros(len(shards), bool)
    used_at, numbers = np.full(10, -1, np.int32), np.array(shards, np.int64)
    used = int(sizes[order].sum())
    used = use_needed_last(np.arange(len(shards)), numbers, sizes, limit, used_at, held, order, -1, used, missed)
    kept = OrderedDict((shard, -1) for shard in order.tolist())
    for step, (shard, is_missed) in enumerate(zip(shards, missed.tolist(), strict=True)):
        assert is_missed == (shard not in kept)
        while is_missed and sum(sizes[each] for each in kept) + sizes[shard] > limit:
            del kept[next((each for each in order.tolist() if kept.get(each) == -1), next(iter(kept)))]
        kept[shard] = step
        kept.move_to_end(shard)
    assert used == sum(sizes[each] for each in kept)


def waits_of(
    downloads: list[tuple[int, int, int, int]],
    *,
    num_steps: int,
    latency_s: float = 0.0,
    at_once: int = 4,
    ahead: int = 64,
    begins: tuple[int, ...] = (0,),
    at_hand: list[int] | None = None,
) -> list[float]:
    """Of downloads (step, node, step of the request, bytes), with links of 10 bytes a second and steps of 1 s.

    at_hand: the steps with which they are at hand; default: with the request.
    """
    steps, nodes, released, sizes = np.array(downloads, np.int64).T
    link = Link(10.0, latency_s, at_once, ahead, 0)
    anew = np.isin(np.arange(num_steps), begins)
    entered = released if at_hand is None else np.array(at_hand, np.int64)
    waits = wait_for_links(steps, nodes, released, entered, sizes, anew, link=link, num_nodes=2, step_time_s=1.0)
    return [round(each, 6) for each in waits.tolist()]


def test_steps_wait_for_the_slowest_link() -> None:
    assert waits_of([(0, 0, 0, 5), (0, 1, 0, 20), (1, 0, 0, 5)], num_steps=2) == [2.0, 0.0]
    assert waits_of([(0, 0, 0, 5), (1, 0, 1, 5)], num_steps=2) == [0.5, 0.5]  # asked for when it is needed
    assert waits_of([(0, 0, 0, 5), (2, 0, 1, 25)], num_steps=3) == [0.5, 0.0, 1.5]  # one step ahead
    assert waits_of([(0, 0, 0, 5)], num_steps=1, latency_s=0.25) == [0.75]


def test_downloads_share_a_link_and_those_that_steps_wait_for_begin_first() -> None:
    both = [(0, 0, 0, 10), (1, 0, 0, 10)]
    assert waits_of(both, num_steps=2) == [2.0, 0.0]  # they end together
    assert waits_of(both, num_steps=2, at_once=1) == [1.0, 0.0]
    assert waits_of([(2, 0, 0, 10), (0, 0, 0, 10)], num_steps=3, at_once=1) == [1.0, 0.0, 0.0]
    assert waits_of([(0, 0, 0, 10), (3, 0, 0, 10), (2, 0, 1, 10)], num_steps=4, at_once=1) == [1.0, 0.0, 0.0, 0.0]


def test_what_is_at_hand_has_the_link_for_itself() -> None:
    two = [(0, 0, 0, 10), (2, 0, 0, 30)]
    assert waits_of(two, num_steps=3) == [2.0, 0.0, 0.0]  # and the second ends after 4 s, when it is needed
    assert waits_of(two, num_steps=3, at_hand=[0, 2]) == [1.0, 0.0, 1.0]  # it begins after 1 s
    assert waits_of([*two, (3, 0, 1, 10)], num_steps=4, at_hand=[0, 3, 1])[2:] == [2.0, 0.0]  # two share from 2 s on
    assert waits_of(two, num_steps=3, at_hand=[0, 0]) == waits_of(two, num_steps=3)


def test_a_node_that_has_fetched_enough_ahead_goes_on_when_it_has_come_to_it() -> None:
    later = [(0, 0, 0, 10), (1, 0, 0, 10), (2, 0, 0, 40)]
    assert waits_of(later, num_steps=3, at_once=1) == [1.0, 0.0, 3.0]
    assert waits_of(later, num_steps=3, at_once=1, ahead=1) == [1.0, 0.0, 4.0 - 1.0]  # the last begins with step 1
    assert waits_of([(0, 0, 0, 10), (2, 0, 0, 10), (3, 0, 0, 40)], num_steps=4, at_once=1, ahead=1)[3] == 3.0


def test_loaders_that_begin_anew_ask_for_nothing_before() -> None:
    assert waits_of([(0, 0, 0, 5), (1, 0, 0, 20)], num_steps=2, at_once=1) == [0.5, 1.0]
    assert waits_of([(0, 0, 0, 5), (1, 0, 1, 20)], num_steps=2, at_once=1, begins=(0, 1)) == [0.5, 2.0]
    assert waits_of([(1, 0, 1, 5), (2, 0, 1, 5)], num_steps=3, begins=(0, 1)) == [0.0, 1.0, 0.0]


def test_loaders_ask_as_far_ahead_as_their_workers_have_come() -> None:
    """A rank's workers have some items each, and have asked for 32 packs more."""
    two_nodes = StepConfig(global_batch=64, world=World(world_size=4, num_nodes=2), packs_per_item=16)
    four_nodes = StepConfig(global_batch=64, world=World(world_size=8, num_nodes=4), packs_per_item=8)
    assert steps_asked_ahead(two_nodes, num_workers=2, num_items=2) == (2 + 2) * 2
    assert steps_asked_ahead(four_nodes, num_workers=2, num_items=2) == (4 + 2) * 2
    assert steps_asked_ahead(four_nodes, num_workers=0, num_items=2) == 4
    single_packs = StepConfig(global_batch=64, world=World(world_size=8), packs_per_item=1)
    assert steps_asked_ahead(single_packs, num_workers=1, num_items=8) == (32 + 8) // 8
    four_steps = StepConfig(global_batch=64, world=World(world_size=4, num_nodes=2), packs_per_item=64)
    assert steps_asked_ahead(four_steps, num_workers=2, num_items=0) == 4 + 2  # half of the second worker's first item
    assert steps_asked_ahead(four_steps, num_workers=2, num_items=2) == 2 * 2 * 4 + 4 + 2


def test_a_link_that_is_fast_enough_makes_no_step_wait_and_half_of_it_does(folder: Path) -> None:
    dataset = dataset_of(folder)
    needed = simulate(dataset, Cluster(num_nodes=2, gpus_per_node=2), global_batch=8).needed_bandwidth

    def wait_share(bandwidth: float) -> float:
        cluster = Cluster(num_nodes=2, gpus_per_node=2, bandwidth=int(bandwidth), latency_s=0.0)
        return simulate(dataset, cluster, global_batch=8).wait_share

    assert wait_share(1.05 * needed) <= 0.01 < wait_share(needed / 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_step_waits_for_the_first_blocks_alone(num_workers: int, folder: Path) -> None:
    """Workers have asked for the second ones by the time that they have made what they make ahead."""
    dataset = dataset_of(folder, block=500)
    cluster = Cluster(num_nodes=2, gpus_per_node=1, num_workers=num_workers, bandwidth="1mbit", latency_s=0.0)
    told = simulate(dataset, cluster, global_batch=16)
    firsts = {
        half: {shard for node in half for shard in dataset.plan.shards_of_block(0, node, 0).tolist()}
        for half in ((0, 1), (2, 3))
    }
    num_bytes = max(sum(dataset.shard_infos[shard].size for shard in shards) for shards in firsts.values())
    share = told.first_wait_s * PAYLOAD * cluster.bytes_per_s / num_bytes
    assert 0.8 < share < (1.1 if num_workers else 1.001)  # it needs nearly all of them; workers ask for packs of others


def test_windows_of_a_long_run_tell_what_all_steps_do(folder: Path) -> None:
    dataset = dataset_of(folder, canonical_nodes=2, block=50)
    cluster = Cluster(num_nodes=2, gpus_per_node=1, bandwidth="1mbit")
    exact = simulate(dataset, cluster, global_batch=4)
    sampled = simulate(dataset, cluster, global_batch=4, max_samples=1500)
    assert sampled.is_sampled
    assert not exact.is_sampled
    assert sampled.num_steps == exact.num_steps > 1.2 * sampled.num_steps_seen
    assert sampled.download_bytes == pytest.approx(exact.download_bytes, rel=0.15)
    assert sampled.imbalance == pytest.approx(exact.imbalance, rel=0.02)
    plan, world = Mixture({"data": dataset.plan}), World(world_size=2, num_nodes=2)
    of_whole_steps = report_steps(plan, global_batch=4, world=world, max_seen=exact.num_steps).num_spilled_packs
    assert of_whole_steps <= exact.num_spilled <= of_whole_steps + 4


def test_shards_cut_anew_hold_the_same_samples_and_bytes(folder: Path) -> None:
    sources = Sources.of(dataset_of(folder))
    ours = sources.shards["data"]
    for shard_bytes in ("4kb", "64kb", "1gb"):
        cut = sources.with_setting("shard_bytes", shard_bytes)
        (plan,) = cut.plans.values()
        shards = cut.shards["data"]
        assert int(plan.samples_per_shard.sum()) == 4000
        assert plan.samples_per_shard.min() > 0
        assert int(shards.stored.sum()) == int(ours.stored.sum())
        assert len(shards.stored) == len(plan.samples_per_shard)


def test_advice_names_the_source_whose_cache_is_too_small(folder: Path) -> None:
    limited = PackedDataset(
        [StreamConfig(remote=folder)],
        packing=PackingConfig(packing_length=256, window=64),
        order=OrderConfig(num_canonical_nodes=4, shuffle_block_size=150),
        fetch=FetchConfig(cache_limit="20kb"),
    )
    sources = Sources.of({"free": dataset_of(folder), "limited": limited})
    cluster, steps = Cluster(gpus_per_node=2), Steps(global_batch=8)
    told = simulate_sources(sources, cluster, steps)
    assert told.least_cache_bytes == sum(told.least_cache_limits.values())
    advice = advise(told, sources, cluster, steps, compared={})
    assert re.search(r"cache [\d.]+ \w+ for limited: loaders refuse less with this order, or lower", advice)


def test_without_shuffle_all_nodes_read_all_shards_and_nothing_else_is_advised(folder: Path) -> None:
    told = simulate(dataset_of(folder, shuffle=False), Cluster(num_nodes=2, gpus_per_node=1), global_batch=8)
    assert told.num_canonical_nodes == 1
    assert told.copies > 1.5


def test_the_command_prints_figures_settings_and_advice(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "run.html"
    command = [
        "simulate", str(folder), "--packing-length", "256", "--global-batch", "16", "--nodes", "4", "--gpus", "2",
        "--canonical-nodes", "1", "--block-size", "200", "--bandwidth", "5mbit", "--step-time", "100ms",
        "--egress-price", "0.09", "--compare", "num_canonical_nodes=4,8", "--compare", "bandwidth=1mbit",
        "--html", str(page),
    ]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert re.search(r"advice: num_canonical_nodes [48]: [234]\.\d times fewer bytes", shown)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["compared"]) == ["num_canonical_nodes=4", "num_canonical_nodes=8", "bandwidth=1mbit"]
    assert sum(node["download_bytes"] for node in told["simulation"]["nodes"]) == told["simulation"]["download_bytes"]
    assert told["compared"]["bandwidth=1mbit"]["wait_s"] > told["simulation"]["wait_s"]
    text = page.read_text()
    assert text.count("<svg") == 5
    assert "times fewer bytes" in text
    assert not re.search(r"https?:|src=|@import", text)
    assert main(["simulate", str(folder), "--packing-length", "256", "--global-batch", "8", "--cache", "20kb"]) == 0
    assert "loaders refuse less with this order" in capsys.readouterr().out


def test_a_dataset_is_simulated_in_steps_of_as_many_packs_as_it_is_planned_in(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for options in ([], ["--global-batch", "64"]):
        assert main(["simulate", str(folder), "--packing-length", "256", *options, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["simulation"]["num_steps"])
    assert main(["plan", str(folder), "--packing-length", "256", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["steps"]["num_steps"]
    assert told == [planned, planned]


def test_a_run_is_simulated_from_its_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"dataset: {{remote: {folder}, processor: {{type: tokens}}, packing_length: 256, num_canonical_nodes: 4}}\n"
        "model: {pretrained: nowhere}\n"
        f"train: {{global_batch: 8, max_steps: 20, num_workers: 1, output_dir: {tmp_path / 'out'}}}\n"
    )
    assert main(["simulate", str(run), "--nodes", "2", "--gpus", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["simulation"]
    assert (told["num_steps"], told["num_ranks"], told["num_canonical_nodes"]) == (20, 4, 4)
    for name, value in (("global-batch", "4"), ("seed", "0"), ("overlong", "drop"), ("setting", "fps=1")):
        assert main(["simulate", str(run), f"--{name}", value]) == 1
        assert f"already sets this: leave --{name} out" in capsys.readouterr().err
    run.write_text(run.read_text().replace("remote:", "dataset_type: vision, dataset_path:"))
    assert main(["simulate", str(run)]) == 1
    assert "convert it with lmms-stream convert, and name its folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--global-batch", "8"], "a dataset needs --packing-length: give it, or the YAML file of a run"),
        (["--packing-length", "256", "--global-batch", "9"], "global_batch 9 cannot be shared equally by 8 ranks"),
        (["--bandwidth", "fast"], "bandwidth 'fast' is no amount a second: write it as 5gbit"),
        (["--step-time", "soon"], "'soon' is not a time: write for example 1.2s, 800ms or 2m"),
        (["--step-time", "0"], "step_time_s must be a number above 0, got 0.0"),
        (["--cache", "much"], "cache 'much' is not a number of bytes"),
        (["--compare", "color=red"], "'color=red' names nothing to compare: write NAME=VALUE,VALUE with one of"),
        (["--compare", "num_nodes=few"], "num_nodes=few is no whole number"),
        (["--compare", "packing_length=long"], "packing_length=long is no whole number"),
        (["--epochs", "2", "--max-samples", "1000"], "2 epochs of 4000 samples are more than max_samples 1000"),
    ],
)
def test_what_makes_no_sense_is_named(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--packing-length" not in options and message[:9] != "a dataset":
        options = ["--packing-length", "256", "--global-batch", "8", *options]
    assert main(["simulate", str(folder), *options]) == 1
    assert message in capsys.readouterr().err


def test_a_run_without_end_and_one_without_steps_are_refused(folder: Path) -> None:
    dataset = {"a": dataset_of(folder), "b": dataset_of(folder)}
    cluster = Cluster(num_nodes=2, gpus_per_node=1)
    with pytest.raises(ConfigError, match="have no end: say how many steps with max_steps"):
        simulate(dataset, cluster, global_batch=8, weights={"a": 3, "b": 1})
    told = simulate(dataset, cluster, global_batch=8, weights={"a": 3, "b": 1}, max_steps=30)
    assert told.num_steps == 30
    with pytest.raises(ConfigError, match="packs make no step of global_batch 100000: lower it"):
        simulate(dataset, cluster, global_batch=100000, drop_last=True)
    lanes = dataset_of(folder)
    lanes.packing_mode = "lanes"
    with pytest.raises(ConfigError, match="packs of lanes are not known beforehand"):
        simulate(lanes, cluster, global_batch=8)
    with pytest.raises(ConfigError, match="color cannot be compared: choose one of num_canonical_nodes"):
        Sources.of(dataset).with_setting("color", 1)


def test_amounts_are_read_as_people_write_them() -> None:
    assert parse_bandwidth("400 Mbit/s") == 5e7
    assert parse_bandwidth("10gbit") == 1.25e9
    assert parse_seconds("2m") == 120
    assert parse_settings(["cache=1gb", "cache=2gb", "num_nodes=2,4"]) == {
        "cache": ["1gb", "2gb"],
        "num_nodes": ["2", "4"],
    }
    assert dataclasses.replace(Cluster(), cache="1kb").cache_bytes == 1024
    assert Cluster().egress_price == 0
