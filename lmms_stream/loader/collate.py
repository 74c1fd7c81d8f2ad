"""The processed samples of a pack -> one Batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError
from ..processors.base import IGNORED_LABEL
from ..types import Batch, Processed, Role, TokenRows
from .media_memory import PackMemory, new_rows

PAD_TOKEN_ID = 0
MIN_PAD_TOKENS = 2  # a pad pack needs a next token to predict, or tensors in the model are empty
KEYS = ("input_ids", "labels", "position_ids", "token_inputs", "media", "sequences")  # of a processed sample
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
    """Join all samples of a pack to a single sequence; see Batch for the shapes.

    pad_to: minimum number of tokens; padding is a separate segment without labels. Without samples the batch is a pad
    pack: only padding. memory: may contain the samples' media. keys_are_checked: check_keys was called before.
    ConfigError for samples with a key not in KEYS, and for incompatible shapes of media, positions or sequences.
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
    """Return a collator for samples with checked keys: `collate` then checks no keys."""
    return partial(collate, keys_are_checked=True) if collator is collate else collator


def check_keys(sample: Processed, *, made_by: str = "a processor") -> None:
    """Raise ConfigError for a key not in KEYS."""
    if not sample.keys() <= _KNOWN:
        raise ConfigError(
            f"{made_by} gives {min(sample.keys() - _KNOWN)!r}, which is not a part of batches: put tensors for the "
            f"model into 'media', leave it out, or pass your own data_collator (batches have {', '.join(KEYS)})"
        )


def _with_axes(positions: NDArray[np.int64], samples: Sequence[Processed]) -> NDArray[Any]:
    """Return restarting positions, int64[1, T], followed by the positions on the samples' own axes, if any.

    A sample without own axes, and padding, have the same positions on all axes. float32 if a sample has fractions.
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
    """Number of tokens of a padded pack."""
    return max(num_tokens, pad_to or 0, 0 if num_tokens else MIN_PAD_TOKENS)


def write_padding(rows: TokenRows, num_tokens: int) -> None:
    """Write padding after the first num_tokens."""
    input_ids, labels, position_ids = rows
    input_ids[:, num_tokens:] = PAD_TOKEN_ID
    labels[:, num_tokens:] = IGNORED_LABEL
    position_ids[:, num_tokens:] = np.arange(position_ids.shape[1] - num_tokens)


def to_batch(
    rows: TokenRows,
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
    """Return the batch of rows; the tensors share the memory of the arrays."""
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
    """Join packs to a single sequence; source, step and micro_batch are taken from the first pack.

    If some packs have position axes, packs without axes get the same positions on all axes.
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
        holds_one=False,
    )


def joined_bounds(batches: Sequence[Batch]) -> torch.Tensor:
    """The cu_seqlens of joined packs: int32[num_segments + 1]."""
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


# The media of samples -> named tensors of a batch, concatenated on axis 0.


def media_inputs(media: Sequence[Mapping[str, Any]], memory: PackMemory | None = None) -> dict[str, torch.Tensor]:
    """Join media by name. media: each sample's arrays by name; memory: may contain the arrays.

    ConfigError if the rows of a name differ in shape or type.
    """
    inputs = {}
    for name, arrays in _by_name(media).items():
        found = memory.joined(name, arrays) if memory is not None else None
        inputs[name] = torch.from_numpy(_joined(name, arrays) if found is None else found)
    if memory is not None:
        memory.give_back()  # arrays outside the joined regions were copied above
    return inputs


