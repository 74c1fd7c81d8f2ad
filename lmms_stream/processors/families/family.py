"""Interface of a family of models and its media. Facts in, counts, positions and tensors out."""

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

# Names of a model's parts that read pictures and sounds, and of the parts between these and the text part.
_SIGHT, _SOUND, _BEHIND = (
    r"vis|image|vq",
    r"audio|sound|speech",
    r"proj|connect|adapt|embed|merger|resampl|newline|abstract",
)

AUTO_CLASS = "AutoModelForImageTextToText"  # of transformers: the model_class of most families


class Layout(NamedTuple):
    """Layout of a medium in a sample, derived only from its facts.

    counts: number of tokens for each of its placeholders in the text. patches: rows of the tower's input. text:
    replaces the placeholder that the chat template wrote; "" keeps the placeholder. shape: the family's own data for
    tensors and positions. is_cut: whether only the beginning of the medium is read.
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
        """Axes of the family's own position_ids; 0 if a token has a single position, its number in the sample."""
        ...

    @property
    def towers(self) -> Mapping[str, str]:
        """Kind of media -> the module that reads it, as a path in the model's base model, or in the model if the module
        is outside the base model. Kinds may share a module. A family with a single module for all kinds has `tower`
        instead.
        """
        ...

    @property
    def model_class(self) -> str:
        """The class of transformers that loads the family's models; see FamilyMaker."""
        ...

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs with one value per token, e.g. Gemma 3's token_type_ids. Default: empty."""
        ...

    @property
    def attentions(self) -> tuple[str, ...]:
        """Attention implementations that may keep samples with media apart; the proof at the start of a run decides."""
        ...

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Kind of media -> the token that the chat template writes for a medium. The family cannot read other kinds."""
        ...

    @property
    def repeated_tokens(self) -> Sequence[str]:
        """Tokens that are repeated by the counts of layouts. Default: all placeholders.

        A placeholder that a layout's text always replaces need not be a token of the tokenizer.
        """
        ...

    @property
    def surroundings(self) -> tuple[str, str]:
        """Tokens that a template writes around a placeholder; a layout's text replaces them as well."""
        ...

    @property
    def media_tokens(self) -> Sequence[str]:
        """Tokens that are never trained on."""
        ...

    @property
    def description(self) -> Mapping[str, Any]:
        """All settings that can change a number of tokens or patches, as JSON values."""
        ...

    def layout(self, kind: str, facts: Facts, interval: Interval | None = None) -> Layout:
        """Layout of a medium of one of the family's kinds. interval: of a video, instead of the settings' seconds.

        DataError for a medium that the family cannot read.
        """
        ...

    def in_sample(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """Layouts of all media of a sample in their order, if they depend on one another; default: unchanged.

        DataError for media that the family cannot read together.
        """
        ...

    def prepare_model(self, model: Any) -> None:
        """Change the model's media part, by hooks, if it would read a medium differently next to others than alone.

        Called once, before the model is sharded; by default nothing is changed.
        """
        ...

    def frames(self, layout: Layout) -> Sequence[int]:
        """Numbers of the frames that are read of a video; empty for other media."""
        ...

    def positions(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> NDArray[Any]:
        """Positions of a sample, from 0: int64[num_axes, T], or float32 for a model with fractional positions.

        layouts: of its media, in the order of their tokens.
        """
        ...

    def token_values(self, input_ids: NDArray[np.int64], layouts: Sequence[Layout]) -> Mapping[str, NDArray[np.int64]]:
        """Each name in `token_inputs` -> int64[T] of a sample; values are 0 in padding and in samples without media.

        Not called for a batch without media. Arguments as in `positions`.
        """
        ...

    def pixels(self, layout: Layout, data: bytes) -> NDArray[np.uint8]:
        """Pixels that the tower sees of a medium, for people to look at: uint8[N, H, W, 3], an image or N frames.

        DataError: see `tensors`.
        """
        ...

    def tensors(
        self, layouts: Sequence[Layout], media: Sequence[bytes], memory: Memory = new_memory
    ) -> dict[str, NDArray[Any]]:
        """The model's own names -> arrays to be concatenated on axis 0. layouts, media: in the order of their tokens.

        memory: provides the arrays for large results; they are returned without another copy.

        DataError for media that cannot be decoded, or do not match their facts.
        """
        ...

    def of_installed(self, made: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Rename and reshape the output of transformers' processor for one medium to the tensors of this family.

        A family without this method is not compared with the installed processor.
        """
        ...

    @property
    def settings_of_calls(self) -> Mapping[str, Any]:
        """Settings of images that transformers' processor takes from calls and not from folders. Default: empty."""
        ...

    def limits(self, kind: str) -> Mapping[str, Any]:
        """Settings of images or videos that a user can change, by their names in transformers' processor. Default:
        empty.
        """
        ...

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        """Kind -> the smallest inputs of this kind that the tower takes."""
        ...

    def pieces(self, kind: str, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[int]]:
        """The model's inputs of a kind in pieces, each read alone by the tower, and the patches of each piece.

        Each input has a row for each piece, or a row for each patch. Ranks share the pieces of a pack; a family without
        this method is refused by train.sequence_parallel.
        """
        ...

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        """Kinds of media in inputs with these names."""
        ...

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if the model reads other media than this family makes. config: the model's config.json."""
        ...


def towers_of(family: Family, named: Callable[[], Iterable[str]] = tuple) -> Mapping[str, str]:
    """Return the module of each kind of media, also for a family with one tower for all kinds, or with an unnamed
    tower. named: the names of the parts of a model, to search for an unnamed tower. Raise ConfigError if no tower is
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
        f"no part of the model has a name for reading {kind}s, found {', '.join(names)}: write a family "
        "(docs/families.md) that names the part"
    )


class FamilyMaker(Protocol):
    """The FAMILY of a family's file, mostly the family's class."""

    @property
    def model_types(self) -> tuple[str, ...]: ...

    @property
    def processor_classes(self) -> tuple[str, ...]:
        """`processor_class` in the files of its processors."""
        ...

    @property
    def model_class(self) -> str:
        """The class of transformers that loads and exports the family's models: the name of an auto class, or of the
        class itself if no auto class loads it. Default: AutoModelForImageTextToText.
        """
        ...

    def of(self, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Family:
        """Make the family of a folder. ConfigError for files or settings with unsupported values."""
        ...


class TokenIds(Protocol):
    """Id of a token of the folder's tokenizer. ConfigError if the text is not a single token."""

    def __call__(self, token: str) -> int: ...
