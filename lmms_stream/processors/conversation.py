"""A stored conversation -> its text by a chat template, and its trained spans, in characters and in tokens."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from ..errors import ConfigError, DataError
from .answers import JoinedText
from .base import Tokens, learnt_of, or_error, spans_of
from .byte_tokens import Span
from .chat_template import TODAY, ChatTemplate, Messages, Render, Stops, Written
from .not_shown import (
    EMPTY,
    ENDS,
    MASKED,
    MOST_SHAPES,
    THOUGHTS,
    UNSHOWN,
    Lost,
    NotShown,
    bit_of,
    bits_of,
    is_empty,
    shape_of,
)
from .stored_chat import check_text, check_values, leave_out_nulls, read_chat
from .tokenizers import FastTokenizer, digest

Learn = Literal["all", "last"]  # messages of the assistant in a conversation that are trained on
RENDERING_VERSION = (
    4  # of fingerprints: stays, or all stored lengths are measured again; a changed row is an error at read
)
_ROLES = ("system", "user", "assistant")  # of nearly all messages
Parts = Sequence[dict[str, Any]]  # of a message: its texts and media


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages and tools as input of templates; left_out: indices of messages that are not trained on."""

    messages: list[dict[str, Any]]
    tools: Sequence[Any] | None
    left_out: frozenset[int]

    @staticmethod
    def of(messages: list[dict[str, Any]], tools: list[Any] | None, content: Callable[[Parts], Any]) -> Chat:
        """Make a chat of stored messages, which are changed in place. content: makes the template's content from a
        message's parts.
        """
        left_out, others = [], list[dict[str, Any]]()
        for index, message in enumerate(messages):
            if len(message) == 2 and message["role"] in _ROLES and type(message.get("content")) is str:
                continue  # nearly all messages
            others.append(message)
            leave_out_nulls(message)
            check_values(message)
            if isinstance(message.get("content"), list):
                message["content"] = content(message["content"])
            if not message.pop("learn", True):
                left_out.append(index)
        for function in _called_functions(others) if others else ():
            given = function.get("arguments", {})
            if given is None:
                function["arguments"] = {}
            elif isinstance(given, str):
                with suppress(ValueError):  # the template gets other texts unchanged
                    if isinstance(arguments := json.loads(given), dict):
                        function["arguments"] = _Arguments(arguments, given)
        return Chat(messages, tools, frozenset(left_out))

    @property
    def spoken(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]


class Rendered(NamedTuple):
    """Text of a chat and its marked spans; left_out: spans of messages that are not trained on."""

    marked: tuple[str, list[Span]]
    left_out: list[Span]


