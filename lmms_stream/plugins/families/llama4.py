"""Llama 4, as the installed processor reads it.

Its attention counts chunks of tokens from the start of a pack, so that packs are no longer than a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...processors.families.probe import Described


def _features(base: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
    return base.multi_modal_projector(base.vision_model(**inputs).last_hidden_state)


FAMILY = Described(
    name="Llama 4",
    model_types=("llama4",),
    processor_classes=("Llama4Processor",),
    model_class="Llama4ForConditionalGeneration",  # AutoModelForCausalLM takes its config for one of text
    attentions=("flex_attention", "sdpa", "eager"),
    towers={"image": "vision_model"},
    features=_features,
    is_of_rows=True,
)
