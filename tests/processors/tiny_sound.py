"""Tiny processors and models that read sound, made without a download, as their users have them in folders."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from transformers import (
    ProcessorMixin,
    Qwen2_5OmniProcessor,
    Qwen2AudioProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from tests.processors.tiny_vlm import save_tokenizer

SOUND_FAMILIES = ("qwen2_audio", "qwen2_5_omni", "qwen3_omni")
NUM_BINS = 16
SECONDS = 3  # of the longest clip that the processors read
# Names of tokens: of image, video, sound, and what stands around pictures and sounds.
_OLDER = (
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|AUDIO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
)
_TOKENS = {
    "qwen2_audio": _OLDER,
    "qwen2_5_omni": _OLDER,
    "qwen3_omni": (
        "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_start|>",
        "<|audio_end|>",
    ),
}  # fmt: skip
_NAMES = (
    "image_token", "video_token", "audio_token", "vision_bos_token", "vision_eos_token", "audio_bos_token",
    "audio_eos_token",
)  # fmt: skip


def tokens_of(family: str) -> dict[str, str]:
    return dict(zip(_NAMES, _TOKENS[family], strict=True))


def template_of(family: str) -> str:
    """A chat template that writes placeholders as the family's own does, with what the assistant says marked."""
    tokens = tokens_of(family)
    start, end, bos, eos = (tokens[name] for name in _NAMES[3:])
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\n' }}{% set said %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}"
        "{% if content['type'] == 'audio' %}" + bos + tokens["audio_token"] + eos
        + "{% elif content['type'] == 'image' %}" + start + tokens["image_token"] + end
        + "{% elif content['type'] == 'video' %}" + start + tokens["video_token"] + end
        + "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{% endset %}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ said }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ said }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    )  # fmt: skip


