"""Flow matching: a model is trained on the velocity from noise to an image, of its class if images have labels (SiT).

Ma et al. 2024, https://arxiv.org/abs/2401.08740, with the straight path: at time t an image is t * image + (1 - t) *
noise, t uniform in [0, 1), and its velocity is image - noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...checks import plain_path
from ...errors import ConfigError
from ...train.model.build import PlainModel, config_of, takes
from ...train.tasks.task import Draw, LossSum, Objective
from ...types import Batch
from .images import LABELS, NO_LABEL, check_apart, collate_images, frozen, loss_sum, pixels_of

FLOW = "flow"
TIME_SCALE = 1000.0  # diffusers' models embed times from 0 to 1000


class FlowMatching:
    """Squared error of the velocity, its mean over the values of an image, over the images of the global batch.

    vae: an AutoencoderKL of diffusers, its folder or its hub id: the model is trained on its latents; the vae is
    frozen. label_dropout: the share of labels hidden from the model, for training on images of any class too
    (guidance). num_classes: of the model (default: the config's), and the label of images with a hidden label.
    sample_shape: of the model's input, [C, H, W] (default: by the config).

    The model is diffusers' DiTTransformer2DModel, or has the same arguments: an image [n, C, H, W], timestep [n] from 0
    to 1000, and optionally class_labels [n]. It returns the velocity, or an object with the velocity as `sample`.
    """

    collate: Callable[..., Batch] = staticmethod(collate_images)

    def __init__(
        self,
        *,
        vae: Any = None,
        label_dropout: float = 0.1,
        num_classes: int | None = None,
        sample_shape: Sequence[int] | None = None,
    ):
        if not 0 <= label_dropout <= 1:
            raise ConfigError(f"label_dropout must be a share, 0 to 1, got {label_dropout}")
        self.autoencoder = None if vae is None else Autoencoder(vae)
        self.label_dropout = label_dropout
        self.num_classes = num_classes
        self._shape = None if sample_shape is None else tuple(sample_shape)

    def wrap(self, model: torch.nn.Module) -> PlainModel:
        """See Task."""
        config = config_of(model)
        for part in model.modules():
            if type(part).__name__ == "LabelEmbedding":  # of diffusers: it would drop other labels in each block
                part.dropout_prob = 0.0  # type: ignore[assignment]
        if self.num_classes is None:
            self.num_classes = config.get("num_embeds_ada_norm")
        if self._shape is None and {"in_channels", "sample_size"} <= config.keys():
            self._shape = (config["in_channels"], config["sample_size"], config["sample_size"])
        if takes(model.forward, LABELS) and self.num_classes is None:
            raise ConfigError(f"{type(model).__name__} takes class_labels: set the number of classes, num_classes")
        return PlainModel(model)

    def objectives(self, model: Any) -> Sequence[Objective]:
        return [Objective(name=FLOW)]

    def units(self, pack: Batch) -> Mapping[str, int]:
        return {FLOW: len(pack.sample_ids)}

    def losses(
        self, model: Any, batch: Batch, packs: Sequence[Batch], draw: Draw | None = None
    ) -> Mapping[str, LossSum]:
        """Return the losses. draw: source of random draws; required."""
        assert draw is not None
        device = batch.input_ids.device
        pixels = pixels_of(batch)
        if pixels is None:
            images, noise, times = (torch.zeros(1, *shape, device=device) for shape in (self.shape, self.shape, ()))
            labels = torch.zeros(1, dtype=torch.int64, device=device)
        else:
            images = pixels if self.autoencoder is None else self.autoencoder.encode(pixels, packs, draw)
            self._shape = tuple(images.shape[1:])
            noise = draw.normal(packs, self._shape, name="noise").to(device)
            times = draw.uniform(packs, name="time").to(device)
            labels = self._labels(batch, packs, draw)
        at = times.view(-1, 1, 1, 1)
        mixed, velocity = at * images + (1 - at) * noise, images - noise
        of_images = model(
            lambda inner: (velocity_of(inner, mixed, times, labels) - velocity).square().flatten(1).mean(1)
        )
        return {FLOW: loss_sum(of_images, packs)}

    def check(self, model: Any, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        if self.autoencoder is not None:
            frozen(self.autoencoder.vae, device)
        if self._shape is None:
            return
        rng = torch.Generator().manual_seed(0)
        inputs = {
            "images": torch.randn(3, *self._shape, generator=rng).to(device),
            "times": torch.tensor([0.1, 0.5, 0.9], device=device),
            "labels": torch.arange(3, device=device) % max(1, self.num_classes or 1),
        }
        check_apart(
            model, lambda inner, one: velocity_of(inner, one["images"], one["times"], one["labels"]), inputs, bf16=bf16
        )

    def run_one(self, model: torch.nn.Module) -> torch.Tensor | None:
        """See Task. None if the size of images is not known."""
        if self._shape is None:
            return None
        images, times = torch.empty(1, *self._shape, device="meta"), torch.empty(1, device="meta")
        return velocity_of(model, images, times, torch.zeros(1, dtype=torch.int64, device="meta"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's input."""
        if self._shape is None:
            raise ConfigError(
                "a rank has no image in its first step, and the model's config has no sample_size and in_channels: "
                "pass a sample_shape to FlowMatching"
            )
        return self._shape

    def _labels(self, batch: Batch, packs: Sequence[Batch], draw: Draw) -> torch.Tensor:
        """Label of each image for the model: int64[n]."""
        labels = batch.inputs.get(LABELS)
        if labels is None or self.num_classes is None:
            return torch.full((len(batch.sample_ids),), self.num_classes or 0, device=batch.input_ids.device)
        for pack in packs:
            of_pack = pack.inputs[LABELS].tolist() if LABELS in pack.inputs else []  # on the CPU
            for label, sample_id in zip(of_pack, pack.sample_ids.tolist(), strict=False):
                if not NO_LABEL <= label < self.num_classes:
                    raise ConfigError(
                        f"label {label} of sample {sample_id} is not among the model's {self.num_classes} classes, "
                        "counted from 0: correct the label, or num_embeds_ada_norm"
                    )
        dropped = draw.chosen(packs, self.label_dropout, name="label").to(labels.device) | (labels == NO_LABEL)
        return torch.where(dropped, self.num_classes, labels)


def velocity_of(model: Any, images: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the model's velocity: float32 of the shape of images. If the model also predicts a variance, it comes
    after the velocity and is dropped.
    """
    dtype = next(model.parameters()).dtype
    told = {LABELS: labels} if takes(model.forward, LABELS) else {}
    made = model(images.to(dtype), timestep=times * TIME_SCALE, **told)
    velocity: torch.Tensor = getattr(made, "sample", made)
    return velocity[:, : images.shape[1]].float()


# Images <-> the latents of a frozen autoencoder of diffusers.

INSTALL = "pip install 'lmms-stream[generation]'"


class Autoencoder:
    """An AutoencoderKL, or its folder or hub id; its latents are scaled by its config, to about N(0, 1)."""

    def __init__(self, vae: Any):
        self.vae: Any = load_autoencoder(vae) if isinstance(vae, str | Path) else vae
        config = self.vae.config
        self._scale = float(config.scaling_factor)
        self._shift = float(getattr(config, "shift_factor", None) or 0.0)

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor, packs: Sequence[Batch], draw: Draw) -> torch.Tensor:
        """Draw a latent of each image from its distribution: float32[n, C, h, w]."""
        latents = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist
        mean = latents.mean.float()
        noise = draw.normal(packs, mean.shape[1:], name="latent").to(mean.device)
        drawn: torch.Tensor = (mean + latents.std.float() * noise - self._shift) * self._scale
        return drawn

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images of latents: float32[n, 3, S, S], about -1 to 1."""
        made: torch.Tensor = self.vae.decode((latents / self._scale + self._shift).to(self.vae.dtype)).sample.float()
        return made


def load_autoencoder(path: str | Path) -> Any:
    """Load an autoencoder. ConfigError without diffusers, and for a folder without an autoencoder."""
    if find_spec("diffusers") is None:
        raise ConfigError(f"an autoencoder of images needs diffusers: {INSTALL}")
    from diffusers import AutoencoderKL

    path = plain_path("vae", path)
    try:
        return AutoencoderKL.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"vae {path} is not an AutoencoderKL of diffusers: {' '.join(str(error).split())[:200]}"
        ) from error


# Images for people to look at: Euler's method along the velocity, from noise at time 0.


@torch.no_grad()
def sample_images(
    model: Any, task: FlowMatching, labels: torch.Tensor | list[int], *, num_steps: int = 50, guidance: float = 1.0,
    seed: int = 0,
) -> NDArray[np.uint8]:  # fmt: skip
    """Generate an image of each label: uint8[n, S, S, 3]. model: whole, on the device of its parameters, exported.

    guidance: extrapolation of a class's velocity from the velocity of any class, 1 for none (Ho and Salimans 2022).
    Image i depends only on its label, the seed and i.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1, got {num_steps}")
    was_training = model.training
    wrapped = task.wrap(model).model.eval()
    device = next(wrapped.parameters()).device
    told = torch.as_tensor(labels, dtype=torch.int64, device=device)
    anyone = torch.full_like(told, task.num_classes or 0)
    noise = [np.random.default_rng([seed, i]).standard_normal(task.shape, np.float32) for i in range(len(told))]
    images = torch.from_numpy(np.stack(noise)).to(device)
    guides = guidance != 1 and takes(wrapped.forward, LABELS)
    for step in range(num_steps):
        times = torch.full((len(told),), step / num_steps, device=device)
        velocity = velocity_of(wrapped, images, times, told)
        if guides:
            free = velocity_of(wrapped, images, times, anyone)
            velocity = free + guidance * (velocity - free)
        images = images + velocity / num_steps
    model.train(was_training)
    if task.autoencoder is not None:
        images = task.autoencoder.decode(images)
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    made: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return made
