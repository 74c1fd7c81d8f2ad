"""Jobs on the CPU whose ranks do not see the same folder, as on nodes that share none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words, write_tokens
from tests.train.runs import write_run

from .launcher import run_job


@pytest.mark.timeout(150)
def test_an_output_dir_that_ranks_do_not_share_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=300)
    config = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=4)
    done = run_job(2, "tests.jobs.unshared_job", str(config), str(tmp_path), timeout_s=120)
    assert done.returncode == 0, last_words(done.stderr)
    for rank in range(2):
        message = r"rank 1 on \S+ cannot use out/checkpoints for checkpoints \(not the folder that rank 0 writes to\): "
        assert re.match(message + "name a folder that all nodes share", (tmp_path / f"{rank}.txt").read_text())
    assert read_log(tmp_path / "0" / "out") == []
    assert {path.name for path in tmp_path.glob("*/out/checkpoints/.*")} <= {".run.lock"}
