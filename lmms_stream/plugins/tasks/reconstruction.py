"""Reconstruction: a decoder is trained to make an image from a frozen vision encoder's features of the image (RAE).

Zheng et al. 2025, https://arxiv.org/abs/2510.11690: the encoder's tokens are the latents, and only the decoder is
trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.func import functional_call

from ...checks import plain_path
from ...errors import ConfigError
from ...processors.tokenizers import check_trusted
from ...train.model.build import PlainModel
from ...train.tasks.task import Draw, LossSum, Objective
from ...types import Batch
from .images import check_apart, collate_images, frozen, loss_sum, pixels_of

# Terms of the loss of a reconstruction: a number for each image.

Losses = Mapping[str, torch.Tensor]


class Adversary(torch.nn.Module):
    """A decoder with a discriminator of its images from real images: both are trained, saved and resumed as one model.

    discriminator: images [n, 3, S, S] from -1 to 1 -> float[n, …], high for real images; it must treat each image
    separately.
    """

    def __init__(self, decoder: torch.nn.Module, discriminator: torch.nn.Module):
        super().__init__()
        self.decoder, self.discriminator = decoder, discriminator


class Term(Protocol):
    """Interface of a term of a reconstruction: any object with these members.

    weights: of its losses in the total, by name; every rank and step returns the same names. A call returns each loss
    of each image, float32[n]. made, real: the decoder's images and the expected images, float32[n, 3, S, S], -1 to 1.
    model: the trained model, with its parts. step: finished steps of the run; None in an evaluation. `to` moves parts
    that are not trained to the device of the images.
    """

    @property
    def weights(self) -> Mapping[str, float]: ...

    def to(self, device: torch.device) -> object: ...

    def __call__(self, made: torch.Tensor, real: torch.Tensor, *, model: Any, step: int | None) -> Losses: ...


@dataclass(frozen=True, kw_only=True)
class L1:
    """Mean absolute error of the values of an image."""

    weight: float = 1.0

    @property
    def weights(self) -> Mapping[str, float]:
        return {"l1": self.weight}

    def to(self, device: torch.device) -> None:
        """Do nothing: it has no parts."""

    def __call__(self, made: torch.Tensor, real: torch.Tensor, *, model: Any, step: int | None) -> Losses:
        return {"l1": (made - real).abs().flatten(1).mean(1)}


@dataclass(frozen=True, kw_only=True)
class Perceptual:
    """Distance of images by a frozen network, e.g. LPIPS: distance(made, real) -> float[n, …].

    distance: e.g. lpips.LPIPS(net="vgg"), which takes images from -1 to 1.
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
    """Hinge losses of a discriminator, trained to tell the decoder's images from real images, and of the decoder,
    trained to deceive it, both in each step.

    The model is an Adversary. weight: of the decoder's loss. from_step, discriminator_from_step: the first steps of the
    decoder's and the discriminator's loss; before, these losses are 0.
    """

    weight: float = 0.75
    from_step: int = 0
    discriminator_from_step: int = 0
    weights: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", {"generator": self.weight, "discriminator": 1.0})

    def to(self, device: torch.device) -> None:
        """Do nothing: its parts are the model's."""

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
    """Weights of the losses of all terms; ConfigError for duplicate names, and without terms."""
    if not terms:
        raise ConfigError("a reconstruction without terms has no loss: add L1() or another term")
    weights: dict[str, float] = {}
    for term in terms:
        if both := weights.keys() & term.weights.keys():
            raise ConfigError(f"two terms have the name {min(both)!r}: rename one of them")
        weights |= term.weights
    return weights


def _of_images(judged: torch.Tensor) -> torch.Tensor:
    return judged.float().flatten(1).mean(1)


def _begun(step: int | None, first: int) -> float:
    return float(step is None or step >= first)


