"""A dataset in S3 behind a proxy that breaks answers as it is told, and what an undisturbed epoch delivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmms_stream.processors.chat import ChatProcessor

from ..proxy import FaultProxy
from .reading import Delivered, Reading, upload


@pytest.fixture(scope="module")
def remote(running_proxy: FaultProxy, s3: str, dataset_folder: Path) -> str:
    """The dataset in S3, for tests that leave it as it is."""
    return upload(dataset_folder, f"{s3}/faults")


@pytest.fixture(scope="session")
def expected(dataset_folder: Path, chat_processor: ChatProcessor) -> Delivered:
    """What an undisturbed epoch delivers."""
    delivered = Reading(remote=str(dataset_folder), local=None, processor=chat_processor).deliver()
    assert len(delivered) > 40
    return delivered


@pytest.fixture
def reading(remote: str, proxy: FaultProxy, chat_processor: ChatProcessor, tmp_path: Path) -> Reading:
    """The dataset in S3, read through the proxy with a cache of the test's own."""
    return Reading(remote=remote, local=tmp_path / "cache", processor=chat_processor)
