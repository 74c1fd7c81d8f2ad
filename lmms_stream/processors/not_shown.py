"""A conversation and a chat template -> the kinds of its content that the template does not show, as bits. Conversions
count them, with other faults of supervision that cost nothing to see.

The template renders the conversation with a mark in place of each text. A mark missing in the result stands for content
that is not shown. Conversations of one shape are rendered once. A shape has the roles, the keys of each message, tags
around texts, values of a short word, and everything else that templates test.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .answers import REASONING_KEYS, JoinedText, pieces_of_text, with_function, with_texts
from .base import Processor

DROPPED = ("system", "tools", "tool_calls", "tool_results", "reasoning", "content")  # kinds of content
ENDS = "ends"  # of answers, which are not trained on
MASKED = "masked"  # a sample without an answer to train on
EMPTY = "empty"  # a sample with an answer without content
UNSHOWN = "answers"  # a sample with an answer of which nothing is shown: the answer is not trained on
THOUGHTS = "thoughts"  # that are not shown, of answers that are trained on
KINDS = (*DROPPED, ENDS, MASKED, EMPTY, UNSHOWN, THOUGHTS)
# First bit of each kind, and the highest value: ENDS and THOUGHTS have a number of answers, others are set or not.
_FIRST_BITS = np.array([0, 1, 2, 3, 4, 5, 6, 29, 30, 31, 18])
_MASKS = np.array([1, 1, 1, 1, 1, 1, (1 << 12) - 1, 1, 1, 1, (1 << 11) - 1])
OnDropped = Literal["error", "warn"]
_CALLING = ("tools", "tool_calls", UNSHOWN)
_OF_ROLES = {"system": "system", "developer": "system", "tool": "tool_results", "function": "tool_results"}
_VARYING_KEYS = {"name", "id", "tool_call_id", *REASONING_KEYS}  # their values are not part of a shape
_SHORT_WORD = re.compile(r"[A-Za-z_-]{1,16}")
MOST_SHAPES = 4096  # of conversations, kept with a result each
Render = Callable[[list[dict[str, Any]], Sequence[Any] | None], str]


def kinds_of(bits: int) -> list[str]:
    """Return the kinds whose bits are set.

    >>> kinds_of(0b10010)
    ['tools', 'reasoning']
    """
    return list(counts_of(np.array([bits])))


def counts_of(bits: NDArray[np.integer[Any]]) -> dict[str, int]:
    """Return the number of samples of each kind in the bits, and of answers for ENDS."""
    return named_counts(amounts_of(bits).sum(axis=0))


def amounts_of(bits: NDArray[np.integer[Any]] | int) -> NDArray[np.int64]:
    """Return the counts of each kind in KINDS, int64[..., len(KINDS)]. bits: int[...].

    >>> amounts_of(0b10_000010).tolist()  # tools, and two ends
    [0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    """
    amounts: NDArray[np.int64] = np.asarray(bits, np.int64)[..., None] >> _FIRST_BITS & _MASKS
    return amounts


def named_counts(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return the counts of KINDS by name, without zeros."""
    return {kind: count for kind, count in zip(KINDS, counts.tolist(), strict=True) if count}


def bits_of(kind: str, num_answers: int) -> int:
    """Return the bits of a number of answers, for ENDS or THOUGHTS; the highest number stands for all above it."""
    index = KINDS.index(kind)
    return min(num_answers, int(_MASKS[index])) << int(_FIRST_BITS[index])


def is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message, as input of templates, has no text, no media, no calls and no reasoning."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    has_content = any(part["type"] != "text" or part["text"].strip() for part in parts)
    others = (value for key, value in message.items() if key not in ("role", "content", "name"))
    return not has_content and not any(map(_is_filled, others))


def bit_of(kind: str) -> int:
    """Return the bit of a kind other than ENDS and THOUGHTS."""
    return 1 << int(_FIRST_BITS[KINDS.index(kind)])


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the counts of several datasets together."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def counts_text(counts: Mapping[str, int]) -> str:
    """Message for users about the counts of KINDS.

    >>> counts_text({"system": 1, "masked": 1})
    'the chat template does not show: system of 1 sample; 1 sample has no answer to train on'
    """
    lost = [each for each in DROPPED if each in counts]
    shown = ", ".join(
        f"{kind.replace('_', ' ')} of {counts[kind]:,} sample{'s' * (counts[kind] != 1)}" for kind in lost
    )
    said = [f"the chat template does not show: {shown}"] if shown else []
    if num_ends := counts.get(ENDS, 0):
        said.append(
            "the end of 1 answer is not trained on"
            if num_ends == 1
            else f"the ends of {num_ends:,} answers are not trained on"
        )
    if num_thoughts := counts.get(THOUGHTS, 0):
        said.append(
            f"{num_thoughts:,} {'answer is' if num_thoughts == 1 else 'answers are'} trained on without "
            f"{'its' if num_thoughts == 1 else 'their'} thoughts: lmms-stream convert --learn each keeps them"
        )
    unshown = "an answer of which nothing is shown, which is not trained on"
    for kind, what in ((UNSHOWN, unshown), (MASKED, "no answer to train on"), (EMPTY, "an empty answer")):
        if number := counts.get(kind, 0):
            said.append(f"{number:,} {'sample has' if number == 1 else 'samples have'} {what}")
    return "; ".join(said)


def keys_named(processor: Processor | None) -> set[str]:
    """Return the words of the chat templates of a processor, including all keys of messages that they read."""
    templates = getattr(getattr(processor, "tokenizer", None), "chat_templates", {})
    return set(re.findall(r"\w+", " ".join(templates.values())))


def loses_calls(counts: Iterable[str]) -> bool:
    """Return whether tools, tool calls or whole answers are among the kinds."""
    return not set(counts).isdisjoint(_CALLING)


def check_shown(bits: int, *, on_dropped: OnDropped) -> None:
    """Raise DataError for tools, tool calls or whole answers that are not shown, unless `on_dropped` is "warn"."""
    lost = [kind.replace("_", " ") for kind in kinds_of(bits) if kind in _CALLING]
    lost = [kind for kind in lost if kind != UNSHOWN] or lost
    if lost and on_dropped == "error":
        raise DataError(
            f"the chat template does not show the {' and '.join(lost)} of the conversation, or only a part of them, "
            "and the rest would be lost: use a template that shows them, or pass --on-dropped warn to lmms-stream "
            "convert or index, which counts such samples"
        )


class NotShown:
    """Detector of the kinds of content that a chat template does not show.

    render: messages and tools -> their text. source: of all templates for rendering.
    """

    def __init__(self, render: Render, source: str):
        self._render = render
        self._source = source
        self._known: dict[Hashable, Lost | None] = {}

    def of(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Lost:
        """Return the content that is not shown; nothing if the template refuses the conversation with marks and
        without.
        """
        shape = shape_of(messages, tools, self._source)
        if shape not in self._known:
            if len(self._known) == MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._lost(messages, tools, by_marks=True)
        nothing = Lost(0, frozenset(), frozenset())  # measuring raises the template's error
        return self._known[shape] or self._lost(messages, tools, by_marks=False) or nothing

    def _lost(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, by_marks: bool
    ) -> Lost | None:
        """Return what all conversations of the shape lose, or this conversation, by its texts; None if the template
        refuses the messages with marks, or as they are.
        """
        marking = _Marking()
        marked, marked_tools = [marking.message(each) for each in messages], marking.tools(tools)
        try:
            text = self._render(marked, marked_tools) if by_marks else self._render([*map(dict, messages)], tools)
        except DataError:
            return None
        text, marks = text.casefold(), marking.marks
        hidden = {each for each in marks if not any(form in text for form in ([each.mark] if by_marks else each.forms))}
        shown = {each.message for each in marks if each not in hidden}
        spoken = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
        return Lost(
            sum(map(bit_of, {each.kind for each in hidden})),
            frozenset(spoken & {each.message for each in hidden} - shown),
            frozenset(spoken & {each.message for each in hidden if each.kind == "reasoning"}),
        )


class _Mark(NamedTuple):
    """A mark and the replaced text; "" for content that templates write in many ways: arguments, descriptions.

    message: index of the message, None for a tool.
    """

    kind: str
    mark: str
    text: str
    message: int | None

    @property
    def forms(self) -> list[str]:
        """The text as templates may write it: plain, and as a JSON string; all in lower case for comparison."""
        text = self.text.strip()
        in_json = (json.dumps(text, ensure_ascii=ensure_ascii)[1:-1] for ensure_ascii in (False, True))
        return [form.casefold() for form in (text, *in_json)]


class Lost(NamedTuple):
    """Content missing in a conversation's text. bits: kinds, of DROPPED. answers: indices of the assistant's messages
    without any shown text; thoughts: indices of messages without their thoughts.
    """

    bits: int
    answers: frozenset[int]
    thoughts: frozenset[int]


class _Marking:
    """Replaces texts of messages and of tools by marks."""

    def __init__(self) -> None:
        self.marks: list[_Mark] = []
        self._message: int | None = -1  # index of the message, None for tools

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._message = -1 if self._message is None else self._message + 1
        of_role = _OF_ROLES.get(message["role"], "content")
        thoughts: dict[str, str] = {}

        def marked(kind: str, text: str) -> str:
            if kind == "reasoning" and message["role"] == "assistant":
                return thoughts.get(text) or thoughts.setdefault(text, self._mark(kind, text))
            return self._mark(of_role, text)

        return with_texts(message, marked, self._function)

    def tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        self._message = None
        return None if tools is None else [with_function(tool, self._tool) for tool in tools]

    def _tool(self, function: dict[str, Any]) -> dict[str, Any]:
        """Mark the name, the description and the names of parameters of a tool."""
        marked = self._named(function, "tools")
        if _is_text(function.get("description")):
            marked["description"] = self._mark("tools", "")
        if properties := _properties_of(function):
            marks = {name: self._mark("tools", "") for name in properties}
            schema = {**function["parameters"], "properties": {marks[name]: each for name, each in properties.items()}}
            if isinstance(schema.get("required"), list):
                schema["required"] = [marks.get(str(name), name) for name in schema["required"]]
            marked["parameters"] = schema
        return marked

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        marked = self._named(function, "tool_calls")
        key, arguments = _arguments_of(function)
        if isinstance(arguments, dict) and arguments:
            marked[key] = {"value": self._mark("tool_calls", "")}
        elif isinstance(arguments, str) and arguments.strip():
            marked[key] = self._mark("tool_calls", "")
        elif isinstance(arguments, list) and _with_leaves(arguments, "") != _with_leaves(arguments, "x"):
            marked[key] = _with_leaves(arguments, self._mark("tool_calls", ""))
        return marked

    def _named(self, function: dict[str, Any], kind: str) -> dict[str, Any]:
        has_name = isinstance(function.get("name"), str) and function["name"]
        return {**function, "name": self._mark(kind, function["name"])} if has_name else dict(function)

    def _mark(self, kind: str, text: str) -> str:
        mark = f"zq{len(self.marks)}kx"  # letters and digits that no template escapes, cuts or trims
        self.marks.append(_Mark(kind, mark, text, self._message))
        return mark


def _arguments_of(function: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key and the value of a call's arguments."""
    key = "parameters" if "parameters" in function and "arguments" not in function else "arguments"
    return key, function.get(key)


def _properties_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a tool by their names; {} for a tool without, or with another schema."""
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _with_leaves(value: Any, leaf: str) -> Any:
    """Return JSON with a single text in place of all its texts and numbers."""
    if isinstance(value, list):
        return [_with_leaves(each, leaf) for each in value]
    if isinstance(value, dict):
        return {key: _with_leaves(each, leaf) for key, each in value.items()}
    return leaf


def shape_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, source: str) -> Hashable:
    """Return everything in a conversation except its texts that can change what a template of this source writes."""
    shapes: list[Hashable] = []
    for message in messages:
        text = message["content"] if len(message) == 2 and type(message.get("content")) is str else "<"
        shapes.append(_shape(message, source) if "<" in text else (message["role"], bool(text.strip())))
    return tuple(shapes), tuple(map(_tool_shape, tools or ()))


def _shape(message: Mapping[str, Any], source: str) -> Hashable:
    """Return everything in a message except its texts that can change what a template of this source shows."""
    role, content = message["role"], message.get("content")
    shape: Hashable = "null" if "content" in message else "missing"
    if isinstance(content, JoinedText):
        shape = "joined", tuple(_text_shape(part["text"], role, source) for part in content.parts)
    elif isinstance(content, str):
        shape = _text_shape(content, role, source)
    elif isinstance(content, list):
        shape = tuple(
            (part["type"], part["type"] == "text" and _text_shape(part["text"], role, source)) for part in content
        )
    if len(message) == 2 and "content" in message:
        return role, shape
    others = tuple(
        (key, _is_filled(message[key]) if key in _VARYING_KEYS else _value_shape(message[key]))
        for key in sorted(message.keys() - {"role", "content"})
    )
    texts = (message[key].strip() for key in REASONING_KEYS if isinstance(message.get(key), str))
    thoughts = [*filter(None, texts)]
    return role, shape, others, tuple(map(thoughts.index, thoughts))


def _text_shape(text: str, role: str, source: str) -> Hashable:
    """Return the shape of a text, without tags (e.g. of HTML) whose beginning is not in the source."""
    if "<" not in text:
        return bool(text.strip())
    tests_any = "'<'" in source or '"<"' in source
    pieces = [each for each in pieces_of_text(text, role) if each != ("", "")]
    shape = tuple(kind or piece for kind, piece in pieces if kind or tests_any or piece.strip()[:4] in source)
    return shape if shape != ("content",) else True


def _tool_shape(tool: Any) -> Hashable:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    function = function if isinstance(function, dict) else {}
    return _value_shape(tool), _is_text(function.get("description")), bool(_properties_of(function))


def _value_shape(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_value_shape, value))
    if isinstance(value, dict):
        function = value.get("function", value)
        function = function if isinstance(function, dict) else {}
        key, arguments = _arguments_of(function)
        listed = str(_with_leaves(arguments, "")) if isinstance(arguments, list) else _is_filled(arguments)
        kinds = "function" in value, _value_shape(value.get("type")), bool(function.get("name"))
        return *kinds, key, type(arguments).__name__, listed
    return value if isinstance(value, str) and _SHORT_WORD.fullmatch(value) else _is_filled(value)


def _is_filled(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)
