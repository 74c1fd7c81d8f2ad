from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.cli.plan_report import COMPARED_STRATEGIES, plot_plans, report_epoch, report_steps, with_strategy
from lmms_stream.plan.assign import assign, count_spilled
from lmms_stream.plan.kernels.deal import PAD
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.types import World

from ..conftest import run_cli
from ..strategies import chat_lengths, pack_range

LIMIT = 512


def make_plan(*, overlong: bool = False, canonical_nodes: int = 2) -> PackPlan:
    lengths = chat_lengths(2000, limit=1024 if overlong else LIMIT, seed=3)
    return PackPlan(
        lengths,
        [400] * 5,
        order=OrderConfig(num_canonical_nodes=canonical_nodes),
        packing=PackingConfig(packing_length=LIMIT, overlong="drop"),
    )


def test_an_epochs_figures_are_those_of_its_packs() -> None:
    plan = make_plan(overlong=True)
    report = report_epoch(plan, source="x", epoch=1)
    packs = plan.packs(1, 0, plan.num_packs(1))
    kept = plan.lengths[plan.lengths <= LIMIT]
    assert (report.source, report.epoch, report.num_samples) == ("x", 1, 2000)
    assert report.num_overlong == 2000 - len(kept) > 0
    assert report.num_packs == len(packs)
    assert report.num_tokens == packs.lengths.sum() == kept.sum()
    assert report.efficiency == pytest.approx(kept.sum() / (len(packs) * LIMIT))
    assert report.samples_per_pack == pytest.approx(len(kept) / len(packs))
    assert report.lower_bound == max(-(-kept.sum() // LIMIT), np.count_nonzero(2 * kept > LIMIT))
    assert report.lower_bound <= report.num_packs


def test_a_look_at_the_steps_counts_shards_balance_and_spill() -> None:
    plan = make_plan()
    world = World(world_size=4, num_nodes=2)
    report = report_steps(Mixture({"x": plan}), global_batch=16, world=world)
    full = plan.num_packs(0) // 16
    assert (report.num_steps, report.num_seen) == (-(-plan.num_packs(0) // 16), full)
    shards = []
    for step in range(full):
        ids = plan.packs(0, 16 * step, 16 * step + 16).sample_ids
        shards.append(len(np.unique(ids // 400)))
    assert (report.shards_per_step_median, report.shards_per_step_max) == (float(np.median(shards)), max(shards))
    assert 1 <= report.imbalance < report.imbalance_in_order
    assert report.num_spilled_packs < 16  # only where one canonical node goes on alone


def test_packs_without_room_at_home_are_counted_as_spilled() -> None:
    packs = pack_range([[5]] * 6, canonical_nodes=[0, 0, 0, 0, 1, 1])
    settings = {"num_nodes": 2, "num_canonical_nodes": 2}
    dealt = assign(packs, global_batch=8, world_size=2, **settings)
    assert count_spilled(packs, dealt, **settings) == 0
    assert np.count_nonzero(dealt == PAD) == 2
    dealt = assign(packs, global_batch=6, world_size=2, **settings)
    assert count_spilled(packs, dealt, **settings) == 1


def test_a_plan_with_another_strategy_has_the_same_samples() -> None:
    plan = make_plan()
    for strategy in COMPARED_STRATEGIES:
        other = with_strategy(plan, strategy)
        assert other.packing.strategy == strategy
        ids = other.packs(0, 0, other.num_packs(0)).sample_ids
        assert np.array_equal(np.sort(ids), np.arange(2000))
    assert with_strategy(plan, "best_fit").fingerprint == plan.fingerprint


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_drawn(suffix: str, tmp_path: Path) -> None:
    plan = make_plan()
    path = tmp_path / "new" / f"plot{suffix}"
    plot_plans({"best": plan, "next": with_strategy(plan, "next_fit")}, path)
    start = path.read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_the_command_prints_tables_or_json(dataset_folder: Path, tmp_path: Path) -> None:
    arguments = ["plan", str(dataset_folder), "--packing-length", "1024", "--overlong", "drop", "--global-batch", "4"]
    result = run_cli(*arguments, "--epochs", "2", "--compare", "--json", "--world-size", "2")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [record["epoch"] for record in found["epochs"]] == [0, 1]
    assert [record["source"] for record in found["comparison"]] == list(COMPARED_STRATEGIES)
    assert found["steps"]["num_steps"] == -(-found["epochs"][0]["num_packs"] // 4)
    assert found["epochs"][0]["num_packs"] == found["comparison"][0]["num_packs"]
    result = run_cli(*arguments, "--compare", "--strategy", "window_64")
    assert result.returncode == 0, result.stderr
    for words in ("efficiency", "imbalance in order", "window_1024", "lower bound"):
        assert words in result.stdout


def test_the_command_mixes_datasets_by_weights(dataset_folder: Path) -> None:
    arguments = ["plan", str(dataset_folder), str(dataset_folder), "--packing-length", "4096", "--overlong", "split"]
    result = run_cli(*arguments, "--weights", "2", "1", "--json", "--global-batch", "8")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["steps"]["num_steps"] is None
    assert [record["source"] for record in found["epochs"]] == [dataset_folder.name, f"{dataset_folder.name} (2)"]
    result = run_cli(*arguments, "--weights", "2")
    assert result.returncode == 1
    assert "1 weights for 2 datasets: give one for each" in result.stderr
