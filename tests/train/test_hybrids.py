"""Models whose layers carry state from token to token train on packs as on their samples one by one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.model.by_sample import PackSamples
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel
from lmms_stream.types import Processed
from lmms_stream.versions.transformers import checkpoint_activations

from ..processes import run_module
from ..rounds import LONG
from ..versions import IS_5
from .every_model import build
from .one_by_one import check_pack

CPU = torch.device("cpu")
SHORT = ("lfm2", "mamba2", "rwkv")
OF_5 = (
    "bailing_hybrid", "deepseek_v4", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid", "inkling2_text",
    "inkling_text", "jamba", "kimi_linear", "lara_mini", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma", "xlstm", "zamba", "zaya",
)  # fmt: skip
OTHERS = ("bamba", "bloom", "falcon_h1", "falcon_mamba", "mamba", "minimax", "mpt", "qwen3_next", "zamba2")
MODEL_TYPES = [*SHORT, *(OTHERS if LONG else ()), *(OF_5 if LONG and IS_5 else ())]
CHOOSE_KEYS = ("deepseek_v32", "glm_moe_dsa")
REFUSED = {  # with small weights, by number format
    torch.float32: ("deepseek_v4",),
    torch.bfloat16: ("bailing_hybrid", "bloom", "deepseek_v4", "inkling2_text", "xlstm"),
}
LENGTHS = (40, 3, 39, 17, 38, 65, 2)  # of a few groups; all but one of the first are padded


def samples() -> list[Processed]:
    rng = np.random.default_rng(5)
    ids = [rng.integers(5, 200, length) for length in LENGTHS]
    return [{"input_ids": each, "labels": each} for each in ids]


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


@pytest.mark.parametrize(
    ("model_type", "runs_again"),
    [
        (each, again)
        for each in MODEL_TYPES
        for again in (False, True)
        if LONG or each == "lfm2" or again == (each != "rwkv")  # which loops over tokens
    ],
)
def test_a_pack_trains_as_its_samples_one_by_one(model_type: str, runs_again: bool) -> None:
    """With blocks that run again in the backward pass, too: logits, losses, and the gradient of every parameter."""
    model, plain = build("causal", model_type), without_dropout(build("causal", model_type))
    if runs_again:
        checkpoint_activations(model)
    packed = PackedModel(model)
    prove_packing(packed, device=CPU)
    assert packed.by_sample is not None
    without_dropout(model)
    check_pack(packed, plain, samples(), pad_to=256, slack=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if LONG else ())])
@pytest.mark.parametrize("model_type", MODEL_TYPES if LONG else ("lfm2",))
def test_small_weights_hide_no_layer_that_carries_state(model_type: str, dtype: torch.dtype) -> None:
    """Differences of predictions are less than roundings then; the gradient that reaches another sample is not zero.

    A layer that attends to the keys with the highest scores carries nothing: between equal scores it chooses by the
    length of the pack. Models that cannot be run are refused: a proof that fails harms nobody.
    """
    model: Any = build("causal", model_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05 if parameter.ndim > 1 else 1.0)
    packed = PackedModel(model.to(dtype))
    try:
        prove_packing(packed, device=CPU)
    except ConfigError:
        assert model_type in REFUSED[dtype]
    else:
        assert packed.by_sample is not None or model_type in CHOOSE_KEYS


@pytest.mark.skipif(not IS_5, reason="transformers 4 does not tell kernels where samples begin")
def test_kernels_that_can_are_told_where_samples_begin_and_without_bounds_layers_run_by_sample() -> None:
    scans = "bamba:mamba_chunk_scan_combined", *(("mamba", "zamba") if LONG else ())  # whose convolutions take bounds
    kernels = "qwen3_next:causal_conv1d_fn", "qwen3_next:chunk_gated_delta_rule", "bamba:causal_conv1d_fn"
    without = [*scans, *(kernels if LONG else ())]
    found, bounds = run_with_kernels("qwen3_next", "bamba", *without), [0, 7, 19, 28]
    assert found["qwen3_next"]["given"] == {"causal_conv1d_fn": bounds, "chunk_gated_delta_rule": bounds}
    assert found["bamba"]["given"] == {"causal_conv1d_fn": bounds, "mamba_chunk_scan_combined": bounds}
    for name in ("qwen3_next", "bamba"):
        assert found[name]["kept_apart"] == "kernels of recurrent layers are given the bounds"
    assert [found[name]["kept_apart"].endswith("run on each sample alone") for name in without] == [True] * len(without)


def run_with_kernels(*models: str) -> dict[str, Any]:
    """The job has a process of its own: what it installs is imported with the models."""
    done = run_module("tests.train.kernels_job", *models, timeout_s=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_samples_of_similar_length_are_one_batch() -> None:
    lengths = np.array([5, 100, 0, 80, 76, 74, 7])
    groups = PackSamples([0, *np.cumsum(lengths).tolist()], CPU).groups
    assert [(group.size, group.length) for group in groups] == [(3, 100), (1, 74), (1, 7), (1, 5)]
    values = torch.arange(float(lengths.sum()))[None, :, None].repeat(1, 1, 2)
    for group in groups:
        rows = group.rows(values, (1,))
        assert rows.shape == (group.size, group.length, 2)
        assert torch.equal(group.values(rows), values[0, group.tokens])
