"""Scripts of benchmarks/ run at toy size, and pages have the figures of results.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import results

from .rounds import in_long_rounds

FOLDER = Path(__file__).parent.parent / "benchmarks"
TOYS: dict[str, str] = {
    "assign.py": "--batches 4 --samples 20000",
    "bagel.py": "--steps 2",
    "cache_limit.py": "--samples 6000 --block 100",
    "chart_learning.py": "--charts 60 --tokens 4000 --seeds 1",
    "checkpoint.py": "--parameters 100000 --rounds 1 --steps 1",
    "checkpoint_memory.py": "--gigabytes 0.01 0.02",
    "convergence.py": "--samples 800 --seeds 2",
    "convert.py": "--rows 2000 --tokenized-rows 1000 --large-bytes 1e6 --rounds 1 --peers streaming",
    "drop_in.py": "--samples 2000 --rounds 1",
    "hybrids.py": "--rounds 1",
    "image_generation.py": "--seeds 1 --images 60 --steps 2",
    "imports.py": "",
    "indexing.py": "--images 400",
    "iterable.py": "--rows 4000",
    "kill_convert.py": "--rounds 1 --rows 4000",
    "learning.py": "--tokens 20000",
    "ledger.py": "--samples 200000 --shard-samples 2000 --rounds 1",
    "many_shards.py": "--shards 400 --samples-per-shard 50 --streaming-shards 40 --canonical-nodes 2 --rounds 1",
    "media.py": "--rounds 1",
    "memory.py": "--batches 40 --first 10 --samples 20000 --real-samples 2000",
    "mixture.py": "--sources 4 --global-batch 64 --steps 4 --samples 4000",
    "packing.py": "--samples 20000 --peers none --repeats 1",
    "parallel.py": "--tokens 256 --layers 1 --hidden 64",
    "peers.py": "--samples 20000 --shards 200",
    "plan.py": "--samples 40000 --startup-samples 20000 --peer-samples 20000 --shard-samples 500",
    "ranks.py": "--nodes 2 --steps 2 --samples 40000 --sources 10 --source-samples 2000",
    "reading.py": "--samples 4000 --rounds 1 --seconds 0.2 --packing-lengths 1024 --peers streaming",
    "reshard.py": "--shards 1 --rounds 1",
    "resume.py": "--samples 40000 --streaming-samples 10000 --hf-samples 2000 --real-samples 2000 --rounds 1",
    "rollout.py": "--rows 20000",
    "s3.py": "--shards 4 --shard-bytes 200000 --rounds 1",
    "sound.py": "--chats 8 --rounds 1 --packs 0 --kinds sound video",
    "sound_learning.py": "--clips 20 --steps 2 --seeds 1",
    "spikes.py": "--samples 800",
    "steps.py": "--steps 1",
    "trainers.py": "--rounds 2 --steps 3",
    "training.py": "--steps 12",
    "vision_memory.py": "--packs 20 --first 5 --samples 40",
    "vision_training.py": "--steps 8 --packs 4",
    "worker_memory.py": "",
}
ELSEWHERE = {  # script -> what it needs, beyond a machine for tests
    "cluster.py": "control groups", "peer_links.py": "network namespaces", "simulate.py": "network namespaces",
    "vision.py": "the extra bench", "gpu.py": "tests/train/test_gpu_benchmark.py", "sft.py": "the extra bench",
}  # fmt: skip


def test_each_script_has_a_toy_size() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts - {"results.py", "gpu_sections.py"} == TOYS.keys() | ELSEWHERE.keys()


@in_long_rounds
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", TOYS)
def test_a_script_runs_at_toy_size(script: str, tmp_path: Path) -> None:
    text = (FOLDER / script).read_text()
    folder = ["--folder", str(tmp_path)] if '"--folder"' in text else []
    command = [sys.executable, str(FOLDER / script), *TOYS[script].split(), *folder]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=800)
    assert "Traceback" not in run.stderr, run.stderr[-4000:]
    assert run.stdout.strip()


def test_pages_have_the_figures_of_results() -> None:
    given = results.results()
    for page in results.HEADS:
        text = (results.ROOT / page).read_text()
        assert results.written(page, text, given) == text


def test_each_figure_has_its_script_code_and_commit() -> None:
    described = (FOLDER / "README.md").read_text()
    for each in results.results():
        script = results.script_of(each).split(" ")[0]
        assert f"`{script}" in described
        assert all((results.ROOT / path).exists() for path in [f"benchmarks/{script}", *each["paths"]])
        assert each["commit"]
        assert each["date"]
        assert each["machine"]


def test_a_figure_is_due_after_a_change_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(results, "ROOT", tmp_path)
    for name in ("benchmarks/a.py", "benchmarks/b.py", "code/x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    given = [
        {"command": f"python benchmarks/{name}.py", "paths": paths, "commit": commit}
        for name, paths in (("a", ["code"]), ("b", []))
    ]
    assert results.due(given) == []
    (tmp_path / "code/x.py").write_text("2")
    git("commit", "--quiet", "--all", "--message", "two")
    assert results.due(given) == ["python benchmarks/a.py"]
    assert results.due([{**given[0], "commit": "0" * 40}]) is None