class Conversations:
    """Texts of conversations by a tokenizer's chat templates; for their trained spans see ChatProcessor. learn_stop:
    None if the ends of answers do not matter. ConfigError for missing templates, or templates that cannot be compiled.
    """

    def __init__(self, tokenizer: FastTokenizer, *, learn: Learn, learn_stop: bool | None = False):
        if learn not in get_args(Learn):
            raise ConfigError(f"processor.learn must be {' or '.join(get_args(Learn))}, got {learn!r}")
        self.learn = learn
        self.learn_stop = learn_stop
        self.tokenizer = tokenizer
        self._changed: dict[Hashable, int | None] = {}  # shape of conversations -> the result of first_changed
        if "default" not in tokenizer.chat_templates:
            raise ConfigError(
                f"tokenizer {tokenizer.name} has no chat template: write a template into chat_template.jinja in its "
                "folder (docs/start.md has an example for base models), or name another tokenizer"
            )
        for stops in (self._stops[name] for name in ("default", "tool_use") if name in self._stops):
            if learn_stop and not stops.are_trained_on:
                stops.check()

    @property
    def description(self) -> Mapping[str, Any]:
        """All settings that can change a text or its tokens; `learn` changes no length and is left out."""
        templates = json.dumps(self.tokenizer.chat_templates, sort_keys=True)
        return {
            "tokenizer": self.tokenizer.digest,
            "rendering": RENDERING_VERSION,
            "chat_template": digest(templates),
            "special_tokens": dict(self.tokenizer.special_tokens),
            **({"today": TODAY.isoformat()} if "strftime_now" in templates else {}),
            **({"learn_stop": True} if self.learn_stop else {}),
            **({"thoughts_after_prompt": 2} if any(map(_opening, self._templates.values())) else {}),
        }

    def text(self, chat: Chat, *, prompt: bool = False) -> str:
        """Render the text of a chat. prompt: end with the generation prompt. DataError for a chat that the template
        refuses.
        """
        text, spans = self._render(chat, prompt=prompt)
        return text if prompt else self._ended(chat, text, spans)

    def unshown(self, chat: Chat) -> frozenset[int]:
        """Return the indices of the assistant's messages left out by the template."""
        return self._not_shown.of(chat.messages, chat.tools).answers

    def beginning(self, chat: Chat) -> str:
        """Return the text of a chat before the first trained answer; "" if unknown."""
        rendered = or_error(self.rendered, chat)
        if isinstance(rendered, DataError):
            return ""
        (text, spans), left_out = rendered
        return text[: min({*spans} - {*left_out}, default=(0, 0))[0]]

    def warn_of_ends(self) -> None:
        """Warn of a template whose ends of answers are not trained on."""
        stops = self._stops["default"]
        if self.learn_stop is False and not stops.are_trained_on:
            message = (
                f"the chat template of tokenizer {self.tokenizer.name} does not mark the end of an answer, so no end "
                f"is trained on and the model does not learn to stop: {stops.remedy}"
            )
            warnings.warn_explicit(message, UserWarning, "lmms_stream", 1)  # without the line of code, useless to users

    def text_and_not_shown(self, stored: str, content: Callable[[Parts], Any]) -> tuple[str, int]:
        """Return the text of a stored chat, and the result of not_shown. content: see Chat."""
        chat = Chat.of(*read_chat(stored), content)
        lost = self._not_shown.of(chat.messages, chat.tools)
        return self.rendered(chat, lost).marked[0], self.not_shown(chat, lost)

    def not_shown(self, chat: Chat, lost: Lost | None = None) -> int:
        """Return the kinds of content that the template does not show of a chat, as bits of not_shown.KINDS.

        The bits include answers that are empty, or masked, and ends that are not trained on. lost: of the chat, if
        known.
        """
        bits, unshown, without_thought = lost or self._not_shown.of(chat.messages, chat.tools)
        spoken = chat.spoken
        learnt = {*(spoken[-1:] if self.learn == "last" else spoken)} - chat.left_out
        if learnt & unshown:
            bits |= bit_of(UNSHOWN)
        if self.learn_stop is None:
            return bits
        learnt -= unshown
        if thoughtless := learnt & without_thought:
            bits |= bits_of(THOUGHTS, len(thoughtless))
        if not learnt:
            bits |= bit_of(MASKED)
        contents = [(index, chat.messages[index].get("content")) for index in spoken]
        textless = [index for index, text in contents if type(text) is not str or not text.strip()]
        if any(is_empty(chat.messages[index]) for index in textless):
            bits |= bit_of(EMPTY)
        if not learnt or self.learn_stop or self._stops[self._name_of(chat)].are_trained_on:
            return bits
        return bits | bits_of(ENDS, len(learnt))

    def first_changed(self, chat: Chat) -> int | None:
        """Return the first answer whose context, or whose own text, is other text in the whole conversation than at the
        answer's turn; None without a change.

        The context at its turn ends with the generation prompt. Conversations of one shape are rendered once; see
        not_shown.py. Beginnings that the template refuses are passed over.
        """
        shape = shape_of(chat.messages, chat.tools, "".join(self.tokenizer.chat_templates.values()))
        if shape not in self._changed:
            if len(self._changed) >= MOST_SHAPES:
                self._changed.clear()
            self._changed[shape] = self._changed_answer(chat)
        return self._changed[shape]

    def _changed_answer(self, chat: Chat) -> int | None:
        whole = or_error(self._render, chat)
        if isinstance(whole, DataError):  # processing raises this error
            return None
        for index in chat.spoken:
            before, upto = or_error(self._render, chat, index, prompt=True), or_error(self._render, chat, index + 1)
            if any(not isinstance(each, DataError) and not whole[0].startswith(each[0]) for each in (before, upto)):
                return index
        return None

    def rendered(self, chat: Chat, lost: Lost | None = None) -> Rendered:
        """Render a chat with its trained spans. Raise DataError also if the assistant's text cannot be found. lost: of
        the chat, if known.
        """
        if self.learn == "last":
            chat = replace(chat, left_out=chat.left_out | {*chat.spoken[:-1]})
        name = self._name_of(chat)
        template, stops = self._templates[name], self._stops[name] if self.learn_stop else None
        written = template.render(chat.messages, chat.tools)
        text, spans = written.text, written.spans
        if template.has_marks:
            unshown = (lost or self._not_shown.of(chat.messages, chat.tools)).answers
            chat = replace(chat, left_out=chat.left_out | unshown) if unshown else chat
            left_out = self._spans_left_out(chat, written) if chat.left_out else []
        else:
            text, start = self._after_prompt(chat, None, text)
            by_answer = self._answers(chat, written, text, start)
            spans = [span for each in by_answer.values() for span in each]
            left_out = [span for index, each in by_answer.items() if index in chat.left_out for span in each]
        if stops is not None and not stops.are_trained_on:
            text = self._ended(chat, text, spans)
            spans, left_out = ([stops.extended(text, span) for span in each] for each in (spans, left_out))
        spans, left_out = ([span for span in each if span[0] < span[1]] for each in (spans, left_out))
        if not text.isascii():
            check_text(text)
        return Rendered((text, spans), left_out)

    def tokenized(self, rendered: Sequence[Rendered]) -> list[Tokens]:
        """Return the tokens of texts and the spans that are trained on.

        A token is trained on if it has bytes of a marked span, and no bytes of a span in left_out.
        """
        marked = [(each.marked[0], [*each.marked[1], *each.left_out]) for each in rendered]
        made = []
        for each, (ids, spans) in zip(rendered, self.tokenizer.ids_and_spans(marked), strict=True):
            num_marked = len(each.marked[1])
            learnt = learnt_of(spans[:num_marked], len(ids)) & ~learnt_of(spans[num_marked:], len(ids))
            made.append((ids, [(start, stop) for start, stop in spans_of(learnt).tolist()]))
        return made

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return {
            name: ChatTemplate(source, self.tokenizer.special_tokens, by=_by_forms)
            for name, source in self.tokenizer.chat_templates.items()
        }

    @cached_property
    def _stops(self) -> dict[str, Stops]:
        return {
            name: Stops(template.render, self.tokenizer, has_marks=template.has_marks)
            for name, template in self._templates.items()
        }

    @cached_property
    def _not_shown(self) -> NotShown:
        source = "".join(self.tokenizer.chat_templates.values())
        return NotShown(lambda messages, tools: self._render(Chat(messages, tools, frozenset()))[0], source)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled templates cannot be pickled: the receiving process compiles them again.
        made_again = ("_templates", "_stops", "_not_shown")
        return {name: value for name, value in self.__dict__.items() if name not in made_again} | {"_changed": {}}

    def _name_of(self, chat: Chat) -> str:
        return "tool_use" if chat.tools and "tool_use" in self._templates else "default"

    def _template_of(self, chat: Chat) -> ChatTemplate:
        return self._templates[self._name_of(chat)]

    def _stops_of(self, chat: Chat) -> Stops | None:
        """Ends of answers to be trained on in addition to the marks, or None."""
        stops = self._stops[self._name_of(chat)]
        return stops if self.learn_stop and not stops.are_trained_on else None

    def _ended(self, chat: Chat, text: str, spans: Sequence[Span]) -> str:
        """Return the text of a chat, with the token that ends its last answer if this token is to be trained on."""
        stops, last = self._stops_of(chat), chat.messages[-1]
        return text if stops is None or last["role"] != "assistant" else stops.ended(text, spans, last)

    def _render(self, chat: Chat, stop: int | None = None, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text and the marked spans of the first `stop` messages (default: all)."""
        text, spans, _ = self._template_of(chat).render(chat.messages[:stop], chat.tools, prompt=prompt)
        return (text if prompt else self._after_prompt(chat, stop, text)[0]), spans

    def _after_prompt(self, chat: Chat, stop: int | None, text: str) -> tuple[str, int | None]:
        """Return the text of messages with the last answer after the generation prompt, and the start of this answer.

        None: the template's own text, unchanged; see answers.py.
        """
        messages, template = chat.messages[:stop], self._template_of(chat)
        if not messages or messages[-1]["role"] != "assistant" or not _opening(template):
            return text, None
        if len(messages) < len(chat.messages) and len(messages) - 1 in chat.left_out:
            return text, None  # in the whole conversation, this answer has the template's own form
        before = template.render(messages[:-1], chat.tools, prompt=True).text
        changed = template.thoughts.after(before, text, messages[-1])
        return changed, None if changed == text else len(before)

    def _answers(self, chat: Chat, written: Written, text: str, start: int | None) -> dict[int, list[Span]]:
        """Return the index of each message of the assistant, and its spans in the text; see Finder.

        start: of the last answer, if the text has it in another form than `written`, the template's text.
        """
        template = self._template_of(chat)
        pieces = template.pieces(written, chat.tools)
        by_answer: dict[int, list[Span]] = {}
        for index in chat.spoken:
            if pieces is None:
                break
            if start is not None and index == len(chat.messages) - 1:
                by_answer[index] = [(start, len(text.rstrip()))]
                continue
            spans = template.finder.spans(written, pieces, index)
            if spans is not None:
                by_answer[index] = spans
        missing = {*chat.spoken} - by_answer.keys() - chat.left_out
        return {index: [span] for index, span in self._added_spans(chat, text).items()} if missing else by_answer

    def _added_spans(self, chat: Chat, text: str) -> dict[int, Span]:
        """Index of each message of the assistant -> the span that it adds to the text of earlier messages.

        Messages that are not trained on may be missing, if the template changes them in longer conversations.
        """
        spans = {}
        for index in chat.spoken:
            before, _ = self._render(chat, index, prompt=True)
            upto, _ = self._render(chat, index + 1)
            if not (text.startswith(upto) and upto.startswith(before)):
                if index in chat.left_out:
                    continue
                if text.startswith(upto):
                    raise DataError(_other_beginning(before, upto, index))
                raise DataError(
                    f"the chat template changes message {index} when messages follow, so the assistant's words cannot "
                    "be found: train on only the last answer (learn: last in the settings of the processor, or "
                    "convert with --learn last) or on each answer as a sample (convert with --learn each), or wrap "
                    "answers in {% generation %} and {% endgeneration %} in the template"
                )
            spans[index] = len(before), len(upto.rstrip())
        return spans

    def _spans_left_out(self, chat: Chat, written: Written) -> list[Span]:
        """Spans of messages that are not trained on."""
        spans, spoken = written.spans, chat.spoken
        if len(spans) == len(spoken):
            return [span for span, index in zip(spans, spoken, strict=True) if index in chat.left_out]
        pieces = self._template_of(chat).pieces(written, chat.tools) or []
        owners = [
            [at for at, piece in enumerate(pieces) if any(run[0] < stop and start < run[1] for run in piece.runs)]
            or [len(chat.messages) - 1] * bool(pieces)  # the last message also has the text after all messages
            for start, stop in spans
        ]
        if any(len(each) != 1 for each in owners):
            raise DataError(
                f"the chat template marks {len(spans)} spans that do not match single messages, so messages with "
                '"learn": false cannot be found: use another template, or a dataset without "learn": false'
            )
        return [span for span, owner in zip(spans, owners, strict=True) if owner[0] in chat.left_out]


def _opening(template: ChatTemplate) -> str:
    return "" if template.has_marks else template.thoughts.opening


def _other_beginning(before: str, upto: str, index: int) -> str:
    """Describe the error of an answer that does not begin with the generation prompt."""
    num_same = next((at for at, (one, other) in enumerate(zip(before, upto, strict=False)) if one != other), len(upto))
    return (
        f"the chat template does not begin message {index} with its generation prompt: {before[num_same:][:40]!r} is "
        "missing there, so what the model must write after the prompt cannot be told: wrap it in {% generation %} and "
        "{% endgeneration %} in the template, or correct the prompt that the template writes for add_generation_prompt"
    )


class _Arguments(dict[str, Any]):
    """Arguments of a tool call as an object. text: the JSON text in the row."""

    def __init__(self, values: Mapping[str, Any], text: str):
        super().__init__(values)
        self.text = text


def _called_functions(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the object with `name` and `arguments` of each tool call: its `function`, or the call itself."""
    calls = (call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict))
    return [function for call in calls if isinstance(function := call.get("function", call), dict)]


