"""Runs as a page on 127.0.0.1: page, JSON for its curves, and samples. The server answers only GET, writes nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...config import build_config
from ...errors import ConfigError, LmmsStreamError
from ..inspect.page import render_note, render_sample
from ..inspect.summary import inspect_sample
from .run import WatchedRun

HOST = "127.0.0.1"
# The page's own script and style run, and nothing else; a sample is in a frame of this server's, which runs nothing.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAMPLE_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox; frame-ancestors 'self'"

logger = logging.getLogger("lmms_stream")


class Watch:
    """Several runs, read by one thread at a time."""

    def __init__(self, runs: Sequence[WatchedRun]):
        self._runs, self._lock = runs, threading.Lock()

    def views(self) -> list[dict[str, Any]]:
        """Current views of the runs."""
        with self._lock:
            for run in self._runs:
                run.update()
            return [run.view() for run in self._runs]

    def sample(self, number: int, sample: str) -> str:
        """The page of a sample of the run of a number."""
        return sample_page(self._runs[number].source.datasets, sample)


class WatchServer(ThreadingHTTPServer):
    """Serves a Watch at `url` while `serve_forever` runs. port: 0 for any that is free. ConfigError for one in use."""

    daemon_threads = True

    def __init__(self, watch: Watch, *, port: int):
        self.watch = watch
        self.page = files(__package__).joinpath("page.html").read_bytes()
        try:
            super().__init__((HOST, port), _Answer)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ConfigError(
                f"port {port} of {HOST} cannot be had ({error.strerror}): name another with --port, or 0 for any that "
                "is free"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of this server for a browser: pages under another name that lead here get nothing."""
        port = self.server_address[1]
        return f"{HOST}:{port}", f"localhost:{port}"


class _Answer(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "lmms_stream", ""
    timeout = 60

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, b"this server answers as 127.0.0.1 and localhost alone\n", "text/plain")
            return
        asked = urlsplit(self.path)
        try:
            if asked.path == "/":
                self._send(HTTPStatus.OK, self.server.page, "text/html", policy=_PAGE_POLICY)
            elif asked.path == "/data.json":
                self._data()
            elif asked.path == "/sample":
                self._sample(parse_qs(asked.query))
            else:
                self._send(HTTPStatus.NOT_FOUND, b"there is /, /data.json and /sample\n", "text/plain")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the browser has gone on to something else

    def _data(self) -> None:
        try:
            data: dict[str, Any] = {"runs": self.server.watch.views()}
        except LmmsStreamError as error:
            data = {"runs": [], "error": str(error)}
        body = json.dumps(data, allow_nan=False).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag=tag)
        else:
            self._send(HTTPStatus.OK, body, "application/json", tag=tag)

    def _sample(self, query: dict[str, list[str]]) -> None:
        try:
            body = self.server.watch.sample(int(query["run"][0]), query["id"][0])
        except (KeyError, ValueError, IndexError):
            self._send(HTTPStatus.BAD_REQUEST, b"name a sample as /sample?run=0&id=5\n", "text/plain")
            return
        self._send(HTTPStatus.OK, body.encode(), "text/html", policy=_SAMPLE_POLICY)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, policy: str = "", tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache" if tag else "no-store")
        if policy:
            self.send_header("Content-Security-Policy", policy)
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form: str, *args: Any) -> None:
        logger.debug(form, *args)


# Page of one sample in a run's datasets, like in `inspect`: escaped, without execution of content.


def sample_page(datasets: Mapping[str, Mapping[str, Any]], sample: str) -> str:
    """The page of a sample, named as in a log: its number, after its source where there are several datasets.

    datasets: settings of a run's datasets by name, that of one alone "". What cannot be shown is said on the page.
    """
    try:
        return _shown(datasets, sample)
    except LmmsStreamError as error:
        return render_note(f"sample {sample}", str(error))


def _shown(datasets: Mapping[str, Mapping[str, Any]], sample: str) -> str:
    from ...mds.dataset_config import DatasetConfig

    source, _, number = sample.rpartition(":")
    if source not in datasets:
        raise ConfigError(
            f"the datasets of sample {sample!r} are not known: watch the YAML file that the run is trained by"
        )
    if not number.isdecimal():
        raise ConfigError(
            f"{sample!r} is not a sample: write its number, after the name of its source if there are several sources"
        )
    config = build_config(DatasetConfig, datasets[source], source=f"dataset {source}".strip())
    if config.source_type is not None:
        raise ConfigError(
            f"samples of dataset_type {config.source_type!r} are read from their sources, and cannot be shown: convert "
            "the sources to see samples"
        )
    view, num_samples = inspect_sample(config.remote, int(number), processor=config.processor.build())
    return render_sample(view, num_samples=num_samples, url=config.remote)
