"""Reconstruction: a decoder learns to make images of what a frozen encoder makes of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lmms_stream.config import build_config, load_mapping
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.doors.lmms_engine.datasets.iterable import MultiModalIterableDataset
from lmms_stream.doors.lmms_engine.datasets.naive import MultiModalDataset
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.plugins.tasks.images import collate_images
from lmms_stream.plugins.tasks.reconstruction import L1, HingeGAN, Perceptual, Reconstruction, VisionEncoder
from lmms_stream.processors.image import ImageProcessor
from lmms_stream.train.model.flops import image_flops
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.train.tasks.task import Draw
from lmms_stream.types import Batch

from ..images import SIZE, TinyDecoder, adversary, encoded, save_encoder, write_typed_run


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder") / "encoder")


def pack_of(*sample_ids: int) -> Batch:
    rng = np.random.default_rng(0)
    processor = ImageProcessor(image_size=SIZE, crop="random")
    samples = [processor.process({"image": encoded(12, 9, rng), "label": -1}) for _ in sample_ids]
    return collate_images(samples, sample_ids)


def losses_of(task: Reconstruction, model: Any, packs: list[Batch], *, step: int | None = 9) -> dict[str, Any]:
    from lmms_stream.loader.collate import join

    wrapped = task.wrap(model)
    return dict(task.losses(wrapped, join(packs), packs, draw=Draw(seed=0, step=step)))


def test_the_losses_of_packs_are_those_of_their_images(encoder: Path) -> None:
    task, decoder = Reconstruction(encoder=encoder), TinyDecoder()
    task.encoder.to(torch.device("cpu"))
    one, two = pack_of(3, 4, 5), pack_of(6)
    made = losses_of(task, decoder, [one, two])["l1"]
    for pack, total in zip((one, two), made.of_packs.tolist(), strict=True):
        images = pack.inputs["pixel_values"].float() / 127.5 - 1
        again = task.reconstruct(decoder, images)
        assert total == pytest.approx(float((again - images).abs().mean(dim=(1, 2, 3)).sum()), rel=1e-5)
    assert float(made.total.detach()) == pytest.approx(sum(made.of_packs.tolist()), rel=1e-5)
    assert task.units(one) == {"l1": 3}
    nothing = losses_of(task, decoder, [collate([], [])])["l1"]
    nothing.total.backward()
    assert float(nothing.total.detach()) == 0


def test_the_flops_of_a_decoder_are_what_torch_counts_of_its_images(encoder: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    task, decoder = Reconstruction(encoder=encoder), TinyDecoder()
    flops = image_flops(decoder, task.run_one)
    assert flops is not None
    with FlopCounterMode(display=False) as counter:
        decoder(torch.zeros(2, task.encoder.num_patches, task.encoder.hidden_size)).sum().backward()
    assert flops.of(np.array([1, 1]), num_loss_tokens=2) == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert image_flops(adversary(), task.run_one) is None


def test_a_discriminator_learns_to_tell_and_the_decoder_to_be_taken_for_real(encoder: Path) -> None:
    task = Reconstruction(encoder=encoder, terms=[L1(weight=0.0), HingeGAN(weight=0.5)])
    task.encoder.to(torch.device("cpu"))
    assert {each.name: each.weight for each in task.objectives(None)} == {
        "l1": 0.0, "generator": 0.5, "discriminator": 1.0,
    }  # fmt: skip
    model, pack = adversary(), pack_of(1, 2)
    images = pack.inputs["pixel_values"].float() / 127.5 - 1
    with torch.no_grad():
        made, real = (
            model.discriminator(each).mean(dim=(1, 2, 3)) for each in (task.reconstruct(model, images), images)
        )
    losses = losses_of(task, model, [pack])
    assert float(losses["generator"].total.detach()) == pytest.approx(float(-made.sum()), rel=1e-4)
    hinges = torch.relu(1 - real) + torch.relu(1 + made)
    assert float(losses["discriminator"].total.detach()) == pytest.approx(float(hinges.sum()), rel=1e-4)
    losses["generator"].total.backward(retain_graph=True)
    assert all(each.grad is None or not each.grad.any() for each in model.discriminator.parameters())
    assert any(each.grad is not None and each.grad.any() for each in model.decoder.parameters())
    model.zero_grad()
    losses["discriminator"].total.backward()
    assert all(each.grad is None or not each.grad.any() for each in model.decoder.parameters())
    assert any(each.grad is not None and each.grad.any() for each in model.discriminator.parameters())
    later = Reconstruction(encoder=encoder, terms=[HingeGAN(from_step=9, discriminator_from_step=6)])
    later.encoder.to(torch.device("cpu"))
    begun = [losses_of(later, model, [pack], step=step) for step in (5, 6, 9)]
    assert [[float(each[name].total.detach()) != 0 for name in ("generator", "discriminator")] for each in begun] == [
        [False, False], [False, True], [True, True],
    ]  # fmt: skip


def test_a_perceptual_distance_is_a_term(encoder: Path) -> None:
    class Distance(torch.nn.Module):
        """As LPIPS, which gives [n, 1, 1, 1]."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            return (self.scale * (made - real) ** 2).mean(dim=(1, 2, 3), keepdim=True)

    distance = Distance()
    task = Reconstruction(encoder=encoder, terms=[L1(), Perceptual(distance=distance, weight=2.0)])
    task.check(task.wrap(TinyDecoder()), device=torch.device("cpu"), bf16=False, is_compiled=False)
    assert not distance.scale.requires_grad
    made = losses_of(task, TinyDecoder(), [pack_of(1, 2)])
    assert float(made["lpips"].total.detach()) > 0
    made["lpips"].total.backward()


