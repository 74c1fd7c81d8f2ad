"""A chat passes few functions from its line to its shard; a measured chat is parsed as a line and as stored JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
from lmms_stream import ChatProcessor, ConvertOptions, convert

from ..arrows import ROOT

OWN = (f"{ROOT / 'lmms_stream'}{os.sep}", f"{ROOT / 'converters'}{os.sep}")
MOST_FUNCTIONS, MOST_PARSES = 40, 1  # parses of stored JSON; lines are parsed by a map, which is not seen here
MOST_PLAIN_CALLS = 10  # of Python functions a row, without a processor
ROW = {"messages": [{"role": "user", "content": "Who wrote Emma?"}, {"role": "assistant", "content": "Jane Austen."}]}
GROUP = 64  # rows that are measured together


def calls_of(num_rows: int, folder: Path, processor: ChatProcessor | None) -> tuple[Counter[str], int]:
    """Return the calls of the project's functions in a conversion, by name, and the number of parsed JSON texts."""
    path, calls, parses = folder / f"{num_rows}.jsonl", Counter[str](), 0
    path.write_text(f"{json.dumps(ROW)}\n" * num_rows)

    def count(frame: FrameType, event: str, function: Any) -> None:
        nonlocal parses
        name = frame.f_code.co_qualname
        if event == "c_call":
            parses += function is orjson.loads
        elif event == "call" and frame.f_code is json.loads.__code__:
            parses += 1
        elif event == "call" and frame.f_code.co_filename.startswith(OWN) and not name.endswith(">"):
            calls[f"{frame.f_code.co_filename} {name}"] += 1

    sys.setprofile(count)
    try:
        convert(
            [str(path)], str(folder / f"out-{num_rows}"), num_workers=1, options=ConvertOptions(processor=processor)
        )
    finally:
        sys.setprofile(None)
    return calls, parses


def test_a_row_passes_few_functions_and_is_parsed_twice(chat_processor: ChatProcessor, tmp_path: Path) -> None:
    calls_of(1, tmp_path, chat_processor)  # fills the caches
    (fewer, fewer_parses), (more, more_parses) = (calls_of(n * GROUP, tmp_path, chat_processor) for n in (3, 4))
    passed = sorted(more - fewer)  # the first rows of a source, which decide the reading, are in both
    assert len(passed) <= MOST_FUNCTIONS, "\n".join(passed)
    assert more_parses - fewer_parses <= MOST_PARSES * GROUP


def test_a_row_without_a_processor_passes_few_functions_and_is_parsed_once(tmp_path: Path) -> None:
    calls_of(1, tmp_path, None)
    (fewer, fewer_parses), (more, more_parses) = (calls_of(n * GROUP, tmp_path, None) for n in (3, 4))
    assert (more - fewer).total() <= MOST_PLAIN_CALLS * GROUP, (more - fewer).most_common(20)
    assert more_parses == fewer_parses
