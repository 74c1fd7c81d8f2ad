"""Logits, losses and gradients of a pack against those of its samples, each alone in plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.model import PackedModel
from lmms_stream.types import Processed

from .vision import losses_of, plain_logits, rows_of

Gradients = dict[str, torch.Tensor]


def gradients_of(model: torch.nn.Module) -> Gradients:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def is_noise_of_keys(parameter: str) -> bool:
    """Whether its gradient is zero but for roundings: what all keys share is not seen by a softmax."""
    return parameter.endswith("k_proj.bias")


def unequal(found: Gradients, expected: Gradients, *, slack: float = 0.0) -> list[str]:
    """The parameters whose gradients are further apart than 1e-5 of their norm, and slack."""
    return [name for name, each in expected.items() if (found[name] - each).norm() > 1e-5 * each.norm() + slack]


def check_pack(
    packed: PackedModel,
    plain: Any,
    samples: Sequence[Processed],
    *,
    pad_to: int,
    is_noise: Callable[[str], bool] = lambda _: False,
    slack: float = 0.0,
) -> set[str]:
    """AssertionError where a pack of the samples, in any way to its logits, gives other ones than they do alone.

    Parameters that have gradients in the pack alone, whose gradients are zeros, are returned.
    """
    batch = collate(samples, range(len(samples)), pad_to=pad_to)
    together = packed.logits(batch)[0]
    plain.zero_grad()
    alone = torch.zeros(())
    for sample, rows in zip(samples, rows_of(batch), strict=False):
        logits = plain_logits(plain, sample, family=packed.family)
        torch.testing.assert_close(together[rows], logits, rtol=0, atol=1e-5)
        alone = alone + losses_of(logits, sample)
    alone.backward()
    of_plain = gradients_of(plain)
    expected = {name: each for name, each in of_plain.items() if not is_noise(name)}
    for way in packed.logits_ways:
        packed.logits_way = way
        packed.model.zero_grad()
        loss = packed(batch).tokens.sum()
        loss.backward()
        found = gradients_of(packed.model)
        torch.testing.assert_close(loss, alone.to(loss.dtype), rtol=1e-5, atol=0)
        assert unequal(found, expected, slack=slack) == [], way
        more = found.keys() - of_plain.keys()
        assert [name for name in more if found[name].any()] == [], way
    return more
