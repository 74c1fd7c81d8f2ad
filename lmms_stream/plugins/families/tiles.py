"""Shared code of families whose towers read square tiles of one size: images and frames -> tiles, normalised."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...processors.families.family import AUTO_CLASS, Layout
from ...processors.families.files import check_followed
from ...processors.families.vision import FrameChoice, Section, check_decoded
from ...processors.media.types import Memory, new_memory

if TYPE_CHECKING:
    from ...processors.media.facts import Facts, ImageFacts, VideoFacts
    from ...processors.media.pixels import Filter
    from ...processors.media.types import Interval

HALF = (0.5, 0.5, 0.5)
_FILTERS: Mapping[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
_ALWAYS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}


class TileGrid(NamedTuple):
    """Tiles of an image. rows, columns: of its grid of tiles. size: (width, height) of the grid's pixels, without
    padding.

    num_tiles: of all, including the tiles of the whole image at a smaller size. section, num_frames: the part of a
    video that is read.
    """

    facts: ImageFacts | VideoFacts
    num_tiles: int
    rows: int = 1
    columns: int = 1
    size: tuple[int, int] = (0, 0)
    section: Section | None = None
    num_frames: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Squares of side x side pixels. mean, std: of red, green and blue from 0 to 1. filter: of resizing."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    filter: Filter

    @staticmethod
    def of(values: Mapping[str, Any], *, side: int, name: str) -> Tiles:
        """Read the settings in preprocessor_config.json. ConfigError for unsupported settings. name: the folder."""
        check_followed(values, _ALWAYS, name=name)
        resample = values.get("resample", 3)
        if resample not in _FILTERS:
            raise ConfigError(
                f"processor {name!r} has resample {resample!r}, and only {', '.join(map(str, _FILTERS))} (Lanczos, "
                "bilinear, bicubic) are followed here: save it anew"
            )
        return Tiles(
            side=side,
            mean=tuple(map(float, values["image_mean"])),
            std=tuple(map(float, values["image_std"])),
            filter=_FILTERS[resample],
        )

    def resized(self, image: NDArray[np.uint8], *, width: int, height: int) -> NDArray[np.uint8]:
        """Resize images: [..., H, W, 3] -> [..., height, width, 3]."""
        from ...processors.media.pixels import resize

        return resize(image, width=width, height=height, filter=self.filter)

    def whole(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resize an image to one tile, ignoring its aspect: [1, side, side, 3]."""
        return self.resized(image, width=self.side, height=self.side)[None]

    def cut(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Cut an image with sides in whole numbers of tiles into its tiles, row by row: [n, side, side, 3]."""
        height, width, _ = image.shape
        side = self.side
        rows = image.reshape(height // side, side, width // side, side, 3)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1, side, side, 3)

    def normalised(self, tiles: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Normalise [n, side, side, 3] into out [n, 3, side, side], with the same bits as transformers' slow
        processors.
        """
        from ...processors.media.pixels import to_patches

        to_patches(
            tiles,
            patch_size=self.side,
            merge_size=1,
            temporal_patch_size=1,
            mean=self.mean,
            std=self.std,
            out=out.reshape(len(out), -1),
        )


@dataclass(frozen=True, kw_only=True)
class TiledFamily:
    """See Family. A subclass defines the tiles of an image, and its text.

    tiles: of images; video_tiles: of frames, if the family reads videos. choice: of frames.
    """

    tiles: Tiles
    video_tiles: Tiles | None = None
    choice: FrameChoice | None = None
    image_token_id: int

    name: ClassVar[str] = ""  # for people
    model_types: ClassVar[tuple[str, ...]] = ()
    processor_classes: ClassVar[tuple[str, ...]] = ()
    num_axes: ClassVar[int] = 0
    towers: ClassVar[Mapping[str, str]] = {"image": "vision_tower"}
    model_class: ClassVar[str] = AUTO_CLASS
    token_inputs: ClassVar[tuple[str, ...]] = ()
    attentions: ClassVar[tuple[str, ...]] = ("flash_attention_2", "flex_attention", "sdpa", "eager")
    placeholders: ClassVar[Mapping[str, str]] = {}
    surroundings: ClassVar[tuple[str, str]] = ("", "")
    repeated_tokens: ClassVar[tuple[str, ...]] = ()
    media_tokens: ClassVar[tuple[str, ...]] = ()
    tensor_names: ClassVar[Mapping[str, str]] = {"image": "pixel_values", "video": "pixel_values"}  # of a kind's tiles

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        of_videos = {} if self.choice is None else {"frames": asdict(self.choice)}
        return {"family": self.name, "side": self.tiles.side, **of_videos}

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """See Family."""
        return self.image(facts) if kind == "image" else self.video(facts, interval)  # type: ignore[arg-type]

    def image(self, facts: ImageFacts) -> Layout:
        """Layout of an image."""
        raise NotImplementedError

    def video(self, facts: VideoFacts, interval: Interval | None) -> Layout:
        """Layout of a video. interval: see `layout`."""
        raise NotImplementedError

    def cut(self, image: NDArray[np.uint8], shape: TileGrid) -> NDArray[np.uint8]:
        """Cut a decoded image into its tiles in the tower's order: [n, side, side, 3]."""
        raise NotImplementedError

    def chosen(self, section: Section, num_frames: int) -> tuple[int, ...]:
        """Numbers of num_frames frames of a section."""
        raise NotImplementedError

    def frames(self, layout: Layout) -> tuple[int, ...]:
        """See Family."""
        shape: TileGrid = layout.shape
        return () if shape.section is None else self.chosen(shape.section, shape.num_frames)

    def in_sample(self, layouts: Sequence[Layout]) -> list[Layout]:
        """See Family."""
        return [*layouts]

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[np.int64]:
        """See Family: never called, as num_axes is 0."""
        raise NotImplementedError

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """See Family."""
        return {}

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """See Family: the tiles of an image, or a tile of each frame."""
        from ...processors.media.images import decode_image

        shape: TileGrid = layout.shape
        if layout.kind == "video":
            return self.frames_of(layout, data)
        width, height = shape.size
        image = decode_image(data, min_width=max(width, self.tiles.side), min_height=max(height, self.tiles.side))
        check_decoded(image.shape, cast("ImageFacts", shape.facts))
        return self.cut(image, shape)

    def frames_of(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """Frames that are read of a video, a tile each, ignoring their aspect."""
        from ...processors.media.video import read_frames

        assert self.video_tiles is not None
        video, side = cast("VideoFacts", layout.shape.facts), self.video_tiles.side
        return read_frames(
            data,
            self.frames(layout),
            num_frames=video.frames,
            width=side,
            height=side,
            filter=self.video_tiles.filter,
        )

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family."""
        tensors: dict[str, NDArray[Any]] = {}
        for name in dict.fromkeys(self.tensor_names.values()):
            found = [
                (layout, data)
                for layout, data in zip(layouts, media, strict=True)
                if self.tensor_names[layout.kind] == name
            ]
            if found:
                side = self.tiles.side
                num_tiles = sum(layout.patches for layout, _ in found)
                rows = tensors[name] = memory(name, (num_tiles, 3, side, side), np.float32)
                start = 0
                for layout, data in found:
                    self.normalised(layout.kind, self.pixels(layout, data), rows[start : start + layout.patches])
                    start += layout.patches
        return tensors | self.beside(layouts)

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See Family. Some families' installed processors have an extra axis of samples."""
        tiles = made.get("pixel_values")
        return made if tiles is None else {**made, "pixel_values": tiles.reshape(-1, *tiles.shape[-3:])}

    def beside(self, layouts: Sequence[Layout]) -> dict[str, NDArray[Any]]:
        """Other inputs of a sample's media."""
        return {}

    def normalised(self, kind: str, tiles: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Normalise the tiles of a kind of media for the tower; see Tiles."""
        of_kind = self.tiles if kind == "image" or self.video_tiles is None else self.video_tiles
        of_kind.normalised(tiles, out)

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family."""
        side = self.dummy_side()
        return {"image": {"pixel_values": np.zeros((1, 3, side, side), np.float32)}}

    def dummy_side(self) -> int:
        """Side of the smallest tile that the tower takes."""
        return self.tiles.side

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """See Family. Frames passed to the model as images count as images."""
        names = {"image": "pixel_values", "video": "pixel_values_videos"}
        return {kind for kind, name in names.items() if name in inputs}

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See Family."""
        expected = {**config, **{f"vision_config.{name}": each for name, each in _part(config, "vision_config")}}
        for name, value in self.model_settings().items():
            found = expected.get(name, value)
            found = list(found) if isinstance(found, tuple) else found
            if found not in (value, [value, value]):
                raise ConfigError(
                    f"the model has {name} {found!r}, and its processor {value!r}: take the model's own processor"
                )

    def model_settings(self) -> dict[str, Any]:
        """Required values of the model's config; missing values are allowed."""
        return {"image_token_id": self.image_token_id, "vision_config.image_size": self.tiles.side}


def _part(config: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return list((config.get(name) or {}).items())
