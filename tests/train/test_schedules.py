from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.run.optimizers import parameter_groups
from lmms_stream.train.run.schedules import Schedule
from lmms_stream.train.run.settings import TrainConfig


def config(**changes: Any) -> TrainConfig:
    settings = {"output_dir": "out", "global_batch": 8, "max_steps": 100}
    return TrainConfig(**{**settings, **changes})


def optimizer_of_two_groups() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.5)]
    return torch.optim.SGD(groups, lr=1.0)


def rates(schedule: Schedule, optimizer: torch.optim.Optimizer, position: int) -> float:
    """The learning rate at a position, of the first group; the second has half of it."""
    schedule.move(position)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert schedule.learning_rate == first == 2 * second
    return schedule.learning_rate


def factors(**changes: Any) -> list[float]:
    """The learning rate at each step, of a base of 1."""
    optimizer = optimizer_of_two_groups()
    schedule = Schedule(config(**changes), optimizer, max_steps=100)
    return [rates(schedule, optimizer, step) for step in range(101)]


def test_each_schedule_warms_up_and_goes_its_way() -> None:
    cosine = factors(warmup=10)
    assert cosine[0] == 0
    assert cosine[5] == 0.5
    assert cosine[10] == 1
    assert cosine[55] == pytest.approx(0.5)
    assert cosine[100] == pytest.approx(0)
    linear = factors(lr_scheduler_type="linear", warmup=0.1)
    assert linear[5] == 0.5
    assert linear[55] == pytest.approx(0.5)
    assert linear[100] == 0
    constant = factors(lr_scheduler_type="constant", warmup=4)
    assert constant[2] == 0.5
    assert set(constant[4:]) == {1.0}
    stable = factors(lr_scheduler_type="wsd", warmup=10, lr_scheduler_kwargs={"decay_ratio": 0.2})
    assert stable[5] == 0.5
    assert set(stable[10:80]) == {1.0}
    assert stable[90] == pytest.approx(0.5)
    assert stable[100] == pytest.approx(0)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_a_schedule_ends_at_the_minimum(kind: str) -> None:
    rates = factors(learning_rate=1.0, lr_scheduler_type=kind, lr_scheduler_kwargs={"min_lr": 0.1}, warmup=10)
    assert rates[10] == 1
    assert rates[95] > 0.1
    assert rates[100] == pytest.approx(0.1)
    assert min(rates[10:]) == pytest.approx(0.1)
    halfway = {"cosine": 0.55, "linear": 0.55, "wsd": 1.0}[kind]
    assert rates[55] == pytest.approx(halfway)


@pytest.mark.parametrize(
    ("kind", "arguments", "at_55"),
    [
        ("cosine_with_restarts", {"num_cycles": 2}, 1.0),
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, 0.25),
        ("cosine_with_min_lr", {"min_lr": 0.2}, 0.6),
        ("inverse_sqrt", {}, 1 / 55**0.5 * 10**0.5),
        ("constant_with_warmup", {}, 1.0),
        ("warmup_stable_decay", {"decay_type": "linear", "num_decay_steps": 90}, 0.5),
    ],
)
def test_schedules_of_transformers_are_taken_by_their_names(kind: str, arguments: dict[str, Any], at_55: float) -> None:
    found = factors(learning_rate=1.0, lr_scheduler_type=kind, lr_scheduler_kwargs=arguments, warmup=10)
    assert found[5] == 0.5
    assert found[55] == pytest.approx(at_55)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type 'cosin' is none of wsd, constant, linear, cosine,"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows evaluations, not the position of a run: choose cosin"),
        ({"lr_scheduler_type": "greedy"}, "greedy follows evaluations, not the position of a run: choose cosine"),
        ({"lr_scheduler_kwargs": {"num_cycles": math.nan}}, "lr_scheduler_kwargs.num_cycles must be a number, got nan"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "x"}},
            "lr_scheduler_kwargs.power must be a number, got 'x'",
        ),
        (
            {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 0}},
            r"inverse_sqrt with lr_scheduler_kwargs \{'timescale': 0\}: division by zero",
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": -1}},
            "rates would leave the range from 0 to learning_rate: correct the arguments",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 0.5, "num_decay_steps": 1}},
            "lr_scheduler_kwargs sets num_decay_steps twice, by its name and by min_lr or decay_ratio: leave one out",
        ),
        (
            {"lr_scheduler_kwargs": {"min_lr": 1e-6, "min_lr_rate": 0.5}},
            "lr_scheduler_kwargs sets min_lr_rate twice, by its name and by min_lr or decay_ratio: leave one out",
        ),
        ({"lr_scheduler_kwargs": {"cycles": 2}}, r"cosine with lr_scheduler_kwargs \{'cycles': 2\}: .*'cycles'"),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            "min_lr needs cosine, linear, wsd, and lr_scheduler_type is constant: leave it out",
        ),
        (
            {"lr_scheduler_type": "wsd", "warmup": 50, "lr_scheduler_kwargs": {"decay_ratio": 0.8}},
            "warms up for 50 steps and goes down over the last 80, and the run has 100: the learning rate would fall",
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        factors(**changes)


@pytest.mark.parametrize("length", [15, 25, 99, 100])
def test_a_warm_up_and_a_decay_that_fill_the_run_meet_at_the_top(length: int) -> None:
    """Of 15 steps both shares are rounded up, to 16 steps."""
    optimizer = optimizer_of_two_groups()
    shares = config(lr_scheduler_type="wsd", warmup=0.9, max_steps=length)
    schedule = Schedule(shares, optimizer, max_steps=length)
    found = [rates(schedule, optimizer, step) for step in range(length + 1)]
    assert found[round(0.9 * length)] == 1
    assert found[-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "linear", "polynomial"])
