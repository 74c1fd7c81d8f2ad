"""Samples of a clip -> its mel features, as transformers' WhisperFeatureExtractor computes them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
