"""Kinds of rows that hold a chat: a list of messages or of exchanges, or columns of a prompt and its answer. Pure.

messages: OpenAI's (`role` and `content`); sharegpt: ShareGPT's (`from` and `value`); dialog: texts by turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from ...errors import DataError
from ...types import Sample
from .chat import CHAT_EXTRAS, MEDIA_COLUMNS, MEMBER_MEDIA, Roles, chat_kind, check_tags, exchange, turn_of
from .content import MEDIA_ROLES, Turn, file_kind, may_hold_slots, repeats, tool_calls
from .fields import QUESTIONS, Columns, Fields, is_filled, named_alike, unpacked
from .row_kind import Choice, ReadOptions, ReadSimple, UndecidedError
from .speakers import ROLES, usual_role
from .vendors import usual_messages

_NEEDS: Columns = {"messages": ("messages", "conversations", "conversation")}
EXTRA_COLUMNS = {name for names in CHAT_EXTRAS.values() for name in names}
_AS_PROMPT = {"question": "prompt", "instruction": "prompt", "answer": "response", "output": "response"}
_ASKED_OR_ANSWERED = ("prompt", "response", "chosen", "rejected", *_AS_PROMPT)  # roles of columns
IN_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")  # a list of messages in Python's notation
_CALL = {"name", "arguments"}  # keys of a call that is not a message
_PLAIN_ROLES = ("system", "user", "assistant")


def _read_messages(fields: Fields, roles: Roles) -> list[Turn]:
    messages = fields.items("messages", "messages")
    if all(isinstance(each, dict) and each.get("role") is None and "from" not in each for each in messages):
        check_tags(messages, "role")
    return turns_of(messages, roles)


def turns_of(messages: Sequence[Any], roles: Roles) -> list[Turn]:
    """Return the turns of messages in any known form."""
    return [turn_of(message, roles) for message in usual_messages(messages)]


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, OpenAI's or ShareGPT's; calls may have no content."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return False
    pairs = (("role", "content"), ("from", "value"))
    return any(
        any(text in message for message in value) and all(speaker in message for message in value)
        for speaker, text in pairs
    )


def messages_in(value: Any, speaker: str = "") -> list[Any] | None:
    """Return the messages in a value: a list, or JSON text of messages; None for text.

    speaker: of the first message; text with messages of another speaker first is text.
    """
    if isinstance(value, list):
        return value
    listed: Any = unpacked(value) if isinstance(value, str) else None
    if not are_messages(listed):
        return None
    first = listed[0].get("role", listed[0].get("from"))
    return None if speaker and usual_role(str(first)) != speaker else list(listed)


def check_texts(rows: Sequence[Mapping[str, Any]], found: Mapping[str, str]) -> None:
    """Raise DataError if a text column holds lists of messages in text form. found: role -> column.

    A prompt and its response are read as messages from JSON text, but never from Python's notation.
    """
    for role in _ASKED_OR_ANSWERED:
        name = found.get(role, "")
        texts = [row[name] for row in rows if isinstance(row.get(name), str) and row[name]]
        if _mostly(IN_PYTHON.match, texts):
            raise DataError(
                f"column {name} holds lists of messages in Python's notation ({texts[0][:60]!r}), as written to CSV by "
                "pandas: write the rows as JSON or Parquet, or parse the column by ast.literal_eval, with --map "
                "FILE.py:FUNCTION"
            )
        answers = "assistant" if _AS_PROMPT.get(role) == "response" else ""
        if role in _AS_PROMPT and _mostly(partial(messages_in, speaker=answers), texts):
            named = {_AS_PROMPT[each]: column for each, column in found.items() if each in _AS_PROMPT}
            raise UndecidedError(
                f"column {name} holds lists of messages as JSON text, but this column is read as plain text",
                [Choice(columns=named, why="reads the messages")],
            )


def _mostly(is_so: Callable[..., Any], texts: Sequence[str]) -> bool:
    return bool(texts) and 2 * sum(map(bool, map(is_so, texts))) >= len(texts)


def _has_form(fields: Fields, form: str, role: str = "messages") -> bool:
    """Return whether a list, also in JSON text, is of a kind, by its first element."""
    value = fields.get(role)
    listed = unpacked(value.strip() if isinstance(value, str) else value)
    first = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(first, str):
        is_object = first.startswith("{") and isinstance(unpacked(f"[{first}]"), list)
        return form == ("messages" if is_object else "dialog")
    if isinstance(first, dict) and first.get("from") is not None and first.get("role") is None:
        return form == "sharegpt"
    if _keys(first) is not None:
        return form == "exchanges"
    is_text = isinstance(value, str) and value.lstrip()[:1] not in ("[", "{", "")
    return form == "messages" and not is_text


def _of_texts(found: Mapping[str, str], options: ReadOptions) -> ReadSimple | None:
    """Return the reader of chats of only texts, the most frequent case; the general reader takes five times longer."""
    if not found.keys() <= {"messages"} or options.system is not None or options.learn != "assistant":
        return None
    speakers = frozenset(_PLAIN_ROLES) - options.roles.keys()
    return partial(_read_texts, column=found.get("messages", "messages"), speakers=speakers)


def _read_texts(values: Mapping[str, Any], *, column: str, speakers: frozenset[str]) -> Sample | None:
    """Return None for messages with content that the general reader reads, counts or refuses."""
    messages = values.get(column)
    if type(messages) is not list:
        return None
    is_learnt, asked = False, ""
    try:
        for message in messages:
            role, content = message["role"], message["content"]
            if len(message) != 2 or role not in speakers or type(content) is not str:
                return None
            if not content or content.isspace() or ("<" in content and may_hold_slots(content)):
                return None
            if role == "assistant":
                if content.startswith(asked) and repeats(asked, content):
                    return None
                is_learnt, asked = True, ""
            else:
                asked = content if role == "user" else ""
        return {"messages": orjson.dumps(messages).decode(), "media": b""} if is_learnt else None
    except (TypeError, KeyError):  # also for invalid UTF-8
        return None


MESSAGES = chat_kind(
    "messages", _read_messages, needs=_NEEDS, accepts=partial(_has_form, form="messages"), simple=_of_texts
)
SHAREGPT = chat_kind("sharegpt", _read_messages, needs=_NEEDS, accepts=partial(_has_form, form="sharegpt"))


# Rows with a conversation in a list of texts, by the user and the assistant in turn. Pure.


def _read_dialog(fields: Fields, roles: Roles) -> list[Turn]:
    """Return turns of texts: the first text is the user's, the second the assistant's, and so on."""
    texts = fields.items("dialog", "texts")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            name = fields.column("dialog")
            raise DataError(f"turn {number} in column {name!r} must be text, found {type(text).__name__}: correct it")
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


DIALOG = chat_kind(
    "dialog",
    _read_dialog,
    needs={"dialog": ("dialog", "dialogue", "utterances", "conversations", "conversation")},
    accepts=partial(_has_form, form="dialog", role="dialog"),
    needs_text="dialog (or dialogue, utterances, conversations, conversation), a list of texts",
)


# Conversations in a list of exchanges: objects with the user's text and the assistant's answer.


_ASKED = ("user", "human", *QUESTIONS)
_ANSWERED = ("assistant", "gpt", "bot", "response", "answer", "output")
_MEDIA = tuple(name for names in MEDIA_COLUMNS.values() for name in names)


def _read_exchanges(fields: Fields, roles: Roles) -> list[Turn]:
    """Return the turns of each exchange.

    A system prompt comes before its exchange. Media belong to the question, all other keys to the answer.
    """
    turns: list[Turn] = []
    for value in fields.items("messages", "exchanges"):
        keys = _keys(value)
        if keys is None:
            raise DataError(
                f"an exchange must be an object with one of {', '.join(_ASKED)} and one of {', '.join(_ANSWERED)}, "
                f"found {str(value)[:80]!r}: correct the row"
            )
        more = ["system", "input"] if keys[0] == "instruction" else ["system"]
        texts = [*keys, *(name for name in more if is_filled(value.get(name)))]
        wrong = next((key for key in texts if not isinstance(value[key], str)), None)
        if wrong is not None:
            raise DataError(f"an exchange must hold text in {wrong!r}, found {str(value[wrong])[:80]!r}: correct it")
        others = [name for name in (*_ASKED, *_ANSWERED, "content") if name not in texts and is_filled(value.get(name))]
        if others:
            raise DataError(
                f"an exchange has {others[0]!r} as well as {', '.join(map(repr, texts))}, which would be lost: keep "
                "one key for the question and one for the answer"
            )
        if "system" in texts:
            turns.append({"role": "system", "content": value["system"]})
        asked = "\n\n".join([value[keys[0]], *([value["input"]] if "input" in texts[2:] else [])])
        shown = {key: value[key] for key in _MEDIA if is_filled(value.get(key))}
        said = {*texts, *_MEDIA, "system", *_ASKED, *_ANSWERED}
        rest = {key: each for key, each in value.items() if key not in said}
        answer = turn_of({**rest, "role": "assistant", "content": value[keys[1]]}, {})
        turns += [{**shown, "role": "user", "content": asked}, answer]
    return turns


def _keys(value: Any) -> tuple[str, str] | None:
    """Return the keys of the question and of the answer, filled ones first; None for an object without both."""
    if not isinstance(value, Mapping) or {"role", "from"} & value.keys():
        return None
    asked, answered = (
        sorted((name for name in names if name in value), key=lambda name: not is_filled(value[name]))
        for names in (_ASKED, _ANSWERED)
    )
    return (asked[0], answered[0]) if asked and answered else None


EXCHANGES = chat_kind(
    "exchanges",
    _read_exchanges,
    needs={"messages": ("messages", "conversations", "conversation", "texts")},
    accepts=partial(_has_form, form="exchanges"),
    needs_text="messages (or conversations, conversation, texts), a list of {user, assistant}, {human, assistant} or "
    "{input, output}",
    media_in_front=True,
)


# Rows of Alpaca: `instruction`, `input`, `output`, and `history` of exchanges before. Pure.


def exchanges(history: Any) -> list[Turn]:
    """Return the turns of a history of questions and answers: a list of pairs, also in JSON text; [] for none."""
    turns: list[Turn] = []
    pairs = unpacked(history) or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(
                f"history must be a list of pairs of texts, found {str(pair)[:80]!r}: correct the row, or pass "
                "--columns history= to leave the column out"
            )
        turns += exchange(*pair)
    return turns


def with_input(instruction: str, fields: Fields) -> str:
    """Return the instruction, with the row's input below."""
    return f"{instruction}\n\n{fields.text('input')}" if is_filled(fields.get("input")) else instruction


