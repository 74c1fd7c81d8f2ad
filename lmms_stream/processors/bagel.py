"""Conversations with images to see and to make -> tokens in blocks, in the format of BAGEL's model.

Blocks keep the order of the conversation. A text is `<|im_start|>`, the text, `<|im_end|>`. An image of the assistant
is to be made: `<|vision_start|>`, a token for each latent, `<|vision_end|>`. Any other image is seen: the patches of
the vision encoder between the same tokens; if an image to be made follows, a block of the seen image's own latents
precedes these patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DataError
from ..types import Processed, Sample
from .bagel_images import BagelSettings, EncoderInput, Grid, decoded
from .base import IGNORED_LABEL, FactsMissingError, Measured, SeenMedium, measured_tokens, or_error, through
from .chat_template import REASONING_KEYS
from .media.facts import facts_of, media_part, stored_facts
from .media.types import ImageFacts
from .not_shown import bit_of
from .stored_chat import read_chat
from .tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Attention between tokens: a sample is a sequence of blocks, each a run of tokens of one kind. Pure.
#
# A text sees all tokens before it. An image sees its own tokens and all tokens before. An image to be made, and a
# dropped block, are seen only from inside. Samples of a pack never see each other.
#
# After BAGEL (Deng et al. 2025, "Emerging Properties in Unified Multimodal Pretraining").


class BlockKind(IntEnum):
    """Kind of a block. TEXT is causal. SEEN: an image's patches for the vision encoder. CONDITION: clean latents of an
    image, the condition of a later image. MADE: noised latents of an image to be made.
    """

    TEXT = 0
    SEEN = 1
    CONDITION = 2
    MADE = 3


LATENTS = (BlockKind.CONDITION, BlockKind.MADE)


class Blocks(NamedTuple):
    """The blocks of a sequence of samples in order; together they cover all tokens.

    kinds, starts, stops: int64[n], with tokens [start, stop). samples: int64[n], ascending numbers of the blocks'
    samples. dropped: bool[n].
    """

    kinds: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    samples: NDArray[np.int64]
    dropped: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.stops - self.starts

    @property
    def num_tokens(self) -> int:
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def is_hidden(self) -> NDArray[np.bool_]:
        """Blocks seen only from inside: bool[n]."""
        hidden: NDArray[np.bool_] = self.dropped | (self.kinds == BlockKind.MADE)
        return hidden

    @property
    def of_tokens(self) -> NDArray[np.int64]:
        """Block number of each token: int64[T]."""
        return np.repeat(np.arange(len(self.kinds)), self.lengths)

    def inside(self, kinds: Sequence[BlockKind]) -> NDArray[np.int64]:
        """Return tokens of images of the kinds, without the first and last token of a block: int64[n], ascending."""
        tokens = np.arange(self.num_tokens)
        block = self.of_tokens
        is_inside = (tokens > self.starts[block]) & (tokens < self.stops[block] - 1)
        return np.flatnonzero(np.isin(self.kinds[block], kinds) & is_inside)


def blocks_of(
    kinds: NDArray[np.int64], lengths: NDArray[np.int64], samples: NDArray[np.int64], dropped: NDArray[np.bool_]
) -> Blocks:
    """Blocks in sequence from token 0."""
    stops = np.cumsum(lengths, dtype=np.int64)
    return Blocks(kinds.astype(np.int64), stops - lengths, stops, samples.astype(np.int64), dropped.astype(bool))


def visible(blocks: Blocks) -> NDArray[np.bool_]:
    """Mask of tokens (rows) that see tokens (columns): bool[T, T]."""
    block, tokens = blocks.of_tokens, np.arange(blocks.num_tokens)
    one, other = block[:, None], block[None]
    is_causal = (blocks.kinds == BlockKind.TEXT)[one]
    inside = (one == other) & (~is_causal | (tokens[None] <= tokens[:, None]))
    before = (other < one) & ~blocks.is_hidden[other]
    mask: NDArray[np.bool_] = (blocks.samples[one] == blocks.samples[other]) & (inside | before)
    return mask


def positions(blocks: Blocks) -> NDArray[np.int64]:
    """Positions of tokens in their samples: int64[T]. Each token of a text takes the next position. All tokens of an
    image share a position. An image to be made, and a dropped block, share the position of the next block.
    """
    lengths, is_text = blocks.lengths, blocks.kinds == BlockKind.TEXT
    advances = np.where(is_text, lengths, 1) * ~blocks.is_hidden
    ends = np.cumsum(advances)
    begins: NDArray[np.int64] = ends - advances
    is_first = np.diff(blocks.samples, prepend=-1) != 0
    of_sample = np.maximum.accumulate(np.where(is_first, begins, 0))  # begins never fall
    block, tokens = blocks.of_tokens, np.arange(blocks.num_tokens)
    found: NDArray[np.int64] = (begins - of_sample)[block] + np.where(is_text[block], tokens - blocks.starts[block], 0)
    return found


SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
NUM_ENDS = 2  # tokens around the text or image of a block


class BagelProcessor:
    """Processor of `messages` and their images from `media`; the module describes the tokens and the blocks.

    Texts of the assistant are trained on, with the `<|im_end|>` after them; messages with "learn": false are not, and
    their images are seen. The `media` of a sample are: blocks int64[n, 2] (kind and number of tokens; blocks cover the
    sample) and dropout float32[n] (probability that the task drops a block, see BagelSettings); vit_patches float32[P,
    588], vit_positions int64[P] and vit_grids int64[images, 2] (rows, columns); vae_patches float32[L, 768], the pixels
    of each latent, with vae_positions and vae_grids. All are in the order of their tokens.

    ConfigError for a tokenizer without the tokens SPECIAL.
    """

    columns = ("messages", "media")
    measured_columns = ("messages",)
    schema = "messages"
    objective = "bagel"

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast | FastTokenizer, settings: BagelSettings | None = None
    ) -> None:
        self.tokenizer = FastTokenizer.of(tokenizer)
        self.settings = settings or BagelSettings()
        self._ids = [self._token_id(token) for token in SPECIAL]
        self._sides: dict[BlockKind, EncoderInput] = {
            BlockKind.SEEN: self.settings.vit,
            BlockKind.CONDITION: self.settings.vae,
            BlockKind.MADE: self.settings.vae,
        }
        self._dropouts = {
            BlockKind.TEXT: self.settings.text_dropout,
            BlockKind.SEEN: self.settings.vit.dropout,
            BlockKind.CONDITION: self.settings.vae.dropout,
        }

    @staticmethod
    def from_pretrained(
        path: str, settings: BagelSettings | None = None, *, trust_remote_code: bool = False
    ) -> BagelProcessor:
        """Return a processor with the tokenizer at a local path or hub id. trust_remote_code: see load_tokenizer."""
        return BagelProcessor(load_tokenizer(path, trust_remote_code=trust_remote_code), settings)

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "class": "BagelProcessor",
            "version": 1,
            "tokenizer": self.tokenizer.digest,
            "media": self.settings.description,
        }

    def measure(self, sample: Sample) -> int:
        return measured_tokens(self.measure_media, sample)

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        """See MeasureMedia."""
        return through([or_error(self._blocks, sample) for sample in samples], self._measured)

    def not_shown(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See NotShownOf: a message's thoughts in other keys than the content are not in its blocks."""
        return [or_error(self._not_shown, sample) for sample in samples]

    def _not_shown(self, sample: Sample) -> int:
        messages, _ = read_chat(sample["messages"])
        is_lost = any(message.get(key) for message in messages for key in REASONING_KEYS)
        return is_lost * bit_of("reasoning")

    def process(self, sample: Sample) -> Processed:
        """Raise DataError for anything but a conversation of text and images."""
        blocks = self._blocks(sample)
        texts = iter(self._text_ids(blocks))
        pieces = [self._tokens(block, texts) for block in blocks]
        return {
            "input_ids": np.concatenate([ids for ids, _ in pieces]),
            "labels": np.concatenate([labels for _, labels in pieces]),
            "media": {
                "blocks": np.array(
                    [(block.kind, len(ids)) for block, (ids, _) in zip(blocks, pieces, strict=True)], np.int64
                ),
                "dropout": np.array([block.dropout for block in blocks], np.float32),
                **self._images(blocks, sample),
            },
        }

    def see_media(self, sample: Sample) -> list[SeenMedium]:
        """See SeeMedia."""
        blocks = self._blocks(sample)
        texts = iter(self._text_ids(blocks))
        seen, start = [], 0
        for block in blocks:
            ids, _ = self._tokens(block, texts)
            if block.image is not None:
                side = self._sides[block.kind]
                data = media_part(block.image, sample["media"]).data
                pixels = side.pixels(decoded(data, (side, block.grid)), block.grid)[None]
                seen.append(SeenMedium("image", [(start + 1, start + len(ids) - 1)], pixels, ()))
            start += len(ids)
        return seen

    def _blocks(self, sample: Sample) -> list[_Block]:
        """Blocks of a sample, in order."""
        parts = _parts(sample)
        is_made = [part.is_assistant and part.image is not None for part in parts]
        last = max((number for number, made in enumerate(is_made) if made), default=-1)
        found: list[_Block] = []
        for number, part in enumerate(parts):
            leads = number < last  # an image to be made follows
            if part.image is None:
                dropout = self._dropouts[BlockKind.TEXT] if leads and not part.is_assistant else 0.0
                found.append(_Block(BlockKind.TEXT, text=part.text, is_learnt=part.is_assistant, dropout=dropout))
                continue
            facts = _facts(part.image, sample)
            kinds = (
                [BlockKind.MADE]
                if is_made[number]
                else [BlockKind.CONDITION, BlockKind.SEEN]
                if leads
                else [BlockKind.SEEN]
            )
            for kind in kinds:
                grid = self._sides[kind].grid(facts.width, facts.height)
                dropout = self._dropouts.get(kind, 0.0) if leads else 0.0
                found.append(_Block(kind, image=part.image, grid=grid, dropout=dropout))
        return found

    def _measured(self, samples: Sequence[Sequence[_Block]]) -> list[Measured]:
        texts = [block.text for blocks in samples for block in blocks if block.image is None]
        counts = iter(self.tokenizer.num_tokens(texts, add_special_tokens=False))
        made = []
        for blocks in samples:
            cells = sum(block.grid.num_cells for block in blocks)
            of_texts = sum(next(counts) for block in blocks if block.image is None)
            tokens = of_texts + cells + NUM_ENDS * len(blocks)
            # A sample of only text has blocks, too, and they cover all of it: like a sample with media, it is never
            # cut.
            made.append(Measured(tokens=tokens, patches=max(1, cells), image_tokens=cells))
        return made

    def _text_ids(self, blocks: Sequence[_Block]) -> list[NDArray[np.int32]]:
        texts = [block.text for block in blocks if block.image is None]
        return self.tokenizer.ids(texts, add_special_tokens=False)

    def _tokens(self, block: _Block, texts: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of a block. texts: an iterator over the tokens of texts."""
        text_start, text_end, image_start, image_end, placeholder = self._ids
        if block.image is not None:
            inner = np.full(block.grid.num_cells, placeholder, np.int64)
            ids = np.concatenate([[image_start], inner, [image_end]])
        else:
            ids = np.concatenate([[text_start], next(texts).astype(np.int64), [text_end]])
        labels = np.full(len(ids), IGNORED_LABEL, np.int64)
        if block.is_learnt:
            labels[1:] = ids[1:]
        return ids, labels

    def _images(self, blocks: Sequence[_Block], sample: Sample) -> dict[str, NDArray[Any]]:
        """Arrays of each encoder that the sample has images for; each image is decoded once."""
        shown = [(block, block.image, self._sides[block.kind]) for block in blocks if block.image is not None]
        wanted: dict[int, list[tuple[EncoderInput, Grid]]] = {}
        for block, image, side in shown:
            wanted.setdefault(id(image), []).append((side, block.grid))
        pixels: dict[int, NDArray[np.uint8]] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for name, kinds in (("vit", (BlockKind.SEEN,)), ("vae", LATENTS)):
            mine = [each for each in shown if each[0].kind in kinds]
            patches = []
            for block, image, side in mine:
                if id(image) not in pixels:
                    pixels[id(image)] = decoded(media_part(image, sample["media"]).data, *wanted[id(image)])
                patches.append(side.patches(pixels[id(image)], block.grid))
            if mine:
                arrays[f"{name}_patches"] = np.concatenate(patches)
                arrays[f"{name}_positions"] = np.concatenate([side.position_ids(each.grid) for each, _, side in mine])
                arrays[f"{name}_grids"] = np.array([block.grid for block, _, _ in mine], np.int64)
        return arrays

    def _token_id(self, token: str) -> int:
        found = self.tokenizer.token_id(token)
        if found is None:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name} does not have {token} as one token, which marks texts and images: "
                f"add {', '.join(SPECIAL)} to the tokenizer as special tokens"
            )
        return found


class _Block(NamedTuple):
    """A block before tokenization; image: the stored part."""

    kind: BlockKind
    text: str = ""
    is_learnt: bool = False
    image: dict[str, Any] | None = None
    grid: Grid = Grid(0, 0)
    dropout: float = 0.0


class _MessagePart(NamedTuple):
    """A text, or the stored part of an image. is_assistant: the assistant's, in a message that is trained on."""

    text: str
    image: dict[str, Any] | None
    is_assistant: bool


def _parts(sample: Sample) -> list[_MessagePart]:
    messages, tools = read_chat(sample["messages"])
    if tools or any(message.get("tool_calls") for message in messages):
        raise DataError(
            "it has tools or calls of tools, but BAGEL's sequences hold only texts and images: leave it out"
        )
    found = []
    for message in messages:
        is_assistant = message["role"] == "assistant" and message.get("learn", True)
        content = message.get("content") or []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] not in ("text", "image"):
                raise DataError(f"a message holds {part['type']}, and BAGEL reads texts and images: leave it out")
            is_text = part["type"] == "text"
            found.append(_MessagePart(part["text"] if is_text else "", None if is_text else part, is_assistant))
    if not found:
        raise DataError("its messages hold no text and no image: leave it out")
    return found


def _facts(part: dict[str, Any], sample: Sample) -> ImageFacts:
    found = stored_facts(part)
    if found is None:
        if "media" not in sample:
            raise FactsMissingError(
                "an image is stored without its size, and measuring was given no media: give the column media, too, or "
                "convert the dataset again"
            )
        found = facts_of(media_part(part, sample["media"]).data, "image")
    assert isinstance(found, ImageFacts)
    return found
