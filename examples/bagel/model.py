"""A small model of texts and images in one sequence, as task bagel of lmms_stream trains it.

A mixture of two transformers, as BAGEL is one: text and images that are seen have weights of their own, and so have the
latents of images that are made; they meet in attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lmms_stream.plugins.tasks.bagel_model import BlockInputs, BlockLayout, BlockOutput, attend
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class BagelConfig(PretrainedConfig):
    """patch_values: of a patch of the vision encoder, stride x stride x 3. latent_size: values of a latent.

    num_patch_positions, num_latent_positions: the squares of vit.positions and vae.positions of the processor.
    """

    model_type = "bagel_example"

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_vision_layers: int = 1,
        patch_values: int = 588,
        num_patch_positions: int = 70 * 70,
        latent_size: int = 768,
        num_latent_positions: int = 64 * 64,
        rope_theta: float = 1e4,
        **others: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_vision_layers, self.patch_values, self.num_patch_positions = (
            num_vision_layers, patch_values, num_patch_positions,
        )  # fmt: skip
        self.latent_size, self.num_latent_positions, self.rope_theta = latent_size, num_latent_positions, rope_theta
        super().__init__(**{"tie_word_embeddings": False, **others})  # which transformers 4 would tie


class Expert(nn.Module):
    """One of the transformers in a layer."""

    def __init__(self, config: BagelConfig):
        super().__init__()
        size = config.hidden_size
        self.shape = (3, config.num_attention_heads, size // config.num_attention_heads)
        self.norm, self.qkv, self.out = nn.RMSNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(
            nn.RMSNorm(size),
            nn.Linear(size, config.intermediate_size),
            nn.GELU(),
            nn.Linear(config.intermediate_size, size),
        )

    def heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> queries, keys and values: [n, 3, heads, head_dim]."""
        heads: torch.Tensor = self.qkv(self.norm(hidden)).unflatten(1, self.shape)
        return heads

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.out(attended)
        added: torch.Tensor = hidden + self.mlp(hidden)
        return added


class MixedLayer(nn.Module):
    """understands: of text and images that are seen; makes: of latents."""

    def __init__(self, config: BagelConfig):
        super().__init__()
        self.understands, self.makes = Expert(config), Expert(config)

    def forward(
        self, seen: torch.Tensor, made: torch.Tensor, order: torch.Tensor, turns: torch.Tensor, layout: BlockLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """seen: [n, H], made: [m, H]. order: int64[T], where each token lies among those of both, one after another."""
        heads = torch.cat([self.understands.heads(seen), self.makes.heads(made)])[order]
        query, key, value = heads.permute(1, 2, 0, 3)[:, None]  # [1, heads, T, head_dim] each
        attended = attend(_turned(query, turns), _turned(key, turns), value, layout)
        both = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        flat = attended[0].transpose(0, 1).flatten(1)[both]
        return self.understands.after(seen, flat[: len(seen)]), self.makes.after(made, flat[len(seen) :])


class VisionEncoder(nn.Module):
    """Patches of images -> what stands at their tokens; each image sees itself alone."""

    def __init__(self, config: BagelConfig):
        super().__init__()
        self.patches = nn.Linear(config.patch_values, config.hidden_size)
        self.positions = nn.Embedding(config.num_patch_positions, config.hidden_size)
        self.layers = nn.ModuleList(Expert(config) for _ in range(config.num_vision_layers))
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, patches: torch.Tensor, positions: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
        hidden = self.patches(patches) + self.positions(positions)
        for layer in self.layers:
            query, key, value = layer.heads(hidden).permute(1, 2, 0, 3)[:, None]  # type: ignore[operator]
            attended = attend(query, key, value, layout)
            hidden = layer.after(hidden, attended[0].transpose(0, 1).flatten(1))  # type: ignore[operator]
        made: torch.Tensor = self.out(hidden)
        return made


class BagelModel(PreTrainedModel):
    """See BlockModel of lmms_stream.plugins.tasks.bagel_model for its inputs and outputs."""

    config_class = BagelConfig
    _no_split_modules: Any = ("MixedLayer",)

    def __init__(self, config: BagelConfig):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.vision = VisionEncoder(config)
        self.latents = nn.Linear(config.latent_size, size)
        self.latent_positions = nn.Embedding(config.num_latent_positions, size)
        self.times = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.layers = nn.ModuleList(MixedLayer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.lm_head = nn.RMSNorm(size), nn.Linear(size, config.vocab_size, bias=False)
        self.latent_norm, self.velocity = nn.RMSNorm(size), nn.Linear(size, config.latent_size)
        own: Any = self
        own.post_init()

    def forward(self, inputs: BlockInputs) -> BlockOutput:
        dtype = self.embed_tokens.weight.dtype
        num_tokens, device = inputs.input_ids.shape[1], inputs.input_ids.device
        hidden = self.embed_tokens(inputs.input_ids[0])
        encoded = self.vision(inputs.patches.to(dtype), inputs.patch_positions, inputs.patch_layout)
        hidden = hidden.index_copy(0, inputs.patch_tokens, encoded.to(hidden.dtype))
        made = self.latents(inputs.latents.to(dtype)) + self.latent_positions(inputs.latent_positions)
        made = made + self.times(_waves(inputs.times, self.config.hidden_size).to(dtype))
        is_latent = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        is_latent[inputs.latent_tokens] = True
        others = is_latent.byte().argsort(stable=True)[: num_tokens - len(inputs.latent_tokens)]
        number_of_other = torch.cumsum(~is_latent, 0) - 1
        order = torch.where(is_latent, len(others) + torch.cumsum(is_latent, 0) - 1, number_of_other)
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        turns = _turns(inputs.position_ids[0], head_dim, self.config.rope_theta).to(dtype)
        seen = hidden[others]
        for layer in self.layers:
            seen, made = layer(seen, made, order, turns, inputs.layout)
        predicting = number_of_other[inputs.predicting]
        return BlockOutput(
            logits=self.lm_head(self.norm(seen[predicting])),
            velocity=self.velocity(self.latent_norm(made[inputs.made])),
        )


def _turns(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Cosines and sines of rotary positions: [2, T, head_dim / 2]."""
    rates = theta ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = positions[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = turns
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _waves(times: torch.Tensor, size: int) -> torch.Tensor:
    """Times from 0 to 1 as waves: [n, size]."""
    rates = torch.exp(-math.log(1e4) * torch.arange(size // 2, device=times.device) / (size // 2))
    angles = 1000 * times[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
