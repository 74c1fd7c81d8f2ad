"""What a model of texts and images in blocks is: what task bagel gives it, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from ...processors.blocks import LATENTS, BlockKind, Blocks, blocks_of, positions
from ...train.model.block_attention import BlockLayout
from ...train.model.loss import learnt_tokens
from ...train.model.plain import PlainModel
from ...train.tasks.task import Draw
from ...types import Batch


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
        patch_tokens=torch.from_numpy(drawn.blocks.inside([BlockKind.SEEN])).to(device),
        latents=(1 - at) * latents + at * noise,
        times=times,
        latent_positions=inputs.get("vae_positions", torch.zeros(0, dtype=torch.int64, device=device)),
        latent_tokens=torch.from_numpy(drawn.blocks.inside(LATENTS)).to(device),
        predicting=learnt_tokens(batch.labels, num_learnt=batch.num_loss_tokens)[0],
        made=torch.nonzero(is_made)[:, 0],
    )
    made = model(lambda inner: tuple(inner(given)))
    return BlockOutput(*made), (noise - latents)[is_made]


# Random draws of task bagel for a sample in a step: noise, times, drops. packs, Draw -> arrays.


class Drawn(NamedTuple):
    """noise: float32[L, D], times: float32[L], is_made: bool[L]: of all latents, zeros for those not to be made."""

    blocks: Blocks
    noise: NDArray[np.float32]
    times: NDArray[np.float32]
    is_made: NDArray[np.bool_]


def draw_blocks(packs: Sequence[Batch], draw: Draw, *, latent_size: int, timestep_shift: float = 1.0) -> Drawn:
    """What is drawn for packs on the CPU, in the order of their tokens; an evaluation drops nothing."""
    kinds, lengths, samples, dropped = [], [], [], []
    noise: list[NDArray[Any]] = [np.zeros((0, latent_size), np.float32)]
    times: list[NDArray[Any]] = [np.zeros(0, np.float32)]
    is_made: list[NDArray[Any]] = [np.zeros(0, bool)]
    number = 0
    for pack in packs:
        for sample_id, table, dropout in _tables(pack):
            own = partial(draw.generator, pack.source, sample_id)
            kinds.append(table[:, 0])
            lengths.append(table[:, 1])
            samples.append(np.full(len(table), number))
            dropped.append((own("dropout").random(len(table)) < dropout) & (draw.step is not None))
            of_sample = _noise(table, own, latent_size=latent_size, timestep_shift=timestep_shift)
            for found, values in zip((noise, times, is_made), of_sample, strict=True):
                found.append(values)
            number += 1
    blocks = blocks_of(np.concatenate(kinds), np.concatenate(lengths), np.concatenate(samples), np.concatenate(dropped))
    return Drawn(blocks, np.concatenate(noise), np.concatenate(times), np.concatenate(is_made))


def num_made(pack: Batch) -> int:
    """Latents of a pack that are to be made."""
    if "blocks" not in pack.inputs:
        return 0
    kinds, lengths = pack.inputs["blocks"].T
    return int((lengths[kinds == BlockKind.MADE] - 2).sum())


def _noise(
    table: NDArray[np.int64], own: Callable[[str], np.random.Generator], *, latent_size: int, timestep_shift: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """Noise and time of each latent of a sample, and whether it is to be made; zeros for those that are not."""
    images = table[np.isin(table[:, 0], LATENTS)]
    counts, is_made = images[:, 1] - 2, images[:, 0] == BlockKind.MADE
    of_latents = np.repeat(is_made, counts)
    noise = np.zeros((len(of_latents), latent_size), np.float32)
    shape = (int(of_latents.sum()), latent_size)
    noise[of_latents] = own("noise").standard_normal(shape, np.float32)
    share = 1 / (1 + np.exp(-own("time").standard_normal(int(is_made.sum()))))
    times = np.zeros(len(images), np.float32)
    times[is_made] = timestep_shift * share / (1 + (timestep_shift - 1) * share)
    return noise, np.repeat(times, counts), of_latents


def _tables(pack: Batch) -> list[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Of each sample of a pack its id, its blocks int64[n, 2], and how probably each is dropped; so of the padding."""
    bounds = pack.cu_seqlens.numpy().astype(np.int64)
    num_samples = len(pack.sample_ids)
    table = pack.inputs["blocks"].numpy() if "blocks" in pack.inputs else np.zeros((0, 2), np.int64)
    dropout = pack.inputs["dropout"].numpy() if "dropout" in pack.inputs else np.zeros(0, np.float32)
    stops = np.cumsum(table[:, 1])
    ends = np.searchsorted(stops, bounds[1 : num_samples + 1])  # the last block of each sample
    is_whole = not num_samples or (ends[-1] == len(stops) - 1 and (stops[ends] == bounds[1 : num_samples + 1]).all())
    if not is_whole:
        raise ConfigError(
            f"a pack of task bagel has blocks of {int(table[:, 1].sum())} tokens, and samples of "
            f"{int(bounds[num_samples])}: set processor.type to bagel"
        )
    cuts = [0, *(ends + 1).tolist()]
    found = [
        (int(sample_id), table[cuts[number] : cuts[number + 1]], dropout[cuts[number] : cuts[number + 1]])
        for number, sample_id in enumerate(pack.sample_ids)
    ]
    if num_padded := pack.num_tokens - int(bounds[num_samples]):
        found.append((0, np.array([[BlockKind.TEXT, num_padded]]), np.zeros(1, np.float32)))
    return found
