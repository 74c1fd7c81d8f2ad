"""A conversation in one more rendering -> the text of each message in it, proven by marks.

The template is compiled again with notes: at each loop over messages, and each assignment of a message in a loop, a
note in the text says which message is current. In addition, marks surround the texts of each message. A rendering
proves places only if its text without notes and marks equals the plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import nodes

from ..errors import DataError
from .base import or_error
from .byte_tokens import Span

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # in messages; the first key with a value counts
_THOUGHT_TAG = re.compile(r"(</?think>)")
_TAG = re.compile(r"</?[\w|]{1,32}>")
_LEADING = re.compile(rf"(?:\s*{_TAG.pattern})*\s*")


def functions_of_notes(messages: Sequence[Any], mark: str) -> dict[str, Callable[..., str]]:
    """Return the functions called by a template with notes. mark: a character missing in the plain text."""
    indices = {id(message): index for index, message in enumerate(messages)}
    # Of each loop that runs: the current message, whether the loop is over messages, and whether it has written notes.
    levels: list[tuple[int | None, bool, bool]] = [(None, True, False)]

    def written(index: int | None) -> str:
        return f"{mark}{'' if index is None else index}{mark}"

    def enter() -> str:
        levels.append((levels[-1][0], False, False))
        return ""

    def note(value: Any, of_loop: bool = True) -> str:
        index = indices.get(id(value))
        if index is None or (levels[-1][1] and not of_loop):
            return ""
        levels[-1] = index, of_loop, True
        return written(index)

    def assign(value: Any) -> str:
        return note(value, of_loop=False)

    def leave() -> str:
        return written(levels[-1][0]) if levels.pop()[2] else ""

    return {"lmms_enter": enter, "lmms_note": note, "lmms_assign": assign, "lmms_leave": leave}


def add_notes(node: nodes.Node) -> None:
    """Add calls of functions_of_notes to a parsed template."""
    for name, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        noted: list[Any] = []
        for child in children:
            if isinstance(child, nodes.Node):
                add_notes(child)
            if isinstance(child, nodes.For):
                if isinstance(child.target, nodes.Name):
                    child.body.insert(0, _call("lmms_note", child.target.name))
                noted += [_call("lmms_enter"), child, _call("lmms_leave")]
            elif isinstance(child, nodes.Assign) and isinstance(child.target, nodes.Name):
                noted += [child, _call("lmms_assign", child.target.name)]
            else:
                noted.append(child)
        if isinstance(value, list):
            setattr(node, name, noted)


def _call(function: str, *names: str) -> nodes.Output:
    arguments: list[nodes.Expr] = [nodes.Name(name, "load") for name in names]
    return nodes.Output([nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)])


class JoinedText(str):
    """The texts of a message's parts as one text. parts: of the message."""

    __slots__ = ("parts",)
    parts: list[dict[str, Any]]

    @staticmethod
    def of(parts: Sequence[dict[str, Any]]) -> JoinedText:
        joined = JoinedText("".join(part["text"] for part in parts))
        joined.parts = [*parts]
        return joined


