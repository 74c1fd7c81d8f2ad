"""Each model is proven to keep the samples of a pack apart, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing, proving
from lmms_stream.train.model.isolation import check_lengths, find_fault, tolerances_of
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.proof_samples import segments_of
from lmms_stream.types import Batch
from transformers import Gemma2ForCausalLM

from tests.train.test_model import TINY
from tests.versions import IS_5

CPU = torch.device("cpu")
GEMMA_2_HAS_SDPA = Gemma2ForCausalLM._supports_sdpa  # until transformers 5.21


def fault_of(model: PackedModel) -> str | None:
    """What the proof finds of a model as it is."""
    with proving(model), torch.no_grad():
        return find_fault(model, tolerances_of(model, bf16=False), device=CPU, backward=False)


def build(model_type: str, *, attention: Any = "auto", dtype: Any = "float32", **fields: Any) -> PackedModel:
    config = {"model_type": model_type, **TINY, "pad_token_id": 0, **fields}
    return PackedModel(ModelConfig(config=config, attention=attention, dtype=dtype).build())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 8}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"head_dim": 8, "sliding_window": 4}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 4}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("gpt_neox", {}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {}),
        ("mixtral", {"num_local_experts": 3}),
    ],
)
def test_transformers_prove_that_they_keep_samples_apart(
    model_type: str, fields: dict[str, Any], attention: Any, dtype: Any
) -> None:
    if not GEMMA_2_HAS_SDPA and (model_type, attention) == ("gemma2", "sdpa"):
        pytest.skip("this version of transformers has no sdpa for Gemma 2")
    model = build(model_type, attention=attention, dtype=dtype, **fields).train()
    prove_packing(model, device=CPU)
    assert model.training
    assert model.logits_way == "chunks"
    assert model.model.config._attn_implementation == attention


WINDOW = {"sliding_window": 4}  # shorter than most of the segments
OF_ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0, **WINDOW}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("qwen2", OF_ALL_LAYERS),
        ("qwen3", {"head_dim": 8, **OF_ALL_LAYERS}),
        ("mistral", WINDOW),
        ("mixtral", {"num_local_experts": 3, **WINDOW}),
        ("gemma3_text", {"head_dim": 8, **WINDOW}),
        ("cohere2", WINDOW),
        ("olmo3", {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}),
        ("phi3", WINDOW),
        ("starcoder2", WINDOW),
        ("gpt_neox", {}),
    ],
)
def test_samples_by_themselves_are_attended_to_as_under_a_mask(model_type: str, fields: dict[str, Any]) -> None:
    model = build(model_type, attention="auto", attention_dropout=0.0, **fields)
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == "sdpa_varlen"
    rng = np.random.default_rng(3)
    samples = [{"input_ids": (ids := rng.integers(5, 60, length)), "labels": ids} for length in (5, 23, 1, 9)]
    batch = collate(samples, range(4), pad_to=48)
    of = {}
    for attention in ("sdpa_varlen", "eager"):
        model.model.set_attn_implementation(attention)
        model.zero_grad()
        losses = model(batch).tokens
        losses.sum().backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        of[attention] = torch.cat([losses.detach(), *(grad.flatten() for grad in grads)])
    assert (of["sdpa_varlen"] - of["eager"]).norm() <= 1e-5 * of["eager"].norm()


@pytest.mark.parametrize(
    ("model_type", "fields", "chosen"),
    [
        (
            "gpt_oss",  # sinks
            {"num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
            "sdpa_varlen",
        ),
        ("gemma2", {"attn_logit_softcapping": 0.01}, "eager"),
        ("vaultgemma", {"attn_logit_softcapping": 0.01}, "eager"),
    ],
)
def test_packs_train_with_the_sinks_and_the_softcap_of_samples_by_themselves(
    model_type: str, fields: dict[str, Any], chosen: str
) -> None:
    """As in transformers' own eager attention, by the attention that `auto` chooses."""
    model = build(model_type, head_dim=8, **fields, **WINDOW)
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == chosen
    rng = np.random.default_rng(3)
    samples = [{"input_ids": (ids := rng.integers(5, 60, length)), "labels": ids} for length in (5, 23, 2, 9)]
    model(collate(samples, range(4), pad_to=48)).tokens.sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    model.model.set_attn_implementation("eager")
    for sample in samples:
        tokens = torch.from_numpy(sample["input_ids"])
        logits = model.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
    assert model_type != "gpt_oss" or found["model.model.layers.0.self_attn.sinks"].norm() > 0


