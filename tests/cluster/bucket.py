"""Wait for the S3 server and make its bucket: `python -m tests.cluster.bucket NAME`, within the store's namespace.

Imports no more than it needs: each network starts it.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request

import boto3

START_S = 60.0


def main(name: str) -> None:
    url = os.environ["S3_ENDPOINT_URL"]
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            break
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=name)


if __name__ == "__main__":
    main(sys.argv[1])
