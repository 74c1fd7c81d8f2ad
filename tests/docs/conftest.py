"""What pages call s3://bucket is a bucket of the tests' own S3 server."""

from __future__ import annotations

import os
from pathlib import Path

import boto3
import pytest

BUCKET = "bucket"


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, and copies of shards are kept below tmp_path."""
    client = boto3.resource("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    found = client.Bucket(BUCKET)
    if BUCKET in [each.name for each in client.buckets.all()]:
        found.objects.all().delete()
    else:
        found.create()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
