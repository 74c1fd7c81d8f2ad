"""Interface of a model of texts and images in blocks: its inputs from task bagel, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from ...processors.bagel import LATENTS, BlockKind, Blocks, blocks_of, positions, visible
from ...train.model.build import PlainModel
from ...train.model.loss import learnt_tokens
from ...train.tasks.task import Draw
from ...types import Batch

# Attention among the blocks of a sequence, by the mask of processors/bagel.py.
#
# On a GPU, flex_attention with a block mask skips hidden blocks. Elsewhere flex_attention has no backward pass, and
# each sample has a dense mask.


class BlockLayout:
    """The blocks of a batch on a device. Masks are made once, at first use."""

    def __init__(self, blocks: Blocks, device: torch.device):
        self.blocks, self.device = blocks, device
        of_tokens = blocks.of_tokens
        self._block = self._tensor(of_tokens)
        self._sample = self._tensor(blocks.samples[of_tokens])
        self._is_causal = self._tensor((blocks.kinds == BlockKind.TEXT)[of_tokens])
        self._is_hidden = self._tensor(blocks.is_hidden[of_tokens])

    @staticmethod
    def of_images(counts: NDArray[np.int64], device: torch.device) -> BlockLayout:
        """Layout of images with these numbers of patches, int64[n]; each image sees only its own patches, all of
        them.
        """
        numbers = np.arange(len(counts))
        kinds = np.full(len(counts), BlockKind.SEEN)
        return BlockLayout(blocks_of(kinds, counts, numbers, np.zeros(len(counts), bool)), device)

    @cached_property
    def samples(self) -> list[tuple[slice, torch.Tensor]]:
        """Tokens of each sample, and its own part of the mask: bool[t, t]."""
        blocks, found = self.blocks, []
        firsts = np.flatnonzero(np.diff(blocks.samples, prepend=-1))
        for first, stop in zip(firsts, [*firsts[1:], len(blocks.kinds)], strict=True):
            own = blocks_of(blocks.kinds[first:stop], blocks.lengths[first:stop], blocks.samples[first:stop],
                            blocks.dropped[first:stop])  # fmt: skip
            tokens = slice(int(blocks.starts[first]), int(blocks.stops[stop - 1]))
            found.append((tokens, self._tensor(visible(own))))
        return found

    @cached_property
    def sees(self) -> Callable[..., torch.Tensor]:
        """Mask function for flex_attention: (batch, head, token, other token), tensors -> bool."""
        number, sample, is_causal, is_hidden = self._block, self._sample, self._is_causal, self._is_hidden

        def mask(_: Any, __: Any, token: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            inside = (number[token] == number[other]) & (~is_causal[token] | (other <= token))
            before = (number[other] < number[token]) & ~is_hidden[other]
            return (sample[token] == sample[other]) & (inside | before)

        return mask

    @cached_property
    def block_mask(self) -> Any:
        """Block mask for flex_attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        size = self.blocks.num_tokens
        return create_block_mask(self.sees, None, None, size, size, device=str(self.device))

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Scaled dot-product attention of a batch of one sequence: float[1, heads, T, head_dim] each."""
    if not layout.blocks.num_tokens:
        return value + 0 * (query + key)
    if query.is_cuda:
        attended: torch.Tensor = _compiled()(query, key, value, block_mask=layout.block_mask)
        return attended
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], attn_mask=mask
        )
        for tokens, mask in layout.samples
    ]
    return torch.cat(parts, dim=2)


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """T tokens of some packs, including P tokens of patches and L of latents; each number may be 0.

    input_ids, position_ids: int64[1, T]. layout: which token sees which, for block_attention.attend. patches:
    float32[P, patch_values], pixels from -1 to 1 of seen images; patch_positions: int64[P], row x 70 + column;
    patch_layout: each image sees only its own patches; patch_tokens: int64[P], indices of their tokens. latents:
    float32[L, latent_size], noised by times, float32[L], 0 for clean latents; latent_positions: int64[L], row x 64 +
    column; latent_tokens: int64[L]. predicting: int64[n], tokens whose next token is trained on. made: int64[m],
    indices, among L, of the latents to be made.
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
    """Outputs of a BlockModel. logits: float[n, vocabulary] of the next tokens. velocity: float[m, latent_size], noise
    minus latents.
    """

    logits: torch.Tensor
    velocity: torch.Tensor


class BlockModel(Protocol):
    """Interface of a module that task bagel trains. config: with vocab_size, patch_values and latent_size.

    The whole module runs for all inputs, on empty tensors too: all ranks must gather the same blocks.
    """

    config: Any

    def __call__(self, inputs: BlockInputs) -> BlockOutput: ...


def block_config(model: PlainModel) -> Any:
    """Return the config of a wrapped BlockModel."""
    inner: Any = model.model
    return inner.config


def run_blocks(
    model: PlainModel, batch: Batch, drawn: Drawn, latents: torch.Tensor
) -> tuple[BlockOutput, torch.Tensor]:
    """Run a model on a batch on the device; return its output and the expected velocities: float32[made, D].

    latents: float32[L, D], clean latents.
    """
    device, inputs = batch.input_ids.device, batch.inputs
    config = block_config(model)
    noise, times = (torch.from_numpy(each).to(device) for each in (drawn.noise, drawn.times))
    to_make = torch.from_numpy(np.flatnonzero(drawn.is_made)).to(device)
    at = times[:, None]
    of_seen = drawn.blocks.lengths[drawn.blocks.kinds == BlockKind.SEEN] - 2
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
        made=to_make,
    )
    made = model(lambda inner: tuple(inner(given)))
    return BlockOutput(*made), (noise - latents)[to_make]


# Random draws of task bagel for a sample in a step: noise, times, drops. packs, Draw -> arrays.


class Drawn(NamedTuple):
    """Draws of all latents, zeros for latents not to be made. noise: float32[L, D], times: float32[L], is_made:
    bool[L].
    """

    blocks: Blocks
    noise: NDArray[np.float32]
    times: NDArray[np.float32]
    is_made: NDArray[np.bool_]


def draw_blocks(packs: Sequence[Batch], draw: Draw, *, latent_size: int, timestep_shift: float = 1.0) -> Drawn:
    """Draw for packs on the CPU, in the order of their tokens; an evaluation drops nothing."""
    kinds, lengths, samples, dropped = [], [], [], []
    noise: list[NDArray[Any]] = [np.zeros((0, latent_size), np.float32)]
    times: list[NDArray[Any]] = [np.zeros(0, np.float32)]
    is_made: list[NDArray[Any]] = [np.zeros(0, bool)]
    number = 0
    for pack in packs:
        for index, (sample_id, table, dropout) in enumerate(_tables(pack)):
            own = partial(draw.generator, pack.source, sample_id, repeat=pack.repeat_of(index))
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
    """Number of latents to be made in a pack."""
    if "blocks" not in pack.inputs:
        return 0
    kinds, lengths = pack.inputs["blocks"].T
    return int((lengths[kinds == BlockKind.MADE] - 2).sum())


def _noise(
    table: NDArray[np.int64], own: Callable[[str], np.random.Generator], *, latent_size: int, timestep_shift: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """Noise and time of each latent of a sample, and whether it is to be made; zeros for all others."""
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
    """Id of each sample of a pack, its blocks int64[n, 2], and the probability of dropping each; likewise for the
    padding.
    """
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
