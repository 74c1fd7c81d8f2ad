"""What a model sees of a sample's media, for people to look at. A processor's pixels -> pictures, with their tokens."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....processors.base import Processor, SeeMedia, SeenMedium
from ....types import Sample

_MAX_FRAMES = 32  # shown of a video
_GAP = 2  # pixels between frames


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenView:
    """spans: of its tokens, [first, stop) each. label: what it is and how many tokens it has. picture: a PNG of it;
    of a video its frames, row by row; of a sound its waveform.
    """

    kind: str
    spans: tuple[tuple[int, int], ...]
    label: str
    picture: bytes

    @staticmethod
    def of(seen: SeenMedium) -> SeenView:
        num_frames, height, width = seen.pixels.shape[:3]
        num_tokens = sum(stop - first for first, stop in seen.spans)
        label = f"{seen.kind} of {width} x {height}, {num_tokens:,} tokens"
        if len(seen.frames):
            numbers = ", ".join(map(str, seen.frames[:_MAX_FRAMES])) + (", …" if num_frames > _MAX_FRAMES else "")
            label = f"{seen.kind} of {num_frames} frames of {width} x {height}, {num_tokens:,} tokens: frames {numbers}"
            label += f"; sound: {seen.heard}" if seen.heard else ""
        elif seen.heard:
            label = f"{seen.kind} of {seen.heard}, {num_tokens:,} tokens"
        return SeenView(kind=seen.kind, spans=tuple(seen.spans), label=label, picture=_png(seen.pixels[:_MAX_FRAMES]))


def seen_by(processor: Processor | None, sample: Sample) -> tuple[SeenView, ...]:
    """What a processor of media makes of a sample's; none of another. Raises what the processor raises."""
    see: SeeMedia | None = getattr(processor, "see_media", None)
    return () if see is None else tuple(SeenView.of(each) for each in see(sample))


def _png(frames: NDArray[np.uint8]) -> bytes:
    """Frames uint8[N, H, W, 3] as one picture, about as wide as high."""
    from PIL import Image

    num_frames, height, width, _ = frames.shape
    columns = min(num_frames, max(1, round(math.sqrt(num_frames * height / width))))
    rows = -(-num_frames // columns)
    sheet = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = frame
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG")
    return buffer.getvalue()
