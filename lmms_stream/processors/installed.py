"""The processor of the installed transformers for a folder: to compare with, and to read media in place of our code.

It reads media one by one, and token counts are taken from black images or silence of the same size, so it is slower
than our code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError
from .families.family import Family, Layout
from .families.vision import check_decoded
from .media.memory import Memory, new_memory
from .tokenizers import FastTokenizer

if TYPE_CHECKING:
    from .media.facts import AudioFacts, Facts, ImageFacts, VideoFacts
    from .media.intervals import Interval

PLURALS = {"image": "images", "video": "videos", "audio": "sounds"}
_MOST_SIZES = 1 << 16  # of media whose layouts are kept


class Answer(NamedTuple):
    """ids: int64[T] of the media alone. tensors: by the names and in the shapes of our family."""

    ids: NDArray[np.int64]
    tensors: Mapping[str, NDArray[Any]]


class Installed:
    """transformers' processor at a path or hub id. It is loaded when it is first asked, in each process anew.

    limits: of images and videos, instead of the folder's.
    """

    def __init__(self, path: str, family: Family, *, limits: Mapping[str, Mapping[str, Any]] | None = None):
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
        from PIL import Image

        given: dict[str, Any] = {"images": [[Image.fromarray(each) for each in images]]}
        if settings := self.settings["image"]:
            given["images_kwargs"] = {**settings}  # a copy: transformers takes settings out of it
        return self._ask("image", len(images), given)

    def of_video(self, frames: NDArray[np.uint8], numbers: Sequence[int], facts: VideoFacts) -> Answer:
        """Of frames [N, H, W, 3] of a video, which have these numbers."""
        from transformers.video_utils import VideoMetadata

        known = {"total_num_frames": facts.frames, "fps": facts.fps, "duration": facts.frames / facts.fps}
        metadata = VideoMetadata(**known, frames_indices=list(numbers))
        given: dict[str, Any] = {"videos": [frames.transpose(0, 3, 1, 2)], "video_metadata": [metadata]}
        return self._ask("video", 1, {**given, "videos_kwargs": {**self.settings["video"], "do_sample_frames": False}})

    def of_sound(self, samples: NDArray[np.float32], rate: int) -> Answer:
        """Of a clip of one channel."""
        return self._ask("audio", 1, {"audio": [samples], "sampling_rate": rate})

    def _ask(self, kind: str, number: int, given: dict[str, Any]) -> Answer:
        text = "and".join([surrounded(self.family, kind)] * number)
        processor = self.processor
        with _quiet():
            made = processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        arrays = {name: _array(value) for name, value in made.items() if hasattr(value, "numpy")}
        tensors = self.family.of_installed(arrays)
        return Answer(arrays["input_ids"][0], tensors)


class ByInstalled:
    """A family that reads some kinds of media with the installed processor; see Family.

    differences: kind -> how the family's own code differs. The family still chooses the frames of a video.
    """

    def __init__(self, ours: Family, installed: Installed, tokenizer: FastTokenizer, differences: Mapping[str, str]):
        self.ours = ours
        self.installed = installed
        self.tokenizer = tokenizer
        self.differences = dict(differences)
        self._layouts: dict[tuple[str, Facts, Interval | None], Layout] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "ours":  # not there yet, where it is unpickled
            raise AttributeError(name)
        return getattr(self.ours, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layouts": {}}

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        return {**self.ours.description, "read by": dict.fromkeys(self.differences, version_name())}

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """See Family."""
        asked = (kind, facts, interval)
        if asked in self._layouts:
            return self._layouts[asked]
        ours = self.ours.layout(kind, facts) if interval is None else self.ours.layout(kind, facts, interval)
        if kind not in self.differences:
            return ours
        if len(self._layouts) >= _MOST_SIZES:
            self._layouts.clear()
        self._layouts[asked] = self._by_installed(ours, facts)
        return self._layouts[asked]

    def video_with_sound(self, facts: VideoFacts, interval: Interval | None, sound: AudioFacts | None) -> Layout:
        """See Omni. ConfigError where one of the two is read by the installed processor."""
        for kind in ("video",) if sound is None else ("video", "audio"):
            if kind in self.differences:
                raise self._refused("video", of=kind)
        made: Layout = self.ours.video_with_sound(facts, interval, sound)  # type: ignore[attr-defined]
        return made

    def in_sample(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """See Family. ConfigError for images that are read otherwise because there are several."""
        in_sample = getattr(self.ours, "in_sample", None)
        changed = layouts if in_sample is None else in_sample(layouts)
        if "image" in self.differences and list(changed) != list(layouts):
            raise self._refused("image", beside="several images of a sample")
        return changed

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family."""
        if not any(layout.kind in self.differences for layout in layouts):
            return self.ours.tensors(layouts, media, memory)
        made = [
            self._read(layout, data) if layout.kind in self.differences else self.ours.tensors([layout], [data])
            for layout, data in zip(layouts, media, strict=True)
        ]
        joined: dict[str, NDArray[Any]] = {}
        for name in dict.fromkeys(name for each in made for name in each):
            parts = [each[name] for each in made if name in each]
            shape = (sum(map(len, parts)), *parts[0].shape[1:])
            out = (memory if parts[0].dtype.kind == "f" else new_memory)(name, shape, parts[0].dtype)
            joined[name] = out
            np.concatenate(parts, out=out)
        return joined

    def _by_installed(self, ours: Layout, facts: Facts) -> Layout:
        """Of black pixels of this size, or silence of this length: what media contain does not matter."""
        if ours.kind == "audio":
            medium: NDArray[Any] = np.zeros(ours.shape.num_samples, np.float32)
        else:
            size = cast("ImageFacts | VideoFacts", facts)
            medium = np.zeros((len(self.ours.frames(ours)) or 1, size.height, size.width, 3), np.uint8)
        ids, tensors = self._asked(ours, medium)
        once, counts = runs_of(ids, self.ours, self.tokenizer)
        shape = ours.shape
        for grid in (array for name, array in tensors.items() if name.endswith("grid_thw")):
            shape = shape._replace(grid=tuple(grid[0].tolist()))
        is_as_ours = ours.kind == "video" and len(counts) == len(ours.counts)  # texts of videos are no difference
        text = ours.text if is_as_ours else self._text(once, ours)
        return ours._replace(counts=counts, patches=_num_rows(tensors), text=text, shape=shape)

    def _text(self, once: NDArray[np.int64], ours: Layout) -> str:
        """The text of a layout that becomes these tokens: ours where it does."""
        written = self.tokenizer.decode(once.tolist())
        for text, of_layout in ((ours.text or surrounded(self.ours, ours.kind), ours.text), (written, written)):
            if np.array_equal(self.tokenizer.ids([text], add_special_tokens=False)[0], once):
                return of_layout
        raise self._refused(ours.kind)

    def _read(self, layout: Layout, data: bytes) -> Mapping[str, NDArray[Any]]:
        _, tensors = self._asked(layout, self._decoded(layout, data))
        if _num_rows(tensors) != layout.patches:
            raise DataError(
                f"its {layout.kind} of {layout.shape.facts} becomes {_num_rows(tensors)} rows of the tower's input by "
                f"{version_name()}, and an empty one of this size {layout.patches}: remove it"
            )
        return tensors

    def _decoded(self, layout: Layout, data: bytes) -> NDArray[Any]:
        """A clip, or the pixels of an image or of frames, as they are stored: [N, H, W, 3]."""
        from .media.images import decode_image
        from .media.video import read_frames

        if layout.kind == "audio":
            samples: NDArray[np.float32] = self.ours.clips.samples(layout.shape, data)  # type: ignore[attr-defined]
            return samples
        facts = layout.shape.facts
        if layout.kind == "video":
            numbers = self.ours.frames(layout)
            return read_frames(data, numbers, num_frames=facts.frames, width=facts.width, height=facts.height)
        image = decode_image(data)
        check_decoded(image.shape, facts)
        return image[None]

    def _asked(self, layout: Layout, medium: NDArray[Any]) -> Answer:
        """Tensors alone that our code makes, too. DataError for what the installed processor cannot read."""
        kind, installed = layout.kind, self.installed
        installed.processor  # noqa: B018 - where it cannot be loaded, no sample is to blame
        try:
            if kind == "image":
                answer = installed.of_images([*medium])
            elif kind == "video":
                answer = installed.of_video(medium, self.ours.frames(layout), layout.shape.facts)
            else:
                answer = installed.of_sound(medium, self.ours.clips.rate)  # type: ignore[attr-defined]
        except Exception as error:
            raise DataError(f"{version_name()} cannot read its {kind} ({error!r}): remove it") from error
        dummies = self.ours.dummy()
        names = dummies.get(kind, dummies.get("image", {})).keys()
        if not answer.tensors.keys() >= names:
            raise self._refused(kind)
        return Answer(answer.ids, {name: answer.tensors[name] for name in names})

    def _refused(self, kind: str, *, of: str = "", beside: str = "") -> ConfigError:
        return ConfigError(
            f"{beside or PLURALS[kind]} cannot be read as the processor of {version_name()} reads "
            f"{PLURALS[of or kind]} ({self.differences[of or kind]}): install a version of transformers that reads "
            "them as lmms_stream does, or a later lmms_stream"
        )


