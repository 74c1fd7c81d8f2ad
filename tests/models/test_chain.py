"""The whole chain with model makers' tokenizers: a tiny model learns conversations by heart, and answers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.train.report.train_log import read_log

from ..jobs.launcher import run_job
from ..processes import run_module
from ..rounds import in_long_rounds
from . import makers

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
MODEL_TYPES = {"qwen3": "qwen3", "llama3_1": "llama", "gemma3": "gemma3_text", "deepseek_v3": "llama",
               "gptoss": "llama", "llama2": "llama"}  # fmt: skip
WITH_TOOLS = ("qwen3", "gptoss")
LAST_LOSS, NUM_STEPS, JOB_S = 0.01, 150, 1200.0


def config_of(name: str) -> dict[str, Any]:
    loaded = makers.tokenizer(name)
    return {"model_type": MODEL_TYPES[name], **SHAPE, "vocab_size": loaded.num_ids, "eos_token_id": loaded.eos_token_id,
            "bos_token_id": None, "pad_token_id": None}  # fmt: skip


def write_weights(name: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config_of(name)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def chats_of(name: str) -> list[makers.Conversation]:
    """Return conversations whose answers follow from their beginnings."""
    turns = [
        makers.user("Who wrote Emma?"), makers.answer("Jane Austen wrote it, in 1815."),
        makers.user("And Ulysses?"), makers.answer("James Joyce: 1922 🙂."),
    ]  # fmt: skip
    plain: list[makers.Conversation] = [
        (turns, None),
        ([makers.user("Sag Grüß Gott"), makers.answer("Grüß Gott!")], None),
    ]
    return [*plain, *([makers.CONVERSATIONS["call"]] if name in WITH_TOOLS else [])]


def reply(model: Any, tokenizer: Any, messages: makers.Messages, tools: list[Any] | None) -> str:
    import torch

    ids = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=False))


@in_long_rounds
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [each for each in makers.TOKENIZERS if each != "llama2"])
def test_a_model_that_learnt_conversations_by_heart_answers_them(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = makers.with_template(name, tmp_path / "tokenizer")
    chats = chats_of(name)
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": messages, **({"tools": tools} if tools else {})}) + "\n"
                            for messages, tools in chats * 2))  # fmt: skip
    done = run_module(
        "lmms_stream", "convert", str(file), str(tmp_path / "data"), "--tokenizer", str(folder), timeout_s=200
    )
    assert done.returncode == 0, done.stderr
    settings = {
        "dataset": {"remote": str(tmp_path / "data"), "processor": {"tokenizer": str(folder)}, "packing_length": 256},
        "model": {"config": config_of(name)},
        "train": {"global_batch": 2, "max_steps": NUM_STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
                  "warmup": 5, "weight_decay": 0.0, "num_workers": 0, "save_steps": NUM_STEPS},
    }  # fmt: skip
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    done = run_job(2, "lmms_stream.train", str(config), f"train.output_dir={tmp_path / 'run'}", timeout_s=JOB_S)
    assert done.returncode == 0, done.stderr
    assert read_log(tmp_path / "run")[-1]["loss"] < LAST_LOSS
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{NUM_STEPS:08}"
    done = run_module("lmms_stream", "export", str(checkpoint), str(tmp_path / "model"), timeout_s=200)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for messages, tools in chats:
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                said = reply(model, tokenizer, messages[:index], tools)
                words = [
                    message["content"],
                    *(each["function"]["arguments"]["place"] for each in message.get("tool_calls", ())),
                ]
                assert all(word in said for word in words), (said, message)
