"""A tiny model of any family that reads media, by its name, and sources of samples for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmms_stream.types import Processed

from tests.processors.tile_vlm import TINY

from . import sounds, tiles, vision

TILED, SOUNDING = tuple(TINY), tuple(sounds.KINDS)


def sources_of(name: str) -> Sequence[str]:
    """The sources that there are: of one kind of media each, of several kinds, and of text alone."""
    if name in SOUNDING:
        return sounds.KINDS[name]
    if name in TILED:
        return ("image", "images", *(("video", "both") if TINY[name].video else ()), "text")
    return ("images", "video", "both", "text")


def build(name: str, **attention: str) -> Any:
    if name in SOUNDING:
        return sounds.tiny_of(name).build(**attention)
    return tiles.build(name, **attention) if name in TILED else vision.build(name, **attention)


def build_plain(name: str) -> Any:
    """The model that samples are run in one by one."""
    return sounds.tiny_of(name).plain() if name in SOUNDING else build(name)


def source_of(name: str, model: Any, source: str) -> list[Processed]:
    if name in SOUNDING:
        return sounds.source_of(name, source)
    return tiles.source_of(name, source) if name in TILED else vision.source_of(model, source)


def processor_of(name: str, model: Any, source: str) -> vision.Processor:
    """Gives the samples of a source."""
    if name in SOUNDING:
        return sounds.Processor(name, source)
    return tiles.Processor(name, source) if name in TILED else vision.Processor(model, source)


def packing_length_of(name: str) -> int:
    if name in ("smolvlm", "idefics3"):  # whose images are many tiles
        return 640
    return 384 if name in TILED + SOUNDING else 128
