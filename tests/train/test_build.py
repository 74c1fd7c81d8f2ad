"""Models that run code of their own, or kernels of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.checkpoint.export import export_checkpoint
from lmms_stream.train.model.build import ModelConfig
from transformers import AutoModelForCausalLM

from ..conftest import run_cli, write_tokens
from .runs import MODEL, trainer_of, write_run

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A model with Python files of its own."""
    folder = tmp_path / "own"
    ModelConfig(config=MODEL, seed=7).build().save_pretrained(folder)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    return folder


def test_a_models_own_code_is_run_only_when_asked_for(own_code: Path, tmp_path: Path, code_cache: Path) -> None:
    with pytest.raises(ConfigError, match="own has its own Python files, which can run any code"):
        ModelConfig(pretrained=str(own_code)).build()
    assert not code_cache.exists()

    write_tokens(tmp_path / "data", num_samples=100)
    run = write_run(
        tmp_path / "run.yaml", tmp_path / "data", max_steps=2, output_dir=str(tmp_path / "out"), export=True
    )
    trainer = trainer_of(run, f"model={{pretrained: {own_code}, trust_remote_code: true}}")
    trainer.train()
    assert type(trainer.model.model).__name__ == "OwnForCausalLM"
    export = tmp_path / "out" / "export"
    loaded: Any = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    trained = trainer.model.model.state_dict()
    assert all(torch.equal(value, trained[name].to_local()) for name, value in loaded.state_dict().items())

    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000002"
    with pytest.raises(ConfigError, match=r"with its own Python files, .* and export with --trust-remote-"):
        export_checkpoint(checkpoint, tmp_path / "again")
    done = run_cli("export", str(checkpoint), str(tmp_path / "again"), "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "modeling_own.py", "configuration_own.py", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (export / name).read_bytes()


def test_liger_kernel_is_named_with_the_command_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmms_stream.train.model.build.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="use_liger_kernel needs liger-kernel: pip install liger-kernel, or set"):
        ModelConfig(config=MODEL, use_liger_kernel=True).build()


def test_kernels_of_liger_leave_the_losses_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a package that notes what is asked of it: the real one needs CUDA."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package / "monkey_patch.py").write_text(
        "MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None}\n"
        "def _apply_liger_kernel_to_instance(model, **options):\n"
        "    model.asked = options\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="use_liger_kernel needs CUDA, and this machine has none"):
        ModelConfig(config=MODEL, use_liger_kernel=True).build()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    built: Any = ModelConfig(config=MODEL, use_liger_kernel=True).build()
    assert built.asked == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    with pytest.raises(ConfigError, match="liger-kernel has no kernels for model type 'gpt2': set model"):
        ModelConfig(config={"model_type": "gpt2", "vocab_size": 64}, use_liger_kernel=True).build()
