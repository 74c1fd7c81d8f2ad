"""What users report of MosaicML's StreamingDataset on shared nodes, after kills and under limits, tried with ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmms_stream import MDSWriter, StreamingDataLoader, StreamingDataset

from ..processes import Job, start_module
from ..proxy import FaultProxy
from .reading import MARKS, upload, wait_until
from .test_shared_node import leftovers_in_shared_memory

pytestmark = MARKS

NUM_SAMPLES = 64
NAMES = ("train", "eval")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    for name in NAMES:
        write_numbers(root / name, compression="zstd")
    return root


def write_numbers(folder: Path, *, num_samples: int = NUM_SAMPLES, compression: str | None = None) -> Path:
    """Shards of one size and without checksums, which only their samples tell from each other."""
    with MDSWriter(columns={"number": "int"}, out=str(folder), size_limit=230, compression=compression) as writer:
        for number in range(num_samples):
            writer.write({"number": number})
    return folder


@contextmanager
def ranks(data: Path, locals_: Sequence[Path], answers: Path, *more: str, jobs: Sequence[str]) -> Iterator[Job]:
    """Two ranks of each job, all at the same time; torch's process group is not begun."""
    answers.mkdir(exist_ok=True)
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    additions = [sizes | {"JOB": job, "RANK": rank, "LOCAL_RANK": rank} for job in jobs for rank in "01"]
    arguments = [str(data), *map(str, locals_), str(answers), *more]
    with start_module("tests.mds.two_datasets_job", arguments, additions) as job:
        yield job


def assert_all_is_read(job: Job, answers: Path, *, jobs: Sequence[str]) -> None:
    """Each sample came to one rank of each job."""
    done = job.complete(60)
    assert done.returncode == 0, done.stderr
    for name in jobs:
        ranks = [json.loads((answers / f"{name}-{rank}.json").read_text()) for rank in "01"]
        for one, other in zip(*ranks, strict=True):
            assert sorted(one + other) == list(range(NUM_SAMPLES))


def test_two_jobs_of_a_node_read_at_the_same_time_with_the_same_local_and_with_others(
    data: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "train", tmp_path / "eval-JOB"]
    with ranks(data, folders, tmp_path / "answers", jobs=["one", "two"]) as job:
        assert_all_is_read(job, tmp_path / "answers", jobs=["one", "two"])


def test_a_job_whose_processes_were_killed_begins_again_with_the_same_local(data: Path, tmp_path: Path) -> None:
    folders, answers = [tmp_path / name for name in NAMES], tmp_path / "answers"
    with ranks(data, folders, answers, "wait", jobs=["job"]):  # SIGKILL to ranks and workers at the end
        wait_until(lambda: len(list(answers.glob("*.json"))) == 2)
    with leftovers_in_shared_memory(), ranks(data, folders, answers, jobs=["job"]) as job:
        assert_all_is_read(job, answers, jobs=["job"])


def test_forked_workers_get_their_own_shards_over_plain_http_and_none_twice_under_a_limit(
    s3_folder: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    remote = upload(write_numbers(tmp_path / "made", num_samples=2 * NUM_SAMPLES), s3_folder)
    assert os.environ["S3_ENDPOINT_URL"].startswith("http://")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "made").glob("*.mds")}
    limit = sum(sizes.values()) // 2  # twice what the workers read at a time
    dataset = StreamingDataset(
        remote=remote, local=str(tmp_path / "local"), batch_size=4, shuffle=True, num_canonical_nodes=1,
        shuffle_block_size=8, predownload=8, cache_limit=limit,
    )  # fmt: skip
    loader = StreamingDataLoader(
        dataset, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork", timeout=60
    )
    assert sorted(sample["number"] for batch in loader for sample in batch) == list(range(2 * NUM_SAMPLES))
    assert sum(path.stat().st_size for path in (tmp_path / "local").glob("*.mds")) <= limit
    assert {name: proxy.traffic().num_requests("GET", name) for name in sizes} == dict.fromkeys(sizes, 1)