def test_a_run_that_ends_with_its_warm_up_has_a_rate_at_its_end(kind: str) -> None:
    """transformers' polynomial divides by the steps after the warm-up."""
    assert factors(lr_scheduler_type=kind, warmup=100)[-1] == pytest.approx(1, abs=0.02)


def test_a_warm_up_that_the_run_does_not_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert max(factors(warmup=200)) < 0.51
    assert "never reaches 2e-05: the run has 100 steps, and warms up for 200: lower warmup" in caplog.text


def test_a_run_that_ends_by_tokens_has_its_schedule_by_tokens() -> None:
    optimizer = optimizer_of_two_groups()
    by_tokens = config(max_steps=None, max_tokens=1_000_000, warmup=100_000)
    schedule = Schedule(by_tokens, optimizer, max_steps=None)
    assert schedule.counts_tokens
    assert schedule.length == 1_000_000
    assert schedule.position(step=3, tokens_seen=50_000) == 50_000
    assert schedule.learning_rate == 0
    assert rates(schedule, optimizer, 50_000) == 0.5
    assert rates(schedule, optimizer, 550_000) == pytest.approx(0.5)
    optimizer = optimizer_of_two_groups()
    by_steps = Schedule(config(), optimizer, max_steps=100)
    assert by_steps.position(step=3, tokens_seen=50_000) == 3
    assert math.isclose(rates(by_steps, optimizer, 50), 0.5)
    assert rates(by_steps, optimizer, 0) == 1  # of any position, whatever was asked before


def test_matrices_decay_and_vectors_do_not_unless_all_do() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    model[2].weight.requires_grad = False
    matrices, vectors = parameter_groups(model, weight_decay=0.1)
    assert [each.shape for each in matrices["params"]] == [(4, 4)]
    assert matrices["weight_decay"] == 0.1
    assert sum(each.numel() for each in vectors["params"]) == 4 + 4 + 4 + 2
    assert vectors["weight_decay"] == 0
    (everything,) = parameter_groups(model, weight_decay=0.1, groups={"*": {"weight_decay": 0.1}})
    assert len(everything["params"]) == 5
    assert everything["weight_decay"] == 0.1


def test_the_pattern_of_all_is_of_parameters_that_no_other_pattern_matches() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    groups = parameter_groups(model, weight_decay=0.1, groups={"0.*": {"lr": 0.5}, "*": {"weight_decay": 0.2}})
    found = [([*map(len, group["params"])], group["weight_decay"], group.get("lr")) for group in groups]
    assert found == [([2, 2], 0.2, None), ([4], 0.1, 0.5), ([4], 0.0, 0.5)]


def test_parameters_that_match_a_pattern_have_a_rate_of_their_own_on_the_same_schedule() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    groups = parameter_groups(model, weight_decay=0.1, groups={"0.*": {"lr": 0.5}, "2.bias": {"lr": 0.0}})
    found = [
        ([tuple(each.shape) for each in group["params"]], group["weight_decay"], group.get("lr")) for group in groups
    ]
    assert found == [
        ([(2, 4)], 0.1, None), ([(4,), (4,)], 0.0, None), ([(4, 4)], 0.1, 0.5), ([(4,)], 0.0, 0.5), ([(2,)], 0.0, 0.0),
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=2.0)
    schedule = Schedule(config(learning_rate=2.0, warmup=10), optimizer, max_steps=100)
    schedule.move(5)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0, 0.25, 0.25, 0.0]
    assert schedule.learning_rate == 1.0


