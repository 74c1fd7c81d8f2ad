"""Forks beside threads that end slowly: each in a process of its own, because pytest's has threads that it needs."""

from __future__ import annotations

import sys

from ..conftest import run_command

# A C library's destructor of what it keeps for a thread: it sleeps the microseconds that the thread gave it.
SLOW_END = """
import ctypes, os, sys, threading, time
from pathlib import Path
from lmms_stream.storage import retry
from lmms_stream.storage.retry import Retry, persist

libc = ctypes.CDLL(None)
key = ctypes.c_uint()
libc.pthread_key_create(ctypes.byref(key), libc.usleep)
ids = []

def use(proceed=None):
    ids.append(threading.get_native_id())
    libc.pthread_setspecific(key, ctypes.c_void_p(int(float(sys.argv[1]) * 1e6)))

def is_there():
    return Path(f"/proc/self/task/{ids[-1]}").exists()

def fork():
    there_at_fork = []
    os.register_at_fork(after_in_parent=lambda: there_at_fork.append(is_there()))
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return there_at_fork[0], time.monotonic() - started
"""


def run_script(script: str, *, end_s: float) -> None:
    result = run_command(sys.executable, "-c", SLOW_END + script, str(end_s), timeout_s=60)
    assert result.returncode == 0, result.stderr


def test_a_fork_after_a_request_waits_until_its_thread_is_gone() -> None:
    script = """
persist(use, where="", retry=Retry(), refusal=lambda error: None, remedy="")
assert is_there()
assert fork()[0] is False
"""
    run_script(script, end_s=0.5)


def test_a_fork_waits_for_a_thread_whose_target_failed() -> None:
    script = """
def fail():
    use()
    raise SystemExit

retry.start_thread(fail, name="test").join()
assert is_there()
assert fork()[0] is False
"""
    run_script(script, end_s=0.5)


def test_a_fork_does_not_wait_for_a_thread_at_work_nor_for_ever() -> None:
    script = """
retry.LONGEST_WAIT_S = 0.2
retry.start_thread(use, name="test").join()
there, waited_s = fork()
assert there and waited_s >= 0.2

retry.LONGEST_WAIT_S = 600  # longer than a script may take
at_work, done = threading.Event(), threading.Event()
retry.start_thread(lambda: (ids.append(threading.get_native_id()), at_work.set(), done.wait()), name="test")
at_work.wait()
time.sleep(2)  # the first has ended
assert fork()[0]
done.set()
"""
    run_script(script, end_s=2)


def test_a_fork_waits_until_threads_that_torch_named_sleep() -> None:
    script = """
import zlib
data = bytes(1 << 27)

def work(began, ended):  # without the GIL, under a name as torch's threads have it
    libc.prctl(15, b"pt_gloo_runloop")
    began.set()
    zlib.compress(data, 9)
    ended.set()
    threading.Event().wait()

def share_done_at_fork():
    began, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(began, ended), daemon=True)
    thread.start()
    ids.append(thread.native_id)  # which fork() asks for
    began.wait()
    clock = time.pthread_getcpuclockid(thread.ident)
    _, waited_s = fork()
    done_s = time.clock_gettime(clock)
    ended.wait()
    return done_s / time.clock_gettime(clock), waited_s

retry.LONGEST_TORCH_WAIT_S = 60
share, _ = share_done_at_fork()
assert share > 0.9, share
retry.LONGEST_TORCH_WAIT_S = 0.05
share, waited_s = share_done_at_fork()
assert share < 0.9 and waited_s >= 0.05, (share, waited_s)
"""
    run_script(script, end_s=0)
