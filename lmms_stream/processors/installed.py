"""Families whose media are read by the installed transformers' processor, in place of our code or without any.

The processor reads media one by one, and is slower than our code. To count tokens, it gets pixels without values, or
black pixels if it needs values, and silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError
from .families.family import Family, Layout
from .families.installed import Answer, Installed, surrounded
from .families.vision import check_decoded
from .media.types import Memory, new_memory
from .tokenizers import FastTokenizer

if TYPE_CHECKING:
    from .media.facts import AudioFacts, Facts, ImageFacts, VideoFacts
    from .media.types import Interval

PLURALS = {"image": "images", "video": "videos", "audio": "sounds"}
_MOST_SIZES = 1 << 16  # of media with cached layouts


class ByInstalled:
    """A family that reads some kinds of media with the installed processor; see Family.

    differences: kind -> difference of the family's own code. The family still chooses the frames of a video.
    """

    def __init__(self, ours: Family, installed: Installed, tokenizer: FastTokenizer, differences: Mapping[str, str]):
        self.ours = ours
        self.installed = installed
        self.tokenizer = tokenizer
        self.differences = dict(differences)
        self._layouts: dict[tuple[str, Facts, Interval | None], Layout] = {}
        self._takes_sizes: dict[str, bool] = {}  # kinds already tested by size only

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "ours":  # not set yet during unpickling
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
        """See Omni. Raise ConfigError if the installed processor reads either of the two."""
        for kind in ("video",) if sound is None else ("video", "audio"):
            if kind in self.differences:
                raise self._refused("video", of=kind)
        made: Layout = self.ours.video_with_sound(facts, interval, sound)  # type: ignore[attr-defined]
        return made

    def in_sample(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """See Family. Raise ConfigError for images that are read differently as several in a sample."""
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
        """Return the layout by the answer for a size, black pixels, or silence of the same length: the content of media
        does not matter.
        """
        ids, tensors = self._answer(ours, facts)
        once, counts = runs_of(ids, self.ours, self.tokenizer)
        shape = ours.shape
        for grid in (array for name, array in tensors.items() if name.endswith("grid_thw")):
            shape = shape._replace(grid=tuple(grid[0].tolist()))
        # Texts of videos do not count as a difference.
        is_as_ours = ours.kind == "video" and ours.text != "" and len(counts) == len(ours.counts)
        text = ours.text if is_as_ours else self._text(once, ours)
        return ours._replace(counts=counts, patches=self._num_rows(tensors), text=text, shape=shape)

    def _answer(self, ours: Layout, facts: Facts) -> Answer:
        """Return the answer by size, if it matches. For the first of a kind, ask both ways: some processors cannot
        answer by size only.
        """
        if ours.kind == "audio":
            return self._asked(ours, np.zeros(ours.shape.num_samples, np.float32))
        size = cast("ImageFacts | VideoFacts", facts)
        numbers = self.ours.frames(ours)
        by_size: Answer | None = None
        if self._takes_sizes.get(ours.kind, True):
            try:
                by_size = self._only_of_family(ours, self.installed.of_size(ours.kind, size, numbers))
            except Exception:  # noqa: BLE001 - any error of a library for pixels without values
                self._takes_sizes[ours.kind] = False
        if by_size is not None and ours.kind in self._takes_sizes:
            return by_size
        answer = self._asked(ours, np.zeros((len(numbers) or 1, size.height, size.width, 3), np.uint8))
        self._takes_sizes[ours.kind] = by_size is not None and _is_alike(by_size, answer)
        return answer

    def _text(self, once: NDArray[np.int64], ours: Layout) -> str:
        """Text of a layout that becomes these tokens: ours, if it does."""
        written = self.tokenizer.decode(once.tolist())
        for text, of_layout in ((ours.text or surrounded(self.ours, ours.kind), ours.text), (written, written)):
            if np.array_equal(self.tokenizer.ids([text], add_special_tokens=False)[0], once):
                return of_layout
        raise self._refused(ours.kind)

    def _read(self, layout: Layout, data: bytes) -> Mapping[str, NDArray[Any]]:
        _, tensors = self._asked(layout, self._decoded(layout, data))
        if (num_rows := self._num_rows(tensors)) != layout.patches:
            raise DataError(
                f"its {layout.kind} of {layout.shape.facts} becomes {num_rows} rows of the tower's input by "
                f"{version_name()}, but an empty one of the same size {layout.patches}: remove it"
            )
        return tensors

    def _decoded(self, layout: Layout, data: bytes) -> NDArray[Any]:
        """Return a stored clip, or the stored pixels of an image or of frames: [N, H, W, 3]."""
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
        """Return only tensors that our code makes, too. DataError for media that the installed processor cannot
        read.
        """
        kind, installed = layout.kind, self.installed
        installed.processor  # noqa: B018 - a failure of loading is not a sample's error
        try:
            if kind == "image":
                answer = installed.of_images([*medium])
            elif kind == "video":
                answer = installed.of_video(medium, self.ours.frames(layout), layout.shape.facts)
            else:
                answer = installed.of_sound(medium, self.ours.clips.rate)  # type: ignore[attr-defined]
        except Exception as error:
            raise DataError(f"{version_name()} cannot read its {kind} ({error!r}): remove it") from error
        return self._only_of_family(layout, answer)

    def _only_of_family(self, layout: Layout, answer: Answer) -> Answer:
        """Drop tensors that our code does not make."""
        dummies = self.ours.dummy()
        names = dummies.get(layout.kind, dummies.get("image", {})).keys()
        if not answer.tensors.keys() >= names:
            raise self._refused(layout.kind)
        return Answer(answer.ids, {name: answer.tensors[name] for name in names})

    def _num_rows(self, tensors: Mapping[str, NDArray[Any]]) -> int:
        own = getattr(self.ours, "num_rows", None)
        return _num_rows(tensors) if own is None else int(own(tensors))

    def _refused(self, kind: str, *, of: str = "", beside: str = "") -> ConfigError:
        return ConfigError(
            f"{beside or PLURALS[kind]} cannot be read as the processor of {version_name()} reads "
            f"{PLURALS[of or kind]} ({self.differences[of or kind]}): install a version of transformers that reads "
            "them as lmms_stream does, or a later lmms_stream"
        )


def _num_rows(tensors: Mapping[str, NDArray[Any]]) -> int:
    """Rows of the tower's input: patches, tiles or mel frames."""
    if "input_features" in tensors:
        return int(tensors["input_features"].shape[-1])
    pixels = next(iter(tensors.values()))
    return math.prod(pixels.shape[:-3]) if pixels.ndim > 3 else len(pixels)


def _is_alike(one: Answer, other: Answer) -> bool:
    """Return whether two answers have the same tokens and shapes."""
    shapes = [{name: each.shape for name, each in answer.tensors.items()} for answer in (one, other)]
    return np.array_equal(one.ids, other.ids) and shapes[0] == shapes[1]


def version_name() -> str:
    """Version of the installed transformers, for people."""
    return f"transformers {version('transformers')}"


def runs_of(
    ids: NDArray[np.int64], family: Family, tokenizer: FastTokenizer
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Tokens of media with each run of a placeholder reduced to one, and the length of each run, for `counts` of
    layouts.
    """
    names = getattr(family, "repeated_tokens", None) or family.placeholders.values()
    repeated = np.isin(ids, [int(tokenizer.token_id(name) or 0) for name in names])
    begins = np.append(True, ids[1:] != ids[:-1]) | ~repeated
    counts = np.diff(np.append(np.flatnonzero(begins), len(ids)))[repeated[begins]]
    return ids[begins], tuple(counts.tolist())