def test_a_rate_is_of_parameters_that_there_are_and_of_each_but_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].requires_grad_(False)
    for pattern in ("visual.*", "1.*"):  # the second has no parameter that is trained
        with pytest.raises(
            ConfigError, match=f"{pattern!r} matches no parameter that is trained: the nearest name is '"
        ):
            parameter_groups(model, weight_decay=0, groups={pattern: {"lr": 1.0}})
    with pytest.raises(ConfigError, match=r"'0.\*' and '\*.bias' both match 0.bias: a parameter has one rate"):
        parameter_groups(model, weight_decay=0, groups={"0.*": {}, "*.bias": {}})
    model[1] = model[0]  # tied: both names are of one parameter
    with pytest.raises(ConfigError, match=r"'0.\*' and '1.\*' both match 1.weight: a parameter has one rate"):
        parameter_groups(model, weight_decay=0, groups={"0.*": {}, "1.*": {}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": None}, "exactly one of max_steps, num_train_epochs and max_tokens$"),
        (
            {"max_steps": None, "max_tokens": 10**7, "warmup": 500},
            "counts tokens .*, and 500 of 10,000,000 ",
        ),
        ({"num_train_epochs": 1}, "exactly one of .*, got max_steps and num_train_epochs"),
        ({"max_tokens": 5}, "exactly one of .*, got max_steps and max_tokens"),
        ({"warmup": 1.5}, "warmup must be a whole number, or a share below 1, got 1.5"),
        ({"lr_scheduler_kwargs": {"decay_ratio": -1}}, "decay_ratio must be a share of the run, 0 to 1, got -1"),
        ({"lr_scheduler_kwargs": {"decay_ratio": True}}, "decay_ratio must be a share of the run, 0 to 1, got True"),
        (
            {"lr_scheduler_kwargs": {"decay_ratio": 0.3}},
            "decay_ratio needs lr_scheduler_type wsd, got cosine: leave it out, or choose wsd",
        ),
        ({"per_device_batch": 0}, "per_device_batch must be at least 1, got 0"),
        ({"lr_scheduler_kwargs": {"min_lr": "1e-6"}}, "min_lr must be a number, 0 or more, got '1e-6'"),
        ({"lr_scheduler_kwargs": {"min_lr": 1.0}}, "min_lr 1 is above learning_rate 2e-05: lower it"),
        ({"z_loss": -0.1}, "z_loss must be 0 or more, got -0.1"),
        ({"learning_rate": math.nan}, "learning_rate must be a number, got nan"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number, got inf"),
        ({"warmup": math.inf}, "warmup must be a finite number, got inf"),
        ({"timeout_s": math.inf}, "timeout_s must be above 0, and at most 1,000,000,000 seconds, got inf"),
        ({"groups": {"*": {"betas": 1}}}, r"groups '\*' betas must be two numbers, such as \[0.9, 0.95\], got 1"),
        ({"groups": {"*": {"lr": math.inf}}}, r"groups '\*' lr must be a number, 0 or more, got inf"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more, got -0.1"),
        ({"optim_args": {"eps": -1e-8}}, "optim_args.eps must be a number, 0 or more, got -1e-08"),
        ({"optim_args": {"betas": [1.0, 0.9]}}, "optim_args.betas must be at least 0 and below 1, got 1.0"),
        ({"optim_args": {"betas": [0.9, -0.1]}}, "optim_args.betas must be at least 0 and below 1, got -0.1"),
        ({"optim_args": {"betas": 0.9}}, r"optim_args.betas must be two numbers, such as \[0.9, 0.95\], got 0.9"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be 0 or more, got -1.0"),
        ({"timeout_s": -1.0}, "timeout_s must be above 0, and at most 1,000,000,000 seconds, got -1.0"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"profile_steps": (3, 3)}, r"train.profile_steps must be a range \[first, stop\), got \[3, 3\]"),
        ({"pad_to": 0}, "pad_to must be at least 1, got 0"),
        ({"save_steps": "always"}, "save_steps must be a number of steps, no or epoch or best, got 'always'"),
        ({"eval_steps": "best"}, "eval_steps must be a number of steps, no or epoch, got 'best'"),
        ({"eval_steps": -1}, "eval_steps must be at least 0, got -1"),
        ({"save_steps": True}, "save_steps must be a whole number, got True"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)
