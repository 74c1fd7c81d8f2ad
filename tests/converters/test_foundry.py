"""Datasets that llm-foundry wrote, whose tokens are bytes or arrays -> datasets of tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.fields import Fields, named_alike
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.rows.references import SampleMedia
from lmms_stream.converters.rows.tokens import TOKENS
from lmms_stream.errors import DataError
from streaming import MDSWriter, StreamingDataset

IDS = [np.arange(first, first + 12) for first in (0, 50_000, 131_000)]
SCHEMA: dict[str, Any] = {"kind": "tokens", "columns": {"input_ids": "tokens"}}


def written(folder: Path, dtype: str, *, encoding: str = "bytes") -> str:
    with MDSWriter(out=str(folder), columns={"tokens": encoding}) as writer:
        for ids in IDS:
            array = ids.astype(dtype)
            writer.write({"tokens": array.tobytes() if encoding == "bytes" else array})
    return str(folder)


def check_ids(folder: Path, dtype: str = "int64") -> None:
    dataset = StreamingDataset(local=str(folder), batch_size=1)
    for number, ids in enumerate(IDS):
        np.testing.assert_array_equal(dataset[number]["input_ids"], ids.astype(dtype))


@pytest.mark.parametrize(("dtype", "encoding"), [("int64", "bytes"), ("int32", "ndarray:int32")])
def test_tokens_of_llm_foundry_come_back(dtype: str, encoding: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in", dtype, encoding=encoding)
    convert([source], str(tmp_path / "out"), num_workers=1, schema=SchemaOptions(**SCHEMA))
    check_ids(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["int32", "uint16", "float32", "float64", ">i4", ">i8", ">u2"])
def test_bytes_of_another_type_are_refused_with_what_each_type_makes_of_them(dtype: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in", dtype)
    with pytest.raises(DataError, match=r"holds bytes, which are read as int64 .*token_encoding_type") as raised:
        convert([source], str(tmp_path / "out"), num_workers=1, schema=SchemaOptions(**SCHEMA))
    assert f"as '{dtype}' [0, 1, 2, …]" in str(raised.value)
    made = re.search(r"by (row \| .*\}) \(none of the first rows fits", str(raised.value))
    assert made is not None
    decode = made[1].replace("TYPE", repr(dtype))
    (tmp_path / "decode.py").write_text(f"import numpy\n\ndef decode(row):\n    return {decode}\n")
    schema = SchemaOptions(**SCHEMA, map=f"{tmp_path / 'decode.py'}:decode")
    convert([source], str(tmp_path / "mapped"), num_workers=1, schema=schema)
    check_ids(tmp_path / "mapped", dtype)


def test_bytes_of_a_few_ids_may_be_of_several_types() -> None:
    fields = Fields({"input_ids": np.array([7, 3], np.uint16).tobytes()}, named_alike("input_ids"))
    with pytest.raises(DataError, match=r"as 'int32' \[196615\], .*as 'uint16' \[7, 3\]"):
        TOKENS.read(fields, SchemaOptions(), SampleMedia(None))
    fields = Fields({"input_ids": b"odd"}, named_alike("input_ids"))
    with pytest.raises(DataError, match=r"3 bytes, not 8 for each: .*no ids in any usual type"):
        TOKENS.read(fields, SchemaOptions(), SampleMedia(None))
