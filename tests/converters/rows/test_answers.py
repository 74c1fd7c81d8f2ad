"""A chat gives a chat for each answer that is learnt, with the media that it shows."""

from __future__ import annotations

import json
from typing import Any

from lmms_stream.converters.rows.mapper import each_answer


def says(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def image(start: int, stop: int) -> dict[str, Any]:
    return {"type": "image", "mime": "image/png", "span": [start, stop - start], "width": 1, "height": 1}


def test_each_sample_ends_with_an_answer_that_alone_is_learnt() -> None:
    calls = [{"type": "function", "function": {"name": "f"}}]
    chat = [
        says("system", "brief"), says("user", [image(0, 3), {"type": "text", "text": "ü"}]), says("assistant", "one"),
        says("assistant", None, tool_calls=calls), says("tool", "2"), says("assistant", "no", learn=False),
        says("user", [image(3, 8)]), says("assistant", ""), says("user", "?"), says("assistant", "three"),
        says("user", [image(8, 9)]),
    ]  # fmt: skip
    samples = list(each_answer({"messages": json.dumps(chat), "media": b"aaabbbbbc", "id": 7}))
    ends = [2, 3, 9]
    assert [len(json.loads(sample["messages"])) - 1 for sample in samples] == ends
    for sample, end in zip(samples, ends, strict=True):
        *before, answer = json.loads(sample["messages"])
        assert answer == chat[end]
        assert before == [each | {"learn": False} if each["role"] == "assistant" else each for each in chat[:end]]
        assert sample["id"] == 7
    assert [sample["media"] for sample in samples] == [b"aaa", b"aaa", b"aaabbbbb"]


def test_tools_stay_with_each_answer_and_large_integers_as_they_are() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 1 << 80}}}]
    chat = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]
    samples = list(each_answer({"messages": json.dumps({"messages": chat, "tools": tools}), "media": b""}))
    assert [json.loads(sample["messages"])["tools"] for sample in samples] == [tools, tools]
