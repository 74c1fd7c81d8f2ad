"""Ends of answers: what a chat template writes behind an answer, and whether that is trained on.

A template may leave it to the next speaker's token to end an answer (GLM's: <|user|>, <|observation|>). Then nothing of
the end is among what is marked, and a model that is trained on the answers does not stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import ConfigError, DataError
from .byte_tokens import Span
from .chat_template import Messages, Render
from .tokenizers import FastTokenizer

_ANSWER = "zqanswerkx"  # letters, which no template escapes, cuts or trims
_QUESTION: dict[str, Any] = {"role": "user", "content": "zqquestionkx"}
_ANSWERS: dict[str, dict[str, Any]] = {
    "user": {"role": "assistant", "content": _ANSWER},
    "tool": {
        "role": "assistant",
        "content": _ANSWER,
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "zqnamekx", "arguments": {"x": 1}}}
        ],
    },
}  # by who speaks next
_NEXT: dict[str, dict[str, Any]] = {
    "user": _QUESTION,
    "tool": {"role": "tool", "name": "zqnamekx", "tool_call_id": "call00000", "content": "zqresultkx"},
    "system": {"role": "system", "content": "zqsystemkx"},
}


class Stops:
    """The tokens that a template writes behind answers. render: messages -> their text and the spans that are marked.

    has_marks: whether the template marks what is trained on.
    """

    def __init__(self, render: Render, tokenizer: FastTokenizer, *, has_marks: bool):
        self._render = render
        self._tokenizer = tokenizer
        self._has_marks = has_marks

    @cached_property
    def are_trained_on(self) -> bool:
        """Whether the end of an answer is marked; also True for a template that refuses a plain conversation."""
        made = self._rendered([_QUESTION, _ANSWERS["user"]])
        if made is None:
            return True
        text = made[0][: self._stop(*made)]
        _, answer, end = text.rpartition(_ANSWER)
        return not answer or bool(end.strip())

    @cached_property
    def _texts(self) -> dict[str, str]:
        """By who speaks next, the white space and the token behind an answer."""
        found = {role: self._text_before(role) for role in _NEXT}
        return {role: text for role, text in found.items() if text}

    @property
    def remedy(self) -> str:
        """Tell people how to train on the ends of answers."""
        if "user" in self._texts:
            return (
                "set learn_stop: true in the settings of the processor, or pass --learn-stop, to train on the next "
                "token that the template writes"
            )
        return "use a template that ends them"

    def check(self) -> None:
        """ConfigError for a template whose answers nothing would follow."""
        if "user" not in self._texts:
            raise ConfigError(
                f"learn_stop: the chat template of tokenizer {self._tokenizer.name} writes nothing but white space "
                f"between an answer and the next question, so no token ends an answer: {self.remedy}"
            )

    def extended(self, text: str, span: Span) -> Span:
        """The span, up to the end of the token that ends the answer, if that follows."""
        start, stop = span
        behind = text[stop:]
        ends = {each.strip() for each in self._texts.values()}
        end = max((each for each in ends if behind.lstrip().startswith(each)), key=len, default="")
        return (start, stop + len(behind) - len(behind.lstrip()) + len(end)) if end else span

    def ended(self, text: str, spans: Sequence[Span], last: Mapping[str, Any]) -> str:
        """The text of a conversation whose last message is an answer, with the token that ends it."""
        stop = self._stop(text, spans)
        behind = text[stop:]
        if behind.strip():
            return text
        role = "tool" if last.get("tool_calls") and "tool" in self._texts else "user"
        end = self._texts[role]
        return text[:stop] + (end if end.startswith(behind) else behind + end.lstrip())

    def _text_before(self, role: str) -> str:
        """Return what the template writes behind an answer if this role speaks next, up to the end of the first token.

        Return "" if it writes only white space before the next message's own texts, or nothing.
        """
        answered = [_QUESTION, _ANSWERS.get(role, _ANSWERS["user"])]
        upto, full = self._rendered(answered), self._rendered([*answered, _NEXT[role]])
        if upto is None or full is None:
            return ""
        stop = self._stop(*upto)
        if not full[0].startswith(upto[0][:stop]):
            return ""
        behind = full[0][stop:]
        texts_of_next = [text for key, text in _NEXT[role].items() if key != "role"]
        own = re.split("|".join(texts_of_next), behind, maxsplit=1)[0]
        if not own.strip():
            return ""
        start = len(own) - len(own.lstrip())
        encoding = self._tokenizer.encode(behind[start:], add_special_tokens=False)
        token = encoding.token_to_chars(0) if len(encoding) else None
        return own[: start + max(1, token[1])] if token else ""

    def _rendered(self, messages: Messages) -> tuple[str, list[Span]] | None:
        """None for a template that refuses these messages, or whose marks cannot be found."""
        try:
            return self._render(messages)
        except (ConfigError, DataError):
            return None

    def _stop(self, text: str, spans: Sequence[Span]) -> int:
        """The end of what is marked of the last answer."""
        return spans[-1][1] if self._has_marks and spans else len(text.rstrip())
