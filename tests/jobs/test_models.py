"""Jobs on the CPU: models of today train on two ranks, and are exported and loaded as they were trained."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.processors.multimodal import MultimodalProcessor
from transformers import AutoConfig

from tests.conftest import last_words, write_tokens
from tests.processors.any_vlm import ANY, any_config, save_any
from tests.processors.tiny_vlm import picture
from tests.rounds import in_long_rounds

from ..versions import IS_5
from .launcher import run_job

CAUSAL = (
    "bailing_hybrid", "cohere2", "deepseek_v32", "deepseek_v4", "ernie4_5_moe", "exaone4", "flint", "gemma3n_text",
    "gemma4_text", "glm4_moe", "glm_moe_dsa", "gpt_oss", "granitemoehybrid", "hunyuan_v1_moe", "kimi_linear",
    "lfm2_moe", "llama4_text", "longcat_flash", "minimax_m2", "ministral3", "nemotron_h", "olmo3", "olmo_hybrid",
    "phi3", "phimoe", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "rwkv", "smollm3", "xlstm",
)  # fmt: skip
IMAGE_TEXT = (
    "gemma4", "glm46v", "glm4v", "glm4v_moe", "internvl", "kimi_k25", "llama4", "minimax_m3_vl", "mistral3", "mistral4",
    "mistral_large4",
)  # fmt: skip


@in_long_rounds
@pytest.mark.skipif(not IS_5, reason="transformers 4 has few of them")
@pytest.mark.timeout(900)
def test_models_of_today_train_on_two_ranks_and_are_loaded_as_they_were_trained(tmp_path: Path) -> None:
    """On packs of text; logits and tensors to the last bit."""
    write_tokens(tmp_path / "data", num_samples=40)
    cases = {name: ("causal", name) for name in CAUSAL} | {name: ("image_text", name) for name in IMAGE_TEXT}
    check_runs(tmp_path, cases)


def check_runs(folder: Path, cases: dict[str, tuple[str, str]]) -> None:
    """Train the models of cases; logits and tensors of what is loaded are those of what was trained."""
    (folder / "job.json").write_text(json.dumps({"dataset": str(folder / "data"), "cases": cases}))
    done = run_job(2, "tests.jobs.models_job", str(folder / "job.json"), timeout_s=800)
    assert done.returncode == 0, last_words(done.stderr)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert {name: each for name, each in results.items() if each != {"tensors": [], "logits": 0.0}} == {}
    assert results.keys() == cases.keys()


def write_media(folder: Path, name: str, rows: Path) -> None:
    """A processor, the config of its model beside it, and chats measured by it, which no option names."""
    save_any(folder / "processor", name)
    fields = any_config(name, MultimodalProcessor.from_pretrained(str(folder / "processor")).family)
    AutoConfig.for_model(fields.pop("model_type"), **fields).save_pretrained(folder / "processor")
    convert(str(rows), folder / "chats", tokenizer=str(folder / "processor"), num_workers=1)


@in_long_rounds
@pytest.mark.skipif(not IS_5, reason="transformers 4 has few of them")
@pytest.mark.timeout(900)
def test_models_with_images_train_on_two_ranks_and_are_loaded_as_they_were_trained(tmp_path: Path) -> None:
    """Of processors that have no file here, named by their folder alone; every third chat is of text."""
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as lines:
        for number in range(24):
            shown = [base64.b64encode(picture(40 + 3 * number, 60, seed=number)).decode()] if number % 3 else []
            question = {"role": "user", "content": "<image>" * len(shown) + f"What is {number}?"}
            messages = [question, {"role": "assistant", "content": f"It is {number}."}]
            lines.write(json.dumps({"messages": messages, "images": shown}) + "\n")
    for name in ANY:
        write_media(tmp_path / name, name, rows)
    check_runs(tmp_path, {name: ("media", name) for name in ANY})
