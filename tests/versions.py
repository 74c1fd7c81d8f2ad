"""What tests say otherwise to transformers 4 and 5. Parts of it, by what both call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

IS_5 = int(transformers.__version__.split(".")[0]) >= 5


def by_pillow(name: str) -> Any:
    """The image processor of a name, such as Gemma3ImageProcessor, that resizes by Pillow."""
    return getattr(transformers, f"{name}Pil" if IS_5 else name)


def limits_on_pixels(least: int, most: int) -> dict[str, Any]:
    """Keywords of a call of Qwen2VLImageProcessor."""
    if IS_5:
        return {"size": {"shortest_edge": least, "longest_edge": most}}
    return {"min_pixels": least, "max_pixels": most}


def declared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that its class in the installed transformers declares; model.config takes no other."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _declared_by(CONFIG_MAPPING[config["model_type"]](), config)


def _declared_by(default: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name == "model_type" or hasattr(default, name)}
    parts = {name: getattr(default, name) for name in kept}
    return {
        name: _declared_by(parts[name], value)
        if isinstance(value, Mapping) and hasattr(parts[name], "to_dict")
        else value
        for name, value in kept.items()
    }
