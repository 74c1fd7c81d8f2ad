"""Rows and messages in the forms of vendors and data sets -> the usual columns and OpenAI's messages. Pure.

Each form is a function of a few lines; a table lists forms of rows. Kinds of rows (kinds.py) know only usual forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import DataError, EmptyRowError
from .column_names import CHOICE_ANSWERS, CHOICE_QUESTIONS, CHOICE_STEMS, THOUGHTS, columns_of_choices
from .content import tool_calls
from .fields import is_filled, unpacked
from .speakers import ROLES, usual_role

Message = dict[str, Any]


# Messages: parts of content by their type, or by the name of their only member.


def usual_messages(messages: Sequence[Any]) -> list[Any]:
    """Return messages in OpenAI's form, with calls in tool_calls and each result of a call in a message of role tool.

    Read are the contents of Anthropic (tool_use, tool_result), Bedrock (toolUse, toolResult) and Gemini (parts with
    functionCall, functionResponse), the items of OpenAI's Responses, and results between Hermes' <tool_response> tags.
    """
    for message in messages:  # nearly all messages have a text, and are returned at once
        text = message.get("content", message.get("value")) if type(message) is dict else None
        if type(text) is not str or (text[:1] in "< \n" and "<tool_response>" in text):
            break
    else:
        return list(messages)
    usual: list[Any] = []
    for message in messages:
        try:
            if isinstance(message, dict) and "role" not in message and str(message.get("type")) in _ITEMS:
                _ITEMS[message["type"]](message, usual)
            elif isinstance(message, dict) and isinstance(parts := message.get("parts", message.get("content")), list):
                usual += _of_parts({key: value for key, value in message.items() if key != "parts"}, parts)
            else:
                usual.append(_without_tags(message))
        except (AttributeError, KeyError, TypeError) as error:  # a value of an unexpected type
            raise DataError(f"a message has parts of another form, {str(message)[:80]!r}: correct the row") from error
    return usual


def _without_tags(message: Any) -> Any:
    """Return a message without Hermes' tags around the result of a call: templates of tools write these tags."""
    if not isinstance(message, dict) or message.get("role", message.get("from")) != "tool":
        return message
    key = "content" if "content" in message else "value"
    held = _RESPONSE.fullmatch(message[key].strip()) if isinstance(message.get(key), str) else None
    return message if held is None else {**message, key: held[1]}


_RESPONSE = re.compile(r"<tool_response>\s*((?:(?!</?tool_response>).)*?)\s*</tool_response>", re.DOTALL)


def _of_parts(message: Message, parts: Sequence[Any]) -> list[Message]:
    """Return the messages of a message with parts: results of calls first, then the other parts, if any."""
    own = [part for part in parts if isinstance(part, dict) and part.get("type") in _OWN_PARTS]
    has_own_calls = any(part["type"] == "tool_call" for part in own)
    speaker = str(message.get("role", message.get("from")))
    is_wrong = usual_role(speaker) in _NOT_CALLING or (has_own_calls and message.get("tool_calls"))
    texts = [_thought_part(part)["thought"] for part in own if part["type"] != "tool_call"]
    if own and (is_wrong or not all(isinstance(text, str) for text in texts)):
        raise DataError(
            f"a part of type {own[0]['type']!r} must hold text of the assistant, or its calls in a message without "
            f"tool_calls, found {str(own[0])[:80]!r} of {speaker!r}: correct the row"
        )
    read = [_part(part) for part in parts]
    if "content" in message and all(one is other for one, other in zip(read, parts, strict=True)):
        return [message]
    results = [part["result"] for part in read if "result" in part]
    calls = [call for part in read for call in part.get("calls", ())]
    thoughts = [part["thought"] for part in read if "thought" in part]
    left = [part for part in read if not part.keys() & {"result", "calls", "thought"}]
    if not (left or calls or thoughts):
        return results
    is_text = not own and len(left) == 1 and left[0].keys() == {"type", "text"} and left[0]["type"] == "text"
    is_null = not left and (has_own_calls or not own)
    message = {**message, "content": left[0]["text"] if is_text else None if is_null else left}
    called = {"tool_calls": [*(message.get("tool_calls") or []), *calls]} if calls else {}
    # LLaMA-Factory v1, whose texts are under "value", joins without a separator.
    joined = ("" if own and all("value" in part for part in own) else "\n").join(thoughts)
    if own and joined and message.get("reasoning_content") not in (None, "", joined):
        raise DataError(f"a message has reasoning_content and parts of type {own[0]['type']!r}: keep one of them")
    thought = {"reasoning_content": joined} if thoughts else {}
    return [*results, message | thought | called if has_own_calls else message | called | thought]


