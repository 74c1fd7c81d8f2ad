"""Recipes of examples/deploy: their commands run as Kubernetes, SLURM and Ray would run them, on nodes of this machine.

A recipe is edited as its comments say: fewer parts and nodes, another bucket, tokenizer and model.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.config import load_config
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus
from lmms_stream.train.run.distributed import STOPPED_STATUS
from lmms_stream.train.run_config import RunConfig

from ..cluster.machines import TEMPORARY, Machines, machines
from ..cluster.namespaces import what_is_missing
from ..cluster.ray_cluster import node_command
from ..conftest import S3_BUCKET, last_words, write_tokens
from ..jobs.runs import differences, last_step, train
from ..processes import ROOT, run_module, start_module
from ..rounds import LONG, in_long_rounds
from ..train.runs import MODEL

MISSING = what_is_missing() if LONG else None
on_nodes = pytest.mark.skipif(not LONG or MISSING is not None, reason=MISSING or "it takes long: make test-long")

RECIPES = ROOT / "examples" / "deploy"
BUCKET, TOKENIZER, RUN = "s3://bucket", "Qwen/Qwen3-0.6B", "/config/run.yaml"
LIMIT_S = 300.0
SCRIPTS = sorted(path.name for path in RECIPES.glob("*.sh"))
SRUN = '#!/bin/sh\nprintf "%s\\n" "$@" > srun.txt\nexit $STATUS\n'
SCONTROL = '#!/bin/sh\nif [ "$1" = show ]; then echo node0; echo node1; else echo "$@" > requeued.txt; fi\n'


def recipe(name: str, edits: Mapping[str, str] | None = None) -> str:
    """The text of a recipe with some words replaced; each of them is there."""
    text = (RECIPES / name).read_text()
    for word, other in (edits or {}).items():
        assert word in text
        text = text.replace(word, other)
    return text


def objects(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects of a manifest by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def container(job: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return dict(found)


def expanded(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """Arguments as Kubernetes passes them: $(NAME) is the value of a variable of the container."""
    for name, value in environment.items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    return arguments


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_one_of_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True, timeout=LIMIT_S)


def test_numbers_and_names_of_the_manifests_fit_each_other() -> None:
    parts = objects(recipe("kubernetes_convert.yaml"))["Job", "convert-parts"]["spec"]
    assert parts["completions"] == int(container({"spec": parts})["args"][-1].partition("/")[2])
    found = objects(recipe("kubernetes_train.yaml"))
    service, job = found["Service", "chat"]["spec"], found["Job", "chat"]["spec"]
    assert service["selector"] == {"job-name": "chat"}
    pod, of_train = job["template"]["spec"], container(found["Job", "chat"])
    words = shlex.split(of_train["args"][0])
    value = dict(pairwise(words))
    assert (job["completions"], job["parallelism"]) == (int(value["--nnodes"]),) * 2
    assert of_train["resources"]["limits"]["nvidia.com/gpu"] == value["--nproc-per-node"]
    assert value["--rdzv-endpoint"].startswith(f"chat-0.{pod['subdomain']}:")
    assert [rule.get("onExitCodes", {}).get("values") for rule in job["podFailurePolicy"]["rules"]] == [
        None, [STOPPED_STATUS],
    ]  # fmt: skip
    limits = {each["name"]: each.get("value") for each in of_train["env"]}
    assert int(str(limits["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])) < pod["terminationGracePeriodSeconds"]
    assert {each["name"] for each in of_train["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    run = load_config(RunConfig, RECIPES / "run.yaml")
    assert run.train.global_batch % (job["completions"] * int(value["--nproc-per-node"])) == 0
    sizes = re.search(r"^NODES, GPUS = (\d+), (\d+)$", recipe("ray_train.py"), re.MULTILINE)
    assert sizes is not None
    assert sizes.groups() == (value["--nnodes"], value["--nproc-per-node"])
    assert f"TorchConfig(timeout_s={run.train.timeout_s:g})" in recipe("ray_train.py")
    compile(recipe("ray_train.py"), "ray_train.py", "exec")


def test_pods_convert_parts_side_by_side_and_one_pod_writes_the_dataset(
    request: pytest.FixtureRequest, tmp_path: Path, corpus: Corpus, tokenizer: Path
) -> None:
    """With a folder in place of the bucket in short rounds, for which commands need less CPU time."""
    store = request.getfixturevalue("s3_folder") if LONG else str(tmp_path)
    upload_rows(corpus, store)
    edits = {BUCKET: store, TOKENIZER: str(tokenizer), "/16": "/2"}
    found = objects(recipe("kubernetes_convert.yaml", edits))
    arguments = [container(found["Job", f"convert-{name}"])["args"] for name in ("parts", "dataset")]
    with ExitStack() as stack:
        pods = [
            stack.enter_context(start_module("lmms_stream", expanded(arguments[0], variables), [variables]))
            for variables in ({"JOB_COMPLETION_INDEX": str(number)} for number in range(2))
        ]
        for pod in pods:
            assert pod.wait(LIMIT_S) == 0, last_words(pod.stderr.read_text())
    assert len(encoded_units(store)) == 2
    done = run_module("lmms_stream", *arguments[1], timeout_s=LIMIT_S)
    assert done.returncode == 0, last_words(done.stderr)
    assert num_samples(store) == corpus.num_functions
    assert not encoded_units(store)


def upload_rows(corpus: Corpus, store: str) -> None:
    """Two sources, one for each part."""
    lines = corpus.functions.read_bytes().splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            path = Path(folder, f"{number}.jsonl")
            path.write_bytes(b"".join(lines[number::2]))
            open_storage(store).upload(path, f"rows/{path.name}")


def encoded_units(store: str) -> set[str]:
    """Files of the samples of units, one of each source, that parts have left in the target."""
    found = open_storage(f"{store}/chats").list_objects("_lmms/encoded/")
    return {Path(each.key).name for each in found if each.key.endswith(".samples")}


def num_samples(store: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        open_storage(f"{store}/chats").download("index.json", Path(folder, "index.json"))
        return sum(shard["samples"] for shard in json.loads(Path(folder, "index.json").read_text())["shards"])


@in_long_rounds
@pytest.mark.parametrize("name", ["slurm_convert.sh", "ray_convert.sh"])
def test_scripts_convert(name: str, s3_folder: str, corpus: Corpus, tokenizer: Path, tmp_path: Path) -> None:
    """`ray job submit` is a program that runs the command after `--`, and Ray of this machine does the work."""
    upload_rows(corpus, s3_folder)
    edits = {BUCKET: s3_folder, TOKENIZER: str(tokenizer)}
    edits |= {"/16": "/2"} if name.startswith("slurm") else {"--ray-address auto": "--workers 1"}
    script = tmp_path / name
    script.write_text(recipe(name, edits))
    program(tmp_path / "ray", '#!/bin/sh\nshift 3\nexec "$@"\n')
    starts = [["0"], ["1"], ["0", "dataset"]] if name.startswith("slurm") else [["0"]]
    for number, *arguments in starts:
        run_script(script, *arguments, folder=tmp_path, SLURM_ARRAY_TASK_ID=number, RAY_USAGE_STATS_ENABLED="0")
    assert num_samples(s3_folder) == corpus.num_functions


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run_script(script: Path, *arguments: str, folder: Path, status: int = 0, **variables: str) -> None:
    """Run a script with the programs of a folder in its PATH."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script), *arguments], cwd=folder, env={**os.environ, **variables, "PATH": path},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == status, last_words(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder, num_samples=400)
    return folder


