"""Memory does not grow with the rows that are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import last_words
from tests.processes import run_module
from tests.rounds import LONG, rounds

from .chats import text_config
from .streamed import write_rows

NUM_ROWS = rounds(4000, 300_000)


@pytest.mark.timeout(900 if LONG else 120)
def test_memory_after_all_rows_is_that_after_a_tenth(tokenizer: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", range(NUM_ROWS))
    config = text_config(path, tokenizer, tmp_path, dataset_type="vision_iterable", packing_strategy="best_fit")
    done = run_module("tests.datasets.memory_job", json.dumps(config), str(NUM_ROWS), timeout_s=800 if LONG else 100)
    assert done.returncode == 0, last_words(done.stderr)
    early, late = json.loads(done.stdout)
    assert late - early < 24 << 20
