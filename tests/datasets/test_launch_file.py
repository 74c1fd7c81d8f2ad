"""LMMS Engine's launch file trains as it is, resumes, and logs by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.config import load_mapping
from lmms_stream.doors.huggingface.arguments import train_config
from lmms_stream.doors.lmms_engine.datasets import MultiModalDataset
from lmms_stream.doors.lmms_engine.datasets.moot import moot_fields
from lmms_stream.doors.lmms_engine.datasets.names import processor_config_of
from lmms_stream.doors.lmms_engine.datasets.source_files import sources_of
from lmms_stream.doors.lmms_engine.launch.cli import arguments_of, create_train_task
from lmms_stream.doors.lmms_engine.launch.file import TRAINER_ARGS, launch_of
from lmms_stream.doors.lmms_engine.launch.run import launched_trainer, planned_launch, read_launch
from lmms_stream.doors.lmms_engine.train import TrainingArguments
from lmms_stream.errors import ConfigError, LmmsStreamError
from lmms_stream.tools.demo.vision import model_fields, save_processor, write_charts
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.settings import FsdpConfig
from lmms_stream.types import World

from ..conftest import run_cli
from ..processes import run_module
from ..rounds import in_long_rounds
from ..train.habits.rows import SIZES
from .chats import text_config, write_jsonl


def launch_file(folder: Path, tokenizer: Path) -> dict[str, Any]:
    return {
        "trainer_type": "fsdp2_trainer",
        "dataset_config": {
            **text_config(write_jsonl(folder / "chats.jsonl"), tokenizer, folder / "cache"),
            "eval_dataset_path": str(write_jsonl(folder / "held_out.jsonl", 8)),
            "shuffle": True,
            "packing_strategy": "first_fit",
            "filter_overlong": True,
            "video_backend": "qwen_vl_utils",
        },
        "model_config": {
            "load_from_config": {"model_type": "llama", "config": SIZES},
            "attn_implementation": "sdpa",
            "overwrite_config": {"num_hidden_layers": 1},
        },
        "trainer_args": {
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "max_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "lr_scheduler_type": "wsd",
            "freeze_modules": ["embed_tokens"],
            "fsdp2": True,
            "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": False},
            "use_rmpad": True,
            "sp_ulysses_degree": 1,
            "report_to": "none",
            "bf16": False,
            "dataloader_num_workers": 1,
        },
        "extra_kwargs": {},
    }


@pytest.fixture
def data(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    return launch_file(tmp_path, tokenizer)


def test_a_launch_file_trains_resumes_and_logs_by_their_names(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(data))
    for changes in (["trainer_args.max_steps=4"], ["trainer_args.max_steps=6", "dataset_config.eval_dataset_path=null",
                                                  "trainer_args.eval_strategy=no"]):  # fmt: skip
        done = run_module(
            "lmms_stream.lmms_engine.launch.cli", f"config_yaml={path}", *changes, timeout_s=120, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert "use_rmpad (packs have no padding)" in done.stderr
    records = [record for record in read_log(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert any("eval_loss" in record for record in read_log(tmp_path / "run"))
    planned, trained = Ledger(path, world=World(world_size=1)), Ledger(tmp_path / "run")
    for step in range(6):
        packs = [[pack.sample_ids.tolist() for pack in ledger.step(step).packs] for ledger in (planned, trained)]
        assert packs[0] == packs[1]
    names = ("loss", "lr", "grad_norm", "total_tokens", "tokens_per_second", "tokens_per_gpu", "epoch")
    assert all(f"train/{name}" in record for record in records for name in names)
    for record in records:
        lengths = [record[f"perf/global_seq_len_{name}"] for name in ("min", "avg", "max")]
        assert 0 < lengths[0] <= lengths[1] <= lengths[2] <= 256
        assert record["train/loss"] == record["loss"]


def test_what_their_launcher_cannot_do_is_an_error() -> None:
    assert arguments_of(["+a.b=1", "config_yaml=f.yaml", "++c=2"]) == ["f.yaml", "a.b=1", "c=2"]
    with pytest.raises(ConfigError, match="no launch file is named: pass config_yaml=FILE"):
        arguments_of(["a.b=1"])
    with pytest.raises(ConfigError, match=r"~a.b deletes a key.* as a.b=null"):
        arguments_of(["config_yaml=f", "~a.b"])


def test_their_arguments_and_runner_train_from_a_script(data: dict[str, Any], tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, use_muon=True, use_rmpad=True, ep_degree=2, freeze_modules=["lm_head"],
        fsdp_config={"reshard_after_forward": False},
    )  # fmt: skip
    config = train_config(arguments, world=World(world_size=1), steps_of=round)
    assert (config.optim, config.expert_parallel, config.frozen) == ("muon", 2, ["*lm_head.*"])
    assert config.fsdp.reshard_after_forward is False
    with pytest.raises(ConfigError, match=r"TrainingArguments: eval_config .*: there is no evaluation server"):
        TrainingArguments(str(tmp_path), use_cpu=True, eval_config={"x": 1})
    with pytest.raises(ConfigError, match=r"the run is not built: call build\(\) before"):
        create_train_task(data).run()


def test_what_a_launch_file_says_is_kept(data: dict[str, Any]) -> None:
    launch, arguments = read_launch(data, source="launch.yaml")
    assert launch.model.config == {"model_type": "llama", **SIZES, "num_hidden_layers": 1}
    assert launch.model.attention == "sdpa"
    assert launch.values == {
        "resume": "auto", "frozen": ["*embed_tokens.*"], "fsdp": FsdpConfig(reshard_after_forward=False),
        "lr_scheduler_type": "wsd",
    }  # fmt: skip
    assert (arguments.learning_rate, arguments.max_steps) == (0.01, 4)
    named = launch_of(data | {"model_config": {
        "load_from_pretrained_path": "somewhere", "extra_kwargs": {"torch_dtype": "bfloat16"},
        "monkey_patch_kwargs": {"patch_type": ["liger"]},
    }}, source="f").model  # fmt: skip
    assert (named.pretrained, named.dtype, named.use_liger_kernel) == ("somewhere", "bfloat16", True)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("", {"config_yaml": "x.yaml"}, "config_yaml 'x.yaml' names another file: pass that file to lmms-stream"),
        ("model_config", {"monkey_patch_kwargs": {"patch_types": ["liger"]}}, "did you mean 'patch_type'"),
        ("model_config", {"monkey_patch_kwargs": {"patch_type": ["ligre"]}}, "did you mean 'liger'"),
        ("model_config", {"monkey_patch_kwargs": {"patch_type": ["nsa"]}}, "nsa True: sparse attention is not here"),
        ("trainer_args", {"deepspeed": "ds.json"}, "deepspeed is ds.json, which .*: leave deepspeed out"),
        ("trainer_args", {"fp16": True}, "trainer_args: fp16 is True, which is not supported: .*: set bf16"),
        ("trainer_args", {"dataloader_drop_last": True}, "dataloader_drop_last is True, .* so no sample is lost"),
        (
            "model_config",
            {"monkey_patch_kwargs": {"patch_type": ["liger"], "swiglu": False, "rope": True}},
            "are taken",
        ),
        ("model_config", {"monkey_patch_kwargs": {"rms_norm": True}}, "rms_norm True .* add patch_type: .liger."),
        ("model_config", {"monkey_patch_kwargs": {"rmsnorm": True}}, "did you mean 'rms_norm'"),
        ("trainer_args", {"fsdp_config": {"transformer_layer": "x"}}, "did you mean 'transformer_layer_cls_to_wrap'"),
        ("trainer_args", {"fsdp_config": {"xla": True}}, "fsdp_config: xla True: there are no TPUs here"),
        (
            "trainer_args",
            {"profiler_config": {"start": 1}},
            "profiler_config has no 'start': did you mean 'start_step'",
        ),
        ("", {"trainer_arg": {}}, "launch.yaml has no 'trainer_arg': did you mean 'trainer_args'"),
        ("", {"model_config": None}, "model_config is missing: write the section"),
        ("", {"trainer_type": "wan_trainer"}, "a model class of LMMS Engine, .*: train it with LMMS Engine, or a"),
        ("", {"trainer_type": "sit_trainer"}, "needs dataset_type sit, and dataset_config has vision: correct"),
        (
            "",
            {"trainer_type": "rae_trainer"},
            "a model class of LMMS Engine, not of lmms_stream: .*type: reconstruction.*class_path",
        ),
        (
            "",
            {"trainer_type": "bagel_fsdp2_trainer"},
            "a class of LMMS Engine, not of lmms_stream: .*type: bagel.*class_path",
        ),
        ("", {"trainer_type": "fsdp_trainer"}, "did you mean 'fsdp2_trainer'"),
        ("", {"extra_kwargs": {"x": 1}}, "are for unsupported trainers: leave them out"),
        ("dataset_config", {"dataset_type": None}, "dataset_config: "),
        ("dataset_config", {"packing_size": 3}, "unknown key 'packing_size': look for its name in docs/settings.md"),
        ("model_config", {"load_from_pretrained_path": "x"}, "exactly one of load_from_pretrained_path and load_from"),
        ("model_config", {"load_from_confg": {}}, "did you mean 'load_from_config'"),
        ("model_config", {"extra_kwargs": {"torch_dtyp": "x"}}, "did you mean 'torch_dtype'"),
        ("trainer_args", {"learning_rat": 1}, "trainer_args has no 'learning_rat': did you mean 'learning_rate'"),
        ("trainer_args", {"eval_strategy": "sometimes"}, "trainer_args: .*sometimes"),
        ("trainer_args", {"lr_scheduler_kwargs": {"decay": 1}}, "did you mean 'decay_ratio'"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    data: dict[str, Any], section: str, change: dict[str, Any], message: str
) -> None:
    changed = data | change if not section else data | {section: data[section] | change}
    with pytest.raises(ConfigError, match=message):
        read_launch(changed, source="launch.yaml")


def test_keys_of_their_examples_are_kept_or_told(data: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    args = data["trainer_args"] | {"dataloader_drop_last": True, "per_device_train_batch_size": 2}
    rows = data["dataset_config"] | {
        "dataset_type": "vision_iterable", "packing_strategy": None, "object_storage": "gcs", "bucket_name": "b",
        "datasets": [{"path": "a.jsonl", "data_folder": "photos/"}, {"path": "b.jsonl"}], "dataset_path": None,
        "dataset_format": "yaml",
        "processor_config": {"processor_name": "x", "processor_type": "qwen2_5_vl", "image_max_pixels": 602112,
                             "video_min_pixels": 28800, "extra_kwargs": {"image_min_pixels": 28800}},
    }  # fmt: skip
    model = data["model_config"] | {
        "model_general_type": "image_text_to_text", "monkey_patch_kwargs": {"patch_type": ["vit_frame_parallel"]},
    }  # fmt: skip
    said = data | {"trainer_args": args, "dataset_config": rows, "model_config": model}
    launch, arguments = read_launch(said, source="f")
    for name in ("dataloader_drop_last (steps of streamed", "vit_frame_parallel (packs are dealt"):
        assert name in caplog.text
    assert not arguments.dataloader_drop_last
    assert launch.dataset.packing_strategy == "first_fit"
    assert [each.data_folder for each in sources_of(launch.dataset)] == ["gs://b/photos", "gs://b"]
    assert not {"object_storage", "bucket_name"} & moot_fields(launch.dataset, streams=True).keys()
    media = processor_config_of(launch.dataset)
    assert (media.image_max_pixels, media.image_min_pixels, media.video_min_pixels) == (602112, 28800, 28800)
    with pytest.raises(ConfigError, match=r"loaded by AutoModelForCausalLM, by its config, not by .*: leave it out"):
        launched_trainer(launch, arguments)
    with pytest.raises(ConfigError, match="model_general_type has no 'masked_lm': choose one of causal_lm, image_t"):
        launched_trainer(replace(launch, general_type="masked_lm"), arguments)
    with pytest.raises(ConfigError, match=r"model_type 'gated_deltanet' is unknown to the .* a script that imports"):
        ModelConfig(config={"model_type": "gated_deltanet"}).build()
    twice = {**rows["processor_config"], "image_min_pixels": 4}
    with pytest.raises(ConfigError, match="has image_min_pixels 4 and, in extra_kwargs, 28800: leave one of them out"):
        launch_of(said | {"dataset_config": rows | {"processor_config": twice}}, source="f")


MISTAKES: list[tuple[str, Any, str]] = [  # where, what, the error
    ("trainer_type", "fsdp2", "trainer_type has no 'fsdp2': did you mean 'fsdp2_trainer'"),
    (
        "dataset_config",
        [{"dataset_type": "vision"}],
        r"dataset_config must be a mapping, got \[.*: write its keys below",
    ),
    ("dataset_config.dataset_type", "visoin", "dataset_type has no 'visoin': did you mean 'vision'"),
    ("dataset_config.packing_lenght", 512, "unknown key 'packing_lenght': did you mean 'packing_length'"),
    ("dataset_config.packing_length", "long", "packing_length: Input should be a valid integer, .*, got 'long'"),
    ("dataset_config.packing_strategy", "fist_fit", r"one of .*, window_N \(as window_1024\), got 'fist_fit'"),
    ("dataset_config.dataset_path", "gone.jsonl", "gone.jsonl: no such file or folder: check the path"),
    ("dataset_config.dataset_format", "jsonlines", "dataset_format has no 'jsonlines': choose one of json, jsonl"),
    ("dataset_config.dataset_format", "parquet", "chats.jsonl: not readable as Parquet"),
    (
        "dataset_config.datasets",
        [{"paht": "a", "data_type": "jsonl"}],
        r"entry 0 of datasets is {.*'paht'.*: write {path: …, data_fo",
    ),
    ("dataset_config.processor_config", ["x", "qwen2"], r"processor_config must be a mapping, got \['x', 'qwen2'\]: "),
    ("dataset_config.processor_config.procesor_type", "x", "has no 'procesor_type': did you mean 'processor_type'"),
    ("dataset_config.processor_config.processor_type", "qwen25_vl", "'qwen25_vl': did you mean 'qwen2_5_vl'"),
    ("dataset_config.processor_config.processor_name", "/gone", "'/gone' cannot be loaded: .*: name a folder with a"),
    ("model_config.attn_implementaton", "sdpa", "no 'attn_implementaton': did you mean 'attn_implementation'"),
    ("trainer_args.learning_rate", "fast", "trainer_args: learning_rate must be a number, got 'fast': write digits"),
    ("trainer_args.max_steps", "ten", "trainer_args: max_steps must be a number, got 'ten': write digits"),
    (
        "trainer_args.fsdp_config",
        ["x"],
        r"trainer_args: fsdp_config must be a mapping, got \['x'\]: write its keys below",
    ),
]


@pytest.mark.parametrize(("where", "value", "message"), MISTAKES)
def test_a_typical_mistake_of_a_launch_file_is_named_with_its_remedy(
    data: dict[str, Any], where: str, value: Any, message: str, tmp_path: Path
) -> None:
    *sections, name = where.split(".")
    section = data
    for each in sections:
        section = section[each]
    section[name] = value
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(LmmsStreamError, match=message):
        len(MultiModalDataset(read_launch(load_mapping(path), source=str(path))[0].dataset).build())


def test_an_empty_launch_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match=r"found nothing: write sections, as docs/settings\.md and docs/lm"):
        load_mapping(tmp_path / "launch.yaml")


def test_a_launch_file_of_the_sit_trainer_is_of_diffusers_model(data: dict[str, Any]) -> None:
    dit = {"_class_name": "DiTTransformer2DModel", "num_layers": 1}
    rows = data["dataset_config"] | {"dataset_type": "vision", "processor_config": {"processor_type": "sit"}}
    said = data | {"trainer_type": "sit_trainer", "dataset_config": rows}
    launch = launch_of(said | {"model_config": {"load_from_config": {"model_type": "sit", "config": dit}}}, source="f")
    assert launch.model.config == dit
    assert launch.dataset.dataset_type == "sit"
    theirs = {
        "model_type": "sit",
        "cfg_scale": 4.0,
        "depth": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "vae_path": "x",
        "num_classes": 9,
    }
    launch = launch_of(said | {"model_config": {"load_from_config": theirs}}, source="f")
    assert launch.model.config == {
        "_class_name": "DiTTransformer2DModel", "sample_size": 32, "patch_size": 2, "in_channels": 4,
        "out_channels": 8, "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 16,
        "num_embeds_ada_norm": 9,
    }  # fmt: skip
    assert launch.task == {"type": "flow_matching", "vae": "x", "label_dropout": 0.1}
    for made, message in (
        ({"model_type": "dit"}, "model_type 'dit' of sit_trainer is not here: give sit, or name diffusers' model"),
        ({"model_type": "sit", "prediction": "noise"}, "prediction is 'noise', and only 'velocity' is followed here"),
        ({"model_type": "sit", "depht": 3}, "did you mean 'depth'"),
        ({"model_type": "sit", "num_heads": 7}, "hidden_size 1152 is no multiple of num_heads 7: change one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            launch_of(said | {"model_config": {"load_from_config": made}}, source="f")


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        *[("trainer_args", {name: "false"}, f"{name} must be True or False, got 'false'")
          for name in ("use_muon", "ema_enabled", "enable_profiler")],
        ("trainer_args", {"fsdp_config": {"reshard_after_forward": "false"}}, "reshard_after_forward must be True or"),
        ("trainer_args", {"ema_enabled": True, "ema_decay": 0}, "ema_decay must be above 0 and below 1, got 0"),
        ("trainer_args", {"enable_profiler": True, "profiler_config": {"start_step": "1"}}, "start_step must be"),
        ("trainer_args", {"freeze_modules": 5}, "freeze_modules must be a list of names, got 5: write"),
        ("model_config", {"extra_kwargs": {"trust_remote_code": "false"}}, "trust_remote_code must be True or False"),
        ("model_config", {"monkey_patch_kwargs": {"patch_type": ["liger"], "rope": "false"}}, "rope must be True or"),
        ("model_config", {"monkey_patch_kwargs": {"patch_type": 5}}, "patch_type must be a list of names, got 5"),
        ("model_config", {"monkey_patch_kwargs": {"patch_type": ["video"], "faster_token_stride": 0}}, "least 1"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(
    section: str, change: dict[str, Any], message: str, data: dict[str, Any]
) -> None:
    data[section] |= change
    with pytest.raises(ConfigError, match=message):
        planned_launch(data, source="f", world=World())


def test_the_trust_of_a_processor_is_no_text(data: dict[str, Any]) -> None:
    extra = {"extra_kwargs": {"trust_remote_code": "false"}}
    data["dataset_config"]["processor_config"] |= extra
    with pytest.raises(ConfigError, match="trust_remote_code must be True or False, got 'false'"):
        processor_config_of(launch_of(data, source="f").dataset)


def test_null_requests_nothing_in_every_section(data: dict[str, Any]) -> None:
    data["trainer_args"]["fsdp_config"] = {}
    expected = launch_of(data, source="f")
    kernels = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy", "use_rmpad", "patch_type"))
    data["model_config"] |= {"monkey_patch_kwargs": kernels, "extra_kwargs": {"trust_remote_code": None}}
    data["trainer_args"]["fsdp_config"] = {"reshard_after_forward": None, "hsdp_shard_size": None}
    assert launch_of(data, source="f") == expected


@pytest.mark.parametrize(
    ("section", "said", "message"),
    [
        ("trainer_args", {"ema_enabled": True, "ema_decay": "x"}, "ema_decay must be a number, got 'x'"),
        ("trainer_args", {"fsdp_config": {"hsdp_shard_size": "a"}}, "hsdp_shard_size must be a whole number"),
        ("model_config", {"load_from_config": {"model_type": "llama", "config": [1]}}, "config must be a mapping"),
        ("model_config", {"torch_dtype": "bfloat16", "extra_kwargs": {"dtype": "float32"}}, "bfloat16 and float32: le"),
    ],
)
def test_numbers_of_a_launch_file_are_checked_and_may_not_contradict(
    data: dict[str, Any], section: str, said: dict[str, Any], message: str
) -> None:
    kept = {} if "load_from_config" in said else data[section]
    with pytest.raises(ConfigError, match=message):
        launch_of(data | {section: kept | said}, source="f")


def test_each_key_beyond_transformers_is_honoured_told_once_or_refused(
    data: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {
        "fsdp2": True, "use_rmpad": True, "print_batch_input_steps": 5, "remove_unused_columns": True,
        "group_by_length": True, "reduce_dtype": "bfloat16", "output_dtype": "bfloat16", "sp_ulysses_degree": 2,
        "tp_degree": 2, "ep_degree": 2, "freeze_modules": ["lm_head"], "use_muon": True, "enable_profiler": True,
        "fsdp_config": {"hsdp_shard_size": 2}, "profiler_config": {"start_step": 2, "end_step": 4},
        "enable_memory_snapshot": True, "memory_snapshot_config": {"x": 1}, "enable_cuda_event_profiler": True,
        "cuda_event_profiler_config": {"x": 1}, "ema_enabled": True, "ema_decay": 0.9, "ema_update_every": 2,
        "ema_start_step": 5, "ema_requires_grad_only": False, "ema_param_filter": {"mode": "regex"},
        "ema_resume_from_ema": True, "eval_config": {"x": 1}, "carbon_intensity": 0.5,
    }  # fmt: skip
    beside = {"profiler_config": {"enable_profiler": True}, "ema_decay": {"ema_enabled": True}}
    assert asked.keys() == TRAINER_ARGS.keys()
    plain = data | {"trainer_args": {"output_dir": data["trainer_args"]["output_dir"]}}
    before = launch_of(plain, source="f").values
    for name, value in asked.items():
        caplog.clear()
        said = {name: value} | beside.get(name, {})
        changed = plain | {"trainer_args": plain["trainer_args"] | said}
        if TRAINER_ARGS[name].fate == "refused":
            with pytest.raises(ConfigError, match=f"trainer_args: {name} "):
                launch_of(changed, source="f")
            continue
        found = launch_of(changed, source="f").values
        assert (found != before) == (TRAINER_ARGS[name].fate == "honoured"), name
        assert (caplog.text.count(f"{name} (") == 1) == (TRAINER_ARGS[name].fate == "moot"), name


def test_arguments_of_older_and_newer_versions_are_heard_or_refused(
    data: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever version of transformers is installed."""
    of_both = {"warmup_ratio": 0.25, "activation_checkpointing": True, "overwrite_output_dir": True, "use_cache": False}
    args = data["trainer_args"] | {"output_dir": str(tmp_path), "save_safetensors": True, **of_both}
    _, arguments = read_launch(data | {"trainer_args": args}, source="f")
    is_former = not hasattr(arguments, "overwrite_output_dir")
    assert caplog.text.count("overwrite_output_dir (a run never empties its output_dir") == is_former
    found = train_config(arguments, world=World(world_size=1), steps_of=round)
    assert (found.warmup, found.gradient_checkpointing) == (1, True)  # a quarter of 4 steps
    for name, value in {
        "save_safetensors": False,
        "jit_mode_eval": True,
        "train_sampling_strategy": "sequential",
    }.items():
        with pytest.raises(ConfigError, match=f"{name} is '?{value}'?, which is not supported: "):
            planned_launch(data | {"trainer_args": {**args, name: value}}, source="f", world=World(world_size=1))
    for name in ("max_length", "packing", "trust_remote_code"):  # of TRL's arguments
        with pytest.raises(ConfigError, match=f"trainer_args has no '{name}'"):
            read_launch(data | {"trainer_args": {**args, name: 1}}, source="f")


