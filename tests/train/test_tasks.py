"""A task says what is learnt: the loss of a step is the sum over its objectives of weight * sum / units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.report.metrics import objective_losses
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.tasks.causal import CausalLanguageModelling
from lmms_stream.train.tasks.task import LossSum, Objective
from lmms_stream.types import Batch

from ..conftest import write_tokens
from .runs import trainer_of, write_run


class WithSize(CausalLanguageModelling):
    """Tokens, with a third of the weight, and the size of the logits of every fifth one that is learnt."""

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        return [Objective(name="tokens", weight=1 / 3), Objective(name="size", weight=2.0)]

    def units(self, pack: Batch) -> Mapping[str, int]:
        return {"tokens": pack.num_loss_tokens, "size": -(-pack.num_loss_tokens // 5)}

    def losses(self, model: PackedModel, batch: Batch, packs: Sequence[Batch]) -> Mapping[str, LossSum]:
        made = model(batch, packs)
        counts = [pack.num_loss_tokens for pack in packs]
        sizes = [each[::5].sum() for each in made.logs.split(counts)]
        tokens = [each.sum() for each in made.tokens.split(counts)]
        return {name: LossSum(torch.stack(of_packs).sum(), torch.stack(of_packs).detach().double())
                for name, of_packs in (("tokens", tokens), ("size", sizes))}  # fmt: skip


class Unlogged(CausalLanguageModelling):
    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        return [Objective(name="tokens", is_logged=False)]


class Returns(CausalLanguageModelling):
    """Returns something else for its losses: a function of what they are."""

    def __init__(self, changed: Callable[[LossSum], Any]) -> None:
        super().__init__()
        self.changed = changed

    def losses(self, model: PackedModel, batch: Batch, packs: Sequence[Batch]) -> Any:
        return self.changed(super().losses(model, batch, packs)["tokens"])


class OfTokens(CausalLanguageModelling):
    def __init__(self, changed: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.changed = changed

    def of_tokens(self, losses: torch.Tensor) -> Any:
        return self.changed(losses)


WRONG = [
    (Returns(lambda found: found.total), r"of Returns for 'tokens' are float32\[\]: return a mapping with 'tokens': "),
    (Returns(lambda found: {"loss": found}), r"of Returns for 'tokens' are a dict: return a mapping"),
    (Returns(lambda found: {"tokens": found._replace(of_packs=found.of_packs.repeat(3))}),
     r"are a LossSum of float32\[\] and float64\[3\]: .*float64\[1\], a number for each pack"),
    (Returns(lambda found: {"tokens": found._replace(total=found.total.detach())}), "have no gradient: return them"),
    (OfTokens(lambda losses: losses[1:]), r"losses of 1 packs are float32\[\d+\]: return one number for each of their"),
    (OfTokens(lambda losses: losses.mean()), r"losses of 1 packs are float32\[\]: return one number for each"),
    (OfTokens(lambda losses: losses[:, None] * losses), r"losses of 1 packs are float32\[\d+, \d+\]: return one"),
    (OfTokens(lambda losses: None), "losses of 1 packs are a NoneType: return one number for each"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "message"), WRONG)
def test_a_task_that_returns_something_else_is_an_error_that_says_what_to_return(
    task: CausalLanguageModelling, message: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", num_samples=20)
    with pytest.raises(ConfigError, match=message):
        trainer_of(write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1), task=task).train()


def mixed_run(tmp_path: Path, **train: Any) -> Path:
    """Of two sources, one step of which has a pack of each and more."""
    write_tokens(tmp_path / "data", num_samples=60)
    run = write_run(
        tmp_path / "run.yaml", tmp_path / "data", max_steps=1, max_grad_norm=1e9, eval_dataset={}, learning_rate=0.0,
        weights={"one": 1.0, "two": 1.0}, **train,
    )  # fmt: skip
    settings = yaml.safe_load(run.read_text())
    one = settings.pop("dataset")
    run.write_text(yaml.safe_dump(settings | {"datasets": {"one": one, "two": one | {"seed": 5}}}))
    return run


@pytest.mark.parametrize("per_device_batch", [1, 3])
def test_a_step_adds_up_the_objectives_of_a_task(tmp_path: Path, per_device_batch: int) -> None:
    run = mixed_run(tmp_path, per_device_batch=per_device_batch)
    trainer = trainer_of(run, task=WithSize())
    packs = next(trainer.data.steps_of(iter(trainer.loader)))
    trainer = trainer_of(run, task=WithSize())
    trainer.train()
    record, evaluation = read_log(tmp_path / "default")
    task, model = WithSize(), trainer.model.train()
    sums, units = {"tokens": 0.0, "size": 0.0}, {"tokens": 0, "size": 0}
    of_source = {(name, source): [0.0, 0] for name in sums for source in ("one", "two")}
    for pack in packs:
        for name, each in task.losses(model, pack, [pack]).items():
            sums[name] += float(each.total.detach())
            units[name] += task.units(pack)[name]
            of_source[name, pack.source][0] += float(each.total.detach())
            of_source[name, pack.source][1] += task.units(pack)[name]
    means = {name: sums[name] / units[name] for name in sums}
    expected = {"loss": means["tokens"] / 3 + 2 * means["size"]}
    expected |= {f"loss/{name}": mean for name, mean in means.items()}
    expected |= {f"loss/{name}/{source}": total / count for (name, source), (total, count) in of_source.items()}
    assert {key: value for key, value in record.items() if key.startswith("loss")} == pytest.approx(expected, rel=1e-5)
    assert {"eval_loss", "eval_loss/tokens", "eval_loss/size", "eval_num_loss_tokens"} < evaluation.keys()
    model.zero_grad()
    loss = sum(
        weight * sum(task.losses(model, pack, [pack])[name].total for pack in packs) / units[name]
        for name, weight in (("tokens", 1 / 3), ("size", 2.0))
    )
    loss.backward()  # type: ignore[union-attr]
    norms = [each.grad.full_tensor().norm() for each in model.parameters() if each.grad is not None]  # type: ignore[attr-defined]
    assert record["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)


def test_an_evaluation_of_a_mixture_of_experts_needs_no_loss_of_its_router(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=20)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1, eval_dataset={}, learning_rate=0.0)
    settings = yaml.safe_load(run.read_text())
    experts = {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.3, "num_key_value_heads": 2}
    settings["model"]["config"] |= experts
    run.write_text(yaml.safe_dump(settings))
    trainer = trainer_of(run)
    trainer.train()
    record, evaluation = read_log(tmp_path / "default")
    assert [each.name for each in trainer.steps.objectives] == ["tokens", "router"]
    assert evaluation["eval_loss"] == pytest.approx(record["loss"], rel=1e-6)


def test_a_task_without_an_objective_that_is_logged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task Unlogged has no objective for the log: set its objective"):
        trainer_of(mixed_run(tmp_path), task=Unlogged()).build()


def test_objectives_of_causal_models_are_logged_as_one_loss() -> None:
    task = CausalLanguageModelling(z_loss=0.1)
    pack = collate([{"input_ids": torch.arange(5).numpy(), "labels": torch.arange(5).numpy()}], [0], pad_to=9)
    assert dict(task.units(pack)) == {"tokens": 4, "z": 4, "router": 5}
    assert task.collate is collate
    tokens = Objective(name="tokens")
    assert objective_losses([tokens], ["data"], [[[6.0], [3.0]]], [3]) == {"loss": 2}
    assert objective_losses([tokens], ["a", "b"], [[[6.0, 0.0], [3.0, 0.0]]], [3]) == {"loss": 2, "loss/a": 2}
    other = Objective(name="flow", weight=0.5)
    summed = [[[6.0, 2.0], [3.0, 1.0]], [[0.0, 8.0], [0.0, 2.0]]]
    assert objective_losses([tokens, other], ["a", "b"], summed, [4, 2]) == {
        "loss": 2 + 2, "loss/tokens": 2, "loss/tokens/a": 2, "loss/tokens/b": 2, "loss/flow": 4, "loss/flow/b": 4,
    }  # fmt: skip