_NOT_CALLING = {*ROLES} - {"assistant"}
_OWN_PARTS = ("reasoning", "thinking", "tool_call")  # a text next to these parts is stored as a part


def _part(part: Any) -> Any:
    """Return a part in OpenAI's form, or an object with calls, a result or a thought; other parts unchanged."""
    if not isinstance(part, dict):
        return part
    if "type" in part:
        read = _TYPES.get(part["type"]) if isinstance(part["type"], str) else None
        return part if read is None else read(part)
    if part.get("thought") is True and isinstance(part.get("text"), str):
        return {"thought": part["text"]}
    name = next((name for name in _MEMBERS if part.get(name) is not None), None)
    return part if name is None else _MEMBERS[name](part[name]) or part


def _call(name: Any, arguments: Any, call_id: Any = None) -> dict[str, Any]:
    known = {} if call_id is None else {"id": call_id}
    return {"calls": [{**known, "type": "function", "function": {"name": name, "arguments": arguments}}]}


def _thought_part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"thought": next((part[key] for key in ("text", part["type"], "value") if part.get(key)), None)}


def _result(content: Any, call_id: Any = None, name: Any = None) -> Message:
    """Return the message of a call's result; an object becomes JSON text."""
    if isinstance(content, list):
        parts = [_part(part) for part in content]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        content = texts[0] if len(parts) == 1 and isinstance(texts[0] if texts else None, str) else parts
    elif not isinstance(content, str):
        content = "" if content is None else orjson.dumps(content).decode()
    known = {"tool_call_id": call_id, "name": name}
    return {"role": "tool", **{key: value for key, value in known.items() if value is not None}, "content": content}


def _bedrock_image(image: Any) -> dict[str, Any] | None:
    held = image.get("source") if isinstance(image, Mapping) else None
    return {"type": "image", "data": held["bytes"]} if isinstance(held, Mapping) and "bytes" in held else None


_TYPES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {  # Anthropic's, then others'
    "tool_use": lambda part: _call(part.get("name"), part.get("input"), part.get("id")),
    "tool_result": lambda part: {"result": _result(part.get("content"), part.get("tool_use_id"))},
    "thinking": _thought_part,
    "reasoning": _thought_part,
    "tool_call": lambda part: {"calls": tool_calls(part.get("value"), "a part of type 'tool_call'")},
}
_MEMBERS: Mapping[str, Callable[[Any], dict[str, Any] | None]] = {  # Bedrock's, then Gemini's
    "text": lambda text: {"type": "text", "text": text},
    "json": lambda value: {"type": "text", "text": orjson.dumps(value).decode()},
    "toolUse": lambda use: _call(use.get("name"), use.get("input"), use.get("toolUseId")),
    "toolResult": lambda result: {"result": _result(result.get("content"), result.get("toolUseId"))},
    "reasoningContent": lambda held: {"thought": held["reasoningText"]["text"]},
    "image": _bedrock_image,
    "functionCall": lambda call: _call(call.get("name"), call.get("args"), call.get("id")),
    "functionResponse": lambda said: {"result": _result(said.get("response"), said.get("id"), said.get("name"))},
    "inlineData": lambda held: {
        "type": held["mimeType"].partition("/")[0], "data": f"data:{held['mimeType']};base64,{held['data']}",
    },
}  # fmt: skip


def _add_call(item: Message, usual: list[Any]) -> None:
    """Add a call to the last message of the assistant, or in a new message."""
    calls = _call(item.get("name"), item.get("arguments"), item.get("call_id"))["calls"]
    last = usual[-1] if usual and isinstance(usual[-1], dict) else {}
    if last.get("role") == "assistant":
        usual[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *calls]}
    else:
        usual.append({"role": "assistant", "content": None, "tool_calls": calls})


