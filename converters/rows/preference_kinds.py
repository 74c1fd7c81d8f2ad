"""Rows of preferences: a prompt with a better and a worse answer, or with one answer and a verdict. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ...errors import DataError
from ...types import Sample
from . import schemas
from .chat import CHAT_EXTRAS, Roles, add_system, json_of, note_unread, read_tools
from .chat_kinds import exchanges, messages_in, said_by, turns_of, with_input
from .content import MEDIA_ROLES, Turn, store_content, text_of
from .fields import Columns, Fields, named_alike
from .references import SampleMedia
from .row_kind import Choice, ReadOptions, RowKind, UndecidedError
from .speakers import USUAL_ROLES

# Pairs of complete texts that begin with their common prompt (HH-RLHF's) -> stored texts. Pure.
#
# The texts name their speakers themselves: no chat template is applied. The prompt is cut by the rule of TRL 1.16
# (`extract_prompt`).


def stored_texts(chosen: str, rejected: str, fields: Fields, options: ReadOptions) -> Sample:
    """Return the sample of two texts; DataError for texts without a common beginning, and for other filled columns."""
    has = [role for role in ("system", "tools", "input", "history") if fields.get(role)]
    has += [role for role in MEDIA_ROLES.values() if fields.references(role)]
    if has or options.system:
        raise DataError(
            f"chosen and rejected are whole texts, which cannot hold {', '.join(has) or 'a system prompt'}: name the "
            "prompt's column with --columns prompt=COLUMN, to read them as answers in a chat"
        )
    if chosen == rejected:
        raise DataError("chosen and rejected are the same, so neither is better: remove the row")
    shared = num_shared(chosen, rejected)
    if not shared:
        raise DataError(
            "the row has answers and no prompt, and the texts begin differently, so the prompt is not part of them: "
            "name the prompt's column with --columns prompt=COLUMN"
        )
    text = json_of({"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]})
    return {"messages": text, "media": b""}


def num_shared(chosen: str, rejected: str) -> int:
    """Return the length of the prompt in characters: the common beginning of two texts, without a space at the end.

    Tokenizers join a space with the following word.

    >>> num_shared("It is blue", "It is green")
    5
    """
    num = min(len(chosen), len(rejected))
    shared = next((n for n in range(num) if chosen[n] != rejected[n]), num - 1)
    return shared - 1 if shared > 0 and chosen[shared - 1] == " " else max(shared, 0)


# Rows of preferences that are read in chats: bad answers are not trained on. Pure.
#
# Fine-tuning would train on bad answers like on good ones: these rows are refused in chats until the user specifies the
# answers to train on. The kinds that read both answers are below.

PAIR = ("chosen", "rejected")
_PAIRS = (PAIR, ("chosen_messages", "rejected_messages"))  # the usual names, then LLaMA-Factory v1's
VERDICT_COLUMNS = ("label", "kto_tag")  # whether the answer of a row is good: true or false


def check_pairs(names: Collection[str], columns: Mapping[str, str]) -> None:
    """Raise DataError for rows with a chosen and a rejected answer. columns: role -> the user's column."""
    for chosen, rejected in _PAIRS:
        if {chosen, rejected} <= set(names) and not {chosen, rejected} & set(columns.values()):
            only = "trains on the good answers only"
            raise UndecidedError(
                f"columns {chosen} and {rejected} hold a good and a bad answer each",
                [
                    Choice(kind="preference"),
                    Choice(kind="messages", columns={"messages": chosen}, why=only),
                    Choice(kind="prompt-response", columns={"response": chosen}, why=only),
                ],
            )


def check_verdicts(rows: Iterable[Mapping[str, Any]], kind: str) -> None:
    """Raise DataError if rows of a kind have a verdict on their answers."""
    name = next((name for row in rows for name in VERDICT_COLUMNS if _verdict(row.get(name)) is not None), None)
    if name is not None:
        raise DataError(
            f"column {name!r} marks answers as good or bad, and bad answers would be trained on, too: pass "
            f"--kind {kind} --on-error skip to leave out rows marked false, or remove the column"
        )


def check_verdict(row: Mapping[str, Any]) -> None:
    """Raise DataError for a row with a negative verdict on its answer."""
    for name in VERDICT_COLUMNS:
        if _verdict(row.get(name)) is False:
            raise DataError(f"column {name!r} is {row[name]}, so its answer is marked as bad: leave the row out")