def write_recipe_run(path: Path, edits: Mapping[str, str]) -> Path:
    """The recipe's run of a tiny model on tokens, on a CPU."""
    settings = yaml.safe_load(recipe("run.yaml", edits))
    settings["dataset"] |= {"processor": {"type": "tokens"}, "packing_length": 256, "num_canonical_nodes": 4}
    settings["model"] = {"config": MODEL}
    settings["train"] |= {"global_batch": 8, "num_train_epochs": 4, "save_steps": 5, "num_workers": 0}
    settings["train"] |= {"timeout_s": 60, "log_sample_ids": True}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the run on one machine, never interrupted, which deals packs as to two nodes."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_recipe_run(folder / "run.yaml", {f"{BUCKET}/chats": str(dataset), BUCKET: str(folder / "store")})
    train(config, folder / "out", f"dataset.local={folder / 'cache'}", num_nodes=2)
    return folder / "out"


@pytest.fixture
def cluster(dataset: Path, tmp_path: Path) -> Iterator[Machines]:
    """Two nodes on links that are slow enough for runs to be interrupted, with the dataset in their store."""
    with machines(2, tmp_path, rate="8mbit") as made:
        made.upload(dataset, f"s3://{S3_BUCKET}/chats")
        write_recipe_run(tmp_path / "run.yaml", {BUCKET: f"s3://{S3_BUCKET}", "/scratch": str(made.disk)})
        yield made


def outputs(cluster: Machines) -> list[Path]:
    return [cluster.disk_of(number) / "run" for number in range(2)]


def start_pod(cluster: Machines, number: int) -> subprocess.Popen[bytes]:
    """A pod of the job, with empty volumes."""
    shutil.rmtree(cluster.disk_of(number), ignore_errors=True)
    edits = {"--nnodes 4": "--nnodes 2", "--nproc-per-node 8": "--nproc-per-node 1", "chat-0.chat": "node0"}
    edits |= {RUN: str(cluster.folder / "run.yaml")}
    (job,) = (each for each in objects(recipe("kubernetes_train.yaml", edits)).values() if each["kind"] == "Job")
    variables = {each["name"]: each["value"] for each in container(job)["env"] if "value" in each}
    variables |= {"JOB_COMPLETION_INDEX": str(number), "POD_IP": cluster.network.nodes[number].address}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [*container(job)["command"], *container(job)["args"]]
    return cluster.start(number, command, {**variables, "PATH": path})


