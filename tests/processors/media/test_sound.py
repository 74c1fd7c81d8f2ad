"""Bytes of sounds -> samples and mel features, compared with librosa's definition and transformers' own."""

from __future__ import annotations

from io import BytesIO

import av
import numpy as np
import pytest
import soundfile
import soxr
from lmms_stream.errors import DataError
from lmms_stream.processors.media.facts import AudioFacts, facts_of
from lmms_stream.processors.media.sound import mel_features, mel_filters, read_sound, resampled_length, waveform
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from tests.processors.tiny_sound import clip, tone
from tests.rounds import rounds

RATE = 16000


def read(data: bytes, **options: int) -> NDArray[np.float32]:
    facts = facts_of(data, "audio")
    assert isinstance(facts, AudioFacts)
    return read_sound(data, facts, rate=RATE, **options)


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000, 96000])
@pytest.mark.parametrize("channels", [1, 2, 3, 6])
def test_sounds_of_any_rate_and_channels_become_one_channel_of_as_many_samples_as_their_facts_say(
    rate: int, channels: int
) -> None:
    rng = np.random.default_rng(rate + channels)
    for samples in (1, 2, *rng.integers(3, 30000, 3).tolist()):
        data = clip(samples, rate=rate, channels=channels)
        found = read(data)
        assert found.dtype == np.float32
        assert len(found) == resampled_length(samples, rate, RATE)
        mono = soundfile.read(BytesIO(data), dtype="float32", always_2d=True)[0].mean(axis=1, dtype=np.float32)
        expected = mono if rate == RATE else soxr.resample(mono, rate, RATE)
        np.testing.assert_array_equal(found[: len(expected)], expected[: len(found)])


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_part_of_a_sound_is_what_lies_there_in_the_whole(format: str) -> None:
    data = clip(50000, rate=44100, format=format, channels=2)
    whole = read(data)
    np.testing.assert_allclose(read(data, num_samples=4000), whole[:4000], rtol=0, atol=1e-6)
    np.testing.assert_allclose(read(data, start=3000, num_samples=4000), whole[3000:7000], rtol=0, atol=1e-6)
    assert len(read(data, start=len(whole) - 10, num_samples=4000)) == 10


def container(format: str, codec: str, *, samples: int = 20000, rate: int = 24000) -> bytes:
    """A sound as PyAV writes it."""
    buffer = BytesIO()
    with av.open(buffer, "w", format=format) as out:
        stream = out.add_stream(codec, rate=rate)
        frame = av.AudioFrame.from_ndarray(tone(samples, rate=rate).T.copy(), format="flt", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.codec_context.format.name, layout="mono", rate=rate)
        for piece in resampler.resample(frame):
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(("format", "codec"), [("mp4", "aac"), ("matroska", "pcm_s16le"), ("matroska", "pcm_u8")])
def test_sounds_that_libsndfile_does_not_read_are_decoded_by_pyav(format: str, codec: str) -> None:
    data = container(format, codec)
    facts = facts_of(data, "audio")
    found = read(data)
    assert len(found) == resampled_length(facts[0], 24000, RATE)
    middle = found[4000:8000]
    assert 0.3 < np.abs(middle).max() < 0.6
    if codec != "aac":  # which begins with silence
        expected = soxr.resample(tone(20000, rate=24000)[:, 0], 24000, RATE)[4000:8000]
        assert np.corrcoef(expected, middle)[0, 1] > 0.99


def test_sounds_that_are_not_what_is_stored_of_them_are_refused() -> None:
    data = clip(1000)
    with pytest.raises(
        DataError, match="stored as of 900 samples at 16000 Hz, and decoding gives 1000 at 16000 Hz: co"
    ):
        read_sound(data, AudioFacts(900, 16000), rate=RATE)
    with pytest.raises(DataError, match="the sound cannot be decoded"):
        read_sound(data[:30], AudioFacts(900, 16000), rate=RATE)


@pytest.mark.parametrize("num_bins", [80, 128])
def test_mel_features_are_those_of_transformers(num_bins: int) -> None:
    theirs = WhisperFeatureExtractor(feature_size=num_bins, chunk_length=3)
    np.testing.assert_allclose(mel_filters(num_bins, 400, RATE), theirs.mel_filters, rtol=0, atol=1e-15)
    rng = np.random.default_rng(num_bins)
    for number in range(rounds(8, 300)):
        samples = int(rng.integers(201, 60000))
        sound = tone(samples, hertz=float(rng.uniform(50, 7000)), seed=number)[:, 0][:48000]
        if number % 3 == 0:
            sound = np.where(np.abs(sound) > 0.1, sound, 0).astype(np.float32)
        settings = {"num_bins": num_bins, "num_points": 400, "hop": 160, "rate": RATE}
        padded = theirs(sound, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        np.testing.assert_allclose(mel_features(sound, **settings, padded_to=48000), padded, rtol=0, atol=1e-5)
        alone = theirs(sound, sampling_rate=RATE, return_tensors="np", padding="longest")["input_features"][0]
        np.testing.assert_allclose(mel_features(sound, **settings), alone, rtol=0, atol=1e-5)


def test_a_waveform_shows_where_a_sound_is_loud() -> None:
    silence, loud = np.zeros(1000, np.float32), tone(1000)[:, 0]
    picture = waveform(np.concatenate([silence, loud]), width=100, height=41)
    inked = (picture == (38, 90, 160)).all(axis=2).sum(axis=0)
    assert picture.shape == (41, 100, 3)
    assert (inked[:50] == 1).all()
    assert (inked[50:] > 10).any()
