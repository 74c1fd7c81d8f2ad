"""The process group of a run: joining, gathering values, ending together."""

from __future__ import annotations

import atexit
import datetime
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import ConfigError, LmmsStreamError, TrainingError
from ...types import World, nodes_of_ranks

T = TypeVar("T")
_LOST_RANK = ("gloo/transport/", "Application timeout caused pair closure")  # gloo raises plain RuntimeErrors
_made: dist.ProcessGroup | None = None  # the process group created by init_distributed
_told: dist.ProcessGroup | None = None  # a foreign process group whose other timeout was logged
_beside: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # a group without CPUs, and gloo's group for CPUs
logger = logging.getLogger("lmms_stream")
STOPPED_STATUS = 85  # exit status of a run that a signal stopped after saving a checkpoint


def init_distributed(
    timeout_s: float, *, replication: int = 1, traces: Path | None = None
) -> tuple[World, torch.device]:
    """Join torchrun's process group, or create a group of this process only: nccl with CUDA, otherwise gloo.

    An existing group is used; a warning reports another timeout. If the group has no backend for CPUs (transformers'
    arguments create a group of nccl only), a group of gloo is added: see cpu_group. Groups created here end with
    end_distributed, or with the process. traces: folder for NCCL's collectives after a timeout.
    Raises TrainingError if a rank does not join within timeout_s, or ends before other ranks connect.
    """
    global _made, _told
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if cuda and traces is not None:
            record_collectives(traces)
        _make_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device, timeout_s)
        if _made is None:
            atexit.register(end_distributed)
        _made = dist.group.WORLD
    elif (found_s := group_timeout_s(dist.group.WORLD, device)) != timeout_s and dist.group.WORLD is not _told:
        _told = dist.group.WORLD
        if dist.get_rank() == 0:
            logger.warning(
                "the process group that is there has a timeout of %g s, and train.timeout_s is %g: its collectives "
                "wait for the former", found_s, timeout_s,
            )  # fmt: skip
    cpu_group(timeout_s)
    world_size = dist.get_world_size()
    local_sizes = gather([int(os.environ.get("LOCAL_WORLD_SIZE", world_size))], world_size).ravel().int().tolist()
    world = World(
        rank=dist.get_rank(),
        world_size=world_size,
        ranks_per_node=nodes_of_ranks(local_sizes),
        replication=replication,
    )
    return world, device


def _make_group(backend: str, device: torch.device, timeout_s: float) -> None:
    """Create the process group of torchrun's ranks, or of this process only."""
    if "RANK" not in os.environ:
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
        return
    set_interface(os.environ)
    tell_of_restarts(os.environ)
    try:
        join_ranks(backend, device, timeout_s=timeout_s)
    except LmmsStreamError:
        raise
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainingError(
            f"rank {os.environ['RANK']} waited for another rank, which ended or did not come within {timeout_s:g} s "
            f"({' '.join(str(error).split())[:200]}): look for the first error of the other ranks, or raise "
            "train.timeout_s"
        ) from error


def tell_of_restarts(environment: Mapping[str, str]) -> None:
    """Warn if torchrun may restart ranks, and keeps a single store for the ranks of all starts."""
    restarts, shared = environment.get("TORCHELASTIC_MAX_RESTARTS", "0"), "TORCHELASTIC_USE_AGENT_STORE"
    if environment["RANK"] == "0" and restarts != "0" and environment.get(shared) == "True":
        logger.warning(
            "torchrun may start these ranks again, and keeps the addresses of those before them: start it as python -m "
            "lmms_stream.train.torchrun, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/nodes.md)"
        )


