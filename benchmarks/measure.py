"""How the benchmarks measure: one core, wall time of warm calls, memory of fresh processes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
MIB = 1 << 20
_POLL_S = 0.01
_JOIN_S = 10.0


def keep_to_one_core() -> None:
    """Pin this process to one core and, once, start it again with one thread in every numeric library.

    The libraries read their settings when they are imported, hence the new start; the affinity passes on to it.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if any(os.environ.get(name) != "1" for name in THREAD_SETTINGS):
        os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1"))
        os.execv(sys.executable, sys.orig_argv)


def timed(call: Callable[[], Result], *, repeats: int = 1) -> tuple[float, Result]:
    """Median seconds of `repeats` calls, and what the last one returned. Compile before: nothing is excluded here."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Peaks of a process, in bytes: all its resident pages; the private ones; those mapped from files."""

    resident: int
    anonymous: int
    file: int


def status_bytes(pid: int | str = "self") -> Mapping[str, int]:
    """The sizes in /proc/PID/status by name (VmHWM, RssAnon, …); empty once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}


def in_fresh_process(
    task: Callable[..., Result], *arguments: Any, imported: Sequence[str] = (), timeout_s: float = 3600.0
) -> tuple[Result, PeakMemory]:
    """Run task(*arguments) in a new interpreter; what it returned, and the process's peaks until then.

    The kernel keeps the peak of all resident pages (VmHWM; getrusage would pass on that of this process); the other
    two are read every 10 ms. imported: the process is forked from one that has imported these modules and done
    nothing else, so that it begins at once. Ends the benchmark when the task fails or takes longer than timeout_s.
    """
    context = multiprocessing.get_context("forkserver" if imported else "spawn")
    if imported:
        context.set_forkserver_preload([*imported])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sending, dict(os.environ), task, arguments))
    process.start()
    sending.close()
    deadline = time.monotonic() + timeout_s
    resident = anonymous = file = 0
    while not receiving.poll(_POLL_S) and process.is_alive():
        status = status_bytes(process.pid or 0)
        resident = max(resident, status.get("VmHWM", 0))
        anonymous = max(anonymous, status.get("RssAnon", 0))
        file = max(file, status.get("RssFile", 0))
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"{_name(task)} took more than {timeout_s:.0f} s: it was ended")
    try:
        result, at_end = receiving.recv()
    except EOFError:
        raise SystemExit(f"{_name(task)} ended without a result, see above") from None
    process.join(_JOIN_S)
    if process.is_alive():  # a thread that does not end; what it was run for is done
        process.kill()
        process.join()
    return result, PeakMemory(resident=max(resident, at_end), anonymous=anonymous, file=file)


def _name(task: Callable[..., Any]) -> str:
    return getattr(task, "__name__", repr(task))


def _send_result(
    sending: Any, environment: Mapping[str, str], task: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)  # a forkserver has that of the time when it was started
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # the platform's, not this process's
    result = task(*arguments)
    sending.send((result, status_bytes()["VmHWM"]))
    # Ended like any interpreter, which multiprocessing does not do: streaming frees its shared memory at exit.
    threading._shutdown()
    atexit._run_exitfuncs()


@contextmanager
def loss_plot(path: Path, loss: str, **limits: tuple[float, float]) -> Iterator[Any]:
    """Axes of a loss over the tokens that were seen, drawn to a file at the end. limits: ylim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    yield axes
    axes.set(xlabel="tokens seen", ylabel=loss, **limits)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A Markdown table: the first column to the left, figures to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f"| {cells[0].ljust(widths[0])}", *padded[1:]]) + " |"

    print(f"\n{title}\n\n{line(columns)}")
    print("|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""]))
    print(*map(line, rows), "", sep="\n", flush=True)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"
