"""Tiny models of the families that read media, by name: packs for them, and sources of samples.

vision, tiles and sounds hold their parts: Qwen-VL, families that read tiles, and families that read sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.flops import ModelFlops
from lmms_stream.train.model.model import PackedModel
from lmms_stream.types import Processed, Sample
from lmms_stream.versions.transformers import MIXES_CLIPS_OF_QWEN3_OMNI

from tests.processors.tile_vlm import TINY
from tests.processors.tiny_sound import clip
from tests.processors.tiny_vlm import picture, save_processor, stored, tiny_config
from tests.versions import IS_5

from . import sounds, tiles, vision
from .one_by_one import is_noise_of_keys

TILED, SOUNDING = tuple(TINY), tuple(sounds.KINDS)
NAMES = (*vision.MODEL_TYPES, *TILED, *SOUNDING)
_BY_SAMPLE = ("sdpa_varlen", "sdpa")
# Attentions in which packs are exact; "auto" takes the first.
EXACT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(vision.MODEL_TYPES, (*_BY_SAMPLE, "eager")),
    **dict.fromkeys(TILED, ("sdpa", "eager")),
    "qwen2_audio": ("sdpa", "eager"),
    "qwen2_5_omni": _BY_SAMPLE,
    "qwen3_omni": _BY_SAMPLE[:1] if MIXES_CLIPS_OF_QWEN3_OMNI else _BY_SAMPLE,
}
MIXING: dict[str, Sequence[str]] = {
    **{name: tiny.mixes for name, tiny in TINY.items()},
    "qwen3_omni": ("sdpa", "eager") if MIXES_CLIPS_OF_QWEN3_OMNI else (),
}
# Parameters to freeze in counts of FLOPs: none, towers, and parts.
_Patterns = Sequence[list[str]]
_OF_QWEN: _Patterns = ([], ["model.visual.*"], ["model.visual.patch_embed.*", "model.visual.blocks.*"])
_OF_TILES: _Patterns = ([], ["*vision*"], ["*vision*", "*projector*", "*connector*"])
_OF_SOUND: _Patterns = ([], ["*audio_tower.*", "*visual.*"], ["*audio_tower.conv*", "*.layers.0.*"])
FROZEN: dict[str, _Patterns] = {
    **dict.fromkeys(vision.MODEL_TYPES, _OF_QWEN),
    **dict.fromkeys(TILED, _OF_TILES),
    **dict.fromkeys(SOUNDING, _OF_SOUND),
}


def packed_of(name: str, attention: Any = "auto") -> PackedModel:
    if name in SOUNDING:
        return sounds.tiny_of(name).packed(attention)
    return tiles.packed_model(name, attention=attention) if name in TILED else vision.packed_model(name, attention)


def plain_of(name: str, attention: str) -> Any:
    """The model of packed_of, in which plain transformers is exact, for samples one by one."""
    if name in SOUNDING:
        return sounds.tiny_of(name).plain()
    return tiles.build(name, attention=attention) if name in TILED else vision.build(name)


def packs_of(name: str) -> Mapping[str, Sequence[Processed]]:
    """Samples of packs by the media that the packs hold; the last pack mixes the most kinds."""
    if name in SOUNDING:
        return sounds.tiny_of(name).kinds()
    if name in TILED:
        kinds = ("image", "images", *(["video"] if TINY[name].video else []), "text", "media")
        return {kind: tiles.samples_of(name, kind) for kind in kinds}
    model = vision.build(name)
    return {kind: vision.samples_of(model, kind) for kind in vision.KINDS}


def tolerances_of(name: str) -> dict[str, Any]:
    """Options of check_pack: parameters whose gradients are roundings, and slack."""
    is_exact = name in vision.MODEL_TYPES
    return {"is_noise": (lambda _: False) if is_exact else is_noise_of_keys, "slack": 1e-7 * (name in SOUNDING)}


def counted_of(name: str) -> tuple[PackedModel, list[Processed], Callable[[ModelFlops], ModelFlops]]:
    """A model whose products are those that torch counts, samples, and a change of the model's FLOPs.

    Eager attention computes what a window hides, and all experts run. Torch counts convolutions over the padding of a
    chunk of sound, so clips are whole chunks. A head that pools a tile for nothing is not counted.
    """
    packed: Any = packed_of(name, "eager").train()
    if name in vision.MODEL_TYPES:
        return packed, vision.samples_of(packed.model, "media"), lambda flops: flops
    if name in SOUNDING:
        if IS_5:  # whose products of experts are otherwise none that torch counts
            packed.model.set_experts_implementation("eager")
        frames = {"qwen2_audio": 300, "qwen2_5_omni": 40, "qwen3_omni": 100}[name]
        parts = [("audio", clip(160 * frames))] + ([] if name == "qwen2_audio" else [("image", picture(90, 60))])
        return packed, [sounds.tiny_of(name).sample(*parts)], lambda flops: flops
    for path, module in packed.model.named_modules():
        if path.endswith("vision_model.head"):
            module.forward = lambda hidden: hidden.mean(1)
    text = packed.model.config.get_text_config()
    text.num_experts_per_tok = getattr(text, "num_local_experts", None)
    samples = tiles.samples_of(name, "media")
    return packed, samples, lambda flops: replace(flops, per_pair={None: sum(flops.per_pair.values())})


@lru_cache
def folder_of(name: str) -> Path:
    """The folder of the family's processor, as users have it."""
    if name in SOUNDING:
        return sounds.tiny_of(name).folder
    if name in TILED:
        return Path(tiles.processor_of(name).tokenizer.name)
    save_processor(folder := Path(mkdtemp()) / name, name)
    return folder


def installed(name: str) -> tuple[Any, Sample]:
    """A tiny model of the processor in folder_of, and a chat with media."""
    if name in SOUNDING:
        config = sounds.tiny_of(name).config
    else:
        config = tiles.config_of(name) if name in TILED else tiny_config(name, folder_of(name)).to_dict()
    medium = ("audio", clip(9000)) if name in SOUNDING else ("image", picture(90, 60))
    chat = stored(("user", [medium, "what?"]), ("assistant", "a tone"))
    return ModelConfig(config=config, attention="sdpa", seed=3).build().eval(), chat


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
