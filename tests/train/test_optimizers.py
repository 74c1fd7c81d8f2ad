from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.run.optimizers import build_optimizer, step_if_finite
from lmms_stream.train.run.settings import TrainConfig

from tests.conftest import last_words
from tests.rounds import in_long_rounds

from ..jobs.launcher import run_job
from ..jobs.optimizers_job import StackedExperts

NUM_STEPS = 3
# Sizes that no number of ranks divides, tall and wide.
SHAPES = ((31, 47), (47, 20), (20, 9))
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_torch": {"optim": "adamw_torch", "weight_decay": 0.1},
    "muon": {"optim": "muon", "weight_decay": 0.1},
    "sgd": {"optim": "sgd", "optim_args": {"momentum": 0.9}},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop"},
    "groups": {"groups": {"*.weight": {"lr": 0.1, "betas": [0.5, 0.5]}, "0.bias": {"weight_decay": 0.2}}},
}


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"output_dir": "out", "global_batch": 1, "max_steps": 1, "learning_rate": 0.01, **settings})


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in SHAPES))


def some_gradients(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [[torch.randn(each.shape, generator=rng) for each in model.parameters()] for _ in range(NUM_STEPS)]


def stepped(model: torch.nn.Module, gradients: list[list[torch.Tensor]], **settings: Any) -> list[torch.Tensor]:
    """The parameters after steps with these gradients, by an optimizer of these settings."""
    model = copy.deepcopy(model)
    step_with(model, gradients, [build_optimizer(model, config(**settings))])
    return [parameter.detach() for parameter in model.parameters()]


def step_with(
    model: torch.nn.Module, gradients: list[list[torch.Tensor]], optimizers: list[torch.optim.Optimizer]
) -> None:
    for of_step in gradients:
        for parameter, gradient in zip(model.parameters(), of_step, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=in_long_rounds)])
def test_ranks_make_the_updates_of_one_for_the_same_gradients(num_ranks: int, tmp_path: Path) -> None:
    """To the last bit but one: what is computed for eight numbers at once and what is left over may round otherwise."""
    model = torch.nn.Sequential(*small_model(), torch.nn.Linear(*SHAPES[0]), StackedExperts(5))
    gradients = some_gradients(model)
    settings = {name: {"learning_rate": 0.01, **each} for name, each in SETTINGS.items()}
    torch.save({"model": model, "gradients": gradients, "settings": settings}, tmp_path / "job.pt")
    done = run_job(num_ranks, "tests.jobs.optimizers_job", str(tmp_path), timeout_s=120)
    assert done.returncode == 0, last_words(done.stderr)
    found = torch.load(tmp_path / "found.pt")
    for name, of_name in SETTINGS.items():
        expected = stepped(model, gradients, **of_name)
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7, msg=name)
        assert not torch.equal(expected[0], next(model.parameters()))
    of_ranks, counts = torch.load(tmp_path / "orthogonal.pt")
    first, second, third = ((1, columns, rows) for rows, columns in SHAPES)  # as a Linear has them
    owned = [[first, second], [first, third]] if num_ranks == 2 else [[first], [first], [second], [third]]
    experts = [3, 2] if num_ranks == 2 else [2, 2, 1, 0]  # each rank's own
    for rank, shapes in enumerate(of_ranks):
        own = [(experts[rank], 6, 10)] if experts[rank] else []
        assert shapes == [*owned[rank], *own] * NUM_STEPS, "owners"
    assert counts["muon"] == {"all_to_all": 2 * 3}, "there and back, by shape; experts send nothing"


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_torchs_own_for_matrices_inside_the_model_and_adamw_for_all_else(scale: str) -> None:
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(9, 31), *small_model(), torch.nn.Linear(*SHAPES[0]), StackedExperts(3)
    )
    gradients = some_gradients(model)
    ours = stepped(model, gradients, optim="muon", weight_decay=0.1, optim_args={"adjust_lr_fn": scale})
    *inner, experts = model[1:]
    matrices, vectors = [each.weight for each in inner], [each.bias for each in inner]
    single = [torch.nn.Parameter(each) for each in experts.of_experts.detach()]  # with the storage of all of them
    with_torch = [
        torch.optim.Muon([*matrices, *single], lr=0.01, weight_decay=0.1, adjust_lr_fn=scale),
        torch.optim.AdamW([model[0].weight, experts.of_experts_bias], lr=0.01, weight_decay=0.1, fused=True),
        torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0, fused=True),
    ]
    for of_step in gradients:
        for parameter, gradient in zip(single, of_step[-2], strict=True):
            parameter.grad = gradient.clone()
        step_with(model, [of_step], with_torch)
    torch.testing.assert_close(ours, [each.detach() for each in model.parameters()], rtol=0, atol=0)


def test_muon_goes_on_from_what_it_saved() -> None:
    model = small_model()
    gradients = some_gradients(model)
    whole = stepped(model, gradients, optim="muon")
    optimizer = build_optimizer(model, config(optim="muon"))
    step_with(model, gradients[:1], [optimizer])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = build_optimizer(model, config(optim="muon"))
    resumed.load_state_dict(saved)
    step_with(model, gradients[1:], [resumed])
    torch.testing.assert_close([each.detach() for each in model.parameters()], whole, rtol=0, atol=0)


