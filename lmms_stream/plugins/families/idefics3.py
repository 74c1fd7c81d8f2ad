"""Idefics3 and SmolVLM, as the installed processor reads them; rows of several tiles become rows of one.

A row of several tiles is padded with tiles of zeros where another image has more, which a pack need not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ...processors.families.probe import Described


def rows_of_one(made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Without the mask of pixels: no tile has padding of its own."""
    tiles = {name: each for name, each in made.items() if name == "pixel_values"}
    rest = {name: each for name, each in made.items() if not name.startswith("pixel")}
    return {**rest, **{name: each.reshape(-1, 1, *each.shape[-3:]) for name, each in tiles.items()}}


FAMILY = Described(
    name="Idefics3 and SmolVLM",
    model_types=("idefics3", "smolvlm"),
    processor_classes=("Idefics3Processor", "SmolVLMProcessor"),
    attentions=("flash_attention_2", "flex_attention", "sdpa", "eager"),
    towers={"image": "vision_model"},
    of_installed=rows_of_one,
    is_of_rows=True,
)
