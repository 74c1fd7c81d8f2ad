"""A run that resumes fills an empty model from its checkpoint, and needs no pretrained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lmms_stream.config import load_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run_config import RunConfig
from transformers import GenerationConfig

from ..conftest import write_tokens
from ..rounds import in_long_rounds
from .runs import MODEL, write_small_run

GEMMA = {**MODEL, "model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}


def trainer_of(path: Path, *overrides: str) -> FSDP2SFTTrainer:
    """As the command makes it: the trainer builds the model."""
    config = load_config(RunConfig, path, overrides)
    world, _ = init_distributed(config.train.timeout_s)
    return FSDP2SFTTrainer(model=config.model, args=config.train, train_dataset=config.build_datasets(world))


def _files(checkpoint: Path) -> dict[str, Any]:
    """Sizes and checksums of its tensors and of what describes its model."""
    files: dict[str, Any] = json.loads((checkpoint / "complete.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".distcp") or name.startswith("model/")}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MODEL, id="llama", marks=in_long_rounds),
        pytest.param({**MODEL, "tie_word_embeddings": True}, id="tied"),
        pytest.param(GEMMA, id="rotary"),
    ],
)
def test_a_run_goes_on_where_the_pretrained_folder_is_gone_as_if_it_were_there(
    model: dict[str, Any], tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    pretrained = tmp_path / "pretrained"
    made = ModelConfig(config=model, seed=3).build()
    made.generation_config = GenerationConfig(max_length=77)
    made.save_pretrained(pretrained)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=2, lr_scheduler_type="constant")
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "model": {"pretrained": str(pretrained)}}))
    losses, saved = {}, {}
    for name, *stops in (("whole", 2), ("resumed", 1, 2)):
        for stop in stops:
            if stop == 2 and name == "resumed":
                shutil.rmtree(pretrained)
            trainer = trainer_of(path, f"train.output_dir={tmp_path / name}", f"train.max_steps={stop}")
            trainer.train()
        losses[name] = [record["loss"] for record in read_log(tmp_path / name)]
        saved[name] = checkpoints(tmp_path / name / "checkpoints")[-1]
    assert losses["resumed"] == losses["whole"]
    files = [_files(each) for each in saved.values()]
    assert files[0] == files[1]
    assert "model/generation_config.json" in files[0]


def test_an_empty_model_has_the_buffers_that_from_pretrained_makes(tmp_path: Path) -> None:
    init_distributed(60)
    try:
        ModelConfig(config=GEMMA).build().save_pretrained(tmp_path / "model")
        config = ModelConfig(pretrained=str(tmp_path / "model"), dtype="bfloat16")
        whole, empty = config.build(), config.build_empty(tmp_path / "model")
    finally:
        end_distributed()
    assert empty is not None
    assert all(each.is_meta for each in empty.parameters())
    of_whole, of_empty = dict(whole.named_buffers()), dict(empty.named_buffers())
    assert of_whole.keys() == of_empty.keys() != set()
    for name, buffer in of_whole.items():
        assert torch.equal(buffer, of_empty[name])
        assert buffer.dtype == of_empty[name].dtype
    assert {name: each.dtype for name, each in whole.named_parameters()} == {
        name: each.dtype for name, each in empty.named_parameters()
    }
    assert whole.config.to_dict() == empty.config.to_dict()


def test_a_trainer_that_is_asked_before_it_trains_has_the_pretrained_weights(tmp_path: Path) -> None:
    """What resumes fills them later, as before."""
    write_tokens(tmp_path / "data", num_samples=60)
    path = write_small_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=2)
    trainer_of(path).train()
    expected = load_config(RunConfig, path).model.build().state_dict()
    trainer = trainer_of(path, "train.max_steps=3")
    asked: Any = trainer.model.model.state_dict()
    for name, tensor in asked.items():
        assert torch.equal(tensor.full_tensor(), expected[name])
    trainer.train()
    assert trainer.step == 3
