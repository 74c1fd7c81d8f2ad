"""Facts about media are what decoding gives, for every format that a header is trusted of, and for all others."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.media.facts import (
    AudioFacts,
    ImageFacts,
    VideoFacts,
    checked_facts,
    facts_of,
    stored_facts,
)
from lmms_stream.processors.media.image_header import fit_image, image_facts
from PIL import Image, ImageOps

from ...converters.media_files import image_bytes, wav_bytes
from ...strategies import examples
from .clips import cut_from_key_frame, decoded_frames, decoded_samples, sound_bytes, video_bytes

ORIENTATIONS = range(1, 9)
QUIET = {"x265-params": "log-level=none"}


def turned(form: str, orientation: int, *, size: tuple[int, int] = (6, 4)) -> bytes:
    """A picture whose EXIF data say how it is turned to be shown."""
    buffer, exif = BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "a camera"
    Image.new("RGB", size, (9, 99, 199)).save(buffer, form, exif=exif)
    return buffer.getvalue()


def shown_size(data: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).size


def png_with(data: bytes, name: bytes, body: bytes, *, behind: bool) -> bytes:
    """A PNG with one more chunk, before or behind its pixels."""
    chunk = struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    at = data.index(b"IEND" if behind else b"IDAT") - 4
    return data[:at] + chunk + data[at:]


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_the_size_of_an_image_is_that_with_its_exif_orientation_applied(form: str, orientation: int) -> None:
    data = turned(form, orientation)
    facts = facts_of(data, "image")
    assert facts == checked_facts(data, "image") == shown_size(data)
    assert facts == ((4, 6) if orientation >= 5 else (6, 4))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_the_size_of_an_image_is_what_decoding_gives(form: str, mode: str) -> None:
    data = image_bytes(form, size=(37, 23), mode=mode)
    assert facts_of(data, "image") == checked_facts(data, "image") == shown_size(data) == ImageFacts(37, 23)


@pytest.mark.parametrize("behind", [False, True])
def test_a_png_may_say_its_orientation_before_or_behind_its_pixels(behind: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="8"/>'
    for name, body in ((b"eXIf", exif.tobytes()[6:]), (b"iTXt", xmp)):
        data = png_with(image_bytes(size=(6, 4)), name, body, behind=behind)
        assert facts_of(data, "image") == shown_size(data) == (4, 6)
    data = png_with(image_bytes(size=(6, 4)), b"tEXt", b"Comment\0of no use", behind=behind)
    assert facts_of(data, "image") == shown_size(data) == (6, 4)


def test_exif_data_that_are_damaged_turn_nothing() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        buffer = BytesIO()
        Image.new("RGB", (6, 4)).save(buffer, "JPEG", exif=exif)
        assert facts_of(buffer.getvalue(), "image") == (6, 4)
    assert facts_of(turned("JPEG", 9), "image") == (6, 4)


@examples(60)
@given(form=st.sampled_from(["JPEG", "PNG", "WEBP"]), width=st.integers(1, 300), height=st.integers(1, 300))
def test_headers_alone_are_read_of_images(form: str, width: int, height: int) -> None:
    data = turned(form, 6, size=(width, height))
    start = {"JPEG": data.find(b"\xff\xda") + 14, "PNG": data.find(b"IDAT") + 4, "WEBP": len(data)}[form]
    assert image_facts(data[:start] + bytes(9)) == (height, width) == shown_size(data)


def test_the_facts_of_an_image_made_smaller_are_of_the_smaller_one() -> None:
    for orientation in ORIENTATIONS:
        data, facts = fit_image(turned("JPEG", orientation, size=(60, 30)), max_pixels=450)
        assert facts == facts_of(data, "image") == shown_size(data) == ((15, 30) if orientation >= 5 else (30, 15))


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
    "webm-vp8": (lambda: video_bytes("webm", "libvpx"), 10),
}
UNEDITED = {"use_editlist": "0"}
NEGATIVE = {"avoid_negative_ts": "disabled"}  # frames before 0 are left out by an edit list
OPEN_H264 = {"g": "8", "x264-params": "open-gop=1:scenecut=0:bframes=3:b-adapt=0"}
OPEN_HEVC = {"x265-params": "keyint=8:min-keyint=8:open-gop=1:scenecut=0:bframes=3:b-adapt=0:log-level=none"}


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
        with pytest.raises(DataError, match=r"it cannot be decoded \(|is damaged: repair|39 are there: repair or remo"):
            checked_facts(broken, "video")


SOUNDS: dict[str, Callable[[], bytes]] = {
    "wav": lambda: sound_bytes("wav"),
    "wav-stereo-24-bits": lambda: sound_bytes("wav", "pcm_s24le", layout="stereo", rate=44100),
    "wav-floats": lambda: sound_bytes("wav", "pcm_f32le"),
    "wav-adpcm": lambda: sound_bytes("wav", "adpcm_ima_wav"),
    "wav-of-a-pipe": lambda: piped(sound_bytes("wav")),
    "wav-cut": lambda: sound_bytes("wav")[:-1001],
    "flac": lambda: sound_bytes("flac", layout="stereo"),
    "flac-of-a-pipe": lambda: uncounted(sound_bytes("flac")),
    "ogg-opus": lambda: sound_bytes("ogg"),
    "ogg-flac": lambda: sound_bytes("ogg", "flac"),
    "mp3": lambda: sound_bytes("mp3"),
    "mp3-without-xing": lambda: sound_bytes("mp3", options={"write_xing": "0", "id3v2_version": "0"}),
    "m4a-aac": lambda: sound_bytes("ipod"),
    "mp4-aac": lambda: sound_bytes("mp4", num_samples=40_001, layout="stereo", rate=44100),
    "mp4-beside-a-video": lambda: video_bytes(sound=True),
    "webm-opus": lambda: sound_bytes("webm"),
    "mkv-aac": lambda: sound_bytes("matroska"),
}


def piped(data: bytes) -> bytes:
    """A WAV file as programs write it to pipes: they do not know its size yet."""
    at = data.index(b"data") + 4
    return data[:at] + b"\xff" * 4 + data[at + 4 :]


def overstated(data: bytes) -> bytes:
    """A FLAC file that says that it has another sample."""
    return data[:25] + bytes([data[25] + 1]) + data[26:]


def uncounted(data: bytes) -> bytes:
    """A FLAC file that says of its samples that their number is not known."""
    return data[:21] + bytes([data[21] & 0xF0]) + bytes(4) + data[26:]


@pytest.mark.parametrize("name", SOUNDS)
def test_the_facts_of_a_sound_are_what_decoding_gives(name: str) -> None:
    data = SOUNDS[name]()
    num_samples, rates = decoded_samples(data)
    assert facts_of(data, "audio") == (num_samples, *rates)
    if name != "wav-cut":
        assert checked_facts(data, "audio") == (num_samples, *rates)


@examples(40)
@given(num_samples=st.integers(1, 5000), container=st.sampled_from(["wav", "flac"]))
def test_samples_are_counted_by_headers_to_the_last(num_samples: int, container: str) -> None:
    data = sound_bytes(container, num_samples=num_samples, rate=8000)
    assert facts_of(data, "audio") == (*decoded_samples(data)[:1], 8000) == (num_samples, 8000)


def empty_moov() -> bytes:
    """The beginning of a video in fragments, before the first of them."""
    data = video_bytes(options={"movflags": "frag_keyframe+empty_moov"})
    return data[: data.index(b"moof") - 4]


BROKEN: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "image-header": (
        "image",
        lambda: image_bytes()[:12],
        "Pillow cannot read its header .* or convert it to JPEG or P",
    ),
    "image-unknown": ("image", lambda: b"neither", "Pillow cannot read its header"),
    "video-header": ("video", lambda: video_bytes()[:200], r"it cannot be decoded \(.*\): repair it, or remove it"),
    "video-cut": (
        "video",
        lambda: moov_first(video_bytes())[:-900],
        r"it is cut short: of its 30 frames \d+ lie behind its end: repair or remove it",
    ),
    "video-mkv-header": ("video", lambda: video_bytes("matroska")[:60], "it cannot be decoded|it has no video"),
    "video-empty-moov": ("video", empty_moov, "it has no frames: remove it"),
    "video-of-sound": ("video", lambda: sound_bytes("mp4"), "it has no video that can be decoded: remove it, or write"),
    "video-unknown": ("video", lambda: b"neither", "it cannot be decoded"),
    "sound-of-video": ("audio", lambda: video_bytes(), "it has no audio that can be decoded: remove it"),
    "sound-empty": ("audio", lambda: wav_bytes(num_samples=0), "it has no samples: remove it"),
    "sound-header": ("audio", lambda: wav_bytes()[:20], "it cannot be decoded"),
    "sound-mp3": ("audio", lambda: b"ID3\x04\0\0\0\0\0\0" + bytes(40), "it cannot be decoded|it has no"),
}


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


@pytest.mark.parametrize("name", BROKEN)
def test_broken_media_are_refused_with_what_is_wrong(name: str) -> None:
    kind, make, reason = BROKEN[name]
    for read in (facts_of, checked_facts):
        with pytest.raises(DataError, match=reason):
            read(make(), kind)


def test_a_header_in_front_is_read_like_one_behind() -> None:
    assert facts_of(moov_first(video_bytes()), "video") == facts_of(video_bytes(), "video")


def noisy(form: str) -> bytes:
    buffer = BytesIO()
    Image.effect_noise((90, 70), 80).convert("RGB").save(buffer, form)
    return buffer.getvalue()


DAMAGED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "jpeg-cut": ("image", lambda: noisy("JPEG")[:-400], r"it cannot be decoded \(OSError\('image file is truncated"),
    "png-cut": ("image", lambda: noisy("PNG")[:-400], "it cannot be decoded"),
    "png-flipped": ("image", lambda: flipped(noisy("PNG")), "it cannot be decoded"),
    "webp-cut": ("image", lambda: noisy("WEBP")[:-400], "it cannot be decoded|Pillow cannot read its header"),
    "mkv-flipped": ("video", lambda: flipped(video_bytes("matroska", "mpeg4")), r"it cannot be decoded|is damaged"),
    "wav-cut": (
        "audio",
        lambda: sound_bytes("wav")[:-1001],
        r"it is cut short: its header says that more samples follow",
    ),
    "flac-flipped": ("audio", lambda: flipped(sound_bytes("flac"), share=0.9), "it cannot be decoded"),
    "flac-overstated": (
        "audio",
        lambda: overstated(sound_bytes("flac")),
        "its header says .*10001.*, decoding gives .*10000.*: repair or remove it",
    ),
}


def flipped(data: bytes, *, share: float = 0.5) -> bytes:
    """Other bytes in the midst of the data, or at another share of them."""
    at = int(len(data) * share)
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 24]) + data[at + 24 :]


@pytest.mark.parametrize("name", DAMAGED)
def test_media_that_are_damaged_behind_their_header_are_found_by_decoding(name: str) -> None:
    kind, make, reason = DAMAGED[name]
    with pytest.raises(DataError, match=reason):
        checked_facts(make(), kind)


def test_decompression_bombs_are_refused_before_they_are_decoded() -> None:
    data = video_bytes("mov", "prores", num_frames=2, pix_fmt="yuv422p10le")
    width_and_height = (64).to_bytes(2, "big") + (48).to_bytes(2, "big")
    large = data.replace(width_and_height, b"\xff\xff\xff\xff")
    assert large != data
    with pytest.raises(DataError, match=r"frames of 65535 x 65535 pixels, more than 178956970: make it smaller"):
        facts_of(large, "video")


def test_a_library_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for data, kind in ((video_bytes, "video"), (lambda: b"ID3", "audio")):
        made = data() if kind == "audio" else b""
        with pytest.raises(ConfigError, match=r'read by PyAV, which is missing: pip install "lmms-stream\[media\]"'):
            facts_of(made, kind)
    assert facts_of(wav_bytes(), "audio") == AudioFacts(8, 16000)
    assert facts_of(image_bytes(), "image") == ImageFacts(4, 3)


def test_facts_come_back_from_what_is_stored() -> None:
    for facts, kind in ((ImageFacts(6, 4), "image"), (VideoFacts(64, 48, 30, 30000 / 1001), "video")):
        part = json.loads(json.dumps({"type": kind, "mime": "", "span": [0, 1], **facts._asdict()}))
        assert stored_facts(part) == facts
        assert type(stored_facts(part)) is type(facts)
    assert stored_facts({"type": "audio", "samples": 1, "rate": 8000}) == AudioFacts(1, 8000)


def test_parts_without_facts_have_none() -> None:
    assert stored_facts({"type": "image", "span": [0, 4]}) is None
    assert stored_facts({"type": "video", "fps": 2.0, "width": 3, "height": 4}) is None
    assert stored_facts({"type": "smell", "width": 3, "height": 4}) is None


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "4", None, float("nan"), float("inf"), [4]])
def test_facts_that_are_no_numbers_above_0_are_refused(value: Any) -> None:
    with pytest.raises(
        DataError, match=r"has the width .*, expected a whole number above 0: convert the dataset again"
    ):
        stored_facts({"type": "image", "width": value, "height": 3})
    if type(value) is not float or value != 1.0:
        part = {"type": "video", "width": 1, "height": 1, "frames": 1, "fps": value}
        with pytest.raises(DataError, match=r"has the fps .*, expected a number above 0: convert the dataset again"):
            stored_facts(part)


def test_media_of_no_kind_are_a_wrong_call() -> None:
    with pytest.raises(ConfigError, match="media of kind 'smell' have no facts: choose one of image, video, audio"):
        facts_of(b"", "smell")


def test_facts_of_images_load_neither_video_libraries_nor_torch() -> None:
    code = (
        "import sys; from lmms_stream.processors.media.facts import facts_of; "
        "facts_of(open(sys.argv[1], 'rb').read(), 'image'); "
        "sys.exit(str({'av', 'torch', 'transformers', 'numpy'} & set(sys.modules)) if "
        "{'av', 'torch', 'transformers'} & set(sys.modules) else 0)"
    )
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        file.write(image_bytes())
        file.flush()
        subprocess.run([sys.executable, "-c", code, file.name], check=True, timeout=60)
