"""Tiny processors of models that have no file among our families, made without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from lmms_stream.versions.transformers import by_torchvision
from transformers import ProcessorMixin, Qwen2TokenizerFast

from tests.processors.tile_vlm import TEXT
from tests.processors.tiny_vlm import save_bpe
from tests.versions import IS_5, declared

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


def _of_grids(name: str, images: Any, videos: Any, tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    """A processor of patches in a grid. images, videos: names of their processors, or these."""
    size = {"shortest_edge": 4 * 28**2, "longest_edge": 64 * 28**2}
    images = by_torchvision(images)(size=dict(size)) if isinstance(images, str) else images
    videos = _class(videos)(size=dict(size)) if isinstance(videos, str) else videos
    return _class(name)(images, tokenizer, videos, chat_template=template)


def _of_glm(name: str) -> Callable[[Qwen2TokenizerFast, str], ProcessorMixin]:
    return partial(_of_grids, f"{name}Processor", f"{name}ImageProcessor", f"{name}VideoProcessor")


def _minimax(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    videos = _class("MiniMaxM3VLVideoProcessor")()
    return _of_grids("MiniMaxM3VLProcessor", "MiniMaxM3VLImageProcessor", videos, tokenizer, template)


def _kimi(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    limits = {"size": {"max_height": 8, "max_width": 8}, "max_patches": 64}
    images, videos = (_class(f"Kimi_K25{kind}Processor")(**limits) for kind in ("Image", "Video"))
    return _of_grids("Kimi_K25Processor", images, videos, tokenizer, template)


def _mistral3(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("PixtralImageProcessor")(size={"longest_edge": 112}, patch_size=14)
    return _class("PixtralProcessor")(images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=template)


def _patches(name: str, **fields: Any) -> Callable[[Qwen2TokenizerFast, str], ProcessorMixin]:
    """A processor whose image and video processors share its name and these settings."""

    def make(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
        size = {"shortest_edge": 4 * 28**2, "longest_edge": 64 * 28**2}
        images, videos = (_class(f"{name}{kind}Processor")(size=dict(size), **fields) for kind in ("Image", "Video"))
        return _of_grids(f"{name}Processor", images, videos, tokenizer, template)

    return make


def _ernie(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    videos = _class("Ernie4_5_VLMoeVideoProcessor")(draw_on_frames=False)  # whose font is not in the package
    return _of_grids("Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessor", videos, tokenizer, template)


def _minicpm(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images, videos = (_class(f"MiniCPMV4_6{kind}Processor")(scale_resolution=112) for kind in ("Image", "Video"))
    return _class("MiniCPMV4_6Processor")(images, videos, tokenizer, chat_template=template)


def _paligemma(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("SiglipImageProcessor")(size=SQUARE)
    images.image_seq_length = 4
    return _class("PaliGemmaProcessor")(images, tokenizer, chat_template=template)


def _phi4(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = _class("Phi4MultimodalImageProcessor" if IS_5 else "Phi4MultimodalImageProcessorFast")(
        size={"height": 56, "width": 56}, dynamic_hd=4
    )
    sounds = _class("Phi4MultimodalFeatureExtractor")()
    return _class("Phi4MultimodalProcessor")(images, sounds, tokenizer, chat_template=template)


def _paddle(tokenizer: Qwen2TokenizerFast, template: str) -> ProcessorMixin:
    images = by_torchvision("PaddleOCRVLImageProcessor")(min_pixels=4 * 28**2, max_pixels=16 * 28**2)
    return _class("PaddleOCRVLProcessor")(images, tokenizer, chat_template=template)


_OF_GLM: tuple[dict[str, str], dict[str, str]] = (
    {"": "<|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>"},
    {"image": "<|begin_of_image|><|image|><|end_of_image|>", "video": "<|begin_of_video|><|video|><|end_of_video|>"},
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
    "glm4v": Kind(*_OF_GLM, _of_glm("Glm4v"), "Glm4vProcessor"),
    "glm46v": Kind(*_OF_GLM, _of_glm("Glm46V"), "Glm46VProcessor"),
    "paddleocr_vl": Kind(
        {"image_token": "<|IMAGE_PLACEHOLDER|>", "": "<|IMAGE_START|> <|IMAGE_END|>"},
        {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"}, _paddle, "PaddleOCRVLProcessor"
    ),
    "kimi_k25": Kind(
        {
            "image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>",
            "": "<|media_begin|> <|media_content|> <|media_end|>",
        },
        {
            "image": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
            "video": "<|kimi_k25_video_placeholder|>",
        }, _kimi, "Kimi_K25Processor"
    ),
    "mistral3": Kind(
        {"image_token": "[IMG]", "": "[IMG_BREAK] [IMG_END]"}, {"image": "[IMG]"}, _mistral3, "PixtralProcessor"
    ),
    "exaone4_5": Kind(
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "": "<|vision_start|> <|vision_end|>"},
        {
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        partial(_of_grids, "Exaone4_5_Processor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
        "Exaone4_5_Processor",
    ),
    "minimax_m3_vl": Kind(
        {
            "image_token": "]<]image[>[", "video_token": "]<]video[>[", "start_token": "]<]start of image[>[",
            "end_token": "]<]end of image[>[",
        },
        {"image": "]<]image[>["}, _minimax, "MiniMaxM3VLProcessor"  # videos: not of sizes other than its grids'
    ),
    "glm4v_moe": Kind(*_OF_GLM, _of_glm("Glm4v"), "Glm4vProcessor"),
    "glm_ocr": Kind(*_OF_GLM, _of_glm("Glm46V"), "Glm46VProcessor"),
    "mistral4": Kind({"image_token": "[IMG]"}, {"image": "[IMG]"}, _mistral3, "PixtralProcessor"),
    "mistral_large4": Kind({"image_token": "[IMG]"}, {"image": "[IMG]"}, _mistral3, "PixtralProcessor"),
    "vipllava": Kind({"image_token": "<image>"}, {"image": "<image>\n"}, _llava, "LlavaProcessor"),
    "video_llama_3": Kind(
        {"image_token": "<image>", "video_token": "<video>"}, {"image": "<image>"}, _patches("VideoLlama3"),
        "VideoLlama3Processor"
    ),
    "cohere_compass": Kind(
        {
            "image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>", "": "<|VISION_START|> <|VISION_END|>",
        },
        {
            "image": "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
            "video": "<|VISION_START|><|VIDEO_PAD|><|VISION_END|>",
        }, _patches("CohereCompass", patch_size=16), "CohereCompassProcessor"
    ),
}  # fmt: skip


REFUSED: dict[str, Kind] = {
    "paligemma": Kind(
        {"image_token": "<image>", "bos_token": "<bos>"}, {"image": "<image>"}, _paligemma, "PaliGemmaProcessor"
    ),
    "phi4_multimodal": Kind(
        {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}, {"image": "<|endoftext10|>"}, _phi4,
        "Phi4MultimodalProcessor"
    ),
    "ernie4_5_vl_moe": Kind(
        {f"{kind}_{part}token": f"<|{kind}_{part}|>" for kind in ("image", "video") for part in ("", "start_", "end_")},
        {kind: f"<|{kind}_start_|><|{kind}_|><|{kind}_end_|>" for kind in ("image", "video")}, _ernie,
        "Ernie4_5_VLMoeProcessor"
    ),
    "minicpmv4_6": Kind(
        {
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
            "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
        },
        {"image": "<|image_pad|>", "video": "<|video_pad|>"}, _minicpm, "MiniCPMV4_6Processor"
    ),
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_LLAMA = {**TEXT, "model_type": "llama"}
_CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
_NARROW = ["sliding_attention", "full_attention"]
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ROTARY = "rope_parameters" if IS_5 else "rope_scaling"
_GLM = {
    "text_config": {**TEXT, "model_type": "glm4v_text", _ROTARY: {**_AXES, "partial_rotary_factor": 1.0}},
    "vision_config": {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "patch_size": 14,
        "image_size": 56,
    },
}  # fmt: skip
_MISTRAL3 = {
    "model_type": "mistral3", "vision_feature_layer": -1, "spatial_merge_size": 2,
    "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 14, "image_size": 112},
}  # fmt: skip
_LATENT = {
    **TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, Mapping[str, Any]] = {
    "pixtral": {
        "model_type": "llava", "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 14, "image_size": 112}, "text_config": _LLAMA,
    },
    "llava": {
        "model_type": "llava", "vision_config": _CLIP, "text_config": _LLAMA, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    "llava_next": {
        "model_type": "llava_next", "vision_config": _CLIP, "text_config": _LLAMA, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default", "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
    },
    "deepseek_vl": {
        "model_type": "deepseek_vl", "text_config": _LLAMA,
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "patch_size": 14},
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl", "downsample_factor": 2, "projector_hidden_size": 16,
        "vision_config": {**TOWER, "model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 64},
        "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    },
    "cohere2_vision": {
        "model_type": "cohere2_vision", "downsample_factor": 2, "alignment_intermediate_size": 32,
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
        "text_config": {
            **TEXT, "model_type": "cohere2", "head_dim": 8, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "ovis2": {
        "model_type": "ovis2", "hidden_size": 32, "vocab_size": 512, "visual_indicator_token_ids": [],
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**TOWER, "hidden_stride": 2, "vocab_size": 64, "num_visual_indicator_tokens": 5},
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {
            **TEXT, "model_type": "gemma4_text", "head_dim": 8, "sliding_window": 16, "layer_types": _NARROW,
            "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512,
        },
        "vision_config": {
            **TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4,
            "pooling_kernel_size": 3, "position_embedding_size": 128,
        },
        "audio_config": {
            "model_type": "gemma4_audio", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "subsampling_conv_channels": [128, 4], "output_proj_dims": 16,
        },
    },
    "glm4v": {"model_type": "glm4v", **_GLM},
    "glm46v": {"model_type": "glm46v", **_GLM},
    "paddleocr_vl": {
        "model_type": "paddleocr_vl", "vision_config": {**TOWER, "patch_size": 14, "image_size": 56},
        "text_config": {**TEXT, "model_type": "paddleocr_vl_text", "head_dim": 8, "rope_parameters": _AXES},
    },
    "kimi_k25": {
        "model_type": "kimi_k25", "projection_hidden_size": 16,
        "vision_config": {**TOWER, "patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8},
        "text_config": {
            **TEXT, "model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 32,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8,
            "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, "first_k_dense_replace": 1,
        },
    },
    "mistral3": {
        **_MISTRAL3, "text_config": {**TEXT, "model_type": "mistral"},
    },
    "exaone4_5": {
        "model_type": "exaone4_5",
        "vision_config": {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
            "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1],
        },
        "text_config": {**TEXT, "model_type": "exaone4", "sliding_window": 16, "layer_types": _NARROW},
    },
    "phi4_multimodal": {
        **TEXT, "model_type": "phi4_multimodal", "pad_token_id": 0,
        "vision_config": {**TOWER, "patch_size": 14, "image_size": 56, "crop_size": 56},
        "audio_config": {
            "hidden_size": 16, "num_blocks": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8,
        },
    },
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl", "projector_hidden_size": 16,
        "vision_config": {**TOWER, "model_type": "minimax_m3_vl_vision", "patch_size": 14},
        "text_config": {
            **TEXT, "model_type": "minimax_m3_vl_text", "head_dim": 8, "rotary_dim": 8, "num_local_experts": 4,
            "num_experts_per_tok": 2, "dense_intermediate_size": 32, "shared_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "full_attention"],
        },
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe", "vision_config": _GLM["vision_config"],
        "text_config": {
            **_GLM["text_config"], "model_type": "glm4v_moe_text", "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
    },
    "glm_ocr": {
        "model_type": "glm_ocr", "vision_config": _GLM["vision_config"],
        "text_config": {**_GLM["text_config"], "model_type": "glm_ocr_text"},
    },
    "mistral4": {**_MISTRAL3, "text_config": {**_LATENT, "model_type": "mistral4"}},
    "mistral_large4": {
        **_MISTRAL3, "model_type": "mistral_large4",
        "text_config": {
            **_LATENT, "model_type": "mistral_large4_text", "index_topk": 16, "index_head_dim": 8, "index_n_heads": 4,
            "head_dim": 8, "layer_types": ["indexed_attention"] * 2, "no_rope_layers": [1, 1],
            "kv_source_layers": [0, 1],
        },
    },
    "vipllava": {
        "model_type": "vipllava", "vision_config": _CLIP, "text_config": _LLAMA, "vision_feature_layers": [-1, -2],
    },
    "video_llama_3": {
        "model_type": "video_llama_3", "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**TOWER, "patch_size": 14},
    },
    "cohere_compass": {
        "model_type": "cohere_compass",
        "text_config": {
            **TEXT, "model_type": "cohere_compass_text", "sliding_window": 16, "layer_types": _NARROW,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _NARROW},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
            "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
        },
    },
    "minicpmv4_6": {
        "model_type": "minicpmv4_6", "insert_layer_id": 1,
        "vision_config": {**TOWER, "num_hidden_layers": 3, "patch_size": 14, "image_size": 112},
        "text_config": {**TEXT, "model_type": "qwen3_5_text", "head_dim": 8, "layer_types": ["full_attention"] * 2},
    },
}  # fmt: skip


def any_config(name: str, family: Any) -> dict[str, Any]:
    """The config of a tiny model whose tokens of media are those of the family of a processor."""
    ids = {f"{kind}_{end}": number for kind, number in family.token_ids.items() for end in ("token_id", "token_index")}
    return declared({**MODELS[name], **ids})


def save_any(folder: Path, name: str) -> ProcessorMixin:
    """A processor as save_pretrained writes it."""
    tiny = {**ANY, **REFUSED}[name]
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
