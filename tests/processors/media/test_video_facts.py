"""Facts about videos are what decoding gives, for every format that a header is trusted of, and for all others."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from io import BytesIO

import av
import pytest
from lmms_stream.errors import DataError
from lmms_stream.processors.media.facts import VideoFacts, checked_facts, facts_of

from .clips import cut_from_key_frame, decoded_frames, moov_first, video_bytes

QUIET = {"x265-params": "log-level=none"}
UNEDITED = {"use_editlist": "0"}
NEGATIVE = {"avoid_negative_ts": "disabled"}  # frames before 0 are left out by an edit list
OPEN_H264 = {"g": "8", "x264-params": "open-gop=1:scenecut=0:bframes=3:b-adapt=0"}
OPEN_HEVC = {"x265-params": "keyint=8:min-keyint=8:open-gop=1:scenecut=0:bframes=3:b-adapt=0:log-level=none"}
SLOWING = [n * n // 3 + n for n in range(30)]
DROPPING = [0, 1, 2, 5, 6, 7, 8, 12, *range(13, 35)]
VIDEOS: dict[str, tuple[Callable[[], bytes], float | None]] = {  # how it is made, and its rate (None: by its times)
    "mp4-h264": (lambda: video_bytes(), 10),
    "mp4-h264-without-b-frames": (lambda: video_bytes(codec_options={"bf": "0"}), 10),
    "mp4-h264-interlaced": (lambda: video_bytes(codec_options={"x264-params": "interlaced=1"}), 10),
    "mp4-mpeg4": (lambda: video_bytes(codec="mpeg4"), 10),
    "mp4-mpeg4-b-frames": (lambda: video_bytes(codec="mpeg4", codec_options={"bf": "2"}), 10),
    "mp4-hevc": (lambda: video_bytes(codec="libx265", codec_options=QUIET), 10),
    "mp4-vp9": (lambda: video_bytes(codec="libvpx-vp9"), 10),
    "mp4-with-sound": (lambda: video_bytes(sound=True), 10),
    "mp4-29.97": (lambda: video_bytes(rate=Fraction(30000, 1001)), 30000 / 1001),
    "mp4-one-frame": (lambda: video_bytes(num_frames=1), 10),
    "mp4-two-frames": (lambda: video_bytes(num_frames=2), 10),
    "mp4-in-fragments": (lambda: video_bytes(codec_options={"g": "5"}, options={"movflags": "frag_keyframe"}), 10),
    "mp4-slowing": (lambda: video_bytes(times=SLOWING), None),
    "mp4-beginning-late": (lambda: video_bytes(times=[n + 20 for n in range(30)]), 10),
    "mp4-edit-list": (lambda: video_bytes(times=[n - 10 for n in range(30)], options=NEGATIVE), 10),
    "mp4-edit-list-slowing": (lambda: video_bytes(times=[n - 10 for n in SLOWING], options=NEGATIVE), None),
    "mp4-cut-h264": (lambda: cut_from_key_frame(video_bytes(codec_options=OPEN_H264)), None),
    "mp4-cut-hevc": (lambda: cut_from_key_frame(video_bytes(codec="libx265", codec_options=OPEN_HEVC)), None),
    "mp4-cut-h264-whole": (lambda: cut_from_key_frame(video_bytes(codec_options=OPEN_H264), options=UNEDITED), None),
    "mp4-cut-hevc-whole": (
        lambda: cut_from_key_frame(video_bytes(codec="libx265", codec_options=OPEN_HEVC), options=UNEDITED),
        None,
    ),
    "mov": (lambda: video_bytes("mov"), 10),
    "mov-prores": (lambda: video_bytes("mov", "prores", pix_fmt="yuv422p10le"), 10),
    "mov-turned-90": (lambda: video_bytes("mov", rotation=90), 10),
    "mov-turned-180": (lambda: video_bytes("mov", rotation=180), 10),
    "mov-turned-270": (lambda: video_bytes("mov", rotation=270), 10),
    "avi-mpeg4": (lambda: video_bytes("avi", "mpeg4"), 10),
    "avi-mpeg4-b-frames": (lambda: video_bytes("avi", "mpeg4", codec_options={"bf": "2"}), 10),
    "avi-mpeg4-dropping": (lambda: video_bytes("avi", "mpeg4", times=DROPPING), 10 * 30 / 35),
    "avi-mjpeg": (lambda: video_bytes("avi", "mjpeg", pix_fmt="yuvj420p"), 10),
    "avi-h264": (lambda: video_bytes("avi"), 10),
    "mkv-h264": (lambda: video_bytes("matroska"), 10),
    "mkv-29.97": (lambda: video_bytes("matroska", rate=Fraction(30000, 1001)), 30000 / 1001),
    "mkv-slowing": (lambda: video_bytes("matroska", times=SLOWING), None),
    "mkv-one-frame": (lambda: video_bytes("matroska", num_frames=1), 10),
    "webm-vp9": (lambda: video_bytes("webm", "libvpx-vp9"), 10),
    "mpegts-h264": (lambda: video_bytes("mpegts", rate=25), 25),
    "mpeg-ps": (lambda: video_bytes("vob", "mpeg2video", rate=25), 25),
    "flv": (lambda: video_bytes("flv"), 10),
    "asf": (lambda: video_bytes("asf", "wmv2"), 10),
    "webm-vp8": (lambda: video_bytes("webm", "libvpx"), 10),
}


@pytest.mark.parametrize("name", VIDEOS)
def test_the_facts_of_a_video_are_what_decoding_gives(name: str) -> None:
    make, fps = VIDEOS[name]
    data = make()
    frames = decoded_frames(data)
    found = facts_of(data, "video")
    assert isinstance(found, VideoFacts)
    first = frames[0]
    is_on_its_side = first.rotation in (90, -90, 270)
    assert is_on_its_side == (name in ("mov-turned-90", "mov-turned-270"))
    assert found[:2] == ((first.height, first.width) if is_on_its_side else (first.width, first.height))
    assert found.frames == len(frames)
    if fps is None:
        times = sorted(frame.time for frame in frames)
        fps = (len(times) - 1) / (times[-1] - times[0])
    assert found.fps == pytest.approx(fps, rel=1e-9)
    if name not in ("mp4-cut-h264-whole", "mp4-cut-hevc-whole"):  # first frames lack what they were predicted from
        assert checked_facts(data, "video") == found


def test_videos_whose_header_is_exact_are_not_decoded() -> None:
    """The last frames are damaged: nothing finds it but decoding them."""
    for container, codec in (("mp4", "libx264"), ("mov", "mpeg4"), ("avi", "mpeg4"), ("mp4", "libx265")):
        data = video_bytes(container, codec, num_frames=40, codec_options=QUIET if codec == "libx265" else None)
        with av.open(BytesIO(data)) as file:
            last = list(file.streams.video[0].index_entries)[-1]
            at, size = last.pos + (8 if container == "avi" else 0), last.size
        broken = data[:at] + b"\xa5" * size + data[at + size :]
        assert facts_of(broken, "video") == facts_of(data, "video")
        with pytest.raises(
            DataError, match=r"it cannot be decoded \(|is damaged: repair|but it has 39: repair or remo"
        ):
            checked_facts(broken, "video")


def test_a_header_in_front_is_read_like_one_behind() -> None:
    assert facts_of(moov_first(video_bytes()), "video") == facts_of(video_bytes(), "video")


def test_decompression_bombs_are_refused_before_they_are_decoded() -> None:
    data = video_bytes("mov", "prores", num_frames=2, pix_fmt="yuv422p10le")
    width_and_height = (64).to_bytes(2, "big") + (48).to_bytes(2, "big")
    large = data.replace(width_and_height, b"\xff\xff\xff\xff")
    assert large != data
    with pytest.raises(DataError, match=r"frames of \d+ x 65535 pixels, more than 178956970: make it smaller"):
        facts_of(large, "video")
    shown = video_bytes(num_frames=2, pixel_aspect=Fraction(4, 3))
    at = shown.index(b"pasp") + 4
    with pytest.raises(DataError, match=r"frames of \d{11} x 48 pixels, more than 178956970: make it smaller"):
        facts_of(shown[:at] + (2**31 - 1).to_bytes(4, "big") + shown[at + 4 :], "video")
