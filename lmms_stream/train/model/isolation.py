"""Prove that a model keeps the samples of a pack apart, and refuse packs of unsupported lengths.

The proof uses the model, device and number format of the run. The model runs on segments of random tokens in a pack, in
packs of the same shape with other tokens in the other segments, and segment by segment.

A model that keeps samples apart computes the same values for a segment in all packs of the same shape, also in bfloat16
and with many layers. (With experts, the number of tokens per expert depends on the whole pack.) A segment alone has
another shape with other roundings, and deep models amplify roundings. If the difference is larger than in shallow
models, the model's own noise decides. Noise is measured on the same tokens without packing: with roundings added to the
embeddings, and with other tokens after the segment.

With small weights, for example in an untrained model, a leak may be smaller than roundings. Therefore the proof also
computes the gradient of a segment's predictions in the embeddings of the other segments: it must be zero to the bit.

Measured with 28 architectures of two layers on a CPU, in shares of the spread of the logits: 23 keep samples apart.
Their predictions for a segment are equal to the bit in two packs, and differ between a pack and the segment alone by at
most 5e-7 (9e-3 in bfloat16). The other five mix samples, and differ by 1e-3 or more in both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from ...errors import ConfigError
from ...loader.collate import collate
from ...processors.families.family import Layout
from ...types import Batch, Processed
from ...versions.transformers import COUNTS_CHUNKS_BY_SAMPLE
from ..run.distributed import gather, gather_objects, is_lost_rank
from ..run.precision import uses_tf32
from .loss import has_experts
from .model import PackedModel
from .sharding import reshard
from .towers import media_token_id

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_MOST_NOISE = 0.5  # share of the spread of the logits; unrelated predictions differ by 1.4
_MIXES = "does not keep the samples of a pack apart: what one holds changes what is predicted in another"
_FAULT = 2.0  # answer of a rank whose proof has ended, in place of yes (1) or no (0)
_WITH_MEDIA = " (samples with media)"
FAILURES = (RuntimeError, ValueError, TypeError, ImportError, LookupError, AssertionError, AttributeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerances:
    """Largest difference of a token's logits that counts as noise, divided by the spread of the logits.

    two_packs: between two packs of the same shape. alone: between a pack and the segment alone.
    """

    two_packs: float
    alone: float


_FLOAT32 = Tolerances(two_packs=1e-5, alone=1e-3)
_BFLOAT16 = Tolerances(two_packs=1e-3, alone=5e-2)


def tolerances_of(model: PackedModel, *, bf16: bool) -> Tolerances:
    """Return the tolerances of a model's number format. bf16: it computes in bfloat16, with parameters of any dtype."""
    parameter = next(model.parameters())
    is_exact = parameter.dtype in (torch.float32, torch.float64) and not uses_tf32(parameter.device)
    return _FLOAT32 if is_exact and not bf16 else _BFLOAT16


def find_fault(model: PackedModel, tolerances: Tolerances, *, device: torch.device, backward: bool) -> str | None:
    """Return the reason against training on packs, to follow the model's name, or None; all ranks call it.

    A reason on any rank counts. backward: check gradients, too, for the smallest leaks; refuse models without them.
    """
    if model.by_sample is None and "position_ids" not in inspect.signature(model.model.forward).parameters:
        return "takes no position_ids, so it cannot tell where a sample of a pack begins"
    try:
        fault = _fault_of(model, text_samples(model), tolerances, device=device, backward=backward)
        if model.family is not None:
            for samples in media_samples(model, device) if fault is None else ():
                fault = fault or _fault_of(model, samples, tolerances, device=device, backward=backward)
                fault = fault and f"{fault.removesuffix(_WITH_MEDIA)}{_WITH_MEDIA}"
    except FaultElsewhereError as elsewhere:
        return str(elsewhere)
    except FAILURES as error:  # perhaps on this rank only: memory runs out
        if isinstance(error, RuntimeError) and is_lost_rank(error):
            raise
        meets = device.type == "cpu" and any(isinstance(each, DTensor) for each in model.parameters())
        return agreed(f"does not run on packs ({one_line(error)})", meets=meets)
    return agreed(fault)


def _fault_of(
    model: PackedModel, samples: Sequence[Processed], tolerances: Tolerances, *, device: torch.device, backward: bool
) -> str | None:
    fault = _Proof(model, tolerances, device, samples).fault()
    if fault is None and backward and _on_any_rank(gradient_reaches_others(model, samples, device)):
        return _MIXES
    return fault


