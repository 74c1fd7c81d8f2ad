"""Ranks on nodes of unequal size read each pack once; ranks that do not agree on the packs are refused at once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.loader.agreement import Agreement
from lmms_stream.types import World

from tests.conftest import last_words, write_tokens
from tests.train.runs import write_run

from .launcher import run_job
from .runs import differences, train

JOB = "tests.jobs.agreement_job"
NUM_SAMPLES = 500


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, num_samples=NUM_SAMPLES)
    return folder


@pytest.mark.parametrize(
    ("nodes", "group", "otherwise"),
    [
        ((2, 1), "group", "nothing"),
        ((2, 1), "none", "nothing"),
        ((3, 2, 1), "group", "nothing"),
        ((2, 1), "group", "looked"),
        ((2,), "group", "glanced"),
    ],
)
def test_nodes_of_unequal_size_read_each_sample_of_an_epoch_once(
    data: Path, tmp_path: Path, nodes: Sequence[int], group: str, otherwise: str
) -> None:
    arguments = (str(data), str(tmp_path), group, otherwise)
    done = run_job(sum(nodes), JOB, *arguments, timeout_s=120, ranks_per_node=nodes)
    assert done.returncode == 0, last_words(done.stderr)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(sum(nodes))]
    seen = Counter(sample for steps, _ in ranks for packs in steps.values() for pack in packs for sample in pack)
    assert seen == Counter(range(NUM_SAMPLES))
    assert len({json.dumps(state) for _, state in ranks}) == 1


@pytest.mark.parametrize(
    ("nodes", "otherwise", "message"),
    [
        ((2,), "seed", r"ranks do not agree on the plan of 'data', which differs in the order settings \(seed, .*give"),
        ((2, 1), "batch", "ranks do not agree on global_batch: rank . has .*, rank . has .*read twice or never"),
        ((2,), "state", "ranks do not agree on cursor: .*load the same state on all ranks"),
        ((2,), "loaded", "ranks do not agree on cursor: .*load the same state on all ranks"),
        ((2, 1), "alone", "1 of 3 ranks resume from a state loaded after .* not within 2 s, .*: load"),
        ((1, 3, 2), "nothing", r"ranks do not agree on ranks_per_node: rank . has .*: give the loader of each rank"),
    ],
)
def test_ranks_that_do_not_agree_are_refused_before_their_first_batch(
    data: Path, tmp_path: Path, nodes: Sequence[int], otherwise: str, message: str
) -> None:
    arguments = (str(data), str(tmp_path), "group", otherwise)
    done = run_job(sum(nodes), JOB, *arguments, timeout_s=120, ranks_per_node=nodes)
    assert done.returncode != 0
    assert re.search(message, done.stderr), last_words(done.stderr)
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_looked_at_a_step_alone_is_found_at_the_end_of_the_epoch(data: Path, tmp_path: Path) -> None:
    done = run_job(2, JOB, str(data), str(tmp_path), "group", "peeked", timeout_s=120)
    assert done.returncode != 0
    message = (
        r"ranks do not agree on the steps where iterations began: rank . has \[.*: look at a batch on all ranks, or"
    )
    assert re.search(message, done.stderr), last_words(done.stderr)


def test_nodes_whose_sizes_nobody_knows_are_refused_where_there_is_no_process_group(data: Path, tmp_path: Path) -> None:
    done = run_job(6, JOB, str(data), str(tmp_path), "none", "nothing", timeout_s=120, ranks_per_node=(4, 1, 1))
    assert done.returncode != 0
    assert "nodes have unequal numbers of ranks" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_run_on_two_nodes_of_unequal_size_trains_on_the_packs_of_one_rank(data: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path / "run.yaml", data, max_steps=3, log_sample_ids=True, global_batch=6)
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
