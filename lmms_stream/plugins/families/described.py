"""Families whose media their installed processors read: Idefics3 and SmolVLM, Llama 4.

Idefics3 pads a row of several tiles with tiles of zeros if another image has more. Rows of several tiles become rows of
one tile here: a pack needs no padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ...processors.families.probe import Described


def rows_of_one(made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Return the rows of tiles without the mask of pixels: tiles have no padding."""
    tiles = {name: each for name, each in made.items() if name == "pixel_values"}
    rest = {name: each for name, each in made.items() if not name.startswith("pixel")}
    return {**rest, **{name: each.reshape(-1, 1, *each.shape[-3:]) for name, each in tiles.items()}}


IDEFICS3 = Described(
    name="Idefics3 and SmolVLM",
    model_types=("idefics3", "smolvlm"),
    processor_classes=("Idefics3Processor", "SmolVLMProcessor"),
    attentions=("flash_attention_2", "flex_attention", "sdpa", "eager"),
    towers={"image": "vision_model"},
    of_installed=rows_of_one,
    is_of_rows=True,
)


def _features(base: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
    return base.multi_modal_projector(base.vision_model(**inputs).last_hidden_state)


# Llama 4's attention counts chunks of tokens from the start of a pack: packs are no longer than a chunk.
LLAMA4 = Described(
    name="Llama 4",
    model_types=("llama4",),
    processor_classes=("Llama4Processor",),
    model_class="Llama4ForConditionalGeneration",  # AutoModelForCausalLM mistakes its config for a text model's
    attentions=("flex_attention", "sdpa", "eager"),
    towers={"image": "vision_model"},
    features=_features,
    is_of_rows=True,
)
