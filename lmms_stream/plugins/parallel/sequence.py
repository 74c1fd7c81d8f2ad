"""A pack's tokens on several ranks: each runs the blocks on a part of the tokens (sequence parallelism).

Each rank runs the media towers on a share of the pack's media, and sends each feature to the rank with the token.

Only attention sees all tokens, by DeepSpeed-Ulysses (below); every other part of a transformer treats each token
separately. Results of tokens (losses, logits) are gathered, and all ranks of a group have the same; each rank has the
gradients of its own part, and their sum is the pack's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ...train.model.attention import SDPA_VARLEN, has_varlen
from ...train.model.build import PlainModel
from ...train.model.model import PackedModel
from ...train.model.towers import check_shares
from ...train.run.mesh import Meshes
from .exchanges import exchanged, swapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP = "sequence_group"  # name of the argument with the group, for attention
ATTENTIONS = ("flash_attention_2", SDPA_VARLEN)  # attentions that get the bounds of samples, and need no mask
_CHANGING_ROPE = ("dynamic", "longrope")  # rotary positions that depend on the largest position


@dataclass(frozen=True, kw_only=True)
class SequenceParts:
    """The tokens of a pack in equal parts, one after another, one for each rank of a group.

    The last part ends with padding if the degree does not divide the tokens: a separate segment, without labels.
    """

    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return self.group.size()

    def own(self, inputs: Mapping[str, Any], *, of_tokens: Sequence[str]) -> dict[str, Any]:
        """Cut a model's arguments of tokens to this rank's part; attention gets the bounds of all samples.

        of_tokens: names of arguments with a number for each token, padded with 0.
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
        """Labels of this rank's part and of the next token, which the part's last token predicts: int64[1, n]."""
        start, stop = self._bounds(labels.shape[1])
        return labels[:, start : stop + 1]

    def whole(self, part: torch.Tensor, num_tokens: int, *, dim: int = 0) -> torch.Tensor:
        """Gather the parts of all ranks, without padding; dimension `dim` is of tokens.

        All ranks must compute the same from the result, e.g. a loss: each takes the gradient of its own part from its
        own result.
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
        """Return the loss of each target of a pack, and the logsumexp of its logits: float32[num_loss_tokens] each.

        losses, logs: of this rank's part, float32[n]; learnt: positions of predictions in the part; every_learnt: in
        the pack.
        """
        start, stop = self._bounds(num_tokens)
        rows = losses.new_zeros(stop - start, 2).index_put((learnt,), torch.stack([losses, logs], dim=1))
        every = self.whole(rows, num_tokens)[every_learnt]
        return every[:, 0].clone(), every[:, 1].clone()  # hooks of FSDP on views would be lost

    def shares(self, patches: Sequence[Sequence[int]]) -> list[slice]:
        """Return this rank's pieces of each kind of media; see share_bounds. patches: of each piece of each kind."""
        work, rank = [0] * self.degree, self.group.rank()
        found = []
        for of_kind in patches:
            bounds = share_bounds(of_kind, work)
            work = [done + sum(of_kind[slice(*pair)]) for done, pair in zip(work, pairwise(bounds), strict=True)]
            found.append(slice(*bounds[rank : rank + 2]))
        return found

    def of_part(self, features: torch.Tensor, is_medium: torch.Tensor) -> torch.Tensor:
        """Return the features of this rank's tokens, float[m, d], from the features of all ranks' shares, float[n, d].

        Features are in the order of the tokens. Each feature goes to a single rank, and the gradient returns on the
        same way. is_medium: the pack's tokens with a feature, bool[1, T]. ValueError if the numbers differ.
        """
        missing = -is_medium.shape[1] % self.degree
        in_parts = torch.nn.functional.pad(is_medium, (0, missing)).view(self.degree, -1).sum(dim=1)
        in_shares = torch.empty_like(in_parts)
        dist.all_gather_into_tensor(in_shares, in_parts.new_tensor([len(features)]), group=self.group)
        shares, parts = ([0, *accumulate(counts)] for counts in torch.stack([in_shares, in_parts]).tolist())
        if shares[-1] != parts[-1]:
            raise ValueError(f"{shares[-1]} features of media for {parts[-1]} tokens of media in a pack")
        rank = self.group.rank()
        sent, received = _overlaps(shares, rank, parts), _overlaps(parts, rank, shares)
        forth = partial(_route, sent=sent, received=received)
        return exchanged(features, self.group, forth=forth, back=partial(_route, sent=received, received=sent))

    def leave_out(self, choices: list[str], named: str) -> dict[str, str]:
        """See the function leave_out."""
        return leave_out(choices, named, degree=self.degree)

    def _bounds(self, num_tokens: int) -> tuple[int, int]:
        """First and one-past-last token of this rank's part, including padding."""
        size = -(-num_tokens // self.degree)
        return self.group.rank() * size, (self.group.rank() + 1) * size

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        start, stop = self._bounds(tensor.shape[-1])
        return tensor[..., start:stop].contiguous()


def share_tokens(model: PackedModel | PlainModel, meshes: Meshes) -> None:
    """Make a model run on parts of the tokens, if ranks share tokens.

    ConfigError for an unsupported model.
    """
    if (mesh := meshes.sp) is None:
        return
    if isinstance(model, PlainModel):
        raise ConfigError(
            f"train.sequence_parallel {mesh.size()} shares the tokens of texts, and {type(model.model).__name__} is no "
            "language model: set it to 1"
        )
    check_parts(
        model.model,
        degree=mesh.size(),
        matrix_parts=1 if meshes.tp is None else meshes.tp.size(),
        reads_media=model.family is not None,
    )
    if model.family is not None:
        check_shares(model.family, ATTENTIONS, f"train.sequence_parallel {mesh.size()}")
    choices = getattr(model.model, "attention_choices", [])
    if choices and SDPA_VARLEN not in choices:  # left out for a model with media, whose family now allows it
        choices.append(SDPA_VARLEN)
        model.model.attention_left_out.pop(SDPA_VARLEN, None)
    register()
    model.sequence = SequenceParts(group=mesh.get_group())


def check_parts(model: PreTrainedModel, *, degree: int, matrix_parts: int = 1, reads_media: bool = False) -> None:
    """Raise ConfigError for a model whose packs' tokens cannot be shared by `degree` ranks.

    matrix_parts: ranks that already divide the heads (tensor_parallel).
    """
    text, asked = model.config.get_text_config(), f"train.sequence_parallel {degree}"
    heads = text.num_attention_heads // matrix_parts
    if heads % degree:
        divisors = [str(each) for each in range(1, heads + 1) if heads % each == 0]
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads of {type(model).__name__}"
            f"{f' on a rank with tensor_parallel {matrix_parts}' if matrix_parts > 1 else ''}: each rank attends with "
            f"a share of them. Set it to {' or '.join(divisors)}"
        )
    if not has_varlen(type(model), model.config, has_causal_media=reads_media):
        raise ConfigError(
            f"{asked} is for models whose layers see all earlier tokens, or a window, and {type(model).__name__} has "
            "other layers: set it to 1"
        )
    scaling = getattr(text, "rope_scaling", None) or {}
    if (kind := scaling.get("rope_type", scaling.get("type"))) in _CHANGING_ROPE:
        raise ConfigError(
            f"{asked} gives each rank a part of the positions, and {kind} positions of {type(model).__name__} change "
            "with the furthest one: set it to 1"
        )


