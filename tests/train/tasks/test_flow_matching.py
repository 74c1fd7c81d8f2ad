"""Flow matching: its loss, what is drawn for it, and models that make images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lmms_stream.config import load_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import ConfigError
from lmms_stream.plugins.tasks.flow_matching import FlowMatching, sample_images, velocity_of
from lmms_stream.train.checkpoint.export import export_checkpoint
from lmms_stream.train.model.build import ModelConfig, PlainModel
from lmms_stream.train.model.flops import image_flops
from lmms_stream.train.model.sharding import freeze
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run_config import RunConfig
from lmms_stream.train.tasks.task import Draw
from lmms_stream.types import Batch

from ..images import DIT, NUM_CLASSES, SIZE, save_vae, write_image_run, write_images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "data"
    write_images(folder, num_samples=37)
    return folder


def trainer_of(run: Path, *overrides: str, **options: Any) -> FSDP2SFTTrainer:
    config = load_config(RunConfig, run, overrides)
    world, _ = init_distributed(config.train.timeout_s)
    given = {"model": config.model.build(), "task": config.build_task()} | options
    return FSDP2SFTTrainer(args=config.train, train_dataset=config.build_datasets(world), **given)


def packs_of(trainer: FSDP2SFTTrainer) -> Iterator[list[Batch]]:
    return trainer.data.steps_of(iter(trainer.loader))


def whole_model() -> Any:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel.from_config(DIT)
    return FlowMatching().wrap(model).model.train()


def expected_losses(model: Any, pack: Batch, draw: Draw, *, dropout: float = 0.1) -> list[float]:
    """Of each image, one at a time, by the formula."""
    losses = []
    images = pack.inputs["pixel_values"].float() / 127.5 - 1
    for index, sample_id in enumerate(pack.sample_ids.tolist()):
        noise = torch.from_numpy(
            draw.generator(pack.source, sample_id, "noise").standard_normal(images.shape[1:], np.float32)
        )
        t = float(draw.generator(pack.source, sample_id, "time").random((), np.float32))
        label = int(pack.inputs["class_labels"][index])
        told = NUM_CLASSES if label < 0 or draw.generator(pack.source, sample_id, "label").random() < dropout else label
        mixed = t * images[index] + (1 - t) * noise
        made = model(mixed[None], timestep=torch.tensor([1000 * t]), class_labels=torch.tensor([told])).sample[0]
        losses.append(float(((made - (images[index] - noise)) ** 2).mean()))
    return losses


def test_the_loss_is_the_mean_over_the_images_of_the_global_batch(data: Path, tmp_path: Path) -> None:
    run = write_image_run(tmp_path / "run.yaml", data, max_steps=1, learning_rate=0.0, seed=5, per_device_batch=3)
    trainer = trainer_of(run, model=whole_model())
    assert isinstance(trainer.task, FlowMatching)  # as the processor asks for
    packs = next(packs_of(trainer))
    trainer = trainer_of(run, model=whole_model())
    trainer.train()
    (record,) = read_log(tmp_path / "default")
    draw = Draw(seed=5, step=0)
    with torch.no_grad():
        losses = [loss for pack in packs for loss in expected_losses(whole_model(), pack, draw)]
    assert len({len(pack.sample_ids) for pack in packs}) > 1
    assert record["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert record["samples_seen"] == record["tokens_seen"] == len(losses)


def test_gradients_of_a_pack_are_the_sums_of_its_images_one_by_one(data: Path, tmp_path: Path) -> None:
    run = write_image_run(tmp_path / "run.yaml", data, max_steps=1)
    (pack, *others) = next(packs_of(trainer_of(run)))
    task, draw = FlowMatching(), Draw(seed=0, step=3)
    model = task.wrap(whole_model())

    def gradients(packs: list[Batch]) -> list[torch.Tensor]:
        model.zero_grad()
        for each in packs:
            task.losses(model, each, [each], draw=draw)["flow"].total.backward()
        return [torch.zeros(1) if each.grad is None else each.grad.clone() for each in model.parameters()]

    def only(index: int) -> Batch:
        from dataclasses import replace

        at = slice(index, index + 1)
        return replace(pack, sample_ids=pack.sample_ids[at], inputs={k: v[at] for k, v in pack.inputs.items()})

    together, alone = gradients([pack]), gradients([only(index) for index in range(4)])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert others


def counted(run: Any) -> int:
    """By torch, of what is really computed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("frozen", [[], ["transformer_blocks.0.*"]])
