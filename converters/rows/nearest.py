"""Rows of no kind -> options to read the rows with, proved on the rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from shlex import quote
from typing import Any, Protocol

from ...errors import DataError, LmmsStreamError
from ...types import Sample
from . import column_names as of
from .chat import MEDIA_COLUMNS, MEMBER_IMAGES, SYSTEM_ROLES
from .chat_kinds import EXCHANGES
from .content import MEDIA_ROLES
from .fields import QUESTIONS, is_filled, unpacked, value_at
from .kinds import KINDS
from .options import SchemaOptions
from .preference_kinds import is_verdict
from .row_kind import Choice, UndecidedError
from .side_columns import choices_unread, media_columns
from .speakers import USUAL_ROLES, readings_of, readings_said

_SUFFIX = re.compile(r"_(text|string|[a-z]{2})$")  # question_text, answer_es
_QUERY = re.compile(
    r"\s*(select\b.+\bfrom\b|with\b.+\bas\s*\(|insert\s+into\b|update\b.+\bset\b|delete\s+from\b|match\s*\()",
    re.IGNORECASE | re.DOTALL,
)  # of a database
_PATH = re.compile(r"(https?://\S+|[^\s/]*/\S*|\S+\.[A-Za-z]\w{0,4})")
_USUAL_MEDIA = {"file_name", *(name for names in MEDIA_COLUMNS.values() for name in names)}
_MEDIA_NAMES = {"file_name", *(name for names in {**MEDIA_COLUMNS, **MEMBER_IMAGES}.values() for name in names)}
PROMPTS = "holds prompts without answers, which lmms_stream.rl reads for reinforcement learning"
_LONG_NAME = 60  # of a column
PROVED_ROWS = 100  # first rows of a proof
_SHOWN = 40  # characters of a text of the decoded sample
_MOST = 3  # options in an error


def no_kind(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> UndecidedError:
    """Return the error for rows with columns of these names, with options to try."""
    found = f"columns {', '.join(names)} fit no kind of rows"
    if value := next((name for name in names if name.isdigit() or len(name) > _LONG_NAME), None):
        found += f" ({value[:_LONG_NAME]!r} looks like a value: the first row of CSV is to name the columns)"
    by_map = "make other rows with --map FILE.py:FUNCTION, or keep the columns with --keep"
    if alternatives := choices_unread(rows):
        what, _, rest = alternatives
        return UndecidedError(f"{found}: {what}", (), f"{rest}, or keep the columns with --keep")
    judged = next((name for name in names if "reward_model" in names and _asks_alone(rows, name)), None)  # verl's rows
    if asked := judged or _prompts_in(rows, names):
        return UndecidedError(f"{found}: column {asked} {PROMPTS}", (), by_map)
    choices = {str(choice): choice for choice in _choices(rows, names)}
    roles = "prompt, response, messages, text, chosen, rejected, images, …"
    by_name = "" if choices else f"name columns by their roles with --columns ({roles}), "
    return UndecidedError(found, [*choices.values()], f"{by_name}{by_map}")


def sure_choice(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Choice | None:
    """Return the columns of rows with names of a single meaning: a question and an answer, or a document.

    None if the rows have more texts.
    """
    texts = _texts(rows, names)
    if media_columns(rows, names) or _MEDIA_NAMES & {*names} or any(map(of.OF_THOUGHTS.search, names)):
        return None
    lower = {name.lower(): name for name in texts}
    if len(lower) == 1 and (text := next(iter(lower))) in of.DOCUMENTS:
        return Choice(columns={"text": lower[text]})
    pair = next((pair for pair in of.SURE_PAIRS if {*pair} == {*lower}), None)
    return Choice(columns={"prompt": lower[pair[0]], "response": lower[pair[1]]}) if pair else None


def _choices(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Choice]:
    """Yield options, the best first: two answers, a conversation, a question and its answer, a document or caption."""
    media = media_columns(rows, names)
    ranked = sorted(media.items(), key=lambda each: each[0].endswith("id"))  # a path before the name of a file
    roles = {MEDIA_ROLES[kind]: name for name, kind in reversed(ranked) if name not in _USUAL_MEDIA}
    texts = [name for name in _texts(rows, names) if name not in media]
    asked, prompts = _question_of(rows, texts), [name for name, _ in _columns_of(rows[0]) if _asks_alone(rows, name)]
    for pair in _compared(rows, names):
        yield Choice(columns={**roles, **pair, **({"prompt": asked} if asked else {})})
    for columns, tags in _conversations(rows, names):
        why = f"if {tags['assistant_tag']} is the assistant" if {"user_tag", "assistant_tag"} <= tags.keys() else ""
        yield Choice(columns={**roles, **columns}, tags=tags, why=why)
    if prompts and (answered := _like(texts, of.ANSWERED)):
        yield Choice(columns={**roles, "prompt": prompts[0], "response": answered})
    labels = [] if asked else [name for name in names if of.CLASSES.fullmatch(name) and _is_class(rows, name)]
    pairs = [] if labels else _pair(rows, texts)
    if labels:
        given = [name for name in texts if not (of.NO_ANSWER.search(name) or _is_class(rows, name))]
        if len(given) == 1:
            yield Choice(columns={**roles, "prompt": given[0], "response": labels[0]})
        elif len(given) == 2:
            yield Choice(kind="alpaca", columns={"instruction": given[0], "input": given[1], "output": labels[0]})
    about = next((name for name in texts if name.lower() in of.INPUTS and name != asked), None)
    if asked and about and len(pairs) == 1:
        yield Choice(kind="alpaca", columns={**roles, "instruction": asked, "input": about, "output": pairs[0][1]})
    is_judged = any(is_verdict(row.get("label")) for row in rows)
    for one, other in pairs:  # a label next to unknown names need not judge an answer
        no_label = {"label": ""} if is_judged and not asked else {}
        yield Choice(columns={**roles, "prompt": one, "response": other, **no_label})
    for kind in () if pairs else KINDS.values():  # names that are nearly usual
        near = {role: _like(names, usual) for role, usual in kind.needs.items()}
        if near and all(near.values()) and (kind.name != "text" or len(names) == 1):
            columns = {role: name for role, name in near.items() if name and name not in kind.needs[role]}
            yield Choice(columns=columns) if columns else Choice(kind=kind.name)
    document = _like(texts, of.DOCUMENTS)
    if document and len(texts) > 1 and not asked:
        listed = [name for name in texts if name != document and not of.NO_ANSWER.search(name)]
        if not pairs and any(_length(rows, name) > _length(rows, document) for name in listed):  # a short request
            yield from (Choice(columns={**roles, "prompt": document, "response": name}) for name in listed)
        yield Choice(columns={**roles, "text": document})
    objects = [name for name in names if isinstance(rows[0].get(name), Mapping) and name not in of.ALTERNATIVES]
    question, answer = asked or _like(objects, of.ASKED), _like(objects, of.ANSWERED)
    answer = answer or next(filter(of.GOLD.search, objects), None)
    if not pairs and question and answer:
        yield Choice(columns={**roles, "prompt": question, "response": answer}, why="objects become JSON text")
    has_media = media or _MEDIA_NAMES & {*names}
    captions = [name for name in texts if not (of.NO_ANSWER.search(name) or _is_same(rows, name))]
    if has_media and len(captions) == 1 and captions[0].lower() not in QUESTIONS:
        yield Choice(columns={**roles, "text": captions[0]})
    elif len(texts) == 1 and not has_media and not asked and not prompts:
        others = (each for row in rows for each in row.items() if not of.METADATA.search(each[0]))
        if not any(isinstance(value, (list, dict)) and value for _, value in others):  # which may hold answers
            yield Choice(columns={"text": texts[0]})


def _texts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the columns of texts in their order; of members of objects if rows have no other texts.

    Facts about a row are no texts: single words under a usual name of facts, or equal in all rows. Answers may be
    numbers.
    """
    inner = [name for name, _ in _columns_of(rows[0]) if name not in names]
    listed = ([name for name in each if _is_text(rows, name)] for each in (names, inner))
    return next(filter(None, listed), [])


