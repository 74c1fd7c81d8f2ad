"""Which formula counts a part that reads media. model, its towers -> FLOPs of a batch's inputs.

tower_flops has patches of images of any size, tile_flops tiles of one size, sound_flops clips.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .products import MediaFlops
from .sound_flops import sound_flops
from .tile_flops import tile_flops
from .tower_flops import tower_flops

__all__ = ["MediaFlops", "MediaPart", "media_flops", "media_parts"]


class MediaPart(NamedTuple):
    """A tower, the kinds of media that it reads, and what lies between it and the text."""

    tower: torch.nn.Module
    kinds: tuple[str, ...]
    behind: tuple[torch.nn.Module, ...]


def media_parts(model: torch.nn.Module, towers: Mapping[str, torch.nn.Module]) -> list[MediaPart]:
    """The towers of a model, each once; what lies beside them belongs to the only one.

    Of a model with several towers, what lies beside them is taken for a part of the text.
    """
    each_once = {id(tower): tower for tower in towers.values()}
    kinds = {key: tuple(kind for kind, tower in towers.items() if id(tower) == key) for key in each_once}
    behind = _beside(model, next(iter(each_once.values()))) if len(each_once) == 1 else ()
    return [MediaPart(tower, kinds[key], behind) for key, tower in each_once.items()]


def _beside(model: Any, tower: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The modules of the part that the tower lies in, without those that embed tokens or make logits."""
    parent = next((each for each in model.modules() if any(child is tower for child in each.children())), None)
    if parent is None:
        return ()
    of_text = {id(each) for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    others = [child for child in parent.children() if child is not tower]
    return tuple(child for child in others if not of_text & {id(each) for each in child.modules()})


def media_flops(part: MediaPart, config: Any) -> MediaFlops | None:
    """The formula of a tower; None where none is known. config: of the model."""
    is_sound = set(part.kinds) == {"audio"}
    own = getattr(config, "audio_config" if is_sound else "vision_config", None)
    own = getattr(part.tower, "config", None) or own
    if is_sound:
        return sound_flops(part.tower, own, behind=part.behind)
    if (found := tower_flops(part.tower, own, kinds=part.kinds)) is not None:
        return None if part.behind else found
    return tile_flops(part.tower, own, behind=part.behind, kinds=part.kinds, of_model=config)
