"""An S3 endpoint for the demo: the one that the environment names, or moto's server on loopback."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from ...errors import ConfigError, StorageError

BUCKET = "lmms-stream-demo"
START_S = 60.0  # until the server is given up


@contextmanager
def s3_endpoint() -> Iterator[str]:
    """The URL of an endpoint that has BUCKET, with the environment set so that child processes use it."""
    if os.environ.get("S3_ENDPOINT_URL"):
        _make_bucket()
        yield os.environ["S3_ENDPOINT_URL"]
        return
    with moto_server() as url, _settings(url):
        _make_bucket()
        yield url


@contextmanager
def moto_server() -> Iterator[str]:
    """The URL of an S3 server on loopback, until the end. It is a process of its own: no fork of this one copies it."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip() if wait([server.stdout.fileno()], START_S) else ""
            if not url:
                raise ConfigError("the S3 server of the demo does not start: pip install 'lmms-stream[demo]'")
            yield url
        finally:
            server.kill()


@contextmanager
def _settings(url: str) -> Iterator[None]:
    """The environment of clients of the server, until the end."""
    settings = {
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _make_bucket() -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
        if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError) as error:
        raise StorageError(
            f"{os.environ['S3_ENDPOINT_URL']}: bucket {BUCKET} cannot be made ({error}): check the AWS_ variables, "
            "or unset S3_ENDPOINT_URL to use a server of the demo's own"
        ) from error


def _serve() -> None:
    """The server's process: its URL goes to standard output, and it ends when standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        sys.exit(str(error))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
