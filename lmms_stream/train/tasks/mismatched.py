"""Answers behind prompts that they do not belong to. pack -> [mismatched] -> a pack of the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...processors.base import IGNORED_LABEL
from ...types import Batch


def mismatched(pack: Batch) -> Batch:
    """The pack, on the CPU, in which each prompt has the answer of the sequence before; the first has that of the last.

    A prompt is what comes before the first token that is learnt, and its media stay with it; answers hold none. The
    pack has the same tokens in another order, and the same number of them. One of fewer than two sequences stays.

    Positions on axes of a family's own go on behind each prompt as those of the answer went on behind its own.
    """
    if pack.sequences is None or len(pack.sequences) < 2:
        return pack
    bounds, labels = pack.sequences.numpy()[:, 1:3], pack.labels[0].numpy()
    splits = [int(start + np.argmax(labels[start:stop] != IGNORED_LABEL)) for start, stop in bounds]
    prompts = [np.arange(start, split) for (start, _), split in zip(bounds, splits, strict=True)]
    answers = [np.arange(split, stop) for (_, stop), split in zip(bounds, splits, strict=True)]
    others = [answers[-1], *answers[:-1]]
    padding = np.arange(bounds[-1, 1], pack.num_tokens)
    order = np.concatenate([*(part for pair in zip(prompts, others, strict=True) for part in pair), padding])
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, others, strict=True)]
    ends = np.cumsum([0, *lengths])
    sequences = pack.sequences.clone()
    sequences[:, 1], sequences[:, 2] = torch.from_numpy(ends[:-1]), torch.from_numpy(ends[1:])
    cu_seqlens = pack.cu_seqlens.clone()
    cu_seqlens[: len(ends)] = torch.from_numpy(ends)
    return replace(
        pack,
        input_ids=pack.input_ids[:, order],
        labels=pack.labels[:, order],
        position_ids=_positions(pack, order, splits, lengths, [len(each) for each in prompts]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max([*lengths, len(padding)]),
        token_inputs={name: values[:, order] for name, values in pack.token_inputs.items()},
        sequences=sequences,
    )


def _positions(
    pack: Batch, order: NDArray[np.int64], splits: list[int], lengths: list[int], num_prompt: list[int]
) -> torch.Tensor:
    """Those of tokens in their new order, each answer's moved to where its prompt ends."""
    positions = pack.position_ids[..., order].clone()
    start = 0
    for index, (length, before) in enumerate(zip(lengths, num_prompt, strict=True)):
        here, there = pack.position_ids[..., splits[index]], positions[..., start + before].clone()
        positions[..., start + before : start + length] += (here - there)[..., None]
        start += length
    return positions
