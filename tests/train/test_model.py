"""A packed sequence must give what its samples give one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.processors.text import DocumentsProcessor, TextProcessor, TokensProcessor
from lmms_stream.train.model import loss
from lmms_stream.train.model.adapters import add_adapter
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.loss import LOGITS_AT_ONCE
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.sharding import blocks_to_shard, checkpoint_blocks, freeze
from lmms_stream.types import Batch, Processed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..rounds import in_long_rounds
from ..versions import IS_5, declared
from . import every_model

TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def samples() -> list[Processed]:
    rng = np.random.default_rng(0)
    made: list[Processed] = []
    for length in (17, 3, 40, 9):
        ids = rng.integers(0, 128, length)
        made.append({"input_ids": ids, "labels": np.where(rng.random(length) < 0.7, ids, -100)})
    return made


def loss_of(model: Any, batch: Batch, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    if position_ids is not None:
        batch = replace(batch, position_ids=position_ids)
    losses = PackedModel(model)(batch).tokens
    assert len(losses) == batch.num_loss_tokens
    return torch.sum(losses)


def loss_and_gradients(model: torch.nn.Module, batches: list[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        total += loss.detach()
    return total, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa_varlen", "sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_loss_and_gradients_of_a_pack_are_the_sums_over_its_samples(model_type: str, attention: Any) -> None:
    model = ModelConfig(config={"model_type": model_type, **TINY}, attention=attention).build()
    packed_loss, packed_gradients = loss_and_gradients(model, [collate(samples(), range(4), pad_to=80)])
    single_loss, single_gradients = loss_and_gradients(model, [collate([sample], [0]) for sample in samples()])
    torch.testing.assert_close(packed_loss, single_loss, rtol=1e-5, atol=0)
    assert len(packed_gradients) == len(list(model.parameters()))
    for packed, single in zip(packed_gradients, single_gradients, strict=True):
        assert (packed - single).norm() <= 1e-5 * single.norm()


def test_documents_that_are_isolated_give_what_they_give_one_by_one() -> None:
    model = ModelConfig(config={"model_type": "llama", **TINY}).build()
    ids = np.random.default_rng(1).integers(0, 128, 50, dtype=np.int32)
    sample = {"input_ids": ids, "loss_spans": [(0, 50)], "document_starts": np.array([0, 17, 20], np.int32)}
    documents = [{"input_ids": part, "labels": part} for part in np.split(ids.astype(np.int64), [17, 20])]
    single = sum(loss_of(model, collate([document], [0])) for document in documents)
    isolated = loss_of(model, collate([DocumentsProcessor().process(sample)], [0], pad_to=60))
    torch.testing.assert_close(isolated, torch.as_tensor(single), rtol=1e-5, atol=0)
    assert (loss_of(model, collate([TokensProcessor().process(sample)], [0])) - isolated).abs() > 1e-3 * isolated


def test_without_positions_that_restart_the_loss_is_another() -> None:
    model = ModelConfig(config={"model_type": "llama", **TINY}).build()
    batch = collate(samples(), range(4))
    running = torch.arange(batch.num_tokens)[None]
    apart, mixed = loss_of(model, batch), loss_of(model, batch, running)
    assert (apart - mixed).abs() > 1e-4 * apart.abs()


def test_a_pad_pack_gives_no_loss_and_no_gradient() -> None:
    model = ModelConfig(config={"model_type": "llama", **TINY}).build()
    loss, gradients = loss_and_gradients(model, [collate([], [])])
    assert loss == 0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients)


def llama(**fields: Any) -> Any:
    return ModelConfig(config={"model_type": "llama", **TINY, **fields}).build()


def test_a_seed_gives_one_model_and_leaves_other_random_numbers_alone() -> None:
    config = ModelConfig(config={"model_type": "llama", **TINY}, seed=5)
    torch.manual_seed(1)
    first = config.build()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    second = config.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_blocks_are_found_in_all_parts_of_a_model_or_by_the_names_of_their_classes() -> None:
    model = llama()
    assert blocks_to_shard(model) == blocks_to_shard(model, ["LlamaDecoderLayer"]) == list(model.model.layers)
    with pytest.raises(
        ConfigError,
        match="no blocks of LlamaForCausalLM to shard are of class LlamaBlock: name some of LlamaDecoderLayer in",
    ):
        blocks_to_shard(model, ["LlamaBlock"])
    model._no_split_modules = model.model._no_split_modules = []
    with pytest.raises(ConfigError, match=r"of class \(none is named by the model\): name some of LlamaDecoderLayer"):
        blocks_to_shard(model)
    if not IS_5:  # in which experts are no modules
        mixtral = ModelConfig(config={"model_type": "mixtral", **TINY}).build()
        nested = blocks_to_shard(mixtral, ["MixtralDecoderLayer", "MixtralBlockSparseTop2MLP"])
        assert [type(block).__name__ for block in nested] == ["MixtralDecoderLayer"] * 2  # with what is in them
    vision = {"depth": 3, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}
    text = {**TINY, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    both = ModelConfig(config={"model_type": "qwen2_vl", "text_config": text, "vision_config": vision}).build()
    assert type(both).__name__ == "Qwen2VLForConditionalGeneration"
    assert sorted(type(block).__name__ for block in blocks_to_shard(both)) == (
        ["Qwen2VLDecoderLayer"] * 2 + ["Qwen2VLVisionBlock"] * 3
    )


def test_parameters_are_frozen_by_patterns_of_their_names() -> None:
    model = llama(tie_word_embeddings=True)
    freeze(model, ["lm_head.*", "model.layers.[0]*"])
    away = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert "model.embed_tokens.weight" in away  # tied to the head
    assert {name.split(".")[2] for name in away if ".layers." in name} == {"0"}
    with pytest.raises(ConfigError, match=r"train.frozen 'layers.9' matches no parameter: the nearest name is '"):
        freeze(model, ["layers.9"])
    with pytest.raises(ConfigError, match=r"train.frozen \['\*'\] leaves nothing to train"):
        freeze(model, ["*"])


def test_blocks_are_run_again_where_a_model_can() -> None:
    model = llama().train()
    batch = collate(samples(), range(4))
    _, expected = loss_and_gradients(model, [batch])
    checkpoint_blocks(model)
    assert model.is_gradient_checkpointing
    _, gradients = loss_and_gradients(model, [batch])
    assert all(torch.equal(one, two) for one, two in zip(gradients, expected, strict=True))
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot run its blocks again: set train.gradient_checkpoi"):
        checkpoint_blocks(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.05},
        {"model_type": "granite", "logits_scaling": 7.0},
        {"model_type": "cohere", "logit_scale": 5.0},
        {"model_type": "phi", "pad_token_id": 0},  # its head has a bias
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    ],
)
def test_losses_are_those_of_the_logits_that_the_model_itself_makes(fields: dict[str, Any]) -> None:
    model = ModelConfig(config=declared({**TINY, **fields})).build().eval()
    for name, parameter in model.named_parameters():
        if name == "lm_head.bias":
            torch.nn.init.normal_(parameter)
    batch = collate(samples(), range(4))
    packed = PackedModel(model)
    for way in packed.logits_ways:
        packed.logits_way = way
        losses, logs, _ = packed(batch)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0, :-1]
        targets = batch.labels[0, 1:]
        expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets != -100]
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(logs, logits.logsumexp(dim=-1)[targets != -100])
    assert way == "whole"


class LargestTensor(TorchDispatchMode):
    """The most values that a result of any operation has inside of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_values = max(self.num_values, tensor.numel())
        return result


