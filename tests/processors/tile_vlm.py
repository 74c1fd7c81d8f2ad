"""Tiny processors and models of the families that read tiles, made without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lmms_stream.versions.transformers import by_torchvision
from transformers import (
    AyaVisionConfig,
    AyaVisionProcessor,
    Gemma3Config,
    Gemma3Processor,
    Idefics3Config,
    Idefics3Processor,
    InternVLConfig,
    InternVLProcessor,
    InternVLVideoProcessor,
    Llama4Config,
    Llama4Processor,
    LlavaOnevisionConfig,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PretrainedConfig,
    ProcessorMixin,
    Qwen2TokenizerFast,
    SmolVLMConfig,
    SmolVLMProcessor,
)
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from tests.processors.tiny_vlm import save_bpe, token_ids
from tests.versions import by_pillow

PINPOINTS = [[28 * rows, 28 * columns] for rows in (1, 2, 3, 4) for columns in (1, 2, 3, 4)]
NUM2WORDS = "transformers.models.smolvlm.processing_smolvlm.num2words"
CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip


_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below a million as num2words of transformers' SmolVLMProcessor writes it.

    >>> in_words(64), in_words(121)
    ('sixty-four', 'one hundred and twenty-one')
    """
    if number < len(_ONES):
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    large, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, large)
    joint = ", " if rest >= 100 else " and "
    return f"{in_words(count)} {name}" + (f"{joint}{in_words(rest)}" if rest else "")


# transformers' SmolVLMProcessor needs a library that writes numbers as words, which is not installed here.
_module, _, _name = NUM2WORDS.rpartition(".")
setattr(import_module(_module), _name, in_words)


class Tiny(NamedTuple):
    """slow: an image processor of transformers' that resizes by Pillow, where the family has one.

    named: special tokens by name. alike: tensors of theirs and ours -> those that are compared. rows: of the tower's
    input in an array. checked: settings of a model. refused: limits on pixels.
    unfollowed: settings of the folder, with the error.
    """

    special: Sequence[str]
    image: str  # what the chat template writes
    video: str
    save: Callable[[Path, Qwen2TokenizerFast, str], ProcessorMixin]
    config: Callable[[dict[str, int]], PretrainedConfig]
    slow: Callable[[Path], Any] | None
    named: Mapping[str, str] = MappingProxyType({})
    alike: Callable[[str, Any], Any] = lambda _, array: array
    call: Mapping[str, Any] = MappingProxyType({})
    rows: Callable[[Any], int] = len
    is_asked: bool = False  # the installed processor reads its media
    mixes: Sequence[str] = ()  # attentions that are refused
    checked: Sequence[str] = ("image_token_id", "vision_config.image_size")
    refused: Sequence[str] = ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels")
    unfollowed: Sequence[tuple[str, Any, str]] = ()


def _save_internvl(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    size = {"height": 28, "width": 28}
    images = by_torchvision("GotOcr2ImageProcessor")(
        size=dict(size), min_patches=1, max_patches=6, crop_to_patches=True
    )
    videos = InternVLVideoProcessor(size=dict(size))
    return InternVLProcessor(images, tokenizer, videos, image_seq_length=4, chat_template=template)


def _internvl(ids: dict[str, int]) -> PretrainedConfig:
    tower = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "image_size": [28, 28], "patch_size": [7, 7],
    }  # fmt: skip
    text = {**TEXT, "model_type": "qwen2"}
    return InternVLConfig(
        vision_config=tower, text_config=text, image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4
    )


