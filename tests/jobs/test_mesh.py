"""Jobs on the CPU: which ranks share a copy of the model, the tokens of a pack, its matrices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import last_words

from .launcher import run_job
from .mesh_job import CASES, TIMEOUT_S


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each of 4 ranks, its groups by case."""
    folder = tmp_path_factory.mktemp("mesh")
    done = run_job(4, "tests.jobs.mesh_job", str(folder), timeout_s=100)
    assert done.returncode == 0, last_words(done.stderr)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.timeout(120)
def test_ranks_are_laid_out_by_copy_shard_sequence_and_tensor_parallel(made: list[dict[str, Any]]) -> None:
    every = [0, 1, 2, 3]
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    strided = [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {name: [of[name].get("fsdp") for of in made] for name in CASES if "fsdp" in made[0][name]} == {
        "one": [[every, ["shard"]]] * 4,
        "copies": [[[[0], [1], [2], [3]], ["copy", "shard"]]] * 4,
        "pairs": [[[[0, 1], [2, 3]], ["copy", "shard"]]] * 4,
        "tp": [[ranks, ["shard"]] for ranks in strided],
        "tp copies": [[[[ranks[0]], [ranks[1]]], ["copy", "shard"]] for ranks in strided],
        "sp": [[every, ["shard"]]] * 4,
        "sp copies": [[[[0, 1], [2, 3]], ["copy", "shard"]]] * 4,
        "sp tp": [[ranks, ["shard"]] for ranks in strided],
        "ep": [[every, ["shard"]]] * 4,
        "ep copies": [[[[0, 1], [2, 3]], ["copy", "shard"]]] * 4,
        "sp ep": [[every, ["shard"]]] * 4,
    }
    found = {name: [of[name]["tp"] for of in made] for name in CASES if "tp" in made[0][name]}
    assert found == {name: [[ranks, ["tp"]] for ranks in pairs] for name in ("tp", "tp copies", "sp tp")}
    found = {name: [of[name]["sp"] for of in made] for name in CASES if "sp" in made[0][name]}
    assert found == {
        "sp": [[ranks, ["sp"]] for ranks in pairs],
        "sp copies": [[ranks, ["sp"]] for ranks in pairs],
        "sp tp": [[ranks, ["sp"]] for ranks in strided],
        "sp ep": [[ranks, ["sp"]] for ranks in pairs],
    }
    groups = {name: [of[name]["group"] for of in made] for name in ("one", "tp", "sp", "sp tp", "ep")}
    assert groups == {
        "one": every,
        "tp": [0, 0, 1, 1],
        "sp": [0, 0, 1, 1],
        "sp tp": [0, 0, 0, 0],
        "ep": every,
    }


def test_ranks_with_different_experts_lie_side_by_side_and_share_them_with_others(made: list[dict[str, Any]]) -> None:
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    strided = [[0, 2], [1, 3], [0, 2], [1, 3]]
    every = [0, 1, 2, 3]
    assert {name: [of[name]["ep"] for of in made] for name in CASES if "ep" in made[0][name]} == {
        "ep": [[ranks, ["ep"]] for ranks in pairs],
        "ep copies": [[ranks, ["ep"]] for ranks in pairs],
        "sp ep": [[every, ["ep"]]] * 4,
    }
    assert {name: [of[name]["experts"] for of in made] for name in CASES if "experts" in made[0][name]} == {
        "ep": [[ranks, ["shard"]] for ranks in strided],
        "ep copies": [[[[ranks[0]], [ranks[1]]], ["copy", "shard"]] for ranks in strided],
        "sp ep": [[[rank], ["shard"]] for rank in every],
    }


def test_every_group_of_a_mesh_waits_as_long_as_the_run_says(made: list[dict[str, Any]]) -> None:
    timeouts = {name: [of[name]["timeouts"] for of in made] for name in CASES if isinstance(made[0][name], dict)}
    assert timeouts == dict.fromkeys(timeouts, [[TIMEOUT_S]] * 4)


def test_degrees_that_do_not_divide_the_ranks_are_refused_by_name(made: list[dict[str, Any]]) -> None:
    errors = {name: found for name, found in made[0].items() if isinstance(found, str)}
    assert errors == {
        "tp 3": "train.tensor_parallel 3 does not divide the world size 4: choose a divisor",
        "sp 3": "train.sequence_parallel 3 does not divide the world size 4: choose a divisor",
        "sp 4 tp 2": (
            "train.sequence_parallel 4 does not divide the world size 4 by tensor_parallel 2: choose a divisor"
        ),
        "sp 2 shards 1": (
            "train.shard_ranks 1 is not a multiple of sequence_parallel 2, whose ranks share a copy of the "
            "model: choose a multiple of 2"
        ),
        "ep 3": (
            "train.expert_parallel 3 does not divide the 4 ranks that share one copy of the model: choose a divisor"
        ),
        "ep shards": (
            "train.expert_parallel 4 does not divide the 2 ranks that share one copy of the model: choose a divisor"
        ),
        "tp 2 shards 4": "train.shard_ranks 4 does not divide the world size 4 by tensor_parallel 2: choose a divisor",
    }


def test_gradients_of_several_meshes_are_clipped_together_and_of_one_as_torch_clips_them(
    made: list[dict[str, Any]],
) -> None:
    for of in made:
        found = of["tp"]["clipped"]
        assert found == made[0]["tp"]["clipped"]
        assert found["one"][0] == found["one"][1]  # to the bit
        assert found["one"][0] > 3.0
        assert found["gradients"][:2] == [0.0, 0.0]
        assert found["several"][0] == pytest.approx(found["several"][1], rel=1e-6)
        assert max(found["gradients"]) < 1e-6
        assert found["none"] == 0.0