def _read_alpaca(fields: Fields, roles: Roles) -> list[Turn]:
    asked = with_input(fields.text("instruction"), fields)
    return [*exchanges(fields.get("history")), *exchange(asked, fields.text("output"))]


def _asks_by_instruction(fields: Fields) -> bool:
    """Return whether a response (Dolly's name of the output) answers the instruction, not a prompt next to it."""
    others = set() if "instruction" in fields.columns else {"prompt", "inputs", "query"} & fields.values.keys()
    return fields.column("output") != "response" or not others


ALPACA = chat_kind(
    "alpaca",
    _read_alpaca,
    needs={"instruction": ("instruction",), "output": ("output", "response")},
    may={"input": ("input", "context"), "history": ("history",)},
    accepts=_asks_by_instruction,
    media_in_front=True,
)


# Prompts with answers: prompt and response, question and answer, media and their text.


def _read_prompt(fields: Fields, roles: Roles) -> list[Turn]:
    prompt = said_by(fields, "prompt", roles, speaker="user", first="")
    for turn in prompt:
        if turn["role"] == "assistant":
            turn["learn"] = False  # only the response is trained on
    return [*exchanges(fields.get("history")), *prompt, *said_by(fields, "response", roles)]


def said_by(
    fields: Fields, role: str, roles: Roles, *, speaker: str = "assistant", first: str = "assistant"
) -> list[Turn]:
    """Return the turns of a message, a list of messages, or calls of the tools (xLAM's); a text is the speaker's.

    first: see the speaker of messages_in.
    """
    value = fields.get(role)
    listed = unpacked(value) if speaker == "assistant" and fields.get("tools") else None
    if (
        isinstance(listed, list)
        and listed
        and all(isinstance(one, dict) and one.keys() >= _CALL and "role" not in one for one in listed)
    ):
        return [{"role": speaker, "content": None, "tool_calls": tool_calls(listed, fields.column(role) or role)}]
    if isinstance(value, Mapping):
        messages = [value]
        if value and value.keys().isdisjoint(("role", "from")):  # texts by speaker, or any other object
            are_said = all(usual_role(name) in ROLES and isinstance(text, str) for name, text in value.items())
            said = value if are_said else {speaker: orjson.dumps(value).decode()}
            messages = [{"role": name, "content": text} for name, text in said.items()]
        return turns_of(messages, roles)
    if messages_in(value, first) is not None:
        return turns_of(fields.items(role, "messages"), roles)
    return [{"role": speaker, "content": fields.text(role)}]


