"""Members of TRL's trainers that scripts call are there, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import lmms_stream.doors.trl as door
import pytest
import torch
import trl
from lmms_stream.doors.huggingface.trainer import _REFUSED, check_overrides
from lmms_stream.doors.trl import DPOTrainer, KTOTrainer, SFTTrainer
from lmms_stream.errors import CheckpointError, ConfigError
from lmms_stream.train.report.train_log import read_log
from transformers import BitsAndBytesConfig, Mxfp4Config, Trainer

from ..train.habits import rows
from ..versions import IS_5


def trainer_in(folder: Path, model_folder: Path) -> SFTTrainer:
    args = rows.config(folder, max_length=64, max_steps=1, logging_steps=1, save_strategy="no")
    return SFTTrainer(str(model_folder), args, train_dataset=rows.chats(8), eval_dataset=rows.chats(4))


@pytest.fixture
def trainer(model_folder: Path, tmp_path: Path) -> SFTTrainer:
    return trainer_in(tmp_path, model_folder)


@pytest.fixture(scope="module")
def untrained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SFTTrainer:
    """For tests that change nothing of it."""
    return trainer_in(tmp_path_factory.mktemp("untrained"), model_folder)


@pytest.mark.skipif(not IS_5, reason="its members are those of transformers 5")
def test_every_public_member_of_trls_trainers_exists_or_is_refused_by_name() -> None:
    for theirs, ours in ((trl.SFTTrainer, SFTTrainer), (trl.DPOTrainer, DPOTrainer), (Trainer, SFTTrainer)):
        missing = [name for name in dir(theirs) if not name.startswith("_") and not hasattr(ours, name)]
        assert missing == [], theirs


@pytest.mark.parametrize("name", _REFUSED)
def test_parts_of_a_loop_that_is_not_here_are_refused(name: str, untrained: SFTTrainer) -> None:
    with pytest.raises(ConfigError, match=f"{name} is a part of transformers' own loop, which is not here: "):
        getattr(untrained, name)()


OVERRIDES: dict[str, tuple[str, Any]] = {
    "get_train_dataloader": ("does not call: give another train_dataset", lambda self: None),
    "prediction_step": ("does not call: override evaluation_step", lambda self, *given: None),
    "evaluation_loop": ("does not call: call evaluate or predict", lambda self, *given: None),
    "create_optimizer_and_scheduler": ("does not call: override create_optimizer and", lambda self, steps: None),
    "_get_train_sampler": ("does not call: override a method of docs/trainer.md", lambda self: None),
    "_prepare_dataset": ("does not call: override a method of docs/trainer.md", lambda self, *given: None),
    "compute_loss": (
        r"calls it with model, batch, packs, units: give compute_loss_func\(outputs",
        lambda self, model, inputs, return_outputs=False, **more: None,
    ),
    "training_step": ("calls it with packs, units: give", lambda self, model, inputs, num_items_in_batch=None: None),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_that_would_not_be_called_is_refused(name: str) -> None:
    message, method = OVERRIDES[name]
    with pytest.raises(ConfigError, match=rf"Mine.*{name}.*{message}"):
        type("Mine", (SFTTrainer,), {name: method, "__module__": __name__})()


def test_an_override_of_a_trainer_of_answers_is_refused_too() -> None:
    for base, name in ((DPOTrainer, "_precompute_ref_logps"), (KTOTrainer, "_compute_kl_logps"),
                       (DPOTrainer, "compute_ref_log_probs")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"Mine overrides {name}, which this trainer does not call"):
            check_overrides(type("Mine", (base,), {name: lambda self, *given: None, "__module__": __name__}))
    check_overrides(type("Mine", (DPOTrainer,), {"own_helper": lambda self: None, "__module__": __name__}))


def test_an_override_of_save_model_is_told_that_checkpoints_do_not_call_it(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(SFTTrainer):
        saved: tuple[Any, ...] = ()

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            self.saved = (*self.saved, output_dir)
            super().save_model(output_dir, _internal_call)

        def log(self, logs: Any, start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

    args = rows.config(tmp_path, max_length=64, max_steps=1, logging_steps=1, save_steps=1)
    trainer = Mine(str(model_folder), args, train_dataset=rows.chats(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "mine"))
    assert trainer.saved == (str(tmp_path / "mine"),)
    assert (tmp_path / "mine" / "model.safetensors").is_file()
    assert [each["mine"] for each in read_log(tmp_path)] == [1.0]
    assert "Mine overrides save_model: this trainer's checkpoints do not call it" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenizer": 1}, "SFTTrainer takes no tokenizer: give it as processing_class"),
        ({"packing": True}, r"SFTTrainer takes no packing: it is a field of SFTConfig: args=SFTConfig\(packing=…\)"),
        ({"train_datasets": 1}, "SFTTrainer takes no train_datasets: did you mean 'train_dataset'"),
    ],
)
def test_an_argument_that_is_not_of_the_trainer_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTTrainer("model", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": "3"}, "args.max_steps must be a whole number, got '3': write 3"),
        ({"max_length": "512"}, "args.max_length must be a whole number, got '512': write 512"),
        ({"packing": "yes"}, "args.packing must be True or False, got 'yes'"),
        ({"max_length": -5}, "args.max_length must be at least 1, got -5"),
        ({"per_device_train_batch_size": 0}, "args.per_device_train_batch_size must be at least 1, got 0"),
        ({"eval_strategy": "epoch"}, "args.eval_strategy is epoch, and there is no eval_dataset: pass one, or"),
    ],
)
def test_a_wrong_value_of_an_argument_is_named(options: Any, message: str, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(str(model_folder), rows.config(tmp_path, **options), train_dataset=rows.chats(4))


def test_what_is_given_as_something_else_is_named(model_folder: Path, tmp_path: Path) -> None:
    args, given = rows.config(tmp_path), {"train_dataset": rows.chats(4)}
    with pytest.raises(ConfigError, match="args is a SFTConfig: give DPOTrainer a DPOConfig"):
        DPOTrainer(str(model_folder), None, args, **given)
    wrong: Any = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(ConfigError, match=r"optimizers must be \(optimizer, scheduler\), got SGD: pass both"):
        SFTTrainer(str(model_folder), args, optimizers=wrong, **given)
    with pytest.raises(ConfigError, match=r"no tokenizer .* is at .*nothing .*: check the model's path, or give proc"):
        SFTTrainer(str(tmp_path / "nothing"), args, **given)


def test_what_the_model_of_packs_lacks_is_said(trainer: SFTTrainer) -> None:
    with pytest.raises(AttributeError, match=r"has no save_pretrained: call save_model of the trainer"):
        _ = trainer.model.save_pretrained
    with pytest.raises(AttributeError, match=r"has no generate: use its model.generate"):
        _ = trainer.model.generate
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = trainer.model.nothing


def test_a_checkpoint_of_transformers_is_refused_by_name(trainer: SFTTrainer, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    for asked in (True, str(folder)):
        with pytest.raises(CheckpointError, match=rf"{folder} is a checkpoint of transformers' .* model={folder}"):
            trainer.train(resume_from_checkpoint=asked)


@pytest.mark.filterwarnings("ignore")
def test_a_script_may_ask_for_what_it_asks_of_trls_trainer(
    trainer: SFTTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer.train()
    accelerator = trainer.accelerator
    accelerator.print("done")
    accelerator.wait_for_everyone()
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert (accelerator.num_processes, accelerator.device.type) == (1, "cpu")
    assert accelerator.unwrap_model(trainer.model).config.model_type == trainer.model.config.model_type == "llama"
    assert accelerator.gather(torch.tensor([2])).tolist() == [2]
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    shown = capsys.readouterr().out
    assert "done" in shown
    assert "***** train metrics *****" in shown
    assert json.loads((tmp_path / "all_results.json").read_text())["train_loss"] == result.training_loss
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 1
    assert trainer.metrics_format({"train_runtime": 61.0})["train_runtime"] == "0:01:01.00"
    assert trainer.num_examples(trainer.get_train_dataloader()) == 8
    assert trainer.get_num_trainable_parameters() == sum(each.numel() for each in trainer.model.parameters())
    assert trainer.get_learning_rates() == [group["lr"] for group in trainer.optimizer.param_groups]
    groups = trainer.get_optimizer_group()
    assert trainer.get_optimizer_group(groups[0][0])["params"] is groups[0]
    assert trainer.get_total_train_batch_size(trainer.args) == 8
    assert (trainer.get_tp_size(), trainer.get_sp_size(), trainer.get_cp_size()) == (1, 1, 1)
    assert trainer.model_wrapped is trainer.model


def test_loaders_give_batches_and_a_prediction_step_their_loss(trainer: SFTTrainer) -> None:
    evaluated = trainer.evaluate()
    losses, num_tokens, num_packs = 0.0, 0, 0
    for batch in trainer.get_eval_dataloader():
        loss, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
        assert logits is not None
        assert labels is not None
        own = torch.nn.functional.cross_entropy(logits[0, :-1].float(), labels[0, 1:])
        assert loss == pytest.approx(own.item(), rel=1e-4)
        assert trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)[1:] == (None, None)
        losses, num_tokens, num_packs = (
            losses + loss.item() * batch.num_loss_tokens,
            num_tokens + batch.num_loss_tokens,
            num_packs + 1,
        )
    assert num_packs == 4
    assert losses / num_tokens == pytest.approx(evaluated["eval_loss"], rel=1e-5)
    assert len(trainer.get_train_dataloader()) == 8
    evaluation: Any = trainer.eval_dataset
    assert len(trainer.get_test_dataloader(evaluation)) == 4
    with pytest.raises(ConfigError, match="there is no eval_dataset 'other': name one of"):
        trainer.get_eval_dataloader("other")


def test_a_model_card_says_what_was_trained_on(trainer: SFTTrainer, tmp_path: Path) -> None:
    trainer.create_model_card(model_name="mine", dataset_name="some/chats", tags="sft")
    card = (tmp_path / "README.md").read_text()
    assert "# mine\n" in card
    for line in ("datasets: some/chats", "- lmms_stream", "- sft", "library_name: transformers"):
        assert line in card


def test_without_a_network_an_upload_raises_the_hubs_own_error(
    trainer: SFTTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Exception, match="offline") as caught:
        trainer.push_to_hub(dataset_name="some/chats")
    assert type(caught.value).__module__.startswith("huggingface_hub")


def test_names_of_trl_are_its_own_but_for_trainers_that_are_not_here() -> None:
    assert door.get_peft_config is trl.get_peft_config
    with pytest.raises(
        ConfigError, match=r"GRPOTrainer is not part of lmms_stream.trl, which has DPOTrainer, KTOTrainer"
    ):
        door.GRPOTrainer  # noqa: B018


def test_a_quantised_model_is_refused_and_none_is_not(model_folder: Path, tmp_path: Path) -> None:
    given: Any = {"args": rows.config(tmp_path), "train_dataset": rows.chats(4)}
    SFTTrainer(str(model_folder), quantization_config=None, **given)
    # transformers 4 makes no BitsAndBytesConfig where bitsandbytes is not installed
    quantised = BitsAndBytesConfig(load_in_4bit=True) if IS_5 else Mxfp4Config()
    message = rf"quantization_config is a {type(quantised).__name__}: .* Leave it out \(--load_in_4bit"
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(str(model_folder), quantization_config=quantised, **given)


def test_arguments_of_from_pretrained_are_kept(model_folder: Path, tmp_path: Path, caplog: Any) -> None:
    options = {"revision": "main", "dtype": "auto", "attn_implementation": None, "device_map": "auto"}
    args = rows.config(tmp_path, model_init_kwargs=options)
    trainer = SFTTrainer(str(model_folder), args, train_dataset=rows.chats(4))
    assert next(trainer.model.parameters()).dtype is torch.float32
    assert "args.model_init_kwargs ['device_map']: each rank has its part of the model" in caplog.text