class _Proof:
    """Proof by comparison of a model's predictions for samples in packs and alone.

    A sample with media alone runs without packing and without restarting positions, like a user's call of the model.
    """

    def __init__(
        self,
        model: PackedModel,
        tolerances: Tolerances,
        device: torch.device,
        samples: Sequence[Processed] | None = None,
    ):
        self._model, self._tolerances, self._device = model, tolerances, device
        self._segments = list(samples or text_samples(model))
        bounds = np.cumsum([0, *(len(each["input_ids"]) for each in self._segments)]).tolist()
        self._rows = [slice(*pair) for pair in pairwise(bounds)]
        self._packed = self._run(*self._segments)
        self._alone = [self._run_alone(segment) for segment in self._segments]
        self._spread = float(torch.cat(self._alone).std())

    def fault(self) -> str | None:
        if _on_any_rank(not 0 < self._spread < float("inf")):
            return "gives logits that are not finite, or all the same"
        if self._mixes_samples():
            return _MIXES
        if self._looks_ahead() is self._model.is_causal:
            if self._model.is_causal:
                return "does not keep tokens from seeing those that they are to predict"
            return "does not let tokens see those behind them"
        if any(
            self._differs(self._packed[rows], alone, allowed=self._tolerances.alone, noise=self._noise_of_shapes)
            for rows, alone in zip(self._rows, self._alone, strict=True)
        ):
            return "predicts another thing for a sample in a pack than for the sample alone"
        return None

    def _mixes_samples(self) -> bool:
        """Return whether a segment's logits differ between packs with different tokens in the other segments."""
        if has_experts(self._model.model.config):
            # The first and last segment have equal lengths: each expert has as many tokens in the reversed pack.
            turned = self._run(*reversed(self._segments))
            if self._differs(self._packed[self._rows[1]], turned[self._rows[1]], noise=lambda: 0.0):
                return True
        for kept, rows in enumerate(self._rows):
            others = [each if i == kept else other(self._model, each) for i, each in enumerate(self._segments)]
            if self._differs(self._packed[rows], self._run(*others)[rows], noise=self._noise_of_experts):
                return True
        return False

    def _looks_ahead(self) -> bool:
        """Return whether the last token of the last segment changes the logits of the segment's earlier tokens."""
        *others, last = self._segments
        changed = self._run(*others, with_last(last, other(self._model, last)["input_ids"][-1]))
        rows = self._rows[-1]
        noise = self._noise_of_experts if self._model.is_causal else lambda: 0.0
        return self._differs(self._packed[rows][:-1], changed[rows][:-1], noise=noise)

    def _differs(
        self, one: torch.Tensor, two: torch.Tensor, *, allowed: float | None = None, noise: Callable[[], float]
    ) -> bool:
        """Return whether a token's logits differ by more than allowed, and the mean difference exceeds the noise.

        allowed: default two_packs. The mean difference must exceed twice the noise, or _MOST_NOISE if smaller.
        """
        found = (one - two).square().mean(dim=-1) / self._spread**2
        if not _on_any_rank(not float(found.max()) ** 0.5 <= (allowed or self._tolerances.two_packs)):
            return False
        return _on_any_rank(not float(found.mean()) ** 0.5 <= min(2 * noise(), _MOST_NOISE))

    def _noise_of_experts(self) -> float:
        """Return the noise in packs of the same shape: 0 without experts; inputs of experts have different shapes."""
        return self._noise_of_roundings() if has_experts(self._model.model.config) else 0.0

    def _noise_of_shapes(self) -> float:
        """Return the change of a segment's logits by following tokens in the same sample, or by roundings if larger."""
        longer = self._run_alone(followed(self._segments))[self._rows[0]]
        return max(self._noise_of_roundings(), self._mean_difference(longer, self._alone[0]))

    def _noise_of_roundings(self) -> float:
        with _rounded_embeddings(self._model):
            rounded = self._run_alone(self._segments[1])
        return self._mean_difference(rounded, self._alone[1])

    def _mean_difference(self, one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).square().mean().sqrt()) / self._spread

    def _run(self, *segments: Processed) -> torch.Tensor:
        """Return the logits of a pack: float32[T, V]."""
        return self._model.logits(pack_of(segments).to(self._device)).detach()[0].float()

    def _run_alone(self, segment: Processed) -> torch.Tensor:
        if "media" not in segment:
            return self._run(segment)
        return self._model.plain_logits(pack_of([segment]).to(self._device)).detach()[0].float()


def gradient_reaches_others(model: PackedModel, samples: Sequence[Processed], device: torch.device) -> bool:
    """Return whether predictions in the second sample have a gradient in the embeddings of another sample.

    In a model that keeps samples apart, the gradient is zero to the bit for any weights.
    """
    embeddings: list[torch.Tensor] = []

    def listen(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1].clone()  # some models write into their embeddings

    embedding: Any = model.model.get_input_embeddings()
    hook = embedding.register_forward_hook(listen)
    reshard(model)  # after a forward pass the root still has whole parameters, which the backward pass replaces
    gradients_before = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    try:
        with torch.enable_grad():
            rows, is_other = second_of(samples, model)
            predicted = model.logits(pack_of(samples).to(device))[0, rows].float().square().mean()
            predicted.backward()  # a whole backward pass restores the state of FSDP2
    finally:
        hook.remove()
        for name, parameter in model.named_parameters():
            parameter.grad = gradients_before[name]
    gradients = (each.grad for each in embeddings)
    of_tokens = (each for each in gradients if each is not None and each.shape[:2] == (1, len(is_other)))
    return any(reaches(each, is_other) for each in of_tokens)


