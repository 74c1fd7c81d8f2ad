"""Claim: a small model that is trained here makes images that a classifier of real ones takes for what they are to be,
and a decoder makes images again of what a frozen encoder makes of them.

`sit`: a DiT of diffusers learns drawn shapes of four kinds by flow matching, as latents of a small AutoencoderKL that
is trained on the spot, once for each seed; guessing gives 25 %. `rae`: a decoder learns to make the shapes of what a
frozen SiglipVisionModel, with random weights, makes of them; held-out ones are compared with the mean image.

    python benchmarks/image_generation.py --plot docs/generation.png
    python benchmarks/image_generation.py --seeds 1 --images 1000 --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn_shapes import (
    NAMES,
    SIZE,
    Decoder,
    as_tensor,
    draw_shapes,
    psnr,
    share_right,
    train_autoencoder,
    train_classifier,
    write_rows,
)
from measure import print_table, verdict
from numpy.typing import NDArray

HELD_OUT = 400  # images
IMAGES_A_STEP = 32
GUIDANCE, SAMPLING_STEPS, SAMPLES = 2.0, 30, 200
EMA = 0.99
VAE_STEPS = 400
RAE_STEPS = 300
PATCH, HIDDEN = 4, 96  # of the encoder
MIN_RIGHT = 0.7
MIN_GAIN_DB = 3.0
MAX_S = 1800.0  # of all of it
DIT = {
    "_class_name": "DiTTransformer2DModel", "num_attention_heads": 3, "attention_head_dim": 32, "in_channels": 4,
    "out_channels": 4, "num_layers": 4, "sample_size": SIZE // 4, "patch_size": 1, "norm_num_groups": 4,
    "num_embeds_ada_norm": len(NAMES),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data:
    shards: Path
    images: torch.Tensor
    labels: torch.Tensor
    held_out: torch.Tensor
    held_out_labels: torch.Tensor


def write_data(folder: Path, *, num_images: int) -> Data:
    from lmms_stream.converters.convert import convert
    from lmms_stream.converters.options import ConvertOptions
    from lmms_stream.converters.rows.options import SchemaOptions

    images, labels = draw_shapes(num_images, seed=0)
    held_out, held_out_labels = draw_shapes(HELD_OUT, seed=1)
    rows = write_rows(folder / "shapes.jsonl", images, labels)
    convert([rows], str(folder / "shards"), options=ConvertOptions(schema=SchemaOptions(kind="image")), num_workers=1)
    return Data(
        shards=folder / "shards", images=as_tensor(images), labels=torch.from_numpy(labels),
        held_out=as_tensor(held_out), held_out_labels=torch.from_numpy(held_out_labels),
    )  # fmt: skip


def trained(folder: Path, data: Data, *, task: Any, model: Any, seed: int, **settings: Any) -> Path:
    """The folder of the average of a model's weights, as it is exported."""
    from lmms_stream import FSDP2SFTTrainer, PackedStreamingDataset, PackingConfig, TrainConfig
    from lmms_stream.processors.image import ImageProcessor

    dataset = PackedStreamingDataset(
        str(data.shards), processor=ImageProcessor(image_size=SIZE, crop="center", flip=False, augment_seed=seed),
        packing=PackingConfig(packing_length=IMAGES_A_STEP), shuffle_seed=seed,
    )  # fmt: skip
    config = TrainConfig(
        output_dir=str(folder), global_batch=1, num_workers=0, seed=seed, ema_decay=EMA, export=True,
        warmup=20, logging_steps=50, **settings,
    )  # fmt: skip
    FSDP2SFTTrainer(model=model, args=config, train_dataset=dataset, task=task).train()
    return folder / "export-ema"


def generate(folder: Path, data: Data, vae: Path, *, seed: int, steps: int) -> NDArray[np.uint8]:
    """Samples of a model that is trained, the labels in turn: uint8[SAMPLES, SIZE, SIZE, 3]."""
    from diffusers import DiTTransformer2DModel
    from lmms_stream.plugins.tasks.flow_matching import FlowMatching, sample_images
    from lmms_stream.train.model.build import ModelConfig

    model = ModelConfig(config=DIT, seed=seed)
    made = trained(
        folder, data, task=FlowMatching(vae=vae), model=model, seed=seed, max_steps=steps,
        learning_rate=1e-3, lr_scheduler_type="wsd", lr_scheduler_kwargs={"decay_ratio": 0.3},
    )  # fmt: skip
    labels = [number % len(NAMES) for number in range(SAMPLES)]
    return sample_images(
        DiTTransformer2DModel.from_pretrained(made), FlowMatching(vae=vae), labels, num_steps=SAMPLING_STEPS,
        guidance=GUIDANCE, seed=seed,
    )  # fmt: skip