def is_verdict(value: Any) -> bool:
    """Return whether a value is a verdict: true or false, or 1 or 0, also in text form."""
    if isinstance(value, str):
        return value.lower() in ("true", "false", "1", "0")
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def _verdict(value: Any) -> bool | None:
    """Return True or False, also from text, the form of CSV; None for other values."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else None


_ASKED: Columns = {
    "prompt": ("prompt", "question", "instruction"),
    "messages": ("messages", "conversations", "conversation"),
    **named_alike("input", "history"),
    **CHAT_EXTRAS,
}


def _is_pair(fields: Fields) -> bool:
    """Return whether the user named neither answer for another role (`--columns messages=chosen`)."""
    others = {column for role, column in fields.columns.items() if role not in PAIR}
    return not any(name in others for pair in _PAIRS for name in pair)


def _is_judged(fields: Fields) -> bool:
    has_answer = any(fields.get(role) is not None for role in ("response", "messages"))
    return has_answer and is_verdict(fields.get("label"))


def _read_pair(fields: Fields, options: ReadOptions, media: SampleMedia) -> Sample:
    if fields.get("prompt") is None and fields.get("messages") is None:
        chosen, rejected = (fields.get(name) for name in PAIR)
        if all(isinstance(said, str) and messages_in(said) is None for said in (chosen, rejected)):
            return stored_texts(chosen, rejected, fields, options)
    roles = {**USUAL_ROLES, **options.roles}
    # JSON text of a whole conversation next to another text is text, too.
    first = "" if all(messages_in(fields.get(name)) is not None for name in PAIR) else "assistant"
    chosen, rejected = (said_by(fields, name, roles, first=first) for name in PAIR)
    if chosen == rejected:
        raise DataError("chosen and rejected are the same, so neither is better: remove the row")
    if any(turns[0]["role"] != "assistant" for turns in (chosen, rejected)):
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        _check_shared(prompt, fields, roles)
    else:
        prompt = _prompt(fields, roles)
    return _store({"prompt": prompt, "chosen": chosen, "rejected": rejected}, {}, fields, options, media)


def _check_shared(prompt: Sequence[Turn], fields: Fields, roles: Roles) -> None:
    """Raise DataError if two conversations have no common prompt, or not the prompt in the row's column."""
    if not prompt:
        raise DataError(
            "chosen and rejected begin with different messages, so they have no common prompt: correct the row"
        )
    if fields.get("prompt") is None:
        return
    said = _prompt(fields, roles)[-1]["content"]
    if all(turn["content"] != said for turn in prompt):
        raise DataError(
            f"column {fields.column('prompt')!r} says {str(said)[:80]!r}, which is not among the messages before the "
            "answer: correct the row, or pass --columns prompt= to leave the column out"
        )


def _read_judged(fields: Fields, options: ReadOptions, media: SampleMedia) -> Sample:
    roles = {**USUAL_ROLES, **options.roles}
    label = fields.get("label")
    if not is_verdict(label):
        raise DataError(f"column {fields.column('label')!r} is {label!r}: expected true or false, or 1 or 0")
    if fields.get("response") is None:
        *prompt, last = _conversation(fields, roles)
        answer = [last]
        if prompt:
            _check_shared(prompt, fields, roles)
    else:
        prompt, answer = _prompt(fields, roles), said_by(fields, "response", roles)
    is_good = label.lower() in ("true", "1") if isinstance(label, str) else bool(label)
    return _store({"prompt": prompt, "answer": answer}, {"label": is_good}, fields, options, media)


def _store(
    parts: Mapping[str, list[Turn]],
    said: Mapping[str, Any],
    fields: Fields,
    options: ReadOptions,
    media: SampleMedia,
) -> Sample:
    """Return the sample of a prompt and its answers. parts: by name. said: values stored after them."""
    if options.learn == "each":
        raise DataError("--learn each makes a sample of each answer, but a preference compares answers: leave it out")
    if not parts["prompt"]:
        raise DataError("the prompt has no message to answer: complete or remove the row")
    _check_all_stored([turn for turns in parts.values() for turn in turns], fields, {**USUAL_ROLES, **options.roles})
    parts = {**parts, "prompt": add_system(parts["prompt"], fields, options.system)}
    for name, turns in parts.items():
        if name != "prompt":
            _check_answer(name, turns, last_only=options.learn == "last")
    waiting = {kind: fields.references(role) for kind, role in MEDIA_ROLES.items() if fields.column(role)}
    turns = store_content([turn for each in parts.values() for turn in each], waiting, media, in_front=True)
    told = iter(turns)
    stored: dict[str, Any] = {name: [next(told) for _ in each] for name, each in parts.items()} | {**said}
    for name in parts.keys() - {"prompt"}:
        note_unread([*stored["prompt"], *stored[name]], fields)
    tools = read_tools(fields)
    text = json_of({**stored, "tools": tools} if tools else stored)
    return {"messages": text, "media": media.data}


