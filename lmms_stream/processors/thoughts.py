"""Thoughts that a chat template begins in its generation prompt and cuts from answers, as DeepSeek-R1-distill's does.

Such a prompt ends in <think>, and the template writes an answer without its thought. The model must write the thought,
</think> and the answer after the prompt, so the last answer of a conversation is written in this way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from ..errors import ConfigError, DataError

_OPENING = re.compile(r"<([\w:]+)>\s*\Z")  # at the end of a generation prompt
_PLAIN: tuple[dict[str, Any], ...] = ({"role": "user", "content": "zqq"}, {"role": "assistant", "content": "zqa"})
_KEYS = ("reasoning_content", "reasoning", "thinking")  # of messages whose thoughts are not in their content
Render = Callable[..., tuple[str, Any]]


class Thoughts:
    """Answers as they follow the generation prompt. render: a template's `render`."""

    def __init__(self, render: Render):
        self._render = render

    @cached_property
    def opening(self) -> str:
        """The end of the generation prompt with which the template does not begin a plain answer; "" for none."""
        try:
            (before, _), (upto, _) = self._render(_PLAIN[:1], prompt=True), self._render(_PLAIN)
        except (ConfigError, DataError):
            return ""
        found = _OPENING.search(before)
        if found is None or upto.startswith(before) or not upto.startswith(before[: found.start()]):
            return ""
        return found[0]

    def after(self, prompt: str, text: str, answer: Mapping[str, Any]) -> str:
        """The text of a conversation whose last answer is written after the generation prompt, its thought first.

        prompt: the text of the messages before, with the generation prompt. Another text than the template makes of
        plain conversations is returned as it is.
        """
        before = prompt.removesuffix(self.opening)
        if text.startswith(prompt) or before == prompt or not text.startswith(before):
            return text
        tag = self.opening.strip()
        thought, said = _thought_and_answer(answer, tag)
        behind, space = text[len(before) :], said[: len(said) - len(said.lstrip())]
        if not behind.startswith(space):
            behind = space + behind
        return f"{prompt}{thought}\n{_closing(tag)}{behind}"


def _closing(tag: str) -> str:
    return f"</{tag[1:]}"


def _thought_and_answer(answer: Mapping[str, Any], tag: str) -> tuple[str, str]:
    """The thought of an answer without its tags, "" for none, and the text after it, with the space between them."""
    content = answer.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content if part["type"] == "text")
    thought, closing, said = content.rpartition(_closing(tag))
    if not closing:
        thought = next((answer[key] for key in _KEYS if isinstance(answer.get(key), str)), "")
        said = "\n\n" + content.lstrip()
    return thought.strip().removeprefix(tag).strip(), said
