"""Small videos and sounds, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np


def video_bytes(
    container: str = "mp4",
    codec: str = "libx264",
    *,
    num_frames: int = 30,
    rate: Fraction | int = 10,
    size: tuple[int, int] = (64, 48),
    times: Sequence[int] | None = None,
    rotation: int = 0,
    sound: bool = False,
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
    pix_fmt: str = "yuv420p",
    seed: int = 0,
) -> bytes:
    """A video of moving gradients. times: of each frame, in units of 1 / rate (default: one after another)."""
    buffer = BytesIO()
    with av.open(buffer, "w", format=container, options=options or {}) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=codec_options or {})
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = 1 / Fraction(rate)
        if rotation:
            stream.set_display_rotation(rotation)
        heard: Any = output.add_stream(sound_codec(container), rate=16000, layout="mono") if sound else None
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(_picture(number + seed, *size), format="rgb24")
            frame.pts = number if times is None else times[number]
            frame.time_base = 1 / Fraction(rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if sound:
            _encode_sound(output, heard, num_samples=4000, rate=16000)
    return buffer.getvalue()


def sound_codec(container: str) -> str:
    return {"webm": "libopus", "mp3": "libmp3lame", "ogg": "libopus", "flac": "flac", "wav": "pcm_s16le"}.get(
        container, "aac"
    )


def sound_bytes(
    container: str,
    codec: str | None = None,
    *,
    num_samples: int = 10_000,
    rate: int = 16000,
    layout: str = "mono",
    options: dict[str, str] | None = None,
) -> bytes:
    """A tone."""
    buffer = BytesIO()
    with av.open(buffer, "w", format=container, options=options or {}) as output:
        stream: Any = output.add_stream(codec or sound_codec(container), rate=rate, layout=layout)
        _encode_sound(output, stream, num_samples=num_samples, rate=rate)
    return buffer.getvalue()


def _encode_sound(output: Any, stream: Any, *, num_samples: int, rate: int) -> None:
    tone = (np.sin(np.arange(num_samples) / 8) * 8000).astype(np.int16)
    num_channels = stream.layout.nb_channels
    frame = av.AudioFrame.from_ndarray(
        np.repeat(tone, num_channels).reshape(1, -1), format="s16", layout=stream.layout.name
    )
    frame.sample_rate, frame.pts = rate, 0
    output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def _picture(number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 2 + number * 7, columns * 3 - number * 5, rows + columns + number], -1).astype(np.uint8)


def decoded_frames(data: bytes) -> list[av.VideoFrame]:
    with av.open(BytesIO(data)) as file:
        return list(file.decode(video=0))


def decoded_samples(data: bytes) -> tuple[int, set[int]]:
    """Samples, per channel, and the rates that they have."""
    with av.open(BytesIO(data)) as file:
        frames = list(file.decode(audio=0))
    return sum(frame.samples for frame in frames), {frame.sample_rate for frame in frames}


def cut_from_key_frame(data: bytes, *, number: int = 1, options: dict[str, str] | None = None) -> bytes:
    """What is left of a video when its packets are copied from its key frame `number` on, without encoding."""
    buffer = BytesIO()
    with av.open(BytesIO(data)) as source, av.open(buffer, "w", format="mp4", options=options or {}) as output:
        stream = source.streams.video[0]
        copied = output.add_stream_from_template(stream)
        num_keys = 0
        for packet in source.demux(stream):
            num_keys += packet.is_keyframe
            if num_keys > number and packet.size:
                packet.stream = copied
                output.mux(packet)
    return buffer.getvalue()
