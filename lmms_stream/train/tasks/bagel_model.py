"""What a model of texts and images in blocks is: what task bagel gives it, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ...processors.blocks import LATENTS, Kind, positions
from ...types import Batch
from ..model.block_attention import BlockLayout
from ..model.loss import learnt_tokens
from ..model.plain import PlainModel
from .bagel_draw import Drawn


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """T tokens of some packs, among them P of patches and L of latents, any number of each 0.

    input_ids, position_ids: int64[1, T]. layout: which token sees which, for block_attention.attend.
    patches: float32[P, patch_values], pixels from -1 to 1 of the images that are seen; patch_positions: int64[P], row
    x 70 + column; patch_layout: in which each image sees itself; patch_tokens: int64[P], the tokens that they are at.
    latents: float32[L, latent_size], with noise by times, float32[L], which is 0 for clean ones; latent_positions:
    int64[L], row x 64 + column; latent_tokens: int64[L]. predicting: int64[n], tokens whose next one is learnt. made:
    int64[m], the numbers, among L, of the latents that are to be made.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: BlockLayout
    patches: torch.Tensor
    patch_positions: torch.Tensor
    patch_layout: BlockLayout
    patch_tokens: torch.Tensor
    latents: torch.Tensor
    times: torch.Tensor
    latent_positions: torch.Tensor
    latent_tokens: torch.Tensor
    predicting: torch.Tensor
    made: torch.Tensor


class BlockOutput(NamedTuple):
    """logits: float[n, vocabulary] of the next tokens. velocity: float[m, latent_size], noise less latents."""

    logits: torch.Tensor
    velocity: torch.Tensor


class BlockModel(Protocol):
    """A module that task bagel trains. config: with vocab_size, patch_values and latent_size.

    All of it runs for all inputs, on empty tensors too, so that ranks gather the same blocks of it.
    """

    config: Any

    def __call__(self, inputs: BlockInputs) -> BlockOutput: ...


def block_config(model: PlainModel) -> Any:
    """The config of a BlockModel that was wrapped."""
    inner: Any = model.model
    return inner.config


def run_blocks(
    model: PlainModel, batch: Batch, drawn: Drawn, latents: torch.Tensor
) -> tuple[BlockOutput, torch.Tensor]:
    """What a model says of a batch on the device, and the velocities that it should say: float32[made, D].

    latents: float32[L, D], clean ones.
    """
    device, inputs = batch.input_ids.device, batch.inputs
    config = block_config(model)
    noise, times = (torch.from_numpy(each).to(device) for each in (drawn.noise, drawn.times))
    is_made = torch.from_numpy(drawn.is_made).to(device)
    at = times[:, None]
    of_seen = inputs.get("vit_grids", torch.zeros(0, 2, dtype=torch.int64, device=device)).prod(dim=1)
    given = BlockInputs(
        input_ids=batch.input_ids,
        position_ids=torch.from_numpy(positions(drawn.blocks)).to(device)[None],
        layout=BlockLayout(drawn.blocks, device),
        patches=inputs.get("vit_patches", torch.zeros(0, config.patch_values, device=device)),
        patch_positions=inputs.get("vit_positions", torch.zeros(0, dtype=torch.int64, device=device)),
        patch_layout=BlockLayout.of_images(of_seen, device),
        patch_tokens=torch.from_numpy(drawn.blocks.inside([Kind.SEEN])).to(device),
        latents=(1 - at) * latents + at * noise,
        times=times,
        latent_positions=inputs.get("vae_positions", torch.zeros(0, dtype=torch.int64, device=device)),
        latent_tokens=torch.from_numpy(drawn.blocks.inside(LATENTS)).to(device),
        predicting=learnt_tokens(batch.labels, num_learnt=batch.num_loss_tokens)[0],
        made=torch.nonzero(is_made)[:, 0],
    )
    made = model(lambda inner: tuple(inner(given)))
    return BlockOutput(*made), (noise - latents)[is_made]
