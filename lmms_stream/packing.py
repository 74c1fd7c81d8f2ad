"""Fill packs with samples. lengths in order -> [packing] -> packs; integer arithmetic only.

A pack holds whole samples whose lengths sum to at most `packing_length`. Which strategy, and what becomes
of samples that are longer than a pack, is said by PackingConfig; the loops are compiled by numba and release
the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import packing_kernels as kernels
from .errors import ConfigError, PackingError

Strategy = Literal["best_fit", "next_fit"]
Overlong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How samples are put into packs; see `pack` for the strategies."""

    packing_length: int  # tokens one pack can hold
    strategy: Strategy = "best_fit"
    window: int = 16384  # samples packed together: larger is denser and reaches further
    overlong: Overlong = "error"  # what becomes of samples longer than a pack

    def __post_init__(self) -> None:
        if not 1 <= self.packing_length <= 1 << 30:
            raise ConfigError(f"packing_length must be from 1 to {1 << 30} tokens, got {self.packing_length}")
        if not 1 <= self.window <= 1 << 26:
            raise ConfigError(f"window must be from 1 to {1 << 26} samples, got {self.window}")
        for name, value, allowed in (
            ("strategy", self.strategy, ("best_fit", "next_fit")),
            ("overlong", self.overlong, ("error", "drop", "truncate")),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Packs over positions 0..N-1 of a sequence of lengths.

    order: int32[num_packed]; order[offsets[p]:offsets[p + 1]] are the positions in pack p, each position once.
    offsets: int64[num_packs + 1]. num_overlong: positions longer than a pack, dropped or truncated.
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_overlong: int

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack(lengths: NDArray[np.integer[Any]], *, config: PackingConfig, seed: int = 0) -> Packs:
    """Deterministic packs of `lengths` (any integer dtype, tokens, in order); none is over packing_length.

    best_fit works through windows of samples. In a window the samples are placed one after another into the
    fullest pack that still takes them; the shortest ones, which hold a fifth of the tokens, wait until the end
    and fill the gaps in decreasing order. Packs with little room left are closed, the others stay open for one
    more window, so the samples of a pack lie within two windows. Packs are emitted in hash order (`seed`), so
    that their place says nothing of their content. next_fit closes a pack when the next sample does not fit.

    Raises PackingError for a length below 1, and for one above packing_length where overlong is "error".
    """
    tokens = np.ascontiguousarray(lengths, dtype=np.int32)
    limit = config.packing_length
    if len(tokens) and int(tokens.min()) < 1:
        at = int(tokens.argmin())
        raise PackingError(f"length {tokens[at]} at position {at}: a sample must have at least one token")
    kept: NDArray[np.int32] | None = None
    num_overlong = int(np.count_nonzero(tokens > limit))
    if num_overlong:
        if config.overlong == "error":
            at = int(tokens.argmax())
            raise PackingError(
                f"{num_overlong} of {len(tokens)} samples are longer than packing_length {limit} (the longest has "
                f"{tokens[at]} tokens): raise packing_length, or set overlong to drop or truncate"
            )
        if config.overlong == "drop":
            kept = np.flatnonzero(tokens <= limit).astype(np.int32)
            tokens = tokens[kept]
        else:
            tokens = np.minimum(tokens, np.int32(limit))
    if config.strategy == "best_fit":
        order, offsets = kernels.best_fit(tokens, limit, config.window, np.uint64(seed))
    else:
        order, offsets = kernels.next_fit(tokens, limit)
    return Packs(order=order if kept is None else kept[order], offsets=offsets, num_overlong=num_overlong)
