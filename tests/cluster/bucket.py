"""Make the bucket of a network's S3 server: started within the store's namespace."""

from __future__ import annotations

from .namespaces import make_bucket

if __name__ == "__main__":
    make_bucket()
