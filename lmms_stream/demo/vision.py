"""The vision demo: charts, pictures and videos with questions about them, and a tiny Qwen2.5-VL to read them."""

from __future__ import annotations

from pathlib import Path

from .material import Material
from .pictures import write_charts, write_pictures, write_videos
from .tiny_vlm import model_fields, save_processor

PACKING_LENGTH = 512
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
        model=model_fields(processor, positions=PACKING_LENGTH),
        packing_length=PACKING_LENGTH,
        about=f"corpus: {NUM_CHARTS} charts, {num_pictures} pictures of installed packages, {NUM_VIDEOS} videos",
    )
