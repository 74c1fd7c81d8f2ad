"""Jobs on the CPU: one step of one global batch, on 1, 2 and 4 ranks, against plain transformers.

Against them: each sample run alone, by a model without FSDP and by its own logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.versions.transformers import name_missing_output
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import TokensAndSpans, last_words, write_samples
from tests.rounds import LONG, rounds
from tests.versions import IS_5

from .launcher import run_job

pytestmark = pytest.mark.timeout(800)  # for the jobs, of which each has a limit of its own
NUM_SAMPLES = 40
COMPILES = LONG and which("g++") is not None  # two ranks compile for 20 s each; test_compiled.py does on one
SIZES: dict[str, Any] = {
    "vocab_size": 131,  # not a multiple of any world size
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
TIED = {"config": {"model_type": "qwen2", "tie_word_embeddings": True, **SIZES}, "seed": 3}
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}
VISION = {
    "config": {
        "model_type": "qwen2_vl",
        "text_config": {**ONE_LAYER, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
        **{f"{name}_token_id": 1 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))},
    }
}
GEMMA = {"config": {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.1, **SIZES}}
# Of random weights: one that starts as nothing has gradients of zeros.
LORA = {**TIED, "adapter": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}
SMALL = {"config": {"model_type": "llama", **ONE_LAYER}, "dtype": "bfloat16"}
# Its convolutions carry state from one sample of a pack into the next.
HYBRID = {"config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], **SIZES}}
HYBRID_LORA = {**HYBRID, "adapter": LORA["adapter"]}
SHAPED_SIZES = {"d_model": 32, "vocab_size": 131, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 64}
SHAPED = {"config": {"model_type": "bart", "decoder_attention_heads": 4, **SHAPED_SIZES}}
# Its routers are in float32, whatever its format is.
ROUTED: dict[str, Any] = {"model_type": "deepseek_v3", "n_routed_experts": 4, "n_group": 2, "topk_group": 1, **SIZES}
# In short rounds a promise is tried where it may break: on ranks that share a model, each with packs of its own.
ON_ANY, ON_ONE_OR_TWO, IN_LONG_ROUNDS = rounds([2], [1, 2, 4]), rounds([2], [1, 2]), rounds([], [2])
CASES: dict[str, dict[str, Any]] = {
    "together": {"model": TIED, "train": {"per_device_batch": 4}, "on": [1]},
    "uneven": {"model": TIED, "train": {"per_device_batch": 3}, "on": [1]},
    "halves": {"model": TIED, "train": {"per_device_batch": 2}, "on": ON_ONE_OR_TWO},
    "one-by-one": {"model": TIED, "on": [1, 2, 4]},
    "copies": {"model": TIED, "train": {"shard_ranks": 2}, "on": [4]},
    "again": {
        "model": TIED,
        "train": {"gradient_checkpointing": True, "fsdp": {"wrap": ["Qwen2DecoderLayer"]}},
        "on": [2],
    },
    "vision": {"model": VISION, "on": ON_ONE_OR_TWO},
    "capped": {"model": GEMMA, "on": [2]},
    "small": {"model": SMALL, "on": ON_ANY},
    "mixed": {"model": TIED, "train": {"bf16": True}, "on": [2]},
    "frozen": {"model": TIED, "train": {"frozen": ["lm_head.*", "*.layers.0.*"]}, "on": [2]},
    "lora": {"model": LORA, "on": ON_ANY},
    "lora-again": {"model": LORA, "train": {"gradient_checkpointing": True}, "on": IN_LONG_ROUNDS},
    "lora-small": {"model": {**LORA, "dtype": "bfloat16"}, "on": [2]},
    "real": {"model": TIED, "real": True, "on": [2]},
    "compiled": {"model": TIED, "train": {"torch_compile": True}, "on": [2] if COMPILES else []},
    "empty": {"model": TIED, "empty": True, "on": [2]},
    "differing": {"model": TIED, "differing": True, "on": [2]},
    "hybrid": {"model": HYBRID, "on": rounds([], [1, 2])},
    "hybrid-again": {"model": HYBRID, "train": {"gradient_checkpointing": True}, "on": IN_LONG_ROUNDS},
    "hybrid-compiled": {"model": HYBRID, "train": {"torch_compile": True}, "on": [2] if COMPILES else []},
    "hybrid-lora": {"model": HYBRID_LORA, "train": {"gradient_checkpointing": True}, "on": [2]},
    "shaped": {"model": SHAPED, "on": [2]},
    "formats": {"model": {"config": {**ROUTED, "first_k_dense_replace": 1}, "dtype": "bfloat16"}, "on": [2] * IS_5},
    "wrapped": {"model": TIED, "train": {"fsdp": {"wrap": ["LlamaDecoderLayer"]}}, "on": [2]},
    "unshared": {"model": TIED, "train": {"global_batch": 3}, "on": [2]},
    "parted": {"model": TIED, "train": {"shard_ranks": 3}, "on": [2]},
    "grouped": {"model": TIED, "train": {"tensor_parallel": 3}, "on": [2]},
}
Tensors = dict[str, torch.Tensor]


def tokens_and_learnt() -> list[TokensAndSpans]:
    """Random tokens, and spans of them that are learnt: few of some samples, most of others."""
    rng = np.random.default_rng(11)
    made = []
    for length in rng.integers(20, 60, NUM_SAMPLES).tolist():
        begin = int(rng.integers(1, length - 2))
        made.append((rng.integers(5, 131, length).astype(np.int32), np.array([[begin, length]], np.int32)))
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case and world size, what the job of that world size did."""
    folder = tmp_path_factory.mktemp("sharding")
    write_samples(folder / "data", tokens_and_learnt(), shard_bytes=1 << 12)
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(folder / "saved")
    cases = {**CASES, "saved": {"model": {"pretrained": str(folder / "saved")}, "on": [2]}}
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": cases}))
    for nproc in (1, 2, 4):
        done = run_job(nproc, "tests.jobs.sharding_job", str(folder / "job.json"), timeout_s=500)
        assert done.returncode == 0, last_words(done.stderr)
    of_first = {path.stem[:-2]: torch.load(path) for path in folder.glob("*-0.pt")}
    of_second = {f"{path.stem[:-2]}-second": torch.load(path) for path in folder.glob("*-2-1.pt")}
    return {**of_first, **{run: made for run, made in of_second.items() if "error" in made}, "saved": cases["saved"]}