def with_texts(
    message: Mapping[str, Any], of_text: Callable[[str, str], str], of_function: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Return a message with other texts. of_text: kind ("content" or "reasoning") and text between tags -> text.
    of_function: function of a call -> function.
    """

    def changed(text: str, kind: str = "") -> str:
        return "".join(
            of_text(kind or own, piece) if own else piece for own, piece in pieces_of_text(text, message["role"])
        )

    made, content = dict(message), message.get("content")
    if isinstance(content, list | JoinedText):
        parts: list[Any] = content.parts if isinstance(content, JoinedText) else content
        parts = [{**each, "text": changed(each["text"])} if each.get("type") == "text" else each for each in parts]
        made["content"] = JoinedText.of(parts) if isinstance(content, JoinedText) else parts
    elif isinstance(content, str):
        made["content"] = changed(content)
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            made[key] = changed(message[key], "reasoning")
    if isinstance(message.get("tool_calls"), list):
        made["tool_calls"] = [with_function(call, of_function) for call in message["tool_calls"]]
    if isinstance(message.get("function_call"), dict):
        made["function_call"] = of_function(message["function_call"])
    return made


def with_function(value: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Change the function of a tool or a call, or the value itself without a function."""
    if not isinstance(value, dict):
        return value
    function = value.get("function")
    return {**value, "function": change(function)} if isinstance(function, dict) else change(value)


def pieces_of_text(text: str, role: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a text with their kinds; "" for tags, which templates test, and space around texts.

    >>> [piece for piece in pieces_of_text("<think>\\nso</think>yes", "assistant") if piece[1]]
    [('', '<think>'), ('', '\\n'), ('reasoning', 'so'), ('', '</think>'), ('content', 'yes')]
    """
    parts = _THOUGHT_TAG.split(text) if role == "assistant" else [text]
    for number, part in enumerate(parts):
        if number % 2 or not part.strip():
            yield "", part
            continue
        start, stop = _LEADING.match(part).end(), len(part.rstrip())  # type: ignore[union-attr]
        while stop > start and part[stop - 1] == ">":
            at = max(part.rfind("<", 0, stop), 0)
            if not _TAG.fullmatch(part, at, stop):
                break
            stop = len(part[:at].rstrip())
        stop = max(start, stop)
        is_thought = parts[number - 1 : number] == ["<think>"] or parts[number + 1 : number + 2] == ["</think>"]
        yield from (("", part[:start]), ("reasoning" if is_thought else "content", part[start:stop]), ("", part[stop:]))


def marked_message(message: Any, mark: str) -> Any:
    """Return a message with marks around its texts: contents, thoughts, and texts in arguments of calls."""

    def leaves(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: leaves(each) for key, each in value.items()}
        if isinstance(value, list):
            return [*map(leaves, value)]
        if not isinstance(value, str):
            return value
        return "".join(f"{mark}{piece}{mark}" if kind else piece for kind, piece in pieces_of_text(value, ""))

    if not isinstance(message, Mapping):
        return message
    return with_texts(
        message,
        lambda _, text: f"{mark}{text}{mark}",
        lambda function: (
            function | {key: leaves(function[key]) for key in ("arguments", "parameters") if key in function}
        ),
    )


@dataclass(slots=True)
class MessageText:
    """Text of a message in a conversation. runs: its spans, without white space. marks: offsets of its own marks."""

    runs: list[Span] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    is_mixed: bool = False  # with marks of other messages, or with own marks outside


def pieces_of(marked: str, mark: str, num_messages: int) -> tuple[str, list[MessageText]]:
    """Return a text without its notes and marks, and the text of each message."""
    pieces = [MessageText() for _ in range(num_messages)]
    parts = re.split(f"{mark}([.]?)([0-9]*){mark}", marked)
    offset, owner = 0, None
    marks: list[tuple[int, int | None, int]] = []  # offset, owner of the place, message of the mark
    texts: list[str] = []
    for text, dot, index in zip(parts[::3], ["", *parts[1::3]], ["", *parts[2::3]], strict=True):
        if dot:
            marks.append((offset, owner, int(index)))
        elif texts:
            owner = int(index) if index else None
        if text and owner is not None:
            runs = pieces[owner].runs
            if runs and runs[-1][1] == offset:
                runs[-1] = runs[-1][0], offset + len(text)
            else:
                runs.append((offset, offset + len(text)))
        texts.append(text)
        offset += len(text)
    for at, place, message in marks:
        pieces[message].marks.append(at)
        if place != message:
            pieces[message].is_mixed = True
            if place is not None:
                pieces[place].is_mixed = True
    return "".join(texts), pieces


# Thoughts that a chat template begins in its generation prompt and cuts from answers (DeepSeek-R1-distill).
#
# The prompt ends in <think>, and the template writes an answer without its thought. The model must write the thought,
# </think> and the answer after the prompt. Therefore the last answer of a conversation is written in this form.

_OPENING = re.compile(r"<([\w:]+)>\s*\Z")  # at the end of a generation prompt
_EMPTY = re.compile(r"<([\w:]+)>\s*</\1>\s*\Z")  # a thought that the prompt has ended
_PLAIN: tuple[dict[str, Any], ...] = ({"role": "user", "content": "zqq"}, {"role": "assistant", "content": "zqa"})
AnyRender = Callable[..., Any]


class Thoughts:
    """Answers in the form that follows the generation prompt. render: a template's `render`."""

    def __init__(self, render: AnyRender):
        self._render = render

    @cached_property
    def opening(self) -> str:
        """End of the generation prompt that the template does not write before a plain answer; "" if there is no
        difference.
        """
        upto: Any = or_error(self._render, _PLAIN)
        if self._thought is None or isinstance(upto, DataError):
            return ""
        before = self._thought.string
        is_cut = not upto.text.startswith(before) and upto.text.startswith(before[: self._thought.start()])
        return self._thought[0] if is_cut else ""

    @cached_property
    def _thought(self) -> re.Match[str] | None:
        """The tag of a thought at the end of the generation prompt."""
        prompt: Any = or_error(self._render, _PLAIN[:1], prompt=True)
        found = None if isinstance(prompt, DataError) else _OPENING.search(prompt.text)
        return found if found and self._is_of_thoughts(f"<{found[1]}>", found.string) else None

    def head_of(self, prompt: str) -> str:
        """Return a generation prompt without the thought at its end."""
        found = _EMPTY.search(prompt) or (_OPENING.search(prompt) if self._thought else None)
        return prompt if found is None else prompt[: found.start()]

    def _is_of_thoughts(self, tag: str, prompt: str) -> bool:
        """Return whether the template cuts a thought in this tag from answers, or writes the thought after the
        generation prompt.
        """
        in_content = {"role": "assistant", "content": f"zqt{_closing(tag)}zqa"}
        made = [
            or_error(self._render, [_PLAIN[0], each])
            for each in (in_content, _PLAIN[1] | dict.fromkeys(REASONING_KEYS, "zqt"))
        ]
        texts = [None if isinstance(each, DataError) else each.text for each in made]
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
        content = answer.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content if part["type"] == "text")
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


# Answers in a whole conversation, and probes for their first characters.

_QUESTION: dict[str, Any] = {"role": "user", "content": "zqquestionkx"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "zqnamekx", "arguments": {"x": "zqx"}}}
PROBES: dict[str, list[dict[str, Any]]] = {
    "user": [_QUESTION],
    "assistant": [_QUESTION, {"role": "assistant", "content": "zqanswerkx"}],
    "system": [{"role": "system", "content": "zqsystemkx"}],
    "tool": [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "zqnamekx", "tool_call_id": "call00000", "content": "zqresultkx"},
    ],
}  # by the role of the last message
_ANSWERED = {"user": "assistant", "tool": "tool"}  # next role -> the probe with an answer before it


