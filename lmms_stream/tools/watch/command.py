"""The command that shows runs while they train: `lmms-stream watch`."""

from __future__ import annotations

import argparse
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ...cli.command import add_command, local_file

if TYPE_CHECKING:
    from ...cli.command import Commands
    from .server import Watch

EXAMPLE = "lmms-stream watch run.yaml --port 8765"
REFRESH_S = 2.0


def add_commands(commands: Commands) -> None:
    summary = "Show training runs while they train: in the terminal, and as a page on 127.0.0.1."
    parser = add_command(commands, "watch", _watch, summary, example=EXAMPLE, page="watching.md")
    parser.add_argument(
        "runs",
        nargs="+",
        type=local_file,
        metavar="RUN",
        help="show these runs: an output_dir, its log, or the YAML file that a run is trained by, which samples need",
    )
    parser.add_argument(
        "--port", type=_port, default=0, metavar="PORT", help="give the page this port; default: one that is free"
    )
    parser.add_argument("--once", action="store_true", help="print the runs as they are now, and end; without a page")


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, got {number}")
    return number


def _watch(options: argparse.Namespace) -> int:
    from ...cli.console import console
    from .run import WatchedRun
    from .server import Watch, WatchServer
    from .source import open_run
    from .terminal import terminal_view

    watch = Watch([WatchedRun(open_run(path)) for path in options.runs])
    if options.once:
        console.print(terminal_view(watch.views()))
        return 0
    with WatchServer(watch, port=options.port) as server:
        threading.Thread(target=server.serve_forever, name="lmms-watch", daemon=True).start()
        sys.stdout.write(f"{server.url} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            _show(watch)
        server.shutdown()
    return 0


def _show(watch: Watch) -> None:
    """Show the runs in the terminal until they are not wanted any more; where there is none, the page is all."""
    from rich.live import Live

    from ...cli.console import console
    from .terminal import terminal_view

    wait = threading.Event().wait
    if not console.is_terminal:
        wait()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(terminal_view(watch.views()), refresh=True)
            wait(REFRESH_S)
