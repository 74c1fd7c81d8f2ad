"""Tokenizers and processors, loaded like Relax's."""

from __future__ import annotations

from typing import Any

from ...opening import load_processor
from .. import refused_names

__all__ = ["load_processor", "load_tokenizer"]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Load a tokenizer of transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **{"trust_remote_code": False, **kwargs})


__getattr__ = refused_names(
    __name__,
    {
        "process_vision_info": "Dataset and StreamingDataset read the media of prompts (multimodal_keys)",
        **dict.fromkeys(
            (
                "encode_audio_for_rollout_engine",
                "encode_image_for_rollout_engine",
                "encode_video_tensor_for_rollout_engine",
            ),
            "it belongs to the engine that generates, which stays Relax's",
        ),
    },
)
