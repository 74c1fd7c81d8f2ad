"""Shared code of the Qwen-VL families: a grid of patches for each medium, three axes of positions, tensors of patches.

The counts equal those of transformers' Qwen2VLImageProcessor and of the families' video processors; the positions equal
those of the models' get_rope_index for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ..media.types import Memory, new_memory
from .family import AUTO_CLASS, Layout, TokenIds
from .files import ProcessorFiles
from .settings import MediaSettings
from .vision import FrameChoice, Section, Vision, check_decoded, starts_of_equal_parts

if TYPE_CHECKING:
    from typing import Self

    from ..media.facts import Facts, ImageFacts, VideoFacts
    from ..media.types import Interval


IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
START, END = "<|vision_start|>", "<|vision_end|>"
_MAX_ASPECT = 200  # the longer side over the shorter one; transformers refuses more


class PatchGrid(NamedTuple):
    """Size of a medium in the tower. width, height: in pixels. grid: of its patches, along time, height and width.

    section, num_frames: the part of a video that is read. steps: advance of the positions along time for a step of the
    grid, rounded down.
    """

    facts: ImageFacts | VideoFacts
    width: int
    height: int
    grid: tuple[int, int, int]
    section: Section | None = None
    num_frames: int = 0
    steps: float = 1


@dataclass(frozen=True, kw_only=True)
class QwenVL:
    """See Family."""

    images: Vision
    videos: Vision
    choice: FrameChoice
    image_token_id: int
    video_token_id: int

    model_types: ClassVar[tuple[str, ...]] = ()
    processor_classes: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str] = ""  # for people
    num_axes: ClassVar[int] = 3
    towers: ClassVar[Mapping[str, str]] = {"image": "visual", "video": "visual"}
    model_class: ClassVar[str] = AUTO_CLASS
    token_inputs: ClassVar[tuple[str, ...]] = ()
    attentions: ClassVar[tuple[str, ...]] = (
        "flash_attention_2", "flex_attention", "sdpa_varlen", "sdpa", "eager",
    )  # fmt: skip
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE, "video": VIDEO}
    surroundings: ClassVar[tuple[str, str]] = (START, END)
    media_tokens: ClassVar[tuple[str, ...]] = (IMAGE, VIDEO, START, END)

    image_defaults: ClassVar[Mapping[str, Any]] = {}
    video_defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Self:
        """See FamilyMaker."""
        images = Vision.of({**cls.image_defaults, **files.image}, name=files.name)
        videos = Vision.of(cls.video_settings(files), name=files.name)
        fps, frame_num = settings.fps, settings.frame_num
        return cls(
            images=images.within(settings.image_min_pixels, settings.image_max_pixels),
            videos=videos.within(settings.video_min_pixels, settings.video_max_pixels),
            choice=FrameChoice(
                fps=float(fps or files.video.get("fps") or cls.video_defaults["fps"]),
                frame_num=frame_num if frame_num or fps else files.video.get("num_frames"),
                min_frames=files.video.get("min_frames") or cls.video_defaults["min_frames"],
                max_frames=settings.video_max_frames
                or files.video.get("max_frames")
                or cls.video_defaults["max_frames"],
                start=settings.video_start or 0.0,
                end=settings.video_end,
            ),
            image_token_id=token_ids(cls.placeholders["image"]),
            video_token_id=token_ids(cls.placeholders["video"]),
            **cls.further(files),
            **cls.of_sound(files, settings, token_ids),
        )

    @classmethod
    def video_settings(cls, files: ProcessorFiles) -> Mapping[str, Any]:
        """Settings of the processor of videos."""
        return {**cls.video_defaults, **files.video}

    @classmethod
    def further(cls, files: ProcessorFiles) -> Mapping[str, Any]:
        """Additional fields of a family."""
        return {}

    @classmethod
    def of_sound(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Mapping[str, Any]:
        """Fields of a family that also reads sound."""
        return {}

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {
            "family": self.name,
            "images": self.images.description,
            "videos": self.videos.description,
            "frames": asdict(self.choice),
        }

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """See Family."""
        return self._image(facts) if kind == "image" else self.video(facts, interval)  # type: ignore[arg-type]

    def _image(self, facts: ImageFacts) -> Layout:
        images = self.images
        side, merge = images.patch_size, images.merge_size
        height, width = fitting(facts.height, facts.width, images)
        rows, columns = height // side, width // side
        patches = rows * columns
        shape = PatchGrid(facts, width, height, (1, rows, columns))
        return Layout("image", (patches // (merge * merge),), patches, "", shape)

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """Layout of a video. interval: see `layout`."""
        raise NotImplementedError

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """Numbers of num_frames frames of a section."""
        raise NotImplementedError

    def frames(self, layout: Layout) -> tuple[int, ...]:
        """See Family."""
        shape: PatchGrid = layout.shape
        return () if shape.section is None else self.chosen(shape.section, shape.num_frames)

    def grid_of(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Grid of patches of frames of a size; the last frame is repeated to fill a patch."""
        videos = self.videos
        num_steps = -(-num_frames // videos.temporal_patch_size)
        return num_steps, height // videos.patch_size, width // videos.patch_size

    def runs(self, layout: Layout) -> list[tuple[int, int, int, float]]:
        """Return for each placeholder of a medium its grid of tokens along time, height and width, and the steps of
        time.
        """
        shape: PatchGrid = layout.shape
        merge = (self.images if layout.kind == "image" else self.videos).merge_size
        return [(shape.grid[0], shape.grid[1] // merge, shape.grid[2] // merge, shape.steps)]

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[np.int64]:
        """See Family. A medium begins at the end of the text before, and the text resumes after the medium's largest
        position.

        Since 5.3, transformers resumes the text after the largest side of a video, even before its last frame; the
        models were trained on the positions of this method.
        """
        runs = [run for layout in layouts for run in self.runs(layout)]
        if not runs:
            return np.broadcast_to(np.arange(len(input_ids)), (3, len(input_ids))).copy()
        at = np.flatnonzero((input_ids == self.image_token_id) | (input_ids == self.video_token_id))
        num_times, heights, widths = np.array([run[:3] for run in runs], np.int64).T
        steps = np.array([run[3] for run in runs], np.float32)
        sizes = num_times * heights * widths
        stops = sizes.cumsum()
        advance = np.ones(len(input_ids), np.int64)
        advance[at] = 0
        last = _along_time(num_times - 1, steps)
        advance[at[stops - 1]] = 1 + np.maximum(np.maximum(last, heights - 1), widths - 1)
        positions = np.broadcast_to(advance.cumsum() - advance, (3, len(input_ids))).copy()
        within = np.arange(len(at)) - np.repeat(stops - sizes, sizes)
        along_width = np.repeat(widths, sizes)
        rows, columns = np.divmod(within, along_width)
        times, rows = np.divmod(rows, np.repeat(heights, sizes))
        positions[:, at] += np.stack([_along_time(times, np.repeat(steps, sizes)), rows, columns])
        return positions

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """See Family."""
        return {}

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family."""
        tensors: dict[str, NDArray[Any]] = {}
        for kind, pixels, grids, vision in (
            ("image", "pixel_values", "image_grid_thw", self.images),
            ("video", "pixel_values_videos", "video_grid_thw", self.videos),
        ):
            found = [(layout, data) for layout, data in zip(layouts, media, strict=True) if layout.kind == kind]
            if found:
                num_patches = sum(math.prod(layout.shape.grid) for layout, _ in found)
                patches = tensors[pixels] = memory(pixels, (num_patches, vision.patch_values), np.float32)
                start = 0
                for layout, data in found:
                    stop = start + math.prod(layout.shape.grid)
                    vision.patches(self.pixels(layout, data), out=patches[start:stop])
                    start = stop
                tensors[grids] = np.array([layout.shape.grid for layout, _ in found], np.int64)
        return tensors

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See Family."""
        return made

    def limits(self, kind: str) -> Mapping[str, Any]:
        """See Family."""
        of_kind = self.images if kind == "image" else self.videos
        return {"size": {"shortest_edge": of_kind.min_pixels, "longest_edge": of_kind.max_pixels}}

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """See Family."""
        from ..media.images import decode_image
        from ..media.pixels import resize
        from ..media.video import read_frames

        shape: PatchGrid = layout.shape
        if layout.kind == "video":
            num_frames = cast("VideoFacts", shape.facts).frames
            chosen = self.frames(layout)
            return read_frames(data, chosen, num_frames=num_frames, width=shape.width, height=shape.height)
        image = decode_image(data, min_width=shape.width, min_height=shape.height)
        check_decoded(image.shape, cast("ImageFacts", shape.facts))
        return resize(image, width=shape.width, height=shape.height)[None]

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family."""
        inputs: dict[str, dict[str, NDArray[Any]]] = {}
        for kind, pixels, grids, vision in (
            ("image", "pixel_values", "image_grid_thw", self.images),
            ("video", "pixel_values_videos", "video_grid_thw", self.videos),
        ):
            grid = 1, vision.merge_size, vision.merge_size
            inputs[kind] = {
                pixels: np.zeros((math.prod(grid), vision.patch_values), np.float32),
                grids: np.array([grid], np.int64),
            }
        return inputs

    @staticmethod
    def pieces(kind: str, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See Family: images, and pairs of frames of videos."""
        name = f"{kind}_grid_thw"
        grids = inputs[name].repeat_interleave(inputs[name][:, 0], dim=0)
        grids[:, 0] = 1
        return {**inputs, name: grids}, grids.prod(dim=1).tolist()

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """See Family."""
        names = {"image": "pixel_values", "video": "pixel_values_videos"}
        return {kind for kind, name in names.items() if name in inputs}

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See Family."""
        tower = config.get("vision_config") or {}
        expected = {**config, **{f"vision_config.{name}": value for name, value in tower.items()}}
        for name, value in self.model_settings().items():
            if name in expected and expected[name] != value:
                raise ConfigError(
                    f"the model has {name} {expected[name]!r}, and its processor {value!r}: take the model's own "
                    "processor"
                )

    def model_settings(self) -> dict[str, Any]:
        """Values that the model's config must have; a config may lack a name."""
        return {
            "image_token_id": self.image_token_id,
            "video_token_id": self.video_token_id,
            "vision_config.patch_size": self.images.patch_size,
            "vision_config.temporal_patch_size": self.images.temporal_patch_size,
            "vision_config.spatial_merge_size": self.images.merge_size,
        }


class FramesOfTheirOwn(QwenVL):
    """Qwen2-VL and Qwen2.5-VL: each frame has the limits of an image, and frames are read in pairs."""

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """See QwenVL."""
        videos, section = self.videos, self.choice.section(facts, interval)
        num_frames = self.choice.num_frames(section)
        if self.choice.frame_num is None:
            num_frames = max(num_frames // videos.temporal_patch_size * videos.temporal_patch_size, 1)
        height, width = fitting(facts.height, facts.width, videos)
        grid = self.grid_of(num_frames, height, width)
        patches = math.prod(grid)
        shape = PatchGrid(facts, width, height, grid, section, num_frames, self.steps(section, num_frames))
        return Layout("video", (patches // videos.merge_size**2,), patches, "", shape)

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """See QwenVL."""
        return starts_of_equal_parts(section, num_frames)

    def steps(self, section: Section, num_frames: int) -> float:
        """Step of a pair of frames along the positions of time."""
        return 1


def _along_time(times: NDArray[np.int64], steps: NDArray[np.float32]) -> NDArray[np.int64]:
    """Positions of steps of time by the models' float32 arithmetic."""
    return (times.astype(np.float32) * steps).astype(np.int64)


def fitting(height: int, width: int, vision: Vision) -> tuple[int, int]:
    """Return the height and width nearest to an image's, with sides in whole numbers of tokens, within the limits on
    pixels.

    The same arithmetic as smart_resize of transformers' Qwen2VLImageProcessor.

    >>> fitting(480, 640, Vision.of({"min_pixels": 3136, "max_pixels": 200704}, name=""))
    (364, 504)
    """
    factor = vision.patch_size * vision.merge_size
    check_aspect(height, width)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > vision.max_pixels:
        shrink = math.sqrt((height * width) / vision.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < vision.min_pixels:
        grow = math.sqrt(vision.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def check_aspect(height: int, width: int) -> None:
    """Raise DataError if one side is more than 200 times the other."""
    if height > _MAX_ASPECT * width or width > _MAX_ASPECT * height:
        raise DataError(
            f"it has {width} x {height} pixels, but one side may be at most {_MAX_ASPECT} times the other: cut or "
            "remove it"
        )


# Qwen2-VL: two frames a second, and a pair of frames is a step of time, for any interval between them.


class Qwen2VL(FramesOfTheirOwn):
    """See Family."""

    name = "Qwen2-VL"
    model_types = ("qwen2_vl",)
    processor_classes = ("Qwen2VLProcessor",)
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
    }


FAMILY = Qwen2VL
