"""Jobs on the CPU: an adapter on two ranks that is killed and resumed, exported, merged, and loaded by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.checkpoint.export import export_checkpoint
from lmms_stream.train.model.build import ModelConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import write_tokens
from tests.rounds import in_long_rounds
from tests.train.runs import MODEL, VOCABULARY, write_run

from .runs import differences, last_step, train
from .test_resume import OTHER_WORLD, kill_while_saving

NUM_STEPS = 12
pytestmark = pytest.mark.timeout(600)  # for the jobs, of which each has a limit of its own


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(80).view(2, 40) % VOCABULARY
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits


def adapter_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@in_long_rounds
def test_an_adapter_that_was_killed_goes_on_is_merged_and_loaded_by_peft_and_transformers(tmp_path: Path) -> None:
    base, data, output = tmp_path / "base", tmp_path / "data", tmp_path / "killed"
    ModelConfig(config=MODEL, seed=7).build().save_pretrained(base)
    write_tokens(data, num_samples=480)
    settings: dict[str, Any] = {"learning_rate": 0.03, "lr_scheduler_type": "constant", "export": True}
    settings["ema_decay"] = 0.9
    config = write_run(tmp_path / "run.yaml", data, max_steps=NUM_STEPS, save_steps=1, **settings)
    model = {"pretrained": str(base), "adapter": {"r": 4, "target_modules": "all-linear"}}
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "model": model}))

    train(config, tmp_path / "whole", nproc=2)
    kill_while_saving(config, output, 4)
    assert 4 <= last_step(output) < NUM_STEPS
    train(config, output, nproc=2)
    assert differences(tmp_path / "whole", output) == []
    whole, killed = adapter_in(tmp_path / "whole" / "export"), adapter_in(output / "export")
    average, of_killed = adapter_in(tmp_path / "whole" / "export-ema"), adapter_in(output / "export-ema")
    assert whole.keys() == killed.keys() == average.keys() == of_killed.keys()
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
    assert all(torch.equal(tensor, of_killed[name]) for name, tensor in average.items())
    assert not any(torch.equal(tensor, average[name]) for name, tensor in whole.items())

    # On one rank with other sums of gradients; a step that changes nothing shows that all bits were loaded.
    saved = checkpoints(output / "checkpoints")[5]
    train(config, tmp_path / "one", f"train.resume={saved}", nproc=1)
    assert differences(tmp_path / "whole", tmp_path / "one", first_step=7, tolerance=OTHER_WORLD) == []
    still = ("train.learning_rate=0", f"train.max_steps={NUM_STEPS + 1}")
    train(config, output, *still, nproc=1)
    unchanged = adapter_in(output / "export")
    assert json.loads((output / "export" / "export.json").read_text())["step"] == NUM_STEPS + 1
    assert all(torch.equal(tensor, unchanged[name]) for name, tensor in whole.items())

    by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "whole" / "export")
    expected = logits_of(by_peft)
    assert float((expected - logits_of(AutoModelForCausalLM.from_pretrained(base))).abs().max()) > 0.01
    merged = export_checkpoint(checkpoints(tmp_path / "whole" / "checkpoints")[-1], tmp_path / "merged", merge=True)
    assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-5)
