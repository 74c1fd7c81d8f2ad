"""How workers end: errors of what runs in them, a shard that does not come, a loop that is left while they are busy."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import StorageError, WorkerError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig

from ..conftest import run_command, write_tokens
from ..processes import run_module
from ..rounds import rounds
from .busy import Busy, OneByOne, loader

TORCH_WAITS = "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL"  # seconds for each worker that is busy: 5

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores


class Raising(OneByOne):
    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def process(self, sample: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: no"), ConnectionError("refused"), EOFError("at the end")])
def test_an_error_of_a_processor_is_raised_as_what_it_is_with_its_traceback(error: Exception, tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=50)
    with pytest.raises(type(error), match=str(error)) as caught:
        next(iter(loader(tmp_path, Raising(error))))
    assert not isinstance(caught.value, WorkerError)
    assert "raise self.error" in str(caught.value)


class NotSent(OneByOne):
    """Cannot be unpickled in another process, as a thing that is opened by a path that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if os.getpid() != self.pid:
            raise FileNotFoundError("the table is gone")


@pytest.mark.parametrize("method", rounds(["server"], ["server", "spawn"]))
def test_an_error_of_unpickling_in_a_worker_is_raised_as_what_it_is(method: Any, tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=50)
    with pytest.raises(FileNotFoundError, match="the table is gone"):
        next(iter(loader(tmp_path, NotSent(), start_method=method)))


class Stuck:
    """A store that does not give its shards."""

    url = "stuck://store"

    def download(self, key: str, path: Path) -> None:
        time.sleep(3)
        raise StorageError(f"{key}: no complete answer within 3 s")


def test_the_error_that_names_a_shard_comes_before_the_loader_gives_up(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=50)
    fetch = FetchConfig(timeout_s=3, attempts=1)
    dataset = PackedStreamingDataset(
        tmp_path / "data", tmp_path / "cache", processor=TokensProcessor(), packing=PackingConfig(packing_length=64),
        fetch=fetch,
    )  # fmt: skip
    assert dataset.mode == "plan"
    dataset.plan.num_packs(0)
    dataset.core.one.storage = dataset.core.one.cache.storage = Stuck()  # type: ignore[assignment]
    with pytest.raises(StorageError, match=r"shard\.\d{5}\.mds: no complete answer within 3 s"):
        next(iter(PackedLoader(dataset, global_batch=1, num_workers=1, timeout_s=3)))


def test_a_loop_that_is_left_while_a_worker_is_busy_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path, num_samples=50)
    before = {child.pid for child in multiprocessing.active_children()}
    batches = iter(loader(tmp_path, Busy(), timeout_s=60))
    next(batches)
    assert {child.pid for child in multiprocessing.active_children()} > before
    time.sleep(1)  # now the worker is at the tenth sample
    monkeypatch.setattr(TORCH_WAITS, 900)
    batches.close()  # type: ignore[attr-defined]
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_a_loader_with_persistent_workers_that_is_deleted_does_not_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path, num_samples=50)
    before = {child.pid for child in multiprocessing.active_children()}
    kept = loader(tmp_path, Busy(), timeout_s=60, persistent_workers=True)
    batches = iter(kept)
    next(batches)
    time.sleep(1)  # now the worker is at the tenth sample
    batches.close()  # type: ignore[attr-defined]
    assert {child.pid for child in multiprocessing.active_children()} > before  # it is kept for the next iteration
    monkeypatch.setattr(TORCH_WAITS, 900)
    del kept, batches
    assert {child.pid for child in multiprocessing.active_children()} <= before


SCRIPT = """
import atexit, multiprocessing, os, sys, time
from pathlib import Path
import torch

@atexit.register  # before all others, and so it is called after them: what follows is the interpreter's own end
def say() -> None:
    print(len(multiprocessing.active_children()), flush=True)

from tests.loader.busy import Busy, loader

for how in ("kept", "error"):  # each in a fork of this interpreter, which ends as an interpreter does
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)

batches = iter(loader(Path(sys.argv[1]), Busy(), timeout_s=60, persistent_workers=how == "kept"))
next(batches)
time.sleep(1)
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 900
if how == "error":
    raise SystemExit("an error")
"""


def test_a_process_whose_worker_is_busy_does_not_wait_for_it(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=50)
    result = run_command(sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), timeout_s=100)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "an error"
    assert result.stdout.split() == ["0", "0", "0", "1"]  # workers at the end, and the status


def test_the_start_method_of_the_program_is_left_open(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=50, with_index=True)
    script = (
        "import multiprocessing, sys\n"
        "from pathlib import Path\n"
        "from tests.loader.busy import OneByOne, loader\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "assert len(list(loader(Path(sys.argv[1]), OneByOne()))) > 10\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    (tmp_path / "program.py").write_text(script)
    result = run_module(str(tmp_path / "program.py"), str(tmp_path / "data"), timeout_s=100)
    assert result.returncode == 0, result.stderr