class Finder:
    """Finder of the answers of a template's conversations. render: messages -> Written. pieces: of a result of render,
    see ChatTemplate.
    """

    def __init__(self, render: AnyRender, pieces: Callable[..., list[MessageText] | None], thoughts: Thoughts):
        self._render = render
        self._pieces = pieces
        self._thoughts = thoughts

    def spans(self, written: Any, pieces: Sequence[MessageText], index: int) -> list[Span] | None:
        """Return the spans of an answer, from the end of its header to its last token; None without a proof.

        The last message also has the text after all messages. An answer without shown text has no spans.
        """
        messages, piece = written.messages, pieces[index]
        if not is_shown(messages[index], written.text, piece):
            return []
        runs = [run for run in piece.runs if written.text[slice(*run)].strip()]
        if piece.is_mixed or not runs:
            return None
        start, stop = runs[0]
        header = self._header(written.text[start:stop], messages[index - 1]["role"] if index else "")
        if header is None:
            return None
        spans = [(start + len(header), stop)]
        spans += [run for run in runs[1:] if any(run[0] <= mark <= run[1] for mark in piece.marks)]
        if index == len(messages) - 1:
            spans[-1] = spans[-1][0], len(written.text)
        else:
            end = self._ends["tool" if messages[index + 1]["role"] == "tool" else "user"]
            spans = [(start, stop + len(end) * written.text.startswith(end, stop)) for start, stop in spans]
        return [(start, start + len(written.text[start:stop].rstrip())) for start, stop in spans]

    def _header(self, text: str, role: str) -> str | None:
        """Return the header at the start of an answer's text; None without a header. role: of the message before."""
        prompt = self._prompts.get(role, self._prompts.get("user"))
        if prompt is None or not text.startswith(self._thoughts.head_of(prompt)):
            return None
        headers = {each for prompt in self._prompts.values() for each in (prompt, self._thoughts.head_of(prompt))}
        return max((each for each in headers if text.startswith(each)), key=len)

    @cached_property
    def _prompts(self) -> dict[str, str]:
        """Role of the last message -> the generation prompt after it."""
        found = {role: self._prompt_after(messages) for role, messages in PROBES.items()}
        return {role: prompt for role, prompt in found.items() if prompt is not None}

    @cached_property
    def _ends(self) -> dict[str, str]:
        """Role of the next message -> the end of an answer, written by the next message."""
        ends = dict.fromkeys(_ANSWERED, "")
        for role, last in _ANSWERED.items():
            answered = PROBES[last][:2]
            whole, followed = self._probed(answered), self._probed([*answered, PROBES[role][-1]], 1)
            if whole is not None and followed is not None and whole[1].runs and followed[1].runs:
                alone, own = whole[0][whole[1].runs[0][0] :].rstrip(), followed[0][slice(*followed[1].runs[0])]
                ends[role] = alone[len(own) :] if alone.startswith(own) else ""
        return ends

    def _prompt_after(self, messages: Sequence[Any]) -> str | None:
        without, prompted = self._probed(messages), self._probed(messages, prompt=True)
        if without is None or prompted is None or not without[1].runs or not prompted[1].runs:
            return None
        own, behind = (text[(piece.marks or [piece.runs[0][0]])[-1] :] for text, piece in (without, prompted))
        own = own[: len(own) - len(without[0]) + without[1].runs[-1][1]]  # without the text after all messages
        return behind[len(own) :] if behind.startswith(own) else None

    def _probed(
        self, messages: Sequence[Any], index: int = -1, *, prompt: bool = False
    ) -> tuple[str, MessageText] | None:
        """Return the text of messages, and the place of a message; None without a proof."""
        written: Any = or_error(self._render, messages, prompt=prompt)
        pieces = None if isinstance(written, DataError) else self._pieces(written, prompt=prompt)
        return None if pieces is None else (written.text, pieces[index])


def is_shown(message: Mapping[str, Any], text: str, piece: MessageText) -> bool:
    """Return whether anything of an answer is shown, or it is empty."""
    if piece.marks:
        return True
    if marked_message(message, "-") != message:
        return False
    names = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    return not names or any(str(name) in text[slice(*run)] for name in names for run in piece.runs)