def test_an_attention_that_leaves_sinks_out_is_refused() -> None:
    model = build("gpt_oss", head_dim=8, num_local_experts=3, attention="eager")
    model.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="with attention flash_attention_2 leaves out the sinks of its heads: set"):
        prove_packing(model, device=CPU)


@pytest.mark.parametrize(
    ("model_type", "fields", "chosen"),
    [
        ("gemma2", {"head_dim": 8}, "eager"),  # softcap
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": None}, "sdpa_varlen"),
        # Its attention is not told the bounds before transformers 5.
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "sdpa_varlen" if IS_5 else "sdpa"),
        ("doge", {}, "sdpa"),  # a mask of its own
    ],
)
def test_models_that_need_more_than_samples_by_themselves_get_another_attention(
    model_type: str, fields: dict[str, Any], chosen: str
) -> None:
    model = build(model_type, **fields)
    assert "sdpa_varlen" in model.model.attention_choices
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == chosen
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == chosen


def test_samples_by_themselves_are_for_models_of_text_with_plain_layers() -> None:
    with pytest.raises(ConfigError, match=r"attention sdpa_varlen is for models of text .* Llama4ForCausalLM is none"):
        build("llama4_text", attention="sdpa_varlen")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        (
            "bart",
            {"decoder_layers": 1},
            "BartForCausalLM with attention eager takes no position_ids, so it cannot tell",
        ),
        (
            "bert",
            {},
            "BertLMHeadModel .* changes what is predicted in another: no setting changes that: take another mod",
        ),
    ],
)
def test_models_that_mix_samples_are_refused(model_type: str, fields: dict[str, Any], message: str, dtype: Any) -> None:
    """Among them those that another attention, which "auto" tries, does not help."""
    with pytest.raises(ConfigError, match=message):
        prove_packing(build(model_type, dtype=dtype, **fields), device=CPU)


def test_a_model_whose_forward_leaves_out_its_base_model_gives_all_logits() -> None:
    model = build("opt")
    if not IS_5:
        with pytest.raises(ConfigError, match="OPTForCausalLM with attention eager does not keep the samples of a"):
            prove_packing(model, device=CPU)
        return
    prove_packing(model, device=CPU)
    assert model.logits_way != "chunks"


