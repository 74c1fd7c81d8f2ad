"""Jobs on the CPU: models of today train on two ranks, and are exported and loaded as they were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import last_words, write_tokens
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
    (tmp_path / "job.json").write_text(json.dumps({"dataset": str(tmp_path / "data"), "cases": cases}))
    done = run_job(2, "tests.jobs.models_job", str(tmp_path / "job.json"), timeout_s=800)
    assert done.returncode == 0, last_words(done.stderr)
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert {name: each for name, each in results.items() if each != {"tensors": [], "logits": 0.0}} == {}
    assert results.keys() == cases.keys()