def _save_aya_vision(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    size = {"height": 28, "width": 28}
    images = by_torchvision("GotOcr2ImageProcessor")(size=size, min_patches=1, max_patches=6, crop_to_patches=True)
    return AyaVisionProcessor(images, tokenizer, patch_size=14, img_size=28, chat_template=template)


def _aya_vision(ids: dict[str, int]) -> PretrainedConfig:
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    text = {
        **TEXT, "model_type": "cohere2", "head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return AyaVisionConfig(
        vision_config=tower, text_config=text, image_token_index=ids["<|IMG_PATCH|>"], downsample_factor=2
    )


def _save_llava(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    size = {"height": 28, "width": 28}
    images = by_torchvision("LlavaOnevisionImageProcessor")(size=dict(size), image_grid_pinpoints=PINPOINTS)
    videos = LlavaOnevisionVideoProcessor(size=dict(size))
    return LlavaOnevisionProcessor(
        images, tokenizer, videos, num_image_tokens=9, vision_feature_select_strategy="full", chat_template=template,
        vision_aspect_ratio="anyres_max_4",
    )  # fmt: skip


def _llava(ids: dict[str, int]) -> PretrainedConfig:
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 28, "patch_size": 9,
    }  # fmt: skip
    return LlavaOnevisionConfig(
        vision_config=tower, text_config={**TEXT, "model_type": "qwen2"}, image_grid_pinpoints=PINPOINTS,
        image_token_index=ids["<image>"], video_token_index=ids["<video>"], vision_aspect_ratio="anyres_max_4",
    )  # fmt: skip


def _of_llava(name: str, array: Any) -> Any:
    """Theirs has tiles of zeros where an image has fewer than another."""
    if name != "pixel_values" or array.ndim != 5:
        return array
    tiles = array.reshape(-1, *array.shape[2:])
    return tiles[tiles.reshape(len(tiles), -1).any(axis=1)]


def _save_idefics3(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_pillow("Idefics3ImageProcessor")(size={"longest_edge": 112}, max_image_size={"longest_edge": 28})
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def _save_smolvlm(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_pillow("SmolVLMImageProcessor")(size={"longest_edge": 112}, max_image_size={"longest_edge": 28})
    videos = SmolVLMVideoProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, num_frames=8, fps=1, resample=3
    )
    return SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=template)


def _idefics3(kind: Any) -> Callable[[dict[str, int]], PretrainedConfig]:
    def config(ids: dict[str, int]) -> PretrainedConfig:
        tower = {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "image_size": 28, "patch_size": 7,
        }  # fmt: skip
        text = {**TEXT, "model_type": "llama", "pad_token_id": 0}
        made: PretrainedConfig = kind(
            vision_config=tower, text_config=text, image_token_id=ids["<image>"], scale_factor=2, pad_token_id=0
        )
        return made

    return config


def _of_smolvlm(name: str, array: Any) -> Any:
    """Theirs has samples of tiles, ours tiles."""
    return array.reshape(-1, *array.shape[2:]) if name == "pixel_values" else array


def _save_gemma3(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("Gemma3ImageProcessor")(size={"height": 28, "width": 28}, do_pan_and_scan=False)
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def _gemma3(ids: dict[str, int]) -> PretrainedConfig:
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return Gemma3Config(
        vision_config=tower, text_config=text, image_token_index=ids["<image_soft_token>"], mm_tokens_per_image=4
    )


def _save_llama4(folder: Path, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("Llama4ImageProcessor")(size={"height": 28, "width": 28}, max_patches=6)
    return Llama4Processor(images, tokenizer, patch_size=7, chat_template=template)


def _llama4(ids: dict[str, int]) -> PretrainedConfig:
    tower = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "patch_size": 7, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    text = {
        **TEXT, "intermediate_size_mlp": 64, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "attention_chunk_size": 512, "interleave_moe_layer_step": 1, "pad_token_id": 0,
    }  # fmt: skip
    return Llama4Config(vision_config=tower, text_config=text, image_token_index=ids["<|patch|>"])


TINY: dict[str, Tiny] = {
    "internvl": Tiny(
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "<IMG_CONTEXT>\n", "<video>\n", _save_internvl, _internvl,
        by_pillow("GotOcr2ImageProcessor").from_pretrained,
        {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        checked=("image_token_id", "vision_config.image_size", "image_seq_length"),
        refused=("video_max_pixels", "video_min_pixels"),
        unfollowed=[("size", {"height": 28, "width": 56}, "has tiles of size .*, but only squares are supported")],
    ),
    "aya_vision": Tiny(
        ("<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"), "<image>", "", _save_aya_vision,
        _aya_vision, by_pillow("GotOcr2ImageProcessor").from_pretrained,
        is_asked=True,
        checked=("image_token_index",),
    ),
    "llava_onevision": Tiny(
        ("<image>", "<video>"), "<image>\n", "<video>\n", _save_llava, _llava,
        by_pillow("LlavaOnevisionImageProcessor").from_pretrained,
        alike=_of_llava,
        rows=lambda array: array.shape[0] if array.ndim == 4 else array.shape[0] * array.shape[1],
        checked=("image_token_index", "vision_config.image_size", "vision_aspect_ratio", "image_grid_pinpoints"),
        unfollowed=[("image_grid_pinpoints", [[28, 30]], r"has image_grid_pinpoints \[\[28, 30\]\], expected sides")],
    ),
    "idefics3": Tiny(
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"), "<image>", "", _save_idefics3,
        _idefics3(Idefics3Config), by_pillow("Idefics3ImageProcessor").from_pretrained,
        alike=_of_smolvlm,
        is_asked=True,
        checked=("image_token_id",),
    ),
    "smolvlm": Tiny(
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"), "<image>", "<video>",
        _save_smolvlm, _idefics3(SmolVLMConfig), by_pillow("SmolVLMImageProcessor").from_pretrained,
        alike=_of_smolvlm,
        is_asked=True,
        checked=("image_token_id",),
    ),
    "gemma3": Tiny(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<start_of_image>", "", _save_gemma3, _gemma3,
        by_pillow("Gemma3ImageProcessor").from_pretrained,
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        checked=("image_token_index", "vision_config.image_size", "mm_tokens_per_image"),
        mixes=("flash_attention_2",),
    ),
    "llama4": Tiny(
        (
            "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        "<|image|>", "", _save_llama4, _llama4, None,
        mixes=("flash_attention_2",),
        is_asked=True,
        checked=("image_token_index",),
    ),
}  # fmt: skip


def template_of(family: str, *, marked: bool = True) -> str:
    """A chat template in which the assistant's turns are marked."""
    tiny = TINY[family]
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\n' }}{% set said %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}{% if content['type'] == 'image' %}" + tiny.image +
        "{% elif content['type'] == 'video' %}" + tiny.video + "{% elif 'text' in content %}{{ content['text'] }}"
        "{% endif %}{% endfor %}{% endif %}{% endset %}{% if message['role'] == 'assistant' %}"
        + begin + "{{ said }}<|im_end|>" + end + "{% else %}{{ said }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
    )  # fmt: skip


def save_tile_processor(folder: Path, family: str, *, template: str | None = None) -> ProcessorMixin:
    """A processor of a family as save_pretrained writes it, of tiles of few pixels and tokens."""
    tiny = TINY[family]
    tokenizer = Qwen2TokenizerFast(*save_bpe(folder), extra_special_tokens=dict(tiny.named))
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHAT[1:], *tiny.special]})
    made = tiny.save(folder, tokenizer, template or template_of(family))
    made.save_pretrained(folder)
    return made


def tile_config(family: str, folder: Path) -> PretrainedConfig:
    """The config of a tiny model for the processor in a folder."""
    return TINY[family].config(token_ids(folder))
