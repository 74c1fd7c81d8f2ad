"""What a reconstruction is learnt by: terms of its loss, each of them a number for each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.func import functional_call

from ...errors import ConfigError

Losses = Mapping[str, torch.Tensor]


class Adversary(torch.nn.Module):
    """A decoder with what learns to tell its images from real ones: both are trained, saved and resumed as one model.

    discriminator: images [n, 3, S, S] from -1 to 1 -> float[n, …], high for real ones; it must look at each image by
    itself.
    """

    def __init__(self, decoder: torch.nn.Module, discriminator: torch.nn.Module):
        super().__init__()
        self.decoder, self.discriminator = decoder, discriminator


class Term(Protocol):
    """Any object with these members is a term of a reconstruction.

    weights: of its losses in the loss, by their names, which every rank and step gives. A call gives each loss of each
    image, float32[n]. made, real: the images that the decoder makes and those that it should, float32[n, 3, S, S], -1
    to 1. model: the one that is trained, with its parts. step: finished steps of the run; None in an evaluation. Parts
    that are not trained it moves to the device of the images itself, in `to`.
    """

    @property
    def weights(self) -> Mapping[str, float]: ...

    def to(self, device: torch.device) -> object: ...

    def __call__(self, made: torch.Tensor, real: torch.Tensor, *, model: Any, step: int | None) -> Losses: ...


@dataclass(frozen=True, kw_only=True)
class L1:
    """The mean absolute error of the values of an image."""

    weight: float = 1.0

    @property
    def weights(self) -> Mapping[str, float]:
        return {"l1": self.weight}

    def to(self, device: torch.device) -> None:
        """It has no parts."""

    def __call__(self, made: torch.Tensor, real: torch.Tensor, *, model: Any, step: int | None) -> Losses:
        return {"l1": (made - real).abs().flatten(1).mean(1)}


@dataclass(frozen=True, kw_only=True)
class Perceptual:
    """A distance of images by a network that is not trained, as LPIPS: distance(made, real) -> float[n, …].

    distance: such as lpips.LPIPS(net="vgg"), which takes images from -1 to 1.
    """

    distance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weight: float = 1.0
    name: str = "lpips"

    @property
    def weights(self) -> Mapping[str, float]:
        return {self.name: self.weight}

    def to(self, device: torch.device) -> None:
        if isinstance(self.distance, torch.nn.Module):
            self.distance.requires_grad_(False).eval().to(device)

    def __call__(self, made: torch.Tensor, real: torch.Tensor, *, model: Any, step: int | None) -> Losses:
        return {self.name: self.distance(made, real).flatten(1).mean(1)}


@dataclass(frozen=True, kw_only=True)
class HingeGAN:
    """The decoder learns to be taken for real by a discriminator that learns to tell (hinge loss), both in each step.

    The model is an Adversary. weight: of what the decoder learns by it. from_step, discriminator_from_step: the first
    steps in which they learn; before, these losses are 0.
    """

    weight: float = 0.75
    from_step: int = 0
    discriminator_from_step: int = 0
    weights: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", {"generator": self.weight, "discriminator": 1.0})

    def to(self, device: torch.device) -> None:
        """Its parts are the model's."""

    def __call__(self, made: torch.Tensor, real: torch.Tensor, *, model: Any, step: int | None) -> Losses:
        if not hasattr(model, "discriminator"):
            raise ConfigError(
                f"HingeGAN needs a discriminator, and the model is a {type(model).__name__}: train an "
                "Adversary(decoder, discriminator)"
            )
        judge = model.discriminator
        still = {name: each.detach() for name, each in (*judge.named_parameters(), *judge.named_buffers())}
        of_decoder = -_of_images(functional_call(judge, still, (made,)))
        of_judge = torch.relu(1 - _of_images(judge(real))) + torch.relu(1 + _of_images(judge(made.detach())))
        return {
            "generator": of_decoder * _begun(step, self.from_step),
            "discriminator": of_judge * _begun(step, self.discriminator_from_step),
        }


def weights_of(terms: Sequence[Term]) -> dict[str, float]:
    """The weights of the losses of all terms; ConfigError for names that two of them have, and for no term."""
    if not terms:
        raise ConfigError("a reconstruction without terms learns nothing: give it L1(), or others")
    weights: dict[str, float] = {}
    for term in terms:
        if both := weights.keys() & term.weights.keys():
            raise ConfigError(f"two terms have the loss {min(both)!r}: give one of them another name")
        weights |= term.weights
    return weights


def _of_images(judged: torch.Tensor) -> torch.Tensor:
    return judged.float().flatten(1).mean(1)


def _begun(step: int | None, first: int) -> float:
    return float(step is None or step >= first)
