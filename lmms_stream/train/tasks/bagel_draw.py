"""What task bagel draws for a sample in a step: noise, times, and what is dropped. packs, Draw -> arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...processors.blocks import LATENTS, Blocks, Kind, blocks_of
from ...types import Batch
from .noise import Draw


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
    return int((lengths[kinds == Kind.MADE] - 2).sum())


def _noise(
    table: NDArray[np.int64], own: Callable[[str], np.random.Generator], *, latent_size: int, timestep_shift: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
    """Noise and time of each latent of a sample, and whether it is to be made; zeros for those that are not."""
    images = table[np.isin(table[:, 0], LATENTS)]
    counts, is_made = images[:, 1] - 2, images[:, 0] == Kind.MADE
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
        found.append((0, np.array([[Kind.TEXT, num_padded]]), np.zeros(1, np.float32)))
    return found
