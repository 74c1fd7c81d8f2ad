"""Models that have no file among the families: a pack gives what its samples give one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.towers import family_of

from tests.processors.any_vlm import ANY, save_any
from tests.processors.tile_vlm import TEXT
from tests.processors.tiny_vlm import picture, stored
from tests.versions import IS_5

TOWER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_LLAMA = {**TEXT, "model_type": "llama"}
_CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
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
}  # fmt: skip
# Until 5.0 the processor of LFM2-VL reads several images of a sample otherwise than each alone, and ours refuses them.
NAMES = [name for name in MODELS if hasattr(transformers, ANY[name].processor) and (IS_5 or name != "lfm2_vl")]


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_of_any_model_gives_what_its_samples_give_one_by_one(name: str, tmp_path: Path) -> None:
    save_any(tmp_path, name)
    processor = MultimodalProcessor.from_pretrained(str(tmp_path))
    token: int = processor.family.token_ids["image"]  # type: ignore[attr-defined]
    config = {**MODELS[name], "image_token_id": token, "image_token_index": token}
    model = ModelConfig(config=config, attention="sdpa").build()
    if model.config.model_type not in processor.family.model_types:
        with pytest.raises(ConfigError, match="take the model's own processor"):
            family_of([processor], model.config)
        model.config.save_pretrained(tmp_path)  # a folder of a model says its type
        processor = MultimodalProcessor.from_pretrained(str(tmp_path))
    packed = PackedModel(model, family_of([processor], model.config)).eval()
    prove_packing(packed, device=torch.device("cpu"))
    contents: list[list[Any]] = [
        [("image", picture(60, 40)), "what"], ["no image"], [("image", picture(100, 90)), ("image", picture(30, 80))],
    ]  # fmt: skip
    samples = [processor.process(stored(("user", each), ("assistant", "it is so"))) for each in contents]
    pack = collate(samples, range(3))
    together = packed(pack).tokens
    alone = torch.cat([packed(collate([sample], [0])).tokens for sample in samples])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    other = processor.process(stored(("user", [("image", picture(60, 40, seed=5)), "what"]), ("assistant", "it is so")))
    assert not torch.allclose(packed(collate([other], [0])).tokens, packed(collate([samples[0]], [0])).tokens)
