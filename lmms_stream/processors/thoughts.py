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
from .base import or_error
from .chat_template import REASONING_KEYS

_OPENING = re.compile(r"<([\w:]+)>\s*\Z")  # at the end of a generation prompt
_PLAIN: tuple[dict[str, Any], ...] = ({"role": "user", "content": "zqq"}, {"role": "assistant", "content": "zqa"})
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
        return found[0] if self._is_of_thoughts(f"<{found[1]}>", before) else ""

    def _is_of_thoughts(self, tag: str, prompt: str) -> bool:
        """Whether the template cuts a thought in this tag from answers, or writes it behind the generation prompt."""
        in_content = {"role": "assistant", "content": f"zqt{_closing(tag)}zqa"}
        made = [
            or_error(self._render, [_PLAIN[0], each])
            for each in (in_content, _PLAIN[1] | dict.fromkeys(REASONING_KEYS, "zqt"))
        ]
        texts = [None if isinstance(each, DataError) else each[0] for each in made]
        if texts[0] is not None and "zqt" not in texts[0] and "zqa" in texts[0]:
            return True
        return any(text is not None and text.startswith(prompt) for text in texts)

    def after(self, prompt: str, text: str, answer: Mapping[str, Any]) -> str:
        """The text of a conversation whose last answer is written after the generation prompt, its thought first.

        prompt: the text of the messages before, with the generation prompt. Another text than the template makes of
        plain conversations is returned as it is. DataError for a thought without an end, and for two thoughts.
        """
        tag, before = self.opening.strip(), prompt.removesuffix(self.opening)
        if before == prompt:
            return text
        content = _content_of(answer)
        if content.lstrip().startswith(tag) and _closing(tag) not in content:
            raise DataError(
                f"an answer begins with {tag} and has no {_closing(tag)}, so its thought has no end: write "
                f"{_closing(tag)} where the thought ends, or remove the row"
            )
        if text.startswith(prompt) or not text.startswith(before):
            return text
        behind = text[len(before) :]
        if _closing(tag) in behind:  # the template has written a thought, or a part of one
            return text
        thought, said = _thought_and_answer(answer, content, tag)
        space = said[: len(said) - len(said.lstrip())]
        if not behind.startswith(space):
            behind = space + behind
        return f"{prompt}{thought}\n{_closing(tag)}{behind}"


def _closing(tag: str) -> str:
    return f"</{tag[1:]}"


def _content_of(answer: Mapping[str, Any]) -> str:
    content = answer.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content if part["type"] == "text")
    return content


def _thought_and_answer(answer: Mapping[str, Any], content: str, tag: str) -> tuple[str, str]:
    """The thought of an answer without its tags, "" for none, and the text after it, with the space between them."""
    begun, closing, said = content.rpartition(_closing(tag))
    found = [begun, *(answer[key] for key in REASONING_KEYS if isinstance(answer.get(key), str))]
    found = [each.strip().removeprefix(tag).strip() for each in found]
    thoughts = [each for each in dict.fromkeys(found) if each]
    if len(thoughts) > 1:
        raise DataError(
            f"an answer has two different thoughts, {thoughts[0][:40]!r} and {thoughts[1][:40]!r}, and the chat "
            f"template takes one: keep one of them, in the content or in {', '.join(REASONING_KEYS)}"
        )
    return "".join(thoughts), said if closing else "\n\n" + content.lstrip()
