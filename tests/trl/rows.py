"""Rows with answers to compare, in TRL's forms, and rows with images."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import datasets
from datasets import Dataset, Features, Value
from PIL import Image

from ..processors.tiny_vlm import picture
from ..train.habits.rows import WORDS, answer, question, reply


def text_pairs(count: int = 8) -> Dataset:
    return Dataset.from_list([
        {"prompt": f"{WORDS[n % 7]} is", "chosen": f" {answer(n)}", "rejected": f" {answer(n + 3)}"}
        for n in range(count)
    ])  # fmt: skip


def whole_text_pairs(count: int = 8) -> Dataset:
    return Dataset.from_list([
        {"chosen": f"{WORDS[n % 7]} is {answer(n)}", "rejected": f"{WORDS[n % 7]} is {answer(n + 3)}"}
        for n in range(count)
    ])  # fmt: skip


def chat_pairs(count: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"prompt": question(n), "chosen": [reply(n)], "rejected": [reply(n + 3)]} for n in range(count)]
    )


def growing_pairs(count: int = 8) -> Dataset:
    """Pairs behind one, two and three questions in turn."""
    return Dataset.from_list(
        [{"prompt": question(n) * (1 + n % 3), "chosen": [reply(n)], "rejected": [reply(n + 3)]} for n in range(count)]
    )


def whole_pairs(count: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"chosen": [*question(n), reply(n)], "rejected": [*question(n), reply(n + 3)]} for n in range(count)]
    )


def judged(count: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"prompt": question(n), "completion": [reply(n)], "label": n % 2 == 0} for n in range(count)]
    )


def judged_texts(count: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"{WORDS[n % 7]} is", "completion": f" {answer(n)}", "label": n % 3 > 0} for n in range(count)]
    )


def image(number: int) -> Image.Image:
    return Image.open(BytesIO(picture(56 + 28 * (number % 3), 56, seed=number)))


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def seen(count: int = 6) -> Dataset:
    """Images in a column, and parts that say where each belongs."""
    return Dataset.from_list([
        {
            "messages": [
                {"role": "user", "content": [text_part("What do you see?"), {"type": "image", "text": None}]},
                {"role": "assistant", "content": [text_part(answer(n))]},
            ],
            "images": [image(n)],
        }
        for n in range(count)
    ])  # fmt: skip


def seen_before_text(count: int = 6) -> Dataset:
    """Images in a column, and messages of text, which they stand before."""
    return Dataset.from_list([{"messages": [*question(n), reply(n)], "image": image(n)} for n in range(count)])


def seen_prompts(count: int = 6) -> Dataset:
    return Dataset.from_list(
        [{"prompt": question(n), "completion": [reply(n)], "images": [image(n)]} for n in range(count)]
    )


def seen_in_messages(count: int = 6) -> Dataset:
    """Two images in the parts of a message itself."""
    part = {"type": Value("string"), "text": Value("string"), "image": datasets.Image()}
    features = Features({"messages": [{"role": Value("string"), "content": [part]}]})
    shown = [{"type": "image", "image": image(each), "text": None} for each in range(2)]
    return Dataset.from_list([
        {
            "messages": [
                {"role": "user", "content": [*shown, {**text_part("Which?"), "image": None}]},
                {"role": "assistant", "content": [{**text_part(answer(n)), "image": None}]},
            ]
        }
        for n in range(count)
    ], features=features)  # fmt: skip


def seen_pairs(count: int = 6) -> Dataset:
    return Dataset.from_list([
        {
            "images": [image(n)],
            "prompt": [{"role": "user", "content": [{"type": "image", "text": None}, text_part("What?")]}],
            "chosen": [{"role": "assistant", "content": [text_part(answer(n))]}],
            "rejected": [{"role": "assistant", "content": [text_part(answer(n + 3))]}],
        }
        for n in range(count)
    ])  # fmt: skip
