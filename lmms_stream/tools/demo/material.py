"""What a demo trains on, and what: the part of it that is of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .corpus import VOCABULARY, build_corpus, train_tokenizer
from .pictures import write_charts, write_pictures, write_videos
from .tiny_vlm import model_fields, save_processor


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """sources: files to be converted. processor: its section of a YAML file. model: fields of a transformers config.

    about: what the sources hold, in a line.
    """

    sources: Sequence[Path]
    processor: Mapping[str, Any]
    model: Mapping[str, Any]
    packing_length: int
    about: str


# The text demo: a chat corpus of the standard library, a tokenizer trained on it, a small Llama.

PACKING_LENGTH = 2048


def text_material(output: Path) -> Material:
    """Made below `output`, in the folders corpus/ and tokenizer/."""
    corpus = build_corpus(output / "corpus")
    tokenizer = train_tokenizer(corpus.texts, output / "tokenizer")
    model = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": PACKING_LENGTH,
        "tie_word_embeddings": False,
    }
    return Material(
        sources=[corpus.functions, corpus.classes],
        processor={"type": "chat", "tokenizer": str(tokenizer)},
        model=model,
        packing_length=PACKING_LENGTH,
        about=f"corpus: {corpus.num_functions:,} functions, {corpus.num_classes:,} classes, as chats",
    )


# The vision demo: charts, pictures and videos with questions about them, and a tiny Qwen2.5-VL to read them.

PACKING_LENGTH_OF_VISION = 512
NUM_CHARTS = 420
NUM_VIDEOS = 40


def vision_material(output: Path) -> Material:
    """Made below `output`, in the folders corpus/ and processor/."""
    corpus = output / "corpus"
    charts = write_charts(corpus / "charts", num_charts=NUM_CHARTS)
    pictures, num_pictures = write_pictures(corpus / "pictures")
    videos = write_videos(corpus / "videos", num_videos=NUM_VIDEOS)
    sources = [charts, pictures, videos]
    processor = save_processor(output / "processor", texts=[path.read_text(encoding="utf-8") for path in sources])
    return Material(
        sources=sources,
        processor={"type": "vision", "path": str(processor), "image_max_pixels": 128 * 28 * 28, "fps": 2},
        model=model_fields(processor, positions=PACKING_LENGTH_OF_VISION),
        packing_length=PACKING_LENGTH_OF_VISION,
        about=f"corpus: {NUM_CHARTS} charts, {num_pictures} pictures of installed packages, {NUM_VIDEOS} videos",
    )