def test_logits_of_a_long_pack_are_never_there_together() -> None:
    """Neither those of all its tokens nor those of all that are learnt, in the forward or the backward pass."""
    vocab_size, length = 1 << 17, 512
    model = llama(vocab_size=vocab_size, hidden_size=8)
    ids = np.random.default_rng(0).integers(0, vocab_size, length)
    sample: Processed = {"input_ids": ids, "labels": np.where(np.arange(length) % 4 > 0, ids, -100)}
    batch = collate([sample] * 2, range(2))
    with LargestTensor() as largest:
        losses = PackedModel(model)(batch).tokens
        losses.sum().backward()
    assert batch.num_loss_tokens * vocab_size > 1.4 * LOGITS_AT_ONCE
    assert model.lm_head.weight.numel() < largest.num_values <= LOGITS_AT_ONCE


def test_logits_of_the_last_part_are_computed_once_and_those_of_others_again_in_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of losses and of their logsumexp, the gradients are those of autograd, to the bit."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 16, generator=rng)
    hidden, targets = torch.randn(200, 8, generator=rng), torch.randint(16, (200,), generator=rng)
    gradients, calls = {}, []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return hidden @ weight

    for at_once, expected in ((LOGITS_AT_ONCE, [200]), (64 * 16, [64, 64, 64, 8, 64, 64, 64])):
        monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
        mine = hidden.clone().requires_grad_()
        losses, logs = loss.token_losses(mine, targets, head, vocab_size=16)
        (losses.sum() + 0.1 * logs.square().sum()).backward()
        assert calls == expected
        calls.clear()
        assert mine.grad is not None
        gradients[at_once] = mine.grad
    plain = hidden.clone().requires_grad_()
    logits = plain @ weight
    logs = logits.logsumexp(dim=-1)
    ((logs - logits.gather(1, targets[:, None])[:, 0]).sum() + 0.1 * logs.square().sum()).backward()
    assert plain.grad is not None
    assert torch.equal(gradients[LOGITS_AT_ONCE], plain.grad)
    torch.testing.assert_close(gradients[64 * 16], plain.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=in_long_rounds)])
