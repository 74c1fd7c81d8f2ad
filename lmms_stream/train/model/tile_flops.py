"""FLOPs of towers that read square tiles of one size: the same of each tile. model, tiles -> FLOPs.

All patches of a tile attend to one another, with a token of the tile's own where the tower has one. What lies between
the tower and the text, and an adapter at the tower's end, sees as many positions as its first product makes of the
patches: one that reads the values of k patches has a k-th of them. A head that pools the tile, whose outcome nothing
reads, does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .products import Products, matrices, num_blocks, stage_of_block

_NAMES = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TileFlops:
    """names: of the inputs whose tiles are their last three axes."""

    per_tile: float
    names: tuple[str, ...]

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """See MediaFlops."""
        return self.per_tile * sum(inputs[name].shape[:-3].numel() for name in self.names if name in inputs)


def tile_flops(
    tower: torch.nn.Module, config: Any, *, behind: Sequence[torch.nn.Module], kinds: Sequence[str], of_model: Any
) -> TileFlops | None:
    """None for a tower that is not built of tiles and blocks, and for one that is not read from its last block.

    config: of the tower; of_model: of the model. behind: the parts between tower and text.
    """
    side, patch = (_number(getattr(config, name, None)) for name in ("image_size", "patch_size"))
    width, depth = getattr(config, "hidden_size", None), num_blocks(tower)
    read = getattr(of_model, "vision_feature_layer", -1)
    if not (side and patch and width and depth) or read not in (None, -1, [-1]):
        return None
    names = tuple(_NAMES[kind] for kind in kinds if kind in _NAMES)
    patches = (side // patch) ** 2
    positions = patches + any(name.endswith(("cls_token", "class_embedding")) for name, _ in tower.named_parameters())
    last = depth + 1
    stages = [(_stage(name, last), each) for name, each in tower.named_parameters() if ".head." not in name]
    products = Products([*stages, *((last, each) for module in behind for each in module.parameters())])
    total = sum(products.of_pair(1 + number, width) for number in range(depth)) * positions**2
    of_text: float | None = getattr(of_model, "mm_tokens_per_image", None)  # Gemma 3's, which are means of patches
    for name, parameter in matrices([tower, *behind]):
        stage = _stage(name, last) if name.startswith("0.") else last
        if ".head." in name:
            continue
        if stage == last and "post_" not in name:
            of_text = of_text or patches * width / parameter.shape[-1]
            total += products.of(last, parameter) * of_text
        else:
            total += products.of(stage, parameter) * (patches if stage == 0 else positions)
    return TileFlops(per_tile=total, names=names)


def _stage(name: str, last: int) -> int:
    """0 for what makes vectors of pixels, then block by block, then an adapter at the end."""
    block = stage_of_block(name)
    if block is not None:
        return 1 + block
    return 0 if "embed" in name or "cls_token" in name else last


def _number(value: Any) -> int:
    """A side that a config gives once, or for both axes."""
    return int(value[0] if isinstance(value, list | tuple) else value or 0)
