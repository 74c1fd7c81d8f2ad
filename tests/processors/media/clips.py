"""Small videos and sounds, made on the spot."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray


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
    pixel_aspect: Fraction | None = None,
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
        if pixel_aspect:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
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


def _picture(number: int, width: int, height: int) -> NDArray[np.uint8]:
    rows, columns = np.mgrid[:height, :width]
    channels = [rows * 2 + number * 7, columns * 3 - number * 5, rows + columns + number]
    picture: NDArray[np.uint8] = np.stack(channels, axis=-1).astype(np.uint8)
    return picture


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


def with_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 with another display matrix: a, b, c, d of x' = a x + c y, y' = b x + d y, in its track's header."""
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(b"tkhd") + 44
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


def moov_first(data: bytes) -> bytes:
    """An MP4 with its header in front, as for the web: frames lie further behind by its size."""
    at = data.index(b"moov") - 4
    size = int.from_bytes(data[at : at + 4], "big")
    moov, start = bytearray(data[at : at + size]), data.index(b"mdat") - 4
    free = data.index(b"free") - 4
    offsets = moov.index(b"stco") + 8
    for number in range(int.from_bytes(moov[offsets : offsets + 4], "big")):
        at_offset = offsets + 4 + 4 * number
        moved = int.from_bytes(moov[at_offset : at_offset + 4], "big") + size
        moov[at_offset : at_offset + 4] = moved.to_bytes(4, "big")
    assert free < start < at
    return data[:free] + bytes(moov) + data[free:at]


def empty_moov() -> bytes:
    """The beginning of a video in fragments, before the first of them."""
    data = video_bytes(options={"movflags": "frag_keyframe+empty_moov"})
    return data[: data.index(b"moof") - 4]


def cut(container: str, codec: str) -> bytes:
    """The first two thirds of a video."""
    if container == "fragments":
        data = video_bytes(codec_options={"g": "5"}, options={"movflags": "frag_keyframe+empty_moov"})
    else:
        data = video_bytes(container, codec)
    return data[: len(data) * 2 // 3]


def overstated(data: bytes) -> bytes:
    """A FLAC file that says that it has another sample."""
    return data[:25] + bytes([data[25] + 1]) + data[26:]


def flipped(data: bytes, *, share: float = 0.5) -> bytes:
    """Other bytes in the midst of the data, or at another share of them."""
    at = int(len(data) * share)
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 24]) + data[at + 24 :]


def without_last_picture(data: bytes) -> bytes:
    """An MP4 of HEVC whose last packet holds filler data alone (ITU-T H.265, 7.3.2.8)."""
    with av.open(BytesIO(data)) as file:
        last: Any = list(file.streams.video[0].index_entries)[-1]
        at, size = int(last.pos), int(last.size)
    filler = (size - 4).to_bytes(4, "big") + b"\x4c\x01" + b"\xff" * (size - 7) + b"\x80"
    return data[:at] + filler + data[at + size :]
