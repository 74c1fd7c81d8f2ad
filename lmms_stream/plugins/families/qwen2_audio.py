"""Qwen2-Audio: clips of at most 30 s, each padded with silence to 30 s; a position for each token.

A longer clip is cut at 30 s, like in the family's own processor, or earlier by the setting audio_max_length. The
installed processor is not used: it takes 77 ms to measure a clip, and our code of Qwen-Omni takes 4 ms to read it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.families.clips import Clips, ClipShape, check_model_settings, waveform_of
from ...processors.families.family import Layout, TokenIds
from ...processors.families.files import ProcessorFiles
from ...processors.families.settings import MediaSettings
from ...processors.media.types import Memory, new_memory

if TYPE_CHECKING:
    from ...processors.media.facts import AudioFacts, Facts
    from ...processors.media.types import Interval

AUDIO, START, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
_FEWEST_TOKENS = 2  # of a clip: transformers mistakes one token per clip for an older processor's row
_SMALLEST_FRAMES = 3  # frames that become a token


@dataclass(frozen=True, kw_only=True)
class Qwen2Audio:
    """See Family."""

    clips: Clips
    audio_token_id: int

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_audio",)
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen2AudioProcessor",)
    model_class: ClassVar[str] = "Qwen2AudioForConditionalGeneration"
    num_axes: ClassVar[int] = 0
    towers: ClassVar[Mapping[str, str]] = {"audio": "audio_tower"}
    token_inputs: ClassVar[tuple[str, ...]] = ()
    attentions: ClassVar[tuple[str, ...]] = ("sdpa", "eager")  # the tower has its own mask of padding
    placeholders: ClassVar[Mapping[str, str]] = {"audio": AUDIO}
    surroundings: ClassVar[tuple[str, str]] = (START, END)
    media_tokens: ClassVar[tuple[str, ...]] = (AUDIO, START, END)

    @staticmethod
    def of(files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Qwen2Audio:
        """See FamilyMaker."""
        clips = Clips.of(files.sound, name=files.name, max_seconds=settings.audio_max_length)
        return Qwen2Audio(clips=clips, audio_token_id=token_ids(AUDIO))

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {"family": "Qwen2-Audio", "clips": self.clips.description}

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """See Family."""
        sound: AudioFacts = facts  # type: ignore[assignment]
        num_samples, is_cut = self.clips.read_of(sound)
        frames = -(-num_samples // self.clips.hop)
        count = num_tokens(frames)
        if count < _FEWEST_TOKENS:
            raise DataError(
                f"a sound of {sound.samples} samples at {sound.rate} Hz becomes {max(count, 0)} tokens, and "
                f"Qwen2-Audio needs at least {_FEWEST_TOKENS}, about 0.06 s: lengthen or remove it"
            )
        shape = ClipShape(sound, num_samples, frames, is_cut=is_cut)
        return Layout("audio", (count,), self._num_frames, f"{START}{AUDIO}{END}", shape, is_cut)

    def frames(self, layout: Layout) -> Sequence[int]:
        """See Family."""
        return ()

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[np.int64]:
        """See Family; never called, as num_axes is 0."""
        return np.zeros((0, len(input_ids)), np.int64)

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """See Family."""
        return {}

    def heard(self, layout: Layout) -> str:
        """See Family."""
        return self.clips.heard(layout.shape)

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """See Family."""
        return waveform_of(self.clips.samples(layout.shape, data))

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family."""
        features = np.empty((len(layouts), self.clips.num_bins, self._num_frames), np.float32)
        mask = np.zeros((len(layouts), self._num_frames), np.int64)
        for number, (layout, data) in enumerate(zip(layouts, media, strict=True)):
            features[number] = self.clips.features(layout.shape, data, padded=True)
            mask[number, : layout.shape.frames] = 1
        return {"input_features": features, "feature_attention_mask": mask}

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See Family."""
        return made

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family."""
        mask = np.zeros((1, self._num_frames), np.int64)
        mask[:, :_SMALLEST_FRAMES] = 1
        features = np.zeros((1, self.clips.num_bins, self._num_frames), np.float32)
        return {"audio": {"input_features": features, "feature_attention_mask": mask}}

    def features(self, model: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
        """Features for the tokens of clips; transformers' model has no method for them."""
        _, num_outputs = model.audio_tower._get_feat_extract_output_lengths(inputs["feature_attention_mask"].sum(-1))
        hidden = model.multi_modal_projector(model.audio_tower(inputs["input_features"]).last_hidden_state)
        return [of_clip[:number] for of_clip, number in zip(hidden, num_outputs.tolist(), strict=True)]

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """See Family."""
        return {"audio"} if "input_features" in inputs else set()

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See Family."""
        expected = {
            "audio_token_id": self.audio_token_id,
            "audio_token_index": self.audio_token_id,
            "audio_config.num_mel_bins": self.clips.num_bins,
            "audio_config.max_source_positions": self._num_frames // 2,
            "audio_config.encoder_layerdrop": 0.0,  # layers dropped at random would differ between ranks
        }
        check_model_settings(config, expected)

    @property
    def _num_frames(self) -> int:
        return self.clips.padded_to // self.clips.hop


def num_tokens(frames: int) -> int:
    """Tokens of a clip with `frames` mel frames: a convolution with stride 2, then the mean of pairs.

    >>> num_tokens(3000)
    750
    """
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


FAMILY = Qwen2Audio
