"""Jobs of the demo that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmms_stream.errors import TrainingError
from lmms_stream.tools.demo.jobs import run_job

from tests.jobs.runs import train, write_chat_run


def ignore(step: int) -> None:
    """No progress display."""


def test_a_job_that_fails_is_an_error_with_its_own_words(dataset_folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    config = write_chat_run(tmp_path / "run.yaml", dataset_folder, tokenizer, max_steps=1, num_workers=0)
    train(config, tmp_path / "out", nproc=1)
    config.write_text(config.read_text().replace("num_canonical_nodes: 2", "num_canonical_nodes: 3"))
    with pytest.raises(TrainingError, match="the job ended with status 1: the checkpoint follows plan"):
        run_job(config, tmp_path / "out", nproc=1, on_step=ignore)
