"""Media whose header is broken are refused; those that are broken behind it are found by decoding all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import DataError
from lmms_stream.processors.base import or_error
from lmms_stream.processors.media import image_header
from lmms_stream.processors.media.facts import checked_facts, facts_of
from PIL import Image

from ...converters.media_files import image_bytes, wav_bytes
from ...strategies import examples
from .clips import cut, empty_moov, flipped, moov_first, overstated, sound_bytes, video_bytes, without_last_picture
from .pictures import noisy, turned

BROKEN: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "image-header": (
        "image",
        lambda: image_bytes()[:12],
        "Pillow cannot read its header .* or convert it to JPEG or P",
    ),
    "image-unknown": ("image", lambda: b"neither", "Pillow cannot read its header"),
    "video-header": ("video", lambda: video_bytes()[:200], r"it cannot be decoded \(.*\): repair or remove it"),
    "video-cut": (
        "video",
        lambda: moov_first(video_bytes())[:-900],
        r"it is cut short: of its 30 frames, \d+ are after its end: repair or remove it",
    ),
    "video-mkv-header": ("video", lambda: video_bytes("matroska")[:60], "it cannot be decoded|it has no video"),
    "video-empty-moov": ("video", empty_moov, "it has no frames: remove it"),
    "video-of-sound": ("video", lambda: sound_bytes("mp4"), "it has no video in a known codec: remove it, or"),
    "video-unknown": ("video", lambda: b"neither", "it cannot be decoded"),
    "sound-of-video": ("audio", lambda: video_bytes(), "it has no audio in a known codec: remove it"),
    "sound-empty": ("audio", lambda: wav_bytes(num_samples=0), "it has no samples: remove it"),
    "sound-header": ("audio", lambda: wav_bytes()[:20], "it cannot be decoded"),
    "sound-mp3": ("audio", lambda: b"ID3\x04\0\0\0\0\0\0" + bytes(40), "it cannot be decoded|it has no"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_media_are_refused_with_what_is_wrong(name: str) -> None:
    kind, make, reason = BROKEN[name]
    with pytest.raises(DataError, match=reason):
        facts_of(make(), kind)
    with pytest.raises(DataError, match=f"{reason}|it is cut short, with fewer bytes than in its header: repair"):
        checked_facts(make(), kind)


DAMAGED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "jpeg-cut": ("image", lambda: noisy("JPEG")[:-400], r"it cannot be decoded \(OSError\('image file is truncated"),
    "png-cut": ("image", lambda: noisy("PNG")[:-400], "it cannot be decoded"),
    "png-flipped": ("image", lambda: flipped(noisy("PNG")), "it cannot be decoded"),
    "webp-cut": ("image", lambda: noisy("WEBP")[:-400], "it cannot be decoded|Pillow cannot read its header"),
    "mkv-flipped": ("video", lambda: flipped(video_bytes("matroska", "mpeg4")), r"it cannot be decoded|is damaged"),
    "wav-cut": (
        "audio",
        lambda: sound_bytes("wav")[:-1001],
        "it is cut short, with fewer bytes than in its header",
    ),
    **{
        f"{name}-cut": (
            "video",
            partial(cut, name, codec),
            "it is cut short, with fewer bytes than in its header: repair",
        )
        for name, codec in (("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("fragments", "libx264"))
    },
    "mp4-without-last-picture": (
        "video",
        lambda: without_last_picture(video_bytes(codec="libx265", codec_options={"x265-params": "log-level=none"})),
        "its header lists 30 frames, but it has 29: repair or remove it",
    ),
    "flac-flipped": ("audio", lambda: flipped(sound_bytes("flac"), share=0.9), "it cannot be decoded"),
    "flac-overstated": (
        "audio",
        lambda: overstated(sound_bytes("flac")),
        "its header says .*10001.*, decoding gives .*10000.*: repair or remove it",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_media_that_are_damaged_behind_their_header_are_found_by_decoding(name: str) -> None:
    kind, make, reason = DAMAGED[name]
    with pytest.raises(DataError, match=reason):
        checked_facts(make(), kind)


def test_a_sound_of_several_rates_is_refused() -> None:
    plain = {"write_xing": "0", "id3v2_version": "0"}
    first, second = (sound_bytes("mp3", rate=rate, options=plain) for rate in (16000, 24000))
    with pytest.raises(DataError, match=r"its sample rate changes \(16000, 24000 Hz\): resample or remove it"):
        facts_of(first + second, "audio")


def test_animations_are_decoded_up_to_a_number_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = BytesIO()
    frames = [Image.new("RGB", (20, 10), (number, 0, 0)) for number in range(5)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert checked_facts(buffer.getvalue(), "image") == (20, 10)
    monkeypatch.setattr(image_header, "MAX_DECODED_PIXELS", 999)
    with pytest.raises(DataError, match="it has 5 frames of 20 x 10 pixels, more than 999 in all: store it as a video"):
        checked_facts(buffer.getvalue(), "image")


SEEDS = {
    **{form: ("image", turned(form, 6, size=(20, 10))) for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")},
    **{form: ("image", image_bytes(form)) for form in ("GIF", "BMP")},
    "mp4": ("video", moov_first(video_bytes(num_frames=5))),
    "mkv": ("video", video_bytes("matroska", num_frames=5)),
    "avi": ("video", video_bytes("avi", "mpeg4", num_frames=5)),
    "wav": ("audio", sound_bytes("wav", num_samples=50)),
    "flac": ("audio", sound_bytes("flac", num_samples=50)),
    "mp3": ("audio", sound_bytes("mp3", num_samples=2000)),
}


@examples(120)
@given(
    name=st.sampled_from(sorted(SEEDS)),
    cut=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
)
def test_whatever_bytes_media_have_they_have_facts_or_are_refused(
    name: str, cut: float, changes: list[tuple[float, int]]
) -> None:
    kind, data = SEEDS[name]
    changed = bytearray(data)
    for share, value in changes:
        changed[int(share**2 * len(data))] = value  # rather in the header
    changed = changed[: int(cut * len(data))] if cut < 0.5 else changed
    for read in (facts_of, checked_facts):
        found = or_error(read, bytes(changed), kind)
        if isinstance(found, DataError):
            assert re.search("remove it|make it smaller|convert it", str(found))
        else:
            assert min(found) > 0
