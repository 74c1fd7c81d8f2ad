"""Ranks on nodes of unequal size read each pack once; ranks that do not agree on the packs are refused at once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.loader.agreement import Agreement
from lmms_stream.types import World

from tests.conftest import last_words, write_tokens
from tests.train.runs import write_run

from .launcher import run_job
from .runs import differences, train, with_one_layer

NUM_SAMPLES = 500
READ: dict[str, dict[str, Any]] = {
    "two-nodes": {"nodes": (2, 1), "group": "group", "otherwise": "nothing"},
    "no-group": {"nodes": (2, 1), "group": "none", "otherwise": "nothing"},
    "three-nodes": {"nodes": (3, 2, 1), "group": "group", "otherwise": "nothing"},
    "looked": {"nodes": (2, 1), "group": "group", "otherwise": "looked"},
    "glanced": {"nodes": (2,), "group": "group", "otherwise": "glanced"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    name: ({"nodes": nodes, "group": group, "otherwise": otherwise}, message)
    for name, nodes, group, otherwise, message in (
        ("seed", (2,), "group", "seed",
         r"ranks do not agree on the plan of 'data', which differs in the order settings \(seed, .*give"),
        ("batch", (2, 1), "group", "batch",
         "ranks do not agree on global_batch: rank . has .*, rank . has .*read twice or never"),
        ("state", (2,), "group", "state", "ranks do not agree on cursor: .*load the same state on all ranks"),
        ("loaded", (2,), "group", "loaded", "ranks do not agree on cursor: .*load the same state on all ranks"),
        ("alone", (2, 1), "group", "alone",
         "1 of 3 ranks resume from a state loaded after .* not within 2 s, .*: load"),
        ("nodes", (1, 3, 2), "group", "nothing",
         r"ranks do not agree on ranks_per_node: rank . has .*: give the loader of each rank"),
        ("nobody-knows", (4, 1, 1), "none", "nothing", "nodes have unequal numbers of ranks"),
    )
}  # fmt: skip
PEEKED = {"nodes": (2,), "group": "group", "otherwise": "peeked"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=NUM_SAMPLES)
    return folder


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank read, or its error: all cases run on one set of ranks."""
    cases = {**READ, **{name: case for name, (case, _) in REFUSED.items()}, "peeked": PEEKED}
    job = tmp_path_factory.mktemp("agreement") / "job.json"
    job.write_text(json.dumps(cases))
    done = run_job(6, "tests.jobs.agreement_job", str(data), str(job), timeout_s=250)
    assert done.returncode == 0, last_words(done.stderr)
    return {
        name: [json.loads((job.parent / f"{name}-{rank}.json").read_text()) for rank in range(sum(case["nodes"]))]
        for name, case in cases.items()
    }


@pytest.mark.parametrize("name", READ)
def test_nodes_of_unequal_size_read_each_sample_of_an_epoch_once(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert [rank.get("error") for rank in results[name]] == [None] * sum(READ[name]["nodes"])
    samples = Counter(
        sample for rank in results[name] for packs in rank["steps"].values() for pack in packs for sample in pack
    )
    assert samples == Counter(range(NUM_SAMPLES))
    assert len({json.dumps(rank["state"]) for rank in results[name]}) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_do_not_agree_are_refused_before_their_first_batch(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """The ranks whose settings are those of the first rank wait for the others, which have ended."""
    errors = [rank["error"] for rank in results[name]]
    assert re.search(f"ConfigError: .*{REFUSED[name][1]}", "\n".join(errors))


def test_a_rank_that_looked_at_a_step_alone_is_found_at_the_end_of_the_epoch(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    message = (
        r"ranks do not agree on the steps where iterations began: rank . has \[.*: look at a batch on all ranks, or"
    )
    assert re.search(message, "\n".join(rank.get("error", "") for rank in results["peeked"]))


def test_a_run_on_two_nodes_of_unequal_size_trains_on_the_packs_of_one_rank(data: Path, tmp_path: Path) -> None:
    config = with_one_layer(write_run(tmp_path / "run.yaml", data, max_steps=3, log_sample_ids=True, global_batch=6))
    train(config, tmp_path / "one", nproc=1)
    done = run_job(
        3, "lmms_stream.train", str(config), f"train.output_dir={tmp_path / 'uneven'}", timeout_s=200,
        ranks_per_node=(2, 1),
    )  # fmt: skip
    assert done.returncode == 0, last_words(done.stderr)
    assert differences(tmp_path / "one", tmp_path / "uneven", tolerance=1e-4) == []


def test_versions_that_differ_are_named_with_their_ranks() -> None:
    def gather(mine: object) -> list[object]:
        assert isinstance(mine, dict)
        return [mine, mine, mine | {"lmms_stream": "0.0.9"}]

    with pytest.raises(ConfigError, match=r'on lmms_stream: rank 0 has .*rank 2 has "0.0.9".*install one version on'):
        Agreement().gather({}, World(world_size=3), gather)