def reconstruct(folder: Path, data: Data, *, steps: int) -> torch.Tensor:
    """The held-out images as the trained decoder makes them again."""
    from lmms_stream.plugins.tasks.reconstruction import Reconstruction
    from safetensors.torch import load_file
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    encoder = SiglipVisionModel(
        SiglipVisionConfig(
            image_size=SIZE, patch_size=PATCH, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
            num_attention_heads=4, vision_use_head=False,
        )
    )  # fmt: skip
    task = Reconstruction(encoder=encoder)
    made = trained(
        folder, data, task=task, model=Decoder(hidden=HIDDEN, patch=PATCH), seed=0, max_steps=steps, learning_rate=2e-3
    )
    decoder = Decoder(hidden=HIDDEN, patch=PATCH)
    decoder.load_state_dict(load_file(made / "model.safetensors"))
    return torch.cat([task.reconstruct(decoder, each) for each in data.held_out.split(100)])


def plot(path: Path, rows: Sequence[NDArray[np.uint8]], titles: Sequence[str]) -> None:
    """Pictures row by row, each with a title."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 1, figsize=(9, 1.15 * len(rows)))
    for axis, row, title in zip(axes, rows, titles, strict=True):
        axis.imshow(np.concatenate(list(row), axis=1))
        axis.set_title(title, fontsize=8, loc="left", pad=2)
        axis.axis("off")
    figure.tight_layout(pad=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def to_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    made: NDArray[np.uint8] = ((images.clamp(-1, 1) + 1) * 127.5).byte().permute(0, 2, 3, 1).numpy()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="train with N seeds; default: %(default)s")
    parser.add_argument("--images", type=int, default=4000, metavar="N", help="draw N images; default: %(default)s")
    parser.add_argument("--steps", type=int, default=700, metavar="N", help="train for N steps; default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a figure to PATH")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = write_data(folder, num_images=options.images)
        classifier = train_classifier(data.images, data.labels)
        real = share_right(classifier, data.held_out, data.held_out_labels)
        vae_db = train_autoencoder(data.images, folder / "vae", steps=VAE_STEPS)
        made = [
            generate(folder / f"sit-{seed}", data, folder / "vae", seed=seed, steps=options.steps)
            for seed in range(options.seeds)
        ]
        labels = torch.arange(SAMPLES) % len(NAMES)
        right = [share_right(classifier, as_tensor(each), labels) for each in made]
        again = reconstruct(folder / "rae", data, steps=RAE_STEPS)
    mean_db = psnr(data.images.mean(0, keepdim=True).expand_as(data.held_out), data.held_out)
    gain_db = psnr(again, data.held_out) - mean_db
    seconds = time.perf_counter() - started
    met = min(right) >= MIN_RIGHT and gain_db >= MIN_GAIN_DB and seconds <= MAX_S
    rows = [
        ["held-out shapes that the classifier names right", f"{real:.1%}"],
        ["images of the autoencoder, PSNR", f"{vae_db:.1f} dB"],
        *[[f"samples named as they were asked for, seed {seed}", f"{each:.1%}"] for seed, each in enumerate(right)],
        ["held-out shapes made again, PSNR over the mean image's", f"{gain_db:+.1f} dB ({mean_db:.1f} dB)"],
        ["seconds of all of it, of the CPU", f"{seconds:.0f}, {time.process_time():.0f}"],
        [f"{MIN_RIGHT:.0%} of samples, {MIN_GAIN_DB:g} dB, {MAX_S:.0f} s", verdict(met)],
    ]
    print_table("images that are made", ["what", "result"], rows)
    if options.plot:
        shown = [
            to_pixels(data.images[:16]),
            *[each[:16] for each in made],
            to_pixels(data.held_out[:16]),
            to_pixels(again[:16]),
        ]
        titles = ["drawn", *[f"made, seed {seed}" for seed in range(options.seeds)], "held out", "made again"]
        plot(options.plot, shown, titles)
    if not met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
