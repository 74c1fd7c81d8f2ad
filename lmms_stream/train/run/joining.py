"""Ranks come together: first at their store, then each is connected with each; either within the limit of a collective.

gloo alone waits five times as long for a connection that another rank is to make, as waitUntil of its
gloo/transport/tcp/pair.h says ("Use a longer timeout when waiting for initial connect"): by default 50 minutes for a
rank that died when its address was known already.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_NUM_CAME, _ALL_CAME = "num_came", "all_came"  # keys of the store


def join_ranks(backend: str, device: torch.device, *, timeout_s: float) -> None:
    """Make the process group that torchrun's variables describe; all ranks call it.

    Raises dist.DistError, or another RuntimeError of gloo's, when a rank does not come, or is gone, within timeout_s.
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
    """Do what may wait for too long in a thread; DistError if it does. The thread is left to it then."""
    outcome: Future[None] = Future()

    def work() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - it is raised by who waits
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