def alone(model: Any, packs: Iterable[list[int]], *, mean_of_means: bool = False) -> Tensors:
    """Gradients of the mean loss over the loss tokens of these packs, each sample by itself."""
    samples = tokens_and_learnt()
    packs = list(packs)
    counts = [sum(int(spans[0, 1] - spans[0, 0]) for _, spans in (samples[i] for i in pack)) for pack in packs]
    model.zero_grad()
    for pack, count in zip(packs, counts, strict=True):
        for tokens, spans in (samples[i] for i in pack):
            ids = torch.from_numpy(tokens.astype(np.int64))
            begin = int(spans[0, 0])
            logits = model(input_ids=ids[None]).logits[0, begin - 1 : -1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[begin:], reduction="sum")
            (loss / (count * len(packs) if mean_of_means else sum(counts))).backward()
    return {f"model.{name}": value.grad for name, value in model.named_parameters() if value.grad is not None}


def difference(one: Tensors, two: Tensors) -> float:
    """The largest, over parameters, relative to its norm. Those that `two` lacks were not used: they are zeros."""
    assert set(two) <= set(one)
    assert not any(one[name].any() for name in set(one) - set(two))
    return max(float((one[name] - two[name]).norm() / two[name].norm()) for name in two)


def plain(model: dict[str, Any]) -> Any:
    name_missing_output()
    return ModelConfig(**model).build().train()


GROUPS = {
    "tied": ("together", "uneven", "halves", "one-by-one", "copies", "again", "real", "compiled"),
    "vision": ("vision",),
    "capped": ("capped",),
    "saved": ("saved",),
    "lora": ("lora", "lora-again"),
    "hybrid": ("hybrid", "hybrid-again", "hybrid-compiled"),
    "hybrid-lora": ("hybrid-lora",),
}  # of cases of one model


@pytest.mark.parametrize("group", [group for group in GROUPS if LONG or group != "hybrid"])
def test_gradients_of_a_global_batch_are_those_of_its_samples_one_by_one(results: dict[str, Any], group: str) -> None:
    """For any ranks, packs in a forward pass and copies of the model; with blocks run again; for every kind of head."""
    names = GROUPS[group]
    runs = {run: made for run, made in results.items() if run.rpartition("-")[0] in names}
    assert len(runs) == (1 if group == "saved" else sum(len(CASES[name]["on"]) for name in names))
    first, *_ = runs.values()
    assert all(sorted(run["packs"]) == sorted(first["packs"]) for run in runs.values())
    expected = alone(plain(results["saved"]["model"] if group == "saved" else CASES[names[0]]["model"]), first["packs"])
    assert len(expected) >= (10 if group == "vision" else 20)
    assert {run: made for run, made in runs.items() if difference(made["gradients"], expected) > 1e-5} == {}


def test_the_gradients_of_a_mean_of_means_are_others(results: dict[str, Any]) -> None:
    """So that the test above would find it."""
    made = results["one-by-one-4"]
    assert difference(made["gradients"], alone(plain(TIED), made["packs"], mean_of_means=True)) > 1e-2


