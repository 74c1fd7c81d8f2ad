"""Facts about sounds are what decoding gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.processors.media.facts import checked_facts, facts_of

from ...strategies import examples
from .clips import decoded_samples, sound_bytes, video_bytes

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
