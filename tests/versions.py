"""What tests say otherwise to transformers 4 and 5. Parts of it, by what both call them."""

from __future__ import annotations

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
