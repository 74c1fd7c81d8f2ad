"""Chosen frames of videos: bit for bit those that decoding all of it gives."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.media import video
from lmms_stream.processors.media.pixels import resize
from lmms_stream.processors.media.video import read_frames
from numpy.typing import NDArray

SIZE = (64, 48)


def film(
    container: str,
    codec: str,
    *,
    num_frames: int = 60,
    times: Sequence[int] | None = None,
    rotation: int = 0,
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
) -> bytes:
    """Noise that moves, so that frames refer to each other. times: of each frame, in units of 1/100 s."""
    buffer = BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0] + num_frames, 3), np.uint8)
    with av.open(buffer, "w", format=container, options=options or {}) as output:
        stream: Any = output.add_stream(codec, rate=Fraction(25), options=codec_options or {})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = Fraction(1, 100 if times else 25)
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = np.ascontiguousarray(noise[:, number : number + SIZE[0]])
            pixels[:8, :8] = number * 4
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = times[number] if times else number
            frame.time_base = stream.codec_context.time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def cut_at(data: bytes, first_s: float) -> bytes:
    """An MP4 of the packets from the key frame before a time on, with an edit list that begins at the time."""
    buffer = BytesIO()
    with av.open(BytesIO(data)) as source, av.open(buffer, "w", format="mp4") as output:
        stream = source.streams.video[0]
        copied = output.add_stream_from_template(stream)
        start = int(first_s / stream.time_base)
        source.seek(start, stream=stream)
        for packet in source.demux(stream):
            if packet.size:
                packet.stream = copied
                packet.pts -= start
                packet.dts -= start
                output.mux(packet)
    return buffer.getvalue()


class Kind(NamedTuple):
    container: str
    codec: str
    options: Mapping[str, str] = MappingProxyType({})
    times: str = ""


X264 = {"g": "12", "keyint_min": "12", "bf": "3"}
KINDS = {
    "H.264": Kind("mp4", "libx264", X264),
    "H.264, B frames as references": Kind("mp4", "libx264", {**X264, "x264-params": "b-pyramid=normal:b-adapt=0"}),
    "H.264, open groups": Kind("mp4", "libx264", {**X264, "x264-params": "open-gop=1:b-adapt=0"}),
    "H.264, refreshed bit by bit": Kind("mp4", "libx264", {"g": "12", "x264-params": "intra-refresh=1"}),
    "H.264, one key frame": Kind("mp4", "libx264", {"g": "999", "bf": "2"}),
    "H.264, variable rate": Kind("mp4", "libx264", X264, "variable"),
    "H.264 in Matroska": Kind("matroska", "libx264", X264),
    "H.264 in Matroska, variable rate": Kind("matroska", "libx264", X264, "variable"),
    "H.264 in AVI": Kind("avi", "libx264", X264),
    "H.264 in QuickTime": Kind("mov", "libx264", X264),
    "H.265": Kind("mp4", "libx265", {"x265-params": "keyint=12:bframes=3:log-level=none:b-pyramid=1"}),
    "H.265, open groups": Kind("mp4", "libx265", {"x265-params": "keyint=12:bframes=3:log-level=none:open-gop=1"}),
    "MPEG-4": Kind("mp4", "mpeg4", {"g": "12", "bf": "2"}),
    "MPEG-4 in AVI": Kind("avi", "mpeg4", {"g": "12", "bf": "2"}),
    "MPEG-4 in AVI without B frames": Kind("avi", "mpeg4", {"g": "12"}),
    "H.264 in MPEG-TS": Kind("mpegts", "libx264", X264),
    "MPEG-2 in a program stream": Kind("vob", "mpeg2video", {"g": "12", "bf": "2"}),
    "H.264 in Flash": Kind("flv", "libx264", X264),
    "Motion JPEG": Kind("avi", "mjpeg"),
    "VP8": Kind("webm", "libvpx", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good"}),
    "VP9": Kind("webm", "libvpx-vp9", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good"}),
    "AV1": Kind("mp4", "libsvtav1", {"g": "12", "preset": "12", "svtav1-params": "lp=1"}),
}  # fmt: skip


@cache
def of_kind(name: str) -> bytes:
    kind = KINDS[name]
    times = None
    if kind.times:
        times = np.cumsum(np.random.default_rng(1).integers(1, 9, 60)).tolist()
    return film(kind.container, kind.codec, times=times, codec_options=dict(kind.options))


def all_frames(data: bytes) -> list[NDArray[np.uint8]]:
    with av.open(BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def some(num_frames: int) -> list[list[int]]:
    every = [np.linspace(0, num_frames - 1, count).round().astype(int).tolist() for count in (1, 2, 5, 16)]
    return [
        *every,
        [0],
        [num_frames - 1],
        [13, 14],
        [30, 2, 2, 59, 31],
        [n for n in range(num_frames) if n % 12 in (0, 10, 11)],
        list(range(num_frames)),
    ]


@pytest.mark.parametrize("name", KINDS)
def test_chosen_frames_have_the_bits_of_those_of_a_video_decoded_whole(name: str) -> None:
    data = of_kind(name)
    frames = all_frames(data)
    assert len(frames) == 60
    for indices in some(60):
        chosen = read_frames(data, indices, num_frames=60, width=SIZE[0], height=SIZE[1])
        assert chosen.shape == (len(indices), SIZE[1], SIZE[0], 3)
        for index, frame in zip(indices, chosen, strict=True):
            assert np.array_equal(frame, frames[index]), (indices, index)


COUNTED = {"H.264, refreshed bit by bit", "H.264 in AVI"}  # of these packets do not tell the frames


@pytest.mark.parametrize("name", KINDS)
def test_only_where_packets_do_not_tell_the_frames_all_before_them_are_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []
    actual = video._opened
    monkeypatch.setattr(video, "_opened", lambda data: opened.append(data) or actual(data))  # type: ignore[func-returns-value]
    for indices in some(60):
        opened.clear()
        read_frames(of_kind(name), indices, num_frames=60, width=28, height=28)
        assert len(opened) == 2 or name in COUNTED, indices


def test_frames_are_resized_as_images_are() -> None:
    data = of_kind("H.264")
    frames = all_frames(data)
    chosen = read_frames(data, [5, 40], num_frames=60, width=28, height=56)
    assert np.array_equal(chosen, resize(np.stack([frames[5], frames[40]]), width=28, height=56))


@pytest.mark.parametrize("first_s", [0.2, 0.52, 1.0, 1.36])
@pytest.mark.parametrize("name", ["H.264", "H.264, open groups", "H.265"])
def test_frames_before_the_start_of_an_edit_list_are_not_counted(name: str, first_s: float) -> None:
    data = cut_at(of_kind(name), first_s)
    frames = all_frames(data)
    with av.open(BytesIO(data)) as file:
        assert sum(packet.size > 0 for packet in file.demux(video=0)) > len(frames) > 10
    for indices in ([0], [0, len(frames) - 1], [7, 3, 9], list(range(len(frames)))):
        chosen = read_frames(data, indices, num_frames=len(frames), width=SIZE[0], height=SIZE[1])
        for index, frame in zip(indices, chosen, strict=True):
            assert np.array_equal(frame, frames[index])


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_frames_are_turned_as_they_are_shown(rotation: int) -> None:
    data = film("mp4", "libx264", num_frames=30, rotation=rotation, codec_options=X264)
    frames = all_frames(data)
    width, height = SIZE if rotation == 180 else SIZE[::-1]
    for index, frame in zip(
        (3, 25), read_frames(data, [3, 25], num_frames=30, width=width, height=height), strict=True
    ):
        assert np.array_equal(frame, np.rot90(frames[index], rotation // 90))


@pytest.mark.parametrize(
    ("name", "indices", "most"),
    [("H.264", [12], 4), ("H.264", [0, 59], 16), ("H.264", [20, 21, 22], 14), ("VP9", [50], 4), ("H.264", [], 0)],
)
def test_only_groups_of_pictures_with_chosen_frames_are_decoded(
    name: str, indices: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    shown = video._decoded_ranges
    monkeypatch.setattr(video, "_decoded_ranges", lambda *given: (decoded.append(f) or f for f in shown(*given)))  # type: ignore[func-returns-value]
    read_frames(of_kind(name), indices, num_frames=60, width=28, height=28)
    assert len(indices) <= len(decoded) <= most


def test_a_frame_that_the_video_has_not_is_an_error() -> None:
    data = of_kind("H.264")
    for index in (-1, 60):
        with pytest.raises(DataError, match=rf"the video has 60 frames, and has no frame {index}: choose from 0"):
            read_frames(data, [3, index], num_frames=60, width=28, height=28)
    for name in ("H.264", "VP9", "MPEG-4 in AVI"):
        with pytest.raises(
            DataError,
            match=r"the video has 99 frames by its facts, and decoding gives no frame 80: .* convert the dataset",
        ):
            read_frames(of_kind(name), [3, 80, 90], num_frames=99, width=28, height=28)


def test_facts_that_are_too_low_still_give_the_frames() -> None:
    data = of_kind("H.264")
    assert np.array_equal(
        read_frames(data, [7, 30], num_frames=40, width=28, height=28),
        read_frames(data, [7, 30], num_frames=60, width=28, height=28),
    )


@pytest.mark.parametrize("name", ["H.264", "H.264 in Matroska", "VP9", "MPEG-4 in AVI"])
def test_a_broken_video_is_an_error(name: str) -> None:
    data = of_kind(name)
    for broken in (data[: len(data) // 2], data[:200], data[:40]):
        with pytest.raises(DataError, match=r"the video (cannot be decoded|has 60 frames by its facts).* repair"):
            read_frames(broken, [0, 30, 59], num_frames=60, width=28, height=28)


def test_bytes_that_are_no_video_are_an_error() -> None:
    with pytest.raises(DataError, match="its first bytes b'not a vi' are of no known format: expected"):
        read_frames(b"not a video", [0], num_frames=1, width=28, height=28)


def test_a_sound_is_no_video() -> None:
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    with pytest.raises(DataError, match="it has no video in a known codec: remove it"):
        read_frames(buffer.getvalue(), [0], num_frames=1, width=28, height=28)


def test_without_pyav_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_av(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return imported(name, *arguments, **keywords)

    data = of_kind("H.264")
    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(ConfigError, match=r'PyAV, which is missing: pip install "lmms-stream\[media\]"'):
        read_frames(data, [0], num_frames=60, width=28, height=28)