def _is_text(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [value for row in rows if is_filled(value := value_at(row, name))]
    is_usual = _like([name], (*of.ASKED, *of.ANSWERED, *of.DOCUMENTS)) is not None or of.GOLD.search(name) is not None
    types: tuple[type, ...] = (str, int, float) if is_usual else (str,)
    if not values or name == "__key__" or not all(isinstance(value, types) for value in values):
        return False
    words = max(len(str(value).split()) for value in values)
    if of.OF_FACTS.search(name):
        is_of_pair = name.lower() == "source" and any("target" in each for each in map(str.lower, rows[0]))
        return words > 3 or is_of_pair
    if not is_usual and all(_PATH.fullmatch(str(value)) for value in values):
        return False
    return is_usual or words > 1 or not _is_same(rows, name) or str(values[0]).endswith((".", "?", "!"))


def _is_same(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column has one value in all rows, and other columns differ."""
    values = _values(rows, name)
    return len(values) > 2 and len({*values}) == 1 and any(row != rows[0] for row in rows)


def _pair(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return possible pairs of a question and an answer; names decide, then lengths and the order."""
    queries = [name for name in texts if all(map(_QUERY.match, _values(rows, name)))]  # which answer other texts
    asked = _question_of(rows, texts)
    others = [name for name in texts if name.lower() not in of.INPUTS]
    texts = others if asked in others else list(texts)
    titles = [name for name in texts if name.lower() == "title"]
    answers = [name for name in texts if name != asked and (_like([name], of.ANSWERED) or [name] == queries)]
    answers += [name for name in texts if name not in (asked, *answers) and of.GOLD.search(name)]
    answers = [name for name in answers if not (of.NO_ANSWER.search(name) or _is_same(rows, name))]
    texts = [name for name in texts if not (name == asked or of.NO_ANSWER.search(name) or _is_class(rows, name))]
    longest = sorted({*texts, *answers}, key=lambda name: (-_length(rows, name), name))
    if asked:
        unsaid = [name for name in longest if any(str(row.get(name)) not in str(row.get(asked)) for row in rows)]
        return [(asked, name) for name in longest if name in (answers or unsaid)]
    if answers:
        return [(name, answers[0]) for name in (*longest, *titles) if name not in answers]
    objects = [name for name, value in rows[0].items() if isinstance(value, dict) and not of.METADATA.search(name)]
    has_objects = any(not text.startswith(f"{name}.") for name in objects for text in texts)
    return [] if len(texts) != 2 or has_objects else [(texts[0], texts[1]), (texts[1], texts[0])]


def _question_of(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> str | None:
    """Return the column with a usual name of questions, unless it holds queries of a database next to other texts."""
    asked = _like(texts, of.ASKED)
    is_query = asked and len(texts) > 1 and all(map(_QUERY.match, _values(rows, asked)))
    return _like([name for name in texts if name != asked], of.ASKED) if is_query else asked


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return [str(value) for row in rows if is_filled(value := value_at(row, name))]


def _is_class(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column has one value in all rows, or at most half as many values as rows, of up to 3 words.

    Repeated rows count once.
    """
    values = _values(rows, name)
    is_short = len(values) > 3 and max(len(value.split()) for value in values) < 4 and max(map(len, values)) < 40
    return _is_same(rows, name) or (is_short and 2 * len({*values}) <= len({*map(str, rows)}))


def _length(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(len(str(value_at(row, name) or "")) for row in rows)


def _like(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the name equal to a usual name, or else nearly equal."""
    lower = {name.rpartition(".")[2].lower(): name for name in reversed(names)}
    exact = next((lower[each] for each in usual if each in lower), None)
    stems = {_SUFFIX.sub("", each): name for each, name in lower.items()}
    near = (get_close_matches(each, lower, 1, 0.9) for each in usual if len(each) > 3)
    like = (lower[found[0]] for found in near if found)
    return exact or next((stems[each] for each in usual if each in stems), None) or next(like, None)


def _compared(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield two columns of answers, named chosen and rejected, better and worse, …"""
    lower = {name.lower(): name for name in names}
    for good, bad in of.COMPARED:
        for name in lower:
            other = name.replace(good, bad, 1)
            if good in name and other != name and other in lower:
                pair = {"chosen": lower[name], "rejected": lower[other]}
                if all(isinstance(unpacked(row.get(each)), (str, list)) for row in rows for each in pair.values()):
                    yield pair


def _conversations(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[tuple[dict[str, str], Mapping[str, str]]]:
    """Yield columns, also of members of objects, with lists of messages or exchanges, and the tags of messages."""
    for name, value in _columns_of(rows[0]):
        messages = [] if name.rpartition(".")[2] in of.ALTERNATIVES or _asks_alone(rows, name) else _listed(value)
        are_exchanges = EXCHANGES.fits({"messages": messages}, {})
        if not messages or (are_exchanges and not {*QUESTIONS}.isdisjoint(names)):
            continue  # exchanges next to a question of their row are not a conversation
        if are_exchanges or any(messages[0].keys() >= {*keys} for keys in (("role", "content"), ("from", "value"))):
            yield {"messages": name}, {}
        else:
            listed = [each for row in rows for each in _listed(value_at(row, name))]
            yield from (({"messages": name}, tags) for tags in readings_of(listed))


def _prompts_in(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """Return the only column of texts if the column holds questions, or messages without an answer."""
    texts = _texts(rows, names)
    if asks := next((name for name, _ in _columns_of(rows[0]) if _asks_alone(rows, name)), None):
        return None if _like(texts, of.ANSWERED) else asks
    is_alone = not any(isinstance(unpacked(value), (list, dict)) and value for value in rows[0].values())
    return texts[0] if is_alone and len(texts) == 1 and texts[0].lower() in QUESTIONS else None


def _asks_alone(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column holds messages without an answer to the last message."""
    lasts = [messages[-1] for row in rows if (messages := _listed(value_at(row, name)))]
    speakers = [each.get("role") or each.get("from") for each in lasts]
    asks = ("user", *SYSTEM_ROLES)
    return bool(speakers) and all(isinstance(each, str) and USUAL_ROLES.get(each, each) in asks for each in speakers)


def only_asks(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column holds messages of the user and the system alone."""
    messages = [message for row in rows for message in _listed(value_at(row, name))]
    return bool(messages) and _asks_alone([{name: [message]} for message in messages], name)


def _columns_of(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row, and the members of its objects under names with dots."""
    for name, value in row.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())


def _listed(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects of a list, also from JSON text."""
    listed = unpacked(value)
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


# Proofs of options on the rows, before an error prints the options.


def chosen(choice: Choice, options: SchemaOptions) -> SchemaOptions:
    """Return the user's options with the options of a choice."""
    return replace(
        options,
        kind=choice.kind or options.kind,
        columns={**options.columns, **choice.columns},
        tags={**options.tags, **choice.tags},
        keep=options.keep if isinstance(options.keep, bool) else (*options.keep, *choice.keep),
    )


def _words(choice: Choice, options: SchemaOptions) -> str:
    """Return a choice in words of the command line, with the columns of the user."""
    columns = {**options.columns, **choice.columns} if choice.columns else {}
    return " ".join([
        *([f"--kind {choice.kind}"] if choice.kind else []),
        *([f"--columns {' '.join(quote(f'{role}={name}') for role, name in columns.items())}"] if columns else []),
        *([readings_said([choice.tags])] if choice.tags else []),
        *([f"--keep {' '.join(map(quote, choice.keep))}"] if choice.keep else []),
    ])  # fmt: skip


class ProvedMapper(Protocol):
    """Mapper of rows, for a proof."""

    @property
    def left(self) -> Sequence[str]: ...
    def read_without_media(self, values: Mapping[str, Any]) -> Sample: ...


Find = Callable[[Sequence[Mapping[str, Any]], SchemaOptions], ProvedMapper]


def proved(
    choice: Choice, rows: Sequence[Mapping[str, Any]], options: SchemaOptions, find: Find
) -> tuple[Sequence[str], Sample, int] | None:
    """Return the columns left out with these options, the first sample, and the number of rows without a sample.

    None if half of the rows have none.
    """
    rows, samples = rows[:PROVED_ROWS], list[Sample]()
    try:
        reader = find(rows, chosen(choice, options))
    except LmmsStreamError:
        return None
    for row in rows:
        with suppress(LmmsStreamError):
            samples.append(reader.read_without_media(row))
    return (reader.left, samples[0], len(rows) - len(samples)) if 2 * len(samples) > len(rows) else None


def decided(error: UndecidedError, rows: Sequence[Mapping[str, Any]], options: SchemaOptions, find: Find) -> DataError:
    """Return the error with the proved choices, and the first sample of the best choice."""
    said: list[str] = []
    shown = ""
    for choice in error.choices:
        if len(said) == _MOST:
            break
        proof = proved(choice, rows, options, find)
        if proof is None and {"prompt", "response"} <= choice.columns.keys():  # the kind leaves side columns out
            choice = replace(choice, kind="prompt-response")
            proof = proved(choice, rows, options, find)
        if proof is None:
            continue
        left, sample, num_rejects = proof
        out = [", ".join(left)] if left and not choice.why else []
        out += [f"{num_rejects} of the first {min(len(rows), PROVED_ROWS)} rows"] if num_rejects else []
        notes = ", ".join(filter(None, [choice.why, f"leaves out {' and '.join(out)}" if out else ""]))
        skip = " --on-error skip" if num_rejects else ""
        said.append(f"{_words(choice, options)}{skip}{notes and f' ({notes})'}")
        shown = shown if len(said) > 1 else shown_sample(sample)
    rest = error.rest or ("" if said else "make other rows with --map FILE.py:FUNCTION")
    remedies = ", or ".join(filter(None, [f"pass {', or '.join(said)}" if said else "", rest]))
    return DataError(f"{error}: {remedies}{shown and f'; the first gives {shown}'}")


def shown_sample(sample: Sample) -> str:
    """Return the texts of a sample, shortened, each behind its speaker; "" for a sample of other columns."""
    if "messages" not in sample:
        return f"text {_shown(sample['text'])}" if "text" in sample else ""
    stored = json.loads(sample["messages"])
    parts = {"": stored} if isinstance(stored, list) else {name: stored[name] for name in stored if name != "tools"}
    said = []
    for name, turns in parts.items():
        before = f"{name} " if name not in ("", "messages") else ""
        for turn in turns[:4] if isinstance(turns, list) else ():
            shown = _shown(text_and_slots(turn["content"]) or turn.get("tool_calls"))
            said.append(f"{before}{turn['role']}: {shown}")
        said += [f"{name} {_shown(turns)}"] if isinstance(turns, str) else []
    return ", ".join(said)


def text_and_slots(content: Any) -> str:
    """Return the texts of stored content, with a slot for each medium."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part["text"] if part.get("type") == "text" else f"<{part.get('type')}>" for part in content)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
