"""Commands print to an output that takes only ASCII: other characters become escapes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from lmms_stream.cli.main import COMMANDS, main
from lmms_stream.converters.convert import convert


def printed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command writes to an output in ASCII."""
    buffer = io.BytesIO()
    with monkeypatch.context() as patched, io.TextIOWrapper(buffer, encoding="ascii", write_through=True) as output:
        patched.setattr(sys, "stdout", output)
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
        assert status in ((0, 1) if words[0] == "audit" else (0,)), words
        return buffer.getvalue().decode("ascii")


@pytest.fixture(scope="module")
def dataset(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("日本")
    rows = [{"question": f"日本 {number}?", "answer": "é…"} for number in range(40)]
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tokenizer").symlink_to(tokenizer)
    convert([folder / "x.jsonl"], str(folder / "o"), tokenizer=str(tokenizer), num_workers=1)
    return str(folder / "o")


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{}", "--samples", "1"], ["audit", "{}", "--tokenizer", "{}/../tokenizer"],
        ["plan", "{}", "--packing-length", "64"],
        ["plan", "{}", "--packing-length", "64", "--json"], ["verify", "{}"], ["unload", "{}", "{}/日本"],
        ["simulate", "{}", "--packing-length", "64", "--global-batch", "1", "--gpus", "1"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_command_prints_in_ascii(words: list[str], dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed([word.format(dataset) for word in words], monkeypatch)
    assert "\\u65e5" in text or text.startswith("{")


@pytest.mark.parametrize("command", COMMANDS.ours)
def test_help_prints_in_ascii(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command in printed([command, "--help"], monkeypatch)
