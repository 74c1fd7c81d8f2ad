"""Jobs on the CPU over chats with bad images, killed and resumed on other numbers of ranks, against good ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from lmms_stream.train.checkpoint.checkpoint import checkpoints

from tests.conftest import last_words, run_cli
from tests.processors.tiny_vlm import save_processor, tiny_config
from tests.rounds import in_long_rounds

from . import bad_chats
from .launcher import run_job, start_job
from .runs import differences, steps_of, wait_until

JOB = "tests.jobs.quarantine_job"
JOB_S = 600.0
NUM_STEPS, NUM_SAMPLES, LARGE = 14, 100, 5  # somewhat more than an epoch
SAMPLE_TIMEOUT_S = 30  # the first sample of a worker compiles what resizes images
TOLERANCE = 1e-6  # of losses on other numbers of ranks, whose sums of gradients are of other parts
pytestmark = [in_long_rounds, pytest.mark.timeout(4 * JOB_S)]
Segment = tuple[list[int], list[int]]  # tokens and labels
Packs = dict[int, dict[tuple[int, ...], list[Segment]]]  # by step, then by the ids of its samples


class Case(NamedTuple):
    """config: of a run on the bad chats. good: what a run on the good ones left. bad: their ids; hanging: one more."""

    config: Path
    good: Path
    bad: list[int]
    hanging: int
    drop: Path


def packs_of(output: Path) -> Packs:
    """What ranks trained on; of a step that was done twice, the later."""
    lines = [json.loads(line) for path in output.glob("packs-*.jsonl") for line in path.read_text().splitlines()]
    found: Packs = {}
    for line in lines:
        for ids, bounds, tokens, labels in line["packs"]:
            segments = [(tokens[first:stop], labels[first:stop]) for first, stop in bounds]
            found.setdefault(line["step"], {})[tuple(ids)] = segments
    return found


def masked(packs: Packs, left_out: set[int]) -> Packs:
    """The packs with padding in the place of samples."""
    return {
        step: {
            ids: [
                ([0] * len(tokens), [-100] * len(labels)) if each in left_out else (tokens, labels)
                for each, (tokens, labels) in zip(ids, segments, strict=True)
            ]
            for ids, segments in of_step.items()
        }
        for step, of_step in packs.items()
    }


def run(config: Path, output: Path, *overrides: str, nproc: int = 2) -> tuple[int, str]:
    done = run_job(nproc, JOB, str(config), f"train.output_dir={output}", *overrides, timeout_s=JOB_S)
    return done.returncode, done.stderr


def finish(config: Path, output: Path, *overrides: str, nproc: int = 2) -> None:
    status, said = run(config, output, *overrides, nproc=nproc)
    assert status == 0, last_words(said)


def write_config(folder: Path, dataset: Path) -> Path:
    settings = {
        "dataset": {
            "remote": str(dataset),
            "processor": {"type": "vision", "path": str(folder / "processor")},
            "packing_length": 256,
            "overlong": "drop",
            "num_canonical_nodes": 4,
        },
        "model": {"config": tiny_config("qwen2_5_vl", folder / "processor").to_dict()},
        "train": {
            "output_dir": str(folder / "default"),
            "global_batch": 4,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "max_steps": NUM_STEPS,
            "save_steps": 2,
            "num_workers": 2,
            "timeout_s": 120,
            "log_sample_ids": True,
            "bad_samples": {"quarantine": 100, "timeout_s": SAMPLE_TIMEOUT_S},
        },
    }
    path = folder / f"{dataset.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Bad are samples of some steps; the lengths are those of the good chats."""
    folder = tmp_path_factory.mktemp("quarantine")
    save_processor(folder / "processor", "qwen2_5_vl")
    chats = bad_chats.good_chats(NUM_SAMPLES, large=LARGE)
    bad_chats.write_chats(folder / "chats", chats)
    options = ["--processor", "vision", "--tokenizer", str(folder / "processor")]
    indexed = run_cli("index", str(folder / "chats"), *options)
    assert indexed.returncode == 0, indexed.stderr
    finish(write_config(folder, folder / "chats"), folder / "good")
    packs = packs_of(folder / "good")
    hang_step = next((step for step, of_step in packs.items() if any(LARGE in ids for ids in of_step)), None)
    assert hang_step is not None
    steps = [step for step in (1, 3, 6, 9) if step != hang_step]
    bad = [next(each for each in next(iter(sorted(packs[step]))) if each != LARGE) for step in [*steps, 11][:4]]
    for number, spoil in zip(
        bad, (bad_chats.cut_short, bad_chats.longer, bad_chats.no_image, bad_chats.flipped), strict=True
    ):
        chats[number] = spoil(chats[number])
    chats[LARGE] = bad_chats.endless(chats[LARGE])
    bad_chats.write_chats(folder / "bad", chats)
    shutil.copytree(folder / "chats" / "_lmms", folder / "bad" / "_lmms", dirs_exist_ok=True)
    return Case(write_config(folder, folder / "bad"), folder / "good", bad, LARGE, folder / "drop.txt")