@on_nodes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("victim", "told"), [(1, signal.SIGTERM), (0, signal.SIGTERM), (0, signal.SIGKILL)])
def test_a_run_of_kubernetes_resumes_when_a_pod_is_lost(
    cluster: Machines, whole: Path, victim: int, told: signal.Signals
) -> None:
    """A pod that ended is started again with empty volumes, by the rules of the job: until each has ended well."""
    pods = {number: start_pod(cluster, number) for number in range(2)}
    cluster.wait_until(lambda: max(map(last_step, outputs(cluster))) >= 10, limit_s=LIMIT_S)
    if told == signal.SIGKILL:
        cluster.kill(victim)  # all of the pod
    else:
        pods[victim].send_signal(told)
    lost: list[tuple[int, int]] = []
    deadline = time.monotonic() + LIMIT_S
    while any(pod.poll() != 0 for pod in pods.values()):
        assert time.monotonic() < deadline, cluster.said()
        for number in [number for number, pod in pods.items() if pod.poll()]:
            lost.append((number, pods[number].wait()))
            pods[number] = start_pod(cluster, number)
        time.sleep(0.1)
    cluster.running.clear()
    assert victim in {number for number, _ in lost}
    assert len(lost) <= 4, lost
    assert "resumed from step " in cluster.log_of(0) + cluster.log_of(1)
    assert differences(whole, max(outputs(cluster), key=last_step)) == []


@on_nodes
@pytest.mark.timeout(1800)
def test_a_run_of_slurm_saves_before_its_time_is_up_and_is_queued_again(
    cluster: Machines, whole: Path, tmp_path: Path
) -> None:
    """`srun` is a program that writes down its arguments; the nodes then run the command, and get srun's signal."""
    edits = {"--nproc-per-node 8": "--nproc-per-node 1"}
    (tmp_path / "train.sh").write_text(recipe("slurm_train.sh", edits))
    program(tmp_path / "srun", SRUN)
    program(tmp_path / "scontrol", SCONTROL)
    variables = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    for restarts, status in enumerate((STOPPED_STATUS, 0)):
        script = tmp_path / "train.sh"
        more = {"SLURM_RESTART_COUNT": str(restarts), "STATUS": str(status)}
        run_script(script, str(tmp_path / "run.yaml"), folder=tmp_path, status=status, **variables, **more)
        assert (tmp_path / "requeued.txt").exists() == (status == STOPPED_STATUS)
        (tmp_path / "requeued.txt").unlink(missing_ok=True)
        options = (tmp_path / "srun.txt").read_text().splitlines()
        nodes = [cluster.start(number, [sys.executable, *options[2:]]) for number in range(2)]
        if status == STOPPED_STATUS:
            cluster.wait_until(lambda: max(map(last_step, outputs(cluster))) >= 10, limit_s=LIMIT_S)
            for node in nodes:
                node.send_signal(signal.SIGUSR1)
        assert cluster.end(limit_s=LIMIT_S) == [status] * 2, cluster.said()
    assert differences(whole, max(outputs(cluster), key=last_step)) == []


@on_nodes
@pytest.mark.timeout(1800)
def test_a_run_of_ray_resumes_when_a_node_is_lost(cluster: Machines, whole: Path, tmp_path: Path) -> None:
    """The program of `ray job submit` runs on the first node. The second one is killed, and comes back empty."""
    pytest.importorskip("ray.train.torch")
    edits = {"NODES, GPUS = 4, 8": "NODES, GPUS = 2, 1", "use_gpu=True": "use_gpu=False"}
    edits |= {"s3://bucket/ray": str(tmp_path / "ray"), '{"GPU": 1, "CPU": 12}': '{"CPU": 1}'}
    (tmp_path / "train.py").write_text(recipe("ray_train.py", edits))
    head = cluster.network.nodes[0].address
    variables = {"RAY_ADDRESS": f"{head}:6379", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def start_ray(number: int) -> None:
        shutil.rmtree(cluster.disk_of(number), ignore_errors=True)
        node = cluster.network.nodes[number]
        command = node_command(node, variables["RAY_ADDRESS"], number, Path(TEMPORARY, "ray"), num_cpus=1)
        cluster.start(number, command, variables)

    start_ray(0)
    cluster.wait_until(lambda: "Ray runtime started" in cluster.log_of(0), limit_s=LIMIT_S)
    start_ray(1)
    run = cluster.start(0, [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run.yaml")], variables)
    cluster.wait_until(lambda: max(map(last_step, outputs(cluster))) >= 10, limit_s=LIMIT_S)
    cluster.kill(1)
    start_ray(1)
    assert run.wait(LIMIT_S) == 0, cluster.said()
    assert "resumed from step " in cluster.log_of(0)
    assert differences(whole, max(outputs(cluster), key=last_step)) == []
