"""A small dataset of chats, for jobs whose epochs end soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.tools.demo.corpus import Corpus

NUM_CHATS = 120


@pytest.fixture(scope="session")
def few_chats(corpus: Corpus, chat_processor: ChatProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the corpus as shards with a lengths index."""
    folder = tmp_path_factory.mktemp("few-chats")
    convert(
        [corpus.functions, corpus.classes], str(folder), processor=chat_processor, shard_bytes=1 << 16, limit=NUM_CHATS
    )
    return folder