def leave_out(choices: list[str], named: str, *, degree: int) -> dict[str, str]:
    """Keep only attentions without masks in `choices`; return the reason for each removed attention.

    A mask would be made of only the positions of a rank's part. named: the attention if there are no choices.
    ConfigError if it needs a mask.
    """
    if not choices and named not in ATTENTIONS:
        raise ConfigError(
            f"train.sequence_parallel {degree} with attention {named}, whose mask would cover only a single rank's "
            f"tokens: set model.attention to {' or '.join(ATTENTIONS)}, or to auto (for an existing model: "
            f"model.set_attn_implementation({SDPA_VARLEN!r}))"
        )
    others = {name: "makes its mask of one rank's part of the tokens" for name in choices if name not in ATTENTIONS}
    choices[:] = [name for name in choices if name in ATTENTIONS]
    return others


def share_bounds(patches: Sequence[int], work: Sequence[int]) -> list[int]:
    """Return the first piece of each rank's share, and the number of pieces: shares of consecutive pieces.

    Work and shares of a rank add up to nearly the same level on all ranks. Each rank has room up to the level; the room
    with the middle of a piece decides the piece's rank. work: patches of each rank so far.

    >>> share_bounds([4, 4, 16], [0, 0])
    [0, 2, 3]
    >>> share_bounds([4, 4, 4, 4], [0, 8])
    [0, 3, 4]
    """
    total, least = sum(patches), sorted(work)
    level = min((total + before) / number for number, before in enumerate(accumulate(least), start=1))
    ends = list(accumulate(max(0.0, level - done) for done in work))  # of rooms
    middles = [end - own / 2 for own, end in zip(patches, accumulate(patches), strict=True)]
    return [0, *(sum(middle < end for middle in middles) for end in ends[:-1]), len(patches)]


def _overlaps(bounds: Sequence[int], rank: int, others: Sequence[int]) -> list[int]:
    """Return the number of rows of the rank's interval of `bounds` in each interval of `others`."""
    first, last = bounds[rank : rank + 2]
    return [max(0, min(last, stop) - max(first, start)) for start, stop in pairwise(others)]


