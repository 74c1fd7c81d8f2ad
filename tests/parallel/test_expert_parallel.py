"""What experts on different ranks do not go with, in this process alone. Those that are: tests/jobs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.plugins.parallel.expert_parallel import split_experts
from lmms_stream.train.model.build import PlainModel
from lmms_stream.train.model.sharding import shard_model
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run.mesh import Meshes
from lmms_stream.train.run.settings import TrainConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.rounds import in_long_rounds
from tests.versions import IS_5

ONE_STEP: dict[str, Any] = {"output_dir": "out", "global_batch": 1, "max_steps": 1}


class Experts(torch.nn.Module):
    """Experts that are called with one more argument than transformers' own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(4, 2, 2))

    def forward(self, hidden_states: torch.Tensor, capacity: int) -> torch.Tensor:
        return hidden_states[:capacity]


class Planned(torch.nn.Module):
    """A model with a plan."""

    _ep_plan: ClassVar = {"experts.up": "grouped_gemm", "experts": "gather"}

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    init_distributed(60.0)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "ep"))
    end_distributed()


def test_experts_that_are_called_otherwise_are_refused(mesh: DeviceMesh) -> None:
    message = (
        "Experts takes hidden_states, capacity, but train.expert_parallel supports only experts that take "
        f"hidden_states, {'top_k_index, top_k_weights or hidden_states, ' if IS_5 else ''}router_indices, "
        "routing_weights or hidden_states: set it to 1"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        split_experts(Planned(), mesh["ep"])


def test_a_model_that_writes_no_text_has_no_experts_to_split(mesh: DeviceMesh) -> None:
    config, model = TrainConfig(**ONE_STEP), PlainModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    message = "train.expert_parallel 1 is for language models, and this is a Sequential: set it to 1"
    with pytest.raises(ConfigError, match=message):
        shard_model(model, Meshes(fsdp=mesh["shard"], ep=mesh["ep"]), config=config, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"tensor_parallel": 4},
            "train.expert_parallel 2 and tensor_parallel 4 cannot be combined: ranks of a tensor parallel group "
            "read the same packs, and ranks with different experts read different packs. Set one of them to 1",
        ),
        (
            {"torch_compile": True},
            "train.expert_parallel 2 and torch_compile cannot be combined yet: a graph cannot hold the choice of "
            "experts. Leave one out",
        ),
    ],
    ids=["tensor_parallel", "torch_compile"],
)
def test_settings_that_do_not_go_with_experts_on_different_ranks_are_refused(
    other: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainConfig(**ONE_STEP, expert_parallel=2, **other)


@in_long_rounds
def test_the_models_that_have_a_plan_are_those_that_the_refusal_names() -> None:
    plans = ("base_model_ep_plan", "base_model_tp_plan")
    found = set()
    for model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type]
        if any("grouped_gemm" in (getattr(config, plan, None) or {}).values() for plan in plans):
            found.add(model_type)
    assert found >= {"gpt_oss", "mixtral", "qwen3_moe"} if IS_5 else found == {"gpt_oss", "llama4_text"}