def _num_rows(tensors: Mapping[str, NDArray[Any]]) -> int:
    """Of the tower's input: patches, tiles or mel frames."""
    if "input_features" in tensors:
        return int(tensors["input_features"].shape[-1])
    pixels = next(iter(tensors.values()))
    return math.prod(pixels.shape[:-3]) if pixels.ndim > 3 else len(pixels)


def version_name() -> str:
    """The installed transformers, for people."""
    return f"transformers {version('transformers')}"


def surrounded(family: Family, kind: str) -> str:
    """What a chat template writes for a medium."""
    before, after = family.surroundings
    return f"{before}{family.placeholders[kind]}{after}"


def runs_of(
    ids: NDArray[np.int64], family: Family, tokenizer: FastTokenizer
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Tokens of media with each placeholder once, and how often each stands there, as layouts count."""
    names = getattr(family, "repeated_tokens", None) or family.placeholders.values()
    repeated = np.isin(ids, [int(tokenizer.token_id(name) or 0) for name in names])
    begins = np.append(True, ids[1:] != ids[:-1]) | ~repeated
    counts = np.diff(np.append(np.flatnonzero(begins), len(ids)))[repeated[begins]]
    return ids[begins], tuple(counts.tolist())


def _array(tensor: Any) -> NDArray[Any]:
    """float32 for numbers with fractions."""
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
