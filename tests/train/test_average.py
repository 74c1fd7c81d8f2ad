"""The average of the weights. On two ranks, killed and resumed: tests/jobs/test_lora.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import CheckpointError, ConfigError
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.export import export_checkpoint, model_files
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.optimizers import Average
from lmms_stream.train.run.settings import TrainConfig
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ..conftest import run_cli, write_tokens
from .runs import trainer_of, write_small_run

DECAY = 0.8
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose embedding is tied to its head, and whose first block is frozen."""
    folder = tmp_path_factory.mktemp("average")
    write_tokens(folder / "data", num_samples=300)
    frozen = ["model.layers.0.*"]
    return write_small_run(
        folder / "run.yaml", folder / "data", max_steps=6, ema_decay=DECAY, frozen=frozen, export=True
    )


TIED = "model.config.tie_word_embeddings=true"


def weights_of(trainer: FSDP2SFTTrainer) -> Weights:
    found: Weights = {}
    for name, each in trainer.model.model.named_parameters():
        assert isinstance(each, DTensor)
        found[name] = each.full_tensor().detach().clone()
    return found


def test_the_average_follows_the_weights_and_is_exported_beside_them(run: Path, tmp_path: Path) -> None:
    trainer = trainer_of(run, TIED, f"train.output_dir={tmp_path}")
    expected = weights_of(trainer)

    def follow(*_: Any) -> None:
        for name, weight in weights_of(trainer).items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight

    trainer.optimizer.register_step_post_hook(follow)
    trainer.train()
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export-ema").named_parameters())
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(loaded[name].detach(), weight, rtol=1e-5, atol=1e-7)
    trained = weights_of(trainer)
    is_frozen = {name: ".layers.0." in name for name in trained}
    assert {name: torch.equal(loaded[name], weight) for name, weight in trained.items()} == is_frozen
    assert all(torch.equal(weight, trained[name]) for name, weight in _exported(tmp_path / "export").items())


def _exported(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def test_the_average_goes_on_bit_by_bit(run: Path, tmp_path: Path) -> None:
    for name, stops in (("whole", [6]), ("resumed", [3, 6])):
        for stop in stops:
            settings = (f"train.output_dir={tmp_path / name}", f"train.max_steps={stop}")
            trainer_of(run, TIED, *settings, "train.lr_scheduler_type=constant").train()
    whole, resumed = (_exported(tmp_path / name / "export-ema") for name in ("whole", "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_an_average_that_was_not_kept_begins_where_a_run_resumes(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = f"train.output_dir={tmp_path}"
    trainer_of(run, TIED, out, "train.max_steps=3", "train.ema_decay=null").train()
    assert not (tmp_path / "export-ema").exists()
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    with pytest.raises(CheckpointError, match="step-00000003 holds no average of its weights: train with ema_decay"):
        export_checkpoint(checkpoint, tmp_path / "none", average=True)
    resumed = trainer_of(run, TIED, out, "train.learning_rate=0")
    with caplog.at_level(logging.WARNING, logger="lmms_stream"):
        resumed.train()
    assert "train.ema_decay was None, is 0.8" in caplog.text
    weights, average = _exported(tmp_path / "export"), _exported(tmp_path / "export-ema")
    for name, weight in weights.items():
        torch.testing.assert_close(average[name], weight)  # nothing moved since
    done = run_cli("export", str(tmp_path / "checkpoints" / "step-00000006"), str(tmp_path / "again"), "--ema")
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(weight, average[name]) for name, weight in _exported(tmp_path / "again").items())


class Tied(torch.nn.Module):
    """A model of the user's own whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits


def test_tied_weights_of_a_model_that_is_not_transformers_have_their_average(tmp_path: Path) -> None:
    init_distributed(60)
    model = Tied()
    files = model_files(model, None)
    fully_shard(model)
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=0.1), Average(model, decay=DECAY)
    model(torch.arange(10)).square().mean().backward()
    optimizer.step()
    average.update()
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging", average=average) as checkpointer:
        checkpointer.save(model, optimizer, step=1, state={}, documents=files)
    for is_average, expected in ((True, average.tensors["embedding.weight"]), (False, model.embedding.weight)):
        out = export_checkpoint(tmp_path / "saved" / "step-00000001", tmp_path / "model", average=is_average)
        whole: Any = expected
        for name, weight in load_file(out / "model.safetensors").items():
            assert torch.equal(weight, whole.full_tensor()), name


def test_weights_in_bfloat16_have_their_average_in_float32(run: Path, tmp_path: Path) -> None:
    trainer = trainer_of(run, TIED, f"train.output_dir={tmp_path}", "model.dtype=bfloat16", "train.max_steps=2")
    trainer.train()
    assert trainer.average is not None
    assert {each.dtype for each in trainer.average.tensors.values()} == {torch.float32}
    assert {each.dtype for each in _exported(tmp_path / "export-ema").values()} == {torch.bfloat16}


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_that_cannot_be_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=f"ema_decay must be above 0 and below 1, got {decay}: 0.999 is usual"):
        TrainConfig(output_dir="out", global_batch=1, max_steps=1, ema_decay=decay)
