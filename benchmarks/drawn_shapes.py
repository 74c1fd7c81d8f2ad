"""What image_generation.py learns of: drawn shapes, an autoencoder of them, and a classifier that tells them apart."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NAMES = ("circle", "square", "triangle", "cross")
SIZE = 32  # pixels of a side
_FINER = 4  # shapes are drawn larger, and made smaller, which smooths their edges
_VAE_BATCH, _CLASSIFIER_BATCH, _CLASSIFIER_STEPS = 32, 64, 400
_VAE_RATE, _CLASSIFIER_RATE = 2e-3, 2e-3


def draw_shape(label: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A shape of some light color, size and position on a dark ground: uint8[SIZE, SIZE, 3]."""
    from PIL import Image, ImageDraw

    side = SIZE * _FINER
    ground, color = (tuple(rng.integers(*bounds, 3).tolist()) for bounds in ((0, 60), (120, 256)))
    image = Image.new("RGB", (side, side), ground)
    draw = ImageDraw.Draw(image)
    r = rng.uniform(0.25, 0.4) * side
    x, y = rng.uniform(r + _FINER, side - r - _FINER, 2)
    if label == 0:
        draw.ellipse((x - r, y - r, x + r, y + r), fill=color)
    elif label == 1:
        draw.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=color)
    elif label == 2:
        draw.polygon([(x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)], fill=color)
    else:
        arm = 0.35 * r
        draw.rectangle((x - r, y - arm, x + r, y + arm), fill=color)
        draw.rectangle((x - arm, y - r, x + arm, y + r), fill=color)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def draw_shapes(count: int, *, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Shapes uint8[count, SIZE, SIZE, 3] and their labels int64[count], as many of each."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(NAMES)
    return np.stack([draw_shape(int(label), rng) for label in labels]), labels


def write_rows(path: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Path:
    """Rows of JSON with the path of an image, written beside, and its label."""
    from PIL import Image

    folder = path.parent / path.stem
    folder.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "PNG")
            (folder / f"{number}.png").write_bytes(buffer.getvalue())
            file.write(json.dumps({"image": f"{path.stem}/{number}.png", "label": int(label)}) + "\n")
    return path


def as_tensor(images: NDArray[np.uint8]) -> torch.Tensor:
    """float32[n, 3, SIZE, SIZE], -1 to 1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_autoencoder(images: torch.Tensor, folder: Path, *, steps: int) -> float:
    """Train an AutoencoderKL, save it to a folder, and return how well it makes images again: PSNR in dB."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=SIZE,
        mid_block_add_attention=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(vae.parameters(), _VAE_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _VAE_RATE * min(1.0, 2 * (steps - step) / steps)
        batch = images[torch.randint(len(images), (_VAE_BATCH,))]
        latents = vae.encode(batch).latent_dist
        loss = (vae.decode(latents.sample()).sample - batch).abs().mean() + 1e-4 * latents.kl().mean() / SIZE**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    vae.eval().requires_grad_(False)
    some = images[:256]
    latents = torch.cat([vae.encode(each).latent_dist.mode() for each in some.split(64)])
    vae.register_to_config(scaling_factor=1 / float(latents.std()))
    vae.save_pretrained(folder)
    return psnr(torch.cat([vae.decode(each).sample for each in latents.split(64)]), some)


def train_classifier(images: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    """A small network that names shapes, trained on noisy ones, so that flaws of pixels do not decide."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [torch.nn.Conv2d(before, after, 3, 2, 1), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(64 * (SIZE // 8) ** 2, len(NAMES)))
    optimizer = torch.optim.AdamW(model.parameters(), _CLASSIFIER_RATE)
    for _ in range(_CLASSIFIER_STEPS):
        chosen = torch.randint(len(images), (_CLASSIFIER_BATCH,))
        noisy = images[chosen] + 0.1 * torch.randn_like(images[chosen])
        loss = torch.nn.functional.cross_entropy(model(noisy), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def share_right(classifier: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((classifier(images).argmax(1) == labels).float().mean())


def psnr(made: torch.Tensor, real: torch.Tensor) -> float:
    """The peak signal-to-noise ratio of images from -1 to 1, in dB, of their mean squared error."""
    return float(-10 * torch.log10(((made - real) / 2).square().mean()))


class Decoder(torch.nn.Module):
    """Tokens of patches float32[n, patches, hidden] -> images [n, 3, SIZE, SIZE], each patch with a look around it."""

    def __init__(self, *, hidden: int, patch: int, width: int = 64):
        super().__init__()
        self._grid = SIZE // patch
        self.read = torch.nn.Conv2d(hidden, width, 1)
        self.look = torch.nn.Sequential(
            torch.nn.GELU(), torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.GELU(),
            torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.GELU(),
        )  # fmt: skip
        self.write = torch.nn.Conv2d(width, 3 * patch**2, 1)
        self.join = torch.nn.PixelShuffle(patch)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        grid = tokens.transpose(1, 2).unflatten(2, (self._grid, self._grid))
        read = self.read(grid)
        made: torch.Tensor = self.join(self.write(read + self.look(read)))
        return made
