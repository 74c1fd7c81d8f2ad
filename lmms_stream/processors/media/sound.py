"""Bytes of a sound -> its samples: float32, one channel, at the model's rate.

libsndfile, by soundfile, decodes WAV, FLAC, Ogg and MP3. PyAV decodes the rest, and sounds for which libsndfile's
number of samples differs from the stored facts. Channels are averaged, then soxr resamples, like librosa's load.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from .containers import opened
from .types import AudioFacts, check_samples

_MARGIN_S = 1  # seconds read after the needed part: more than the reach of the resampler's filter
_FULL_SCALE = {"u1": 128.0, "i2": 2.0**15, "i4": 2.0**31, "i8": 2.0**63}  # of whole numbers, by their NumPy type


def resampled_length(samples: int, rate: int, to: int) -> int:
    """Number of samples after resampling to another rate, rounded up.

    >>> resampled_length(44100, 44100, 16000), resampled_length(3, 44100, 16000)
    (16000, 2)
    """
    return -(-samples * to // rate)


def read_sound(
    data: bytes, facts: AudioFacts, *, rate: int, start: int = 0, num_samples: int | None = None
) -> NDArray[np.float32]:
    """Read a sound at a rate: float32[n], from sample `start` on, num_samples or all, counted at this rate.

    n follows only from the facts (resampled_length). DataError for undecodable sounds, for other facts,
    and for NaN.
    """
    total = resampled_length(facts.samples, facts.rate, rate)
    stop = total if num_samples is None else min(start + num_samples, total)
    limit = min(facts.samples, resampled_length(stop, rate, facts.rate) + _MARGIN_S * facts.rate)
    decoded = _by_soundfile(data, facts, limit)
    decoded = _by_av(data, facts, limit) if decoded is None else decoded
    check_samples(decoded, subject="the sound")
    mono = decoded.mean(axis=1, dtype=np.float32)
    if facts.rate != rate:
        mono = np.asarray(_library("soxr").resample(mono, facts.rate, rate), np.float32)
    found = mono[start:stop]
    return np.pad(found, (0, stop - start - len(found)))  # soxr rounds the last part of a sample


def _by_soundfile(data: bytes, facts: AudioFacts, limit: int) -> NDArray[np.float32] | None:
    """Return the first `limit` samples, float32[limit, channels]; None if libsndfile cannot read them or disagrees with
    the facts.
    """
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
    """Samples of a frame from -1 to 1: float32[samples, channels]."""
    array = frame.to_ndarray()
    array = array.T if frame.format.is_planar else array.reshape(frame.samples, -1)
    kind = array.dtype.str[1:]
    if kind == "u1":
        array = array.astype(np.float32) - _FULL_SCALE[kind]
    return np.asarray(array / _FULL_SCALE.get(kind, 1.0), np.float32)


def _of_width(piece: NDArray[np.float32], num_channels: int) -> NDArray[np.float32]:
    """Repeat the mean of a frame's channels on num_channels, if it has fewer: the mean of all channels stays the
    same.
    """
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


# Samples of a clip -> its mel features, equal to transformers' WhisperFeatureExtractor.

_SILENCE = -10.0  # log10 of the lowest power
_RANGE = 8.0  # powers of ten from the loudest to the lowest value
_TAIL_HOPS = 4  # hops of silence computed after a clip; further silence has the same values as their end


@lru_cache(maxsize=8)
def mel_filters(num_bins: int, num_points: int, rate: int) -> NDArray[np.float64]:
    """Share of each frequency in each bin, 0 to 8000 Hz: float64[num_points // 2 + 1, num_bins].

    Triangles of equal area between points that are evenly spaced on Slaney's scale.
    """
    top = 15.0 + np.log(8000.0 / 1000.0) * (27.0 / np.log(6.4))  # Slaney's scale: linear to 1000 Hz (15 mel)
    mel = np.linspace(0.0, top, num_bins + 2)
    points = np.where(mel >= 15.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)), 200.0 * mel / 3.0)
    frequencies = np.linspace(0, rate // 2, num_points // 2 + 1)
    slopes = points[None] - frequencies[:, None]
    widths = np.diff(points)
    filters = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    scaled: NDArray[np.float64] = filters * (2.0 / (points[2:] - points[:-2]))[None]
    return scaled


def mel_features(
    samples: NDArray[np.float32], *, num_bins: int, num_points: int, hop: int, rate: int, padded_to: int = 0
) -> NDArray[np.float32]:
    """Mel features of a clip, a frame for each whole hop of its samples: float32[num_bins, frames].

    padded_to: number of samples to which the clip is extended by silence (0: none). The window's num_points are
    centred: without silence, a clip must be longer than half of them.
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
    """Log powers by torch, for the same rounding: NumPy differs by 6e-5 for quiet frequencies next to loud ones."""
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
    """Draw a waveform, uint8[height, width, 3]: time from left to right; each column from its lowest to its highest
    sample.

    The loudest sample reaches the edge.
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
