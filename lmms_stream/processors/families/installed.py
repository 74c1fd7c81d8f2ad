"""The installed transformers' processor of a folder, and families whose media only this processor reads.

When such a family is made, the processor is run on a few small media. Its answers show text and tokens of a medium, and
the names of its tensors. A family with a file of its own states the facts that cannot be found by this test.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ..media.types import Memory, new_memory
from .clips import Clips, ClipShape, check_model_settings, waveform_of
from .family import Family, Layout
from .settings import MediaSettings
from .vision import NO_LIMIT, FrameChoice

if TYPE_CHECKING:
    from ..media.facts import AudioFacts, Facts, ImageFacts, VideoFacts
    from ..media.types import Interval
    from .files import ProcessorFiles


class Answer(NamedTuple):
    """Result of a processor. ids: int64[T] of only the media. tensors: by the names and in the shapes of our family."""

    ids: NDArray[np.int64]
    tensors: Mapping[str, NDArray[Any]]


class Installed:
    """transformers' processor of a folder or hub id. Each process loads it at its first use.

    limits: of images and videos, instead of the folder's.
    """

    def __init__(
        self, files: ProcessorFiles, family: Family | None, *, limits: Mapping[str, Mapping[str, Any]] | None = None
    ):
        self.path, self.trust_remote_code = files.name, files.trust_remote_code
        self.family = family
        self.settings = {"image": dict(getattr(family, "settings_of_calls", {})), "video": {}}
        for kind, settings in (limits or {}).items():
            self.settings[kind] |= settings

    @cached_property
    def processor(self) -> Any:
        """Load the processor. Raise transformers' errors if loading fails; ConfigError for an unknown class."""
        from transformers import AutoProcessor, PreTrainedTokenizerBase, __version__

        with _quiet():
            loaded = AutoProcessor.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        if isinstance(loaded, PreTrainedTokenizerBase):
            raise ConfigError(
                f"transformers {__version__} has no class for the processor of {self.path}, and loads only its "
                "tokenizer: register the class by transformers.AutoProcessor.register in the module of your family, "
                "or install a version with the class"
            )
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "processor"}

    def of_images(self, images: Sequence[NDArray[np.uint8]]) -> Answer:
        """Answer for the images [H, W, 3] of a sample. Raises the errors of transformers."""
        return self._ask("image", len(images), self.pictures(images))

    def of_video(self, frames: NDArray[np.uint8], numbers: Sequence[int], facts: VideoFacts) -> Answer:
        """Answer for frames [N, H, W, 3] of a video with these numbers."""
        return self._ask("video", 1, self.film(frames, numbers, facts))

    def of_sound(self, samples: NDArray[np.float32], rate: int) -> Answer:
        """Answer for a clip of one channel."""
        return self._ask("audio", 1, self.sound(samples, rate))

    def pictures(self, images: Sequence[Any]) -> dict[str, Any]:
        """Arguments for images [H, W, 3], or for tensors [3, H, W]."""
        from PIL import Image

        opened = [Image.fromarray(each) if isinstance(each, np.ndarray) else each for each in images]
        settings = {**self.settings["image"]}
        if not isinstance(images[0], np.ndarray):
            settings["input_data_format"] = "channels_first"
        return {"images": [opened], **({"images_kwargs": settings} if settings else {})}

    def film(self, frames: Any, numbers: Sequence[int], facts: VideoFacts) -> dict[str, Any]:
        """Arguments for frames [N, H, W, 3], or for a tensor [N, 3, H, W]."""
        from transformers.video_utils import VideoMetadata

        known = {"total_num_frames": facts.frames, "fps": facts.fps, "duration": facts.frames / facts.fps}
        metadata = VideoMetadata(**known, frames_indices=list(numbers))
        pixels = frames.transpose(0, 3, 1, 2) if isinstance(frames, np.ndarray) else frames
        settings = {**self.settings["video"], "do_sample_frames": False}
        return {"videos": [pixels], "videos_kwargs": {**settings, "video_metadata": [metadata]}}

    def sound(self, samples: NDArray[np.float32], rate: int) -> dict[str, Any]:
        """Arguments for a clip of one channel."""
        return {"audio": [samples], "sampling_rate": rate}

    def chosen(self, num_frames: int, fps: float, asked: Mapping[str, Any]) -> list[int]:
        """Numbers of the frames that the processor reads of a video. asked: fps or num_frames, instead of the
        folder's.
        """
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
        """Answer for an image of a size, or for frames of a video, by shapes only: tensors without values (device
        "meta").
        """
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
        # transformers removes settings from its arguments, and another call may follow.
        copied = {name: {**value} if isinstance(value, dict) else value for name, value in given.items()}
        with _quiet():
            made: Mapping[str, Any] = processor(text=[text], **copied, add_special_tokens=False, return_tensors="pt")
        return made

    def asked(self, kind: str, number: int, given: dict[str, Any], *, text: str) -> Answer:
        """Answer about media given as arguments. number: of media; text: stands for each medium."""
        try:
            made = self._called(given, text="and".join([text] * number))
        except ValueError:
            if kind != "video":
                raise
            # Until 5.0 SmolVLM's processor takes videos like images: a list for each text.
            settings = {**given["videos_kwargs"], "video_metadata": [given["videos_kwargs"]["video_metadata"]]}
            listed = {"videos": [given["videos"]], "videos_kwargs": settings}
            made = self._called(listed, text="and".join([text] * number))
        arrays = {name: _array(value) for name, value in made.items() if hasattr(value, "numpy")}
        ids = arrays.pop("input_ids")[0]
        return Answer(ids, arrays if self.family is None else self.family.of_installed(arrays))


