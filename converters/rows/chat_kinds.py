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
from .chat import CHAT_EXTRAS, MEDIA_COLUMNS, MEMBER_MEDIA, Roles, chat_kind, check_speakers, exchange, turn_of
from .content import MEDIA_ROLES, Turn, file_kind, may_hold_slots, repeats, tool_calls
from .fields import QUESTIONS, Columns, Fields, is_filled, named_alike, unpacked
from .row_kind import Choice, ReadOptions, ReadSimple, UndecidedError
from .speakers import CALLERS, ROLES, USUAL_ROLES, usual_role
from .vendors import usual_messages

_NEEDS: Columns = {"messages": ("messages", "conversations", "conversation")}
EXTRA_COLUMNS = {name for names in CHAT_EXTRAS.values() for name in names}
_AS_PROMPT = {"question": "prompt", "instruction": "prompt", "answer": "response", "output": "response"}
_ASKED_OR_ANSWERED = ("prompt", "response", "chosen", "rejected", *_AS_PROMPT)  # roles of columns
IN_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")  # a list of messages in Python's notation
_CALL = {"name", "arguments"}  # keys of a call that is not a message
_PLAIN_ROLES = ("system", "user", "assistant")


def _read_messages(fields: Fields, roles: Roles) -> list[Turn]:
    """Return turns of OpenAI messages: `role` and `content`. Unknown roles stay: a chat template may know them."""
    messages = fields.items("messages", "messages")
    check_speakers(messages)
    return turns_of(messages, roles)


def _read_sharegpt(fields: Fields, roles: Roles) -> list[Turn]:
    """Return turns of ShareGPT conversations: `from` and `value`; the content of `function_call` becomes tool_calls."""
    return [_sharegpt_turn(message, roles) for message in usual_messages(fields.items("messages", "messages"))]


def _sharegpt_turn(message: Any, roles: Roles) -> Turn:
    turn = turn_of(message, roles, names={"from": "role", "value": "content"})
    if turn["role"] not in ROLES:
        raise DataError(
            f"a message is from {turn['role']!r}, expected one of {', '.join([*USUAL_ROLES, *ROLES])}: map this role "
            f"with --roles {turn['role']}=user or {turn['role']}=assistant"
        )
    return _with_calls(turn, message["from"], "value")


def turns_of(messages: Sequence[Any], roles: Roles) -> list[Turn]:
    """Return the turns of messages in any known form."""
    return [_message_turn(message, roles) for message in usual_messages(messages)]


def _message_turn(message: Any, roles: Roles) -> Turn:
    """Return the turn of a message in OpenAI's or ShareGPT's format."""
    if _names_speaker(message):
        return _sharegpt_turn(message, roles)
    turn = turn_of(message, roles)
    return _with_calls(turn, message["role"], "content")


def _with_calls(turn: Turn, speaker: str, name: str) -> Turn:
    """Return the turn; for a speaker of function calls, with tool_calls in place of its content."""
    if speaker.lower() not in CALLERS or turn["role"] != "assistant" or "tool_calls" in turn:
        return turn
    return {**turn, "content": None, "tool_calls": tool_calls(turn["content"], name)}


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


def _says_from(fields: Fields) -> bool:
    """Return whether the first message names its speaker by `from`."""
    value = fields.get("messages")
    listed = unpacked(value.strip() if isinstance(value, str) else value)
    return isinstance(listed, list) and bool(listed) and _names_speaker(listed[0])


def _names_speaker(message: Any) -> bool:
    return isinstance(message, dict) and message.get("from") is not None and message.get("role") is None


