"""Clips of sound -> mel features, by the settings of a folder's WhisperFeatureExtractor. Settings in, numbers of frames
out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from .files import check_followed

if TYPE_CHECKING:
    from ..media.facts import AudioFacts

_ALWAYS = {"dither": 0.0, "padding_value": 0.0, "feature_extractor_type": "WhisperFeatureExtractor"}


class ClipShape(NamedTuple):
    """Part of a clip that is read. start, num_samples: in samples at the model's rate. frames: of mel features.

    is_cut: whether the wanted part is longer than the part read.
    """

    facts: AudioFacts
    num_samples: int
    frames: int
    start: int = 0
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """Settings of clips. rate: samples a second. num_bins: mel bins. hop: samples from frame to frame. num_points: of a
    window.

    max_samples: limit of a clip; the rest is cut off. padded_to: samples of every clip after the family's own processor
    has padded it with silence.
    """

    rate: int
    num_bins: int
    hop: int
    num_points: int
    max_samples: int
    padded_to: int

    @staticmethod
    def of(values: Mapping[str, Any], *, name: str, max_seconds: float | None, reads_all: bool = False) -> Clips:
        """Make clips from preprocessor_config.json. values: its content. max_seconds: the user's setting, which can
        only lower the limit. name: the folder. reads_all: no limit at the length of a chunk.

        ConfigError for settings with unsupported values.
        """
        check_followed(values, _ALWAYS, name=name)
        try:
            rate = int(values.get("sampling_rate", 16000))
            chunk = int(values.get("chunk_length", 30)) * rate
            longest = sys.maxsize if reads_all else chunk
            made = Clips(
                rate=rate,
                num_bins=int(values.get("feature_size", 80)),
                hop=int(values.get("hop_length", 160)),
                num_points=int(values.get("n_fft", 400)),
                max_samples=longest if max_seconds is None else min(longest, int(max_seconds * rate)),
                padded_to=chunk,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"processor {name!r} has settings of sound that are not numbers ({error}): save it again"
            ) from error
        return made

    @property
    def description(self) -> dict[str, int]:
        """Settings that can change a number of tokens or frames."""
        return asdict(self)

    def read_of(self, facts: AudioFacts, start: int = 0, stop: int | None = None) -> tuple[int, bool]:
        """Return the number of samples read of a clip, at the model's rate, and whether the wanted part has more.

        start, stop: the wanted part, in samples at the model's rate.
        """
        from ..media.sound import resampled_length

        total = resampled_length(facts.samples, facts.rate, self.rate)
        wanted = max(min(total, stop if stop is not None else total) - start, 0)
        return min(wanted, self.max_samples), wanted > self.max_samples

    def heard(self, shape: ClipShape) -> str:
        """Describe for people the part of a clip that is read: seconds, their start, and mel frames."""
        facts, seconds = shape.facts, shape.num_samples / self.rate
        read = f"{seconds:.2f} s" if shape.start == 0 else f"{seconds:.2f} s from second {shape.start / self.rate:.2f}"
        if abs(facts.samples / facts.rate - seconds) >= 0.01:
            read += f" of {facts.samples / facts.rate:.2f} s"
        cut = ", whose rest is cut off," if shape.is_cut else ""
        resampled = "" if facts.rate == self.rate else f" (from {facts.rate:,} Hz)"
        return f"{read}{cut} at {self.rate:,} Hz{resampled} in {shape.frames:,} mel frames"

    def samples(self, shape: ClipShape, data: bytes) -> NDArray[np.float32]:
        """Return the samples read of a clip. Raises DataError if it cannot be decoded, or its facts are wrong."""
        from ..media.sound import read_sound

        return read_sound(data, shape.facts, rate=self.rate, start=shape.start, num_samples=shape.num_samples)

    def features(self, shape: ClipShape, data: bytes, *, padded: bool) -> NDArray[np.float32]:
        """Mel features of the clip, float32[num_bins, frames]. padded: with silence after the clip."""
        from ..media.sound import mel_features

        return mel_features(
            self.samples(shape, data),
            num_bins=self.num_bins,
            num_points=self.num_points,
            hop=self.hop,
            rate=self.rate,
            padded_to=self.padded_to if padded else 0,
        )


def check_model_settings(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ConfigError if a model's config differs from the processor's values. expected: values by name,
    `section.name` in sections.
    """
    said = {**config}
    for section in ("audio_config", "vision_config"):
        said |= {f"{section}.{name}": value for name, value in (config.get(section) or {}).items()}
    for name, value in expected.items():
        if name in said and said[name] != value:
            raise ConfigError(
                f"the model has {name} {said[name]!r}, and its processor {value!r}: take the model's own processor"
            )


def waveform_of(samples: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Picture of a clip, for people to look at: uint8[1, H, W, 3]."""
    from ..media.sound import waveform

    return waveform(samples)[None]
