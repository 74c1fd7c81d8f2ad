"""Ranks call the same collectives in the same order, and the guard of the tests names the first that differ."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import last_words, write_samples
from tests.guard.collective_log import FOLDER, faults, latest_job
from tests.rounds import in_long_rounds

from .launcher import run_job


@pytest.fixture(scope="module")
def unlike_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of 64 tokens hold in turn one sample and two."""
    folder = tmp_path_factory.mktemp("unlike")
    samples = [(np.full(length, 7, np.int32), np.array([[0, length]], np.int32)) for length in (64, 32, 32) * 4]
    write_samples(folder, samples)
    return folder


def run_loops(data: Path, folder: Path, way: str) -> subprocess.CompletedProcess[str]:
    return run_job(2, "tests.jobs.own_loop_job", str(data), str(folder), way, timeout_s=120)


def test_own_loops_prove_isolation_on_all_ranks_whatever_their_packs_hold(unlike_packs: Path, tmp_path: Path) -> None:
    run = run_loops(unlike_packs, tmp_path, "now")
    assert run.returncode == 0, last_words(run.stderr)
    ranks = ast.literal_eval(run.stdout.splitlines()[-1])
    assert [[packs[0] for packs in rank["several"]] for rank in ranks] == [[1, 1], [2, 2]]
    assert [rank["one"] for rank in ranks] == [[1, 1, 1]] * 2  # Bart takes no packs of several samples: no proof
    out_of_memory = "LlamaForCausalLM with attention eager does not run on packs (out of memory)"
    assert [len(rank["memory"]) > 3 for rank in ranks] == [True] * 2
    assert {error.partition(":")[0] for error in ranks[0]["memory"]} == {f"{out_of_memory} (on rank 1)"}
    assert {error.partition(":")[0] for error in ranks[1]["memory"]} == {out_of_memory}
    for rank in ranks:
        broken, *others = rank["refused"]
        assert "LlamaForCausalLM with attention eager gives logits that are not finite" in broken  # of rank 1 only
        for found, model, reason in zip(
            others,
            ("LlamaForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
            (r"its packs are of one sample, by max_samples_per_pack, and this .*", r"it was proven with another pro.*"),
            strict=True,
        ):
            assert re.fullmatch(
                rf"{model} is not proven to keep the samples of this batch apart, because {reason}: "
                r"call check_isolation\(model, batch, processor\) on all ranks before the first step",
                found,
            ), found
    groups = latest_job(Path(os.environ[FOLDER]))
    assert all(len({len(lines) for lines in group.values()}) == 1 for group in groups)
    training, writing = ("\n".join(group[0]) for group in groups)
    loop = "jobs/own_loop_job.py"
    for collective, site in (
        ("broadcast", loop),  # DistributedDataParallel
        ("allreduce", loop),
        ("reduce_scatter_base", loop),  # FSDP
        ("allgather_base", "model/isolation.py"),
    ):
        assert re.search(rf"^{collective} float\S+: {site}:\d+ ", training, re.MULTILINE), training
    assert "thread lmms_stream-checkpoint" in writing


def test_a_proof_that_only_some_ranks_make_is_named_with_both_call_sites(unlike_packs: Path, tmp_path: Path) -> None:
    run = run_loops(unlike_packs, tmp_path, "as-before")
    (fault,) = faults(Path(os.environ[FOLDER]))
    assert re.fullmatch(
        r"ranks call different collectives \(number \d+ of a group\):\n"
        r"  rank 0 of the group: broadcast float32\[\d+\]: jobs/own_loop_job\.py:\d+ train < .*\n"
        r"  rank 1 of the group: allgather_base float64\[1\]: model/\w+\.py:\d+ \w+ < .*choice\.py:\d+ .*",
        fault,
    ), fault
    assert run.returncode != 0
    assert fault in run.stderr


UNLIKE = """
import sys
import torch
import torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(2 + rank))
"""


@in_long_rounds
def test_ranks_in_new_interpreters_are_compared_too(tmp_path: Path) -> None:
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    commands = [[sys.executable, str(script), str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert any("DifferenceError: ranks call different collectives" in error for error in errors), errors
    lines = faults(Path(os.environ[FOLDER]))[0].splitlines()
    assert [line.partition(": ")[2].partition(" <")[0] for line in lines[1:]] == [
        f"allreduce float32[{2 + rank}]: {tmp_path.name}/unlike.py:7" for rank in range(2)
    ]