def test_the_flops_of_a_dit_are_what_torch_counts_of_its_images(frozen: list[str]) -> None:
    task, model = FlowMatching(), whole_model()
    task.wrap(model)
    freeze(model, frozen)
    flops = image_flops(model, task.run_one)
    assert flops is not None
    images, times = torch.zeros(3, *task.shape), torch.zeros(3)
    real = counted(lambda: velocity_of(model, images, times, torch.zeros(3, dtype=torch.int64)).sum().backward())
    assert flops.of(np.array([1, 1, 1]), num_loss_tokens=3) == pytest.approx(real, rel=0.02)


def test_a_run_that_makes_images_tells_its_arithmetic(data: Path, tmp_path: Path) -> None:
    run = write_image_run(tmp_path / "run.yaml", data, max_steps=2, logging_steps=1, peak_tflops=1.0)
    trainer_of(run).train()
    records = read_log(tmp_path / "default")
    assert records
    assert all(record["perf/mfu"] == record["perf/tflops_per_device"] > 0 for record in records)


def test_a_model_that_asks_for_values_has_no_flops_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def run(model: torch.nn.Linear) -> torch.Tensor:
        assert float(model.weight.sum()) > 0
        return model.weight

    with caplog.at_level(logging.INFO):
        assert image_flops(torch.nn.Linear(2, 2), run) is None
    assert "the arithmetic of Linear is not known, which does not run on the meta device: " in caplog.text


def test_a_pack_without_images_counts_nothing(data: Path, tmp_path: Path) -> None:
    from lmms_stream.loader.collate import collate

    task = FlowMatching()
    model = task.wrap(whole_model())
    empty = collate([], [])
    made = task.losses(model, empty, [empty], draw=Draw(seed=0, step=0))["flow"]
    made.total.backward()
    assert float(made.total.detach()) == 0
    assert made.of_packs.tolist() == [0]
    assert task.units(empty) == {"flow": 0}
    assert all(each.grad is None or not each.grad.any() for each in model.parameters())


def test_images_are_learnt_as_latents_of_a_frozen_autoencoder(data: Path, tmp_path: Path) -> None:
    vae = save_vae(tmp_path / "vae")
    run = write_image_run(
        tmp_path / "run.yaml",
        data,
        max_steps=2,
        export=True,
        ema_decay=0.9,
        task={"type": "flow_matching", "vae": str(vae)},
    )
    overrides = [f"model.config.sample_size={SIZE // 2}"]
    trainer = trainer_of(run, *overrides)
    trainer.train()
    assert trainer.task.autoencoder.vae.config.scaling_factor == 0.5  # type: ignore[attr-defined]
    assert not any(each.requires_grad for each in trainer.task.autoencoder.vae.parameters())  # type: ignore[attr-defined]
    from diffusers import DiTTransformer2DModel

    model, average = (
        DiTTransformer2DModel.from_pretrained(tmp_path / "default" / name) for name in ("export", "export-ema")
    )
    weights = {name: each.full_tensor() for name, each in trainer.model.model.state_dict().items()}
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert any(not torch.equal(each, weights[name]) for name, each in average.state_dict().items())
    task = FlowMatching(vae=str(vae))
    made = sample_images(model, task, [0, 1, 2], num_steps=3, guidance=2.0)
    assert made.shape == (3, SIZE, SIZE, 3)
    again = sample_images(model, task, [0], num_steps=3, guidance=2.0)
    assert np.abs(again[0].astype(int) - made[0]).max() <= 1
    one, other = sample_images(model, task, [0, 0], num_steps=1)
    assert (one != other).any()
    trainer.save_model(tmp_path / "saved")
    saved = DiTTransformer2DModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(each, weights[name]) for name, each in saved.state_dict().items())
    out = export_checkpoint(tmp_path / "default" / "checkpoints" / "step-00000002", tmp_path / "out", dtype="bfloat16")
    assert DiTTransformer2DModel.from_pretrained(out, torch_dtype=torch.bfloat16).dtype == torch.bfloat16


class Own(torch.nn.Module):
    """A user's own model, without classes or a config."""

    def __init__(self, norm: type[torch.nn.Module] | None = None):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.norm = torch.nn.Identity() if norm is None else norm(3)
        self.time = torch.nn.Linear(1, 3)

    def forward(self, images: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.conv(images)) + self.time(timestep[:, None] / 1000)[:, :, None, None]
        return made


