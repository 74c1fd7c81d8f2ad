"""Tiny processors of models that have no file among our families, made without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from lmms_stream.versions.transformers import by_torchvision
from transformers import ProcessorMixin, Qwen2TokenizerFast

from tests.processors.tiny_vlm import save_bpe
from tests.versions import IS_5

CHAT = ("<|im_start|>", "<|im_end|>")
OF_OVIS = "<image> <IMG_ATOM> <IMG_START> <IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END>"
OF_CLIP: dict[str, Any] = {
    "patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
}  # fmt: skip
SQUARE = {"height": 28, "width": 28}


class Kind(NamedTuple):
    """special: tokens by the tokenizer's names of them, "" for others. written: kind -> what the template writes."""

    special: Mapping[str, str]
    written: Mapping[str, str]
    make: Callable[[Qwen2TokenizerFast, str], ProcessorMixin]
    processor: str  # its class in transformers


def _class(name: str) -> Any:
    return getattr(transformers, name)


def _pixtral(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("PixtralImageProcessor")(size={"longest_edge": 112}, patch_size=14)
    return _class("PixtralProcessor")(images, tokenizer, patch_size=14, chat_template=template)


def _of_clip(name: str, images: Any, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    """A processor for a tower of CLIP's, whose first token is left out."""
    return _class(name)(
        images,
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _llava(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("CLIPImageProcessor")(size={"shortest_edge": 28}, crop_size=SQUARE)
    return _of_clip("LlavaProcessor", images, tokenizer, template)


def _llava_next(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    grid = [[28, 56], [56, 28], [56, 56]]
    images = by_torchvision("LlavaNextImageProcessor")(
        size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=grid
    )
    return _of_clip("LlavaNextProcessor", images, tokenizer, template)


def _cohere2(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("Cohere2VisionImageProcessor")(size=SQUARE, max_patches=6, patch_size=2)
    return _class("Cohere2VisionProcessor")(images, tokenizer, chat_template=template)


def _ovis2(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("Ovis2ImageProcessor")(size=SQUARE, max_patches=6)
    return _class("Ovis2Processor")(images, tokenizer, image_seq_length=4, chat_template=template)


def _deepseek(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("DeepseekVLImageProcessor")(size=SQUARE)
    return _class("DeepseekVLProcessor")(images, tokenizer, num_image_tokens=4, chat_template=template)


def _lfm2(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = _class("Lfm2VlImageProcessor" if IS_5 else "Lfm2VlImageProcessorFast")(
        tile_size=64, encoder_patch_size=8, min_tiles=1, max_tiles=4, min_image_tokens=4, max_image_tokens=16
    )
    return _class("Lfm2VlProcessor")(images, tokenizer, chat_template=template)


def _gemma4(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = _class("Gemma4ImageProcessor")(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    videos = _class("Gemma4VideoProcessor")(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    sounds = _class("Gemma4AudioFeatureExtractor")()
    return _class("Gemma4Processor")(sounds, images, tokenizer, videos, chat_template=template, image_seq_length=70)


def _glm4v(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    size = {"shortest_edge": 4 * 28**2, "longest_edge": 64 * 28**2}
    images = by_torchvision("Glm4vImageProcessor")(size=dict(size))
    return _class("Glm4vProcessor")(
        images, tokenizer, _class("Glm4vVideoProcessor")(size=dict(size)), chat_template=template
    )


ANY: dict[str, Kind] = {
    "pixtral": Kind(
        {"image_token": "[IMG]", "": "[IMG_BREAK] [IMG_END]"}, {"image": "[IMG]"}, _pixtral, "PixtralProcessor"
    ),
    "llava": Kind({"image_token": "<image>"}, {"image": "<image>\n"}, _llava, "LlavaProcessor"),
    "llava_next": Kind({"image_token": "<image>"}, {"image": "<image>\n"}, _llava_next, "LlavaNextProcessor"),
    "cohere2_vision": Kind(
        {
            "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>", "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL",
        },
        {"image": "<|IMG_PATCH|>"}, _cohere2, "Cohere2VisionProcessor"
    ),
    "ovis2": Kind({"": OF_OVIS}, {"image": "<image>\n"}, _ovis2, "Ovis2Processor"),
    "deepseek_vl": Kind(
        {"image_token": "<image_placeholder>"}, {"image": "<image_placeholder>"}, _deepseek, "DeepseekVLProcessor"
    ),
    "lfm2_vl": Kind(
        {
            "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>", "image_thumbnail": "<|img_thumbnail|>",
        },
        {"image": "<image>"}, _lfm2, "Lfm2VlProcessor"
    ),
    "gemma4": Kind(
        {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>", "": "<|video|>",
        },
        {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}, _gemma4, "Gemma4Processor"
    ),
    "glm4v": Kind(
        {"": "<|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>"},
        {
            "image": "<|begin_of_image|><|image|><|end_of_image|>",
            "video": "<|begin_of_video|><|video|><|end_of_video|>",
        }, _glm4v, "Glm4vProcessor"
    ),
}  # fmt: skip


def save_any(folder: Path, name: str) -> ProcessorMixin:
    """A processor as save_pretrained writes it."""
    tiny = ANY[name]
    named = {key: token for key, token in tiny.special.items() if key}
    tokenizer = Qwen2TokenizerFast(*save_bpe(folder), extra_special_tokens=named)
    others = tiny.special.get("", "").split()
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHAT, *others]})
    for token in named.values():
        tokenizer.add_tokens([token], special_tokens=True)
    made = tiny.make(tokenizer, template_of(tiny.written))
    made.save_pretrained(folder)
    return made


def template_of(written: Mapping[str, str]) -> str:
    """A chat template whose answers are marked."""
    media = "".join(f"{{% if part['type'] == '{kind}' %}}{text}{{% endif %}}" for kind, text in written.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\n' }}{% set said %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        + media + "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
        "{% endset %}{% if message['role'] == 'assistant' %}{% generation %}{{ said }}{% endgeneration %}{% else %}"
        "{{ said }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
    )  # fmt: skip