@pytest.mark.parametrize("kind", ["siglip", "dinov2"])
def test_an_encoder_gives_the_tokens_of_patches(kind: str, tmp_path: Path) -> None:
    encoder = VisionEncoder.load(save_encoder(tmp_path / kind, kind))
    encoder.to(torch.device("cpu"))
    images = torch.rand(2, 3, SIZE, SIZE) * 2 - 1
    tokens = encoder.encode(images)
    assert tokens.shape == (2, encoder.num_patches, encoder.hidden_size) == (2, 16, 16)
    expected = encoder.model(pixel_values=images).last_hidden_state[:, -16:]
    torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)
    assert encoder.encode(torch.rand(2, 3, 3 * SIZE, 3 * SIZE)).shape == tokens.shape  # resized to its own size
    assert not any(each.requires_grad for each in encoder.model.parameters())


def trained(run: Path, output: Path, *, max_steps: int, iterable: bool) -> None:
    said = load_mapping(run, [f"train.output_dir={output}", f"train.max_steps={max_steps}", "train.num_workers=0"])
    config = build_config(DatasetConfig, said["dataset"], source="run")
    dataset: Any = MultiModalIterableDataset(config) if iterable else MultiModalDataset(config)
    task = Reconstruction(encoder=run.parent / "encoder", terms=[L1(), HingeGAN()])
    settings = build_config(TrainConfig, said["train"], source="run")
    FSDP2SFTTrainer(model=adversary(), args=settings, train_dataset=dataset, task=task).train()


@pytest.mark.parametrize("kind", ["rae_iterable", "sit_iterable"])
def test_streamed_rows_of_images_train_and_go_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    run = write_typed_run(tmp_path, kind)
    save_encoder(tmp_path / "encoder")
    trained(run, tmp_path / "whole", max_steps=4, iterable=True)
    trained(run, tmp_path / "again", max_steps=2, iterable=True)
    trained(run, tmp_path / "again", max_steps=4, iterable=True)
    whole, again = ({each["step"]: each for each in read_log(tmp_path / name)} for name in ("whole", "again"))
    assert {*whole} == {*again} == {1, 2, 3, 4}
    for step in whole:
        assert whole[step]["loss"] == again[step]["loss"]
        assert whole[step]["sample_ids"] == again[step]["sample_ids"]
        assert math.isfinite(whole[step]["loss"])


def test_what_cannot_be_reconstructed_is_named(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="a reconstruction needs encoder, a vision model of transformers or its folder"
    ):
        Reconstruction()
    with pytest.raises(ConfigError, match="is not a model of transformers"):
        Reconstruction(encoder=tmp_path / "nothing")
    linear: Any = torch.nn.Linear(2, 2)
    linear.config = object()
    with pytest.raises(ConfigError, match="Linear is not a vision encoder: its config needs image_size"):
        Reconstruction(encoder=linear)
    with pytest.raises(ConfigError, match="two terms have the name 'l1': rename one of them"):
        Reconstruction(encoder=encoder, terms=[L1(), L1()])
    with pytest.raises(ConfigError, match="a reconstruction without terms has no loss"):
        Reconstruction(encoder=encoder, terms=[])
    task = Reconstruction(encoder=encoder, terms=[HingeGAN()])
    task.encoder.to(torch.device("cpu"))
    with pytest.raises(
        ConfigError, match="HingeGAN needs a discriminator, and the model is a TinyDecoder: train an Adv"
    ):
        losses_of(task, TinyDecoder(), [pack_of(1)])
    with pytest.raises(ConfigError, match=r"the decoder makes images \[3, 6, 6\] of images \[3, 8, 8\]: make it for"):
        losses_of(Reconstruction(encoder=encoder), TinyDecoder(6), [pack_of(1)])


def test_a_run_asks_for_the_task_that_its_dataset_is_for(tmp_path: Path) -> None:
    said = yaml.safe_load(write_typed_run(tmp_path, "rae").read_text())
    config = build_config(DatasetConfig, said["dataset"], source="run")
    settings = build_config(TrainConfig, said["train"], source="run")
    with pytest.raises(ConfigError, match="a reconstruction needs encoder"):
        FSDP2SFTTrainer(model=TinyDecoder(), args=settings, train_dataset=MultiModalDataset(config))
