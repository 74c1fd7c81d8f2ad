"""Every field of transformers' and TRL's arguments has its row, and its row is true."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.doors.huggingface import fields, table
from lmms_stream.doors.huggingface.arguments import train_config
from lmms_stream.errors import ConfigError
from lmms_stream.train.run.settings import BestConfig, TrainConfig
from lmms_stream.types import World
from transformers import TrainingArguments
from trl import DPOConfig, KTOConfig, SFTConfig

from tests.versions import IS_5

from .rows import config

FIELDS = {field.name for field in dataclasses.fields(SFTConfig)}
NEW_IN_5 = {
    "activation_checkpointing", "activation_checkpointing_kwargs", "train_sampling_strategy", "dataloader_in_order",
    "dataloader_multiprocessing_context", "ddp_static_graph", "enable_jit_checkpoint", "trackio_bucket_id",
    "trackio_static_space_id", "use_cache",
}  # fmt: skip
ALL_ROWS = (*fields.ROWS, *fields.SFT_ROWS)
ROWS = [row for row in ALL_ROWS if row.name in FIELDS]
REFUSED = [row for row in ROWS if row.fate == "refused"]
MOOT = [row for row in ROWS if row.fate == "moot"]
OTHER: dict[str, Any] = {  # values other than the default, where it does not say of what type they are
    "fsdp": ["full_shard", "offload"],
    "fsdp_config": {"activation_checkpointing": True},
    "accelerator_config": {"dispatch_batches": True},
    "ddp_backend": "mpi",
    "label_names": ["start_positions"],
    "loss_type": "dft",
    "pad_to_multiple_of": 8,
}

# field: (its value, the fields of TrainConfig that it becomes); the rest of the settings are those of `config`
BECOMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "output_dir": ("elsewhere", {"output_dir": "elsewhere"}),
    "eval_strategy": ("epoch", {"eval_steps": "epoch"}),
    "per_device_train_batch_size": (3, {"per_device_batch": 3, "global_batch": 12}),
    "gradient_accumulation_steps": (5, {"global_batch": 8 * 5 * 4}),
    "eval_delay": (7, {"eval_delay": 7}),
    "learning_rate": (0.5, {"learning_rate": 0.5}),
    "weight_decay": (0.5, {"weight_decay": 0.5}),
    "adam_beta1": (0.5, {"optim_args": {"betas": [0.5, 0.999]}}),
    "adam_beta2": (0.5, {"optim_args": {"betas": [0.9, 0.5]}}),
    "adam_epsilon": (0.5, {"optim_args": {"eps": 0.5}}),
    "max_grad_norm": (0.0, {"max_grad_norm": 0.0}),
    "num_train_epochs": (2.5, {"num_train_epochs": None, "max_steps": 25}),
    "max_steps": (9, {"num_train_epochs": None, "max_steps": 9}),
    "lr_scheduler_type": ("constant_with_warmup", {"lr_scheduler_type": "constant"}),
    "lr_scheduler_kwargs": ({"num_cycles": 2}, {"lr_scheduler_kwargs": {"num_cycles": 2}}),
    "warmup_ratio": (0.25, {"warmup": 0.25}),
    "warmup_steps": (5, {"warmup": 5}),
    "logging_strategy": ("epoch", {"logging_steps": "epoch"}),
    "logging_first_step": (True, {"logging_first_step": True}),
    "logging_steps": (0.1, {"logging_steps": 3}),
    "save_strategy": ("no", {"save_steps": "no"}),
    "save_steps": (0.5, {"save_steps": 15}),
    "save_total_limit": (2, {"save_total_limit": 2}),
    "seed": (5, {"seed": 5}),
    "bf16": (True, {"bf16": True}),
    "eval_steps": (4, {"eval_steps": "no"}),  # eval_strategy no; see test_resolve
    "dataloader_num_workers": (2, {"num_workers": 2}),
    "metric_for_best_model": ("loss", {"best": BestConfig(metric="loss", mode="min")}),
    "greater_is_better": (True, {"best": BestConfig(mode="max")}),
    "optim": ("sgd", {"optim": "sgd"}),
    "optim_args": ("momentum=0.5", {"optim_args": {"momentum": 0.5}}),
    "report_to": (["tensorboard", "mlflow"], {"report_to": ["tensorboard"]}),
    "gradient_checkpointing": (True, {"gradient_checkpointing": True}),
    "activation_checkpointing": (True, {"gradient_checkpointing": True}),
    "ddp_timeout": (50, {"timeout_s": 50.0}),
    "torch_compile": (True, {"torch_compile": True}),
    "eval_on_start": (True, {"eval_on_start": True}),
}
# What becomes of these is in other tests: of data and models in test_resolve, of the loop in test_script, use_cpu in
# test_fields.
ELSEWHERE = {
    "load_best_model_at_end", "data_seed", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
    "full_determinism", "use_liger_kernel", "train_sampling_strategy",
    "hub_model_id", "hub_token", "hub_private_repo", "hub_revision",  # of push_to_hub: in tests/trl/test_members
    "use_cpu", *(row.name for row in fields.SFT_ROWS),
    # read by transformers itself, when the arguments are made, or by scripts: in test_fields
    "tf32", "log_level", "log_level_replica", "resume_from_checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("kind", [TrainingArguments, SFTConfig, DPOConfig, KTOConfig])
def test_every_field_has_one_row(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    assert [name for name in names if table.row_of(name, kind) is None] == []


def test_every_row_is_of_a_field() -> None:
    names = [row.name for row in ALL_ROWS]
    assert len(names) == len(set(names))
    of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
    if IS_5:
        assert of_transformers <= {row.name for row in fields.ROWS}
        assert of_transformers >= NEW_IN_5
    else:
        assert {row.name for row in fields.ROWS} == of_transformers | NEW_IN_5
    assert {row.name for row in fields.SFT_ROWS} == FIELDS - of_transformers
    added = {field.name for kind in (DPOConfig, KTOConfig) for field in dataclasses.fields(kind)}
    assert {row.name for row in fields.PREFERENCE_ROWS} == added - {row.name for row in fields.ROWS}


def test_arguments_that_are_no_sftconfig_have_its_defaults(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert {name: getattr(made, name) for name in fields.SFT_DEFAULTS} == dict(fields.SFT_DEFAULTS)
    for kind in (DPOConfig, KTOConfig):
        compared = kind(str(tmp_path), use_cpu=True, bf16=False)
        known = {name: value for name, value in fields.PREFERENCE_DEFAULTS.items() if hasattr(compared, name)}
        assert {name: getattr(compared, name) for name in known} == known
        assert len(known) >= 4


def test_the_table_in_docs_is_that_of_the_code() -> None:
    page = Path(__file__).parents[3] / "docs" / "arguments.md"
    assert page.read_text() == table.markdown(), "python -m lmms_stream.doors.huggingface.table > docs/arguments.md"


@pytest.mark.parametrize("kind", [TrainingArguments, SFTConfig, DPOConfig, KTOConfig])
def test_defaults_are_neither_refused_nor_warned_of(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table.check(kind(str(tmp_path), use_cpu=True))
    assert caplog.records == []


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_a_refused_field_is_refused_by_name_where_it_is_set(row: Any, tmp_path: Path) -> None:
    assert ": " in row.text, "the reason and the remedy"
    args = config(tmp_path)
    setattr(args, row.name, other_value(args, row.name))
    with pytest.raises(ConfigError, match=rf"^args\.{row.name} is .*, which is not supported: .*: "):
        table.check(args)


def test_all_moot_fields_that_are_set_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = config(tmp_path)
    always_same = {row.name for row in MOOT if row.same is not None and row.same(object())}
    expected = [row.name for row in MOOT if row.name not in always_same]
    assert len(expected) > 35
    for name in expected:
        setattr(args, name, other_value(args, name))
    table.check(args)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    named = [part.partition(" (")[0] for part in record.getMessage().partition("here: ")[2].split("; ")]
    assert {name for name in named if name in expected} == {*expected}
    table.check(args, tells=False)
    assert len(caplog.records) == 1


def test_a_field_of_a_users_own_class_is_for_its_own_code(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Own(SFTConfig):
        temperature: float = 1.0

    table.check(Own(str(tmp_path), use_cpu=True, bf16=False, report_to="none", temperature=2.0))


def test_a_field_of_a_later_version_is_refused_where_it_is_set(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Later(SFTConfig):
        novelty: float = 1.0

    Later.__module__ = "trl.trainer.sft_config"
    args = Later(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    table.check(args)
    args.novelty = 2.0
    with pytest.raises(ConfigError, match=r"args.novelty is 2.0.*does not know it: leave it at its default"):
        table.check(args)


def test_every_honoured_field_is_tried() -> None:
    assert {row.name for row in ALL_ROWS if row.fate == "honoured"} <= BECOMES.keys() | ELSEWHERE
    assert not BECOMES.keys() & ELSEWHERE


@pytest.mark.parametrize("name", [name for name in BECOMES if name in FIELDS])
def test_an_honoured_field_becomes_what_its_row_says(name: str, tmp_path: Path) -> None:
    value, expected = BECOMES[name]
    made: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"} | {name: value}
    found = config_of(TrainingArguments(**made))
    before = config_of(TrainingArguments(**{k: v for k, v in made.items() if k != name}, **_needed(name, tmp_path)))
    assert {each: getattr(found, each) for each in expected} == expected
    changed = {
        each.name for each in dataclasses.fields(found) if getattr(found, each.name) != getattr(before, each.name)
    }
    assert changed <= expected.keys()
    assert changed or name == "eval_steps"


@pytest.mark.skipif(not IS_5, reason="transformers 4 has warmup_ratio for it")
def test_warmup_steps_below_1_are_a_share_of_the_run(tmp_path: Path) -> None:
    made = config_of(TrainingArguments(str(tmp_path), warmup_steps=0.25, max_steps=10, use_cpu=True))
    assert made.warmup == 3
    made = config_of(TrainingArguments(str(tmp_path), warmup_steps=0.25, use_cpu=True))
    assert made.warmup == 0.25


def _needed(name: str, tmp_path: Path) -> dict[str, Any]:
    return {"output_dir": str(tmp_path)} if name == "output_dir" else {}


def config_of(args: TrainingArguments) -> TrainConfig:
    """On 4 ranks, with a dataset of 10 steps an epoch."""
    return train_config(args, world=World(world_size=4), steps_of=lambda epochs: round(10 * epochs))


def other_value(args: Any, name: str) -> Any:
    if name in OTHER:
        return OTHER[name]
    value = getattr(args, name)
    return not value if isinstance(value, bool) else 123