@pytest.fixture(scope="module")
def dropping(case: Case) -> str:
    """The setting that drops the sample which hangs the decoder: the line is the one that the error says."""
    status, said = run(case.config, case.config.parent / "hanging")
    assert status != 0
    found = re.search(r"sample (data:\d+) takes longer than sample_timeout_s, 30 s: .* drop names: (data:\d+)", said)
    assert found is not None, last_words(said)
    assert found[1] == found[2] == f"data:{case.hanging}"
    case.drop.write_text(found[2] + "\n")
    return f"train.bad_samples.drop={case.drop}"


@pytest.fixture(scope="module")
def whole(case: Case, dropping: str) -> Path:
    """What a run on two ranks leaves that nothing interrupts."""
    output = case.config.parent / "whole"
    finish(case.config, output, dropping)
    return output


@pytest.fixture(scope="module")
def killed(case: Case, dropping: str) -> Path:
    """What a run leaves that SIGKILL ends when workers have listed samples that no checkpoint names."""
    output = case.config.parent / "killed"

    def is_due() -> bool:
        saved = checkpoints(output / "checkpoints")
        return bool(saved) and bool(listed(output) - of_checkpoint(saved[-1]))

    with start_job(2, JOB, str(case.config), f"train.output_dir={output}", dropping) as job:
        wait_until(is_due, job, limit_s=JOB_S)
        processes = job.family()
        for process in processes:
            if process.is_running():
                process.kill()
        psutil.wait_procs(processes, timeout=10)
    saved = checkpoints(output / "checkpoints")
    assert listed(output) - of_checkpoint(saved[-1])
    assert len(steps_of(output)) < NUM_STEPS
    return output


def listed(output: Path) -> set[int]:
    """What workers have listed."""
    files = (output / "left_out").glob("rank-*-worker-*.jsonl")
    return {json.loads(line)["sample_id"] for file in files for line in file.read_text().splitlines()}


def of_checkpoint(path: Path) -> set[int]:
    state: Mapping[str, Any] = json.loads((path / "trainer.json").read_text())
    return {each["sample_id"] for each in state["left_out"]}


def test_a_run_over_bad_samples_has_the_packs_of_a_good_one_but_for_their_segments(case: Case, whole: Path) -> None:
    expected = packs_of(case.good)
    assert len(expected) == NUM_STEPS
    assert packs_of(whole) == masked(expected, {*case.bad, case.hanging})
    assert listed(whole) == {*case.bad}


@pytest.mark.parametrize("nproc", [1, 4])
def test_a_killed_run_resumes_on_other_ranks_to_the_same_packs_losses_and_list(
    case: Case, dropping: str, whole: Path, killed: Path, tmp_path: Path, nproc: int
) -> None:
    output = tmp_path / "run"
    shutil.copytree(killed, output)
    finish(case.config, output, dropping, nproc=nproc)
    assert steps_of(output) == [*range(1, NUM_STEPS + 1)]
    assert packs_of(output) == masked(packs_of(case.good), {*case.bad, case.hanging})
    assert differences(whole, output, tolerance=TOLERANCE) == []
    names = [(output / "left_out.jsonl").read_text(), (whole / "left_out.jsonl").read_text()]
    lists = [{(line["sample_id"], line["kind"], line["reason"]) for line in map(json.loads, each.splitlines())}
             for each in names]  # fmt: skip
    assert lists[0] == lists[1]
    assert {sample_id for sample_id, _, _ in lists[0]} == {*case.bad, case.hanging}
    assert of_checkpoint(checkpoints(output / "checkpoints")[-1]) == {*case.bad, case.hanging}


def test_without_quarantine_a_bad_sample_ends_the_run_with_its_name(case: Case, dropping: str, tmp_path: Path) -> None:
    status, said = run(case.config, tmp_path / "run", dropping, "train.bad_samples.quarantine=0")
    assert status != 0
    assert re.search(rf"sample {case.bad[0]} of \S+: ", said), last_words(said)
