"""Facts about sounds are what decoding gives."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import DataError
from lmms_stream.processors.media.facts import AudioFacts, checked_facts, facts_of
from lmms_stream.processors.media.formats import usual_kind
from lmms_stream.processors.media.sound import read_sound

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
    "mov-pcm": lambda: sound_bytes("mov", "pcm_s16le"),
    "mp2": lambda: sound_bytes("mp2", "mp2"),
    "aac": lambda: sound_bytes("adts"),
    "aac-tagged": lambda: tagged(sound_bytes("adts")),
    "flac-tagged": lambda: tagged(sound_bytes("flac")),
    "aiff": lambda: sound_bytes("aiff", "pcm_s16be", layout="stereo"),
    "au": lambda: sound_bytes("au", "pcm_s16be"),
    "amr": lambda: sound_bytes("amr", "libopencore_amrnb", rate=8000),
    "caf": lambda: sound_bytes("caf", "pcm_s16be"),
    "w64": lambda: sound_bytes("w64", "pcm_s16le"),
    "wavpack": lambda: sound_bytes("wv", "wavpack"),
    "tta": lambda: sound_bytes("tta", "tta"),
    "mpegts": lambda: sound_bytes("mpegts"),
    "flv": lambda: sound_bytes("flv", rate=44100),
}


def tagged(data: bytes) -> bytes:
    """A sound behind an ID3 tag of 200 bytes."""
    return b"ID3\x04\0\0\0\0\x01\x48" + bytes(200) + data


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
        sound = read_sound(data, AudioFacts(num_samples, *rates), rate=16000)
        assert 0.1 < abs(sound).max() < 0.5


def test_the_kind_of_bytes_is_what_files_of_their_format_usually_hold() -> None:
    kinds = {name: usual_kind(make()) for name, make in SOUNDS.items()}
    usually_videos = {name for name, kind in kinds.items() if kind == "video"}
    assert usually_videos == {
        name for name in SOUNDS if name.split("-")[0] in ("mp4", "webm", "mkv", "mov", "mpegts", "flv")
    }
    assert usual_kind(b"\xff\xfe[\0") is None  # text of UTF-16


@examples(40)
@given(num_samples=st.integers(1, 5000), container=st.sampled_from(["wav", "flac"]))
def test_samples_are_counted_by_headers_to_the_last(num_samples: int, container: str) -> None:
    data = sound_bytes(container, num_samples=num_samples, rate=8000)
    assert facts_of(data, "audio") == (*decoded_samples(data)[:1], 8000) == (num_samples, 8000)


def test_a_wav_that_no_decoder_reads_is_refused_at_conversion() -> None:
    """Floats of 16 bits, and a rate beyond 31 bits: the header is whole, and libsndfile and FFmpeg read none."""
    header = b"RIFF\x34\0\0\0WAVEfmt \x10\0\0\0\x03\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\x10\0\0\0"
    with pytest.raises(DataError, match="no audio in a known codec"):
        facts_of(header + bytes(16), "audio")
    whole = sound_bytes("wav", num_samples=8, rate=8000)
    with pytest.raises(DataError, match="it cannot be decoded"):
        facts_of(whole.replace((8000).to_bytes(4, "little"), b"\0\0\0\xff", 1), "audio")


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e30])
@pytest.mark.parametrize("form", ["WAV", "WAVEX", "W64", "AIFF", "AU", "CAF"])
@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
def test_a_sound_of_floats_that_are_not_numbers_is_an_error(form: str, kind: str, value: float) -> None:
    samples = np.zeros((2000, 2))
    samples[-1, 1] = value
    buffer = BytesIO()
    soundfile.write(buffer, samples, 16000, format=form, subtype=kind)
    for facts in (facts_of, checked_facts):
        with pytest.raises(DataError, match=r"it has 1 samples such as .*, expected floats from -1 to 1: repair"):
            facts(buffer.getvalue(), "audio")
    with pytest.raises(DataError, match=r"the sound has 1 samples such as"):
        read_sound(buffer.getvalue(), AudioFacts(2000, 16000), rate=16000)
