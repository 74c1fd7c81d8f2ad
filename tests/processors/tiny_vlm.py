"""Tiny processors and models of the Qwen-VL families, made without a download, as their users have them in folders."""

from __future__ import annotations

import json
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
from lmms_stream.processors.media.facts import facts_of
from lmms_stream.versions.transformers import by_torchvision
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    PretrainedConfig,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# The families' own, with their tools in short, and with what the assistant says marked.
MARKED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>{{ '\n' }}{% endif %}"
    "<|im_start|>{{ message['role'] }}{{ '\n' }}{% set said %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endset %}{% if message['role'] == 'assistant' %}{% generation %}{{ said }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ said }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
_TEXTS = (
    "What do you see? A chart of three bars: 12.5, 30 and 7 seconds. The largest is the second, <0.5 seconds>.",
    "The answer is 42, since 6 times 7 is 42; é, ü and ß are letters. No (yes) [maybe]: one picture, two videos.",
)


def save_tokenizer(folder: Path, *, texts: tuple[str, ...] = _TEXTS) -> Qwen2TokenizerFast:
    """A byte-level BPE tokenizer of the family's class, with its special tokens."""
    files = save_bpe(folder, texts)
    return Qwen2TokenizerFast(*files, additional_special_tokens=list(SPECIAL[1:]))


def save_bpe(folder: Path, texts: tuple[str, ...] = _TEXTS) -> tuple[str, str]:
    """Byte-level BPE of texts: the paths of its vocabulary and merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    folder.mkdir(parents=True, exist_ok=True)
    bpe.model.save(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def save_processor(
    folder: Path, family: str = "qwen2_5_vl", *, template: str = MARKED, texts: tuple[str, ...] = _TEXTS
) -> ProcessorMixin:
    """A processor of a family as save_pretrained writes it: images of at most 64 tokens, frames of at most 16."""
    tokenizer = save_tokenizer(folder, texts=texts)
    side = 32 if family == "qwen3_vl" else 28
    size = {"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2}
    if family == "qwen3_vl":
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        images = by_torchvision("Qwen2VLImageProcessor")(size=dict(size), patch_size=16, **half)
        videos: Any = Qwen3VLVideoProcessor(size={"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2})
        made: ProcessorMixin = Qwen3VLProcessor(images, tokenizer, videos, chat_template=template)
    else:
        images = by_torchvision("Qwen2VLImageProcessor")(size=dict(size))
        videos = Qwen2VLVideoProcessor(size={"shortest_edge": 4 * side**2, "longest_edge": 16 * side**2})
        kind = Qwen2VLProcessor if family == "qwen2_vl" else Qwen2_5_VLProcessor
        made = kind(images, tokenizer, videos, chat_template=template)
    made.save_pretrained(folder)
    return made


def token_ids(folder: Path) -> dict[str, int]:
    """The tokens of the tokenizer in a folder, with their ids."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    return dict(vocabulary["model"]["vocab"]) | {each["content"]: each["id"] for each in vocabulary["added_tokens"]}


def change_settings(folder: Path, kind: str, **settings: Any) -> None:
    """Change what a processor's folder says of its image or video processor, in whichever file it is said."""
    name = "preprocessor_config.json" if kind == "image" else f"{kind}_preprocessor_config.json"
    file, whole = folder / name, folder / "processor_config.json"
    if file.exists():
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        return
    said = json.loads(whole.read_text())
    said[f"{kind}_processor"] |= settings
    whole.write_text(json.dumps(said))


def tiny_config(family: str, folder: Path, *, hidden_size: int = 32, num_layers: int = 2) -> PretrainedConfig:
    """The config of a tiny model for the processor in a folder, with the ids and sizes of that."""
    ids, heads = token_ids(folder), 2
    third = hidden_size // heads // 8
    text = {
        "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 512,
        "max_position_embeddings": 4096, "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2 * third, third, third]},
    }  # fmt: skip
    tokens = {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip
    tower: dict[str, Any] = {"depth": 2, "num_heads": heads, "in_channels": 3}
    if family == "qwen2_vl":
        tower |= {"embed_dim": 32, "hidden_size": hidden_size, "mlp_ratio": 2, "patch_size": 14}
        return Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **tokens)
    tower |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden_size}
    if family == "qwen2_5_vl":
        tower |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **tokens)
    tower |= {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text |= {"head_dim": hidden_size // heads}
    return Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **tokens)


def qwen3_5_fields(folder: Path) -> dict[str, Any]:
    """The fields of a tiny Qwen3.5 for a processor of Qwen3-VL in a folder; transformers has it since 5.0."""
    theirs = tiny_config("qwen3_vl", folder).to_dict()
    text = {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
                            "mrope_interleaved": True, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    tower = {key: value for key, value in theirs["vision_config"].items() if key not in ("model_type", "dtype")}
    tokens = {key: value for key, value in theirs.items() if key.endswith("_token_id")}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": tower, **tokens}


def picture(width: int, height: int, *, seed: int = 0, format: str = "PNG", orientation: int = 1) -> bytes:
    """A smooth picture of these stored sides with noise on it, to be turned as EXIF's orientation says."""
    y, x = np.mgrid[0:height, 0:width]
    random = np.random.default_rng(seed)
    waves = [np.sin((x * a + y * b) / 40) for a, b in random.uniform(-1, 1, (3, 2))]
    pixels = 127 + 90 * np.stack(waves, -1) + random.normal(0, 8, (height, width, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = BytesIO()
    image.save(buffer, format=format, exif=exif)
    return buffer.getvalue()


def film(width: int, height: int, *, num_frames: int, fps: Fraction | int = 10, seed: int = 0) -> bytes:
    """An MP4 of moving waves, with a key frame every 12 frames."""
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"g": "12"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        y, x = np.mgrid[0:height, 0:width]
        for number in range(num_frames):
            waves = [np.sin((x + y * c + 9 * number + seed) / 30) for c in (0.2, 0.7, -0.5)]
            pixels = (127 + 100 * np.stack(waves, -1)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def stored(*turns: tuple[str, Any], tools: list[Any] | None = None, with_facts: bool = True) -> dict[str, Any]:
    """A sample as it lies in shards: (role, content) each, content a text or a list of texts and (kind, bytes)."""
    media, messages = b"", []
    for role, content in turns:
        parts: Any = content
        if not isinstance(content, str):
            parts = []
            for each in content:
                if isinstance(each, str):
                    parts.append({"type": "text", "text": each})
                    continue
                kind, data = each
                facts = facts_of(data, kind)._asdict() if with_facts else {}
                parts.append({"type": kind, "mime": "", "span": [len(media), len(data)], **facts})
                media += data
        messages.append({"role": role, "content": parts})
    return {"messages": json.dumps({"messages": messages, "tools": tools} if tools else messages), "media": media}
