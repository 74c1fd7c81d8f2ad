"""Jobs on the CPU: gradients of micro-batches that are summed over ranks once a step, or after each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import last_words, write_samples
from tests.train.vision import build, source_of
from tests.versions import IS_5

from .accumulation_job import CASES, NUM_MICRO_BATCHES
from .divided_cases import short_samples
from .launcher import run_job
from .test_sharding import difference, tokens_and_learnt

pytestmark = pytest.mark.timeout(400)  # for the job, which has a limit of its own
NUM_GROUPS = 3  # two blocks, and the rest of the model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """By case, of each of two ranks, what each way gave."""
    folder: Path = tmp_path_factory.mktemp("accumulation")
    write_samples(folder / "text", tokens_and_learnt(), shard_bytes=1 << 12)
    write_samples(folder / "short", short_samples(3), shard_bytes=1 << 12)
    media = source_of(build("qwen2_5_vl"), "both")
    of_media = [(each["input_ids"].astype(np.int32), np.array([[0, 1]], np.int32)) for each in media]
    write_samples(folder / "media", of_media, shard_bytes=1 << 12)
    done = run_job(2, "tests.jobs.accumulation_job", str(folder), timeout_s=300)
    assert done.returncode == 0, last_words(done.stderr)
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)] for name in CASES}


@pytest.mark.parametrize("name", [name for name in CASES if name != "auto"])
def test_gradients_that_are_summed_over_ranks_once_are_those_that_are_summed_each_time(
    name: str, results: dict[str, Any]
) -> None:
    """With experts that a rank does not use, towers without a medium, adapters, frozen parameters, copies (HSDP)."""
    each_time, *once = (made["gradients"] for made in results[name][0])
    assert len(each_time) > 5
    assert [difference(made, each_time) <= 1e-6 and set(made) == set(each_time) for made in once] == [True] * len(once)


def test_a_step_of_four_micro_batches_reduce_scatters_each_block_once(results: dict[str, Any]) -> None:
    each_time, once, gathered = (made["collectives"] for made in results["text"][0])
    assert each_time["reduce_scatter"] == NUM_MICRO_BATCHES * NUM_GROUPS
    assert once["reduce_scatter"] == gathered["reduce_scatter"] == NUM_GROUPS
    assert once["all_gather"] == each_time["all_gather"] > NUM_MICRO_BATCHES * NUM_GROUPS


def test_an_embedding_and_a_head_of_their_own_are_gathered_once_for_all_chunks(results: dict[str, Any]) -> None:
    """Of three chunks at least. The embedding is not gathered for the backward pass, and the head not again."""
    each_time, once, gathered = (made["collectives"] for made in results["untied"][0])
    num_groups = NUM_GROUPS + 2
    assert each_time["reduce_scatter"] == NUM_MICRO_BATCHES * num_groups
    assert once["reduce_scatter"] == gathered["reduce_scatter"] == gathered["all_gather"] == num_groups
    assert once["all_gather"] == each_time["all_gather"] == NUM_MICRO_BATCHES * (num_groups + 2)
    assert results["untied"][0][0]["is_summed"] == [True] * NUM_MICRO_BATCHES, "before the backward passes of blocks"
    assert not any(results["text"][0][0]["is_summed"][:1])  # a tied head waits for the embedding


def test_blocks_that_stay_gathered_are_gathered_once_a_step(results: dict[str, Any]) -> None:
    """Before, the root has let go of what it gathered for the proof."""
    assert results["text"][0][2]["collectives"]["all_gather"] == NUM_GROUPS


def test_copies_of_a_model_are_summed_once_a_step_in_either_way(results: dict[str, Any]) -> None:
    for made in results["copies"][0]:
        assert made["collectives"] == {"reduce_scatter": 0, "all_reduce": NUM_GROUPS, "all_gather": 0}


def test_without_a_gpu_gradients_are_summed_after_each_micro_batch_unless_it_is_asked_for(
    results: dict[str, Any],
) -> None:
    (auto,), (each_time, *_) = results["auto"][0], results["text"][0]
    assert auto["collectives"] == each_time["collectives"]
    assert all(torch.equal(auto["gradients"][name], value) for name, value in each_time["gradients"].items())


def test_ranks_run_other_parts_of_the_models_that_are_compared(results: dict[str, Any]) -> None:
    """So that the tests above try what they say."""
    of_ranks = [made[0]["has_media"] for made in results["vision"]]
    assert any(one != other for one, other in zip(*of_ranks, strict=True))
    experts = [value for name, value in results["experts"][0][0]["gradients"].items() if ".experts." in name]
    assert len(experts) == 2 * (2 if IS_5 else 8 * 3)  # of 2 layers, all experts' in one, or each expert's
