"""An S3 endpoint for the demo: the one that the environment names, or moto's server on loopback."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError, StorageError

BUCKET = "lmms-stream-demo"


@contextmanager
def s3_endpoint() -> Iterator[str]:
    """The URL of an endpoint that has BUCKET, with the environment set so that child processes use it."""
    if os.environ.get("S3_ENDPOINT_URL"):
        _make_bucket()
        yield os.environ["S3_ENDPOINT_URL"]
        return
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise ConfigError("the demo needs moto: pip install 'lmms-stream[demo]'") from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "S3_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _make_bucket()
        yield settings["S3_ENDPOINT_URL"]
    finally:
        server.stop()
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
