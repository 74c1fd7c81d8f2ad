"""The processor of the installed transformers for a folder: media as its arguments, and what it answers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from .family import Family

if TYPE_CHECKING:
    from ..media.facts import ImageFacts, VideoFacts


class Answer(NamedTuple):
    """ids: int64[T] of the media alone. tensors: by the names and in the shapes of our family."""

    ids: NDArray[np.int64]
    tensors: Mapping[str, NDArray[Any]]


class Installed:
    """transformers' processor at a path or hub id. It is loaded when it is first asked, in each process anew.

    limits: of images and videos, instead of the folder's.
    """

    def __init__(self, path: str, family: Family | None, *, limits: Mapping[str, Mapping[str, Any]] | None = None):
        self.path = path
        self.family = family
        self.settings = {"image": dict(getattr(family, "settings_of_calls", {})), "video": {}}
        for kind, settings in (limits or {}).items():
            self.settings[kind] |= settings

    @cached_property
    def processor(self) -> Any:
        """Whatever transformers raises where it cannot be loaded."""
        from transformers import AutoProcessor

        with _quiet():
            return AutoProcessor.from_pretrained(self.path, trust_remote_code=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "processor"}

    def of_images(self, images: Sequence[NDArray[np.uint8]]) -> Answer:
        """Of the images [H, W, 3] of a sample. Whatever transformers raises."""
        return self._ask("image", len(images), self.pictures(images))

    def of_video(self, frames: NDArray[np.uint8], numbers: Sequence[int], facts: VideoFacts) -> Answer:
        """Of frames [N, H, W, 3] of a video, which have these numbers."""
        return self._ask("video", 1, self.film(frames, numbers, facts))

    def of_sound(self, samples: NDArray[np.float32], rate: int) -> Answer:
        """Of a clip of one channel."""
        return self._ask("audio", 1, self.sound(samples, rate))

    def pictures(self, images: Sequence[Any]) -> dict[str, Any]:
        """The arguments for images [H, W, 3], or for tensors [3, H, W]."""
        from PIL import Image

        opened = [Image.fromarray(each) if isinstance(each, np.ndarray) else each for each in images]
        settings = {**self.settings["image"]}
        if not isinstance(images[0], np.ndarray):
            settings["input_data_format"] = "channels_first"
        return {"images": [opened], **({"images_kwargs": settings} if settings else {})}

    def film(self, frames: Any, numbers: Sequence[int], facts: VideoFacts) -> dict[str, Any]:
        """The arguments for frames [N, H, W, 3], or for a tensor [N, 3, H, W]."""
        from transformers.video_utils import VideoMetadata

        known = {"total_num_frames": facts.frames, "fps": facts.fps, "duration": facts.frames / facts.fps}
        metadata = VideoMetadata(**known, frames_indices=list(numbers))
        pixels = frames.transpose(0, 3, 1, 2) if isinstance(frames, np.ndarray) else frames
        settings = {**self.settings["video"], "do_sample_frames": False}
        return {"videos": [pixels], "videos_kwargs": {**settings, "video_metadata": [metadata]}}

    def sound(self, samples: NDArray[np.float32], rate: int) -> dict[str, Any]:
        """The arguments for a clip of one channel."""
        return {"audio": [samples], "sampling_rate": rate}

    def chosen(self, num_frames: int, fps: float, asked: Mapping[str, Any]) -> list[int]:
        """The numbers of the frames that it reads of a video. asked: fps or num_frames, instead of the folder's."""
        from transformers.video_utils import VideoMetadata

        videos = self.processor.video_processor
        if not asked and not getattr(videos, "do_sample_frames", False):
            return list(range(num_frames))
        metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=num_frames / fps)
        names = inspect.signature(videos.sample_frames).parameters.keys() - {"metadata", "kwargs"}
        said: dict[str, Any] = {name: getattr(videos, name, None) for name in names}
        if asked:
            said |= {"fps": None, "num_frames": None, **asked}
        if said.get("num_frames"):
            said["num_frames"] = min(said["num_frames"], num_frames)
        found = videos.sample_frames(
            metadata=metadata, **{name: said[name] for name in names if said[name] is not None}
        )
        return [min(max(int(number), 0), num_frames - 1) for number in found]

    def of_size(self, kind: str, size: ImageFacts | VideoFacts, numbers: Sequence[int]) -> Answer:
        """Of an image of a size, or of these frames of a video, of which only shapes are there; see `shape_alone`."""
        import torch

        shape = (3, size.height, size.width)
        if kind == "image":
            return self._ask(kind, 1, self.pictures([torch.zeros(shape, dtype=torch.uint8, device="meta")]))
        pixels = torch.zeros((len(numbers), *shape), dtype=torch.uint8, device="meta")
        return self._ask(kind, 1, self.film(pixels, numbers, cast("VideoFacts", size)))

    def _ask(self, kind: str, number: int, given: dict[str, Any]) -> Answer:
        assert self.family is not None
        return self.asked(kind, number, given, text=surrounded(self.family, kind))

    def _called(self, given: Mapping[str, Any], *, text: str) -> Mapping[str, Any]:
        processor = self.processor
        # transformers takes settings out of what it is given, and another call may follow.
        copied = {name: {**value} if isinstance(value, dict) else value for name, value in given.items()}
        with _quiet():
            made: Mapping[str, Any] = processor(text=[text], **copied, add_special_tokens=False, return_tensors="pt")
        return made

    def asked(self, kind: str, number: int, given: dict[str, Any], *, text: str) -> Answer:
        """The answer about media given as arguments. number: how many there are; text: what stands for each."""
        try:
            made = self._called(given, text="and".join([text] * number))
        except ValueError:
            if kind != "video":
                raise
            # Until 5.0 SmolVLM's processor takes videos as it takes images, in a list for each text.
            settings = {**given["videos_kwargs"], "video_metadata": [given["videos_kwargs"]["video_metadata"]]}
            listed = {"videos": [given["videos"]], "videos_kwargs": settings}
            made = self._called(listed, text="and".join([text] * number))
        arrays = {name: _array(value) for name, value in made.items() if hasattr(value, "numpy")}
        ids = arrays.pop("input_ids")[0]
        return Answer(ids, arrays if self.family is None else self.family.of_installed(arrays))


def model_types_of(processor_class: str) -> tuple[str, ...]:
    """The types of models that have a processor of this class."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return tuple(kind for kind, name in PROCESSOR_MAPPING_NAMES.items() if name == processor_class)


def surrounded(family: Family, kind: str) -> str:
    """What a chat template writes for a medium."""
    before, after = family.surroundings
    return f"{before}{family.placeholders[kind]}{after}"


def _array(tensor: Any) -> NDArray[Any]:
    """float32 for numbers with fractions; of a tensor without values, zeros that take no memory."""
    if tensor.device.type == "meta":
        return np.broadcast_to(np.float32(0) if tensor.is_floating_point() else np.int64(0), tuple(tensor.shape))
    made: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers warns of nothing, and torch uses one thread: this process may be forked, or was."""
    import torch
    from transformers.utils import logging

    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)