def _read_question(fields: Fields, roles: Roles) -> list[Turn]:
    asked = "" if fields.column("question") is None else fields.text("question")  # media may ask it
    return [*exchanges(fields.get("history")), *exchange(asked, fields.text("answer"))]


def _asks(fields: Fields) -> bool:
    if fields.get("question") is not None:
        return True
    others = () if "question" in fields.columns else QUESTIONS
    return _has_media(fields) and not any(isinstance(fields.values.get(name), (str, list)) for name in others)


def _read_caption(fields: Fields, roles: Roles) -> list[Turn]:
    text = fields.text("text")
    if not _shows(fields):
        raise DataError("the row has a caption and no media: add the media, or convert texts with --kind text")
    for kind, role in MEDIA_ROLES.items():
        if fields.references(role) and f"<{kind}>" in text:
            raise DataError(
                f"the text has <{kind}>, which a caption cannot have: write the row as messages, or pass --kind text"
            )
    user, assistant = exchange("", text)
    if not _has_media(fields):
        path = fields.get("file_name")
        user["content"] = [{"type": file_kind(path), "path": path}]
    return [user, assistant]


def _shows(fields: Fields) -> bool:
    return _has_media(fields) or file_kind(fields.get("file_name")) is not None


def _has_media(fields: Fields) -> bool:
    return any(fields.references(role) for role in MEDIA_COLUMNS)


PROMPT_RESPONSE = chat_kind(
    "prompt-response",
    _read_prompt,
    needs={"prompt": ("prompt", "inputs", "query"), "response": ("response", "completion", "targets")},
    may=named_alike("history"),
    media_in_front=True,
)
QUESTION_ANSWER = chat_kind(
    "question-answer",
    _read_question,
    needs={"answer": ("answer", "response")},
    may=named_alike("question", "history"),
    accepts=_asks,
    needs_text="question or media, and answer (or response)",
    media_in_front=True,
)
CAPTION = chat_kind(
    "caption",
    _read_caption,
    needs={"text": ("text", "caption", "txt")},
    may={**named_alike("file_name"), **MEMBER_MEDIA},
    accepts=_shows,
    needs_text="media and text",
    media_in_front=True,
)
