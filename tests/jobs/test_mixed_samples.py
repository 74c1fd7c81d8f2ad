"""Runs whose packs hold samples of three datasets: killed and resumed, against one that never was, and the ledger."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.report.train_log import read_log

from tests.conftest import write_tokens
from tests.rounds import in_long_rounds
from tests.train.runs import MODEL, train_settings

from .launcher import start_job
from .runs import MODULE, differences, last_step, train, wait_until

SIZES = {"small": 20, "middle": 90, "large": 240}


def write_config(path: Path) -> Path:
    datasets = {
        name: {
            "remote": str(path.parent / name),
            "processor": {"type": "tokens"},
            "packing_length": 256,
            "num_canonical_nodes": 2,
            "shuffle_block_size": 64,
        }
        for name in SIZES
    }
    settings = {"mixing": "samples", "weights": {"small": 1, "middle": 1, "large": 1}, "num_train_epochs": 2}
    train = train_settings(path, global_batch=4) | settings | {"save_steps": 1}
    path.write_text(yaml.safe_dump({"datasets": datasets, "model": {"config": MODEL}, "train": train}))
    return path


@in_long_rounds
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_was_killed_reads_and_learns_what_a_whole_run_does(tmp_path: Path, nproc: int) -> None:
    for name, num_samples in SIZES.items():
        write_tokens(tmp_path / name, num_samples=num_samples)
    config = write_config(tmp_path / "run.yaml")
    whole, output = tmp_path / "whole", tmp_path / "killed"
    train(config, whole, nproc=nproc)
    for step in (3, 11):
        with start_job(nproc, MODULE, str(config), f"train.output_dir={output}") as job:
            wait_until(lambda step=step: last_step(output) >= step, job)  # type: ignore[misc]
            for process in job.family():
                process.kill()
    train(config, output, nproc=nproc)
    assert differences(whole, output) == []
    resumed = tmp_path / "other"
    train(config, resumed, f"train.resume={output}/checkpoints/step-{5:08}", nproc=3 - nproc)
    assert differences(whole, resumed, first_step=6, tolerance=1e-3) == []

    logged = {record["step"]: record["sample_ids"] for record in read_log(output)}
    read = Counter(each for ids in logged.values() for each in ids)
    amounts = Ledger(output).amounts()
    assert sorted(amounts) == sorted(SIZES)
    for name, found in amounts.items():
        lengths = np.load(next((tmp_path / name / "_lmms/lengths").glob("*.npy")))
        of_stream = {int(text.split(":")[1]): count for text, count in read.items() if text.startswith(f"{name}:")}
        assert found.num_samples == sum(of_stream.values())
        assert found.num_tokens == sum(int(lengths[each]) * count for each, count in of_stream.items())
        assert (found.num_seen, found.num_unseen) == (len(of_stream), SIZES[name] - len(of_stream))
    tokens = [found.num_tokens for found in amounts.values()]
    assert tokens == pytest.approx([sum(tokens) / 3] * 3, rel=0.03)
