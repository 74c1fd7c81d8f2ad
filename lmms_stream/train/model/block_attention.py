"""Attention among the blocks of a sequence, by the mask of processors/blocks.py.

On a GPU it is flex_attention with a block mask, which computes nothing where no token sees another. Elsewhere, where
flex_attention has no backward pass, each sample is attended to by itself with a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from ...processors.blocks import BlockKind, Blocks, blocks_of, visible


class BlockLayout:
    """The blocks of a batch on a device. Masks are made once, when they are first used."""

    def __init__(self, blocks: Blocks, device: torch.device):
        self.blocks, self.device = blocks, device
        of_tokens = blocks.of_tokens
        self._block = self._tensor(of_tokens)
        self._sample = self._tensor(blocks.samples[of_tokens])
        self._is_causal = self._tensor((blocks.kinds == BlockKind.TEXT)[of_tokens])
        self._is_hidden = self._tensor(blocks.is_hidden[of_tokens])

    @staticmethod
    def of_images(lengths: torch.Tensor, device: torch.device) -> BlockLayout:
        """Of images of so many patches, each of which sees itself whole, and nothing else: int64[n]."""
        counts = lengths.cpu().numpy().astype(np.int64)
        numbers = np.arange(len(counts))
        kinds = np.full(len(counts), BlockKind.SEEN)
        return BlockLayout(blocks_of(kinds, counts, numbers, np.zeros(len(counts), bool)), device)

    @cached_property
    def samples(self) -> list[tuple[slice, torch.Tensor]]:
        """The tokens of each sample, and its own part of the mask: bool[t, t]."""
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
        """The mask as flex_attention asks for it: of a batch, a head, a token and another (tensors) -> bool."""
        number, sample, is_causal, is_hidden = self._block, self._sample, self._is_causal, self._is_hidden

        def mask(_: Any, __: Any, token: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            inside = (number[token] == number[other]) & (~is_causal[token] | (other <= token))
            before = (number[other] < number[token]) & ~is_hidden[other]
            return (sample[token] == sample[other]) & (inside | before)

        return mask

    @cached_property
    def block_mask(self) -> Any:
        """flex_attention's."""
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