def model_types_of(processor_class: str) -> tuple[str, ...]:
    """Types of models with a processor of this class."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return tuple(kind for kind, name in PROCESSOR_MAPPING_NAMES.items() if name == processor_class)


def surrounded(family: Family, kind: str) -> str:
    """Text of a chat template for a medium."""
    before, after = family.surroundings
    return f"{before}{family.placeholders[kind]}{after}"


def _array(tensor: Any) -> NDArray[Any]:
    """Convert fractions to float32; return zeros that take no memory for a tensor without values."""
    if tensor.device.type == "meta":
        return np.broadcast_to(np.float32(0) if tensor.is_floating_point() else np.int64(0), tuple(tensor.shape))
    made: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without warnings of transformers and with one torch thread: this process may be forked, or was."""
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


SIZES = ".shapes"  # suffix of an input's name: the shapes of its arrays, stored one behind the other
RECIPE = "write a family of your own (docs/families.md) and give it to MultimodalProcessor.from_pretrained"
_PATCH = 14 * 14 * 3  # numbers of an image that count as a row of the tower's input
Same = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]


class Shape(NamedTuple):
    """Facts of a medium. numbers: of the frames of a video that are read."""

    facts: ImageFacts | VideoFacts
    numbers: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()


class Kind(NamedTuple):
    """Facts of a kind of media. written: text by the chat template. tokens: the repeated tokens, the most frequent
    first. beside: other tokens of the kind. tensors: name -> whether its shape differs between media.

    values: name of an input with one value per token -> its value for each repeated token. is_alone: the processor
    reads several media of a sample differently than each alone.
    """

    written: str
    tokens: Mapping[str, int]
    beside: Sequence[str]
    tensors: Mapping[str, bool]
    values: Mapping[str, Mapping[int, int]]
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class AsInstalled:
    """See Family. Has no own pixels: ByInstalled reads them.

    towers: None to search the model for towers. own_features, own_tensors: from the family's file.
    """

    name: str
    model_types: tuple[str, ...]
    kinds: Mapping[str, Kind]
    installed: Installed
    settings: MediaSettings
    clips: Clips | None
    settings_digest: str
    model_class: str
    attentions: tuple[str, ...]
    towers: Mapping[str, str] | None
    own_features: Callable[..., Any] | None
    own_tensors: Same
    dummies: Mapping[str, Mapping[str, NDArray[Any]]] = field(repr=False)

    num_axes: ClassVar[int] = 0  # of positions from the processor: none
    surroundings: ClassVar[tuple[str, str]] = ("", "")

    @property
    def placeholders(self) -> Mapping[str, str]:
        """See Family."""
        return {kind: each.written for kind, each in self.kinds.items()}

    @property
    def repeated_tokens(self) -> Sequence[str]:
        """See Family."""
        return [*dict.fromkeys(token for each in self.kinds.values() for token in each.tokens)]

    @property
    def media_tokens(self) -> Sequence[str]:
        """See Family."""
        beside = [token for each in self.kinds.values() for token in each.beside]
        return [*dict.fromkeys([*self.repeated_tokens, *beside])]

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """See Family."""
        return tuple(dict.fromkeys(name for each in self.kinds.values() for name in each.values))

    @property
    def description(self) -> Mapping[str, Any]:
        """See Family."""
        chosen = {name: getattr(self.settings, name) for name in MediaSettings.__dataclass_fields__}
        said = {name: value for name, value in chosen.items() if value is not None}
        return {"family": self.name, "settings": self.settings_digest, **said}

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """Return a preliminary layout with one token; ByInstalled replaces its counts by the processor's answer."""
        if kind == "audio":
            sound = cast("AudioFacts", facts)
            assert self.clips is not None
            num_samples, is_cut = self.clips.read_of(sound)
            return Layout(kind, (1,), 0, "", ClipShape(sound, num_samples, 0, is_cut=is_cut), is_cut)
        size = cast("ImageFacts | VideoFacts", facts)
        numbers = self._numbers(cast("VideoFacts", facts), interval) if kind == "video" else ()
        return Layout(kind, (1,), 0, "", Shape(size, numbers))

    def _numbers(self, facts: VideoFacts, interval: Interval | None) -> tuple[int, ...]:
        """Frames that the installed processor chooses from the section that is read."""
        settings = self.settings
        start, end = settings.video_start or 0.0, settings.video_end
        choice = FrameChoice(fps=1.0, frame_num=None, min_frames=1, max_frames=NO_LIMIT, start=start, end=end)
        section = choice.section(facts, interval)
        most = settings.video_max_frames or section.num_frames
        asked = {"fps": settings.fps, "num_frames": settings.frame_num}
        numbers = self.installed.chosen(section.num_frames, facts.fps, {k: v for k, v in asked.items() if v})
        if len(numbers) > most:
            numbers = self.installed.chosen(section.num_frames, facts.fps, {"num_frames": most})[:most]
        return tuple(section.first + number for number in numbers)

    def in_sample(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """See Family."""
        for kind, each in self.kinds.items():
            if each.is_alone and (number := sum(layout.kind == kind for layout in layouts)) > 1:
                raise DataError(
                    f"it has {number} {kind}s, and the processor of {self.name} reads several together differently "
                    f"from single {kind}s: keep one per sample, or {RECIPE}"
                )
        kinds = self.never_together
        if kinds and {layout.kind for layout in layouts}.issuperset(kinds):
            raise DataError(f"it {self._taken_for_one_another}: leave one of the kinds out")
        return layouts

    def frames(self, layout: Layout) -> Sequence[int]:
        """See Family."""
        return layout.shape.numbers if layout.kind == "video" else ()

    def heard(self, layout: Layout) -> str:
        """See Family."""
        if layout.kind != "audio" or self.clips is None:
            return ""
        return f"{layout.shape.num_samples / self.clips.rate:.2f} s at {self.clips.rate:,} Hz"

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[np.int64]:
        """See Family; never called, as num_axes is 0."""
        return np.zeros((0, len(input_ids)), np.int64)

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """See Family."""
        made = {name: np.zeros(len(input_ids), np.int64) for name in self.token_inputs}
        tokens = [number for each in self.kinds.values() for number in each.tokens.values()]
        at = np.flatnonzero(np.isin(input_ids, tokens))
        parts = [(kind, at) for kind in self.kinds]  # for samples without layouts, only by their tokens
        if layouts:
            bounds = np.cumsum([sum(layout.counts) for layout in layouts])[:-1]
            parts = [(each.kind, part) for each, part in zip(layouts, np.split(at, bounds), strict=True)]
        for kind, part in parts:
            for name, of_tokens in self.kinds[kind].values.items():
                for token, value in of_tokens.items():
                    made[name][part[input_ids[part] == token]] = value
        return made

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """See Family: the stored image or frames."""
        from ..media.images import decode_image
        from ..media.video import read_frames

        if layout.kind == "audio":
            assert self.clips is not None
            return waveform_of(self.clips.samples(layout.shape, data))
        if layout.kind == "image":
            return decode_image(data)[None]
        facts = layout.shape.facts
        numbers = layout.shape.numbers
        return read_frames(data, numbers, num_frames=facts.frames, width=facts.width, height=facts.height)

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """See Family: ByInstalled makes the tensors."""
        raise NotImplementedError

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """See Family. Arrays of varying shapes become rows of numbers, with their shapes in inputs next to them."""
        ragged = {name: value for each in self.kinds.values() for name, value in each.tensors.items()}
        return in_rows({name: values for name, values in self.own_tensors(made).items() if name in ragged}, ragged)

    def num_rows(self, tensors: Mapping[str, NDArray[Any]]) -> int:
        """Estimate the rows of the tower's input: patches of 14 x 14 pixels."""
        return max(1, sum(each.size for each in tensors.values() if each.dtype.kind == "f") // _PATCH)

    def model_inputs(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inputs of a batch on any device: arrays of several shapes are padded with zeros, like the processor's."""
        made = {name: values for name, values in inputs.items() if not name.endswith(SIZES)}
        for name, sizes in inputs.items():
            if name.endswith(SIZES):
                of = name.removesuffix(SIZES)
                made[of] = _padded(inputs[of], sizes.tolist())
        return made

    def features(self, base: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
        """See Family. Calls the model's own method with the arguments that it accepts."""
        if self.own_features is not None:
            return self.own_features(base, kind, inputs)
        method = getattr(base, f"get_{kind}_features", None)
        if method is None:
            raise ConfigError(
                f"{type(base).__name__} has no get_{kind}_features, which reads media for ranks without text around "
                f"them: {RECIPE}"
            )
        names = inspect.signature(method).parameters
        return method(**{name: value for name, value in inputs.items() if name in names})

    @property
    def never_together(self) -> tuple[str, ...]:
        """Two kinds of media with the same token, which models cannot tell apart; see Family."""
        tokens = {kind: number for kind, number in self.token_ids.items() if kind in self.dummies}
        return tuple(kind for kind, number in tokens.items() if [*tokens.values()].count(number) > 1)

    def check_pack(self, inputs: Mapping[str, Any]) -> str | None:
        """See Family."""
        kinds = self.never_together
        if kinds and self.kinds_of(inputs).issuperset(kinds):
            return (
                f"{self._taken_for_one_another}: keep samples with either in datasets of their own, and "
                "per_device_batch at 1"
            )
        return None

    @property
    def _taken_for_one_another(self) -> str:
        kinds = " and ".join(f"{kind}s" for kind in self.never_together)
        return f"holds {kinds}, and {self.name} has one token for both, so that a model cannot tell them apart in a row"

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """See Family: inputs of the smallest medium of the test."""
        return self.dummies

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """See Family."""
        return {kind for kind, named in self.dummies.items() if next(iter(named)) in inputs}

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See Family. The model itself counts positions along axes, if it has any."""
        for kind, each in self.kinds.items():
            known = {**each.tokens}.values()
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                if isinstance(config.get(name), int) and config[name] not in known:
                    check_model_settings(config, {name: next(iter(known))})

    @property
    def token_ids(self) -> Mapping[str, int]:
        """Kind of media -> the token that stands for a medium."""
        return {kind: next(iter(each.tokens.values())) for kind, each in self.kinds.items()}


def as_it_is(made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Return the tensors of a processor unchanged."""
    return made


def in_rows(tensors: Mapping[str, NDArray[Any]], ragged: Mapping[str, bool]) -> dict[str, NDArray[Any]]:
    """Flatten ragged tensors to rows of numbers, and add their shapes."""
    found: dict[str, NDArray[Any]] = {}
    for name, values in tensors.items():
        found[name] = _in_a_row(values) if ragged[name] else values
        if ragged[name]:
            found[f"{name}{SIZES}"] = np.array([values.shape], np.int64)
    return found


def _in_a_row(values: NDArray[Any]) -> NDArray[Any]:
    if values.size and not any(values.strides):  # only a shape, without memory
        return np.broadcast_to(values.flat[0], values.size)
    return values.reshape(-1)


def _padded(values: Any, sizes: Sequence[Sequence[int]]) -> Any:
    """Join arrays that are stored one behind the other: along the first axis, padded along the others."""
    most = [max(size[axis] for size in sizes) for axis in range(len(sizes[0]))]
    out = values.new_zeros((sum(size[0] for size in sizes), *most[1:]))
    row = done = 0
    for size in sizes:
        number = int(np.prod(size))
        out[(slice(row, row + size[0]), *map(slice, size[1:]))] = values[done : done + number].view(*size)
        row, done = row + size[0], done + number
    return out
