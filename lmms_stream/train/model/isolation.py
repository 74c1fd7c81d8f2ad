"""The proof that a model keeps the samples of a pack apart, and the packs for which it would not.

The proof is made at the start of a run with the very model, device and number format: segments of random tokens are
run as one pack and one by one. Measured with 25 architectures, as shares of the spread of the logits: where two packs
of one shape hold the same segment, the predictions of a model that keeps samples apart differ by at most 2e-7
(float32; 0 in bfloat16), those of other models by 1e-3 or more; between a segment in a pack and the same segment alone
they differ by at most 4e-7 (9e-3 in bfloat16), and by 4e-3 or more.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...errors import ConfigError
from ...loader.collate import collate
from ...types import Batch
from ..run.distributed import gather
from .loss import learnt_tokens, losses_of_logits
from .model import PackedModel
from .sharding import reshard

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTHS = (7, 19, 12)  # of the segments that are tried, in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tolerances:
    """As shares of the spread of the logits: of one segment in two packs, and of a segment in a pack and alone."""

    two_packs: float
    alone: float


_FLOAT32 = _Tolerances(two_packs=1e-5, alone=1e-3)
_BFLOAT16 = _Tolerances(two_packs=1e-3, alone=5e-2)


def prove_packing(model: PackedModel, *, device: torch.device, bf16: bool = False) -> None:
    """Choose the model's attention and the way to its logits; all ranks call it.

    Where no attention was named, the first implementation that passes the proof is taken. bf16: the model computes in
    bfloat16 whatever its parameters are. ConfigError where none keeps samples apart.
    """
    was_training = model.training
    model.eval()
    is_float32 = not bf16 and next(model.parameters()).dtype == torch.float32
    tolerances = _FLOAT32 if is_float32 else _BFLOAT16
    choices: list[str] = getattr(model.model, "attention_choices", [])
    if choices:
        model.model.set_attn_implementation(choices.pop(0))
    while (fault := _agreed(_fault(model, tolerances, device))) is not None:
        if not choices:
            raise ConfigError(
                f"{type(model.model).__name__} with attention {model.model.config._attn_implementation} {fault}: "
                "set another model.attention, or take a model that transformers masks by position_ids"
            )
        model.model.set_attn_implementation(choices.pop(0))
    choices.clear()
    with torch.no_grad():
        _choose_logits_way(model, tolerances, device)
    model.train(was_training)
    reshard(model)


def check_lengths(config: PretrainedConfig, batch: Batch) -> None:
    """ConfigError for a pack whose lengths make this model treat its samples otherwise than alone.

    transformers counts the chunks of chunked attention from the start of the pack, and scales "dynamic" and "longrope"
    positions by the longest sample in it; a model that learnt its positions has only so many.
    """
    text = config.get_text_config()
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and batch.num_tokens > chunk:
        raise ConfigError(
            f"a pack of {batch.num_tokens} tokens is longer than the model's attention_chunk_size {chunk}, which "
            "counts from the start of the pack: lower packing_length (and per_device_batch) to it"
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


def _fault(model: PackedModel, tolerances: _Tolerances, device: torch.device) -> str | None:
    """Why packs cannot be trained on, or None."""
    if "position_ids" not in inspect.signature(model.model.forward).parameters:
        return "takes no position_ids, so it cannot tell where a sample of a pack begins"
    try:
        fault = _difference(model, tolerances, device)
        if fault is None and model.model.config._attn_implementation == "flex_attention":
            _run_backward(model, device)  # it is compiled separately from the forward pass
    except (RuntimeError, ValueError, TypeError, ImportError, AssertionError) as error:
        return f"does not run on packs ({' '.join(str(error).split())[:300]})"
    return fault


@torch.no_grad()
def _difference(model: PackedModel, tolerances: _Tolerances, device: torch.device) -> str | None:
    """How a pack differs from its samples, or None.

    Two packs of one shape are compared: they differ in the whole first segment and in the very last token.
    """
    first, middle, last = _segments(model)
    other = _segments(model, seed=1)[0]
    changed = np.append(last[:-1], other[-1])
    packed = model.logits(_pack([first, middle, last]).to(device)).float()
    disturbed = model.logits(_pack([other, middle, changed]).to(device)).float()
    alone = torch.cat([model.logits(_pack([segment]).to(device)).float() for segment in (first, middle, last)])
    spread = float(alone.std())
    if not 0 < spread < float("inf"):
        return "gives logits that are not finite, or all the same"

    def differ(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).square().mean(dim=-1).sqrt().max()) / spread

    start, stop = len(first), len(first) + len(middle)
    if not differ(packed[start:stop], disturbed[start:stop]) <= tolerances.two_packs:
        return "does not keep the samples of a pack apart: what one holds changes what is predicted in another"
    if not differ(packed[stop:-1], disturbed[stop:-1]) <= tolerances.two_packs:
        return "does not keep tokens from seeing those that they are to predict"
    if not differ(packed, alone) <= tolerances.alone:
        return "predicts another thing for a sample in a pack than for the sample alone"
    return None


def _choose_logits_way(model: PackedModel, tolerances: _Tolerances, device: torch.device) -> None:
    """Set the thriftiest way that gives the losses of the model's own logits."""
    batch = _pack(_segments(model)).to(device)
    learnt, targets = learnt_tokens(batch.labels)
    logits = model.logits(batch)[learnt]
    losses, _ = losses_of_logits(logits, targets)
    allowed = tolerances.alone * float(logits.float().std())
    for way in model.logits_ways:
        model.logits_way = way
        found = model(batch).tokens
        fault = None if float((found - losses).abs().max()) <= allowed else "other losses"
        if _agreed(fault) is None:
            return


def _run_backward(model: PackedModel, device: torch.device) -> None:
    model(_pack(_segments(model)).to(device)).tokens.sum().backward()
    model.zero_grad()


def _segments(model: PackedModel, *, seed: int = 0) -> list[NDArray[np.int64]]:
    """Random tokens, without special ones such as those for an image or the end."""
    config = model.model.config
    fields = {**config.get_text_config().to_dict(), **config.to_dict()}
    special = [value for name, value in fields.items() if name.endswith("_token_id") and isinstance(value, int)]
    plain = np.setdiff1d(np.arange(model.vocab_size), special)
    rng = np.random.default_rng(seed)
    return [rng.choice(plain, length) for length in _LENGTHS]


def _pack(segments: Sequence[NDArray[np.int64]]) -> Batch:
    return collate([{"input_ids": ids, "labels": ids} for ids in segments], range(len(segments)))


def _agreed(fault: str | None) -> str | None:
    """The fault of this rank, or a word that another rank has one; None where no rank has."""
    if not dist.is_initialized():
        return fault
    faults = gather([float(fault is not None)], dist.get_world_size())
    return fault or ("failed on another rank" if faults.any() else None)