def test_the_optimizer_of_no_name_is_adamw_fused() -> None:
    optimizer = build_optimizer(small_model(), config(weight_decay=0.1, optim_args={"betas": [0.9, 0.95]}))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]
    assert [(group["weight_decay"], group["betas"], group["lr"]) for group in optimizer.param_groups] == [
        (0.1, (0.9, 0.95), 0.01),
        (0.0, (0.9, 0.95), 0.01),
    ]


def test_groups_by_pattern_have_values_of_their_own_and_the_others_the_optimizers() -> None:
    optimizer = build_optimizer(
        small_model(),
        config(
            weight_decay=0.1,
            groups={"1.bias": {"lr": 0.0}, "0.*": {"lr": 0.5, "weight_decay": 0.2}, "2.weight": {"eps": 1e-4}},
        ),
    )
    described = [
        (len(group["params"]), group["lr"], group["weight_decay"], group["eps"]) for group in optimizer.param_groups
    ]
    assert described == [
        (1, 0.01, 0.1, 1e-8),  # 1.weight
        (1, 0.01, 0.0, 1e-8),  # 2.bias
        (1, 0.0, 0.0, 1e-8),  # 1.bias
        (1, 0.5, 0.2, 1e-8),
        (1, 0.5, 0.2, 1e-8),  # its vector decays too, as its group says
        (1, 0.01, 0.1, 1e-4),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "lion"}, "train.optim 'lion' is none of adamw, adamw_torch_fused, .*, muon, sgd,"),
        ({"optim": "adafactor"}, "adafactor: torch's does not run on sharded matrices; for less memory take"),
        ({"optim_args": {"lr": 1.0}}, "train.optim_args has lr: set train.learning_rate$"),
        ({"optim": "sgd", "optim_args": {"betas": [0.5, 0.9]}}, "train.optim sgd with optim_args .*argument 'betas'"),
        ({"optim": "rmsprop", "optim_args": {"betas": [0.5, 0.9]}}, "train.optim rmsprop with .*argument 'betas'"),
        ({"optim": "rmsprop", "optim_args": {"lr": 1.0}}, "train.optim_args has lr: set train.learning_rate$"),
        ({"optim": "sgd", "optim_args": {"moment": 1}}, r"train.optim sgd with optim_args \{'moment': 1\}: .*'moment'"),
        ({"optim": "muon", "optim_args": {"adjust_lr_fn": "x"}}, "adjust_lr_fn of muon is original, .*, got 'x'"),
        ({"groups": {"*": {"learning_rate": 1}}}, r"groups '\*' has learning_rate, which is not an option of .* lr,"),
        ({"groups": {"*": {"lr": -1}}}, r"groups '\*' lr must be a number, 0 or more, got -1"),
        ({"groups": {"x.*": {"lr": 1}}}, r"groups 'x.\*' matches .* the nearest name is 'weight'"),
        ({"groups": {"0.*": {}, "*.bias": {}}}, r"train.groups '0.\*' and '\*.bias' both match 0.bias: a parameter"),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(small_model(), config(**settings))


@pytest.mark.parametrize("optim", ["adamw", "muon", "rmsprop"])
def test_an_optimizer_has_the_eps_of_optim_args(optim: str) -> None:
    assert build_optimizer(small_model(), config(optim=optim, optim_args={"eps": 1e-3})).defaults["eps"] == 1e-3


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"])
def test_an_optimizer_that_is_not_installed_is_named_with_the_command(name: str) -> None:
    with pytest.raises(ConfigError, match=f"train.optim {name} needs torchao: pip install torchao, or set it to adamw"):
        build_optimizer(small_model(), config(optim=name))


@pytest.mark.parametrize("settings", [{}, {"optim": "adamw_torch"}, {"optim": "sgd"}, {"optim": "muon"}], ids=str)
@pytest.mark.parametrize("norm", [1.0, float("inf"), float("nan")])
def test_an_update_is_left_out_on_the_device_by_optimizers_that_can(settings: dict[str, Any], norm: float) -> None:
    """Parameters and moments keep their bits; an optimizer that cannot does nothing, and says so."""
    model = small_model()
    gradients = some_gradients(model)
    optimizer = build_optimizer(model, config(**settings))
    step_with(model, gradients[:1], [optimizer])
    before = copy.deepcopy([*model.state_dict().values()]), copy.deepcopy(optimizer.state_dict()["state"])
    for parameter, gradient in zip(model.parameters(), gradients[1], strict=True):
        parameter.grad = gradient.clone()
    assert step_if_finite(optimizer, torch.tensor(norm)) is (settings == {})
    after = [*model.state_dict().values()], optimizer.state_dict()["state"]
    is_same = all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))
    assert is_same == (settings != {} or norm != 1.0)
    for number, state in before[1].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, after[1][number][name]) == is_same