def end_distributed() -> None:
    """End the process groups created by init_distributed; foreign groups stay."""
    global _made, _beside
    if _beside is not None and dist.is_initialized() and dist.group.WORLD is _beside[0]:
        dist.destroy_process_group(_beside[1])
    _beside = None
    if _made is not None and dist.is_initialized() and dist.group.WORLD is _made:
        dist.destroy_process_group()
    _made = None


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for tensors on the CPU."""
    return torch.device("cpu") in group._device_types


def cpu_group(timeout_s: float | None = None, *, is_apart: bool = False) -> dist.ProcessGroup:
    """Return a group of all ranks for tensors on the CPU: the process group, or gloo's, created by the first call.

    All ranks make the first call at the same point. is_apart: also for a process group on the CPU, a separate group
    from the group of the model's collectives, with half of its time limit.
    """
    global _beside
    default = dist.group.WORLD
    assert default is not None
    if is_apart:
        timeout_s = group_timeout_s(default, torch.device("cpu")) / 2  # less than other ranks wait elsewhere
    elif takes_cpu_tensors(default):
        return default
    if _beside is None or _beside[0] is not default:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        made = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(made, dist.ProcessGroup)
        _beside = default, made
    return _beside[1]


def group_timeout_s(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the timeout of a group's collectives on this device, in seconds."""
    assert group is not None
    options = group._get_backend(device).options
    return float(options._timeout.total_seconds())


def seed_step(seed: int, *, step: int, group: int) -> None:
    """Seed torch for a step: a resumed run draws the same numbers, for example for dropout."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, group]).generate_state(1, np.uint64)[0] >> np.uint64(1)))


def is_lost_rank(error: RuntimeError) -> bool:
    """Return whether torch raised this error because another rank ended or missed a collective."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _LOST_RANK)


def from_rank_0(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value, a picklable one, on all ranks; all ranks call this. group: default cpu_group()."""
    told = [value]
    dist.broadcast_object_list(told, src=0, group=group or cpu_group())
    return told[0]


def gather_objects(value: object, world_size: int) -> list[Any]:
    """Return the values of all ranks, in order; all ranks call this. Values must be picklable."""
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value, group=cpu_group())
    return everyone


def gather(values: Sequence[float], world_size: int, *, is_apart: bool = False) -> torch.Tensor:
    """Return the values of all ranks: float64[world_size, len(values)], on the CPU; exact for counts below 2^53.

    is_apart: see cpu_group.
    """
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(world_size * len(values), dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, mine, group=cpu_group(is_apart=is_apart))
    return everyone.view(world_size, len(values))


# Ranks join: first at their store, then in connections between all ranks, each within the limit of a collective.
#
# gloo by itself waits five times as long for another rank's connection, as in waitUntil of its
# gloo/transport/tcp/pair.h ("Use a longer timeout when waiting for initial connect"): by default 50 minutes for a rank
# that died after its address was known.

_NUM_CAME, _ALL_CAME = "num_came", "all_came"  # keys of the store


def join_ranks(backend: str, device: torch.device, *, timeout_s: float) -> None:
    """Create the process group of torchrun's variables; all ranks call this.

    Raises dist.DistError, or another RuntimeError of gloo, if a rank does not join, or ends, within timeout_s.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # as init_process_group does
    if store.add(_NUM_CAME, 1) >= world_size:
        store.set(_ALL_CAME, "yes")
    store.wait([_ALL_CAME])

    def connect() -> None:
        if device.type == "cuda":  # of each thread
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)

    within(timeout_s, connect, what="connecting with the other ranks")


def within(timeout_s: float, act: Callable[[], object], *, what: str) -> None:
    """Call a function in a thread; DistError after timeout_s. The thread is then abandoned."""
    outcome: Future[None] = Future()

    def work() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=work, daemon=True, name="lmms-join").start()
    try:
        outcome.result(timeout_s)
    except TimeoutError:
        if outcome.done():
            raise
        raise dist.DistError(f"{what} took more than {timeout_s:g} s") from None


