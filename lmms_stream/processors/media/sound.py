"""Bytes of a sound -> its samples: float32, one channel, at a rate that a model reads.

libsndfile, by soundfile, decodes WAV, FLAC, Ogg and MP3; PyAV the rest, and where the two count other samples than the
stored facts say. Channels are averaged, then soxr resamples, as librosa's load does.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from .containers import opened
from .fact_types import AudioFacts

_MARGIN_S = 1  # read behind what is needed: more than the filter of the resampler reaches
_FULL_SCALE = {"u1": 128.0, "i2": 2.0**15, "i4": 2.0**31, "i8": 2.0**63}  # of whole numbers, by their NumPy type


def resampled_length(samples: int, rate: int, to: int) -> int:
    """Samples that so many become at another rate: a part of one counts as one.

    >>> resampled_length(44100, 44100, 16000), resampled_length(3, 44100, 16000)
    (16000, 2)
    """
    return -(-samples * to // rate)


def read_sound(
    data: bytes, facts: AudioFacts, *, rate: int, start: int = 0, num_samples: int | None = None
) -> NDArray[np.float32]:
    """float32[n] at a rate: those from sample `start` on, num_samples of them, or all; counted at that rate.

    n follows from the facts alone (resampled_length). DataError for what cannot be decoded, and for other facts.
    """
    total = resampled_length(facts.samples, facts.rate, rate)
    stop = total if num_samples is None else min(start + num_samples, total)
    limit = min(facts.samples, resampled_length(stop, rate, facts.rate) + _MARGIN_S * facts.rate)
    decoded = _by_soundfile(data, facts, limit)
    mono = (_by_av(data, facts, limit) if decoded is None else decoded).mean(axis=1, dtype=np.float32)
    if facts.rate != rate:
        mono = np.asarray(_library("soxr").resample(mono, facts.rate, rate), np.float32)
    found = mono[start:stop]
    return np.pad(found, (0, stop - start - len(found)))  # soxr rounds the last part of a sample


def _by_soundfile(data: bytes, facts: AudioFacts, limit: int) -> NDArray[np.float32] | None:
    """The first `limit` samples, float32[limit, channels]; None for what libsndfile does not read as the facts say."""
    soundfile = _library("soundfile")
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            if (file.frames, file.samplerate) != tuple(facts):
                return None
            found: NDArray[np.float32] = file.read(limit, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError, RuntimeError):
        return None
    return found if len(found) == limit else None


def _by_av(data: bytes, facts: AudioFacts, limit: int) -> NDArray[np.float32]:
    pieces: list[NDArray[np.float32]] = []
    samples, rates = 0, set()
    with opened(data, "audio", subject="the sound") as (container, stream):
        for frame in container.decode(stream):
            samples += frame.samples
            rates.add(frame.sample_rate)
            if samples - frame.samples < limit:
                pieces.append(_values(frame))
    if rates != {facts.rate} or samples != facts.samples:
        said = " and ".join(map(str, sorted(rates))) or "no"
        raise DataError(
            f"a sound is stored as of {facts.samples} samples at {facts.rate} Hz, and decoding gives {samples} at "
            f"{said} Hz: convert the dataset again"
        )
    widest = max(piece.shape[1] for piece in pieces)
    return np.concatenate([_of_width(piece, widest) for piece in pieces])[:limit]


def _values(frame: Any) -> NDArray[np.float32]:
    """float32[samples, channels] from -1 to 1."""
    array = frame.to_ndarray()
    array = array.T if frame.format.is_planar else array.reshape(frame.samples, -1)
    kind = array.dtype.str[1:]
    if kind == "u1":
        array = array.astype(np.float32) - _FULL_SCALE[kind]
    return np.asarray(array / _FULL_SCALE.get(kind, 1.0), np.float32)


def _of_width(piece: NDArray[np.float32], num_channels: int) -> NDArray[np.float32]:
    """A frame with fewer channels than others has the mean of its own on all, so that the mean of all is theirs."""
    if piece.shape[1] == num_channels:
        return piece
    return np.repeat(piece.mean(axis=1, keepdims=True), num_channels, axis=1)


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f'sounds are read by soundfile and soxr, and {name} is missing ({error}): pip install "lmms-stream[media]"'
        ) from error
