"""A family of models, and the media that it reads. Facts in, counts, positions and tensors out."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..media.types import Memory, new_memory
from .files import ProcessorFiles
from .settings import MediaSettings

if TYPE_CHECKING:
    from ..media.facts import Facts
    from ..media.types import Interval

# Names of a model's parts that read pictures and sounds, and of those behind them, which the text part reads.
_SIGHT, _SOUND, _BEHIND = (
    r"vis|image|vq",
    r"audio|sound|speech",
    r"proj|connect|adapt|embed|merger|resampl|newline|abstract",
)

AUTO_CLASS = "AutoModelForImageTextToText"  # of transformers: the model_class of most families


class Layout(NamedTuple):
    """How a medium stands in a sample: all that its facts tell.

    counts: tokens that each of its placeholders in the text becomes. patches: rows of the tower's input. text: what
    stands in the text instead of the placeholder that the chat template wrote, "" where that stays. shape: what the
    family itself needs to make tensors and positions. is_cut: whether the medium goes on behind what is read of it.
    """

    kind: str
    counts: tuple[int, ...]
    patches: int
    text: str = ""
    shape: Any = None
    is_cut: bool = False


class Family(Protocol):
    """The family of one folder, with patch sizes, token ids and limits from its files and the user's settings.

    An instance can be sent to other processes. Nothing here imports torch or transformers.
    """

    @property
    def model_types(self) -> tuple[str, ...]:
        """`model_type` in the configs of its models."""
        ...

    @property
    def num_axes(self) -> int:
        """Axes of its own position_ids; 0 where a token has one position, its number in the sample."""
        ...

    @property
    def towers(self) -> Mapping[str, str]:
        """Kind of media -> the module that reads it, as a path in the model's base model, or in the model where it lies
        beside that. Kinds may share one. A family with one module for all kinds has `tower` instead.
        """
        ...

    @property
    def model_class(self) -> str:
        """The class of transformers that loads its models; see FamilyMaker."""
        ...

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """Names of inputs of the model that are one value a token, as Gemma 3's token_type_ids. Default: none."""
        ...

    @property
    def attentions(self) -> tuple[str, ...]:
        """Implementations that may keep samples with media apart; the proof at the start of a run decides."""
        ...

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Kind of media -> the token that the chat template writes for one. Other kinds the family cannot read."""
        ...

    @property
    def repeated_tokens(self) -> Sequence[str]:
        """The tokens that are repeated as often as layouts count. Default: all placeholders.

        A placeholder that a layout's text always replaces need be no token of the tokenizer.
        """
        ...

    @property
    def surroundings(self) -> tuple[str, str]:
        """Tokens that a template writes around a placeholder, which a layout's text replaces as well."""
        ...

    @property
    def media_tokens(self) -> Sequence[str]:
        """Tokens that are never learnt."""
        ...

    @property
    def description(self) -> Mapping[str, Any]:
        """All that can change a number of tokens or patches, as JSON values."""
        ...

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """Layout of a medium of one of its kinds. interval: of a video, instead of the settings' seconds.

        DataError for one that it cannot read.
        """
        ...

    def in_sample(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """The layouts of all media of a sample in their order, where they depend on one another; default: as given.

        DataError for media that it cannot read together.
        """
        ...

    def prepare_model(self, model: Any) -> None:
        """Change the model's media part, by hooks, where it would read a medium otherwise beside others than alone.

        It is called once, before the model is sharded; by default nothing is changed.
        """
        ...

    def frames(self, layout: Layout) -> Sequence[int]:
        """The numbers of the frames of a video that are read; none of other media."""
        ...

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[Any]:
        """int64[num_axes, T] of a sample, from 0, or float32 for a model whose positions have fractions.

        layouts: of its media, in the order of their tokens.
        """
        ...

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """Each of `token_inputs` -> int64[T] of a sample, which is 0 in padding and in samples without media.

        It is not called where there are none. Arguments as in `positions`.
        """
        ...

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """Pixels that the tower sees of a medium, for people to look at: uint8[N, H, W, 3], an image or N frames.

        DataError as `tensors` raises it.
        """
        ...

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """The model's own names -> arrays, which concatenate on axis 0. layouts, media: in the order of their tokens.

        memory: gives the arrays that large results are written into; they are returned without another copy.

        DataError for media that cannot be decoded, or are not what their facts say.
        """
        ...

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Rename and reshape the output of transformers' processor for one medium to the tensors of this family.

        A family without this method is not compared with the installed processor.
        """
        ...

    @property
    def settings_of_calls(self) -> Mapping[str, Any]:
        """Settings of images that transformers' processor takes from calls and not from folders. Default: none."""
        ...

    def limits(self, kind: str) -> Mapping[str, Any]:
        """Settings of images or videos that a user can change, as transformers' processor names them. Default: none."""
        ...

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """Kind -> the smallest inputs of that kind that the tower takes."""
        ...

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """Kinds of media that inputs of these names hold."""
        ...

    def check_model(self, config: Mapping[str, Any]) -> None:
        """config: of a model, as its config.json. ConfigError where it reads media other than these are made."""
        ...


def towers_of(family: Family, named: Callable[[], Iterable[str]] = tuple) -> Mapping[str, str]:
    """Return the module of each kind of media, also for a family with one tower for all kinds, or without a name of
    one. named: the names of the parts of a model, to search for a tower without a name. Raise ConfigError if none is
    found.
    """
    towers: Mapping[str, str] | None = getattr(family, "towers", None)
    if towers is not None:
        return towers
    if hasattr(family, "tower"):
        return dict.fromkeys(family.dummy(), str(family.tower))
    return {kind: _found_tower(kind, [*named()]) for kind in family.dummy()}


def _found_tower(kind: str, names: Sequence[str]) -> str:
    said = _SOUND if kind == "audio" else _SIGHT
    for name in names:
        if re.search(said, name) and not re.search(_BEHIND, name):
            return name
    raise ConfigError(
        f"the model's part that reads {kind}s is none of {', '.join(names)}: write a family of your own "
        "(docs/families.md) that names it"
    )


class FamilyMaker(Protocol):
    """The FAMILY of a family's file, mostly its class."""

    @property
    def model_types(self) -> tuple[str, ...]: ...

    @property
    def processor_classes(self) -> tuple[str, ...]:
        """`processor_class` in the files of its processors."""
        ...

    @property
    def model_class(self) -> str:
        """The class of transformers that its models are loaded and exported with: the name of an auto class, or of the
        class itself where no auto class loads it. Default: AutoModelForImageTextToText.
        """
        ...

    def of(self, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Family:
        """The family of a folder. ConfigError for files or settings that it cannot follow."""
        ...


class TokenIds(Protocol):
    """The id of a token of the folder's tokenizer. ConfigError if the text is not a single token."""

    def __call__(self, token: str) -> int: ...
