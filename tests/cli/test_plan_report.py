from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.cli.console import label_of
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.assign import PAD, assign, count_spilled
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.tools.plan.report import (
    COMPARED_STRATEGIES,
    EpochReport,
    KindsReport,
    StepsReport,
    StreamReport,
    TrainedReport,
    compare_balances,
    plot_plans,
    report_epoch,
    report_steps,
    with_strategy,
)
from lmms_stream.types import World

from ..arrows import ROOT
from ..conftest import run_cli
from ..media_words import MediaWords, mixed_chats, write_chats
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
    assert (report.imbalance_with_windows, report.imbalance_with_even_fit) == (None, None)
    compared = compare_balances(report, Mixture({"x": plan}), global_batch=4, world=world)
    in_turn = report_steps(Mixture({"x": plan}), global_batch=4, world=world)
    assert compared.imbalance_with_windows is not None
    assert 1 <= compared.imbalance_with_windows < in_turn.imbalance
    assert compared.imbalance_across_sources is None
    short = PackPlan(np.minimum(plan.lengths, 64), [400] * 5, order=plan.order, packing=plan.packing)
    of_two = compare_balances(report, Mixture({"x": plan, "short": short}), global_batch=4, world=world)
    assert of_two.imbalance_with_windows is not None
    assert of_two.imbalance_across_sources is not None
    assert of_two.imbalance_across_sources < of_two.imbalance_with_windows
    evened = report_steps(Mixture({"x": with_strategy(plan, "even_fit")}), global_batch=4, world=world)
    assert compared.imbalance_with_even_fit == evened.imbalance
    assert report.num_spilled_packs < 16  # only where one canonical node goes on alone


def test_packs_without_room_at_home_are_counted_as_spilled() -> None:
    packs = pack_range([[5]] * 6, canonical_nodes=[0, 0, 0, 0, 1, 1])
    settings: Any = {"nodes": (1, 1), "num_canonical_nodes": 2}
    dealt = assign(packs, global_batch=8, **settings)
    assert count_spilled(packs, dealt, **settings) == 0
    assert np.count_nonzero(dealt == PAD) == 2
    dealt = assign(packs, global_batch=6, **settings)
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
    for words in ("efficiency", "imbalance in order", "window_1024", "fewest packs possible", "steps of an epoch"):
        assert words in result.stdout
    assert "of the run" not in result.stdout


def test_the_page_explains_each_figure_by_its_printed_name() -> None:
    page = (ROOT / "docs" / "packing.md").read_text()
    explained = {name for row in re.findall(r"^\| (.+?) \|", page, flags=re.MULTILINE) for name in row.split("; ")}
    reports = (EpochReport, KindsReport, StepsReport, StreamReport, TrainedReport)
    printed = {label_of(field.name) for report in reports for field in dataclasses.fields(report)}
    assert printed - explained == {"source", "stream", "unknown", "steps"}
    assert {"steps of an epoch", "steps until all sources end"} <= explained


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


@pytest.fixture(scope="module")
def media_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chats(tmp_path_factory.mktemp("chats") / "pictures", mixed_chats(1200, seed=4), size_limit=1 << 16)
    index_dataset(str(folder), MediaWords(), num_workers=1)
    return folder


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_overlong_samples_with_media_are_reported_apart(media_folder: Path, overlong: Overlong) -> None:
    packing = PackingConfig(packing_length=128, overlong=overlong)
    plan = PackedStreamingDataset(media_folder, processor=MediaWords(), packing=packing).plan
    report = report_epoch(plan, source="x", epoch=0)
    assert plan.index.patches is not None
    too_long = plan.lengths > 128
    of_media = too_long & (np.asarray(plan.index.patches) > 0)
    assert (report.num_overlong, report.num_overlong_media) == (too_long.sum(), of_media.sum())
    assert report.num_overlong_media > 0  # type: ignore[operator]
    dropped = too_long if overlong == "drop" else of_media
    assert report.samples_per_pack == pytest.approx((~dropped).sum() / report.num_packs)
    kept = np.minimum(plan.lengths[~dropped], 128) if overlong == "truncate" else plan.lengths[~dropped]
    assert report.num_tokens == kept.sum()
    longer_than_half = int(np.count_nonzero(2 * kept[kept <= 128] > 128))
    assert report.lower_bound == max(-(-int(kept.sum()) // 128), longer_than_half) <= report.num_packs
    assert report_epoch(make_plan(), source="x", epoch=0).num_overlong_media is None


def test_the_command_tells_both_imbalances_and_how_tokens_divide(media_folder: Path, tmp_path: Path) -> None:
    arguments = ["plan", str(media_folder), "--packing-length", "256", "--overlong", "drop", "--global-batch", "64"]
    result = run_cli(*arguments, "--world-size", "8", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    described = json.loads(next((media_folder / "_lmms" / "lengths").glob("*.json")).read_text())
    (kinds,) = found["kinds"]
    for kind, count in described["num_tokens_of"].items():
        assert kinds[f"num_{kind}_tokens"] == count
        assert kinds[f"{kind}_share"] == pytest.approx(count / described["num_tokens"])
    assert kinds["num_patches"] == described["num_patches"] > 0
    assert kinds["num_image_tokens"] > 0 < kinds["num_video_tokens"]
    steps = found["steps"]
    assert steps["num_seen"] >= 1
    assert 1 <= steps["imbalance"] <= 1.05
    assert 1 <= steps["tower_imbalance"] <= 1.05 < steps["tower_imbalance_in_order"]
    result = run_cli(*arguments, "--world-size", "8")
    assert result.returncode == 0, result.stderr
    for words in ("text and media", "image share", "tower imbalance", "overlong media"):
        assert words in result.stdout


def test_of_texts_nothing_is_said_of_media(dataset_folder: Path) -> None:
    arguments = ["plan", str(dataset_folder), "--packing-length", "1024", "--overlong", "drop", "--global-batch", "4"]
    result = run_cli(*arguments)
    assert result.returncode == 0, result.stderr
    assert not [words for words in ("overlong media", "text and media", "tower") if words in result.stdout]
    found = json.loads(run_cli(*arguments, "--json").stdout)
    assert (found["kinds"], found["steps"]["tower_imbalance"], found["epochs"][0]["num_overlong_media"]) == (
        [], None, None,
    )  # fmt: skip