def test_the_whole_of_what_their_launcher_writes_down_is_taken(data: dict[str, Any], tmp_path: Path) -> None:
    """Their launcher saves every field with its value; most say nothing."""
    from transformers import TrainingArguments

    said = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]).to_dict()
    said.pop("push_to_hub_token", None)  # which is deprecated
    said |= {
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": False,
                        "min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
        "use_muon": False, "freeze_modules": None, "use_rmpad": True, "fsdp2": True,
        "sp_ulysses_degree": 1, "ep_degree": 1, "reduce_dtype": "bfloat16", "output_dtype": "bfloat16", "max_steps": 3,
        "print_batch_input_steps": 5, "enable_profiler": False, "profiler_config": {"start_step": 1, "end_step": 3},
    }  # fmt: skip
    dataset = data["dataset_config"] | {
        "extra_kwargs": {}, "datasets": None, "object_storage": "none", "bucket_name": None, "max_length": None,
        "filter_overlong_workers": 8, "video_sampling_strategy": "fps", "video_max_pixels": 50176, "frame_num": 64,
        "video_max_frames": 512, "fps": 1,
    }  # fmt: skip
    model = data["model_config"] | {"extra_kwargs": {}, "monkey_patch_kwargs": None, "load_from_pretrained_path": None}
    whole = data | {"trainer_args": said, "dataset_config": dataset, "model_config": model, "extra_kwargs": None}
    launch, arguments = read_launch(whole, source="launch.yaml")
    assert launch.values == {"resume": "auto", "fsdp": FsdpConfig(reshard_after_forward=False)}
    assert arguments.max_steps == 3