def second_of(samples: Sequence[Processed], model: PackedModel) -> tuple[slice, torch.Tensor]:
    """Return the tokens of the second sample of a pack, and a mask of this rank's tokens of other samples."""
    start, stop = np.cumsum([len(each["input_ids"]) for each in samples])[:2].tolist()
    is_other = torch.ones(1, sum(len(each["input_ids"]) for each in samples), dtype=torch.bool)
    is_other[:, start:stop] = False
    if model.sequence is not None:
        is_other = model.sequence.part(
            torch.nn.functional.pad(is_other, (0, -is_other.shape[1] % model.sequence.degree))
        )
    return slice(start, stop), is_other[0]


def reaches(gradient: torch.Tensor, is_other: torch.Tensor) -> bool:
    """Return whether a gradient, [1, T, …], is not zero for a token in the mask; in other shapes, for any value."""
    if gradient.shape[:2] == (1, len(is_other)):
        gradient = gradient[0, is_other.to(gradient.device)]
    return bool((gradient.abs() > 0).any())


@contextmanager
def _rounded_embeddings(model: PackedModel) -> Iterator[None]:
    """Change each value of embeddings by the last bit of the number format, up or down at random."""
    rng = torch.Generator().manual_seed(0)

    def change(_: torch.nn.Module, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, embeddings.shape, generator=rng) * 2 - 1
        factors = 1 + torch.finfo(embeddings.dtype).eps * signs
        return embeddings * factors.to(embeddings)

    embedding: Any = model.model.get_input_embeddings()
    hook = embedding.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


class FaultElsewhereError(Exception):
    """Another rank has ended its proof, with a fault: the message."""


def agreed(fault: str | None, *, meets: bool = False) -> str | None:
    """Return the fault of this rank, or the first rank's fault; None without a fault. All ranks call agreed.

    A rank whose proof raises calls agreed early; other ranks then get a FaultElsewhereError. meets: first meet in a
    separate group: ranks may still be in the model's collectives of the usual group.
    """
    if not dist.is_initialized():
        return fault
    try:
        if meets:
            gather([0.0], dist.get_world_size(), is_apart=True)
        has_fault = gather([_FAULT * (fault is not None)], dist.get_world_size()).any()
    except RuntimeError as error:
        if fault is None or not is_lost_rank(error):
            raise
        raise ConfigError(
            f"the model {fault} on rank {dist.get_rank()}, and other ranks do not answer: it fails on this rank only"
        ) from error
    return _first_fault(fault) if has_fault else None


def _first_fault(fault: str | None) -> str:
    """Return this rank's fault, or the first rank's fault."""
    faults = gather_objects(fault, dist.get_world_size())
    return fault or next(f"{each} (on rank {rank})" for rank, each in enumerate(faults) if each is not None)


