"""Samples by which a model is proven to keep those of a pack apart: of random tokens, and of media among them.

The media are several of the smallest that a family has, of random values. Their tokens have positions on the family's
axes that differ from those of a text of that length; which they are does not matter, as long as they are the same in a
pack and alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...loader.collate import collate
from ...processors.families.family import Layout
from ...types import Batch, Processed
from ...versions.transformers import COUNTS_CHUNKS_BY_SAMPLE
from .model import PackedModel
from .towers import media_token_id

Segment = NDArray[np.int64]
_LENGTHS = (131, 157, 131)  # tokens of the segments: each above the 128 below which flex_attention has other kernels
_LIMITS = (
    "n_positions", "max_position_embeddings", "original_max_position_embeddings",
    *(() if COUNTS_CHUNKS_BY_SAMPLE else ("attention_chunk_size",)),
)  # fmt: skip
_NUM_MEDIA = 6  # of a kind in a sample
_AROUND = 4  # tokens of text around the media of a kind
_ROW = 3  # tokens in a row of what they show


def segments_of(model: PackedModel, *, least: int = 4) -> list[Segment]:
    """Random tokens: three segments, shorter ones for a model of few positions; of so many tokens at least."""
    text = model.model.config.get_text_config()
    limits = [limit for name in _LIMITS if isinstance(limit := getattr(text, name, None), int) and limit > 0]
    share = min([1.0, *(limit / sum(_LENGTHS) for limit in limits)])
    rng = np.random.default_rng(0)
    return [rng.choice(plain_tokens(model), max(least, int(length * share))) for length in _LENGTHS]


def plain_tokens(model: PackedModel) -> Segment:
    """The token ids of a model in order, without special ones such as those for an image or the end."""
    config = model.model.config
    fields = {**config.get_text_config().to_dict(), **config.to_dict()}
    special = [
        value
        for name, value in fields.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]
    return np.setdiff1d(np.arange(model.num_predicted), special)


def text_samples(model: PackedModel) -> list[Processed]:
    """Three samples of text."""
    return [_of_text(ids) for ids in segments_of(model)]


def media_samples(model: PackedModel, device: torch.device) -> list[list[Processed]]:
    """Media of all kinds, text alone, and media of all kinds in another order; all ranks call it.

    Once, or twice for a family whose model cannot read two kinds together: without the one, and without the other.
    """
    num_tokens = model.dummy_tokens(device)
    left_out: tuple[str | None, ...] = getattr(model.family, "never_together", ()) or (None,)
    segments = segments_of(model, least=len(num_tokens) * (max(num_tokens.values(), default=0) + _AROUND))
    made = []
    for kind in left_out:
        kinds = [each for each in num_tokens if each != kind]
        rng = np.random.default_rng(1)
        made.append(
            [
                _with_media(model, ids, of_sample, num_tokens, rng)
                for ids, of_sample in zip(segments, (kinds, [], kinds[::-1]), strict=True)
            ]
        )
    return made


def _of_text(ids: Segment) -> Processed:
    return {"input_ids": ids, "labels": ids}


def _with_media(
    model: PackedModel, ids: Segment, kinds: Sequence[str], num_tokens: dict[str, int], rng: np.random.Generator
) -> Processed:
    """Random tokens of which some are of media: as many of each kind as leave room for text around them."""
    assert model.family is not None
    ids = ids.copy()
    media: dict[str, NDArray[Any]] = {}
    room = len(ids) // max(1, len(kinds))
    positions = np.arange(len(ids))[None].repeat(model.family.num_axes, axis=0)
    layouts = []
    between = int(model.counts_axes)  # tokens between media, which the model counts by their runs of tokens then
    for number, kind in enumerate(kinds):
        each = num_tokens[kind] + between
        num_media = min(_NUM_MEDIA, max(1, (room - _AROUND) // each))
        start = number * room + 2
        at = np.arange(num_media * each).reshape(num_media, each)[:, : num_tokens[kind]].ravel()
        layouts += [Layout(kind, (num_tokens[kind],), 0, "", None)] * num_media
        ids[start + at] = media_token_id(model.family, model.model.config, kind)
        for axis in range(len(positions)):  # time stands still; each other axis advances in steps of its own
            positions[axis, start + at] = start + (at // _ROW ** (2 - axis) % _ROW if axis else 0)
        media |= {name: _random(value.cpu().numpy(), num_media, rng) for name, value in model.dummies[kind].items()}
    made = {**_of_text(ids), "position_ids": positions, "media": media}
    if getattr(model.family, "token_inputs", ()):
        made["token_inputs"] = model.family.token_values(ids, layouts)
    return made


def _random(smallest: NDArray[Any], num_media: int, rng: np.random.Generator) -> NDArray[Any]:
    """Several of the smallest, one after another: of random values, but sizes as they are."""
    several: NDArray[Any] = np.concatenate([smallest] * num_media)
    if np.issubdtype(several.dtype, np.floating):
        several[:] = rng.standard_normal(several.shape)
    return several


def other(model: PackedModel, sample: Processed) -> Processed:
    """A sample of the same shape of which each token of text is another one, and each value of its media."""
    plain = plain_tokens(model)
    ids = sample["input_ids"]
    changed = plain[(np.searchsorted(plain, ids) + 1) % len(plain)]
    media = {
        name: -value if np.issubdtype(value.dtype, np.floating) else value
        for name, value in sample.get("media", {}).items()
    }
    if not media:
        return {**sample, **_of_text(changed)}
    return {**sample, **_of_text(np.where(np.isin(ids, plain), changed, ids)), "media": media}


def with_last(sample: Processed, last: int) -> Processed:
    """A sample whose last token is another one."""
    return {**sample, **_of_text(np.append(sample["input_ids"][:-1], last))}


def followed(samples: Sequence[Processed]) -> Processed:
    """One sample of several."""
    joined: dict[str, Any] = dict(_of_text(np.concatenate([sample["input_ids"] for sample in samples])))
    if "media" not in samples[0]:
        return joined
    starts = np.cumsum([0, *(len(sample["input_ids"]) for sample in samples)])
    moved = [sample["position_ids"] + start for sample, start in zip(samples, starts, strict=False)]
    names = dict.fromkeys(name for sample in samples for name in sample["media"])
    media = {
        name: np.concatenate([sample["media"][name] for sample in samples if name in sample["media"]]) for name in names
    }
    of_tokens = [sample.get("token_inputs", {}) for sample in samples]
    joined["token_inputs"] = {name: np.concatenate([each[name] for each in of_tokens]) for name in of_tokens[0]}
    return {**joined, "position_ids": np.concatenate(moved, axis=1), "media": media}


def pack_of(samples: Sequence[Processed]) -> Batch:
    return collate(samples, range(len(samples)))
