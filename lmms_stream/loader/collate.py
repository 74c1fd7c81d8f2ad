"""The processed samples of a pack -> one Batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError
from ..processors.base import IGNORED_LABEL
from ..types import Batch, Processed, Rows
from .media_inputs import join_inputs, media_inputs
from .media_memory import PackMemory
from .row_memory import new_rows
from .sequences import join_sequences, sequences_of
from .token_inputs import join_token_inputs, token_inputs

PAD_TOKEN_ID = 0
MIN_PAD_TOKENS = 2  # a pad pack needs a next token to predict, or tensors in the model are empty
KEYS = ("input_ids", "labels", "position_ids", "token_inputs", "media", "sequences")  # of what a processor makes
_KNOWN = frozenset(KEYS)


def collate(
    samples: Sequence[Processed],
    sample_ids: Sequence[int],
    *,
    pad_to: int | None = None,
    source: str = "",
    step: int = 0,
    micro_batch: int = 0,
    memory: PackMemory | None = None,
    keys_are_checked: bool = False,
) -> Batch:
    """One sequence of all samples of a pack; see Batch for the shapes.

    pad_to: at least this many tokens; what is added is a segment of its own, without labels. No samples at all
    give a pad pack: only such a segment. memory: that the samples' media may lie in. keys_are_checked: by check_keys,
    before. ConfigError for samples with another key than KEYS, and for media, positions or sequences of shapes that do
    not go together.
    """
    for sample in () if keys_are_checked else samples:
        check_keys(sample)
    lengths = [len(sample["input_ids"]) for sample in samples]
    num_tokens = sum(lengths)
    total = padded_length(num_tokens, pad_to)
    rows = new_rows(total)
    input_ids, labels, position_ids = (row[0] for row in rows)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        input_ids[start : start + length] = sample["input_ids"]
        labels[start : start + length] = sample["labels"]
        start += length
    sequences = sequences_of(samples, lengths)
    segments = lengths if sequences is None else (sequences[:, 2] - sequences[:, 1]).tolist()
    bounds = np.cumsum([0, *segments])
    labels[bounds[:-1]] = IGNORED_LABEL
    position_ids[:num_tokens] = np.arange(num_tokens) - np.repeat(bounds[:-1], np.diff(bounds))
    write_padding(rows, num_tokens)
    padding = [total - num_tokens] if total > num_tokens else []
    batch = to_batch(
        rows._replace(position_ids=_with_axes(rows.position_ids, samples)),
        np.cumsum([0, *segments, *padding], dtype=np.int32),
        np.array(sample_ids, np.int64),
        inputs=media_inputs([sample["media"] for sample in samples if sample.get("media")], memory),
        token_inputs=token_inputs([sample.get("token_inputs") or {} for sample in samples], lengths, total),
        max_seqlen=max(segments + padding),
        num_loss_tokens=int(np.count_nonzero(labels != IGNORED_LABEL)),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )
    return batch if sequences is None else replace(batch, sequences=torch.from_numpy(sequences))


def for_checked(collator: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return a collator for samples whose keys were checked: `collate` checks no keys then."""
    return partial(collate, keys_are_checked=True) if collator is collate else collator


def check_keys(sample: Processed, *, made_by: str = "a processor") -> None:
    """ConfigError for a key that no batch would hold."""
    if not sample.keys() <= _KNOWN:
        raise ConfigError(
            f"{made_by} gives {min(sample.keys() - _KNOWN)!r}, which no batch would hold: name tensors for the model "
            f"in its 'media', leave it out, or pass a data_collator of your own (batches are made of {', '.join(KEYS)})"
        )