class Reconstruction:
    """Loss of each term, over the images of the global batch.

    encoder: a vision model of transformers, its folder or its hub id; its weights do not change. trust_remote_code: run
    Python files of this folder. image_size: of the images (default: the encoder's). terms: the losses (default: the
    mean absolute error).

    The model is a decoder: the encoder's tokens of patches float32[n, patches, hidden] -> images [n, 3, S, S], -1 to 1;
    with HingeGAN an Adversary with this decoder.
    """

    collate: Callable[..., Batch] = staticmethod(collate_images)

    def __init__(
        self, *, encoder: Any = None, image_size: int | None = None, terms: Sequence[Term] = (L1(),),
        trust_remote_code: bool = False,
    ):  # fmt: skip
        if encoder is None:
            raise ConfigError(
                "a reconstruction needs encoder, a vision model of transformers or its folder: give the trainer "
                "task=Reconstruction(encoder=…), or the run's file task: {type: reconstruction, encoder: …}"
            )
        is_named = isinstance(encoder, str | Path)
        self.encoder = VisionEncoder.load(encoder, trust_remote_code) if is_named else VisionEncoder(encoder)
        self.image_size = image_size or self.encoder.image_size
        self.terms = tuple(terms)
        self._weights = weights_of(self.terms)

    def wrap(self, model: torch.nn.Module) -> PlainModel:
        """See Task."""
        return PlainModel(model)

    def objectives(self, model: Any) -> Sequence[Objective]:
        return [Objective(name=name, weight=weight) for name, weight in self._weights.items()]

    def units(self, pack: Batch) -> Mapping[str, int]:
        return dict.fromkeys(self._weights, len(pack.sample_ids))

    def losses(
        self, model: Any, batch: Batch, packs: Sequence[Batch], draw: Draw | None = None
    ) -> Mapping[str, LossSum]:
        assert draw is not None
        real = pixels_of(batch)
        if real is None:
            real = torch.zeros(1, 3, self.image_size, self.image_size, device=batch.input_ids.device)
        tokens = self.encoder.encode(real)

        def run(inner: Any) -> dict[str, torch.Tensor]:
            made = decoded(inner, tokens)
            if made.shape != real.shape:
                raise ConfigError(
                    f"the decoder makes images {list(made.shape[1:])} of images {list(real.shape[1:])}: make it for "
                    "their size, or change processor.image_size"
                )
            found: dict[str, torch.Tensor] = {}
            for term in self.terms:
                found |= term(made, real, model=inner, step=draw.step)
            return found

        made = model(run)
        return {name: loss_sum(made[name], packs) for name in self._weights}

    def check(self, model: Any, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        self.encoder.to(device)
        for term in self.terms:
            term.to(device)
        shape = (3, 3, self.image_size, self.image_size)
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device) * 2 - 1
        inputs = {"tokens": self.encoder.encode(images)}
        check_apart(model, lambda inner, one: decoded(inner, one["tokens"]), inputs, bf16=bf16)

    def run_one(self, model: torch.nn.Module) -> torch.Tensor | None:
        """See Task. None with a discriminator, whose work is not known here."""
        if hasattr(model, "discriminator"):
            return None
        return decoded(model, torch.empty(1, self.encoder.num_patches, self.encoder.hidden_size, device="meta"))

    @torch.no_grad()
    def reconstruct(self, model: Any, images: torch.Tensor) -> torch.Tensor:
        """Images reconstructed by a whole model: float32[n, 3, S, S], -1 to 1, like the given images."""
        return decoded(model, self.encoder.encode(images))


def decoded(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the images that a decoder, or the decoder of an Adversary, makes of tokens."""
    decoder = getattr(model, "decoder", model) if hasattr(model, "discriminator") else model
    made = decoder(tokens.to(next(decoder.parameters()).dtype))
    images: torch.Tensor = getattr(made, "sample", made)
    return images.float()


# A frozen vision encoder of transformers: images -> the tokens of their patches.

_MEAN, _STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # of processors of SigLIP: images from -1 to 1


class VisionEncoder:
    """Frozen encoder. model: of transformers, e.g. SiglipVisionModel or Dinov2Model. mean, std: of its input values
    from 0 to 1.
    """

    def __init__(self, model: Any, *, mean: Sequence[float] = _MEAN, std: Sequence[float] = _STD):
        self.model = getattr(model, "vision_model", model) if hasattr(model, "text_model") else model
        config = getattr(self.model.config, "vision_config", self.model.config)
        if not (hasattr(config, "image_size") and hasattr(config, "patch_size")):
            raise ConfigError(
                f"{type(model).__name__} is not a vision encoder: its config needs image_size and patch_size; use for "
                "example SiglipVisionModel or Dinov2Model"
            )
        self.image_size, self.patch_size = int(config.image_size), int(config.patch_size)
        self.hidden_size = int(config.hidden_size)
        self._mean, self._std = (torch.tensor(each).view(1, 3, 1, 1) for each in (mean, std))

    @staticmethod
    def load(path: str | Path, trust_remote_code: bool = False) -> VisionEncoder:
        """Load the encoder of a folder or hub id, with the mean and deviation of its image processor."""
        import transformers

        path = plain_path("encoder", path)
        try:
            model = transformers.AutoModel.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            check_trusted(error, str(path), trust_remote_code)
            message = " ".join(str(error).split())[:200]
            raise ConfigError(f"encoder {path} is not a model of transformers: {message}") from error
        try:
            options = {"trust_remote_code": trust_remote_code}
            processor: Any = transformers.AutoImageProcessor.from_pretrained(str(path), **options)
        except (OSError, ValueError) as error:  # a folder without an image processor
            check_trusted(error, str(path), trust_remote_code)
            return VisionEncoder(model)
        return VisionEncoder(model, mean=processor.image_mean, std=processor.image_std)

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def to(self, device: torch.device) -> None:
        """Freeze the encoder, whole on each rank."""
        frozen(self.model, device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images, float32[n, 3, S, S], -1 to 1, after resizing them to the encoder's size: float32[n, patches,
        hidden].
        """
        if images.shape[-1] != self.image_size:
            size = (self.image_size, self.image_size)
            images = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(-1, 1)
        values = ((images + 1) / 2 - self._mean) / self._std
        dtype = next(self.model.parameters()).dtype
        tokens = self.model(pixel_values=values.to(dtype)).last_hidden_state
        of_patches: torch.Tensor = tokens[:, -self.num_patches :]  # before them come tokens of the whole image
        return of_patches.float().clone()