def test_a_model_of_the_users_own_is_trained_and_exported(data: Path, tmp_path: Path) -> None:
    run = write_image_run(tmp_path / "run.yaml", data, max_steps=2, export=True)
    trainer_of(run, model=Own()).train()
    from safetensors.torch import load_file

    Own().load_state_dict(load_file(tmp_path / "default" / "export" / "model.safetensors"))
    with pytest.raises(ConfigError, match="Own gives other results for an image next to other images: use norms"):
        trainer_of(
            run, "train.output_dir=" + str(tmp_path / "other"), model=Own(torch.nn.BatchNorm2d),
            task=FlowMatching(sample_shape=(3, SIZE, SIZE)),
        ).train()  # fmt: skip


OWN = """
import torch

class Narrow(torch.nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images, timestep):
        return self.last(self.first(images))

def number(width=3):
    return width
"""


def test_a_run_names_a_model_class_of_the_users_own(data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = write_image_run(tmp_path / "run.yaml", data, max_steps=2, task={"type": "flow_matching"})
    settings = yaml.safe_load(run.read_text())
    settings["task"]["sample_shape"] = [3, SIZE, SIZE]
    settings["model"] = {"class_path": f"{tmp_path / 'own.py'}:Narrow", "args": {"width": 5}}
    run.write_text(yaml.safe_dump(settings))
    trainer = trainer_of(run)
    trainer.train()
    assert trainer.model.model.get_parameter("first.weight").shape == (5, 3, 3, 3)
    assert read_log(tmp_path / "default")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"class_path": "own.py"}, "class_path 'own.py' names no class: write it as module:Class or path/to/file.py:C"),
        ({"class_path": "nowhere.py:Narrow"}, "there is no file .*nowhere.py: correct the path"),
        (
            {"class_path": "no_such_module:Narrow"},
            "module no_such_module cannot be imported .* install it, or name its",
        ),
        ({"class_path": "OWN:Wide"}, "has no class 'Wide': correct the name"),
        (
            {"class_path": "OWN:number"},
            "OWN:number makes a int, expected a torch.nn.Module: name a model class, or a",
        ),
        (
            {"class_path": "OWN:Narrow", "args": {"size": 1}},
            "model cannot be built: .*unexpected keyword argument 'size'",
        ),
        (
            {"config": {}, "args": {"width": 1}},
            "model.args are arguments of model.class_path, which is not set: leave",
        ),
        (
            {"class_path": "a:B", "adapter": {}},
            "model.adapter is for models of transformers, but class_path names another",
        ),
        ({"class_path": "a:B", "pretrained": "x"}, "exactly one of pretrained and config, or class_path"),
    ],
)
def test_a_class_that_makes_no_model_is_named(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = str(tmp_path / "own.py")
    values: dict[str, Any] = {
        name: value.replace("OWN", own) if isinstance(value, str) else value for name, value in said.items()
    }
    with pytest.raises(ConfigError, match=message.replace("OWN", own)):
        ModelConfig(**values).build()


def test_what_cannot_be_learnt_is_named(data: Path, tmp_path: Path) -> None:
    run = write_image_run(tmp_path / "run.yaml", data, max_steps=1)
    with pytest.raises(
        ConfigError, match=r"label [23] of sample \d+ is not among the model's 2 classes, counted from 0"
    ):
        trainer_of(run, "model.config.num_embeds_ada_norm=2").train()
    with pytest.raises(ConfigError, match="label_dropout must be a share, 0 to 1, got 2"):
        FlowMatching(label_dropout=2)
    with pytest.raises(ConfigError, match="is not an AutoencoderKL of diffusers"):
        FlowMatching(vae=str(tmp_path))
    with pytest.raises(ConfigError, match=r"diffusers .* has no model 'DiT'"):
        trainer_of(run, "model.config._class_name=DiT")
    with pytest.raises(ConfigError, match="task needs type, the name of a task"):
        trainer_of(run, "task.vae=x")


def test_sampling_follows_the_velocity_from_noise_to_the_image() -> None:
    """Of a model that knows the image: each step of the straight path ends there."""
    target = torch.linspace(-1, 1, 3 * SIZE * SIZE).view(1, 3, SIZE, SIZE)

    class Knows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = (target - images) / (1 - timestep / 1000).view(-1, 1, 1, 1)
            return made

    made = sample_images(Knows(), FlowMatching(sample_shape=(3, SIZE, SIZE)), [0, 0], num_steps=7)
    expected = ((target[0] + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert np.abs(made.astype(int) - expected).max() <= 1
    velocity = velocity_of(Knows(), torch.zeros(1, 3, SIZE, SIZE), torch.zeros(1), torch.zeros(1))
    assert torch.equal(velocity, target)
    assert isinstance(FlowMatching().wrap(Knows()), PlainModel)