def test_the_example_about_images_trains_as_it_is_written(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    build = tmp_path / "build"
    charts = write_charts(build / "charts/charts", num_charts=12)
    processor = save_processor(build / "charts/processor", texts=[charts.read_text()])
    ModelConfig(config=model_fields(processor, positions=512)).build().save_pretrained(build / "charts/model")
    path = tmp_path / "launch.yaml"
    path.write_text((examples / "lmms_engine_vision.yaml").read_text().replace("build/", f"{build}/"))
    done = run_cli("train", str(path), "trainer_args.max_steps=2")
    assert done.returncode == 0, done.stderr
    records = [record for record in read_log(build / "vision") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["perf/global_seq_len_max"] <= 512 for record in records)


def test_weights_that_are_loaded_keep_their_config(data: dict[str, Any]) -> None:
    model = {"load_from_pretrained_path": "x", "overwrite_config": {"hidden_size": 3}}
    with pytest.raises(ConfigError, match="overwrite_config hidden_size does"):
        launch_of(data | {"model_config": model}, source="launch.yaml")


@in_long_rounds
def test_a_run_of_ours_takes_their_dataset_as_a_section(data: dict[str, Any], tmp_path: Path) -> None:
    run = {
        "dataset": data["dataset_config"],
        "model": {"config": {"model_type": "llama", **SIZES}},
        "train": {"output_dir": str(tmp_path / "ours"), "global_batch": 2, "max_steps": 2, "eval_steps": 2},
    }
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(run))
    done = run_cli("train", str(path))
    assert done.returncode == 0, done.stderr
    records = read_log(tmp_path / "ours")
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert any("eval_loss" in record for record in records)
    assert not any(name.startswith("train/") for record in records for name in record)
