"""Each model is proven to keep the samples of a pack apart, or refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import evaluating, prove_packing
from lmms_stream.train.model.isolation import check_lengths, find_fault, segments_of, tolerances_of
from lmms_stream.train.model.model import PackedModel
from lmms_stream.types import Batch
from lmms_stream.versions.transformers import COUNTS_CHUNKS_BY_SAMPLE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.rounds import LONG, rounds
from tests.train import every_model
from tests.train.one_by_one import check_pack, is_noise_of_keys
from tests.train.test_model import TINY
from tests.versions import IS_5, declared

CPU = torch.device("cpu")


def fault_of(model: PackedModel) -> str | None:
    """What the proof finds of a model as it is."""
    with evaluating(model), torch.no_grad():
        return find_fault(model, tolerances_of(model, bf16=False), device=CPU, backward=False)


def build(model_type: str, *, attention: Any = "auto", dtype: Any = "float32", **fields: Any) -> PackedModel:
    config = declared({"model_type": model_type, **TINY, "pad_token_id": 0, **fields})
    return PackedModel(ModelConfig(config=config, attention=attention, dtype=dtype).build())


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("sdpa", "bfloat16"), ("eager", "float32"), *rounds([], [("sdpa", "float32"), ("eager", "bfloat16")])],
)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 8}),
        ("mistral", {"sliding_window": 4}),
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
    model = build(model_type, attention=attention, dtype=dtype, **fields).train()
    prove_packing(model, device=CPU)
    assert model.training
    assert model.logits_way == "chunks"
    assert model.model.config._attn_implementation == attention


# Types of which a layer does not see all before it, or has sinks or a softcap, and the attentions that are refused.
NARROW: dict[str, set[str]] = {
    "mistral": set(),
    "qwen2": set(),  # a window from max_window_layers on
    "cohere2": set(),
    "gemma3_text": set(),
    "gemma2": {"sdpa_varlen", "sdpa"},
    "gpt_oss": {"sdpa"},
    "llama4_text": {"sdpa_varlen"},
}


def plain_of_type(model_type: str, attention: Any) -> Any:
    """A tiny model whose windows and chunks are of 16 tokens, without dropout."""
    made = every_model.build("causal", model_type, attention)
    for module in made.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
        elif isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return made.train()


def of_type(model_type: str, attention: Any) -> PackedModel:
    """The same, proven; ConfigError where it is refused."""
    model = PackedModel(plain_of_type(model_type, attention))
    prove_packing(model, device=CPU)
    return model


@pytest.mark.filterwarnings("ignore:The explicitly set RoPE")
@pytest.mark.parametrize("attention", every_model.ATTENTIONS)
@pytest.mark.parametrize("model_type", every_model.narrow_types() if LONG and IS_5 else NARROW)
def test_packs_train_with_the_windows_chunks_sinks_and_softcaps_of_samples_alone(
    model_type: str, attention: Any
) -> None:
    """As in transformers' own eager attention; or the attention is refused, and each that the error names is not."""
    if "chunked_attention" in str(CONFIG_MAPPING[model_type]()) and not COUNTS_CHUNKS_BY_SAMPLE:
        pytest.skip("this version of transformers counts chunks from the start of the pack, which is refused")
    try:
        packed = of_type(model_type, attention)
    except ConfigError as error:
        assert attention in NARROW.get(model_type, {attention})
        remedies = re.findall(r"\w+", str(error).rpartition(": ")[2])
        assert "auto" in remedies
        for other in {*remedies} & {*every_model.ATTENTIONS, "auto"}:
            of_type(model_type, other)
        return
    assert attention not in NARROW.get(model_type, set())
    rng = np.random.default_rng(5)
    samples = [{"input_ids": (ids := rng.integers(5, 200, length)), "labels": ids} for length in (40, 3, 61, 17, 2, 33)]
    plain = plain_of_type(model_type, "eager")
    slack = 0.0 if packed.by_sample is None else 1e-6  # as for other hybrid models: see test_hybrids.py
    check_pack(packed, plain, samples, pad_to=192, is_noise=is_noise_of_keys, slack=slack)


@pytest.mark.parametrize(
    ("model_type", "attention", "message"),
    [
        ("gpt_oss", "flash_attention_2", "with attention flash_attention_2 leaves out the sinks of its heads: set mod"),
        ("gemma2", "sdpa", "with attention sdpa leaves out the softcap of attention scores: set model.attention to a"),
    ],
)
def test_an_attention_that_leaves_something_out_without_a_word_is_refused(
    model_type: str, attention: str, message: str
) -> None:
    model = build(model_type, head_dim=8, num_local_experts=3, num_experts_per_tok=2, attention="eager")
    model.model.config._attn_implementation = attention  # as versions of transformers do
    with pytest.raises(ConfigError, match=message):
        prove_packing(model, device=CPU)
    model.model.attention_choices = [attention, "eager"]
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("model_type", "fields", "chosen"),
    [
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2}, "sdpa_varlen"),  # sinks
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 0.01}, "eager"),
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
    assert "sdpa_varlen" in model.model.attention_choices or chosen == "eager"
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == chosen
    prove_packing(model, device=CPU)
    assert model.model.config._attn_implementation == chosen


def test_samples_by_themselves_are_for_models_of_text_with_plain_layers() -> None:
    with pytest.raises(ConfigError, match=r"attention sdpa_varlen is for models of text .* Llama4ForCausalLM is none"):
        build("llama4_text", attention="sdpa_varlen")


@pytest.mark.parametrize("dtype", rounds(["bfloat16"], ["float32", "bfloat16"]))
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
    with (
        nullcontext()
        if COUNTS_CHUNKS_BY_SAMPLE
        else pytest.raises(ConfigError, match="a pack of 21 tokens is longer than the model's attention_chunk_size 20")
    ):
        check_lengths(Llama4TextConfig(attention_chunk_size=20), long)
    with pytest.raises(ConfigError, match="a sample of 20 tokens is longer than the model's 16 positions"):
        check_lengths(GPT2Config(n_positions=16), long)


def changed(config: Any, **fields: Any) -> Any:
    return type(config)(**{**config.to_dict(), **fields})