def _check_all_stored(turns: Sequence[Turn], fields: Fields, roles: Roles) -> None:
    """Raise DataError for a question column with a text that no turn has, because another column was read instead."""
    stored = "\n".join(text_of(turn["content"]) for turn in turns)
    held = {
        "input": [{"content": fields.get("input") or ""}],
        "history": exchanges(fields.get("history")),
        "messages": [] if fields.get("messages") is None else _conversation(fields, roles),
    }
    texts = ((role, text_of(turn["content"]).strip()) for role, each in held.items() for turn in each)
    for role, text in texts:
        if text not in stored:
            raise DataError(
                f"column {fields.column(role)!r} holds {text[:80]!r}, which is in neither the prompt nor the answers, "
                "because another column is read instead: correct the row, or pass "
                f"--columns {role}= to leave the column out"
            )


def _check_answer(name: str, turns: Sequence[Turn], *, last_only: bool) -> None:
    """Raise DataError for an answer without a message to train on. last_only: the setting of --learn last."""
    if not turns:
        raise DataError(f"{name} has no message behind the prompt: complete or remove the row")
    speaker = next((turn["role"] for turn in (turns[0], turns[-1]) if turn["role"] != "assistant"), None)
    if speaker is not None:
        raise DataError(
            f"{name} is from {speaker!r}, and answers are the assistant's: correct the row, or say with "
            f"--roles {speaker}=assistant who that is"
        )
    num_messages = sum(turn["role"] == "assistant" for turn in turns)
    if last_only and num_messages > 1:
        raise DataError(
            f"{name} has {num_messages} messages of the assistant, and --learn last would train on only one, but "
            "answers are compared as a whole: leave --learn last out, or shorten the answer"
        )
    if not (turns[-1]["content"] or turns[-1].get("tool_calls")):
        raise DataError(f"{name} is an empty answer: complete or remove the row")
    if not any(turn.get("learn", True) for turn in turns if turn["role"] == "assistant"):
        raise DataError(f"the loss leaves out every message of {name}: complete or remove the row")


def _prompt(fields: Fields, roles: Roles) -> list[Turn]:
    """Return the turns to answer: the history, and the prompt's text or messages; else the conversation."""
    value = fields.get("prompt")
    if value is None:
        return _conversation(fields, roles)
    before = exchanges(fields.get("history"))
    if messages_in(value) is not None or isinstance(value, Mapping):
        return [*before, *said_by(fields, "prompt", roles, speaker="user", first="")]
    return [*before, {"role": "user", "content": with_input(fields.text("prompt"), fields)}]


def _conversation(fields: Fields, roles: Roles) -> list[Turn]:
    if fields.get("messages") is None:
        raise DataError(
            "the row has answers and no prompt: name its column with --columns prompt=COLUMN, or write the answers as "
            "whole conversations, lists of messages"
        )
    return turns_of(fields.items("messages", "messages"), roles)


PREFERENCE = RowKind(
    name="preference",
    needs=dict(zip(PAIR, zip(*_PAIRS, strict=True), strict=True)),
    may=_ASKED,
    accepts=_is_pair,
    needs_text="chosen and rejected (or chosen_messages and rejected_messages)",
    schema=schemas.PREFERENCE,
    read=_read_pair,
)
KTO = RowKind(
    name="kto",
    needs={"label": VERDICT_COLUMNS},
    may={"response": ("response", "completion", "answer", "output"), **_ASKED},
    accepts=_is_judged,
    needs_text="label/kto_tag (true or false) and an answer: completion/response/answer/output or messages",
    schema=schemas.PREFERENCE,
    read=_read_judged,
)
