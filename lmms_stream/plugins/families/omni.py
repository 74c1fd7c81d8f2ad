"""Shared code of the thinkers of Qwen2.5-Omni and Qwen3-Omni: images, videos and sounds in one row of tokens.

Batches hold the mel frames of all clips one after another, without padding; the model gets them padded. Counts equal
transformers' processors for one clip per call, positions equal the models' get_rope_index.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.families.clips import Clips, ClipShape, check_model_settings, waveform_of
from ...processors.families.family import Layout, TokenIds
from ...processors.families.files import ProcessorFiles
from ...processors.families.qwen_vl import FramesOfTheirOwn, PatchGrid, QwenVL
from ...processors.families.settings import MediaSettings
from ...processors.families.vision import Section
from ...processors.media.types import Memory, new_memory

if TYPE_CHECKING:
    from ...processors.media.facts import AudioFacts, Facts, VideoFacts
    from ...processors.media.types import Interval

FRAMES, LENGTHS = "audio_frames", "audio_lengths"  # of a batch: float32[frames, mel bins], int64[clips]
_LIMITS = ("size", "min_pixels", "max_pixels")


class HeardShape(NamedTuple):
    """Shape of a video with its sound; see PatchGrid. runs: kinds and counts of its tokens."""

    facts: Any
    width: int
    height: int
    grid: tuple[int, int, int]
    section: Section | None
    num_frames: int
    steps: float
    clip: ClipShape
    runs: tuple[tuple[str, int], ...]


class Positions(NamedTuple):
    """Positions of a medium. of_tokens: number[3, T], from 0. next: position of the token after the medium. lead:
    number of text tokens before the medium, and after it, included in of_tokens.
    """

    of_tokens: NDArray[Any]
    next: Any
    lead: int = 0


@dataclass(frozen=True, kw_only=True)
class Omni(FramesOfTheirOwn):
    """See Family. positions_per_second: along time."""

    clips: Clips
    audio_token_id: int
    with_sound: bool = False  # of videos

    positions_per_second: ClassVar[float] = 0
    position_type: ClassVar[Any] = np.int64
    model_class: ClassVar[str] = ""
    towers: ClassVar[Mapping[str, str]] = {"image": "visual", "video": "visual", "audio": "audio_tower"}
    pads_clips: ClassVar[bool] = False  # clips: with silence, to the processor's length
    reads_all: ClassVar[bool] = False  # also clips longer than the folder's chunks
    fewest_samples: ClassVar[int] = 1  # of a clip
    sound_surroundings: ClassVar[tuple[str, str]] = ("", "")  # tokens before and behind a clip

    @classmethod
    def video_settings(cls, files: ProcessorFiles) -> Mapping[str, Any]:
        """See QwenVL. transformers' processor of the family passes its limits on pixels with each call."""
        return {**{name: value for name, value in files.video.items() if name not in _LIMITS}, **cls.video_defaults}

    @classmethod
    def of_sound(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Mapping[str, Any]:
        """See QwenVL."""
        return {
            "clips": Clips.of(
                files.sound, name=files.name, max_seconds=settings.audio_max_length, reads_all=cls.reads_all
            ),
            "audio_token_id": token_ids(cls.placeholders["audio"]),
            "with_sound": bool(settings.use_audio_in_video),
        }

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {**super().description, "clips": self.clips.description, "with_sound": self.with_sound}

    def num_tokens(self, frames: int) -> int:
        """Tokens of a clip with `frames` mel frames."""
        raise NotImplementedError

    def num_frames(self, num_samples: int) -> int:
        """Mel frames of a clip of num_samples samples."""
        raise NotImplementedError

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """See Family."""
        if kind != "audio":
            return super().layout(kind, facts, interval)
        sound = cast("AudioFacts", facts)
        shape = self._clip(sound)
        count = self.num_tokens(shape.frames)
        if shape.num_samples < self.fewest_samples or count < 1:
            raise DataError(
                f"a sound of {sound.samples} samples at {sound.rate} Hz is too short for {self.name}, which needs "
                f"{self.fewest_samples} samples at {self.clips.rate} Hz: lengthen or remove it"
            )
        return Layout("audio", (count,), shape.frames, "", shape, shape.is_cut)

    def video_with_sound(self, facts: VideoFacts, interval: Interval | None, sound: AudioFacts | None) -> Layout:
        """Layout of a video with its sound; sound: None for a video without sound.

        If only a part of the video is read, only the sound of this part is read.
        """
        layout = self.video(facts, interval)
        if sound is None:
            return layout
        shape: PatchGrid = layout.shape
        section = cast("Section", shape.section)
        first, last = section.first / facts.fps, (section.first + section.num_frames) / facts.fps
        is_whole = section.first == 0 and section.num_frames == facts.frames
        clip = self._clip(sound, round(first * self.clips.rate), None if is_whole else round(last * self.clips.rate))
        num_tokens = self.num_tokens(clip.frames) if clip.num_samples >= self.fewest_samples else 0
        if num_tokens < 1:  # the sound ends before the part begins
            return layout
        runs = self.interleaved(self.of_grid(layout)[0], num_tokens)
        names = [self.placeholders[kind] for kind, _ in runs]
        before, after = self.surroundings
        text = f"{before}{self.sound_surroundings[0]}{''.join(names)}{self.sound_surroundings[1]}{after}"
        heard = HeardShape(*shape, clip=clip, runs=runs)
        counts = tuple(count for _, count in runs)
        return Layout("video", counts, layout.patches + clip.frames, text, heard, clip.is_cut)

    def interleaved(self, times: NDArray[Any], num_sounds: int) -> tuple[tuple[str, int], ...]:
        """Order of the tokens of a video's frames, at these times, and of its sound: kinds and counts."""
        raise NotImplementedError

    def around(self) -> tuple[NDArray[Any], Any]:
        """Positions of the two tokens before, and after, a video with sound, and the advance of each pair."""
        raise NotImplementedError

    def _clip(self, sound: AudioFacts, start: int = 0, stop: int | None = None) -> ClipShape:
        num_samples, is_cut = self.clips.read_of(sound, start, stop)
        return ClipShape(sound, num_samples, self.num_frames(num_samples), start, is_cut)

    def steps(self, section: Section, num_frames: int) -> float:
        """See FramesOfTheirOwn; here, positions along time follow from the seconds of a pair."""
        return 1

    def times(self, shape: PatchGrid) -> NDArray[Any]:
        """Positions along time of the pairs of frames of a video, or of an image, with the rounding of the model's own
        code.
        """
        if shape.section is None:
            return np.zeros(1, np.float32)
        seconds = np.float32(self.videos.temporal_patch_size * shape.section.seconds / shape.num_frames)
        found: NDArray[np.float32] = np.arange(shape.grid[0]) * seconds * np.float32(self.positions_per_second)
        return found.astype(np.float32)

    def seconds_of_pair(self, layout: Layout) -> float:
        """Seconds of a pair of frames of a video: video_second_per_grid in transformers."""
        section: Section = layout.shape.section
        return float(self.videos.temporal_patch_size * section.seconds / layout.shape.num_frames)

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[Any]:
        """See Family. A medium begins at the end of the text before, and the text resumes after the medium's largest
        position.
        """
        out = np.empty((3, len(input_ids)), self.position_type)
        at = np.flatnonzero(np.isin(input_ids, (self.image_token_id, self.video_token_id, self.audio_token_id)))
        done, position, number = 0, self.position_type(0), 0
        for layout in layouts:
            found = self.of_medium(layout)
            first = int(at[number]) - found.lead  # a medium's tokens are contiguous
            number += sum(layout.counts)
            out[:, done:first] = position + np.arange(first - done)
            position += self.position_type(first - done)
            done = first + found.of_tokens.shape[1]
            out[:, first:done] = found.of_tokens + position
            position = self.position_type(position + found.next)
        out[:, done:] = position + np.arange(len(input_ids) - done)
        return out

    def of_medium(self, layout: Layout) -> Positions:
        """Positions of the tokens of one medium."""
        if layout.kind == "audio":
            count = sum(layout.counts)
            return Positions(np.broadcast_to(np.arange(count), (3, count)), count)
        found = self.of_grid(layout)
        if isinstance(layout.shape, HeardShape):
            return self._with_sound(found, layout.shape)
        return Positions(found, found.max() + 1)

    def _with_sound(self, seen: NDArray[Any], shape: HeardShape) -> Positions:
        """Positions of the tokens of a video with sound, and of the two tokens before and after."""
        pair, advance = self.around()
        num_sounds = sum(count for kind, count in shape.runs if kind == "audio")
        heard = np.broadcast_to(np.arange(num_sounds, dtype=self.position_type), (3, num_sounds))
        left = {"video": seen, "audio": heard}
        pieces = []
        for kind, count in shape.runs:
            pieces.append(left[kind][:, :count] + advance)
            left[kind] = left[kind][:, count:]
        end = self.position_type(pieces[-1].max() + 1)  # only of the last tokens, like in the models' own code
        bounds = [np.broadcast_to(pair + offset, (3, 2)) for offset in (self.position_type(0), end)]
        return Positions(np.concatenate([bounds[0], *pieces, bounds[1]], axis=1), end + advance, lead=2)

    def of_grid(self, layout: Layout) -> NDArray[Any]:
        """Positions of the tokens of an image, or of the frames of a video."""
        shape: PatchGrid = layout.shape
        merge = (self.images if layout.kind == "image" else self.videos).merge_size
        times = self.times(shape).astype(self.position_type)
        rows, columns = np.arange(shape.grid[1] // merge), np.arange(shape.grid[2] // merge)
        grid = np.meshgrid(times, rows, columns, indexing="ij")
        positions: NDArray[Any] = np.stack([axis.ravel() for axis in grid]).astype(self.position_type)
        return positions

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family."""
        tensors = super().tensors(layouts, media, memory)
        heard = [(shape, data) for layout, data in zip(layouts, media, strict=True) for shape in self.clips_of(layout)]
        if heard:
            frames = memory(FRAMES, (sum(shape.frames for shape, _ in heard), self.clips.num_bins), np.float32)
            start = 0
            for shape, data in heard:
                made = self.clips.features(shape, data, padded=self.pads_clips)
                frames[start : start + shape.frames] = made[:, : shape.frames].T
                start += shape.frames
            tensors[FRAMES] = frames
            tensors[LENGTHS] = np.array([shape.frames for shape, _ in heard], np.int64)
        return tensors

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See Family. The installed processor's clips have padding."""
        if "input_features" not in made:
            return made
        mask = made["feature_attention_mask"].astype(bool)
        frames = made["input_features"].swapaxes(1, 2)[mask]
        return {**made, FRAMES: frames, LENGTHS: mask.sum(axis=1)}

    def clips_of(self, layout: Layout) -> list[ClipShape]:
        """Clips that are read of a medium."""
        if layout.kind == "audio":
            return [layout.shape]
        return [layout.shape.clip] if isinstance(layout.shape, HeardShape) else []

    def frames(self, layout: Layout) -> tuple[int, ...]:
        """See Family."""
        return () if layout.kind == "audio" else super().frames(layout)

    def heard(self, layout: Layout) -> str:
        """See Family."""
        return " and ".join(map(self.clips.heard, self.clips_of(layout)))

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """See Family."""
        if layout.kind == "audio":
            return waveform_of(self.clips.samples(layout.shape, data))
        return super().pixels(layout, data)

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family."""
        frames = next(frames for frames in range(1, 100) if self.num_tokens(frames) > 0)
        sound: dict[str, NDArray[Any]] = {
            FRAMES: np.zeros((frames, self.clips.num_bins), np.float32),
            LENGTHS: np.array([frames], np.int64),
        }
        return {**super().dummy(), "audio": sound}

    def model_inputs(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inputs of a batch for the model: clips padded to the longest, and a mask."""
        if FRAMES not in inputs:
            return inputs
        lengths = inputs[LENGTHS].tolist()
        frames = inputs[FRAMES].to(model.dtype)
        features = frames.new_zeros(len(lengths), max(lengths), frames.shape[1])
        mask = inputs[LENGTHS].new_zeros(len(lengths), max(lengths))
        for number, clip in enumerate(frames.split(lengths)):
            features[number, : len(clip)] = clip
            mask[number, : len(clip)] = 1
        others = {name: value for name, value in inputs.items() if name not in (FRAMES, LENGTHS)}
        return {**others, "input_features": features.transpose(1, 2), "feature_attention_mask": mask}

    @staticmethod
    def pieces(kind: str, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See Family: also clips."""
        if kind == "audio":
            return inputs, inputs["feature_attention_mask"].sum(dim=1).tolist()
        return QwenVL.pieces(kind, inputs)

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """See Family."""
        return super().kinds_of(inputs) | ({"audio"} if FRAMES in inputs else set())

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See Family."""
        check_model_settings(config, self.model_settings())

    def model_settings(self) -> dict[str, Any]:
        """See QwenVL."""
        ids = {"image": self.image_token_id, "video": self.video_token_id, "audio": self.audio_token_id}
        return {
            **super().model_settings(),
            **{f"{kind}_token_{name}": number for kind, number in ids.items() for name in ("id", "index")},
            "audio_config.num_mel_bins": self.clips.num_bins,
            "position_id_per_seconds": self.positions_per_second,
        }
