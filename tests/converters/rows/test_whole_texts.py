"""Pairs of whole texts, and how answers that are compared are shown, indexed, verified and planned."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
from lmms_stream import PackedStreamingDataset
from lmms_stream.converters.convert import convert
from lmms_stream.converters.exporting.export import export_dataset
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import DataError
from lmms_stream.processors.preference import PreferenceProcessor
from lmms_stream.tools.inspect.summary import inspect_dataset

from ...conftest import run_cli
from ..sources.source_rows import write


def test_whole_texts_are_a_common_beginning_and_two_answers(tmp_path: Path) -> None:
    texts = {"chosen": "Human: hi Assistant: hello", "rejected": "Human: hi Assistant: no"}
    stored = {"prompt": "Human: hi Assistant:", "chosen": " hello", "rejected": " no"}
    mapper = find_mapper([texts], SchemaOptions())
    assert mapper.kind.name == "preference"
    assert mapper(texts, None) == {"messages": orjson.dumps(stored).decode(), "media": b""}
    for more, what in ({"system": "s"}, "system"), ({"images": [b"x"]}, "images"):
        with pytest.raises(DataError, match=f"whole texts, which cannot hold {what}: name the prompt's column"):
            mapper({**texts, **more}, None)
    with pytest.raises(DataError, match="cannot hold a system prompt"):
        find_mapper([texts], SchemaOptions(system="s"))(texts, None)
    with pytest.raises(DataError, match="chosen and rejected are the same, so neither is better: remove the row"):
        mapper({**texts, "rejected": texts["chosen"]}, None)
    convert([str(write(tmp_path / "rows.json", orjson.dumps([texts])))], str(tmp_path / "data"), num_workers=1)
    (seen,) = inspect_dataset(str(tmp_path / "data"), num_samples=1).samples
    assert [(message.role, message.blocks[0].text) for message in seen.messages] == [*stored.items()]
    for format in ("jsonl", "parquet"):
        export_dataset(str(tmp_path / "data"), str(tmp_path / format), format=format)
        convert([str(tmp_path / format)], str(tmp_path / "again" / format), num_workers=1)
        assert PackedStreamingDataset(str(tmp_path / "again" / format))[0] == mapper(texts, None)


def test_what_is_learnt_of_answers_is_shown_below_the_prompt(tokenizer: Path, tmp_path: Path) -> None:
    rows = orjson.dumps([{"prompt": "hi", "chosen": "hello", "rejected": "no"}])
    target = str(tmp_path / "data")
    convert([str(write(tmp_path / "rows.json", rows))], target, num_workers=1)
    (seen,) = inspect_dataset(target, num_samples=1, tokenizer=str(tokenizer)).samples
    assert seen.tokens is not None
    told = [(run.heading.partition(",")[0], run.text, run.trained) for run in seen.tokens.runs]
    assert told == [
        ("prompt", "<|user|>\nhi<|end|>\n", False),  # its template writes no generation prompt
        ("chosen", "<|assistant|>\nhello<|end|>", True),
        ("rejected", "<|assistant|>\nno<|end|>", True),
    ]
    process = run_cli("inspect", target, "--tokenizer", str(tokenizer))
    assert re.search(
        r"prompt\n.*hi.*\nchosen, a sequence of \d+ tokens\n.*hello.*\nrejected, a seq", process.stdout, re.S
    )
    page = tmp_path / "page.html"
    run_cli("inspect", target, "--tokenizer", str(tokenizer), "--html", str(page))
    assert '<div class="role">chosen, a sequence of' in page.read_text()
    run_cli("index", target, "--tokenizer", str(tokenizer))
    assert not verify_dataset(target, deep=True, processor=PreferenceProcessor.from_pretrained(str(tokenizer))).problems
