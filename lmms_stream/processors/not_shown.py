"""A conversation and a chat template -> the kinds of its content that the template does not show.

The template renders the conversation with a mark in place of each text. A mark that is missing in the result stands for
content that is not shown. Conversations of one shape (roles, and what each message has) are rendered once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .base import Processor

ENDS = "ends"  # of answers, none of which is trained on
KINDS = ("system", "tools", "tool_calls", "tool_results", "reasoning", "content", ENDS)  # in the order of bits
OnDropped = Literal["error", "warn"]
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CALLING = ("tools", "tool_calls")
_OF_ROLES = {"system": "system", "developer": "system", "tool": "tool_results", "function": "tool_results"}
_END_OF_THOUGHT = "</think>"
_MOST_SHAPES = 4096
Render = Callable[[list[dict[str, Any]], list[Any] | None], str]


def kinds_of(bits: int) -> list[str]:
    """Return the kinds whose bits are set.

    >>> kinds_of(0b10010)
    ['tools', 'reasoning']
    """
    return [kind for number, kind in enumerate(KINDS) if bits >> number & 1]


def counts_of(bits: NDArray[np.integer[Any]]) -> dict[str, int]:
    """Return the number of samples of each kind that is set in any of the bits."""
    counts = {kind: int(np.count_nonzero(bits >> number & 1)) for number, kind in enumerate(KINDS)}
    return {kind: count for kind, count in counts.items() if count}


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the counts of several datasets together."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def counts_text(counts: Mapping[str, int]) -> str:
    """Tell people how many samples have content that the chat template does not show, or ends that are not trained on.

    >>> counts_text({"system": 1, "ends": 2})
    'the chat template does not show: system of 1 sample; no end of an answer is trained on in 2 samples'
    """
    samples = {kind: f"{count:,} sample{'s' * (count != 1)}" for kind, count in counts.items()}
    shown = ", ".join(
        f"{kind.replace('_', ' ')} of {samples[kind]}" for kind in KINDS if kind in samples and kind != ENDS
    )
    said = [f"the chat template does not show: {shown}"] if shown else []
    return "; ".join([*said, *([f"no end of an answer is trained on in {samples[ENDS]}"] if ENDS in samples else [])])


def keys_named(processor: Processor | None) -> set[str]:
    """Return the words of the chat templates of a processor, among them all keys of messages that they read."""
    templates = getattr(getattr(processor, "tokenizer", None), "chat_templates", {})
    return set(re.findall(r"\w+", " ".join(templates.values())))


def loses_calls(counts: Iterable[str]) -> bool:
    """Return whether tools or tool calls are among the kinds."""
    return not set(counts).isdisjoint(_CALLING)


def check_shown(bits: int, *, on_dropped: OnDropped) -> None:
    """DataError for tools or tool calls that are not shown, unless `on_dropped` is "warn"."""
    lost = [kind.replace("_", " ") for kind in kinds_of(bits) if kind in _CALLING]
    if lost and on_dropped == "error":
        raise DataError(
            f"the chat template does not show the {' and '.join(lost)} of the conversation, which would be lost: use a "
            "template that shows them, or pass --on-dropped warn to lmms-stream convert or index, which counts such "
            "samples"
        )


class NotShown:
    """Finds the kinds of content that a chat template does not show. render: messages and tools -> their text."""

    def __init__(self, render: Render):
        self._render = render
        self._known: dict[Hashable, int] = {}

    def of(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> int:
        """Return the kinds as bits; 0 where the template refuses the conversation with marks and without."""
        shape = (tuple(map(_shape, messages)), tuple("function" in tool for tool in tools or ()))
        bits = self._known.get(shape)
        if bits is None:
            if len(self._known) == _MOST_SHAPES:
                self._known.clear()
            bits = self._known[shape] = self._by_marks(messages, tools)
        return bits if bits >= 0 else self._by_texts(messages, tools)

    def _by_marks(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> int:
        """Return the kinds of all conversations of the shape; -1 where the template refuses the marks."""
        marking = _Marking()
        marked, marked_tools = [marking.message(each) for each in messages], marking.tools(tools)
        try:
            text = self._render(marked, marked_tools).casefold()
        except DataError:
            return -1
        return _bits(each.kind for each in marking.marks if each.mark not in text)

    def _by_texts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> int:
        """Return the kinds of one conversation whose texts are not in what the template writes."""
        marking = _Marking()
        for each in messages:
            marking.message(each)
        marking.tools(tools)
        try:
            text = self._render([dict(each) for each in messages], None if tools is None else list(tools))
        except DataError:  # measuring it gives this error
            return 0
        return _bits(each.kind for each in marking.marks if each.text.strip() not in text)


class _Mark(NamedTuple):
    """A mark and the text that it replaces; "" for arguments of calls, which templates write in many ways."""

    kind: str
    mark: str
    text: str


class _Marking:
    """Replaces texts of messages and names of tools by marks."""

    def __init__(self) -> None:
        self.marks: list[_Mark] = []

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = dict(message)
        kind = _OF_ROLES.get(message["role"], "content")
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._content(content, kind, thinks=_thinks(message))
        elif isinstance(content, list):
            marked["content"] = [
                {**part, "text": self._content(part["text"], kind)} if part.get("type") == "text" else part
                for part in content
            ]
        keys = [key for key in REASONING_KEYS if isinstance(message.get(key), str) and message[key].strip()]
        if keys:
            mark = self._mark("reasoning", message[keys[0]])
            marked |= dict.fromkeys(keys, mark)
        if isinstance(message.get("tool_calls"), list):
            marked["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if isinstance(message.get("function_call"), dict):
            marked["function_call"] = self._function(message["function_call"])
        return marked

    def tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        if tools is None:
            return None
        return [self._called(tool, lambda function: self._named(function, "tools")) for tool in tools]

    def _content(self, text: str, kind: str, *, thinks: bool = False) -> str:
        if not text.strip():
            return text
        if not thinks:
            return self._mark(kind, text)
        thought, _, rest = text.rpartition(_END_OF_THOUGHT)
        begin, thought = ("<think>\n", thought.replace("<think>", "")) if "<think>" in thought else ("", thought)
        marked = begin + self._content(thought, "reasoning") + f"\n{_END_OF_THOUGHT}\n\n"
        return marked + self._content(rest, kind)

    def _call(self, call: Any) -> Any:
        return self._called(call, self._function)

    def _called(self, value: Any, mark: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        """A tool or a call whose function, or itself, is marked."""
        if not isinstance(value, dict):
            return value
        function = value.get("function")
        return {**value, "function": mark(function)} if isinstance(function, dict) else mark(value)

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        marked = self._named(function, "tool_calls")
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and arguments:
            marked["arguments"] = {"value": self._mark("tool_calls", "")}
        elif isinstance(arguments, str) and arguments.strip():
            marked["arguments"] = self._mark("tool_calls", "")
        return marked

    def _named(self, function: dict[str, Any], kind: str) -> dict[str, Any]:
        has_name = isinstance(function.get("name"), str) and function["name"]
        return {**function, "name": self._mark(kind, function["name"])} if has_name else dict(function)

    def _mark(self, kind: str, text: str) -> str:
        mark = f"zq{len(self.marks)}kx"  # letters and digits, which no template escapes, cuts or trims
        self.marks.append(_Mark(kind, mark, text))
        return mark


def _bits(kinds: Iterable[str]) -> int:
    return sum(1 << KINDS.index(kind) for kind in set(kinds))


def _thinks(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and _END_OF_THOUGHT in message["content"]


def _shape(message: Mapping[str, Any]) -> Hashable:
    """All of a message that may decide what a template shows of it, but its texts."""
    content = message.get("content")
    shape: Hashable = None
    if isinstance(content, str):
        shape = (bool(content.strip()), "<think>" in content) if _thinks(message) else bool(content.strip())
    elif isinstance(content, list):
        shape = tuple((part.get("type"), bool(part.get("text", "").strip())) for part in content)
    if len(message) == 2:
        return message["role"], shape
    others = ((key, _value_shape(message[key])) for key in sorted(message.keys() - {"role", "content"}))
    return message["role"], shape, tuple(others)


def _value_shape(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_value_shape, value))
    if isinstance(value, dict):
        function = value.get("function", value)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        return "function" in value, type(arguments).__name__, bool(arguments)
    return bool(value.strip()) if isinstance(value, str) else bool(value)
