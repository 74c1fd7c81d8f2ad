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
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, DataError
from .base import or_error
from .tokenizers import FastTokenizer, Span

TODAY = date(2024, 7, 26)  # value of today for templates: a text must not depend on the day of rendering
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # in messages; the first key with a value counts
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], tuple[str, list[Span]]]


class ChatTemplate:
    """Renderer of conversations. source: the template, as Jinja. variables: its other variables, the special tokens.

    has_marks: the source has {% generation %}. tests_null: the source tests whether a content is null. Raises
    ConfigError for an invalid template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]):
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
            self.tests_null = tests_null_content(self._environment.parse(source))
        except (TemplateError, SyntaxError, RecursionError) as error:  # Python refuses expressions nested too deep
            raise ConfigError(f"the chat template is not one ({error}): correct the tokenizer's") from error
        self.has_marks = "generation" in {token for _, _, token in self._environment.lex(source)}
        self._variables = {**self._template.globals, **variables}

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        by: Callable[[Render, Messages], tuple[str, list[Span]]] = lambda render, messages: render(messages),
    ) -> tuple[str, list[Span]]:
        """Return the text and the marked spans, in the order of the template. prompt: end with the generation prompt.

        A thought is passed under the keys that templates read. A null content is passed as "", or as null if the
        template tests for null. by: calls its first argument with the messages, or with equivalent messages. Raises
        DataError for a conversation that the template refuses, whatever error the template raises.
        """
        render = partial(by, partial(self._render, tools=tools, prompt=prompt))
        messages = with_reasoning(messages)
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

    def _render(self, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool) -> tuple[str, list[Span]]:
        marks: _Marks = self._environment.lmms_marks  # type: ignore[attr-defined]
        pieces = marks.begin()
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            context = self._template.new_context({**self._variables, **given}, shared=True)
            for piece in self._template.root_render_func(context):
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
        return text, spans


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


def _num_nones(rendered: tuple[str, Any]) -> int:
    return rendered[0].count("None")


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime.combine(TODAY, time()).strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text for a model, without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


# Thoughts that a chat template begins in its generation prompt and cuts from answers (DeepSeek-R1-distill).
#
# The prompt ends in <think>, and the template writes an answer without its thought. The model must write the thought,
# </think> and the answer after the prompt. Therefore the last answer of a conversation is written in this form.

_OPENING = re.compile(r"<([\w:]+)>\s*\Z")  # at the end of a generation prompt
_PLAIN: tuple[dict[str, Any], ...] = ({"role": "user", "content": "zqq"}, {"role": "assistant", "content": "zqa"})
AnyRender = Callable[..., tuple[str, Any]]


class Thoughts:
    """Answers in the form that follows the generation prompt. render: a template's `render`."""

    def __init__(self, render: AnyRender):
        self._render = render

    @cached_property
    def opening(self) -> str:
        """End of the generation prompt that the template does not write before a plain answer; "" if there is no
        difference.
        """
        try:
            (before, _), (upto, _) = self._render(_PLAIN[:1], prompt=True), self._render(_PLAIN)
        except (ConfigError, DataError):
            return ""
        found = _OPENING.search(before)
        if found is None or upto.startswith(before) or not upto.startswith(before[: found.start()]):
            return ""
        return found[0] if self._is_of_thoughts(f"<{found[1]}>", before) else ""

    def _is_of_thoughts(self, tag: str, prompt: str) -> bool:
        """Return whether the template cuts a thought in this tag from answers, or writes the thought after the
        generation prompt.
        """
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
        """Text of a conversation with the last answer after the generation prompt, its thought first.

        prompt: the text of the messages before, with the generation prompt. The text is returned unchanged if it
        differs from the template's text of plain conversations. DataError for a thought without an end, and for two
        thoughts.
        """
        tag, before = self.opening.strip(), prompt.removesuffix(self.opening)
        if before == prompt:
            return text
        content = _content_of(answer)
        if content.lstrip().startswith(tag) and _closing(tag) not in content:
            raise DataError(
                f"an answer begins with {tag} and has no {_closing(tag)}, so the end of its thought is unknown: write "
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
    """Return the thought of an answer without its tags ("" without a thought), and the text after the thought, with the
    space between them.
    """
    begun, closing, said = content.rpartition(_closing(tag))
    found = [begun, *(answer[key] for key in REASONING_KEYS if isinstance(answer.get(key), str))]
    found = [each.strip().removeprefix(tag).strip() for each in found]
    thoughts = [each for each in dict.fromkeys(found) if each]
    if len(thoughts) > 1:
        raise DataError(
            f"an answer has two different thoughts, {thoughts[0][:40]!r} and {thoughts[1][:40]!r}, and the chat "
            f"template takes only one: keep one of them, in the content or in {', '.join(REASONING_KEYS)}"
        )
    return "".join(thoughts), said if closing else "\n\n" + content.lstrip()


# Ends of answers: the tokens that a chat template writes after an answer, and whether they are trained on.
#
# Some templates end an answer by the token of the next speaker (GLM: <|user|>, <|observation|>). The marked spans then
# lack the end, and a model trained on these answers does not stop.

_ANSWER = "zqanswerkx"  # letters that no template escapes, cuts or trims
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
        made = self._rendered([_QUESTION, _ANSWERS["user"]])
        if made is None:
            return True
        text = made[0][: self._stop(*made)]
        _, answer, end = text.rpartition(_ANSWER)
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
        """Render the messages; return None if the template refuses them, or its marks cannot be found."""
        try:
            return self._render(messages)
        except (ConfigError, DataError):
            return None

    def _stop(self, text: str, spans: Sequence[Span]) -> int:
        """End of the last answer's marked text."""
        return spans[-1][1] if self._has_marks and spans else len(text.rstrip())
