"""Layouts of rows as public datasets and training frameworks have them.

Each text of a row says what it is, and each image has a color of its own, so that a test can look for them in what is
stored.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..media_files import image_bytes, wav_bytes

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """row: makes a row, of a number that differs for each. kind: that its rows are found to be, or become by the remedy
    that is printed; None where only the user can say what its texts are.
    """

    name: str
    row: Callable[[int], Row]
    kind: str | None


def image(number: int) -> bytes:
    return image_bytes(color=number % 250 + 1)


def url(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(image(number)).decode()}"


def said(number: int, *roles: str, keys: tuple[str, str] = ("role", "content")) -> list[Row]:
    """Messages, each with a text of its own."""
    return [{keys[0]: role, keys[1]: f"{role}-{at}-{number}"} for at, role in enumerate(roles)]


def parts(number: int, *parts: Row) -> list[Row]:
    return [{"role": "user", "content": list(parts)}, *said(number, "assistant")]


def _called(n: int) -> Row:
    call = {"id": "c", "type": "function", "function": {"name": f"f{n}", "arguments": {"city": f"city-{n}"}}}
    return {
        "messages": [
            *said(n, "user"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"result-{n}"},
            {"role": "assistant", "content": f"answer-{n}"},
        ],
        "tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": {}}}],
    }


def _thinking(kind: str, key: str) -> Callable[[int], Row]:
    def row(n: int) -> Row:
        answer = {"role": "assistant", "content": [{"type": kind, key: f"t-{n}"}, {"type": "text", "text": f"a-{n}"}]}
        return {"messages": [*said(n, "user"), answer]}

    return row


SHAREGPT = ("from", "value")

LAYOUTS = (
    Layout("OpenAI", lambda n: {"messages": said(n, "system", "user", "assistant")}, "messages"),
    Layout("OpenAI with tools", _called, "messages"),
    Layout("OpenAI with image_url", lambda n: {"messages": parts(
        n, {"type": "text", "text": f"see-{n}"}, {"type": "image_url", "image_url": {"url": url(n)}})}, "messages"),
    Layout("OpenAI responses", lambda n: {"messages": parts(
        n, {"type": "input_text", "text": f"see-{n}"}, {"type": "input_image", "image_url": url(n)})}, "messages"),
    Layout("reasoning parts", _thinking("reasoning", "text"), "messages"),
    Layout("Anthropic thinking", _thinking("thinking", "thinking"), "messages"),
    Layout("Anthropic image", lambda n: {"messages": parts(n, {"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": url(n).partition(",")[2]}})}, "messages"),
    Layout("image_url with value", lambda n: {"messages": parts(
        n, {"type": "image_url", "value": url(n)})}, "messages"),
    Layout("LMSYS-Chat-1M", lambda n: {
        "conversation_id": f"i-{n}", "model": "m", "conversation": said(n, "user", "assistant")}, "messages"),
    Layout("UltraChat 200k", lambda n: {
        "prompt": f"prompt-{n}", "prompt_id": f"id-{n}", "messages": said(n, "user", "assistant")}, "messages"),
    Layout("ShareGPT", lambda n: {
        "id": f"id-{n}", "system": f"s-{n}", "conversations": said(n, "human", "gpt", keys=SHAREGPT)}, "sharegpt"),
    Layout("ShareGPT's items", lambda n: {"id": f"i-{n}", "items": said(n, "human", "gpt", keys=SHAREGPT)}, "sharegpt"),
    Layout("LLaVA", lambda n: {"id": f"id-{n}", "image": image(n), "conversations": [
        {"from": "human", "value": f"<image>\nask-{n}"}, {"from": "gpt", "value": f"say-{n}"}]}, "sharegpt"),
    Layout("LLaVA with img", lambda n: {"img": image(n), "conversations": [
        {"from": "human", "value": f"<image>\nask-{n}"}, {"from": "gpt", "value": f"say-{n}"}]}, "sharegpt"),
    Layout("WebDataset of chats", lambda n: {"__key__": str(n), "jpg": image(n), "json": {
        "id": f"id-{n}", "conversations": [{"from": "human", "value": f"<image>ask-{n}"},
                                           {"from": "gpt", "value": f"say-{n}"}]}}, "sharegpt"),
    Layout("Alpaca", lambda n: {"instruction": f"i-{n}", "input": f"in-{n}", "output": f"o-{n}"}, "alpaca"),
    Layout("LLaMA-Factory's Alpaca", lambda n: {
        "instruction": f"i-{n}", "input": "", "output": f"o-{n}", "system": f"s-{n}",
        "history": [[f"h-{n}", f"g-{n}"]]}, "alpaca"),
    Layout("Dolly", lambda n: {
        "instruction": f"i-{n}", "context": f"c-{n}", "response": f"r-{n}", "category": f"k-{n}"}, "alpaca"),
    Layout("OIG in capitals", lambda n: {
        "INSTRUCTION": f"i-{n}", "RESPONSE": f"r-{n}", "SOURCE": f"s-{n}"}, "prompt-response"),
    Layout("OpenOrca", lambda n: {
        "id": f"id-{n}", "system_prompt": f"s-{n}", "question": f"q-{n}", "response": f"r-{n}"}, "question-answer"),
    Layout("ms-swift", lambda n: {
        "system": f"s-{n}", "query": f"q-{n}", "response": f"r-{n}", "history": [[f"h-{n}", f"g-{n}"]]},
        "prompt-response"),
    Layout("ms-swift with images", lambda n: {
        "query": f"<image>q-{n}", "response": f"r-{n}", "images": [image(n)]}, "prompt-response"),
    Layout("ms-swift rejected_response", lambda n: {
        "query": f"q-{n}", "response": f"r-{n}", "rejected_response": f"x-{n}"}, "preference"),
    Layout("ms-swift rejected_messages", lambda n: {
        "messages": said(n, "user", "assistant"), "rejected_messages": [
            *said(n, "user"), {"role": "assistant", "content": f"x-{n}"}]}, "preference"),
    Layout("LLaMA-Factory v1, compared", lambda n: {
        "chosen_messages": said(n, "user", "assistant"), "rejected_messages": [
            *said(n, "user"), {"role": "assistant", "content": f"x-{n}"}]}, "preference"),
    Layout("response_chosen", lambda n: {
        "prompt": f"q-{n}", "response_chosen": f"r-{n}", "response_rejected": f"x-{n}"}, "preference"),
    Layout("functions of OpenAI", lambda n: {
        "messages": said(n, "user", "assistant"), "functions": [{"name": f"f-{n}", "parameters": {}}]}, "messages"),
    Layout("BELLE and Firefly", lambda n: {"conversation_id": f"i-{n}", "category": f"k-{n}", "conversation": [
        {"human": f"u-{n}", "assistant": f"a-{n}"}, {"human": f"v-{n}", "assistant": f"b-{n}"}]}, "exchanges"),
    Layout("The Cauldron", lambda n: {"images": [image(n)], "texts": [
        {"user": f"u-{n}", "assistant": f"a-{n}", "source": f"s-{n}"}]}, "exchanges"),
    Layout("exchanges with an image and a system prompt", lambda n: {"conversation": [
        {"human": f"u-{n}", "assistant": f"a-{n}", "image": image(n), "system": f"s-{n}"}]}, "exchanges"),
    Layout("exchanges of instruction and input", lambda n: {"conversation": [
        {"instruction": f"i-{n}", "input": f"in-{n}", "output": f"o-{n}"}]}, "exchanges"),
    Layout("XTuner", lambda n: {"conversation": [
        {"system": f"s-{n}", "input": f"i-{n}", "output": f"o-{n}"}, {"input": f"j-{n}", "output": f"p-{n}"}]},
        "exchanges"),
    Layout("messages with images", lambda n: {"messages": [
        {"role": "user", "content": f"<image>u-{n}", "images": [image(n)]}, *said(n, "assistant")]}, "messages"),
    Layout("columns human and assistant", lambda n: {"human": f"u-{n}", "assistant": f"a-{n}"}, "prompt-response"),
    Layout("Firefly 1.1M", lambda n: {"kind": f"k-{n}", "input": f"i-{n}", "target": f"t-{n}"}, "prompt-response"),
    Layout("Tulu's input and output", lambda n: {"input": f"i-{n}", "output": f"o-{n}"}, "prompt-response"),
    Layout("MATH", lambda n: {
        "problem": f"p-{n}", "level": f"l-{n}", "type": f"t-{n}", "solution": f"s-{n}"}, "prompt-response"),
    Layout("FLAN", lambda n: {"inputs": f"i-{n}", "targets": f"t-{n}", "task": f"k-{n}"}, "prompt-response"),
    Layout("GSM8K", lambda n: {"question": f"q-{n}", "answer": f"a-{n}"}, "question-answer"),
    Layout("VQA", lambda n: {"image": image(n), "question": f"q-{n}", "answer": f"a-{n}"}, "question-answer"),
    Layout("img2dataset", lambda n: {
        "__key__": str(n), "jpg": image(n), "txt": f"t-{n}", "json": {"url": f"u-{n}"}}, "caption"),
    Layout("WebDataset of png and json", lambda n: {
        "__key__": str(n), "png": image(n), "json": {"caption": f"t-{n}"}}, None),
    Layout("captions", lambda n: {"image": image(n), "text": f"t-{n}"}, "caption"),
    Layout("picture and text", lambda n: {"picture": image(n), "text": f"t-{n}"}, "caption"),
    Layout("photo and description", lambda n: {"photo": image(n), "description": f"t-{n}"}, "caption"),
    Layout("photo and prompt and response", lambda n: {
        "photo": {"bytes": image(n), "path": None}, "prompt": f"p-{n}", "response": f"r-{n}"}, "prompt-response"),
    Layout("ImageNet as WebDataset", lambda n: {"__key__": str(n), "jpg": image(n), "cls": f"{n}"}, "image-label"),
    Layout("speakers of their own", lambda n: {"turns": [
        {"who": "client", "says": f"c-{n}"}, {"who": "agent", "says": f"a-{n}"}]}, "messages"),
    Layout("the assistant greets", lambda n: {"turns": [
        {"speaker": who, "text": f"{who}-{at}-{n}"} for at, who in enumerate(("bot", "human", "bot"))]}, "messages"),
    Layout("speakers with names", lambda n: {"talk": [
        {"name": "Alice", "text": "hi"}, {"name": "Bob", "text": "hello"}, {"name": "Alice", "text": f"c-{n}"},
        {"name": "Bob", "text": f"d-{n}"}]}, "messages"),
    Layout("VQA with several answers", lambda n: {
        "image": image(n), "question": f"q-{n}", "answers": [f"a-{n}", f"b-{n}"]}, None),
    Layout("image and instruction", lambda n: {
        "image": image(n), "instruction": f"q-{n}", "outputs": [f"a-{n}"]}, None),
    Layout("two images and text", lambda n: {
        "image_1": image(n), "image_2": image(n + 9), "text": f"t-{n}"}, "caption"),
    Layout("WebDataset of img.jpg", lambda n: {"__key__": str(n), "img.jpg": image(n), "txt": f"t-{n}"}, "caption"),
    Layout("SODA", lambda n: {"dialogue": [f"u-{n}", f"a-{n}"], "narrative": f"x-{n}"}, "dialog"),
    Layout("C4", lambda n: {"text": f"t-{n}", "timestamp": f"s-{n}", "url": f"u-{n}"}, "text"),
    Layout("StarCoder", lambda n: {"content": f"t-{n}", "size": 3}, "text"),
    Layout("The Stack", lambda n: {"content": f"t-{n}", "lang": f"l-{n}", "size": 3}, None),
    Layout("UltraFeedback", lambda n: {
        "prompt": f"user-0-{n}", "chosen": [*said(n, "user"), {"role": "assistant", "content": f"c-{n}"}],
        "rejected": [*said(n, "user"), {"role": "assistant", "content": f"x-{n}"}], "score_chosen": 1.0},
        "preference"),
    Layout("Intel's DPO pairs", lambda n: {
        "system": f"s-{n}", "question": f"q-{n}", "chosen": f"c-{n}", "rejected": f"r-{n}"}, "preference"),
    Layout("RLAIF-V", lambda n: {
        "image": image(n), "question": f"q-{n}", "chosen": f"c-{n}", "rejected": f"r-{n}", "ds_name": f"d-{n}"},
        "preference"),
    Layout("PKU-SafeRLHF", lambda n: {"prompt": f"p-{n}", "response_0": f"a-{n}", "response_1": f"b-{n}",
        "is_response_0_safe": True, "better_response_id": 0}, None),
    Layout("Chatbot Arena", lambda n: {"winner": "model_a", "conversation_a": said(n, "user", "assistant"),
        "conversation_b": [*said(n, "user"), {"role": "assistant", "content": f"b-{n}"}]}, "preference"),
    Layout("Nectar", lambda n: {"prompt": f"p-{n}", "answers": [
        {"answer": f"a-{n}", "model": "m", "rank": 1.0}, {"answer": f"b-{n}", "model": "k", "rank": 2.0}],
        "num_responses": 2, "good_natured": True}, None),
    Layout("OpenHermes", lambda n: {"conversations": [
        {"from": "human", "value": f"q-{n}", "weight": None}, {"from": "gpt", "value": f"a-{n}", "weight": None}],
        "source": f"s-{n}", "system_prompt": None, "idx": None}, "sharegpt"),
    Layout("SlimOrca", lambda n: {"conversations": [
        {"from": "system", "value": f"s-{n}", "weight": None}, {"from": "human", "value": f"q-{n}", "weight": 0.0},
        {"from": "gpt", "value": f"a-{n}", "weight": 1.0}]}, "sharegpt"),
    Layout("Magpie", lambda n: {"instruction": f"human-0-{n}", "response": f"gpt-1-{n}", "instruct_reward": -1.0,
        "conversations": said(n, "human", "gpt", keys=SHAREGPT)}, "sharegpt"),
    Layout("Hermes function calling", lambda n: {"tools": f'[{{"type": "function", "name": "f-{n}"}}]', "conversations":
        said(n, "system", "human", "gpt", "tool", "gpt", keys=SHAREGPT)}, "sharegpt"),
    Layout("xLAM", lambda n: {
        "id": n, "query": f"q-{n}", "answers": f'[{{"name": "f", "arguments": {{"x": "x-{n}"}}}}]',
        "tools": f'[{{"name": "f", "description": "d-{n}"}}]'}, "prompt-response"),
    Layout("NuminaMath", lambda n: {"problem": f"p-{n}", "solution": f"s-{n}", "answer": f"a-{n}",
        "problem_type": f"k-{n}", "question_type": f"t-{n}"}, "prompt-response"),
    Layout("ToolBench", lambda n: {"id": f"i-{n}", "conversations": {
        "from": ["system", "user", "assistant"], "value": [f"s-{n}", f"u-{n}", f"a-{n}"]}}, "sharegpt"),
    Layout("ms-swift's agents", lambda n: {"tools": f'[{{"name": "f-{n}"}}]', "messages": [
        *said(n, "user"), {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
        {"role": "tool_response", "content": f"r-{n}"}, *said(n + 9, "assistant")]}, "messages"),
    Layout("UltraInteract", lambda n: {"trajectory": said(n, "user", keys=SHAREGPT), "chosen": f"Step 1: a-{n}",
        "rejected": f"Step 1: b-{n}", "task": f"t-{n}"}, "preference"),
    Layout("OpenRLHF", lambda n: {
        "context_messages": said(n, "user"), "chosen": f"c-{n}", "rejected": f"x-{n}"}, "preference"),
    Layout("HelpSteer3", lambda n: {"context": said(n, "user", "assistant", "user"), "response1": f"a-{n}",
        "response2": f"b-{n}", "overall_preference": -1}, None),
    Layout("messages and two responses", lambda n: {
        "messages": said(n, "user"), "response_a": f"a-{n}", "response_b": f"b-{n}"}, None),
    Layout("C-Eval", lambda n: {
        "question": f"q-{n}", "A": f"a-{n}", "B": f"b-{n}", "C": f"c-{n}", "D": f"d-{n}", "answer": "A"}, None),
    Layout("CMMLU", lambda n: {"Question": f"q-{n}", "A": f"a-{n}", "B": f"b-{n}", "C": "c", "Answer": "A"}, None),
    Layout("ChartQA", lambda n: {"image": image(n), "query": f"q-{n}", "label": f"a-{n}"}, "prompt-response"),
    Layout("speech commands", lambda n: {"file": "a.wav", "audio": wav_bytes(), "label": 1}, None),
    Layout("ShareGPT4Video", lambda n: {"video_path": "a.mp4", "captions": [
        {"idx": "0", "content": f"a-{n}"}, {"idx": "1", "content": f"b-{n}"}]}, None),
    Layout("Nemotron", lambda n: {"input": said(n, "user"), "output": f"o-{n}", "system_prompt": f"s-{n}",
        "reasoning": f"r-{n}"}, "prompt-response"),
    Layout("verifiers", lambda n: {"prompt": said(n, "user"), "answer": f"a-{n}"}, "prompt-response"),
    Layout("Geometry3K of verl", lambda n: {
        "images": [image(n)], "problem": f"<image>p-{n}", "answer": f"a-{n}"}, "prompt-response"),
    Layout("DAPO", lambda n: {"data_source": f"d-{n}", "prompt": said(n, "user"), "ability": "MATH",
        "reward_model": {"ground_truth": f"g-{n}", "style": "rule"}}, None),
    Layout("TRL's prompts with images", lambda n: {"prompt": said(n, "system", "user"), "image": image(n)}, None),
    Layout("batches of OpenAI", lambda n: {"custom_id": f"i-{n}", "body": {"messages": said(n, "user")}}, None),
    Layout("MMLU", lambda n: {"question": f"q-{n}", "choices": [f"a-{n}", f"b-{n}"], "answer": 1}, None),
    Layout("MMMU", lambda n: {
        "question": f"q-{n}", "options": f"['a-{n}']", "answer": "B", "image_1": image(n), "image_2": None}, None),
    Layout("ARC", lambda n: {"id": f"i-{n}", "question": f"q-{n}", "choices": {
        "text": [f"a-{n}", f"b-{n}"], "label": ["A", "B"]}, "answerKey": "B"}, None),
    Layout("ARC as published", lambda n: {"id": f"i-{n}", "question": {"stem": f"q-{n}", "choices": [
        {"text": f"a-{n}", "label": "A"}, {"text": f"b-{n}", "label": "B"}]}, "answerKey": "B"}, None),
    Layout("HellaSwag", lambda n: {"ctx": f"c-{n}", "endings": [f"a-{n}", f"b-{n}"], "label": "1"}, None),
    Layout("SQuAD", lambda n: {"title": f"t-{n}", "context": f"c-{n}", "question": f"q-{n}", "answers": {
        "text": [f"a-{n}"], "answer_start": [1]}}, None),
    Layout("MOSS", lambda n: {"conversation_id": f"{n}", "meta_instruction": f"m-{n}", "chat": {"turn_1": {
        "Human": f"<|Human|>: h-{n}", "MOSS": f"<|MOSS|>: a-{n}"}}}, None),
    Layout("MultiWOZ", lambda n: {"dialogue_id": f"{n}", "turns": {
        "speaker": [0, 1], "utterance": [f"u-{n}", f"v-{n}"]}}, None),
    Layout("ChatGPT's export", lambda n: {"title": "t", "mapping": {"a": {"message": {
        "author": {"role": "user"}, "content": {"parts": [f"u-{n}"]}}}}}, None),
    Layout("Self-Instruct", lambda n: {"instruction": f"i-{n}", "instances": [
        {"input": f"in-{n}", "output": f"o-{n}"}]}, None),
    Layout("GLUE", lambda n: {"premise": f"p-{n}", "hypothesis": f"h-{n}", "label": 1}, None),
    Layout("SST-2", lambda n: {"sentence": f"s-{n}", "label": 1, "idx": n}, "prompt-response"),
    Layout("TL;DR with a label", lambda n: {"prompt": f"p-{n}", "label": f"l-{n}"}, None),
    Layout("TL;DR", lambda n: {"prompt": f"p-{n}", "completion": f"c-{n}"}, "prompt-response"),
    Layout("HumanEval", lambda n: {
        "task_id": f"i-{n}", "prompt": f"p-{n}", "canonical_solution": f"c-{n}", "test": f"t-{n}"}, None),
    Layout("FineWeb", lambda n: {
        "text": f"t-{n}", "id": f"i-{n}", "url": f"u-{n}", "file_path": "s3://a/b", "token_count": 3}, "text"),
    Layout("FineVision", lambda n: {"images": [image(n)], "texts": [
        {"user": f"u-{n}", "assistant": f"a-{n}"}], "source": f"s-{n}", "relevance_ratings": [4]}, "exchanges"),
    Layout("LIMA", lambda n: {"conversations": [f"u-{n}", f"a-{n}"], "source": f"s-{n}"}, "dialog"),
    Layout("Gemini tuning", lambda n: {"contents": [{"role": "user", "parts": [{"text": f"u-{n}"}]},
        {"role": "model", "parts": [{"text": f"a-{n}"}]}]}, None),
    Layout("completions of input and output", lambda n: {"segments": [
        {"label": False, "text": f"u-{n}"}, {"label": True, "text": f"a-{n}"}]}, None),
    Layout("TRL's KTO", lambda n: {"prompt": f"p-{n}", "completion": f"c-{n}", "label": True}, "kto"),
)  # fmt: skip
