"""Figures of a record against sums done by hand."""

from __future__ import annotations

import dataclasses
import io
import sys
from dataclasses import replace
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.plan.assign import LINEAR_COST
from lmms_stream.plan.lengths import Lengths
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.train.data import tell_not_shown
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.flops import ModelFlops, model_flops, peak_tflops
from lmms_stream.train.model.isolation import positions_of
from lmms_stream.train.model.sharding import freeze
from lmms_stream.train.report.left_out import tell_beyond_positions, tell_overlong
from lmms_stream.train.report.metrics import (
    StepCounts,
    StepWindow,
    by_source,
    count_step,
    engine_figures,
    finite_mean,
    source_losses,
)
from lmms_stream.train.report.run_log import RunProgress, check_reporters
from lmms_stream.train.run.counts import Votes, agreed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.types import Batch
from rich.console import Console
from transformers import LlamaConfig

from tests.versions import IS_5


def pack(*lengths: int, source: str = "data", pad_to: int | None = None) -> Batch:
    """A pack of samples whose second half is learnt."""
    samples = []
    for length in lengths:
        ids = np.arange(length)
        samples.append({"input_ids": ids, "labels": np.where(ids >= length // 2, ids, -100)})
    return collate(samples, range(len(lengths)), pad_to=pad_to, source=source)


def counts(*batches: Batch, wait_s: float = 0.0) -> StepCounts:
    return count_step(
        batches,
        packing_lengths={"data": 100, "other": 50},
        flops=ModelFlops(per_token=10, per_loss_token=100, per_pair={None: 2, 30: 3}),
        wait_s=wait_s,
    )


def test_what_a_step_holds_is_counted_without_its_padding() -> None:
    full, padded, empty = pack(60, 40), pack(20, source="other", pad_to=48), pack(pad_to=100)
    assert counts(full, padded, empty, wait_s=0.25) == StepCounts(
        num_loss_tokens=60,
        num_tokens=120,
        num_samples=3,
        capacity=150,
        num_positions=248,
        cost=60**2 + 40**2 + 20**2 + LINEAR_COST * 120,
        flops=10 * 120 + 100 * 60 + 2 * (60**2 + 40**2 + 20**2) + 3 * (60 * 30 + 40 * 30 + 20 * 20),
        wait_s=0.25,
        num_packs=2,
        shortest_pack=20,
        longest_pack=100,
    )


def test_a_record_of_training_has_lmms_engines_names() -> None:
    record = {"loss": 2.0, "learning_rate": 1e-3, "perf/tokens_per_s": 50.0, "tokens_seen": 7, "grad_norm": 1.0}
    assert engine_figures(record, pack_tokens=(90.0, 80.0, 100.0), world_size=2) == {
        "train/loss": 2.0,
        "train/lr": 1e-3,
        "train/grad_norm": 1.0,
        "train/total_tokens": 7,
        "train/tokens_per_second": 50.0,
        "train/tokens_per_gpu": 25.0,
        "perf/global_seq_len_avg": 90.0,
        "perf/global_seq_len_min": 80.0,
        "perf/global_seq_len_max": 100.0,
    }
    of_bagel = {"loss": 2.0, "loss/ce": 0.5, "loss/mse": 1.5}
    figures = engine_figures(of_bagel, pack_tokens=(0.0, 0.0, 0.0), world_size=1)
    assert (figures["train/loss"], figures["train/ce"], figures["train/mse"]) == (2.0, 0.5, 1.5)
    assert engine_figures({"eval_loss": 1.0}, pack_tokens=(0.0, 0.0, 0.0), world_size=1) == {}


def test_packs_of_a_record_are_told_by_their_mean_least_and_most_tokens() -> None:
    window = StepWindow(2, replication=1)
    window.add(np.array([counts(pack(60, 40)), counts(pack(50, 30), pack(pad_to=100))], np.float64))
    window.add(np.array([counts(pack(90)), counts(pack(pad_to=100))], np.float64))
    assert [*window.pack_tokens] == [90, 80, 100]
    window.begin()
    window.add(np.array([counts(pack(10)), counts(pack(30))], np.float64))
    assert [*window.pack_tokens] == [20, 10, 30]


def test_a_record_sums_its_steps_and_compares_the_ranks_in_each() -> None:
    window = StepWindow(2, replication=1)
    steps = [
        [counts(pack(60, 40), wait_s=0.1), counts(pack(50, 30), wait_s=0.3)],
        [counts(pack(90), wait_s=0.5), counts(pack(10, 10), wait_s=0.0)],
    ]
    added = [window.add(np.array(step, np.float64)) for step in steps]
    assert [step.num_tokens for step in added] == [180, 110]
    assert [step.num_loss_tokens for step in added] == [90, 55]
    costs = np.array([[counts.cost for counts in step] for step in steps])
    assert window.figures(2.0) == pytest.approx(
        {
            "perf/tokens_per_s": 145,
            "perf/samples_per_s": 3.5,
            "perf/packing_efficiency": 290 / 400,
            "perf/padding_share": 0,
            "perf/global_seq_len_avg": (90 + 55) / 2,
            "perf/global_seq_len_min": 20,
            "perf/global_seq_len_max": 100,
            "perf/cost_imbalance": (costs.max(axis=1) / costs.mean(axis=1)).mean(),
            "data/wait_share": 0.3,
            "data/wait_p50_s": 0.4,
            "data/wait_p99_s": 0.498,
        }
    )
    window.begin()
    window.add(np.array(steps[1], np.float64))
    figures = window.figures(1.0)
    assert (window.num_steps, figures["perf/tokens_per_s"]) == (1, 110)
    assert figures["data/wait_p50_s"] == 0.5  # over 0.3, 0.5, 0.5: the steps of the last record are among them


def test_a_record_tells_the_imbalance_of_the_tower_where_steps_have_media() -> None:
    text = [counts(pack(60)), counts(pack(50))]
    media = [
        [counts(replace(pack(60), num_patches=400), replace(pack(5), num_patches=8)), counts(pack(40))],
        [counts(pack(20)), counts(replace(pack(30), num_patches=16))],
    ]
    assert [each.num_patches for each in media[0]] == [408, 0]
    window = StepWindow(2, replication=1)
    window.add(np.array(text, np.float64))
    assert not [name for name in window.figures(1.0) if "tower" in name or "patches" in name]
    for step in media:
        window.add(np.array(step, np.float64))
    window.add(np.array([counts(replace(pack(9), num_patches=4))] * 2, np.float64))
    figures = window.figures(2.0)
    assert figures["perf/tower_imbalance"] == pytest.approx((2 + 2 + 1) / 3)  # of the steps with media
    assert figures["perf/patches_per_s"] == (408 + 16 + 8) / 2
    window.begin()
    window.add(np.array(text, np.float64))
    assert "perf/tower_imbalance" not in window.figures(1.0)


def media_plan(*, overlong: Overlong, num_media: int) -> PackPlan:
    """Ten samples of which four are longer than a pack."""
    lengths = np.array([30, 70, 80, 90, 99, *[20] * 5])
    patches = np.where(np.arange(10) < num_media + 1, 4, 0)
    index = Lengths(lengths=lengths, content_hash="a", patches=patches, patches_hash="b")
    packing = PackingConfig(packing_length=64, overlong=overlong)
    return PackPlan(index, [10], order=OrderConfig(), packing=packing)


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_overlong_samples_with_media_are_told_apart(overlong: Overlong, caplog: pytest.LogCaptureFixture) -> None:
    text = dataclasses.replace(media_plan(overlong=overlong, num_media=0).index, patches=None, patches_hash="")
    plans = {
        "media": media_plan(overlong=overlong, num_media=3),
        "text": PackPlan(
            text, [10], order=OrderConfig(), packing=PackingConfig(packing_length=64, overlong=overlong)
        ),
    }  # fmt: skip
    tell_overlong(plans)
    assert [record.getMessage() for record in caplog.records] == [
        f"media: 4 of 10 samples are longer than packing_length 64, and overlong is {overlong}",
        "media: 3 of these have media and are dropped, for samples with media are never cut: raise packing_length, or "
        "set smaller limits for the media in the processor",
        f"text: 4 of 10 samples are longer than packing_length 64, and overlong is {overlong}",
    ]


def test_content_that_the_template_leaves_out_is_told_by_the_stored_counts(caplog: pytest.LogCaptureFixture) -> None:
    packing = PackingConfig(packing_length=64)
    indexes = [
        LengthIndex.from_array(np.array([30, 50], np.uint32), fingerprint="a", processor={}, not_shown=counts)
        for counts in ({}, {"system": 2, "ends": 1, "masked": 3})
    ]
    plans = {
        name: PackPlan(index, [2], order=OrderConfig(), packing=packing)
        for name, index in zip(("whole", "lossy"), indexes, strict=True)
    }
    tell_not_shown(plans)
    assert [record.getMessage() for record in caplog.records] == [
        "lossy: the chat template does not show: system of 2 samples; the end of 1 answer is not trained on; "
        "3 samples have no answer to train on (lmms-stream audit shows samples)"
    ]


def test_samples_beyond_the_positions_of_a_model_are_told(caplog: pytest.LogCaptureFixture) -> None:
    plan = PackPlan(
        np.array([30, 50, 64, 12]), [4], order=OrderConfig(), packing=PackingConfig(packing_length=64)
    )  # fmt: skip
    limit = positions_of(LlamaConfig(max_position_embeddings=40))
    tell_beyond_positions({"text": plan}, limit)
    tell_beyond_positions({"text": plan}, positions_of(LlamaConfig(max_position_embeddings=64)))
    tell_beyond_positions({"text": plan}, positions_of(None))
    assert [record.getMessage() for record in caplog.records] == [
        "text: 2 of 4 samples are longer than the model's 40 positions: lower packing_length, or drop them"
    ]


def test_units_of_ranks_that_read_the_same_count_once_and_every_rank_votes() -> None:
    stop, save = Votes(stop=1, failed_save=0, save_due=0), Votes(stop=0, failed_save=0, save_due=1)
    none = Votes(0, 0, 0)
    ranks = [(none, 3.0, 7.0), (stop, 3.0, 7.0), (none, 4.0, 8.0), (save, 4.0, 8.0)]
    everyone = np.array([[*votes, units, count] for votes, units, count in ranks])
    found = agreed(everyone, num_units=1, replication=2)
    assert (found.votes, found.units) == (Votes(stop=1, failed_save=0, save_due=1), [7.0])
    assert found.counts.tolist() == [[7.0], [7.0], [8.0], [8.0]]


def test_figures_are_of_ranks_that_read_packs_of_their_own() -> None:
    step = [counts(pack(60)), counts(pack(60), wait_s=0.2), counts(pack(40)), counts(pack(40))]
    window = StepWindow(4, replication=2)
    added = window.add(np.array(step, np.float64))
    assert (added.num_tokens, added.num_samples) == (100, 2)
    figures = window.figures(1.0)
    assert (figures["perf/global_seq_len_avg"], figures["data/wait_share"]) == (50, 0.2)


def test_losses_and_epochs_of_several_sources_have_their_names() -> None:
    assert source_losses(["data"], [6.0, 3.0]) == {}
    assert source_losses(["a", "b", "c"], [6.0, 8.0, 0.0, 3.0, 2.0, 0.0]) == {"loss/a": 2, "loss/b": 4}
    assert by_source("epoch", {"data": 0.5}) == {"epoch": 0.5}
    assert by_source("epoch", {"a": 0.5, "b": 1}) == {"epoch/a": 0.5, "epoch/b": 1}
    assert by_source("epoch", {}) == {}


def test_a_mean_is_over_what_is_finite_and_of_nothing_there_is_none() -> None:
    assert finite_mean([1.0, float("nan"), 3.0, float("inf"), -float("inf")]) == 2
    assert finite_mean([float("nan")]) is None
    assert finite_mean([]) is None


LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 80 + 2 * 32  # q, k and v, o, the MLP, two norms


def flops_of(**config: Any) -> ModelFlops | None:
    return model_flops(ModelConfig(config=LLAMA | config).build())


@pytest.mark.parametrize("tied", [False, True])
def test_the_flops_of_a_llama_are_those_of_its_matrices_and_of_its_pairs_of_tokens(tied: bool) -> None:
    flops = flops_of(tie_word_embeddings=tied)
    assert flops == ModelFlops(
        per_token=6 * (3 * LAYER + 32), per_loss_token=6 * 32 * 1000, per_pair={None: 12 * 3 * 4 * 8}
    )
    assert flops is not None
    # PaLM's formula at one length: 6 N + 12 L H Q T a token, here with all of them learnt.
    lengths = np.array([50, 50])
    assert flops.of(lengths, num_loss_tokens=100) == 100 * (6 * (3 * LAYER + 32 + 32_000) + 12 * 3 * 4 * 8 * 50)


def test_the_products_of_a_layer_are_what_torch_counts() -> None:
    """Against torch's own counter, for one sample, forward and backward; norms are not among what it counts."""
    from torch.utils.flop_counter import FlopCounterMode

    model = ModelConfig(config=LLAMA, attention="eager").build()
    flops = model_flops(model)
    assert flops is not None
    ids = torch.arange(64)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    norms = 6 * 64 * (3 * 2 * 32 + 32)
    positions = 0 if IS_5 else 2 * 64 * 4  # the angles of rotary positions were a product too, forward alone
    assert flops.of(np.array([64]), num_loss_tokens=64) - norms == counter.get_total_flops() - positions


def test_windows_experts_and_frozen_parameters_count_for_what_they_do() -> None:
    mistral = flops_of(model_type="mistral", sliding_window=16)
    assert mistral is not None
    assert mistral.per_pair == {16: 12 * 3 * 4 * 8}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    moe = flops_of(model_type="qwen3_moe", head_dim=8, **experts)
    attention = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 + 2 * 8  # with norms of q and k
    assert moe is not None
    assert moe.per_token == 6 * (3 * (attention + 8 * 32 + 2 * 3 * 32 * 24) + 32)
    model = ModelConfig(config=LLAMA).build()
    model.model.layers[0].requires_grad_(False)
    frozen = model_flops(model)
    assert frozen is not None
    assert frozen.per_token == 6 * (2 * LAYER + 32) + 4 * LAYER


@pytest.mark.parametrize(
    ("adapter", "frozen"),
    [
        ({"r": 4, "target_modules": "all-linear"}, []),
        ({"r": 4, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 2]}, []),
        ({"r": 2, "target_modules": ["o_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}, []),
        (None, ["model.embed_tokens.*"]),
        (None, ["model.embed_tokens.*", "model.layers.0.*"]),
        (None, ["model.*"]),
    ],
    ids=["lora", "some-layers", "embedding", "no-embedding", "no-first-layer", "head-alone"],
)
def test_what_is_frozen_counts_as_torch_counts_it(adapter: dict[str, Any] | None, frozen: list[str]) -> None:
    """Within 2 %: torch counts no norms, and attention reads the input of its block in several ways."""
    from torch.utils.flop_counter import FlopCounterMode

    model = ModelConfig(config=LLAMA, attention="eager", adapter=adapter).build()
    if frozen:
        freeze(model, frozen)
    flops = model_flops(model)
    assert flops is not None
    ids = torch.arange(64)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert flops.of(np.array([64]), num_loss_tokens=64) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_no_flops_are_told_of_a_model_that_the_formula_is_not_true_of() -> None:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    assert flops_of(model_type="qwen2", layer_types=["full_attention"] * 3) is not None
    model = ModelConfig(config=LLAMA).build()
    model.config.layer_types = kinds
    assert model_flops(model) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA T1000", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_a_reporter_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reporters(["tensorboard", "wandb"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_reporters(["tensorboard"])
    with pytest.raises(
        ConfigError, match=r"train.report_to wandb needs the package wandb: pip install 'lmms-stream\[wandb\]'"
    ):
        check_reporters(["tensorboard", "wandb"])


def test_a_folder_of_logs_is_not_taken_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B writes to ./wandb, and `python -m` looks there first; here no other package is to be found."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder])
    with pytest.raises(ConfigError, match=r"^train.report_to wandb needs the package wandb"):
        check_reporters(["wandb"])


def test_settings_of_the_log_are_checked() -> None:
    for values, message in (
        ({"peak_tflops": 0.0}, "train.peak_tflops must be above 0, got 0.0"),
        ({"logging_steps": 0}, "train.logging_steps must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(output_dir="out", global_batch=1, max_steps=1, **values)


def show(*, terminal: bool, shown: bool = True) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160, force_interactive=terminal)
    with RunProgress(20, unit="step", done=10, shown=shown, console=console) as progress:
        for step in range(11, 21):
            progress.move(step)
            record = {"step": step, "epoch": step / 10, "loss": 1 / step, "perf/tokens_per_s": 12345.6}
            progress.tell(record, step)
    return text.getvalue()


def test_a_terminal_shows_a_bar_and_anything_else_lines_now_and_then() -> None:
    bar = show(terminal=True)
    assert "step 20 of 20" in bar
    assert "100%" in bar
    assert "12,346 tokens/s" in bar
    first, last = show(terminal=False).splitlines()
    assert first.startswith("step 11 of 20  epoch 1.10  loss 0.0909  12,346 tokens/s  0:")
    assert last == "step 20 of 20  epoch 2.00  loss 0.0500  12,346 tokens/s  0:00:00 left"
    for terminal in (True, False):
        assert show(terminal=terminal, shown=False) == ""
