"""The collectives of a rank, with call sites, by process group -> files; the first that another rank does not call."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

FOLDER = (
    "LMMS_STREAM_COLLECTIVES"  # variable of the environment: the folder for the files; without it nothing is logged
)
FAULTS = "faults"  # in the folder: a file for each difference
_DIGEST_BYTES = 8
_SITES = 4  # callers of a collective to name
# Arguments of torch's collectives with equal shapes on all ranks; the others only need the same order.
_EQUAL = {
    "allreduce_": 0, "allreduce_coalesced_": 0, "broadcast_": 0, "reduce_": 0, "_allgather_base_": 1, "allgather_": 1,
    "allgather_into_tensor_coalesced_": 1, "allgather_coalesced_": 1, "_reduce_scatter_base_": 0,
    "reduce_scatter_tensor_coalesced_": 0, "gather_": 1, "gather_into_tensor_": 1, "reduce_scatter_": 0,
}  # fmt: skip
_OTHERS = ("scatter_", "alltoall_", "alltoall_base_", "barrier", "monitored_barrier_")
_ELSEWHERE = (sys.prefix, sys.base_prefix, "<")  # code of packages, of Python, and generated code
_OURS = str(Path(__file__).parents[2] / "lmms_stream")
# Functions of ours that only call a collective: their callers are the call sites.
_WRAPPERS = {
    "gather", "gather_objects", "from_rank_0", "on_rank_0", "on_all_ranks", "agree", "agreed", "_agree", "_on_any_rank",
    "sum_over_ranks", "gather_over_ranks",
}  # fmt: skip
# Inside, rank 0 asks for tensors and the others answer in a loop; or a rank whose proof has ended answers the others.
_UNLIKE = {"save_folder", "find_fault"}
_OF_MODELS = ("/torch/nn/", "/torch/distributed/fsdp/", "/torch/autograd/")  # whose collectives any line may cause


class DifferenceError(RuntimeError):
    """Two ranks call different collectives of a process group."""


class GroupLog:
    """The collectives of this rank in a process group, and the files of the other ranks."""

    def __init__(self, folder: Path, rank: int, size: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank, self._num = folder, rank, 0
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._lines = os.open(folder / f"{rank}.log", flags)
        self._digests = [os.open(folder / f"{each}.digests", flags) for each in range(size)]

    def add(self, name: str, sites: Sequence[str], *, compared: str = "") -> None:
        """Log a collective; DifferenceError if another rank's collective with this number is another.

        compared: the call site, if ranks must call from the same line, too.
        """
        digest = hashlib.blake2b(f"{name} {compared}".encode(), digest_size=_DIGEST_BYTES).digest()
        with self._lock:
            number, self._num = self._num, self._num + 1
            os.write(self._lines, f"{name}: {' < '.join(sites)}\n".encode())  # before the digest: others read it first
            os.write(self._digests[self._rank], digest)
        for rank, file in enumerate(self._digests):
            found = os.pread(file, _DIGEST_BYTES, number * _DIGEST_BYTES)
            if len(found) == _DIGEST_BYTES and found != digest:
                self._fail(number, rank)

    def _fail(self, number: int, other: int) -> None:
        lines = [f"{rank} of the group: {_line(self._folder, rank, number)}" for rank in sorted((self._rank, other))]
        message = "\n  rank ".join([f"ranks call different collectives (number {number} of a group):", *lines])
        faults = self._folder.parent.parent / FAULTS
        faults.mkdir(exist_ok=True)
        (faults / uuid.uuid4().hex).write_text(message)
        raise DifferenceError(message)


def _line(folder: Path, rank: int, number: int) -> str:
    return (folder / f"{rank}.log").read_text().splitlines()[number]


class _Process:
    """The logs of this process. Ranks of a process group find a common folder by its store."""

    def __init__(self, folder: Path, c10d: ModuleType):
        self._folder, self._c10d = folder, c10d
        self._lock = threading.Lock()
        self._world: Any = None
        self._job = Path()
        self._logs: dict[str, GroupLog] = {}

    def take(self, group: Any, operation: str, arguments: tuple[Any, ...], frame: FrameType) -> None:
        if group.size() == 1:
            return
        with self._lock:
            if self._world is not self._c10d.GroupMember.WORLD:
                self._world, self._logs, self._job = self._c10d.GroupMember.WORLD, {}, self._folder / self._job_name()
            name = str(group.group_name)
            if name not in self._logs:
                ranks = "-".join(map(str, self._c10d.get_process_group_ranks(group)))
                self._logs[name] = GroupLog(self._job / f"{name}.{ranks}"[:200], group.rank(), group.size())
            log = self._logs[name]
        equal = shapes_of(arguments[_EQUAL[operation]]) if operation in _EQUAL else ""
        sites, compared = sites_of(frame)
        log.add(operation.strip("_") + equal, sites, compared=compared)

    def _job_name(self) -> str:
        """Return the name that the first rank of this process group wrote into its store."""
        store = self._c10d._get_default_store()
        key = f"collectives-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if store.add(f"{key}-asked", 1) == 1:
            store.set(key, uuid.uuid4().hex)
        return str(store.get(key).decode())


def shapes_of(value: Any) -> str:
    """Types and shapes of tensors, also in lists."""
    if isinstance(value, list | tuple):
        return "".join(map(shapes_of, value))
    return f" {str(value.dtype).removeprefix('torch.')}{[*value.shape]}"


def sites_of(frame: FrameType | None) -> tuple[list[str], str]:
    """Return the nearest callers in this project and in programs, innermost first, and the site to compare.

    Compared are lines of this project that call a collective themselves: not through a model or an optimizer.
    """
    sites: list[str] = []
    compared, is_of_model = "", False
    while frame is not None:
        code, path = frame.f_code, frame.f_code.co_filename
        is_of_model |= any(each in path for each in _OF_MODELS)
        is_ours = path.startswith(_OURS)
        if len(sites) < _SITES and not path.startswith(_ELSEWHERE) and not (is_ours and code.co_name in _WRAPPERS):
            sites.append(f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno} {code.co_name}")
            if len(sites) == 1 and is_ours and not is_of_model:
                compared = sites[0]
        if is_ours and code.co_name in _UNLIKE:
            compared = ""
        frame = frame.f_back
    thread = threading.current_thread()
    return [*sites, *([] if thread is threading.main_thread() else [f"thread {thread.name}"])], compared


@functools.cache
def _install(c10d: ModuleType) -> Any:
    """Put a kernel before torch's of each collective; return what must stay alive.

    A redispatch releases Python's lock, as gloo needs: its threads take it to free tensors, while they hold their own.
    """
    import torch

    process = _Process(Path(os.environ[FOLDER]), c10d)
    library = torch.library.Library("c10d", "IMPL")

    def put_before(operation: str) -> None:
        packet = getattr(torch.ops.c10d, operation).default

        def call(keys: Any, *arguments: Any, **options: Any) -> Any:
            group = next(each for each in arguments if isinstance(each, torch.ScriptObject))
            process.take(c10d.ProcessGroup.unbox(group), operation, arguments, sys._getframe(1))
            key = torch._C.DispatchKey.CUDA if keys.has(torch._C.DispatchKey.CUDA) else torch._C.DispatchKey.CPU
            return packet.redispatch(torch._C.DispatchKeySet(key), *arguments, **options)

        library.impl(operation, call, "BackendSelect", with_keyset=True)

    for operation in (*_EQUAL, *_OTHERS):
        if torch._C._dispatch_has_kernel(f"c10d::{operation}"):
            put_before(operation)
    return library


def begin(c10d: ModuleType) -> None:
    """Log the collectives of this process once it has a process group. c10d: torch.distributed.distributed_c10d."""
    if not os.environ.get(FOLDER) or hasattr(c10d, FOLDER):
        return
    init = c10d.init_process_group
    setattr(c10d, FOLDER, True)

    @functools.wraps(init)
    def init_and_install(*arguments: Any, **options: Any) -> Any:
        made = init(*arguments, **options)
        _install(c10d)
        return made

    c10d.init_process_group = init_and_install  # type: ignore[attr-defined]
    if (package := sys.modules.get("torch.distributed")) is not None and hasattr(package, "init_process_group"):
        package.init_process_group = init_and_install  # type: ignore[attr-defined]


# The tests' side.


def faults(folder: Path) -> list[str]:
    """Take the differences that ranks found."""
    found = []
    for path in sorted(Path(folder, FAULTS).glob("*")):
        found.append(path.read_text())
        path.unlink()
    return found


def latest_job(folder: Path) -> list[dict[int, list[str]]]:
    """Return the lines of the latest job: of each process group, by rank in the group."""
    jobs = [each for each in folder.iterdir() if each.name != FAULTS] if folder.is_dir() else []
    job = max(jobs, key=lambda each: each.stat().st_mtime, default=Path(os.devnull))
    groups = sorted(job.glob("*"))
    return [{int(path.stem): path.read_text().splitlines() for path in sorted(each.glob("*.log"))} for each in groups]


def latest(folder: Path) -> str:
    """Return the last collective of each rank in each process group of the latest job."""
    every = [(group, rank, lines) for group, logs in enumerate(latest_job(folder)) for rank, lines in logs.items()]
    return "\n".join(
        f"group {group}, rank {rank}, {len(lines)}th: {''.join(lines[-1:])}" for group, rank, lines in every
    )