def _says_role(fields: Fields) -> bool:
    value = fields.get("messages")
    if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{", ""):
        return False  # a text, not the JSON text of messages
    return not _says_from(fields) and not holds_exchanges(fields) and not begins_with_text(fields, "messages")


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


MESSAGES = chat_kind("messages", _read_messages, needs=_NEEDS, accepts=_says_role, simple=_of_texts)
SHAREGPT = chat_kind("sharegpt", _read_sharegpt, needs=_NEEDS, accepts=_says_from)


# Rows with a conversation in a list of texts, by the user and the assistant in turn. Pure.

_SPEAKERS = ("user", "assistant")


def _read_dialog(fields: Fields, roles: Roles) -> list[Turn]:
    """Return turns of texts: the first text is the user's, the second the assistant's, and so on."""
    texts = fields.items("dialog", "texts")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            name = fields.column("dialog")
            raise DataError(f"turn {number} in column {name!r} must be text, found {type(text).__name__}: correct it")
    return [{"role": _SPEAKERS[number % 2], "content": text} for number, text in enumerate(texts)]


def begins_with_text(fields: Fields, role: str = "dialog") -> bool:
    """Return whether a column holds a list of texts, not a list of messages in JSON text."""
    value = unpacked(fields.get(role))
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        return False
    return not isinstance(unpacked(f"[{value[0]}]"), list) or not value[0].startswith("{")


DIALOG = chat_kind(
    "dialog",
    _read_dialog,
    needs={"dialog": ("dialog", "dialogue", "utterances", "conversations", "conversation")},
    accepts=begins_with_text,
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
        _check(value, texts)
        if "system" in texts:
            turns.append({"role": "system", "content": value["system"]})
        asked = with_input(value[keys[0]], value["input"] if "input" in texts[2:] else "")
        shown = {key: value[key] for key in _MEDIA if is_filled(value.get(key))}
        empty = {name for name in (*_ASKED, *_ANSWERED) if not is_filled(value.get(name))}
        said = {*texts, *_MEDIA, "system", *empty}
        others = {key: each for key, each in value.items() if key not in said}
        answer = turn_of({**others, "role": "assistant", "content": value[keys[1]]}, {})
        turns += [{**shown, "role": "user", "content": asked}, answer]
    return turns


def _check(value: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raise DataError unless an exchange holds text in these keys, and no other question or answer."""
    wrong = next((key for key in texts if not isinstance(value[key], str)), None)
    if wrong is not None:
        raise DataError(f"an exchange must hold text in {wrong!r}, found {str(value[wrong])[:80]!r}: correct it")
    other = next(
        (key for key in (*_ASKED, *_ANSWERED, "content") if key not in texts and is_filled(value.get(key))), None
    )
    if other is not None:
        raise DataError(
            f"an exchange has {other!r} as well as {', '.join(map(repr, texts))}, which would be lost: keep one key "
            "for the question and one for the answer"
        )


def _keys(value: Any) -> tuple[str, str] | None:
    """Return the keys of the question and of the answer, filled ones first; None for an object without both."""
    if not isinstance(value, Mapping) or {"role", "from"} & value.keys():
        return None
    asked, answered = (
        sorted((name for name in names if name in value), key=lambda name: not is_filled(value[name]))
        for names in (_ASKED, _ANSWERED)
    )
    return (asked[0], answered[0]) if asked and answered else None


def holds_exchanges(fields: Fields) -> bool:
    """Whether the first thing in the list is an exchange, and not a message."""
    value = unpacked(fields.get("messages"))
    return isinstance(value, list) and bool(value) and _keys(value[0]) is not None


EXCHANGES = chat_kind(
    "exchanges",
    _read_exchanges,
    needs={"messages": ("messages", "conversations", "conversation", "texts")},
    accepts=holds_exchanges,
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


def with_input(instruction: str, given: str) -> str:
    """Return the instruction, with the input below if given."""
    return f"{instruction}\n\n{given}" if given else instruction


def _read_alpaca(fields: Fields, roles: Roles) -> list[Turn]:
    """Return the turns of the history, then the instruction with its input, and the output."""
    turns = exchanges(fields.get("history"))
    asked = with_input(fields.text("instruction"), fields.text("input") if is_filled(fields.get("input")) else "")
    return [*turns, *exchange(asked, fields.text("output"))]


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
    """The history's pairs, the prompt and the response, which are texts or lists of messages; the prompt is not trained
    on.
    """
    prompt = said_by(fields, "prompt", roles, speaker="user", first="")
    for turn in prompt:
        if turn["role"] == "assistant":
            turn["learn"] = False
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
        return turns_of(_messages_of(value, speaker), roles)
    if messages_in(value, first) is not None:
        return turns_of(fields.items(role, "messages"), roles)
    return [{"role": speaker, "content": fields.text(role)}]


def _messages_of(value: Mapping[str, Any], speaker: str) -> list[Any]:
    """Return a message; the messages of an object of texts by speaker; or an object as JSON text of the speaker."""
    if not value or value.keys() & {"role", "from"}:
        return [value]
    if all(usual_role(name) in ROLES and isinstance(text, str) for name, text in value.items()):
        return [{"role": name, "content": text} for name, text in value.items()]
    return [{"role": speaker, "content": orjson.dumps(value).decode()}]


def _read_question(fields: Fields, roles: Roles) -> list[Turn]:
    """Return the turns of the history, then question and answer; the question may be missing if media ask it."""
    asked = "" if fields.column("question") is None else fields.text("question")
    return [*exchanges(fields.get("history")), *exchange(asked, fields.text("answer"))]


def _asks(fields: Fields) -> bool:
    """Return whether a row has a question, or media and no other possible question."""
    if fields.get("question") is not None:
        return True
    others = () if "question" in fields.columns else QUESTIONS
    return _has_media(fields) and not any(isinstance(fields.values.get(name), (str, list)) for name in others)


def _read_caption(fields: Fields, roles: Roles) -> list[Turn]:
    """Return the row's media in a turn of the user, and their text in a turn of the assistant."""
    text = fields.text("text")
    if not _shows(fields):
        raise DataError("the row has a caption and no media: add the media, or convert texts with --kind text")
    slot = next(
        (f"<{kind}>" for kind, role in MEDIA_ROLES.items() if fields.references(role) and f"<{kind}>" in text), ""
    )
    if slot:
        raise DataError(
            f"the text has {slot}, which a caption cannot have: write the row as messages, or pass --kind text"
        )
    turns = exchange("", text)
    kind = file_kind(fields.get("file_name"))
    if kind and not _has_media(fields):
        turns[0]["content"] = [{"type": kind, "path": fields.get("file_name")}]
    return turns


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