# The network interface for gloo, if other nodes cannot reach the address of the node's name.
#
# gloo listens at the address of the node's name. Debian and similar systems name 127.0.1.1 in /etc/hosts, and an
# unknown name counts as 127.0.0.1: other nodes would connect to themselves, and the run would stand still.

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def set_interface(environment: MutableMapping[str, str]) -> None:
    """Set gloo's interface in the environment of a rank, if needed and not set. ConfigError: see chosen.

    environment: torchrun's, with the address of the ranks' store; a run on a single node needs no interface.
    """
    size, local_size = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    if VARIABLE in environment or size is None or local_size is None or int(size) <= int(local_size):
        return
    first = environment.get("MASTER_ADDR", "")
    if first == "localhost" or first.startswith("127."):  # all ranks are on this machine
        return
    own = own_address()
    if own is not None and not ipaddress.ip_address(own).is_loopback:
        return
    found = {name: each for name, each in interfaces().items() if not ipaddress.ip_address(each).is_loopback}
    if not found:  # no connection to another machine
        return
    name = chosen(found, towards=_address_towards(first), own=own)
    environment[VARIABLE] = name
    if environment.get("LOCAL_RANK") == "0":
        logger.info(
            "the name %s leads to %s, which no other node reaches: gloo takes %s (%s)",
            socket.gethostname(), own or "no address", name, VARIABLE,
        )  # fmt: skip


def chosen(found: Mapping[str, str], *, towards: str | None, own: str | None) -> str:
    """Return the interface with the address that reaches the first rank, or the only interface.

    found: IPv4 addresses of interfaces by name, without loopback. ConfigError if several remain.
    """
    names = [name for name, each in found.items() if each == towards] or list(found)
    if len(names) != 1:
        known = ", ".join(f"{name} ({each})" for name, each in found.items())
        raise ConfigError(
            f"this node's name resolves to {own or 'no address'}, which other nodes cannot reach, and the reachable "
            f"interface is unknown: set {VARIABLE} to one of {known}"
        )
    return names[0]


def address_for_others(environment: Mapping[str, str]) -> str:
    """Return an address of this node for the other nodes of torchrun's environment; loopback on a single machine.

    The first of: the address of gloo's interface, if set; the address that reaches the first rank; the address of the
    node's name; the only address. ConfigError: see chosen.
    """
    first, named = environment.get("MASTER_ADDR", ""), environment.get(VARIABLE, "").split(",")[0]
    found = {name: each for name, each in interfaces().items() if not ipaddress.ip_address(each).is_loopback}
    if named in found:
        return found[named]
    if not found or first == "localhost" or first.startswith("127."):
        return "127.0.0.1"
    towards, own = _address_towards(first), own_address()
    for each in (towards, own):
        if each is not None and not ipaddress.ip_address(each).is_loopback:
            return each
    return found[chosen(found, towards=towards, own=own)]


def own_address() -> str | None:
    """Return gloo's own choice: the first address of this node's name to listen at; None without an address."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as listener:
            try:
                listener.bind(address)
            except OSError:
                continue
            return str(address[0])
    return None


def interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this node's interfaces, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:  # no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _address_towards(host: str) -> str | None:
    """Return the address from which this node would send to a host; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


# torch's flight recorder of NCCL's collectives: the collectives of each rank at a timeout.
#
# torch keeps the latest collectives in memory, and writes a file per rank after a timeout. The variables have these
# names since torch 2.9 (FlightRecorder.hpp and ProcessGroupNCCL.hpp in torch/csrc/distributed/c10d).

STACKS = "stacks"  # folder in the output_dir for stacks of ranks that stand still
NUM_COLLECTIVES = 2000  # collectives to keep; torch's default since 2.7
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second: former names
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_begins: list[str] = []  # beginning of the files' paths, if this process records


def record_collectives(folder: Path) -> None:
    """Record NCCL's collectives of this process; call this before the process group is created.

    Variables already set stay. folder: for the files, unless another folder is set.
    """
    _set_default(_SIZE, str(NUM_COLLECTIVES))
    _set_default(_ON_TIMEOUT, "1")
    _set_default(_FILES, str((folder / "nccl-rank-").absolute()))
    _begins[:] = [next(os.environ[name] for name in _FILES if name in os.environ)]


def flight_recorder_files() -> str:
    """Return a message about the files of this process's recorder; empty without a recorder."""
    if not _begins:
        return ""
    return f"; NCCL's collectives of each rank N will be in {_begins[0]}N, which torchfrtrace reads"


def _set_default(names: tuple[str, str], value: str) -> None:
    """Set the first of two variables of the same meaning, unless either is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value
