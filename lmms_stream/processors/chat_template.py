"""Chat templates: a conversation -> its text, and the spans that the template marks for training.

Templates are Jinja, run in a sandbox with transformers' filters and globals, and the statement {% generation %} … {%
endgeneration %}. This module repeats code of transformers because transformers imports torch, at a cost of 600 MiB for
each process of a conversion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property, partial
from types import BuiltinMethodType, FunctionType
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import ConfigError, DataError
from .answers import (
    CALL,
    PROBES,
    Finder,
    MessageText,
    Thoughts,
    add_notes,
    functions_of_notes,
    marked_message,
    pieces_of,
)
from .answers import REASONING_KEYS as REASONING_KEYS
from .base import or_error
from .byte_tokens import Span
from .tokenizers import FastTokenizer

TODAY = date(2024, 7, 26)  # value of today for templates: a text must not depend on the day of rendering
Messages = Sequence[Mapping[str, Any]]
_PLAIN = {"role", "content"}


class Written(NamedTuple):
    """Text of messages and its marked spans. messages: the template's input, equivalent to the given messages."""

    text: str
    spans: list[Span]
    messages: Messages


Render = Callable[[Messages], Written]


class ChatTemplate:
    """Renderer of conversations. source: the template, as Jinja. variables: its other variables, the special tokens.
    by: calls its first argument with messages, or with equivalent messages.

    has_marks: the source has {% generation %}. tests_null: the source tests whether a content is null. Raises
    ConfigError for an invalid template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        *,
        by: Callable[[Render, Messages], Written] = lambda render, messages: render(messages),
    ):
        self._by = by
        self._environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise
        self._environment.globals["strftime_now"] = datetime.combine(TODAY, time()).strftime
        try:
            self._parsed = self._environment.parse(source)
            self.tests_null = tests_null_content(self._parsed)
            self.has_marks = self._parsed.find(nodes.ExtensionAttribute) is not None
            self._template = self._environment.from_string(self._parsed)
        except (TemplateError, SyntaxError, RecursionError) as error:  # Python refuses expressions nested too deep
            raise ConfigError(f"the chat template is not one ({error}): correct the tokenizer's") from error
        self._variables = {**self._template.globals, **variables}

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, prompt: bool = False) -> Written:
        """Return the text and the marked spans, in the order of the template. prompt: end with the generation prompt.

        A thought is passed under the keys that templates read. A null content is passed as "", or as null if the
        template tests for null. The content "" of a call is passed as null if only then the call is shown. Raises
        DataError for a conversation that the template refuses, whatever error the template raises.
        """
        if all(type(each) is dict and each.keys() == _PLAIN and type(each["content"]) is str for each in messages):
            # Nearly all conversations: the steps below do not change their text.
            return self._written(self._template, messages, tools, prompt=prompt)
        render = partial(self._by, partial(self._written, self._template, tools=tools, prompt=prompt))
        messages = with_reasoning(messages)
        called = [each for each in messages if isinstance(each, Mapping) and each.get("tool_calls")]
        emptied = [each for each in called if each.get("content") == ""] if self.tests_null else []
        made = or_error(self._rendered, render, messages)
        if emptied:
            with_nulls = [{**each, "content": None} if each in emptied else each for each in messages]
            by_nulls = or_error(self._rendered, render, with_nulls)
            if isinstance(made, DataError) or (
                not isinstance(by_nulls, DataError)
                and _num_calls(by_nulls) > _num_calls(made)
                and _num_nones(by_nulls) <= _num_nones(made)
            ):
                made = by_nulls
        if isinstance(made, DataError):
            raise made
        return made

    def _rendered(self, render: Render, messages: Messages) -> Written:
        """Render messages with their null contents as null or as ""."""
        filled = without_nulls(messages)
        if filled is messages or not self.tests_null:
            return render(filled)
        with_nulls = without_nulls(messages, but_of="assistant")
        by_nulls, by_texts = or_error(render, with_nulls), or_error(render, filled)
        if isinstance(by_texts, DataError):
            if isinstance(by_nulls, DataError):
                raise by_texts
            return by_nulls
        if isinstance(by_nulls, DataError) or (
            _num_nones(by_nulls) > _num_nones(by_texts) and _writes_nulls(render, with_nulls, filled)
        ):
            return by_texts
        return by_nulls

    def pieces(
        self, written: Written, tools: Sequence[Any] | None = None, *, prompt: bool = False
    ) -> list[MessageText] | None:
        """Return the text of each message in a result of `render`; None if the template does not prove the places."""
        mark = next(mark for mark in map(chr, range(0xF0000, 0xFFFFE)) if mark not in written.text)  # of a private area
        messages = [marked_message(each, f"{mark}.{index}{mark}") for index, each in enumerate(written.messages)]
        functions = functions_of_notes(messages, mark)
        traced = or_error(self._written, self._traced, messages, tools, prompt=prompt, **functions)
        if isinstance(traced, DataError):
            return None
        text, pieces = pieces_of(traced.text, mark, len(messages))
        return pieces if text == written.text else None

    @cached_property
    def thoughts(self) -> Thoughts:
        return Thoughts(self.render)

    @cached_property
    def finder(self) -> Finder:
        return Finder(self.render, self.pieces, self.thoughts)

    @cached_property
    def _traced(self) -> Template:
        """The template with notes of the current message."""
        add_notes(self._parsed)  # compiled already
        return self._environment.from_string(self._parsed)

    def _written(
        self,
        template: Template,
        messages: Messages,
        tools: Sequence[Any] | None,
        *,
        prompt: bool,
        **functions: Any,
    ) -> Written:
        marks: _Marks = self._environment.lmms_marks  # type: ignore[attr-defined]
        pieces = marks.begin()
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt, **functions}
        try:
            context = template.new_context({**self._variables, **given}, shared=True)
            for piece in template.root_render_func(context):
                pieces.append(piece)  # one at a time: marks count the text before them
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any error: it concerns only this conversation
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise DataError(
                f"the chat template refuses the conversation ({kind}{error}): correct it, or use another template"
            ) from error
        text, spans = "".join(pieces), marks.spans
        if any(text[start:stop] != marked for (start, stop), marked in zip(spans, marks.texts, strict=True)):
            raise ConfigError(
                "the chat template has {% generation %} in a macro or in {% set %}, so the marked text cannot be "
                "found: write the marked text inside the block directly"
            )
        return Written(text, spans, messages)


def with_reasoning(messages: Messages) -> Messages:
    """Return messages with their thoughts under reasoning_content and thinking, the keys in transformers' templates.

    >>> with_reasoning([{"role": "assistant", "reasoning": "so"}])
    [{'thinking': 'so', 'role': 'assistant', 'reasoning': 'so', 'reasoning_content': 'so'}]
    """
    if not any(_reasoning_of(message) for message in messages):
        return messages
    return [
        {"thinking": found, **message, "reasoning_content": found} if (found := _reasoning_of(message)) else message
        for message in messages
    ]


def _reasoning_of(message: Any) -> Any:
    return isinstance(message, Mapping) and next((message[key] for key in REASONING_KEYS if message.get(key)), None)


def without_nulls(messages: Messages, *, but_of: str | None = None) -> Messages:
    """Return messages with "" for each null content, except in messages of one role.

    >>> without_nulls([{"role": "assistant", "content": None}])
    [{'role': 'assistant', 'content': ''}]
    """
    if not any(_is_null(message) for message in messages):
        return messages
    return [
        {**message, "content": ""} if _is_null(message) and message.get("role") != but_of else message
        for message in messages
    ]


def _num_calls(written: Written) -> int:
    """Number of functions of calls named by a text."""
    calls = [call for each in written.messages for call in each.get("tool_calls") or () if isinstance(call, dict)]
    names = {str(function.get("name")) for call in calls if isinstance(function := call.get("function", call), dict)}
    return sum(map(written.text.count, names))


def _is_null(message: Any) -> bool:
    return isinstance(message, Mapping) and "content" in message and message["content"] is None


def _writes_nulls(render: Render, with_nulls: Messages, filled: Messages) -> bool:
    """Return whether a template writes null contents as "None".

    A template may show arguments of tool calls with the word None only if the content is null. Therefore the messages
    are rendered again without the word.
    """
    by_nulls, by_texts = (or_error(render, _without_word(messages)) for messages in (with_nulls, filled))
    if isinstance(by_nulls, DataError) or isinstance(by_texts, DataError):
        return True
    return _num_nones(by_nulls) > _num_nones(by_texts)


def _num_nones(written: Written) -> int:
    return written.text.count("None")


def _without_word(value: Any) -> Any:
    """Return a copy of messages, or of a value in messages, without the word None in any text."""
    if isinstance(value, str):
        return value.replace("None", "zqnonekx")
    if isinstance(value, Mapping):
        return {_without_word(key): _without_word(each) for key, each in value.items()}
    return [*map(_without_word, value)] if isinstance(value, list | tuple) else value


def tests_null_content(template: nodes.Template) -> bool:
    """Return whether a template tests if a content is null: `content is none`, or a comparison with none."""
    tested = [test.node for test in template.find_all(nodes.Test) if test.name == "none"]
    for compared in template.find_all(nodes.Compare):
        if any(isinstance(each.expr, nodes.Const) and each.expr.value is None for each in compared.ops):
            tested.append(compared.expr)
    return any(_is_content(node) for node in tested)


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with less work for the attributes and methods of JSON values, loops and namespaces."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind in _METHODS:
            if attribute in _METHODS[kind]:
                return getattr(obj, attribute)
            if kind is dict and attribute not in _OF_DICT:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind in (LoopContext, Namespace) and not attribute.startswith("_"):
            return getattr(obj, attribute) if hasattr(obj, attribute) else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's own form
        kind = type(__obj)
        if (kind is BuiltinMethodType and __obj.__name__ in _METHODS.get(type(__obj.__self__), ())) or (
            kind is FunctionType and __obj.__module__ == functions_of_notes.__module__
        ):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


_JINJAS = ImmutableSandboxedEnvironment()
_METHODS: dict[type, frozenset[str]] = {
    kind: frozenset(name for name in dir(kind) if _JINJAS.is_safe_attribute(kind(), name, None))
    - {"format", "format_map"}  # Jinja's own take their places
    for kind in (str, dict, list, int, float, bool)
}
_OF_DICT = frozenset(dir(dict))


class _Marks(Extension):
    """Jinja extension for {% generation %}: counts the rendered text and records its spans to be trained on."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def __init__(self, environment: Any):
        super().__init__(environment)
        environment.extend(lmms_marks=self)
        self.begin()

    def begin(self) -> list[str]:
        """Return a new list for the pieces of the next text; append each piece before the next is rendered."""
        self._pieces: list[str] = []
        self._num_counted = self._length = 0
        self.spans: list[Span] = []
        self.texts: list[str] = []
        return self._pieces

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        text: str = caller()
        self._length += sum(map(len, self._pieces[self._num_counted :]))
        self._num_counted = len(self._pieces)
        self.texts.append(text)
        self.spans.append((self._length, self._length + len(text)))
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text for a model, without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        allow_nan=False,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