def _by_forms(render: Render, messages: Messages) -> Written:
    """Return a template's text of messages, and its marked spans.

    The template gets the texts of parts as one text. If it refuses the text, or does not show it, it gets the parts.
    """
    made = or_error(_by_objects_or_texts, render, messages)
    joined = {
        index: each["content"] for index, each in enumerate(messages) if isinstance(each.get("content"), JoinedText)
    }
    texts = [part["text"].strip() for content in joined.values() for part in content.parts]

    def num_shown(written: Written | DataError) -> int:
        return -1 if isinstance(written, DataError) else sum(text in written.text for text in texts)

    if num_shown(made) < len(texts):
        in_parts = [{**each, "content": joined[at].parts} if at in joined else each for at, each in enumerate(messages)]
        by_parts = or_error(_by_objects_or_texts, render, in_parts)
        made = max(made, by_parts, key=num_shown)
    if isinstance(made, DataError):
        raise made
    return made


def _by_objects_or_texts(render: Render, messages: Messages) -> Written:
    """Return a template's text of messages, and its marked spans.

    The template gets the arguments of tool calls as objects. If it refuses objects, or would write an object in
    Python's form, it gets their JSON texts.
    """
    has_arguments = any(call.get("arguments") is not None for call in _called_functions(messages))
    made = or_error(render, messages)
    if has_arguments and (isinstance(made, DataError) or _writes_objects(render, messages, made.text)):
        by_texts = or_error(render, _with_texts(messages))
        made = made if isinstance(by_texts, DataError) else by_texts
    if isinstance(made, DataError):
        raise made
    return made


