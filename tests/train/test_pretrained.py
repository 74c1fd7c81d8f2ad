"""Weights that are read one by one, where they lie, are those that from_pretrained loads; or they are loaded so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lmms_stream.config import load_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.pretrained import WholeOnlyError, find_tensors, unread_weights
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run_config import RunConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from ..conftest import write_tokens
from .runs import MODEL, write_run
from .test_export import EXPERTS, VISION

GEMMA = {**MODEL, "model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config": MODEL},
    "in half": {"config": MODEL, "dtype": "bfloat16"},
    "tied": {"config": {**MODEL, "tie_word_embeddings": True}},
    "rotary": {"config": GEMMA},
    "of several names": {"config": {**MODEL, "model_type": "bert", "is_decoder": True}},
    "of other names in files": {"config": VISION},
    "of experts": {"config": EXPERTS},
}


def saved(folder: Path, **model: Any) -> Path:
    """A pretrained model in several files."""
    built = ModelConfig(**model, seed=3).build()
    built.generation_config = GenerationConfig(max_length=77)
    built.save_pretrained(folder, max_shard_size="40KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_that_are_read_one_by_one_are_those_that_from_pretrained_loads(
    kind: str, dtype: Any, tmp_path: Path
) -> None:
    config = ModelConfig(pretrained=str(saved(tmp_path / "model", **MODELS[kind])), dtype=dtype)
    whole, unread = config.build(), config.build_unread()
    tensors = unread_weights(unread)
    assert tensors is not None
    assert all(each.is_meta for each in unread.parameters())
    expected = whole.state_dict()
    assert unread.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        found = tensors.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    of_whole, of_unread = dict(whole.named_buffers()), dict(unread.named_buffers())
    assert of_whole.keys() == of_unread.keys()
    assert all(torch.equal(buffer, of_unread[name]) for name, buffer in of_whole.items())
    assert unread.config.to_dict() == whole.config.to_dict()
    assert unread.generation_config.to_dict() == whole.generation_config.to_dict()


def test_a_tensor_that_was_read_is_no_part_of_its_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", config=MODEL)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    tensors = unread_weights(ModelConfig(pretrained=str(folder)).build_unread())
    assert tensors is not None
    tensors.read("lm_head.weight").zero_()
    assert tensors.read("lm_head.weight").any()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _as_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_as_bin, "it has no files of safetensors"),
        (
            _changed(lambda held: held.pop("lm_head.weight")),
            "its files hold no lm_head.weight, which is made anew",
        ),
        (
            _changed(lambda held: held.update(extra=torch.ones(2))),
            "its files hold extra, which LlamaForCausalLM does not have",
        ),
        (
            _changed(lambda held: held.update({"model.norm.weight": torch.ones(2)})),
            r"its model.norm.weight of shape \[2\] is \[32\] in the model",
        ),
        (_cut, r"its files cannot be listed \(.*"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "it is an adapter next to its base"),
    ],
    ids=["bin", "made anew", "strange", "of another shape", "cut", "adapter"],
)
def test_what_from_pretrained_would_do_more_to_than_copy_is_left_to_it(
    change: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    built = ModelConfig(config=MODEL).build()
    built.save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(WholeOnlyError, match=reason):
        find_tensors(str(tmp_path), built)


def test_models_with_code_of_their_own_are_left_to_it(tmp_path: Path) -> None:
    class Own(LlamaForCausalLM):
        pass

    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    with pytest.raises(WholeOnlyError, match="its class does not belong to transformers"):
        find_tensors(str(tmp_path), Own._from_config(LlamaConfig(**fields)))
    kept = LlamaForCausalLM._from_config(LlamaConfig(**fields), dtype=torch.bfloat16)
    kept._keep_in_fp32_modules_strict = ["norm"]
    with pytest.raises(WholeOnlyError, match="some of its weights stay in float32, next to weights in"):
        find_tensors(str(tmp_path), kept)
    hooked = LlamaForCausalLM(LlamaConfig(**fields))
    hooked.model.norm.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(WholeOnlyError, match=r"model\.norm changes what is loaded into it"):
        find_tensors(str(tmp_path), hooked)


def test_a_pretrained_model_that_cannot_be_read_so_is_built_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    built = ModelConfig(config=MODEL, seed=5).build()
    built.save_pretrained(folder)
    _as_bin(folder)
    (folder / "config.json").write_text(json.dumps(built.config.to_dict()))
    made = ModelConfig(pretrained=str(folder)).build_unread()
    assert unread_weights(made) is None
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize("kind", ["in half", "tied", "rotary"])
def test_a_trainer_begins_with_the_weights_of_the_files(kind: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1, save_steps="no")
    settings = yaml.safe_load(path.read_text())
    folder = saved(tmp_path / "model", **MODELS[kind])
    dtype = MODELS[kind].get("dtype", "float32")
    path.write_text(yaml.safe_dump({**settings, "model": {"pretrained": str(folder), "dtype": dtype}}))
    config = load_config(RunConfig, path)
    world, _ = init_distributed(config.train.timeout_s)
    trainer = FSDP2SFTTrainer(model=config.model, args=config.train, train_dataset=config.build_datasets(world))
    state: Any = trainer.model.model.state_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor.full_tensor(), expected[name]) for name, tensor in state.items())
    assert unread_weights(trainer.model.model) is not None
    trainer.train()
