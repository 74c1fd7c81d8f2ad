"""Scripts of TRL run when `from trl import` becomes `from lmms_stream.trl import`: the three commands of the installed
package, whose source is read, and five that call what its examples call.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from lmms_stream.doors.trl import (
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from lmms_stream.train.report.train_log import read_log
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GptOssConfig,
    HfArgumentParser,
    Mxfp4Config,
)
from trl import DPOConfig

from ..train.habits import rows as chats
from ..versions import IS_5
from . import rows
from .test_image_rows import vlm as vlm

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers
COMMON = (
    *("--max_steps", "2", "--report_to", "none", "--use_cpu", "--bf16", "false", "--save_strategy", "no"),
    *("--per_device_train_batch_size", "2", "--logging_steps", "1", "--learning_rate", "1e-2"),
)


def folder_of(make: Callable[[int], Dataset], folder: Path) -> str:
    """A dataset of two splits, as load_dataset reads folders."""
    folder.mkdir()
    for name, count in (("train", 12), ("test", 4)):
        make(count).to_parquet(folder / f"{name}-00000-of-00001.parquet")
    return str(folder)


def arguments(monkeypatch: pytest.MonkeyPatch, dataset: str, model: Path, out: Path, more: str = "") -> None:
    given = ["script", "--dataset_name", dataset, "--model_name_or_path", str(model), "--output_dir", str(out)]
    monkeypatch.setattr(sys, "argv", [*given, *COMMON, *more.split()])


def check_run(out: Path, *, adapter: bool = False) -> None:
    losses = [each["loss"] for each in read_log(out) if "loss" in each]
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert (out / ("adapter_model.safetensors" if adapter else "model.safetensors")).is_file()


@pytest.mark.parametrize(
    ("name", "make", "more"),
    [
        ("sft", chats.chats, "--eval_strategy steps --eval_steps 2 --packing --max_length 64"),
        ("dpo", rows.chat_pairs, "--use_peft --lora_target_modules q_proj v_proj"),
        ("kto", rows.judged, "--eval_strategy steps --eval_steps 2"),
    ],
)
def test_commands_of_trl_run_with_another_import(
    name: str, make: Any, more: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = Path(str(importlib.import_module(f"trl.scripts.{name}").__file__)).read_text()
    changed = source.replace("from trl import", "from lmms_stream.trl import")
    assert changed.count("lmms_stream") == 2
    arguments(monkeypatch, folder_of(make, tmp_path / "rows"), model_folder, tmp_path / "run", more)
    exec(compile(changed, f"{name}.py", "exec"), {"__name__": "__main__"})
    check_run(tmp_path / "run", adapter="peft" in more)
    assert f"Model saved to {tmp_path / 'run'}" in capsys.readouterr().out
    if "eval" in more:
        assert any("eval_loss" in each for each in read_log(tmp_path / "run"))


def test_a_script_gives_models_a_reference_and_a_tokenizer(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kto.py of TRL's examples."""
    arguments(monkeypatch, folder_of(rows.judged, tmp_path / "rows"), model_folder, tmp_path / "run")
    parser = HfArgumentParser((ScriptArguments, KTOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    model, ref_model = (AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path) for _ in range(2))
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = KTOTrainer(
        model,
        ref_model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=None,
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    check_run(tmp_path / "run")


def test_a_script_loads_a_model_whose_codes_become_numbers(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sft_gpt_oss.py of TRL's examples."""
    sizes = {"num_key_value_heads": 4, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    saved = tmp_path / "gpt-oss"
    AutoModelForCausalLM.from_config(GptOssConfig(**chats.SIZES, **sizes, sliding_window=64)).save_pretrained(saved)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(saved)
    more = f"--packing --max_length 64 --warmup_steps {0.03 if IS_5 else 1} --lr_scheduler_type cosine_with_min_lr "
    more += '--lr_scheduler_kwargs {"min_lr_rate":0.1}'
    arguments(monkeypatch, folder_of(chats.chats, tmp_path / "rows"), saved, tmp_path / "run", more)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args, _ = parser.parse_args_and_config(return_remaining_strings=True)
    options = {
        "revision": model_args.model_revision, "attn_implementation": "eager", "dtype": model_args.dtype,
        "use_cache": not training_args.gradient_checkpointing,
        # transformers 4 reads codes alone so, and these are numbers
        **({"quantization_config": Mxfp4Config(dequantize=True)} if IS_5 else {}),
    }  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **options),
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name)["train"],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    check_run(tmp_path / "run")
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "run").config, "quantization_config")


def test_a_script_maps_its_rows_and_trains_an_adapter(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sft_nemotron_3.py of TRL's examples."""
    more = "--dtype bfloat16 --max_length 128 --use_peft --lora_r 8 --lora_target_modules q_proj k_proj up_proj"
    arguments(monkeypatch, folder_of(chats.chats, tmp_path / "rows"), model_folder, tmp_path / "run", more)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args, _ = parser.parse_args_and_config(return_remaining_strings=True)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision, "attn_implementation": "eager", "dtype": model_args.dtype,
    }  # fmt: skip

    def with_thoughts(row: dict[str, Any]) -> dict[str, Any]:
        row["messages"] = [{**turn, "content": f"<think>{turn['content']}"} for turn in row["messages"]]
        return row

    dataset = load_dataset(script_args.dataset_name).map(with_thoughts)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    check_run(tmp_path / "run", adapter=True)


@pytest.mark.parametrize(
    ("make", "kind", "config"),
    [
        (rows.seen, SFTTrainer, SFTConfig),  # sft_vlm.py
        (rows.seen_in_messages, SFTTrainer, SFTConfig),  # sft_vlm_gemma3.py
        (rows.seen_pairs, DPOTrainer, DPOConfig),  # dpo_vlm.py
    ],
)
def test_a_script_trains_a_model_of_images(
    make: Any, kind: Any, config: Any, vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = folder_of(make, tmp_path / "rows")
    arguments(monkeypatch, dataset, vlm, tmp_path / "run", "--dtype float32")
    script_args, training_args, model_args = TrlParser((ScriptArguments, config, ModelConfig)).parse_args_and_config()
    training_args.max_length = None
    assert get_quantization_config(model_args) is None
    model = AutoModelForImageTextToText.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, dtype=getattr(torch, model_args.dtype)
    )
    trainer = kind(
        model,
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name)["train"],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    check_run(tmp_path / "run")