def _route(
    rows: torch.Tensor, group: dist.ProcessGroup, *, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send rows to the ranks in turn; return the rows received. sent, received: numbers of rows, by rank."""
    made = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(made, rows.contiguous(), [*received], [*sent], group=group)
    return made


def _gather(part: torch.Tensor, group: dist.ProcessGroup, *, num_tokens: int, dim: int) -> torch.Tensor:
    """Gather the parts of all ranks, without padding."""
    first = part.movedim(dim, 0).contiguous()
    every = first.new_empty((group.size() * len(first), *first.shape[1:]))
    dist.all_gather_into_tensor(every, first, group=group)
    return every[:num_tokens].movedim(0, dim).contiguous()


def _take(gradients: torch.Tensor, group: dist.ProcessGroup, *, num_own: int, dim: int) -> torch.Tensor:
    """Return the gradient of this rank's part, from the gradient of the whole, equal on all ranks; 0 for padding."""
    start = group.rank() * num_own
    held = gradients.movedim(dim, 0)[start : start + num_own]
    own = held.new_zeros((num_own, *held.shape[1:]))
    own[: len(held)] = held
    return own.movedim(0, dim)


# Attention of all tokens of a pack with parts on several ranks: DeepSpeed-Ulysses (arXiv 2309.14509).
#
# Before attention, ranks exchange their tokens' heads, and each gets all tokens of a share of the heads; after
# attention they exchange them back. An attention function of transformers attends, with the bounds of the whole pack's
# samples.

Attend = Callable[..., tuple[torch.Tensor, Any]]


def register() -> None:
    """Make transformers' flash attention see all tokens of a pack, if blocks run on parts of them."""
    from transformers import AttentionInterface
    from transformers.integrations.flash_attention import flash_attention_forward

    AttentionInterface.register("flash_attention_2", over_heads(flash_attention_forward))


def over_heads(attend: Attend) -> Attend:
    """Wrap an attention function of transformers: given a group, it is called for a share of the heads."""
    exchanging = torch.compiler.disable(attend_over_heads)  # communication is not part of a block's graph

    def attend_to_all(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sequence_group: dist.ProcessGroup | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, Any]:
        if sequence_group is None:
            return attend(module, query, key, value, attention_mask, **others)
        found: torch.Tensor = exchanging(attend, module, (query, key, value), attention_mask, sequence_group, others)
        return found, None

    return attend_to_all


def attend_over_heads(
    attend: Attend,
    module: torch.nn.Module,
    of_part: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    group: dist.ProcessGroup,
    others: Mapping[str, Any],
) -> torch.Tensor:
    """Return the result of `attend` over all tokens of a pack, for this rank's tokens: float[1, T / degree, heads, d].

    of_part: query, key and value of a rank's tokens and all heads: float[1, heads, T / degree, d] each.
    """
    if mask is not None:
        raise ValueError("train.sequence_parallel has no attention with a mask: set it to 1")
    query, key, value = of_part
    if query.shape[1] % group.size():
        raise ValueError(f"train.sequence_parallel {group.size()} does not divide {query.shape[1]} attention heads")
    key, value = (repeated(each, group.size()) for each in (key, value))
    queries, keys, values = _to_heads((query, key, value), group)
    if (sinks := others.get("s_aux")) is not None:
        others = {**others, "s_aux": sinks.chunk(group.size())[group.rank()]}
    with _heads_of_key(module, queries.shape[1] // keys.shape[1]):
        found, _ = attend(module, queries, keys, values, None, **others)
    return _to_tokens(found, group)


def repeated(heads: torch.Tensor, degree: int) -> torch.Tensor:
    """Repeat heads of keys or values, float[1, groups, t, d], each the same number of times, until the degree divides
    them.

    >>> repeated(torch.arange(3.0).view(1, 3, 1, 1), 2).flatten().tolist()
    [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    """
    times = degree // gcd(degree, heads.shape[1])
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def _to_heads(of_part: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange tokens for heads: float[1, heads, T / degree, d] of a part -> float[1, heads / degree, T, d] of all
    tokens, in one exchange.
    """
    degree, num_tokens = group.size(), of_part[0].shape[2]
    shares = [each[0].unflatten(0, (degree, -1)).transpose(1, 2).flatten(2) for each in of_part]  # [degree, t, h * d]
    widths = [share.shape[2] for share in shares]
    sent = swapped(torch.cat(shares, dim=2), group)
    of_all = sent.view(degree * num_tokens, -1).split(widths, dim=1)
    return [
        each.unflatten(1, (-1, own.shape[3])).transpose(0, 1)[None] for each, own in zip(of_all, of_part, strict=True)
    ]


def _to_tokens(attended: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange heads for tokens: float[1, T, heads / degree, d] -> float[1, T / degree, heads, d]."""
    degree, (_, num_tokens, _, width) = group.size(), attended.shape
    sent = swapped(attended.reshape(degree, num_tokens // degree, -1), group)  # [degree, t, h * d]
    return sent.transpose(0, 1).reshape(1, num_tokens // degree, -1, width)


@contextmanager
def _heads_of_key(module: torch.nn.Module, number: int) -> Iterator[None]:
    """Set the number of query heads per head of keys and values in the attention's module, until the end of the
    block.
    """
    before: Any = getattr(module, "num_key_value_groups", None)
    if before is None or before == number:
        yield
        return
    module.num_key_value_groups = number  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
