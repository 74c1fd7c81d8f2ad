"""Dynamic fine-tuning weighs each token by its probability, whatever packs lie beside it, and takes TRL's gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from lmms_stream.config import load_config
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.plugins.tasks.dft import DynamicFineTuning
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run_config import RunConfig
from lmms_stream.train.tasks.registry import build_task
from lmms_stream.train.tasks.task import Objective
from torch.nn.functional import cross_entropy

from ...conftest import write_tokens
from ..runs import MODEL, trainer_of, write_run
from ..test_model import samples


def test_packs_give_the_loss_and_gradients_of_trls_formula_one_by_one() -> None:
    model = ModelConfig(config=MODEL).build()
    made = samples()
    expected = torch.zeros(())
    for sample in made:
        ids, labels = (torch.as_tensor(sample[name])[None].long() for name in ("input_ids", "labels"))
        losses = cross_entropy(model(input_ids=ids).logits[0, :-1], labels[0, 1:], reduction="none", ignore_index=-100)
        expected = expected + (losses * (-losses).exp().detach()).sum()
    expected.backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    packs = [collate(made[:3], range(3), pad_to=70), collate(made[3:], [3], pad_to=70)]
    found = DynamicFineTuning().losses(PackedModel(model), join(packs), packs)["tokens"]
    found.total.backward()
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=0)
    assert float(found.of_packs.sum()) == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


def test_a_run_names_it_and_its_other_losses_stay() -> None:
    task = build_task("dft", {"z_loss": 0.1})
    assert isinstance(task, DynamicFineTuning)
    model = PackedModel(ModelConfig(config=MODEL).build())
    assert task.objectives(model) == [Objective(name="tokens"), Objective(name="z", is_logged=False)]
    pack = collate(samples(), range(4))
    plain = build_task("causal", {"z_loss": 0.1})
    ours, theirs = (each.losses(model, pack, [pack]) for each in (task, plain))
    assert ours["z"].total.item() == theirs["z"].total.item()
    assert 0 < ours["tokens"].total.item() < 0.1 * theirs["tokens"].total.item()
    with pytest.raises(ConfigError, match="task dft has no option 'beta'"):
        build_task("dft", {"beta": 1})


def test_a_small_run_learns(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=20, learning_rate=1e-2, global_batch=4)
    run.write_text(yaml.safe_dump(yaml.safe_load(run.read_text()) | {"task": {"type": "dft"}}))
    task = load_config(RunConfig, run).build_task()
    assert isinstance(task, DynamicFineTuning)
    trainer = trainer_of(run, task=task)
    trainer.train()
    first, *_, last = [record["loss"] for record in read_log(tmp_path / "default") if "loss" in record]
    assert first == pytest.approx(6.24 / 512, rel=0.3)  # each of 512 tokens is equally likely
    assert last > 3 * first  # what is likely counts more: before it falls the loss rises, as x exp(-x) does
