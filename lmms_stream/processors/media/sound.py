"""Bytes of a sound -> its samples: float32, one channel, at a rate that a model reads.

libsndfile, by soundfile, decodes WAV, FLAC, Ogg and MP3; PyAV the rest, and where the two count other samples than the
stored facts say. Channels are averaged, then soxr resamples, as librosa's load does.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from .containers import opened
from .types import AudioFacts

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


# Samples of a clip -> its mel features, as transformers' WhisperFeatureExtractor computes them.

_SILENCE = -10.0  # log10 of the least power that is told apart
_RANGE = 8.0  # powers of ten below the loudest that are told apart
_TAIL_HOPS = 4  # of silence behind a clip, so that what is computed ends as if silence went on


@lru_cache(maxsize=8)
def mel_filters(num_bins: int, num_points: int, rate: int) -> NDArray[np.float64]:
    """float64[num_points // 2 + 1, num_bins]: how much of each frequency is in each bin; 0 to 8000 Hz.

    Triangles between points that are equally far apart on Slaney's scale, each of the same area.
    """
    ends = _mel(np.array([0.0, 8000.0]))
    points = _hertz(np.linspace(ends[0], ends[1], num_bins + 2))
    frequencies = np.linspace(0, rate // 2, num_points // 2 + 1)
    slopes = points[None] - frequencies[:, None]
    widths = np.diff(points)
    filters = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    scaled: NDArray[np.float64] = filters * (2.0 / (points[2:] - points[:-2]))[None]
    return scaled


def _mel(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's scale: a line to 1000 Hz, which is 15, and a logarithm above."""
    logarithmic = 15.0 + np.log(np.maximum(hertz, 1000.0) / 1000.0) * (27.0 / np.log(6.4))
    return np.where(hertz >= 1000.0, logarithmic, 3.0 * hertz / 200.0)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel >= 15.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)), 200.0 * mel / 3.0)


def mel_features(
    samples: NDArray[np.float32], *, num_bins: int, num_points: int, hop: int, rate: int, padded_to: int = 0
) -> NDArray[np.float32]:
    """float32[num_bins, frames] of a clip, a frame for each whole hop of its samples.

    padded_to: the clip is read as if silence followed up to so many samples (0: none does). The window's num_points are
    centred, so that a clip must be longer than half of them where no silence follows.
    """
    length = max(len(samples), padded_to)
    computed = min(length, (-(-len(samples) // hop) + _TAIL_HOPS) * hop) if padded_to else length
    powers = _log_powers(np.pad(samples, (0, computed - len(samples))), num_bins, num_points, hop, rate)
    out = np.full((num_bins, length // hop), _SILENCE, np.float32)
    out[:, : powers.shape[1]] = powers
    loudest = out.max()
    scaled: NDArray[np.float32] = (np.maximum(out, loudest - np.float32(_RANGE)) + np.float32(4.0)) / np.float32(4.0)
    return scaled


def _log_powers(
    samples: NDArray[np.float32], num_bins: int, num_points: int, hop: int, rate: int
) -> NDArray[np.float32]:
    """By torch, whose rounding it then has: of quiet frequencies beside loud ones NumPy differs by 6e-5."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a loader worker was forked, and must not use the threads of its parent
    try:
        window = torch.hann_window(num_points)
        waves = torch.stft(torch.from_numpy(samples), num_points, hop, window=window, return_complex=True)
        magnitudes = waves[..., :-1].abs() ** 2
        filters = torch.from_numpy(mel_filters(num_bins, num_points, rate)).to(torch.float32)
        found: NDArray[np.float32] = torch.clamp(filters.T @ magnitudes, min=1e-10).log10().numpy()
    finally:
        torch.set_num_threads(threads)
    return found


# Samples of a sound -> a picture of its waveform, for people to look at.

WIDTH, HEIGHT = 512, 96
_PAPER, _INK, _LINE = (255, 255, 255), (38, 90, 160), (200, 200, 200)


def waveform(samples: NDArray[np.float32], *, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """uint8[height, width, 3]: time from left to right; in each column, from the lowest to the highest sample there.

    The loudest reaches the edge.
    """
    picture = np.full((height, width, 3), _PAPER, np.uint8)
    picture[height // 2] = _LINE
    bounds = np.arange(width + 1) * len(samples) // width
    loudest = float(np.abs(samples).max(initial=0.0)) or 1.0
    for column in range(width):
        part = samples[bounds[column] : max(bounds[column + 1], bounds[column] + 1)]
        if len(part):
            top, bottom = (round((1 - float(value) / loudest) / 2 * (height - 1)) for value in (part.max(), part.min()))
            picture[top : bottom + 1, column] = _INK
    return picture