def _add_thought(item: Message, usual: list[Any]) -> None:
    texts = [part["text"] for part in (item.get("content") or item.get("summary") or ()) if part.get("text")]
    if texts:
        usual.append({"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)})


_ITEMS: Mapping[str, Callable[[Message, list[Any]], None]] = {  # of OpenAI's Responses, other than messages
    "function_call": _add_call,
    "function_call_output": lambda item, usual: usual.append(_result(item.get("output"), item.get("call_id"))),
    "reasoning": _add_thought,
}


def usual_tools(tools: Sequence[Mapping[str, Any]], *, column: str | None) -> list[Any]:
    """Return tools in OpenAI's form: of Anthropic, Bedrock and Gemini, and of OpenAI's former column functions."""
    usual: list[Any] = []
    for tool in tools:
        spec = tool.get("toolSpec", tool)
        if not isinstance(spec, Mapping):
            usual.append(tool)
        elif isinstance(declared := spec.get("functionDeclarations"), list):
            usual += [{"type": "function", "function": each} for each in declared]
        elif (schema := spec.get("input_schema", spec.get("inputSchema"))) is not None:
            schema = schema["json"] if isinstance(schema, Mapping) and schema.keys() == {"json"} else schema
            kept = {key: spec[key] for key in ("name", "description") if key in spec}
            usual.append({"type": "function", "function": {**kept, "parameters": schema}})
        elif column == "functions" and "function" not in spec:
            usual.append({"type": "function", "function": dict(spec)})
        else:
            usual.append(tool)
    return usual


# Rows: columns of a data set -> usual columns.


@dataclass(frozen=True, slots=True)
class Form:
    """Form of rows. marks: columns of each row. read: returns the usual columns, or None for a row of another form.

    also: optional columns. rule: reading of the columns, for people; "" if the names tell.
    """

    marks: frozenset[str]
    read: Callable[[Mapping[str, Any]], dict[str, Any] | None]
    also: tuple[str, ...] = ()
    rule: str = ""


def usual_row(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a row with the usual columns, and the rule of the form; other rows unchanged, with rule "".

    DataError for two equally good answers.
    """
    for name in values:
        for form in _BY_MARK.get(name, ()):
            if not form.marks <= values.keys():
                continue
            try:
                read = form.read(values)
            except (AttributeError, KeyError, TypeError):  # a row of another form
                continue
            if read is not None:
                names = {*form.marks, *form.also}
                return {**{name: value for name, value in values.items() if name not in names}, **read}, form.rule
    return values, ""


def _gemini(values: Mapping[str, Any]) -> dict[str, Any] | None:
    messages = [{"role": "user", **content, "parts": content["parts"]} for content in values["contents"]]
    system = values.get("systemInstruction", values.get("system_instruction"))
    parts = system.get("parts") if isinstance(system, Mapping) else None
    system = "\n".join(part["text"] for part in parts) if parts else system
    return {"messages": messages, **({"system": system} if system else {})}


def _responses(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of a request and an answer of OpenAI's Responses."""
    asked, answered = values["input"], values["output"]
    if not isinstance(answered, list):
        return None
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    items = [each for listed in (asked, answered) if isinstance(listed, list) for each in listed]
    if not items or not all(
        isinstance(each, dict) and ("role" in each or each.get("type") in _ITEMS) for each in items
    ):
        return None
    messages = [{key: each[key] for key in each if key != "type" or each[key] != "message"} for each in items]
    return {"messages": messages, **({"system": values["instructions"]} if values.get("instructions") else {})}


def _openai_preference(values: Mapping[str, Any]) -> dict[str, Any] | None:
    asked = values["input"]
    if not isinstance(asked["messages"], list):
        return None
    pair = {"chosen": values["preferred_output"], "rejected": values["non_preferred_output"]}
    return {"prompt": asked["messages"], **pair, **({"tools": asked["tools"]} if asked.get("tools") else {})}


def _pair(prompt: Mapping[str, Any], scored: Sequence[tuple[Any, Any]]) -> dict[str, Any] | None:
    """Return the columns of the best and the worst answer. scored: scores, higher is better, and answers.

    None for values other than scores; DataError for missing and for equally good answers.
    """
    if len(scored) < 2 or not all(isinstance(score, (int, float)) and score == score for score, _ in scored):
        return None
    if not all(answer for _, answer in scored):
        raise DataError("one of the answers to compare is missing: complete or remove the row")
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    if best[0] == worst[0]:
        raise DataError("the answers are equally good, so there is none to prefer: leave the row out")
    return {**prompt, "chosen": best[1], "rejected": worst[1]}


def _scores_of(values: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the scores and answers of a list of answers next to a list of scores; [] for other values."""
    answers, scores = unpacked(values["responses"]), unpacked(values["scores"])
    is_listed = isinstance(answers, list) and isinstance(scores, list) and len(answers) == len(scores)
    return [*zip(scores, answers, strict=True)] if is_listed else []


def _judged(values: Mapping[str, Any], verdict: str, *names: str) -> dict[str, Any] | None:
    """Return the columns of two answers. verdict: column with the name of the better: a, model_a, 1, response_1, …"""
    better = str(values[verdict]).lower()
    kinds = "(model|response|assistant|answer|output|candidate|completion)?[_ ]?"
    scores = [re.fullmatch(f"{kinds}({each})", better) is not None for each in ("a|1", "b|2")]
    if not any(scores):
        if "tie" in better or "both" in better:
            raise DataError(f"column {verdict} is {better!r}, so there is no answer to prefer: leave the row out")
        return None
    return _pair({}, [*zip(scores, (values[name] for name in names), strict=True)])


def _renamed(**columns: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the reader of columns under other names. columns: usual name -> name."""
    return lambda values: {usual: values[name] for usual, name in columns.items()}


def _squad(values: Mapping[str, Any]) -> dict[str, Any] | None:
    texts = values["answers"]["text"]
    if not isinstance(texts, list) or "answer_start" not in values["answers"]:
        return None
    if not texts:
        raise EmptyRowError("answers has no text, so nothing would be learnt: complete or remove the row")
    return {"instruction": values["context"], "input": values["question"], "output": texts[0]}


def _interleaved(texts: Sequence[Any], images: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of a document of texts and images, with an image before the text of its position."""
    parts: list[dict[str, Any]] = []
    for text, image in zip(texts, images, strict=True):
        parts += [{"type": "image", "image": each} for each in (image if isinstance(image, list) else [image]) if each]
        if text and parts and "text" in parts[-1]:
            parts[-1]["text"] += f" {text}"
        elif text:
            parts.append({"type": "text", "text": text})
    return {"messages": [{"role": "assistant", "content": parts}]}


def _obelics(values: Mapping[str, Any]) -> dict[str, Any] | None:
    texts, images = values["texts"], values["images"]
    if len(texts) != len(images) or not all(text is None or isinstance(text, str) for text in texts):
        return None
    return _interleaved(texts, images) if None in texts or None in images else None


def _mmc4(values: Mapping[str, Any]) -> dict[str, Any]:
    images: dict[int, list[Any]] = {number: [] for number in range(len(values["text_list"]))}
    for image in values["image_info"]:
        images[image["matched_text_index"]].append(image["image_name"])
    return _interleaved(values["text_list"], [*images.values()])


def _s1(values: Mapping[str, Any]) -> dict[str, Any] | None:
    thoughts = values["thinking_trajectories"]
    if not isinstance(thoughts, list) or not thoughts:
        return None
    return _thoughts({"question": values["question"], "answer": values["attempt"], "reasoning": thoughts[0]})


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _of_columns(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of a question with a column for each choice, and the letter or text of the right choice.

    None for a row with several questions or answers.
    """
    questions = [values[name] for name in CHOICE_QUESTIONS if name in values]
    answers = [values[name] for name in CHOICE_ANSWERS if name in values]
    answers = answers or ([str(values["label"])] if type(values.get("label")) is int else [])
    held = {name.upper(): values[column] for name, column in columns_of_choices(values).items()}
    answer = answers[0] if len(questions) == len(answers) == 1 else None
    if not isinstance(answer, str) or (answer.isdecimal() and answer not in held):
        return None  # a number may count from 0 or 1
    answer = answer.upper() if answer.upper() in held else answer
    chosen, context = _chosen(questions[0], held, answer), values.get("context")
    if chosen is None or not isinstance(context, str):
        return chosen
    return {"instruction": context, "input": chosen["question"], "output": chosen["answer"]}


def _passages(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a question about passages, with the first of its answers (CLAPnq's)."""
    context = "\n\n".join(passage["text"] for passage in values["passages"])
    return {"instruction": context, "input": values["input"], "output": values["output"][0]["answer"]}


def _chosen(asked: Any, choices: Any, said: Any) -> dict[str, Any] | None:
    """Return the columns of a question with choices. said: number, letter or text of the right choice."""
    held: Any = unpacked(choices)
    names = list[str]()
    if isinstance(held, list) and all(isinstance(each, dict) and len(each) == 1 for each in held):
        held = {name: text for each in held for name, text in each.items()}
    if isinstance(held, Mapping) and isinstance(held.get("label"), list):  # ARC's, CommonsenseQA's
        held, names = held.get("text"), [str(each) for each in held["label"]]
    elif isinstance(held, Mapping):
        held, names = list(held.values()), list(held)
    texts = held if isinstance(held, list) and all(isinstance(each, str) for each in held) else []
    names = names or list(_LETTERS[: len(texts)])
    if not texts or len(names) != len(texts) or not isinstance(asked, str) or all(text in asked for text in texts):
        return None  # other values, or a question with its choices
    number = said if isinstance(said, int) else int(said) if str(said).isdecimal() and said not in names else None
    if number is None:
        found = [n for n, pair in enumerate(zip(names, texts, strict=True)) if said in pair]
        number = found[0] if len(found) == 1 else None
    if number is None or isinstance(number, bool) or not 0 <= number < len(texts):
        return None
    lines = [f"{name}. {text}" for name, text in zip(names, texts, strict=True)]
    return {"question": "\n".join([asked, "", *lines]), "answer": lines[number]}


def _thoughts(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of a question, thoughts and answer."""
    asked, answered = values["question"], values["answer"]
    name = next((name for name in THOUGHTS if is_filled(values.get(name))), None)
    if name is None or not all(isinstance(text, str) for text in (asked, answered, values[name])):
        return None
    answer = {"role": "assistant", "reasoning_content": values[name], "content": answered}
    return {"messages": [{"role": "user", "content": asked}, answer]}


def _chosen_speaker(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of a conversation that ends with a chosen and a rejected answer, by their speakers."""
    turns = values["conversations"]
    speakers = [str(turn.get("from", turn.get("role"))) for turn in turns[-2:]]
    if len(speakers) < 2 or not ("chosen" in speakers[0] and "rejected" in speakers[1]):
        return None
    key = "value" if "value" in turns[-1] else "content"
    return {"prompt": turns[:-2], "chosen": turns[-2][key], "rejected": turns[-1][key]}


_SPEAKER = re.compile(r"(?:^|\s)(SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE): ?")


def _one_text(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of a conversation in a text with the speakers in capitals, as Glaive's."""
    before, *said = _SPEAKER.split(values["chat"])
    if before.strip() or not said:
        return None
    roles = ["tool" if speaker == "FUNCTION RESPONSE" else speaker.lower() for speaker in said[::2]]
    texts = [text.replace("<|endoftext|>", "").strip() for text in said[1::2]]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    system = values["system"].removeprefix("SYSTEM:").strip()
    return {"messages": messages, **({"system": system} if system else {})}


_PLACE = re.compile(r"<image_\d+>")


def _mini_cpm(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns of messages with numbered places of images: <image_00>."""
    images, said = values["image"], values["conversations"]
    if not isinstance(images, Mapping) or not images or not all(map(_PLACE.fullmatch, images)):
        return None
    places = [place for each in said for place in _PLACE.findall(str(each.get("content", "")))]
    if sorted(places) != sorted(images):
        raise DataError(f"the messages have the places {', '.join(places)}, and image {', '.join(images)}: correct it")
    messages = [{**each, "content": _PLACE.sub("<image>", each["content"])} for each in said]
    return {"messages": messages, "images": [images[place] for place in places]}


def _hermes(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the messages of a conversation with the tools of the row in the system prompt, too: read once."""
    column = "conversations" if "conversations" in values else "messages"
    messages = unpacked(values[column])
    first = messages[0] if isinstance(messages, list) and messages else None
    text = first.get("value", first.get("content")) if type(first) is dict else None
    return {column: messages} if isinstance(text, str) and "<tools>" in text and "</tools>" in text else None


_OF_THOUGHTS = "the thoughts are the answer's reasoning_content"
_OF_TOOLS = "tools are in the system prompt, too, and are read from it"
_BEST = "chosen and rejected are the best and the worst answer by"
_LETTERED = "the choices follow the question, and the answer is the right choice"
_DOCUMENT = "texts and images of a document are an answer without a question"
_TABLE: tuple[tuple[Any, ...], ...] = (
    ("contents", _gemini, ("systemInstruction", "system_instruction")),
    ("preferred_output input non_preferred_output", _openai_preference),
    ("output input passages", _passages, (), "the passages precede the question; output is the first answer"),
    ("output input", _responses, ("instructions",)),
    ("completions instruction", lambda row: _pair({"prompt": row["instruction"]}, [
        (one["overall_score"], one["response"]) for one in row["completions"]]), (), f"{_BEST} overall_score"),
    ("answers prompt", lambda row: _pair({"prompt": row["prompt"]}, [
        (-one["rank"], one["answer"]) for one in row["answers"]]), (), f"{_BEST} rank"),
    ("scores prompt responses", lambda row: _pair({"prompt": row["prompt"]}, _scores_of(row)), (), f"{_BEST} scores"),
    *((f"{stem}_{first} {stem}_{second} {verdict}", lambda row, verdict=verdict, names=(
        f"{stem}_{first}", f"{stem}_{second}"): _judged(row, verdict, *names), (),
       f"chosen is the {stem} that {verdict} names")
      for stem in ("conversation", "response", "candidate", "completion", "answer", "output")
      for first, second in ("ab", "12") for verdict in ("winner", "preference", "preferred", "better", "chosen")),
    ("better_response_id prompt response_0 response_1", lambda row: _pair({"prompt": row["prompt"]}, [
        (row["better_response_id"] == number, row[f"response_{number}"]) for number in (0, 1)]), (),
     "chosen is the response of better_response_id"),
    ("overall_preference response1 response2",  # from -3, the first is much better, to 3
     lambda row: _pair({"prompt": row.get("context", row.get("prompt"))}, [
        (-row["overall_preference"], row["response1"]), (row["overall_preference"], row["response2"])]), ("context",),
     "chosen is the response that overall_preference prefers"),
    ("response_j question response_k", _renamed(prompt="question", chosen="response_j", rejected="response_k"), (),
      "chosen is response_j, rejected response_k"),
    ("human_ref_A history human_ref_B labels", lambda row: {"prompt": row["history"], **{
        1: {"chosen": row["human_ref_A"], "rejected": row["human_ref_B"]},
        0: {"chosen": row["human_ref_B"], "rejected": row["human_ref_A"]}}[row["labels"]]}, (),
     "chosen is human_ref_A where labels is 1"),
    ("answers context question", _squad, (), "output is the first text of answers"),
    ("answer passage question", lambda row: {
        "instruction": row["passage"], "input": row["question"], "output": "yes" if row["answer"] else "no",
     } if isinstance(row["answer"], bool) else None, (), "answers true and false become yes and no"),
    ("texts images", _obelics, (), _DOCUMENT),
    ("text_list image_info", _mmc4, (), _DOCUMENT),
    ("choices hint question answer", lambda row: _chosen(
        "\n".join(filter(None, (row["hint"], row["question"]))), row["choices"], row["answer"]),
     ("lecture", "solution"), f"the hint precedes the question; {_LETTERED}; lecture and solution are left out"),
    ("definition inputs targets", _renamed(instruction="definition", input="inputs", output="targets")),
    ("thinking_trajectories question attempt", _s1, (), "the answer is attempt, after the first of its trajectories"),
    *((f"{listed} question {answer}", lambda row, listed=listed, answer=answer: _chosen(
        row["question"], row[listed], row[answer]), (), _LETTERED)
      for listed in ("choices", "options", "answer_choices")
      for answer in ("answer", "answerKey", "answer_index", "answer_idx", "correct_answer")),
    *((f"{stem}{letters[0]} {stem}{letters[1]}", _of_columns,
       (*CHOICE_QUESTIONS, *CHOICE_ANSWERS, "label", "context", *(f"{stem}{letter}" for letter in letters)), _LETTERED)
      for stem in CHOICE_STEMS for letters in ("ABCDEFGHIJ", "abcdefghij", "0123456789")
      if stem or letters.isupper()),
    ("endings ctx label", lambda row: _chosen(row["ctx"], row["endings"], row["label"]), ("ctx_a", "ctx_b"), _LETTERED),
    *((f"{name} question answer", _thoughts, (), _OF_THOUGHTS) for name in THOUGHTS),
    ("chat system", _one_text, (), "the speakers of chat become messages, and calls stay texts"),
    ("QA", lambda row: {"conversations": [
        {"user": "\n".join(filter(None, (one.get("i"), one["q"]))), "assistant": one["a"]} for one in row["QA"]]}),
    ("image conversations", _mini_cpm),
    ("conversations", _chosen_speaker),
    ("tools conversations", _hermes, (), _OF_TOOLS),
    ("tools messages", _hermes, (), _OF_TOOLS),
)  # fmt: skip
_BY_MARK: dict[str, list[Form]] = {}  # by the first mark of a form
for _marks, _read, *_more in _TABLE:
    _BY_MARK.setdefault(_marks.split()[0], []).append(Form(frozenset(_marks.split()), _read, *_more))
MARKS = frozenset(_BY_MARK)  # a row without these columns is of no form
