"""Jobs that train on sources without conversion: killed, and resumed on other ranks, no row is lost or read twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.tools.demo.corpus import VOCABULARY
from lmms_stream.tools.demo.jobs import read_run

from tests.conftest import last_words
from tests.datasets.streamed import Readers, write_rows
from tests.datasets.test_documents import document_config, write_hub
from tests.rounds import in_long_rounds

from .launcher import run_job, start_job
from .runs import MODULE, last_step, wait_until
from .torchrun import kill

NUM_ROWS = 1200


@pytest.fixture
def config(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    for part in range(3):
        write_rows(tmp_path / f"rows/{part}.jsonl", range(part * 400, part * 400 + 400))
    return {
        "dataset_type": "vision_iterable",
        "dataset_format": "jsonl",
        "dataset_path": str(tmp_path / "rows"),
        "processor_config": {"processor_name": str(tokenizer), "processor_type": "qwen2"},
        "packing": True,
        "packing_strategy": "best_fit",
        "packing_length": 256,
        "num_canonical_nodes": 8,
    }


def write_run(path: Path, config: dict[str, Any], **train: Any) -> Path:
    model = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    settings = {
        "output_dir": str(path.parent / "out"), "global_batch": 4, "learning_rate": 1e-3, "num_workers": 2,
        "log_sample_ids": True, "save_steps": 2, "timeout_s": 100,
    }  # fmt: skip
    path.write_text(yaml.safe_dump({"dataset": config, "model": {"config": model}, "train": settings | train}))
    return path


@pytest.mark.timeout(240)
def test_a_killed_run_is_resumed_on_other_ranks_and_no_row_is_lost_or_read_twice(
    config: dict[str, Any], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run.yaml", config, max_steps=22)
    output = tmp_path / "out"
    with start_job(2, MODULE, str(run)) as job:
        wait_until(lambda: last_step(output) >= 9, job)
        kill(job.family())
    assert last_step(output) < 22
    done = run_job(1, MODULE, str(run), "train.num_workers=4", timeout_s=120)
    assert done.returncode == 0, last_words(done.stderr)
    records = read_run(output, name="", tolerance=0).records
    assert sorted(records) == list(range(1, 23))
    trained = Counter(sample_id for record in records.values() for sample_id in record["sample_ids"])
    saved = output / "checkpoints/step-00000022/trainer.json"
    state = json.loads(saved.read_text())["cursor"]
    rest = Readers(config, 2, 1, state=state).rest()
    left = Counter(sample_id for batch in rest for sample_id in batch.sample_ids.tolist())
    every = Counter(sample_id for batch in Readers(config, 1, 1).rest() for sample_id in batch.sample_ids.tolist())
    assert max(every.values()) == 1
    assert len(every) == NUM_ROWS
    assert len(trained) > 400
    assert trained + left == every


@pytest.mark.timeout(120)
def test_ranks_and_workers_that_cannot_share_the_lanes_are_refused_before_the_first_step(
    config: dict[str, Any], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run.yaml", config, max_steps=2, num_workers=3)
    done = run_job(1, MODULE, str(run), timeout_s=100)
    assert done.returncode == 1
    assert "1 ranks of 3 workers are 3 readers, which cannot share 8 lanes: ranks times workers must be" in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of datasets
@in_long_rounds
def test_documents_of_the_hub_are_trained_on_alike_after_a_kill_with_two_processes_and_with_one(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Bit for bit with two; with one, that has as many readers, the same documents in each step."""
    write_hub(tmp_path / "hub")
    config = document_config(tmp_path / "hub", tokenizer, tmp_path, cache_dir=None)
    run = write_run(tmp_path / "run.yaml", config, max_steps=16)
    whole, killed, alone = (tmp_path / name for name in ("whole", "killed", "alone"))
    with start_job(2, MODULE, str(run), f"train.output_dir={killed}") as job:
        wait_until(lambda: last_step(killed) >= 5, job)
        kill(job.family())
    assert last_step(killed) < 16
    shutil.copytree(killed, alone)
    for ranks, folder, workers in ((2, whole, 2), (2, killed, 2), (1, alone, 4)):
        said = (str(run), f"train.output_dir={folder}", f"train.num_workers={workers}")
        done = run_job(ranks, MODULE, *said, timeout_s=120)
        assert done.returncode == 0, last_words(done.stderr)
    expected, resumed, of_one = (read_run(each, name="", tolerance=0).records for each in (whole, killed, alone))
    assert sorted(expected) == sorted(resumed) == sorted(of_one) == list(range(1, 17))
    for step, record in expected.items():
        assert (record["sample_ids"], record["loss"]) == (resumed[step]["sample_ids"], resumed[step]["loss"])
        assert sorted(record["sample_ids"]) == sorted(of_one[step]["sample_ids"])
        assert record["loss"] == pytest.approx(of_one[step]["loss"], rel=1e-4)
