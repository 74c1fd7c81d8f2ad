"""A packed sequence must give what its samples give one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.collate import collate
from lmms_stream.errors import ConfigError
from lmms_stream.train.model import ModelConfig, PackedModel, blocks_to_shard
from lmms_stream.types import Batch, Processed

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
    positions = batch.position_ids if position_ids is None else position_ids
    losses, _ = PackedModel(model)(batch.input_ids, positions, batch.labels)
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_loss_and_gradients_of_a_pack_are_the_sums_over_its_samples(model_type: str, attention: Any) -> None:
    model = ModelConfig(config={"model_type": model_type, **TINY}, attention=attention).build()
    packed_loss, packed_gradients = loss_and_gradients(model, [collate(samples(), range(4), pad_to=80)])
    single_loss, single_gradients = loss_and_gradients(model, [collate([sample], [0]) for sample in samples()])
    torch.testing.assert_close(packed_loss, single_loss, rtol=1e-5, atol=0)
    assert len(packed_gradients) == len(list(model.parameters()))
    for packed, single in zip(packed_gradients, single_gradients, strict=True):
        assert (packed - single).norm() <= 1e-5 * single.norm()


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


def test_models_are_the_same_in_every_process_and_their_blocks_are_found() -> None:
    config = ModelConfig(config={"model_type": "llama", **TINY}, seed=5)
    first, second = config.build(), config.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert len(blocks_to_shard(first)) == TINY["num_hidden_layers"]


def test_models_that_cannot_be_built_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="model needs exactly one of pretrained and config"):
        ModelConfig()
    with pytest.raises(ConfigError, match="model needs exactly one of pretrained and config"):
        ModelConfig(pretrained="x", config={})
    for config in ({"model_type": "smell"}, {"hidden_size": 3}):
        with pytest.raises(ConfigError, match="model cannot be built"):
            ModelConfig(config=config).build()
    with pytest.raises(ConfigError, match="model cannot be built"):
        ModelConfig(pretrained=str(tmp_path / "absent")).build()