def _on_any_rank(is_so: bool) -> bool:
    if not dist.is_initialized():
        return is_so
    answers = gather([float(is_so)], dist.get_world_size())
    if (answers == _FAULT).any():
        raise FaultElsewhereError(_first_fault(None))
    return bool(answers.any())


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def positions_of(config: Any) -> int | None:
    """Return the maximum positions of a sample from a text model's config; None if unlimited."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "n_positions", None) or getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def check_lengths(config: PretrainedConfig, batch: Batch) -> None:
    """Raise ConfigError if lengths in a pack change the model's results for samples, or exceed the model's positions.

    Before 5.23 transformers counts the chunks of chunked attention from the start of the pack. transformers scales
    "dynamic" and "longrope" positions by the longest sample of the pack. The number of trained position embeddings is
    limited.
    """
    text = config.get_text_config()
    chunk = None if COUNTS_CHUNKS_BY_SAMPLE else getattr(text, "attention_chunk_size", None)
    if chunk and batch.num_tokens > chunk:
        raise ConfigError(
            f"a pack of {batch.num_tokens} tokens is longer than the model's attention_chunk_size {chunk}, which "
            "counts from the start of the pack: lower packing_length (and per_device_batch) to it, or install "
            "transformers 5.23 or later"
        )
    limit = getattr(text, "n_positions", None)
    if limit and batch.max_seqlen > limit:
        raise ConfigError(
            f"a sample of {batch.max_seqlen} tokens is longer than the model's {limit} positions: lower packing_length"
        )
    scaling = getattr(text, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    limit = getattr(text, "original_max_position_embeddings", None) or getattr(text, "max_position_embeddings", None)
    if kind in ("dynamic", "longrope") and limit and batch.max_seqlen > limit and len(batch.cu_seqlens) > 2:
        raise ConfigError(
            f"a sample of {batch.max_seqlen} tokens is longer than {limit}, and {kind} positions would change for all "
            "samples of its pack: set max_samples_per_pack to 1, or leave longer samples out"
        )


# Samples of the proof: random tokens, and media among random tokens.
#
# Media have the smallest size of the family and random values. Positions of media tokens on the family's axes differ
# from positions of text; any positions will do if they are equal in the pack and alone.

Segment = NDArray[np.int64]
_LENGTHS = (131, 157, 131)  # tokens of the segments: below 128 flex_attention uses other kernels
_LIMITS = (
    "n_positions", "max_position_embeddings", "original_max_position_embeddings",
    *(() if COUNTS_CHUNKS_BY_SAMPLE else ("attention_chunk_size",)),
)  # fmt: skip
_NUM_MEDIA = 6  # per kind in a sample
_AROUND = 4  # tokens of text around the media of a kind
_ROW = 3  # tokens in a row of a medium


def segments_of(model: PackedModel, *, least: int = 4) -> list[Segment]:
    """Return three segments of random tokens, shorter for a model of few positions. least: smallest length."""
    text = model.model.config.get_text_config()
    limits = [limit for name in _LIMITS if isinstance(limit := getattr(text, name, None), int) and limit > 0]
    share = min([1.0, *(limit / sum(_LENGTHS) for limit in limits)])
    rng = np.random.default_rng(0)
    return [rng.choice(plain_tokens(model), max(least, int(length * share))) for length in _LENGTHS]


def plain_tokens(model: PackedModel) -> Segment:
    """Return the token ids of a model in order, without special tokens (image, end, …)."""
    config = model.model.config
    fields = {**config.get_text_config().to_dict(), **config.to_dict()}
    special = [
        value
        for name, value in fields.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]
    return np.setdiff1d(np.arange(model.num_predicted), special)


def text_samples(model: PackedModel) -> list[Processed]:
    """Return three samples of text."""
    return [_of_text(ids) for ids in segments_of(model)]


def media_samples(model: PackedModel, device: torch.device) -> list[list[Processed]]:
    """Return lists of three samples: media of all kinds, only text, media of all kinds in reverse order.

    A family usually has a single list. If a model cannot read two kinds of media together (`never_together`), each of
    two lists leaves out a kind. All ranks call this function.
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
    """Return a sample of the tokens `ids` with media of each kind, and text around the media."""
    assert model.family is not None
    ids = ids.copy()
    media: dict[str, NDArray[Any]] = {}
    room = len(ids) // max(1, len(kinds))
    positions = np.arange(len(ids))[None].repeat(model.family.num_axes, axis=0)
    layouts = []
    between = int(model.counts_axes)  # tokens between media: the model counts media by their runs of tokens
    for number, kind in enumerate(kinds):
        each = num_tokens[kind] + between
        num_media = min(_NUM_MEDIA, max(1, (room - _AROUND) // each))
        start = number * room + 2
        at = np.arange(num_media * each).reshape(num_media, each)[:, : num_tokens[kind]].ravel()
        layouts += [Layout(kind, (num_tokens[kind],), 0, "", None)] * num_media
        ids[start + at] = media_token_id(model.family, model.model.config, kind)
        for axis in range(len(positions)):  # constant time; each other axis advances in its own steps
            positions[axis, start + at] = start + (at // _ROW ** (2 - axis) % _ROW if axis else 0)
        media |= {name: _random(value.cpu().numpy(), num_media, rng) for name, value in model.dummies[kind].items()}
    made = {**_of_text(ids), "position_ids": positions, "media": media}
    if getattr(model.family, "token_inputs", ()):
        made["token_inputs"] = model.family.token_values(ids, layouts)
    return made


def _random(smallest: NDArray[Any], num_media: int, rng: np.random.Generator) -> NDArray[Any]:
    """Return num_media copies of the smallest medium, joined: random values, sizes unchanged."""
    several: NDArray[Any] = np.concatenate([smallest] * num_media)
    if np.issubdtype(several.dtype, np.floating):
        several[:] = rng.standard_normal(several.shape)
    return several


def other(model: PackedModel, sample: Processed) -> Processed:
    """Return a sample of the same shape with other text tokens and other values of media."""
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
    """Return a sample with another last token."""
    return {**sample, **_of_text(np.append(sample["input_ids"][:-1], last))}


def followed(samples: Sequence[Processed]) -> Processed:
    """Join samples into a single sample."""
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
