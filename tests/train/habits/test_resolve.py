"""What a trainer is given in the ways of transformers and TRL becomes what a run needs, or is refused by name."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from datasets import DatasetDict
from lmms_stream.errors import ConfigError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.train.inputs import RunInputs
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.settings import TrainConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainingArguments

from ...conftest import write_tokens
from . import rows


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_tokens(folder, num_samples=200)
    return folder


def packed(dataset: Any) -> PackedDataset:
    assert isinstance(dataset, PackedDataset)
    return dataset


def of_chats(model_folder: Path, folder: Path, **options: Any) -> RunInputs:
    return rows.resolved(model=str(model_folder), args=rows.config(folder, **options), train_dataset=rows.chats(30))


def test_packing_packs_to_max_length(model_folder: Path, tmp_path: Path) -> None:
    made = of_chats(model_folder, tmp_path, packing=True, max_length=64, data_seed=9)
    dataset = packed(made.train_dataset)
    assert dataset.packing == PackingConfig(packing_length=64, overlong="truncate")
    assert (dataset.order.seed, dataset.order.shuffle) == (9, True)
    split = of_chats(model_folder, tmp_path, packing=True, max_length=64, packing_strategy="bfd_split")
    assert packed(split.train_dataset).needed_packing.overlong == "split"
    assert packed(split.train_dataset).order.seed == 42


@pytest.mark.parametrize(("attention", "packs"), [("sdpa", 1), ("eager", 1), ("sdpa_varlen", 4)])
def test_packs_are_one_sequence_unless_attention_costs_the_square_of_its_tokens(
    attention: str, packs: int, model_folder: Path, tmp_path: Path
) -> None:
    options = {"model_init_kwargs": {"attn_implementation": attention}, "per_device_train_batch_size": 4}
    made = of_chats(model_folder, tmp_path, packing=True, max_length=64, **options)
    assert (made.config.per_device_batch, made.config.global_batch) == (packs, 4)
    assert of_chats(model_folder, tmp_path, **options).config.per_device_batch == 4


def test_without_packing_a_pack_is_a_sample(model_folder: Path, tmp_path: Path) -> None:
    dataset = packed(of_chats(model_folder, tmp_path, max_length=64).train_dataset)
    assert dataset.plan.num_packs(0) == dataset.num_samples == 30
    assert dataset.needed_packing.packing_length == 64
    unlimited = packed(of_chats(model_folder, tmp_path, max_length=None).train_dataset)
    assert unlimited.needed_packing.packing_length == max(len(ids) for ids, _ in rows.tokens_of(unlimited))


def test_the_evaluated_dataset_may_be_packed_otherwise(model_folder: Path, tmp_path: Path) -> None:
    args = rows.config(tmp_path, packing=True, max_length=64, eval_packing=False, eval_strategy="steps", eval_steps=0.5)
    made = rows.resolved(model=str(model_folder), args=args, train_dataset=rows.chats(30), eval_dataset=rows.chats(5))
    assert packed(made.eval_dataset).needed_packing.max_samples_per_pack == 1
    assert packed(made.train_dataset).needed_packing.max_samples_per_pack is None
    assert isinstance(made.config.eval_steps, int)
    assert made.config.eval_steps >= 1


def test_several_datasets_by_name_are_each_converted(model_folder: Path, tmp_path: Path) -> None:
    made = rows.resolved(
        model=str(model_folder), args=rows.config(tmp_path, max_steps=3), train_dataset=rows.chats(4),
        eval_dataset={"chats": rows.chats(5), "texts": rows.texts(6)},
    )  # fmt: skip
    assert isinstance(made.eval_dataset, dict)
    assert {name: packed(each).num_samples for name, each in made.eval_dataset.items()} == {"chats": 5, "texts": 6}


def test_splits_of_a_dataset_dict_are_evaluated_by_name(model_folder: Path, tmp_path: Path) -> None:
    given: Any = {"train_dataset": rows.chats(5), "eval_dataset": DatasetDict({"a": rows.chats(3), "b": rows.chats(4)})}
    found: Any = rows.resolved(model=str(model_folder), args=rows.config(tmp_path), **given).eval_dataset
    assert [(name, each.num_samples) for name, each in found.items()] == [("a", 3), ("b", 4)]


def test_plain_training_arguments_are_taken_as_trl_takes_them(model_folder: Path, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    made = rows.resolved(model=str(model_folder), args=args, train_dataset=rows.chats(20))
    assert packed(made.train_dataset).needed_packing == PackingConfig(
        packing_length=1024, overlong="truncate", max_samples_per_pack=1
    )
    assert made.arguments is args
    assert (made.config.num_train_epochs, made.config.global_batch) == (3, 8)


def test_without_arguments_they_are_those_of_trl(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("trl.SFTConfig", lambda folder: rows.config(Path(folder)))
    made = rows.resolved(model=str(model_folder), train_dataset=rows.chats(4))
    assert made.config.output_dir == f"{model_folder.name}-SFT"
    assert made.config.learning_rate == 2e-5


def test_a_fraction_of_an_epoch_is_counted_from_the_plan(model_folder: Path, tmp_path: Path) -> None:
    made = of_chats(model_folder, tmp_path, num_train_epochs=1.5, per_device_train_batch_size=4)
    assert (made.config.max_steps, made.config.num_train_epochs) == (12, None)  # 8 steps of 4 make 30 samples
    whole = of_chats(model_folder, tmp_path, num_train_epochs=2)
    assert (whole.config.max_steps, whole.config.num_train_epochs) == (None, 2)


def test_a_model_that_is_named_is_a_config_of_ours(model_folder: Path, tmp_path: Path) -> None:
    given = {"model_init_kwargs": {"dtype": torch.bfloat16, "attn_implementation": "eager"}}
    made = of_chats(model_folder, tmp_path, **given)
    assert made.model == ModelConfig(pretrained=str(model_folder), dtype="bfloat16", attention="eager", seed=42)


def test_an_adapter_of_peft_is_added_to_a_model_that_is_named_or_made(model_folder: Path, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = {"args": rows.config(tmp_path), "train_dataset": rows.chats(4), "peft_config": lora}
    named = rows.resolved(model=str(model_folder), **given).model
    assert isinstance(named, ModelConfig)
    made = rows.resolved(model=AutoModelForCausalLM.from_pretrained(model_folder), **given).model
    assert isinstance(made, peft.PeftModel)
    trained = {name for name, each in made.named_parameters() if each.requires_grad}
    built = named.build()
    assert len(trained) == 8
    assert {f"base_model.model.{name}" for name, each in built.named_parameters() if each.requires_grad} == trained
    with pytest.raises(ConfigError, match="the model already has an adapter: leave peft_config out, or merge"):
        rows.resolved(model=made, **given)
    with pytest.raises(ConfigError, match="and the model's adapter both choose the trained weights: leave one out"):
        rows.resolved(model=named, **given)
    with pytest.raises(ConfigError, match=r"peft_config is a dict: give a peft.PeftConfig, as peft.LoraConfig"):
        rows.resolved(model=str(model_folder), **{**given, "peft_config": {"r": 4}})


def test_a_model_that_is_made_stays_as_it_is(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    args = rows.config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    made = rows.resolved(model=model, args=args, train_dataset=rows.chats(4))
    assert made.model is model
    assert "args.model_init_kwargs are for a model that is named" in caplog.text
    with pytest.raises(ConfigError, match=r"args.use_liger_kernel changes a model while it is built: pass the"):
        rows.resolved(model=model, args=rows.config(tmp_path, use_liger_kernel=True), train_dataset=rows.chats(4))
    named = of_chats(model_folder, tmp_path, use_liger_kernel=True, trust_remote_code=True).model
    assert isinstance(named, ModelConfig)
    assert named.use_liger_kernel
    assert named.trust_remote_code
    described = ModelConfig(pretrained=str(model_folder))
    args = rows.config(tmp_path, use_liger_kernel=True)
    built = rows.resolved(model=described, args=args, train_dataset=rows.chats(4)).model
    assert isinstance(built, ModelConfig)
    assert built.use_liger_kernel


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated")
def test_the_tokenizer_is_by_default_that_of_the_models_folder(model_folder: Path, tmp_path: Path) -> None:
    made = of_chats(model_folder, tmp_path, eos_token="<|user|>", pad_token="<|system|>")
    assert made.processing_class.eos_token == "<|user|>"
    assert dict(made.token_ids) == {"eos_token_id": 3, "pad_token_id": 2}


def test_the_tokenizer_that_was_given_is_not_changed(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    args = rows.config(tmp_path, eos_token="<|user|>")
    rows.resolved(model=str(model_folder), args=args, train_dataset=rows.chats(4), processing_class=tok)
    assert tok.eos_token == "<|end|>"


def test_a_chat_template_may_come_from_a_file_or_another_tokenizer(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(rows.CHATML)
    made = of_chats(model_folder, tmp_path, chat_template_path=str(tmp_path / "chat.jinja"))
    assert made.processing_class.chat_template == rows.CHATML
    tok.chat_template, tok.eos_token = rows.THINKING, "<|user|>"
    tok.save_pretrained(tmp_path / "other")
    made = of_chats(model_folder, tmp_path, chat_template_path=str(tmp_path / "other"))
    assert (made.processing_class.chat_template, made.token_ids["eos_token_id"]) == (rows.THINKING, 3)
    tok.add_tokens("<|new|>")
    tok.save_pretrained(tmp_path / "larger")
    with pytest.raises(ConfigError, match=r"tokens that this tokenizer does not have \(<\|new\|>\): add them, resize"):
        of_chats(model_folder, tmp_path, chat_template_path=str(tmp_path / "larger"))


def test_datasets_of_ours_are_taken_as_they_are(shards: Path, model_folder: Path, tmp_path: Path) -> None:
    packing = PackingConfig(packing_length=128)
    ours = PackedStreamingDataset(shards, processor=TokensProcessor(), packing=packing)
    args = rows.config(tmp_path, max_steps=3, max_length=7)
    made = rows.resolved(
        model=str(model_folder), args=args, train_dataset=ours,
        eval_dataset=DatasetConfig(remote=str(shards), processor=ProcessorConfig(type="tokens"), packing_length=64),
    )  # fmt: skip
    assert made.train_dataset is ours
    assert packed(made.eval_dataset).needed_packing.packing_length == 64
    assert made.processing_class is None
    assert not (tmp_path / "datasets").exists()


def test_a_train_config_is_the_run_and_its_callbacks_have_arguments(shards: Path, model_folder: Path) -> None:
    config = TrainConfig(output_dir="out", global_batch=4, max_steps=7, eval_steps=2, seed=3)
    ours = PackedDataset([], processor=TokensProcessor())
    made = rows.resolved(model=model_folder, args=config, train_dataset=ours)
    assert made.config is config
    assert made.model == ModelConfig(pretrained=str(model_folder))
    assert made.arguments is not None
    assert (made.arguments.max_steps, made.arguments.eval_steps, made.arguments.seed) == (7, 2, 3)


def test_the_log_level_is_that_of_transformers_loggers(model_folder: Path, tmp_path: Path) -> None:
    before = transformers.utils.logging.get_verbosity()
    try:
        of_chats(model_folder, tmp_path, log_level="error")
        assert transformers.utils.logging.get_verbosity() == logging.ERROR
    finally:
        transformers.utils.logging.set_verbosity(before)


@pytest.fixture
def _randomness() -> Iterator[None]:
    """Full determinism is of the whole process."""
    before, state = torch.are_deterministic_algorithms_enabled(), random.getstate()
    yield
    torch.use_deterministic_algorithms(before)
    random.setstate(state)


@pytest.mark.usefixtures("_randomness")
@pytest.mark.filterwarnings("ignore")
def test_full_determinism_is_that_of_transformers(model_folder: Path, tmp_path: Path) -> None:
    of_chats(model_folder, tmp_path, full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_reports_that_nothing_is_written_to_are_named(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lmms_stream")
    made = of_chats(model_folder, tmp_path, report_to=["mlflow", "wandb"])
    assert made.config.report_to == ["wandb"]
    assert "args.report_to has mlflow, which nothing is written to here: give the trainer" in caplog.text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "wrapped": (
        {"packing": True, "packing_strategy": "wrapped"},
        "wrapped is not bfd or bfd_split: .*bfd_split",
    ),
    "packing without a length": ({"packing": True, "max_length": None}, "args.packing needs args.max_length"),
    "a dataset's setting": (
        {"dataset_kwargs": {"streaming": True}},
        "has streaming: set skip_prepare_dataset or",
    ),
    "unprepared rows": (
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
        "train_dataset has no input_ids: tokenize it before",
    ),
    "a model's setting": ({"model_init_kwargs": {"tp_plan": "auto"}}, "has tp_plan, which is not known: set dtype"),
    "a model's type": ({"model_init_kwargs": {"dtype": "float16"}}, "dtype float16 is not float32 or bfloat16: choose"),
    "a token": ({"eos_token": "<|nope|>"}, r"args.eos_token '<\|nope\|>' is not a token of the tokenizer: name an"),
    "a template": ({"chat_template_path": "/nowhere"}, "neither a file .* nor a tokenizer's folder or name"),
    "checkpointing": ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "without reentrant autograd: leave"),
    "epochs": ({"num_train_epochs": 0}, "args.num_train_epochs must be above 0, or max_steps, got 0"),
    "betas of sgd": ({"optim": "sgd", "adam_beta1": 0.5}, "adam_epsilon are of AdamW, and args.optim is sgd: leave"),
    "eps twice": ({"optim_args": "eps=0.1"}, "args.optim_args has eps: set args.adam_epsilon"),
    "arguments of an optimizer": ({"optim_args": "momentum"}, "has 'momentum' without a value: write name=value"),
    "truncation": ({"truncation_mode": "middle"}, "must be keep_start or keep_end, got 'middle'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_kept_are_refused(name: str, model_folder: Path, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        of_chats(model_folder, tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"args": {"lr": 1}},
            "args is a dict: give a TrainConfig, a transformers.TrainingArguments or a trl",
        ),
        ({"model": 5}, "model is a int: give a name, a folder, a ModelConfig or a model"),
        ({"processing_class": 5}, "processing_class is a int: give a tokenizer or processor"),
        ({"eval_dataset": {}}, "eval_dataset has no dataset: pass one"),
        ({"model": ModelConfig(config={"model_type": "llama"})}, "processing_class is missing, and the model has no"),
        ({"model": "/nowhere"}, "no tokenizer or processor is at /nowhere .*: check the model.s path, or give proc"),
        (
            {"args": TrainConfig(output_dir="out", global_batch=1, max_steps=1)},
            "train_dataset is a datasets.*Dataset, and args is a TrainConfig.*: pass a trl.SFTConfig",
        ),
        (
            {"args": TrainConfig(output_dir="out", global_batch=1, max_steps=1), "formatting_func": str},
            "formatting_func is for rows of a datasets.Dataset, which a run with a TrainConfig does not read: ",
        ),
    ],
)
def test_what_is_given_wrongly_is_named(
    given: dict[str, Any], message: str, model_folder: Path, tmp_path: Path
) -> None:
    usual = {"model": str(model_folder), "args": rows.config(tmp_path), "train_dataset": rows.texts()}
    with pytest.raises(ConfigError, match=message):
        rows.resolved(**{**usual, **given})


def test_arguments_go_to_disk_as_they_were_given(model_folder: Path, tmp_path: Path) -> None:
    made = of_chats(model_folder, tmp_path, max_steps=2)
    assert made.arguments is not None
    assert json.loads(made.arguments.to_json_string())["max_steps"] == 2
    assert AutoTokenizer.from_pretrained(model_folder).eos_token == made.processing_class.eos_token
