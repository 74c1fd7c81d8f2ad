"""A run by each trainer is killed, resumes on other ranks, and gives the samples and losses of the plain loop."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil
import pytest
import torch
from lmms_stream import PackedLoader, World
from lmms_stream.doors.huggingface.packs import TrainerWithPacks
from lmms_stream.errors import ConfigError, CursorError
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from tests.conftest import last_words, write_tokens
from tests.jobs.launcher import start_job
from tests.jobs.runs import wait_until
from tests.processes import Job, start_module
from tests.rounds import LONG
from tests.train.runs import MODEL

from .programs import make_model, open_loader

MODULE = "tests.trainers.programs"
NUM_STEPS = 6
KILL_AT, HELD_AT = 2, NUM_STEPS - 2
JOB_S = 150.0
KINDS = ["plain", "padded", "trainer", "accelerate", "lightning", "ray"] if LONG else ["plain", "trainer"]
if find_spec("torchtitan"):  # make test-torchtitan
    KINDS = ["torchtitan"]
CHANGES = [(2, 1), (1, 2)] if LONG else [(2, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset and a model, and a run of the plain loop on one rank that was never interrupted."""
    made = tmp_path_factory.mktemp("trainers")
    write_tokens(made / "data", num_samples=480)
    torch.manual_seed(0)
    fields = MODEL | {"num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(made / "model")
    run(made, "plain", "whole", nproc=1)
    return made


def run(folder: Path, kind: str, output: str, *, nproc: int) -> None:
    with start(folder, kind, output, nproc=nproc) as job:
        done = job.complete(JOB_S)
    assert done.returncode == 0, last_words(done.stderr)


def run_and_kill(folder: Path, kind: str, output: str, *, nproc: int) -> None:
    """SIGKILL after some steps. The run stands still before its last step, so that a late kill finds it."""
    with start(folder, kind, output, str(HELD_AT), nproc=nproc) as job:
        wait_until(lambda: len(losses_of(folder / output)) > KILL_AT, job, limit_s=JOB_S)
        processes = job.family()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)


def start(folder: Path, kind: str, output: str, *held_at: str, nproc: int) -> AbstractContextManager[Job]:
    arguments = (kind, str(folder), str(NUM_STEPS), output, *held_at)
    if kind != "ray":
        return start_job(nproc, MODULE, *arguments)
    ray = {"RAY_AUTH_TOKEN": token_hex(16), "RAY_USAGE_STATS_ENABLED": "0", "NPROC": str(nproc)}
    return start_module(MODULE, arguments, [ray | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}])


def losses_of(output: Path) -> dict[int, float]:
    """Of each step, in the run that did it last."""
    path = output / "losses.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("]"))


def samples_of(output: Path) -> dict[int, list[tuple[int, ...]]]:
    """The packs of each step, of all ranks, as the run read them that did the step last."""
    packs: dict[int, set[tuple[int, ...]]] = {}
    for path in output.glob("ids-*.jsonl"):
        for line in path.read_text().splitlines():
            step, ids = json.loads(line)
            packs.setdefault(step, set()).add(tuple(ids))
    return {step: sorted(of_step) for step, of_step in packs.items()}


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_resumes_on_other_ranks_to_the_samples_and_losses_of_the_plain_loop(
    kind: str, before: int, after: int, folder: Path
) -> None:
    output = f"{kind}-{before}-{after}"
    run_and_kill(folder, kind, output, nproc=before)
    assert KILL_AT < len(losses_of(folder / output)) < NUM_STEPS
    run(folder, kind, output, nproc=after)
    whole, resumed = losses_of(folder / "whole"), losses_of(folder / output)
    assert sorted(resumed) == list(range(NUM_STEPS))
    assert max(abs(whole[step] - loss) for step, loss in resumed.items()) < 1e-4
    assert max(whole.values()) - min(whole.values()) > 1e-2  # steps differ by more
    assert samples_of(folder / output) == samples_of(folder / "whole")
    if kind == "trainer":
        checkpoints = folder / output / "checkpoints"
        state = json.loads((checkpoints / f"checkpoint-{NUM_STEPS}" / "trainer_state.json").read_text())
        epochs = [record["epoch"] for record in state["log_history"] if "loss" in record]
        loader = open_loader(folder, folder / output)
        share = loader.global_batch / (loader.packs_left or 0)  # of an epoch, in a step
        assert epochs == pytest.approx([step * share for step in range(1, NUM_STEPS + 1)])


def test_settings_that_would_train_on_other_packs_or_losses_are_refused(folder: Path, tmp_path: Path) -> None:
    def check(*, world: World | None = None, packs: PackedLoader | None = None, **arguments: Any) -> str:
        args = TrainingArguments(str(tmp_path), use_cpu=True, **{"max_steps": 3} | arguments)
        loader = packs or open_loader(folder, tmp_path, world=world or World())
        with pytest.raises(ConfigError) as raised:
            TrainerWithPacks(make_model(folder), args, packs=loader).get_train_dataloader()
        return str(raised.value)

    assert "set it to 4, global_batch 4 over 1 ranks" in check(gradient_accumulation_steps=2)
    assert "needs max_steps: for n epochs set it to loader.steps_to_epoch(n)" in check(
        gradient_accumulation_steps=4, max_steps=-1
    )
    assert "shares packs among 2 ranks, and the trainer has 1" in check(world=World(world_size=2))


def test_a_loaders_steps_are_saved_only_where_a_trainer_knows_their_number(folder: Path, tmp_path: Path) -> None:
    loader = open_loader(folder, tmp_path)
    with pytest.raises(ConfigError, match=r"write loader\.steps\(until=…\)"):
        loader.steps().state_dict()
    steps = loader.steps(until=50)
    assert len(steps) == 50
    made = list(steps)
    assert [loader.step, len(made)] == [50, 50]  # over several epochs
    assert loader.cursor.sources["data"].epoch > 0
    again = open_loader(folder, tmp_path).steps(until=50)
    again.load_state_dict(steps.state_dict())
    assert list(again) == []


def test_a_loader_of_several_ranks_needs_their_process_group(folder: Path, tmp_path: Path) -> None:
    loader = open_loader(folder, tmp_path, world=World(world_size=2))
    with pytest.raises(ConfigError, match=r"is one of 2 ranks, .*: call torch\.distributed\.init_process_group first"):
        next(iter(loader.steps()))


def test_an_entry_of_a_dcp_checkpoint_has_one_name_whatever_the_sources(folder: Path, tmp_path: Path) -> None:
    loader = open_loader(folder, tmp_path)
    for _ in loader.steps(until=2):
        pass
    saved = loader.stateful().state_dict()
    assert list(saved) == ["cursor"]
    again = open_loader(folder, tmp_path)
    again.stateful().load_state_dict(saved)
    assert again.state_dict() == loader.state_dict()
    for damaged in ({}, {"cursor": 3}, {"cursor": "{"}):
        with pytest.raises(CursorError, match=r"the saved state is damaged \(.*\): use another checkpoint"):
            again.stateful().load_state_dict(damaged)
