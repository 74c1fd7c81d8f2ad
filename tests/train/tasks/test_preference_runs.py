"""A run on stored answers to compare, as its file says: from rows to steps, and what stops it before the first one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.converters.convert import convert
from lmms_stream.errors import ConfigError
from lmms_stream.processors.preference import PreferenceProcessor
from lmms_stream.processors.tokenizers import load_tokenizer
from lmms_stream.train.report.train_log import read_log

from ..runs import MODEL, train_settings, trainer_of

NUM_ROWS = 8


def rows_of(objective: str) -> list[dict[str, Any]]:
    """Pairs for dpo, good and bad answers in turn for kto, of lengths that differ."""
    prompts = [f"Which number comes after {n}?" for n in range(NUM_ROWS)]
    good = [f"It is {n + 1}." for n in range(NUM_ROWS)]
    bad = ["I do not know" + "." * n for n in range(NUM_ROWS)]
    if objective == "dpo":
        return [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(prompts, good, bad, strict=True)]
    return [{"prompt": prompts[n], "completion": (bad, good)[n % 2][n], "label": bool(n % 2)} for n in range(NUM_ROWS)]


def write_run(folder: Path, tokenizer: Path, *, objective: str, stored: str = "", **dataset: Any) -> Path:
    """The file of a run of two steps for an objective. stored: the objective that the rows are for, if another."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(stored or objective)))
    processor = PreferenceProcessor.from_pretrained(str(tokenizer))
    convert([str(rows)], str(folder / "data"), num_workers=1, processor=processor)
    path = folder / "run.yaml"
    section = {"type": "preference", "tokenizer": str(tokenizer), "objective": objective}
    data = {"remote": str(folder / "data"), "processor": section, "packing_length": 256, "num_canonical_nodes": 1}
    model = {"config": MODEL | {"vocab_size": load_tokenizer(str(tokenizer)).num_ids}}
    train = train_settings(path, global_batch=1) | {"max_steps": 2}
    path.write_text(yaml.safe_dump({"dataset": data | dataset, "model": model, "train": train}))
    return path


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_runs_file_trains_on_stored_preferences(objective: str, tokenizer: Path, tmp_path: Path) -> None:
    trainer_of(write_run(tmp_path, tokenizer, objective=objective)).train()
    first, second = (record for record in read_log(tmp_path / "default") if "loss" in record)
    # Of a model that is its reference, sigmoids are of 0.
    assert first["loss"] == pytest.approx(math.log(2) if objective == "dpo" else 0.5, rel=1e-4)
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    assert second["loss"] != first["loss"]


@pytest.mark.parametrize(("overlong", "mode"), [("truncate", "plan"), ("split", "lanes")])
def test_a_run_that_would_cut_answers_does_not_begin(overlong: str, mode: str, tokenizer: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, tokenizer, objective="dpo", overlong=overlong, packing_mode=mode, packing_length=16)
    with pytest.raises(ConfigError, match=f"overlong is {overlong}, and samples for dpo are .* set overlong to drop"):
        trainer_of(path)


def test_rows_for_another_objective_are_refused_with_the_remedy(tokenizer: Path, tmp_path: Path) -> None:
    for objective, stored, found in (("dpo", "kto", r"\[[01]\]"), ("kto", "dpo", r"\[1, 0\]")):
        folder = tmp_path / objective
        folder.mkdir()
        trainer = trainer_of(write_run(folder, tokenizer, objective=objective, stored=stored))
        with pytest.raises(ConfigError, match=f"task {objective} learns from .* has sequences of roles {found}: give"):
            trainer.train()
