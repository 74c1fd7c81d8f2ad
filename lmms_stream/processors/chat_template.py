"""Chat templates: a conversation -> its text, and which characters of it the template marks as learnt.

Templates are Jinja, run in a sandbox, with what transformers gives them: its filters and globals, and the statement
{% generation %} … {% endgeneration %}. That is written here once more because transformers imports torch, which costs
each process of a conversion 600 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, DataError
from .byte_tokens import Span

TODAY = date(2024, 7, 26)  # what templates are told today is: a text must not depend on the day it is made


class ChatTemplate:
    """Renders conversations. source: the template, as Jinja. variables: what it sees besides, its special tokens.

    Raises ConfigError for what is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]):
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not one ({error}): correct the tokenizer's") from error
        self.has_marks = "generation" in {token for _, _, token in self._environment.lex(source)}
        self._variables = {**self._template.globals, **variables}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text and the marked spans, in the order of the template; prompt: as if the assistant were to go on.

        Raises DataError for a conversation that the template refuses.
        """
        marks: _Marks = self._environment.lmms_marks  # type: ignore[attr-defined]
        pieces = marks.begin()
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            context = self._template.new_context({**self._variables, **given}, shared=True)
            for piece in self._template.root_render_func(context):
                pieces.append(piece)  # one at a time: marks are told how much text comes before them
        except (TemplateError, TypeError) as error:  # TypeErrors come of data of unexpected types
            raise DataError(
                f"the chat template refuses the conversation ({error}): correct it, or use another template"
            ) from error
        text, spans = "".join(pieces), marks.spans
        if any(text[start:stop] != marked for (start, stop), marked in zip(spans, marks.texts, strict=True)):
            raise ConfigError(
                "the chat template has {% generation %} in a macro or in {% set %}, so what it marks cannot be found "
                "in the text: write the text out where it is marked"
            )
        return text, spans


class _Marks(Extension):
    """The statement {% generation %}; what was rendered so far, and the spans of it that are learnt."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def __init__(self, environment: Any):
        super().__init__(environment)
        environment.extend(lmms_marks=self)
        self.begin()

    def begin(self) -> list[str]:
        """The list that the pieces of the next text are to be put in, each before the next is rendered."""
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
    """As text for a model: not escaped for HTML, as Jinja's own does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
