"""Jobs on the CPU: runs on rows of every dataset_type, killed and resumed, against runs that never were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.config import load_mapping
from lmms_stream.doors.lmms_engine.datasets.names import TYPES as ALL_TYPES
from lmms_stream.tools.demo.jobs import read_run
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import CONFIG_MAPPING

from tests.conftest import last_words
from tests.rounds import in_long_rounds

from .launcher import run_job, start_job
from .runs import JOB_S, MODULE, differences, last_step, steps_of, wait_until
from .torchrun import kill
from .typed_runs import STEPS, TYPES, write_run

pytestmark = [
    pytest.mark.timeout(800),  # for the jobs, of which each has a limit of its own
    pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets"),
]
TYPED = "tests.jobs.typed_job"  # which also holds runs, and builds what no file names
HELD_AT = 3
OTHER_WORLD = 1e-3  # sums of gradients are of other parts
OF_IMAGES = 1e-5  # whose losses are means of few
CASES = [
    (dataset_type, family)
    for name, families in TYPES.items()
    for dataset_type in (name, f"{name}_iterable")
    for family in families
]


def run(config: Path, output: Path, *overrides: str, nproc: int = 2) -> str:
    """To the end, which is a good one; what it says on standard error."""
    model = load_mapping(config, []).get("model")
    module = MODULE if model is not None and model["config"].get("model_type") != "smolvlm" else TYPED
    done = run_job(nproc, module, str(config), f"train.output_dir={output}", *overrides, timeout_s=JOB_S)
    assert done.returncode == 0, last_words(done.stderr)
    return done.stderr


def kill_held(config: Path, output: Path) -> None:
    """SIGKILL to the ranks and workers of a run of two processes that has done HELD_AT steps."""
    with start_job(2, TYPED, str(config), f"train.output_dir={output}", f"held_at={HELD_AT}") as job:
        wait_until(lambda: len([*output.glob("held-*")]) == 2, job)
        kill(job.family())
    assert last_step(output) <= HELD_AT < STEPS
    assert checkpoints(output / "checkpoints") != []


def tensors(output: Path, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, by their names: weights, what the optimizer keeps, and the average."""
    dcp_to_torch_save(str(output / "checkpoints" / f"step-{STEPS:08d}"), str(folder / "tensors.pt"))

    def flat(values: Any, name: str) -> dict[str, torch.Tensor]:
        if isinstance(values, dict):
            named = [flat(value, f"{name}.{inner}") for inner, value in values.items()]
            return {key: each for part in named for key, each in part.items()}
        return {name: values} if isinstance(values, torch.Tensor) else {}

    return flat(torch.load(folder / "tensors.pt", weights_only=True), "")


def same_samples(whole: Path, other: Path, *, tolerance: float) -> bool:
    """Whether each step of two runs read the same samples, in whatever order, to the same losses."""
    one, two = (read_run(each, name="", tolerance=0).records for each in (whole, other))
    assert one.keys() == two.keys()
    return all(
        sorted(record["sample_ids"]) == sorted(two[step]["sample_ids"])
        and record["loss"] == pytest.approx(two[step]["loss"], abs=tolerance)
        for step, record in one.items()
    )


def test_every_dataset_type_is_among_the_cases() -> None:
    assert {dataset_type for dataset_type, _ in CASES} == {*ALL_TYPES}


@in_long_rounds
@pytest.mark.parametrize(("dataset_type", "family"), CASES)
def test_a_killed_run_of_each_type_goes_on_bit_by_bit_and_with_one_process_on_the_same_samples(
    dataset_type: str, family: str, tmp_path: Path
) -> None:
    if family == "qwen3_5" and family not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Qwen3.5")
    config = write_run(tmp_path, dataset_type, family)
    whole, killed, alone = (tmp_path / name for name in ("whole", "killed", "alone"))
    said = run(config, whole)
    kill_held(config, killed)
    shutil.copytree(killed, alone)
    run(config, killed)
    run(config, alone, "train.num_workers=2", nproc=1)  # as many readers
    assert steps_of(whole) == steps_of(killed) == steps_of(alone) == [*range(1, STEPS + 1)]
    assert differences(whole, killed) == []
    of_whole, of_killed = (tensors(output, tmp_path) for output in (whole, killed))
    assert of_whole.keys() == of_killed.keys()
    assert [name for name, each in of_whole.items() if not torch.equal(each, of_killed[name])] == []
    tolerance = OTHER_WORLD if family else OF_IMAGES
    if ALL_TYPES[dataset_type].is_iterable:
        assert same_samples(whole, alone, tolerance=tolerance)
    else:
        assert differences(whole, alone, tolerance=tolerance) == []
    check_of_type(dataset_type, family, records=read_log(whole), names={*of_whole}, said=said)


def check_of_type(dataset_type: str, family: str, *, records: list[dict[str, Any]], names: set[str], said: str) -> None:
    """What is true of one type alone."""
    sections = {name.split(".")[1] for name in names}
    if dataset_type.startswith(("sit", "rae")):
        assert sections == {"model", "optimizer", "average"}
    else:
        assert sections == {"model", "optimizer"}
        assert all(record["loss"] > 0 for record in records)
    if dataset_type.startswith("rae"):
        assert any("discriminator" in name for name in names)
        first, *_, last = records
        assert first["loss/discriminator"] == first["loss/generator"] == 0  # their steps come later
        assert last["loss/discriminator"] > 0
    if family == "qwen2_audio":
        assert "attention: sdpa" in said
    elif "omni" in family or family.endswith("_vl"):
        assert "attention: sdpa_varlen" in said