def join_inputs(inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the tensors of several batches on axis 0, by name."""
    return {name: torch.cat(tensors) for name, tensors in _by_name(inputs).items()}


def _by_name(named: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in named for name in each)
    return {name: [each[name] for each in named if name in each] for name in names}


def _joined(name: str, arrays: Sequence[Any]) -> NDArray[Any]:
    found = [np.asarray(array) for array in arrays]
    rows = {f"{array.dtype}{['n', *array.shape[1:]]}".replace("'", "") for array in found if array.ndim}
    if len(rows) != 1 or not all(array.ndim for array in found):
        raise ConfigError(
            f"a processor gives media {name!r} as {' and '.join(sorted(rows)) or 'single values'}, which cannot be "
            "concatenated: return arrays that differ only in their first axis"
        )
    return np.concatenate(found)


# Values per token next to the ids, for example Gemma 3's token types -> named tensors of a batch, along the sequence.


def token_inputs(named: Sequence[Mapping[str, Any]], lengths: Sequence[int], total: int) -> dict[str, torch.Tensor]:
    """Join token inputs: int64[1, total] per name, consecutive samples of `lengths`; 0 for missing inputs and padding.

    named: each sample's arrays by name, a value per token. ConfigError for an array of another length.
    """
    names = dict.fromkeys(name for each in named for name in each)
    rows = {name: np.zeros((1, total), np.int64) for name in names}
    starts = accumulate(lengths, initial=0)
    for of_sample, start, length in zip(named, starts, lengths, strict=False):
        for name, values in of_sample.items():
            if np.shape(values) != (length,):
                raise ConfigError(
                    f"a processor gives token_inputs {name!r} of shape {list(np.shape(values))} for a sample of "
                    f"{length} tokens: give one value a token"
                )
            rows[name][0, start : start + length] = values
    return {name: torch.from_numpy(row) for name, row in rows.items()}


def join_token_inputs(named: Sequence[Mapping[str, torch.Tensor]], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Join the token inputs of batches. lengths: tokens per batch. A batch without an input gets 0."""
    names = dict.fromkeys(name for each in named for name in each)
    empty = [torch.zeros(1, length, dtype=torch.int64) for length in lengths]
    return {
        name: torch.cat([each.get(name, zeros) for each, zeros in zip(named, empty, strict=True)], dim=1)
        for name in names
    }


# Sequences of samples, for example the two answers of a pair, or documents -> segments of a batch.


def sequences_of(samples: Sequence[Processed], lengths: Sequence[int]) -> NDArray[np.int64] | None:
    """Join the sequences of consecutive samples of `lengths`: see Batch. None if no sample has sequences.

    ConfigError if sequences do not add up to the sample, and if only some samples have sequences.
    """
    if not any("sequences" in sample for sample in samples):
        return None
    found = []
    starts = accumulate(lengths[:-1], initial=0)
    for index, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        own = np.asarray(sample.get("sequences", ()))
        _check(own, length)
        stops = start + np.cumsum(own[:, 0])
        found.append(np.stack([np.full(len(own), index), stops - own[:, 0], stops, own[:, 1]], axis=1))
    made: NDArray[np.int64] = np.concatenate(found).astype(np.int64)
    return made


def _check(own: NDArray[np.int64], length: int) -> None:
    roles = [int(role) for role in Role]
    if own.ndim != 2 or own.shape[1] != 2 or not np.issubdtype(own.dtype, np.integer):
        raise ConfigError(
            f"a processor gives sequences {own.dtype}{list(own.shape)}: give int64[k, 2], the tokens and the role of "
            "each, for all samples or for none"
        )
    if own[:, 0].sum() != length or (own[:, 0] < 1).any() or not np.isin(own[:, 1], roles).all():
        raise ConfigError(
            f"a processor gives sequences {own.tolist()} for a sample of {length} tokens: their tokens, 1 or more "
            f"each, must make up the sample, and their roles be {' or '.join(map(str, roles))}"
        )


def join_sequences(batches: Sequence[Batch]) -> torch.Tensor | None:
    """Join the sequences of consecutive batches; None if no batch has any. Batches without samples add no sequence."""
    if all(batch.sequences is None for batch in batches):
        return None
    found, first_sample, first_token = [], 0, 0
    for batch in batches:
        if batch.sequences is not None:
            offsets = batch.sequences.new_tensor([first_sample, first_token, first_token, 0])
            found.append(batch.sequences + offsets)
        elif len(batch.sample_ids):
            raise ConfigError(
                f"packs of {batch.source or 'one dataset'} have no sequences, and others have: train on datasets of "
                "one kind, or set per_device_batch to 1"
            )
        first_sample += len(batch.sample_ids)
        first_token += batch.num_tokens
    return torch.cat(found)


# The collate_fn of a DataLoader. packs of a dataset -> [pack collator] -> Batch.


class PackCollator:
    """Join a dataset's packs to a single sequence; no sample sees another.

    With processed samples and sample_ids (the loader's call) the result is the Batch of a pack.
    """

    def __call__(
        self, packs: Sequence[Batch] | Sequence[Processed], sample_ids: Sequence[int] | None = None, **options: Any
    ) -> Batch:
        if sample_ids is not None:
            return collate(packs, sample_ids, **options)  # type: ignore[arg-type]
        if not packs or not all(isinstance(each, Batch) for each in packs):
            kinds = sorted({type(each).__name__ for each in packs}) or ["nothing"]
            raise ConfigError(
                f"the collator of a dataset of packs was given {', '.join(kinds)}: give it the packs that dataset[i] is"
            )
        return join(packs)  # type: ignore[arg-type]
