"""Fill packs with samples. lengths in order -> [packing] -> packs; integer arithmetic only.

A pack holds whole samples whose lengths sum to at most `packing_length`. Which strategy, and what becomes
of samples that are longer than a pack, is said by PackingConfig; the loops are compiled by numba and release
the GIL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from . import packing_kernels as kernels
from .errors import ConfigError, PackingError

Overlong = Literal["error", "drop", "truncate", "split"]

STRATEGIES = "best_fit, first_fit, next_fit, window_N"
MAX_LENGTH = (1 << 31) - 1  # tokens
FILLER_SHARE = 0.2  # best_fit: of a window's tokens, its shortest samples, kept back to fill gaps
_WINDOW_N = re.compile(r"window_([1-9]\d{0,7})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How samples are put into packs; see `pack` for the strategies."""

    packing_length: int  # tokens one pack can hold
    strategy: str = "best_fit"  # best_fit, first_fit, next_fit or window_N (N a number of samples)
    window: int = 16384  # samples that best_fit packs together: larger is denser and reaches further
    overlong: Overlong = "error"  # what becomes of samples longer than a pack
    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.packing_length <= 1 << 30:
            raise ConfigError(f"packing_length must be from 1 to {1 << 30} tokens, got {self.packing_length}")
        if not 1 <= self.window <= 1 << 26:
            raise ConfigError(f"window must be from 1 to {1 << 26} samples, got {self.window}")
        if self.strategy not in ("best_fit", "first_fit", "next_fit") and not _WINDOW_N.fullmatch(str(self.strategy)):
            raise ConfigError(f"strategy must be one of {STRATEGIES} (as window_1024), got {self.strategy!r}")
        if self.overlong not in get_args(Overlong):
            raise ConfigError(f"overlong must be one of {', '.join(get_args(Overlong))}, got {self.overlong!r}")
        if self.max_samples_per_pack is not None and self.max_samples_per_pack < 1:
            raise ConfigError(f"max_samples_per_pack must be at least 1, got {self.max_samples_per_pack}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Packs over positions 0..N-1 of a sequence of lengths.

    order: int32[num_segments]; order[offsets[p]:offsets[p + 1]] are the positions in pack p, each position once
    (a position that was split: once for each of its pieces). offsets: int64[num_packs + 1].
    num_tokens: tokens in all packs. num_overlong: positions longer than a pack, dropped, truncated or split.
    pieces: None, or int32[num_segments] when samples were split: piece k of a position starts at its token
    k * packing_length.
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_tokens: int
    num_overlong: int = 0
    pieces: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack(lengths: NDArray[np.integer[Any]], *, config: PackingConfig, seed: int = 0) -> Packs:
    """Deterministic packs of `lengths` (any integer dtype, tokens, in order); none is over packing_length.

    best_fit works through windows of samples. In a window the samples are placed one after another into the
    fullest pack that still takes them; the shortest ones, which hold a fifth of the tokens, wait until the end
    and fill the gaps in decreasing order. Packs with little room left are closed, the others stay open for one
    more window, so the samples of a pack lie within two windows. window_N is best fit decreasing inside N
    consecutive samples. Both emit packs in hash order (`seed`), so that their place says nothing of their content.
    first_fit puts each sample into the pack that was opened first among those with room; next_fit closes a pack
    when the next sample does not fit.

    Raises PackingError for a length below 1 or above MAX_LENGTH, and for one above packing_length where overlong
    is "error".
    """
    lengths = np.asarray(lengths)
    if len(lengths) and int(lengths.min()) < 1:
        at = int(lengths.argmin())
        raise PackingError(f"length {lengths[at]} at position {at}: a sample must have at least one token")
    if len(lengths) and int(lengths.max()) > MAX_LENGTH:
        at = int(lengths.argmax())
        raise PackingError(f"length {lengths[at]} at position {at}: a sample may have up to {MAX_LENGTH} tokens")
    tokens = np.ascontiguousarray(lengths, dtype=np.int32)
    num_overlong = int(np.count_nonzero(tokens > config.packing_length))
    if not num_overlong:
        return _pack_tokens(tokens, config, seed)
    return _pack_overlong(tokens, config, seed, num_overlong)


def _pack_overlong(tokens: NDArray[np.int32], config: PackingConfig, seed: int, num_overlong: int) -> Packs:
    """Packs where some lengths are above packing_length, by the policy of the config."""
    limit = config.packing_length
    if config.overlong == "error":
        raise PackingError(
            f"{num_overlong} of {len(tokens)} samples are longer than packing_length {limit} (the longest has "
            f"{tokens.max()} tokens): raise packing_length, or set overlong to drop, truncate or split"
        )
    if config.overlong == "truncate":
        packs = _pack_tokens(np.minimum(tokens, np.int32(limit)), config, seed)
        return replace(packs, num_overlong=num_overlong)
    if config.overlong == "drop":
        kept = np.flatnonzero(tokens <= limit).astype(np.int32)
        packs = _pack_tokens(tokens[kept], config, seed)
        return replace(packs, order=kept[packs.order], num_overlong=num_overlong)
    num_pieces = -(-tokens // limit)
    positions = np.repeat(np.arange(len(tokens), dtype=np.int32), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    pieces = (np.arange(len(positions)) - first_piece[positions]).astype(np.int32)
    packs = _pack_tokens(np.minimum(tokens[positions] - pieces * np.int32(limit), limit), config, seed)
    return replace(packs, order=positions[packs.order], num_overlong=num_overlong, pieces=pieces[packs.order])


def _pack_tokens(tokens: NDArray[np.int32], config: PackingConfig, seed: int) -> Packs:
    """Packs of lengths that all fit, by the strategy of the config."""
    tokens = np.ascontiguousarray(tokens, dtype=np.int32)
    limit, max_samples = config.packing_length, config.max_samples_per_pack or len(tokens) + 1
    if config.strategy == "next_fit":
        order, offsets = kernels.next_fit(tokens, limit, max_samples)
    elif config.strategy == "first_fit":
        order, offsets = kernels.first_fit(tokens, limit, max_samples)
    else:
        window, filler_share, carry = config.window, FILLER_SHARE, True
        if config.strategy != "best_fit":
            window, filler_share, carry = int(config.strategy.removeprefix("window_")), 1.0, False
        order, offsets = kernels.best_fit(tokens, limit, max_samples, window, filler_share, carry, np.uint64(seed))
    return Packs(order=order, offsets=offsets, num_tokens=int(tokens.sum(dtype=np.int64)))
