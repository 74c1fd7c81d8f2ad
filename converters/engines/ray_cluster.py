"""A connection to a Ray cluster: to one that runs, or to one of this machine alone, for as long as it is needed.

Ray is imported where it is used, because it is an extra of this package, and because some of its settings are read from
the environment when it is imported.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...storage.cache import default_cache_folder
from ...storage.locks import locked

_LOCK_TIMEOUT_S = 10.0
_STORE_BYTES = 64 << 20  # of Ray's memory for each worker: twice what a task carries
_TOKEN = secrets.token_hex(32)  # made once, because Ray keeps the first token that a process gives it
_LOOPBACK = "127.0.0.1"
_KEEP_TO_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray has no other setting for it, on Linux too
# Ray prints pages when a node is lost, and the error that follows says so in a line: no line of them is shown.
_PRINT_NOTHING = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^"}
_LOCAL_ENVIRONMENT = {
    **_KEEP_TO_LOOPBACK,
    "RAY_AUTH_TOKEN": _TOKEN,  # without it Ray would write a token to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # prevents a warning about GPUs on machines that have none
}
_LOCAL_ENVIRONMENT_WITHOUT = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")  # these would replace the token


def import_ray() -> Any:
    """The library; ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray cannot be imported ({error}): pip install 'lmms-stream[ray]'") from error
    return ray


@contextmanager
def open_cluster(address: str | None, *, num_cpus: int, timeout_s: float) -> Iterator[None]:
    """This process connected to the cluster at `address` (default: RAY_ADDRESS, or one of its own with `num_cpus`).

    A connection that it has already is used, and left. ConfigError where there is none to be had; timeout_s: in which
    a cluster that runs must answer.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    with _environment(_PRINT_NOTHING | (_KEEP_TO_LOOPBACK if wanted == "local" else {})):
        ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(f"this process is connected to a Ray cluster already: leave out the address {address}")
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_restored_signal())
        settings: dict[str, Any] = {}
        if wanted == "local":
            settings = stack.enter_context(_local_settings(ray, num_cpus))
        else:
            _check_answers(wanted, timeout_s)
        stack.callback(ray.shutdown)
        try:
            ray.init(address=wanted, log_to_driver=False, logging_level="CRITICAL", **settings)
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            reason = " ".join(str(error).split())
            if wanted == "local":
                raise ConfigError(f"Ray cannot start on this machine: {reason}; pass --engine processes") from error
            raise ConfigError(f"the Ray cluster at {wanted} cannot be joined: {reason}") from error
        yield


@contextmanager
def _restored_signal() -> Iterator[None]:
    """Ray ends the process in an orderly way at SIGTERM; only while it is connected."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(changes: dict[str, str], *, without: tuple[str, ...] = ()) -> Iterator[None]:
    """The environment with other settings of Ray, until the end of the block; what Ray itself sets in it goes too."""
    saved = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(saved)


# A cluster that runs


def _check_answers(address: str, timeout_s: float) -> None:
    """Ask it from another process, which can be ended: Ray itself tries for minutes, and then ends its process."""
    if "://" in address:
        raise ConfigError(f"{address} is of Ray's client: run this on a node of the cluster, with HOST:PORT or auto")
    remedy = "check --ray-address, and that the cluster runs"
    host, separator, port = address.rpartition(":")
    if separator:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"no Ray cluster answers at {address} ({error}): {remedy}") from error
    program = shutil.which("ray", path=sysconfig.get_path("scripts")) or "ray"
    command = [program, "status", "--address", address]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except OSError as error:
        raise ConfigError(f"the command `ray` cannot be run ({error}): pip install 'lmms-stream[ray]'") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"no Ray cluster answers at {address} within {timeout_s:g} s: {remedy}") from error
    if result.returncode:
        reason = (result.stderr.strip() or "it is not well").splitlines()[-1]
        raise ConfigError(f"no Ray cluster answers at {address} ({reason}): {remedy}")


# A cluster of this machine


@contextmanager
def _local_settings(ray: Any, num_cpus: int) -> Iterator[dict[str, Any]]:
    """For ray.init: reachable from this machine alone, with a token, and without a dashboard."""
    if ray.util.get_node_ip_address() != _LOOPBACK:
        name = next(iter(_KEEP_TO_LOOPBACK))
        raise ConfigError(
            "Ray was imported before the conversion, so that its own cluster could be reached from other machines: "
            f"set {name}=0 before Ray is imported, or call ray.init() before the conversion"
        )
    with _session_folder() as folder, _environment(_LOCAL_ENVIRONMENT, without=_LOCAL_ENVIRONMENT_WITHOUT):
        yield {
            "num_cpus": num_cpus,
            "num_gpus": 0,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES * (num_cpus + 1),
            "_temp_dir": str(folder),  # ray.init documents this keyword, although it begins with an underscore
        }


@contextmanager
def _session_folder() -> Iterator[Path]:
    """For Ray's logs and sockets, removed at the end, as are those that killed commands left. Short: sockets' names."""
    base = default_cache_folder("").parent
    for lock in base.glob("ray-*.lock"):
        with locked(lock, timeout_s=0) as free:
            if free is not None:
                _remove_session(lock)
    lock = base / f"ray-{os.getpid()}.lock"
    with locked(lock, timeout_s=_LOCK_TIMEOUT_S) as ours:
        if ours is None:
            raise ConfigError(f"{lock} is held by another process: remove it")
        try:
            yield lock.with_suffix("")
        finally:
            _remove_session(lock)


def _remove_session(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
