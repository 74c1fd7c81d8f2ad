"""Saving reads a run and changes nothing of it, whatever its optimizer has: a run that saves learns the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.checkpoint.tensors import tensors_of
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.optimizers import Muon
from torch.distributed.fsdp import fully_shard

from ..conftest import write_tokens
from ..rounds import rounds
from .runs import trainer_of, write_small_run

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=0.0),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "muon": lambda parameters: Muon([{"params": [*parameters], "is_muon": False}], lr=1e-2),
}
STATES = {"empty": 0, "partial": 1, "full": 2}  # how many of the two layers have had a gradient


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    init_distributed(60)
    yield
    dist.destroy_process_group()


class Parts:
    """Two layers, of which the first ones had gradients, and the optimizer of both."""

    def __init__(self, make: Make, num_updated: int, *, seed: int = 0):
        torch.manual_seed(seed)
        self.layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
        self.model = torch.nn.Sequential(*self.layers)
        with torch.no_grad():
            self.layers[1].weight[0, 0] = -0.0
        fully_shard(self.model)
        self.optimizer = make(self.model.parameters())
        for step in range(3 if num_updated else 0):
            self.update(num_updated, seed=step)

    def update(self, num_updated: int, *, seed: int) -> None:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        self.model.zero_grad(set_to_none=True)
        self.model(inputs).square().sum().backward()
        for layer in self.layers[num_updated:]:
            layer.weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def bits(self) -> list[Any]:
        """Bits of all weights, the state of the optimizer, and its settings."""
        weights = [whole(each).view(torch.int32).tolist() for each in self.model.parameters()]
        states = [
            {name: whole(value).tolist() for name, value in self.optimizer.state.get(each, {}).items()}
            for each in self.model.parameters()
        ]
        groups = [
            {name: str(value) for name, value in each.items() if name != "params"}
            for each in self.optimizer.param_groups
        ]
        return [weights, states, groups, len(self.optimizer.state), [each.grad for each in self.model.parameters()]]


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else torch.as_tensor(tensor)
    return found.detach().clone()


@pytest.mark.parametrize("num_updated", STATES.values(), ids=STATES)
@pytest.mark.parametrize("name", MAKERS)
def test_saving_changes_no_bit_and_what_is_resumed_is_what_was_saved(
    group: None, tmp_path: Path, name: str, num_updated: int
) -> None:
    parts = Parts(MAKERS[name], num_updated)
    before = parts.bits
    tensors_of(parts.model, parts.optimizer)
    assert parts.bits == before
    with Checkpointer(str(tmp_path / "saved"), staging=tmp_path / "staging", timeout_s=60) as saver:
        saver.save(parts.model, parts.optimizer, step=3, state={"cursor": 3}, documents={})
        saver.wait()
        assert parts.bits == before
        other = Parts(MAKERS[name], 0, seed=1)
        found = saver.find("auto")
        assert found is not None
        saver.resume(other.model, other.optimizer, found)
    assert other.bits[:2] == before[:2]
    for each in (parts, other):
        each.update(2, seed=7)
    assert other.bits[:2] == parts.bits[:2]


@pytest.mark.parametrize("optim", rounds(["adamw"], ["adamw", "muon", "sgd"]))
def test_a_run_that_saves_before_its_first_update_learns_as_one_that_does_not(tmp_path: Path, optim: str) -> None:
    write_tokens(tmp_path / "data", num_samples=60)
    config = write_small_run(
        tmp_path / "run.yaml", tmp_path / "data", eval_dataset={"shuffle": False}, max_steps=3, optim=optim
    )
    best = ("train.eval_on_start=true", "train.save_steps=best", "train.best.metric=loss",
            "train.eval_steps=3")  # fmt: skip
    weights = {}
    for name, overrides in (("plain", ()), ("saved at 0", best), ("resumed from 0", ())):
        output = tmp_path / name
        extra = [f"train.resume={tmp_path}/saved at 0/checkpoints/step-00000000"] if name.startswith("resumed") else []
        trainer = trainer_of(config, f"train.output_dir={output}", *overrides, *extra)
        trainer.train()
        weights[name] = [whole(each) for each in trainer.model.parameters()]
        steps = {float(state["step"]) for state in trainer.optimizer.state.values() if "step" in state}
        assert steps <= {3.0}
    assert (tmp_path / "saved at 0" / "checkpoints" / "step-00000000").is_dir()
    for name in ("saved at 0", "resumed from 0"):
        assert all(map(torch.equal, weights[name], weights["plain"])), name
