"""Jobs on the CPU: the groups of ranks that share a copy of the model, and of copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import last_words

from .launcher import run_job
from .mesh_job import TIMEOUT_S


@pytest.mark.timeout(120)
def test_every_group_of_a_mesh_waits_as_long_as_the_run_says(tmp_path: Path) -> None:
    done = run_job(4, "tests.jobs.mesh_job", str(tmp_path), timeout_s=100)
    assert done.returncode == 0, last_words(done.stderr)
    for rank in range(4):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "None": {"ranks": [0, 1, 2, 3], "names": ["shard"], "timeouts": [TIMEOUT_S]},
            "1": {"ranks": [[0], [1], [2], [3]], "names": ["copy", "shard"], "timeouts": [TIMEOUT_S] * 2},
            "2": {"ranks": [[0, 1], [2, 3]], "names": ["copy", "shard"], "timeouts": [TIMEOUT_S] * 2},
        }