def test_gradients_of_a_head_in_bfloat16_do_not_depend_on_how_many_tokens_it_takes_at_once(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a head that an adapter trains as a whole, as a copy of it."""
    rng = np.random.default_rng(0)
    batch = collate([{"input_ids": (ids := rng.integers(0, 64, 65)), "labels": ids} for _ in range(128)], range(128))
    config = {"model_type": "llama", **TINY, "vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2}
    gradients = []
    for at_once in (LOGITS_AT_ONCE, 64 * 64):  # in one part, and in 128
        monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
        model: Any = ModelConfig(config=config, attention="sdpa_varlen").build().bfloat16()
        if adapted:
            model = add_adapter(model, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}).bfloat16()
        PackedModel(model)(batch).tokens.mean().backward()
        (gradient,) = [
            each.grad.float()
            for name, each in model.named_parameters()
            if name.startswith("lm_head.") and each.grad is not None
        ]
        gradients.append(gradient)
    whole, in_parts = gradients
    assert float((in_parts - whole).norm() / whole.norm()) < 4e-3  # bfloat16 has 8 bits


def test_tokens_that_a_model_does_not_have_are_named(tokenizer: Path) -> None:
    model = PackedModel(llama())
    batch = collate(samples(), range(10, 14), source="chats", pad_to=80)
    model.check_tokens(batch)
    batch.input_ids[0, 17] = 128  # the first of the second sample
    with pytest.raises(ConfigError, match="token id 128 in sample 11 of chats is none of the model's 128: take the mo"):
        model.check_tokens(batch)
    batch.input_ids[0, 68] = -1  # the last of the last
    with pytest.raises(ConfigError, match="token id -1 in sample 13 of chats is none of the model's 128"):
        model.check_tokens(batch)
    processor = TextProcessor.from_pretrained(str(tokenizer))
    highest = processor.tokenizer.num_ids - 1
    with pytest.raises(ConfigError, match=f"has token ids to {highest}, the model 128 tokens: take the model's own"):
        model.check_processor(processor)
    PackedModel(llama(vocab_size=highest + 1)).check_processor(processor)
    model.check_processor(TokensProcessor())
    model.check_processor(None)


def test_models_that_cannot_be_built_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="model needs exactly one of pretrained and config"):
        ModelConfig()
    with pytest.raises(ConfigError, match="model needs exactly one of pretrained and config"):
        ModelConfig(pretrained="x", config={})
    for config in (
        {"model_type": "smell"},
        {"hidden_size": 3},
        {"model_type": "llama", "num_attention_heads": "x"},
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "vocab_size": -3},
    ):
        with pytest.raises(ConfigError, match=r"model cannot be built|'smell' is unknown to the installed"):
            ModelConfig(config=config).build()
    with pytest.raises(ConfigError, match="model cannot be built"):
        ModelConfig(pretrained=str(tmp_path / "absent")).build()
    with pytest.raises(ConfigError, match="model type 'vit' does not generate text: name a causal language model"):
        ModelConfig(config={"model_type": "vit"}).build()


def test_a_model_without_experts_in_any_layer_has_no_loss_of_a_router() -> None:
    """Though its config names experts."""
    model = PackedModel(every_model.build("causal", "doge")).train()
    assert model.model.config.router_aux_loss_coef > 0
    losses = model(collate(samples(), range(4)))
    assert losses.router is None
    assert losses.tokens.isfinite().all()


ONE_LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
}  # fmt: skip
PARTS = {"vision_config": {"model_type": "clip_vision_model"}, "text_config": {"model_type": "llama"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layer": 1}, "num_hidden_layer reaches nothing: LlamaConfig .*: did you mean 'num_hidden_layers'"),
        *IS_5
        * [({"sliding_window": 4}, "sliding_window reaches nothing: .*: the nearest is '[a-z]")],  # others read it
        ({"model_type": "qwen2_5_omni_thinker"}, r"hidden_size reaches nothing: write .*\.text_config\.hidden_size"),
        ({"rope_thetha": 1.0}, "rope_thetha reaches nothing: .*: did you mean 'rope_theta'"),
        *IS_5 * [({"n_layer": 1}, "n_layer reaches nothing: .*: the nearest is 'num_hidden_layers'")],
        *IS_5 * [({"temperature": 0.5}, "temperature reaches nothing")],  # transformers 4 has them in all configs
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "facto": 2.0}},
            "rope_scaling.facto reaches nothing: did you mean 'factor'",
        ),
        ({"model_type": "llava", **PARTS}, r"hidden_size reaches nothing: write .*\.text_config\.hidden_size"),
        (
            {"_class_name": "DiTTransformer2DModel", "num_layer": 1},
            "num_layer reaches nothing: did you mean 'num_layers'",
        ),
    ],
)
def test_a_field_of_a_config_that_reaches_nothing_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.config\.{message}"):
        ModelConfig(config=fields if "_class_name" in fields else {**ONE_LAYER, **fields}).build()


@pytest.mark.parametrize("mark", [{"architectures": ["X"]}, {"transformers_version": "4.41.2"}])
def test_a_published_config_may_have_fields_that_reach_nothing(
    mark: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Keys of published configs: vision_token_id, in_chans and spatial_patch_size of Qwen2.5-VL, and its sizes."""
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 8}
    vision |= {"in_chans": 3, "spatial_patch_size": 14}
    config = {**ONE_LAYER, "model_type": "qwen2_5_vl", "vocab_size": 64, "vision_token_id": 3, "vision_config": vision}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}
    with pytest.raises(ConfigError, match=r"model\.config.*reaches nothing"):
        ModelConfig(config=config).build()
    built: Any = ModelConfig(config=config | mark).build()
    assert built.config.get_text_config().num_hidden_layers == built.config.vision_config.depth == 1
    (told,) = [each.getMessage() for each in caplog.records if "reach nothing" in each.getMessage()]
    names = ("vision_token_id", "vision_config.in_chans", "vision_config.spatial_patch_size")
    assert all(f"model.config.{name}" in told for name in names)
    with pytest.raises(ConfigError, match=r"num_hidden_layer reaches nothing: .*: did you mean 'num_hidden_layers'"):
        ModelConfig(config=ONE_LAYER | mark | {"num_hidden_layer": 1}).build()


def test_fields_by_another_name_and_of_files_are_known() -> None:
    written = {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.57.0", "torch_dtype": "float32"}
    ModelConfig(config={**ONE_LAYER, **written, "rope_theta": 1e4, "vocab_size": 8}).build()
    ModelConfig(
        config={"model_type": "gpt2", "num_hidden_layers": 1, "n_embd": 8, "n_head": 2, "vocab_size": 8}
    ).build()