# Ends of answers: the tokens that a chat template writes after an answer, and whether they are trained on.
#
# Some templates end an answer by the token of the next speaker (GLM: <|user|>, <|observation|>). The marked spans then
# lack the end, and a model trained on these answers does not stop.

_ANSWER = PROBES["assistant"][-1]
_ANSWERS = {"user": _ANSWER, "tool": {**_ANSWER, "tool_calls": [CALL]}}  # by who speaks next
_NEXT = {role: PROBES[role][-1] for role in ("user", "tool", "system")}


class Stops:
    """Tokens that a template writes after answers. render: messages -> their text and the marked spans.

    has_marks: whether the template marks spans to be trained on.
    """

    def __init__(self, render: Render, tokenizer: FastTokenizer, *, has_marks: bool):
        self._render = render
        self._tokenizer = tokenizer
        self._has_marks = has_marks

    @cached_property
    def are_trained_on(self) -> bool:
        """Whether the end of an answer is marked; also True for a template that refuses a plain conversation."""
        made = self._rendered(PROBES["assistant"])
        if made is None:
            return True
        text = made.text[: self._stop(made.text, made.spans)]
        _, answer, end = text.rpartition(_ANSWER["content"])
        return not answer or bool(end.strip())

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Next speaker -> the white space and the token after an answer."""
        found = {role: self._text_before(role) for role in _NEXT}
        return {role: text for role, text in found.items() if text}

    @property
    def remedy(self) -> str:
        """Message for users: how to train on the ends of answers."""
        if "user" in self._texts:
            return (
                "set learn_stop: true in the settings of the processor, or pass --learn-stop, to train on the next "
                "token that the template writes"
            )
        return "use a template that ends them"

    def check(self) -> None:
        """Raise ConfigError for a template that writes only white space between an answer and the next question."""
        if "user" not in self._texts:
            raise ConfigError(
                f"learn_stop: the chat template of tokenizer {self._tokenizer.name} writes nothing but white space "
                f"between an answer and the next question, so no token ends an answer: {self.remedy}"
            )

    def extended(self, text: str, span: Span) -> Span:
        """Extend the span to the end of the token that ends the answer, if this token follows."""
        start, stop = span
        behind = text[stop:]
        ends = {each.strip() for each in self._texts.values()}
        end = max((each for each in ends if behind.lstrip().startswith(each)), key=len, default="")
        return (start, stop + len(behind) - len(behind.lstrip()) + len(end)) if end else span

    def ended(self, text: str, spans: Sequence[Span], last: Mapping[str, Any]) -> str:
        """Return the text of a conversation whose last message is an answer, with the token that ends the answer."""
        stop = self._stop(text, spans)
        behind = text[stop:]
        if behind.strip():
            return text
        role = "tool" if last.get("tool_calls") and "tool" in self._texts else "user"
        end = self._texts[role]
        return text[:stop] + (end if end.startswith(behind) else behind + end.lstrip())

    def _text_before(self, role: str) -> str:
        """Return the template's text after an answer if this role speaks next, up to the end of the first token.

        Return "" if the template writes only white space before the next message's own texts, or nothing.
        """
        answered = [*PROBES["user"], _ANSWERS.get(role, _ANSWER)]
        upto, full = self._rendered(answered), self._rendered([*answered, _NEXT[role]])
        if upto is None or full is None:
            return ""
        stop = self._stop(upto.text, upto.spans)
        if not full.text.startswith(upto.text[:stop]):
            return ""
        behind = full.text[stop:]
        texts_of_next = [text for key, text in _NEXT[role].items() if key != "role"]
        own = re.split("|".join(texts_of_next), behind, maxsplit=1)[0]
        if not own.strip():
            return ""
        start = len(own) - len(own.lstrip())
        encoding = self._tokenizer.encode(behind[start:], add_special_tokens=False)
        token = encoding.token_to_chars(0) if len(encoding) else None
        return own[: start + max(1, token[1])] if token else ""

    def _rendered(self, messages: Messages) -> Written | None:
        """Render the messages; return None if the template refuses them, or its marks cannot be found."""
        try:
            return self._render(messages)
        except (ConfigError, DataError):
            return None

    def _stop(self, text: str, spans: Sequence[Span]) -> int:
        """End of the last answer's marked text."""
        return spans[-1][1] if self._has_marks and spans else len(text.rstrip())
