"""FLOPs of towers that read patches of images and frames of any size. model, grids of media -> FLOPs.

See products.py. Mergers see one token for merge * merge patches. Attention is of all pairs of patches in a frame, or,
in blocks with windows, of all pairs in each window: those at the edge hold fewer. What a rank runs on the smallest
media because others have more does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .products import Products

_FIRST, _BLOCKS = ("patch_embed", "pos_embed"), "blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerFlops:
    """FLOPs of a patch, and of a pair of patches that attend to one another: in blocks that see a frame, in windows.

    window: of how many tokens' side, where a token is merge * merge patches; 0 where no block has any. kinds: of media
    that it reads.
    """

    per_patch: float
    per_pair: float
    per_window_pair: float
    window: int
    merge: int
    kinds: tuple[str, ...] = ("image", "video")

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """See MediaFlops."""
        names = [f"{kind}_grid_thw" for kind in self.kinds]
        return sum(self.of_grids(inputs[name].numpy()) for name in names if name in inputs)

    def of_grids(self, grids: NDArray[np.int64]) -> float:
        """Forward and backward of media of these grids: int64[n, 3], frames, rows and columns of patches."""
        frames, rows, columns = grids.T.astype(np.float64)
        total = float((frames * rows * columns).sum()) * self.per_patch
        total += float((frames * (rows * columns) ** 2).sum()) * self.per_pair
        if self.window:
            squares = self._squares(rows // self.merge) * self._squares(columns // self.merge)
            total += float((frames * self.merge**4 * squares).sum()) * self.per_window_pair
        return total

    def _squares(self, sides: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of the squares of what windows take of a side."""
        squares: NDArray[np.float64] = sides // self.window * self.window**2 + (sides % self.window) ** 2
        return squares


def tower_flops(tower: torch.nn.Module, config: Any, *, kinds: Sequence[str]) -> TowerFlops | None:
    """config: of the tower; None for one that is not built of patches and blocks, whose formula is another."""
    blocks = getattr(tower, _BLOCKS, None)
    width = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None)
    merge = getattr(config, "spatial_merge_size", None)
    if not isinstance(blocks, torch.nn.ModuleList) or not width or not merge:
        return None
    lookups = {id(module.weight) for module in tower.modules() if isinstance(module, torch.nn.Embedding)}
    stages = [(_stage(name, len(blocks)), name, each) for name, each in tower.named_parameters()]
    products = Products((stage, each) for stage, _, each in stages)
    per_patch = 0.0
    for stage, name, parameter in stages:
        if id(parameter) not in lookups and parameter.ndim > 1:
            per_patch += products.of(stage, parameter) / (merge**2 if "merger" in name else 1)
    window, whole = _windows(config, len(blocks), merge)
    pairs = {False: 0.0, True: 0.0}  # by whether the block has windows
    for number in range(len(blocks)):
        pairs[number not in whole] += products.of_pair(number + 1, width)
    return TowerFlops(
        per_patch=per_patch,
        per_pair=pairs[False],
        per_window_pair=pairs[True],
        window=window,
        merge=merge,
        kinds=tuple(kinds),
    )


def _stage(name: str, num_blocks: int) -> int:
    """When a parameter is used: 0 by what reads pixels, then by each block, at last by what gives tokens."""
    part, _, rest = name.partition(".")
    if part == _BLOCKS:
        return 1 + int(rest.partition(".")[0])
    return 0 if part in _FIRST else num_blocks + 1


def _windows(config: Any, num_blocks: int, merge: int) -> tuple[int, set[int]]:
    """The side of a window in tokens, and the blocks that have none."""
    side = getattr(config, "window_size", None)
    whole = getattr(config, "fullatt_block_indexes", None)
    if not side or whole is None:
        return 0, {*range(num_blocks)}
    return side // merge // config.patch_size, {*whole}