class Changed(PackedModel):
    """A model whose packs go wrong in one way."""

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return super()._inputs(batch) | self.change(batch)

    def change(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError


class Running(Changed):
    def change(self, batch: Batch) -> dict[str, Any]:
        return {"position_ids": torch.arange(batch.num_tokens)[None]}


class Masked(Changed):
    def change(self, batch: Batch) -> dict[str, Any]:
        return {"attention_mask": torch.ones_like(batch.input_ids)}


class Cached(Changed):
    def change(self, batch: Batch) -> dict[str, Any]:
        return {"use_cache": True}


class Shifted(Changed):
    """Alone, samples have other positions than in packs."""

    def change(self, batch: Batch) -> dict[str, Any]:
        return {"position_ids": batch.position_ids * (2 if len(batch.cu_seqlens) > 2 else 1)}


class Seeing(Changed):
    """Each sample sees all of itself."""

    def change(self, batch: Batch) -> dict[str, Any]:
        number = (batch.position_ids[0] == 0).cumsum(0)
        mask = torch.zeros(len(number), len(number)).masked_fill(number[:, None] != number, float("-inf"))
        return {"attention_mask": mask[None, None]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Running, "does not keep the samples of a pack apart"),
        (Masked, "does not keep the samples of a pack apart"),
        (Cached, "does not keep the samples of a pack apart"),
        (Shifted, "predicts another thing for a sample in a pack than for the sample alone"),
        (Seeing, "does not keep tokens from seeing those that they are to predict"),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_each_way_to_run_packs_wrongly_is_found(model_type: str, kind: type[Changed], message: str) -> None:
    fields = {"n_embd": 32, "n_layer": 2, "n_head": 4} if model_type == "gpt2" else {}
    fault = fault_of(kind(build(model_type, attention="sdpa", **fields).model))
    assert fault is not None
    assert message in fault


class Squared(torch.nn.Module):
    """A head whose logits depend on how many there are."""

    def __init__(self, head: torch.nn.Module, usual: set[int]):
        super().__init__()
        self.head, self.usual = head, usual

    @property
    def weight(self) -> Any:
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits if hidden.shape[1] in self.usual else logits * 2


def test_logits_that_cannot_be_made_in_part_are_made_whole() -> None:
    model = build("llama")
    lengths = [len(segment) for segment in segments_of(model)]
    model.model.set_output_embeddings(Squared(model.model.get_output_embeddings(), {sum(lengths), *lengths}))
    prove_packing(model, device=CPU)
    assert model.logits_ways == ("chunks", "kept", "whole")
    assert model.logits_way == "whole"


def test_models_that_predict_nothing_are_refused() -> None:
    model = build("llama")
    torch.nn.init.zeros_(model.model.get_output_embeddings().weight)
    with pytest.raises(ConfigError, match="gives logits that are not finite, or all the same"):
        prove_packing(model, device=CPU)
    torch.nn.init.constant_(model.model.get_output_embeddings().weight, float("nan"))
    with pytest.raises(ConfigError, match="gives logits that are not finite, or all the same"):
        prove_packing(model, device=CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_attention_that_this_machine_cannot_train_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="flex_attention has no backward pass on the CPU: choose sdpa"):
        build("llama", attention="flex_attention")
    with pytest.raises(ConfigError, match="flash_attention_2 needs CUDA and pip install flash-attn"):
        build("llama", attention="flash_attention_2")
    assert build("llama").model.attention_choices == ["sdpa_varlen", "sdpa", "eager"]
    assert build("llama").model.config._attn_implementation == "sdpa"  # until it is proven
    assert build("bloom").model.config._attn_implementation == "eager"


def test_samples_too_long_for_a_model_to_treat_them_in_packs_as_alone_are_refused() -> None:
    from transformers import GPT2Config, Llama4TextConfig, LlamaConfig, Phi3Config

    long = collate([{"input_ids": np.arange(20), "labels": np.arange(20)}, {"input_ids": [1], "labels": [1]}], [0, 1])
    one = collate([{"input_ids": np.arange(20), "labels": np.arange(20)}], [0])
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    dynamic = LlamaConfig(**sizes, max_position_embeddings=19, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    longrope = Phi3Config(
        **sizes, original_max_position_embeddings=19, rope_scaling={"type": "longrope", **factors}, pad_token_id=0
    )
    for config in (dynamic, longrope):
        check_lengths(config, one)
        with pytest.raises(
            ConfigError, match=r"a sample of 20 tokens is longer than 19, and .* positions would change"
        ):
            check_lengths(config, long)
    check_lengths(changed(dynamic, max_position_embeddings=20), long)
    with pytest.raises(ConfigError, match="a pack of 21 tokens is longer than the model's attention_chunk_size 20"):
        check_lengths(Llama4TextConfig(attention_chunk_size=20), long)
    with pytest.raises(ConfigError, match="a sample of 20 tokens is longer than the model's 16 positions"):
        check_lengths(GPT2Config(n_positions=16), long)


def changed(config: Any, **fields: Any) -> Any:
    return type(config)(**{**config.to_dict(), **fields})