def _writes_objects(render: Render, messages: Messages, text: str) -> bool:
    """Return whether a template writes objects of arguments in Python's form. text: its text of the messages.

    A message may contain the same text as the arguments. Therefore the arguments are rendered again with an unused key.
    """
    if not any(str(arguments) in text for arguments in _objects_of(_called_functions(messages))):
        return False
    probed = [dict(message) for message in copy.deepcopy(messages)]
    for arguments in _objects_of(_called_functions(probed)):
        arguments.append("zqargumentkx") if isinstance(arguments, list) else arguments.update(zqargumentkx=1)
    made = or_error(render, probed)
    return isinstance(made, DataError) or any(
        str(arguments) in made.text for arguments in _objects_of(_called_functions(probed))
    )


def _objects_of(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | list[Any]]:
    """Return the arguments of calls, if they are objects or lists, and not empty."""
    return [found for each in functions if isinstance(found := each.get("arguments"), dict | list) and found]


def _with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of messages with the arguments of tool calls as JSON texts."""
    copied = [dict(message) for message in copy.deepcopy(messages)]
    for function in _called_functions(copied):
        arguments = function.get("arguments")
        if isinstance(arguments, _Arguments):
            function["arguments"] = arguments.text
        elif isinstance(arguments, dict | list):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return copied