def test_weights_are_those_of_the_plain_model_to_the_bit_on_any_number_of_ranks(results: dict[str, Any]) -> None:
    for name in ("one-by-one", "small", "vision", "copies"):
        expected = dict(plain(CASES[name]["model"]).named_parameters())
        for world_size in CASES[name]["on"]:
            weights = results[f"{name}-{world_size}"]["weights"]
            assert [f"model.{key}" for key in expected] == list(weights)  # one name for what is tied
            assert all(torch.equal(weights[f"model.{key}"], value) for key, value in expected.items())
    assert {value.dtype for value in results["small-2"]["weights"].values()} == {torch.bfloat16}
    saved = dict(LlamaForCausalLM.from_pretrained(results["saved"]["model"]["pretrained"]).named_parameters())
    assert all(torch.equal(results["saved-2"]["weights"][f"model.{key}"], value) for key, value in saved.items())


def test_ranks_but_the_first_build_models_without_weights(results: dict[str, Any]) -> None:
    assert results["one-by-one-4"]["built_on"] == [["cpu"], ["meta"], ["meta"], ["meta"]]
    assert results["saved-2"]["built_on"] == [["cpu"], ["meta"]]
    assert results["copies-4"]["mesh"] == (2, 2)
    assert {made["logits_way"] for made in results.values() if "logits_way" in made} == {"chunks"}


def test_mixed_precision_keeps_weights_and_gradients_in_float32(results: dict[str, Any]) -> None:
    mixed, exact = results["mixed-2"], results["one-by-one-2"]
    assert {value.dtype for part in ("weights", "gradients") for value in mixed[part].values()} == {torch.float32}
    assert 1e-4 < difference(mixed["gradients"], exact["gradients"]) < 0.1


def test_an_adapter_in_float32_is_trained_over_weights_in_bfloat16(results: dict[str, Any]) -> None:
    """FSDP2 shards blocks of both formats; the gradients are those of a model in float32, as far as roundings go."""
    small, exact = results["lora-small-2"], results["lora-2"]
    assert {value.dtype for value in small["gradients"].values()} == {torch.float32}
    assert {"lora" in name for name, value in small["weights"].items() if value.dtype == torch.float32} == {True}
    assert {"lora" in name for name, value in small["weights"].items() if value.dtype == torch.bfloat16} == {False}
    assert difference(small["gradients"], exact["gradients"]) < 0.1


def test_frozen_parameters_have_no_gradient_and_the_others_theirs(results: dict[str, Any]) -> None:
    frozen, exact = results["frozen-2"]["gradients"], results["one-by-one-2"]["gradients"]
    is_frozen = {name: ".layers.0." in name or "embed_tokens" in name for name in exact}  # tied to lm_head
    assert set(frozen) == {name for name, away in is_frozen.items() if not away}
    assert difference(frozen, {name: exact[name] for name in frozen}) <= 1e-5


def test_models_that_cannot_be_sharded_are_refused_by_all_ranks(results: dict[str, Any]) -> None:
    shaped = "BartForCausalLM with attention eager takes no position_ids, so it cannot tell where a sample of a pack"
    wrapped = "no blocks of Qwen2ForCausalLM to shard are of class LlamaDecoderLayer: name some of Qwen2DecoderLayer"
    empty = "the model of rank 0 has no weights for "
    unshared = "global_batch 3 cannot be shared equally by 2 ranks: make it a multiple of 2"
    parted = "train.shard_ranks 3 does not divide the world size 2: choose a divisor"
    grouped = "train.tensor_parallel 3 does not divide the world size 2: choose a divisor"
    messages = {
        "empty-2": empty,
        "empty-2-second": empty,
        "unshared-2": unshared,
        "unshared-2-second": unshared,
        "parted-2": parted,
        "parted-2-second": parted,
        "grouped-2": grouped,
        "grouped-2-second": grouped,
        "differing-2": "the model differs from that of rank 0, on some rank: build the same on all ranks",
        "differing-2-second": "the model differs from that of rank 0 in model.model.norm.other: build the same",
        "shaped-2": shaped,
        "shaped-2-second": shaped,
        "wrapped-2": wrapped,
        "wrapped-2-second": wrapped,
    }
    if IS_5:
        messages |= dict.fromkeys(
            ("formats-2", "formats-2-second"), "the model has weights in bfloat16 and float32 next"
        )
    errors = {run: made["error"] for run, made in results.items() if "error" in made}
    assert set(errors) == set(messages)
    assert [run for run, message in messages.items() if not errors[run].startswith(message)] == []
