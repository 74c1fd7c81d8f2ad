"""LLaVA-OneVision: a single image is seen whole and in tiles, several images only whole, frames of videos are pooled.

A single image of a sample is fitted into the listed resolution with the least waste, and cut into tiles. The features
of its padding are dropped; a token ends every row of features. Several images are each padded to a square. All videos
have the same number of frames, because the model takes a batch of videos as one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...processors.families.family import Layout, TokenIds
from ...processors.families.files import ProcessorFiles
from ...processors.families.settings import MediaSettings
from ...processors.families.vision import (
    CLIP_MEAN,
    CLIP_STD,
    Section,
    choice_of,
    refuse_pixels,
    square_side,
    starts_of_equal_parts,
)
from ...processors.media.types import ImageFacts, Memory, new_memory
from ...versions.transformers import ENDS_FEATURES_OF_LLAVA_VIDEOS
from .tiles import TiledFamily, TileGrid, Tiles

if TYPE_CHECKING:
    from ...processors.media.facts import VideoFacts
    from ...processors.media.types import Interval

IMAGE, VIDEO = "<image>", "<video>"
_DEFAULTS = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
_SIDE = 384  # default of a folder
_NUM_FRAMES = 32  # default number of frames of every video; the maximum of the model's training
_ANYRES = "anyres_max_"
_MOST_SHRUNK = 1.1  # features of an image are reduced if its sides exceed the allowed size by this factor


@dataclass(frozen=True, kw_only=True)
class LlavaOnevision(TiledFamily):
    """See Family. resolutions: (height, width) for a single image. grid: tokens of a tile's side.

    slow_every: if set, one in every slow_every frames of a video has all its tokens, the others have a quarter, and an
    extra token ends each frame. tells_times: whether the text after a video has the video's duration and the times of
    its frames. most_tiles: of a single image; more features are reduced to the features of most_tiles tiles.
    """

    resolutions: tuple[tuple[int, int], ...]
    grid: int
    most_tiles: int
    video_token_id: int
    slow_every: int | None = None
    tells_times: bool = False

    name = "LLaVA-OneVision"
    model_types = ("llava_onevision",)
    processor_classes = ("LlavaOnevisionProcessor",)
    towers: ClassVar[Mapping[str, str]] = {"image": "vision_tower", "video": "vision_tower"}
    placeholders: ClassVar[Mapping[str, str]] = {"image": IMAGE, "video": VIDEO}
    media_tokens = (IMAGE, VIDEO)
    tensor_names: ClassVar[Mapping[str, str]] = {"image": "pixel_values", "video": "pixel_values_videos"}

    @classmethod
    def of(cls, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> LlavaOnevision:
        """See FamilyMaker."""
        refuse_pixels(settings, family=cls.name)
        if settings.fps is not None:
            raise ConfigError(
                f"processor.fps {settings.fps} cannot be followed: {cls.name} reads as many frames of each video, "
                "whatever its length: set frame_num"
            )
        side = square_side(files.image.get("size"), name=files.name, default=_SIDE)
        num_tokens = int(files.processor.get("num_image_tokens") or 729)
        aspect = str(files.processor.get("vision_aspect_ratio", f"{_ANYRES}9"))
        strategy = files.processor.get("vision_feature_select_strategy") or "full"
        if strategy != "full" or not aspect.removeprefix(_ANYRES).isdigit() or math.isqrt(num_tokens) ** 2 < num_tokens:
            raise ConfigError(
                f"processor {files.name!r} has vision_feature_select_strategy {strategy!r}, vision_aspect_ratio "
                f"{aspect!r} and num_image_tokens {num_tokens}, and only 'full', '{_ANYRES}N' and squares are "
                "supported: save the processor again"
            )
        choice = choice_of(files, settings, num_frames=_NUM_FRAMES)
        return cls(
            tiles=Tiles.of({**_DEFAULTS, **files.image}, side=side, name=files.name),
            video_tiles=Tiles.of({**_DEFAULTS, **files.video}, side=side, name=files.name),
            choice=choice,
            image_token_id=token_ids(IMAGE),
            video_token_id=token_ids(VIDEO),
            resolutions=_resolutions(files, side),
            grid=math.isqrt(num_tokens),
            most_tiles=int(aspect.removeprefix(_ANYRES)),
            slow_every=settings.slow_every,
            tells_times=bool(settings.frame_times),
        )

    @property
    def num_frames(self) -> int:
        """Number of frames of every video."""
        assert self.choice is not None
        return min(self.choice.frame_num or _NUM_FRAMES, self.choice.max_frames)

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {
            **super().description,
            "resolutions": [list(each) for each in self.resolutions],
            "grid": self.grid,
            "most_tiles": self.most_tiles,
            "num_frames": self.num_frames,
            **({} if self.slow_every is None else {"slow_every": self.slow_every}),
            **({"frame_times": True} if self.tells_times else {}),
        }

    def image(self, facts: ImageFacts) -> Layout:
        """See TiledFamily: layout of a single image."""
        height, width = best_resolution(facts, self.resolutions)
        rows, columns = height // self.tiles.side, width // self.tiles.side
        shape = TileGrid(facts, rows * columns + 1, rows, columns, _fitted(facts, width, height))
        return Layout("image", (self.grid**2 + self._features(facts, rows, columns),), shape.num_tiles, "", shape)

    def in_sample(self, layouts: Sequence[Layout]) -> list[Layout]:
        """See Family: each of several images becomes one tile."""
        if sum(each.kind == "image" for each in layouts) < 2:
            return [*layouts]
        return [self._one_of_several(each.shape.facts) if each.kind == "image" else each for each in layouts]

    def _one_of_several(self, facts: ImageFacts) -> Layout:
        shape = TileGrid(facts, 1, 0, 0, (self.tiles.side, self.tiles.side))
        return Layout("image", (self.grid**2 + 1,), 1, "", shape)

    def _features(self, facts: ImageFacts, rows: int, columns: int) -> int:
        """Tokens of the tiles of a single image: without its padding, with a token at the end of each row.

        The same arithmetic as transformers' LlavaOnevisionProcessor and its model.
        """
        height, width = rows * self.grid, columns * self.grid
        if facts.width / facts.height > width / height:
            height -= (height - int(round(facts.height * (width / facts.width), 7))) // 2 * 2
        else:
            width -= (width - int(round(facts.width * (height / facts.height), 7))) // 2 * 2
        ratio = math.sqrt(height * width / (self.most_tiles * self.grid**2))
        if ratio > _MOST_SHRUNK:
            height, width = int(height // ratio), int(width // ratio)
        return height * width + height

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """See TiledFamily. Frames are repeated if a video has too few."""
        assert self.choice is not None
        section = self.choice.section(facts, interval)
        count = self.tokens_of_frames(self.num_frames) + 1
        shape = TileGrid(facts, self.num_frames, section=section, num_frames=self.num_frames)
        return Layout("video", (count,), self.num_frames, "", shape)

    def tokens_of_frames(self, num_frames: int) -> int:
        """Tokens of the frames of a video."""
        slow = math.ceil(self.grid / 2) ** 2
        if self.slow_every is None:
            return num_frames * slow
        num_slow = math.ceil(num_frames / self.slow_every)
        return num_slow * slow + (num_frames - num_slow) * math.ceil(self.grid / 4) ** 2 + num_frames

    def words_behind(self, layout: Layout) -> str:
        """Text after a video, in the words of LLaVA-Video's training; "" without frame times."""
        if not self.tells_times or layout.kind != "video":
            return ""
        section, fps = layout.shape.section, layout.shape.facts.fps
        times = ",".join(f"{(frame - section.first) / fps:.2f}s" for frame in self.frames(layout))
        return (
            f"The video lasts for {section.seconds:.2f} seconds, and {self.num_frames} frames are uniformly sampled "
            f"from it. These frames are located at {times}. Please answer the following questions related to this "
            "video."
        )

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """See TiledFamily. With slow frames or times, the last frame is included, like in LLaVA-Video."""
        if self.slow_every is None and not self.tells_times:
            return starts_of_equal_parts(section, num_frames)
        last, gaps = section.num_frames - 1, max(num_frames - 1, 1)
        return tuple(section.first + number * last // gaps for number in range(num_frames))

    def cut(self, image: NDArray[np.uint8], shape: TileGrid) -> NDArray[np.uint8]:
        """See TiledFamily."""
        if not shape.rows:
            return self.tiles.whole(_squared(image, [int(each * 255) for each in self.tiles.mean]))
        (width, height), side = shape.size, self.tiles.side
        canvas = np.zeros((shape.rows * side, shape.columns * side, 3), np.uint8)
        top, left = (canvas.shape[0] - height) // 2, (canvas.shape[1] - width) // 2
        canvas[top : top + height, left : left + width] = self.tiles.resized(image, width=width, height=height)
        return np.concatenate([self.tiles.whole(image), self.tiles.cut(canvas)])

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family. Frames have one more axis: videos, frames, …"""
        tensors = super().tensors(layouts, media, memory)
        if (frames := tensors.get("pixel_values_videos")) is not None:
            tensors["pixel_values_videos"] = frames.reshape(-1, self.num_frames, *frames.shape[1:])
        return tensors

    def beside(self, layouts: Sequence[Layout]) -> dict[str, NDArray[Any]]:
        """See TiledFamily."""
        sizes = [(each.shape.facts.height, each.shape.facts.width) for each in layouts if each.kind == "image"]
        if not sizes:
            return {}
        return {"image_sizes": np.array(sizes, np.int64), "batch_num_images": np.array([len(sizes)], np.int64)}

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family: an image of the smallest resolution, and a video of one frame."""
        height, width = min(self.resolutions, key=math.prod)
        smallest = self.image(ImageFacts(width, height))
        tile = (3, self.tiles.side, self.tiles.side)
        return {
            "image": {
                "pixel_values": np.zeros((smallest.patches, *tile), np.float32),
                "image_sizes": np.array([[height, width]], np.int64),
                "batch_num_images": np.ones(1, np.int64),
            },
            "video": {"pixel_values_videos": np.zeros((1, 1, *tile), np.float32)},
        }

    def features(self, base: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
        """See Family."""
        if kind == "image":
            return base.get_image_features(**inputs)
        layer, strategy = base.config.vision_feature_layer, base.config.vision_feature_select_strategy
        found = base.get_video_features(
            inputs["pixel_values_videos"], vision_feature_layer=layer, vision_feature_select_strategy=strategy
        )
        if ENDS_FEATURES_OF_LLAVA_VIDEOS:
            return found
        (of_frames,) = getattr(found, "pooler_output", found)
        features = of_frames.new_empty(len(of_frames) + 1, of_frames.shape[1])
        features[:-1], features[-1] = of_frames, base.image_newline  # the model puts it after each video
        return features

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See Family."""
        super().check_model(config)
        if (found := config.get("faster_token_stride") or None) != self.slow_every:
            raise ConfigError(
                f"the model's videos have slow_every {found}, and its processor's {self.slow_every}: set "
                "processor.slow_every and model.slow_every to the same number, or leave both out"
            )

    def model_settings(self) -> dict[str, Any]:
        """See TiledFamily."""
        return {
            "image_token_index": self.image_token_id,
            "video_token_index": self.video_token_id,
            "vision_config.image_size": self.tiles.side,
            "vision_config.patch_size": self.tiles.side // self.grid,
            "vision_aspect_ratio": f"{_ANYRES}{self.most_tiles}",
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [list(each) for each in self.resolutions],
        }


def best_resolution(facts: ImageFacts, resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width of the resolution that keeps the most pixels of an image; of equal resolutions, the
    least wasteful.

    The same arithmetic as transformers' select_best_resolution.

    >>> best_resolution(ImageFacts(700, 300), [(384, 384), (384, 768), (768, 384)])
    (384, 768)
    """
    found, most, least = resolutions[0], 0, math.inf
    for height, width in resolutions:
        scale = min(width / facts.width, height / facts.height)
        kept = min(int(facts.width * scale) * int(facts.height * scale), facts.width * facts.height)
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < least):
            found, most, least = (height, width), kept, wasted
    return found


def _fitted(facts: ImageFacts, width: int, height: int) -> tuple[int, int]:
    """Width and height of an image scaled to fit into a resolution."""
    along_width, along_height = width / facts.width, height / facts.height
    if along_width < along_height:
        return width, min(math.ceil(facts.height * along_width), height)
    return min(math.ceil(facts.width * along_height), width), height


def _squared(image: NDArray[np.uint8], color: Sequence[int]) -> NDArray[np.uint8]:
    """Put an image in the middle of a square of a color."""
    height, width, _ = image.shape
    side = max(height, width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square


def _resolutions(files: ProcessorFiles, side: int) -> tuple[tuple[int, int], ...]:
    """Return the resolutions of the folder. Raises ConfigError if there is none, or if a side is not a multiple of the
    tiles'.
    """
    said = files.image.get("image_grid_pinpoints") or []
    found = tuple((int(height), int(width)) for height, width in said)
    if not found or any(each % side for pair in found for each in pair):
        raise ConfigError(
            f"processor {files.name!r} has image_grid_pinpoints {said!r}, expected sides that are multiples of its "
            f"tiles' {side}: save the processor again"
        )
    return found


FAMILY = LlavaOnevision
