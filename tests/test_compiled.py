"""Machine code of compiled loops, kept in files that several processes write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.plan.kernels.turns import take_turns
from lmms_stream.versions.numba import CacheFile, compiled
from numba.core.caching import IndexDataCacheFile

from .arrows import files
from .rounds import in_long_rounds

LOOP = """
from lmms_stream.versions.numba import compiled

@compiled
def total(values):
    found = 0
    for value in values:
        found += value * {factor}
    return found
"""


def test_every_loop_of_the_project_is_kept_in_these_files() -> None:
    others = [name for name, path in files().items() if "cache=True" in path.read_text()]
    assert others == ["lmms_stream.versions.numba"]
    assert type(take_turns._cache._cache_file) is CacheFile
    assert compiled(lambda: 1, inline="always").targetoptions.items() >= {"nogil": True, "inline": "always"}.items()


@pytest.mark.parametrize(("kind", "loaded"), [(CacheFile, b"int32"), (IndexDataCacheFile, b"float64")])
def test_code_for_one_type_is_not_taken_for_another_whose_process_wrote_at_the_same_time(
    kind: type[IndexDataCacheFile], loaded: bytes, tmp_path: Path
) -> None:
    """The second process has read the index before the first wrote; then the index of the first comes last."""
    first = kind(str(tmp_path), "loop", (1.0, 10))
    first.save("int32", b"int32")
    index = (tmp_path / "loop.nbi").read_bytes()
    (tmp_path / "loop.nbi").unlink()
    kind(str(tmp_path), "loop", (1.0, 10)).save("float64", b"float64")
    (tmp_path / "loop.nbi").write_bytes(index)
    assert first.load("int32") == loaded


def test_code_of_an_older_source_is_not_taken_before_the_new_is_written(tmp_path: Path) -> None:
    CacheFile(str(tmp_path), "loop", (1.0, 10)).save("int32", b"old")
    newer = CacheFile(str(tmp_path), "loop", (2.0, 10))
    assert newer.load("int32") is None
    newer.save("int32", b"new")
    assert newer.load("int32") == b"new"
    assert len(list(tmp_path.glob("loop.*.nbc"))) == 2


@in_long_rounds
def test_processes_that_compile_for_different_types_at_once_call_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for factor in range(1, 41):
        name = f"loop_{factor % 2}"
        (tmp_path / f"{name}.py").write_text(LOOP.format(factor=factor) + "#" * factor)
        processes = []
        for kind in 2 * ("int32", "int64", "float32", "float64"):
            if pid := os.fork():
                processes.append(pid)
                continue
            is_right = False
            try:
                is_right = __import__(name).total(np.arange(10, dtype=kind)) == 45 * factor
            finally:
                os._exit(0 if is_right else 1)
        assert [os.waitpid(pid, 0)[1] for pid in processes] == [0] * len(processes)
