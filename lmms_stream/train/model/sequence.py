"""A pack's tokens on several ranks: each runs the blocks on a part of them (sequence parallelism).

Only attention sees all tokens, by ulysses.py; every other part of a transformer treats a token by itself. What is made
of tokens (losses, logits) is gathered, so that all ranks of a group have the same; each has the gradients of its own
part, and their sum is that of the pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from .exchanges import exchanged
from .ulysses import GROUP
from .varlen import SDPA_VARLEN, has_varlen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTIONS = ("flash_attention_2", SDPA_VARLEN)  # that are told where samples begin, and need no mask
_CHANGING_ROPE = ("dynamic", "longrope")  # rotary positions that depend on the furthest one


@dataclass(frozen=True, kw_only=True)
class SequenceParts:
    """The tokens of a pack in equal parts, one after another, of which each rank of a group has one.

    The last part ends with padding where the degree does not divide the tokens: a segment of its own, without labels.
    """

    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return self.group.size()

    def own(self, inputs: Mapping[str, Any], *, of_tokens: Sequence[str]) -> dict[str, Any]:
        """A model's arguments of which those of tokens are of this rank's part; attention has the bounds of all.

        of_tokens: names of those with a number for each token, where padding has 0.
        """
        num_tokens = inputs["input_ids"].shape[-1]
        missing = -num_tokens % self.degree
        found = {**inputs, GROUP: self.group}
        for name in of_tokens:
            found[name] = self.part(torch.nn.functional.pad(inputs[name], (0, missing)))
        positions = inputs["position_ids"]
        behind = torch.arange(missing, device=positions.device).to(positions.dtype)
        of_padding = behind.expand(*positions.shape[:-1], missing)
        found["position_ids"] = self.part(torch.cat([positions, of_padding], dim=-1))
        for name in ("cu_seq_lens_q", "cu_seq_lens_k") if missing else ():
            if name in inputs:
                found[name] = torch.cat([inputs[name], inputs[name][-1:] + missing])
        for name in ("max_length_q", "max_length_k") if missing else ():
            if name in inputs:
                found[name] = max(inputs[name], missing)
        return found

    def labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Those of this rank's part and of the token behind it, which the last of the part predicts: int64[1, n]."""
        start, stop = self._bounds(labels.shape[1])
        return labels[:, start : stop + 1]

    def whole(self, part: torch.Tensor, num_tokens: int, *, dim: int = 0) -> torch.Tensor:
        """What all ranks have of their parts, without padding: the dimension `dim` is of tokens.

        All ranks are to make the same of it, as a loss: each takes the gradient of its own part from its own result.
        """
        gather = partial(_gather, num_tokens=num_tokens, dim=dim)
        return exchanged(part, self.group, forth=gather, back=partial(_take, num_own=part.shape[dim], dim=dim))

    def whole_losses(
        self,
        losses: torch.Tensor,
        logs: torch.Tensor,
        learnt: torch.Tensor,
        every_learnt: torch.Tensor,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each target of a pack, and the logsumexp of its logits: float32[num_loss_tokens] each.

        losses, logs: of this rank's part, float32[n]; learnt: positions in the part at which they are predicted;
        every_learnt: those in the pack.
        """
        start, stop = self._bounds(num_tokens)
        rows = losses.new_zeros(stop - start, 2).index_put((learnt,), torch.stack([losses, logs], dim=1))
        every = self.whole(rows, num_tokens)[every_learnt]
        return every[:, 0], every[:, 1]

    def _bounds(self, num_tokens: int) -> tuple[int, int]:
        """First and one-past-last token of this rank's part, padding counted."""
        size = -(-num_tokens // self.degree)
        return self.group.rank() * size, (self.group.rank() + 1) * size

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        start, stop = self._bounds(tensor.shape[-1])
        return tensor[..., start:stop].contiguous()


def check_parts(model: PreTrainedModel, *, degree: int, matrix_parts: int = 1, is_of_text: bool) -> None:
    """ConfigError for a model whose packs' tokens cannot be shared by as many ranks.

    matrix_parts: ranks of which each has some of the heads in any case (tensor_parallel).
    """
    text, asked = model.config.get_text_config(), f"train.sequence_parallel {degree}"
    if not is_of_text:
        raise ConfigError(
            f"{asked} shares the tokens of texts, and {type(model).__name__} reads media: set it to 1, and "
            "gradient_checkpointing to true where packs need too much memory"
        )
    heads = text.num_attention_heads // matrix_parts
    if heads % degree:
        divisors = [str(each) for each in range(1, heads + 1) if heads % each == 0]
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads of {type(model).__name__}"
            f"{f' on a rank with tensor_parallel {matrix_parts}' if matrix_parts > 1 else ''}: each rank attends with "
            f"a share of them. Set it to {' or '.join(divisors)}"
        )
    if not has_varlen(type(model), model.config):
        raise ConfigError(
            f"{asked} is for models whose layers see all tokens before them, or a window, and {type(model).__name__} "
            "has others: set it to 1"
        )
    scaling = getattr(text, "rope_scaling", None) or {}
    if (kind := scaling.get("rope_type", scaling.get("type"))) in _CHANGING_ROPE:
        raise ConfigError(
            f"{asked} gives each rank a part of the positions, and {kind} positions of {type(model).__name__} change "
            "with the furthest one: set it to 1"
        )


def leave_out(choices: list[str], named: str, *, degree: int) -> dict[str, str]:
    """Leave those in `choices` that need no mask; returns why not the others.

    A mask would be made of the positions of a rank's part. named: the attention where there are no choices.
    ConfigError where it needs a mask.
    """
    if not choices and named not in ATTENTIONS:
        raise ConfigError(
            f"train.sequence_parallel {degree} with attention {named}, whose mask would be made of one rank's part of "
            f"the tokens: set model.attention to {' or '.join(ATTENTIONS)}, or to auto (of a model that is made: "
            f"model.set_attn_implementation({SDPA_VARLEN!r}))"
        )
    others = {name: "makes its mask of one rank's part of the tokens" for name in choices if name not in ATTENTIONS}
    choices[:] = [name for name in choices if name in ATTENTIONS]
    return others


def _gather(part: torch.Tensor, group: dist.ProcessGroup, *, num_tokens: int, dim: int) -> torch.Tensor:
    """The parts of all ranks, without padding."""
    first = part.movedim(dim, 0).contiguous()
    every = first.new_empty((group.size() * len(first), *first.shape[1:]))
    dist.all_gather_into_tensor(every, first, group=group)
    return every[:num_tokens].movedim(0, dim).contiguous()


def _take(gradients: torch.Tensor, group: dist.ProcessGroup, *, num_own: int, dim: int) -> torch.Tensor:
    """The gradient of this rank's part, of what all ranks make alike; padding has none."""
    start = group.rank() * num_own
    held = gradients.movedim(dim, 0)[start : start + num_own]
    own = held.new_zeros((num_own, *held.shape[1:]))
    own[: len(held)] = held
    return own.movedim(0, dim)
