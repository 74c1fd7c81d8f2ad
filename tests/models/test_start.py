"""The beginnings on docs/start.md and in the README are typed, with model makers' tokenizers and small models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.processors.chat import ChatProcessor

from ..docs.pages import DOCS, ROOT, Page
from ..docs.test_pages import run
from ..rounds import in_long_rounds
from . import makers
from .test_chain import write_weights

FOLDERS = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3_1",
    "google/gemma-3-1b-it": "gemma3",
    "openai/gpt-oss-20b": "gptoss",
    "base": "llama2",
}  # a name on the page -> a tokenizer
PAGE = Page(DOCS / "start.md")
SHOWN = [block for block in PAGE.blocks if block.language == "sh"]
COMMANDS = {next(name for name in FOLDERS if name in block.text): [*block.commands()] for block in SHOWN}
FILES = {block.title: block.text for block in PAGE.blocks if block.title}


def rows(name: str) -> list[dict[str, Any]]:
    thoughts = {"reasoning_content": "hm"} if name in ("qwen3", "gptoss") else {}
    several = [makers.user("Hi"), makers.answer("Hello.", **thoughts), makers.user("And?"), makers.answer("More.")]
    made: list[dict[str, Any]] = [{"messages": several}, {"messages": several[:2]}]
    if name in ("qwen3", "gptoss"):
        messages, tools = makers.CONVERSATIONS["call"]
        made.append({"messages": messages, "tools": tools})
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.yaml").write_text(FILES["own.yaml"])
    return tmp_path


@in_long_rounds
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_begins_as_the_page_says(name: str, folder: Path) -> None:
    kind = FOLDERS[name]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(kind) * 20))
    makers.with_template(kind, folder / name)
    if name == "base":
        with pytest.raises(ConfigError, match=r"write a template into chat_template\.jinja in its"):
            ChatProcessor.from_pretrained(str(folder / name))
        (folder / "base" / "chat_template.jinja").write_text(FILES["base/chat_template.jinja"])
    write_weights(kind, folder / name)
    convert, train = COMMANDS[name]
    run(convert, folder)
    run(f"{train} train.max_steps=1 dataset.packing_length=512 train.global_batch=1", folder)


@in_long_rounds
def test_the_readme_has_the_beginnings_of_the_page() -> None:
    named = re.findall(r"lmms-stream convert chats\.jsonl .*--tokenizer (\S+)", (ROOT / "README.md").read_text())
    assert named == [*FOLDERS]