def save_sound_processor(
    folder: Path, family: str, *, texts: tuple[str, ...] = (), num_bins: int = NUM_BINS, seconds: int = SECONDS
) -> ProcessorMixin:
    """A processor of a family as users have it: clips of at most so many seconds, images of at most 64 tokens."""
    tokens = tokens_of(family)
    save_tokenizer(folder, **({"texts": texts} if texts else {}))
    tokenizer = Qwen2TokenizerFast(
        str(folder / "vocab.json"), str(folder / "merges.txt"),
        additional_special_tokens=["<|im_start|>", "<|im_end|>", *tokens.values()], extra_special_tokens=tokens,
    )  # fmt: skip
    sounds = WhisperFeatureExtractor(feature_size=num_bins, chunk_length=seconds)
    template = template_of(family)
    if family == "qwen2_audio":
        made: Any = Qwen2AudioProcessor(sounds, tokenizer, chat_template=template)
        made.save_pretrained(folder)
        return made
    side = 28 if family == "qwen2_5_omni" else 32
    images = Qwen2VLImageProcessor(min_pixels=4 * side**2, max_pixels=64 * side**2, patch_size=side // 2)
    videos = Qwen2VLVideoProcessor(patch_size=side // 2)
    kind: Any = Qwen2_5OmniProcessor if family == "qwen2_5_omni" else Qwen3OmniMoeProcessor
    made = kind(images, videos, sounds, tokenizer, chat_template=template)
    made.save_pretrained(folder)
    # The released folders hold the settings of images and sounds in one file; save_pretrained writes the last alone.
    both = {**images.to_dict(), **sounds.to_dict(), "processor_class": kind.__name__}
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    return made


def token_ids(folder: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    ids: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return ids


def sound_config(
    family: str, folder: Path, *, hidden_size: int = 32, num_layers: int = 2, seconds: int = SECONDS
) -> dict[str, Any]:
    """What ModelConfig takes for a tiny model of the processor in a folder."""
    ids, tokens = token_ids(folder), tokens_of(family)
    heads = 2
    text: dict[str, Any] = {
        "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 512,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "initializer_range": 0.08,
    }  # fmt: skip
    if family == "qwen2_audio":
        audio = {
            "num_mel_bins": NUM_BINS, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32, "max_source_positions": seconds * 50, "initializer_range": 0.08,
        }  # fmt: skip
        return {
            "model_type": "qwen2_audio", "audio_token_index": ids[tokens["audio_token"]], "audio_config": audio,
            "text_config": {**text, "model_type": "qwen2"},
        }  # fmt: skip
    third = hidden_size // heads // 8
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [2 * third, third, third]}
    numbers = {
        "image_token_id": ids[tokens["image_token"]], "video_token_id": ids[tokens["video_token"]],
        "audio_token_id": ids[tokens["audio_token"]], "vision_start_token_id": ids[tokens["vision_bos_token"]],
        "vision_end_token_id": ids[tokens["vision_eos_token"]], "audio_start_token_id": ids[tokens["audio_bos_token"]],
        "audio_end_token_id": ids[tokens["audio_eos_token"]],
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": heads,
        "in_channels": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    audio = {
        "num_mel_bins": NUM_BINS, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "output_dim": hidden_size, "max_source_positions": 1500, "initializer_range": 0.3,
    }  # fmt: skip
    if family == "qwen2_5_omni":
        indexes = {name.replace("_token_id", "_token_index"): value for name, value in numbers.items()}
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "out_hidden_size": hidden_size}
        return {
            "model_type": "qwen2_5_omni_thinker", "text_config": text, "vision_config": vision, **numbers,
            "audio_config": {**audio, "n_window": 20}, "position_id_per_seconds": 25, "initializer_range": 0.08,
            **{name: indexes[name] for name in ("image_token_index", "video_token_index", "audio_token_index")},
        }  # fmt: skip
    vision |= {
        "patch_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
        "out_hidden_size": hidden_size,
    }
    text |= {
        "head_dim": hidden_size // heads, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "router_aux_loss_coef": 0.0,
    }  # fmt: skip
    return {
        "model_type": "qwen3_omni_moe_thinker", "text_config": text, "vision_config": vision, **numbers,
        "audio_config": {
            **audio, "n_window": 50, "n_window_infer": 400, "downsample_hidden_size": 4, "conv_chunksize": 100,
        },
        "position_id_per_seconds": 13, "initializer_range": 0.08,
    }  # fmt: skip


def tone(
    samples: int, *, rate: int = 16000, hertz: float = 440.0, channels: int = 1, seed: int = 0
) -> NDArray[np.float32]:
    """A tone with some noise on it: float32[samples, channels]."""
    noise = np.random.default_rng(seed).normal(0, 0.02, (samples, channels))
    wave = 0.4 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)
    made: NDArray[np.float32] = (wave[:, None] + noise).astype(np.float32)
    return made


def clip(
    samples: int, *, rate: int = 16000, format: str = "WAV", channels: int = 1, hertz: float = 440.0, seed: int = 0
) -> bytes:
    """The bytes of such a tone as a file."""
    buffer = BytesIO()
    subtype = {"WAV": "FLOAT"}.get(format)
    soundfile.write(
        buffer,
        tone(samples, rate=rate, hertz=hertz, channels=channels, seed=seed),
        rate,
        format=format,
        subtype=subtype,
    )
    return buffer.getvalue()


def sounding_film(*, num_frames: int, fps: int, samples: int, rate: int = 16000) -> bytes:
    """An MP4 of moving waves with a tone; 0 samples: without."""
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=fps)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 64, "yuv420p"
        sounds = container.add_stream("aac", rate=rate) if samples else None
        y, x = np.mgrid[0:64, 0:64]
        for number in range(num_frames):
            pixels = (127 + 100 * np.sin((x[..., None] + y[..., None] * (0.2, 0.7, -0.5) + 9 * number) / 30)).astype(
                np.uint8
            )
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(pictures.encode())
        if sounds is not None:
            frame = av.AudioFrame.from_ndarray(tone(samples, rate=rate).T.copy(), format="fltp", layout="mono")
            frame.sample_rate = rate
            for piece in [
                *av.AudioResampler(format="fltp", layout="mono", rate=rate, frame_size=1024).resample(frame),
                None,
            ]:
                container.mux(sounds.encode(piece))
    return buffer.getvalue()