def _with_axes(positions: NDArray[np.int64], samples: Sequence[Processed]) -> NDArray[Any]:
    """Positions that restart, int64[1, T], followed by those of the samples' own axes where they have any.

    A sample without axes of its own, and padding, have the same positions on all. float32 where a sample's are.
    """
    if not any("position_ids" in sample for sample in samples):
        return positions
    axes = [np.asarray(sample.get("position_ids", ())) for sample in samples]
    num_axes = max(map(len, axes), default=0)
    if not num_axes:
        return positions
    has_fractions = any(np.issubdtype(own.dtype, np.floating) for own in axes if len(own))
    found = np.repeat(positions[None], 1 + num_axes, axis=0).astype(np.float32 if has_fractions else np.int64)
    start = 0
    for sample, own in zip(samples, axes, strict=True):
        length = len(sample["input_ids"])
        if len(own):
            if own.shape != (num_axes, length) or not (np.issubdtype(own.dtype, np.integer) or own.dtype == np.float32):
                raise ConfigError(
                    f"a processor gives position_ids {own.dtype}{list(own.shape)} for a sample of {length} tokens, and "
                    f"others of the pack have {num_axes} axes: give whole numbers, or float32, of shape [axes, tokens]"
                )
            found[1:, 0, start : start + length] = own
        start += length
    return found


def padded_length(num_tokens: int, pad_to: int | None) -> int:
    """Tokens of a pack with its padding."""
    return max(num_tokens, pad_to or 0, 0 if num_tokens else MIN_PAD_TOKENS)


def write_padding(rows: Rows, num_tokens: int) -> None:
    """Fill what lies behind the first num_tokens."""
    input_ids, labels, position_ids = rows
    input_ids[:, num_tokens:] = PAD_TOKEN_ID
    labels[:, num_tokens:] = IGNORED_LABEL
    position_ids[:, num_tokens:] = np.arange(position_ids.shape[1] - num_tokens)


def to_batch(
    rows: Rows,
    cu_seqlens: NDArray[np.int32],
    sample_ids: NDArray[np.int64],
    *,
    max_seqlen: int,
    num_loss_tokens: int,
    source: str,
    step: int,
    micro_batch: int,
    inputs: Mapping[str, torch.Tensor] | None = None,
    token_inputs: Mapping[str, torch.Tensor] | None = None,
) -> Batch:
    """The batch of rows, which become its tensors, uncopied."""
    input_ids, labels, position_ids = rows
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        num_loss_tokens=num_loss_tokens,
        sample_ids=torch.from_numpy(sample_ids),
        inputs=inputs or {},
        token_inputs=token_inputs or {},
        source=source,
        step=step,
        micro_batch=micro_batch,
    )


def join(batches: Sequence[Batch]) -> Batch:
    """Packs one after another as one sequence; what is of one pack alone (source, micro_batch) is of the first.

    Where some have axes of positions, those that have none get the same positions on all.
    """
    first, *others = batches
    if not others:
        return first
    return replace(
        first,
        input_ids=torch.cat([batch.input_ids for batch in batches], dim=1),
        labels=torch.cat([batch.labels for batch in batches], dim=1),
        position_ids=_joined_positions([batch.position_ids for batch in batches]),
        cu_seqlens=joined_bounds(batches),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        num_loss_tokens=sum(batch.num_loss_tokens for batch in batches),
        sample_ids=torch.cat([batch.sample_ids for batch in batches]),
        num_patches=sum(batch.num_patches for batch in batches),
        inputs=join_inputs([batch.inputs for batch in batches]),
        token_inputs=join_token_inputs(
            [batch.token_inputs for batch in batches], [each.num_tokens for each in batches]
        ),
        sequences=join_sequences(batches),
        left_out=[each for batch in batches for each in batch.left_out],
    )


def joined_bounds(batches: Sequence[Batch]) -> torch.Tensor:
    """The cu_seqlens of packs that are joined: int32[num_segments + 1]."""
    if len(batches) == 1:
        return batches[0].cu_seqlens
    starts = np.cumsum([0, *(batch.num_tokens for batch in batches[:-1])]).tolist()
    bounds = [batch.cu_seqlens[1:] + start for batch, start in zip(batches, starts, strict=True)]
    return torch.cat([batches[0].cu_seqlens[:1], *bounds])


def _joined_positions(positions: Sequence[torch.Tensor]) -> torch.Tensor:
    shapes: set[Any] = {each.shape[0] for each in positions if each.ndim == 3}
    if len(shapes) > 1:
        raise ConfigError(
            f"packs with {' and '.join(str(axes - 1) for axes in sorted(shapes))} axes of positions cannot be one "
            "sequence: use processors of one family, or set per_device_batch to 1"
        )
    if shapes:
        axes = shapes.pop()
        positions = [each if each.ndim == 3 else each.expand(axes, *each.shape) for each in positions]
    return torch.cat(list(positions), dim=-1)
