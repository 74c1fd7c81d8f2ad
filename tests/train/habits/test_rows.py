"""input_ids and labels of a row are those that the installed TRL makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from lmms_stream.errors import ConfigError, DataError, LmmsStreamError
from lmms_stream.train.inputs import RunInputs
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTTrainer

from . import rows

Make = Callable[[], Dataset]
CASES: dict[str, tuple[Make, dict[str, Any], str | None]] = {
    "chats": (rows.chats, {}, None),
    "chats of the assistant alone": (rows.chats, {"assistant_only_loss": True}, None),
    "chats that are cut": (rows.chats, {"max_length": 12}, None),
    "the end of chats": (rows.chats, {"max_length": 12, "truncation_mode": "keep_end"}, None),
    "chats of the assistant that are cut before they learn": (
        lambda: Dataset.from_list([{"messages": [*rows.question(n) * (1 + n % 3), rows.reply(n)]} for n in range(12)]),
        {"max_length": 24, "assistant_only_loss": True}, None,
    ),
    "chats with tools": (rows.tools, {}, rows.CHATML),
    "turns of from and value": (rows.turns, {}, None),
    "prompts of messages": (rows.chat_prompts, {}, rows.CHATML),
    "prompts whose template renders them otherwise alone": (rows.chat_prompts, {}, rows.THINKING),
    "prompts of messages that are learnt": (rows.chat_prompts, {"completion_only_loss": False}, rows.CHATML),
    "prompts of messages, of the assistant": (rows.chat_prompts, {"assistant_only_loss": True}, None),
    "prompts": (rows.prompts, {}, None),
    "prompts that are learnt": (rows.prompts, {"completion_only_loss": False}, None),
    "prompts that are cut": (rows.prompts, {"max_length": 8}, None),
    "texts": (rows.texts, {}, None),
    "texts of another column": (lambda: rows.texts(column="body"), {"dataset_text_field": "body"}, None),
    "texts with another end": (rows.texts, {"eos_token": "<|user|>"}, None),
    "tokens": (rows.tokens, {}, None),
    "tokens with labels": (lambda: rows.tokens(labels=lambda ids: [-100, *ids[1:]]), {}, None),
    "tokens with a mask of the assistant": (
        lambda: rows.tokens(assistant_masks=lambda ids: [0, 0] + [1] * (len(ids) - 2)), {}, None,
    ),
    "tokens with a mask of the completion": (
        lambda: rows.tokens(completion_mask=lambda ids: [0] + [1] * (len(ids) - 1)), {"completion_only_loss": True},
        None,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of TRL and transformers
@pytest.mark.parametrize("name", CASES)
def test_rows_become_the_tokens_and_labels_that_trl_makes(
    name: str, tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    make, options, template = CASES[name]
    dataset = make()
    if template is not None:
        tok.chat_template = template
    ours = rows.resolved(
        model=str(model_folder), args=rows.config(tmp_path, **options), train_dataset=dataset, processing_class=tok
    )
    made = rows.tokens_of(ours.train_dataset)  # type: ignore[arg-type]
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model_folder),
        args=rows.config(tmp_path, **options),
        train_dataset=dataset,
        processing_class=tok,
    )
    theirs = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    assert len(made) > 3
    assert made == theirs


@pytest.mark.filterwarnings("ignore")
def test_a_formatting_func_makes_the_text_that_trl_learns(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    def formatting(row: dict[str, Any]) -> str:
        return f"{row['one']} of {row['other']}"

    dataset = Dataset.from_list([{"one": rows.answer(number), "other": "all"} for number in range(5)])
    given = {"train_dataset": dataset, "processing_class": tok, "formatting_func": formatting}
    ours = rows.resolved(model=str(model_folder), args=rows.config(tmp_path), **given)
    trainer = SFTTrainer(AutoModelForCausalLM.from_pretrained(model_folder), args=rows.config(tmp_path), **given)
    theirs = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    assert rows.tokens_of(ours.train_dataset) == theirs  # type: ignore[arg-type]


def test_a_template_without_marks_is_replaced_by_the_one_that_trl_has_for_it_or_refused(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    tok.chat_template = rows.CHATML
    with pytest.raises(
        ConfigError,
        match=r"nor TRL has such a template for this model: mark them in the template by \{% generation %\}",
    ):
        resolve_rows(rows.chats(), tok, model_folder, tmp_path, assistant_only_loss=True)


@pytest.mark.parametrize("content", ["{{ m.content | trim }}", "{{ '' if m.content is none else m.content }}"])
def test_a_null_content_is_no_text(
    content: str, tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    tok.chat_template = "{% for m in messages %}<|{{ m.role }}|>" + content + "{{ m.tool_calls | tojson }}{% endfor %}"
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
    ours = resolve_rows(Dataset.from_list([{"messages": chat}]), tok, model_folder, tmp_path)
    ((ids, _),) = rows.tokens_of(ours.train_dataset)  # type: ignore[arg-type]
    assert tok.decode(ids) == '<|assistant|>[{"name": "add"}]'


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown columns": (
        lambda: Dataset.from_list([{"body": "x"}]), {}, "columns body, which do not make a sample.*formatting_func",
    ),
    "images": (lambda: Dataset.from_list([{"images": ["x"], "messages": []}]), {}, "have images, and process"),
    "pairs": (lambda: Dataset.from_list([{"chosen": "x", "rejected": "y"}]), {}, "pairs of answers: give the"),
    "a text that is none": (
        lambda: Dataset.from_list([{"text": "x"}, {"text": None}]), {}, "row 1: column 'text' holds None",
    ),
    "a mask of texts": (rows.texts, {"assistant_only_loss": True}, "for conversations, and the rows are text"),
    "shifted labels": (
        lambda: rows.tokens(labels=lambda ids: [-100, *ids[:-2], 3]), {}, "a label is the id at its own index",
    ),
    "a broken chat": (
        lambda: Dataset.from_list([{"messages": [rows.reply(1)]}, {"messages": None}]), {},
        "row 1 is not read as messages .*: correct or remove it",
    ),
    "a chat at which the template fails": (
        lambda: Dataset.from_list([{"messages": [rows.reply(1)]}, {"messages": [{"role": "x" * 10, "content": "x"}]}]),
        {"chat_template_path": "failing"}, "row 1 is not read as messages .ZeroDivisionError: division by zero",
    ),
    "nothing learnt": (
        lambda: rows.tokens(labels=lambda ids: [-100] * len(ids)), {}, "no token of train_dataset, read as tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_make_no_sample_are_refused_by_name(
    name: str, tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    make, options, message = REFUSED[name]
    if "chat_template_path" in options:
        options = {"chat_template_path": str(tmp_path / "failing.jinja")}
        template = (
            "{% for message in messages %}{{ message.content }}{{ 1 / (10 - message.role | length) }}{% endfor %}"
        )
        (tmp_path / "failing.jinja").write_text(template)
    with pytest.raises(LmmsStreamError, match=message) as caught:
        resolve_rows(make(), tok, model_folder, tmp_path, **options)
    assert isinstance(caught.value, ConfigError | DataError)


def test_a_formatting_func_returns_the_text_of_one_row(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"row 0: formatting_func returns list \['.*'\], but is called with a single row"
    ):
        rows.resolved(
            model=str(model_folder), args=rows.config(tmp_path), train_dataset=rows.texts(), processing_class=tok,
            formatting_func=lambda row: [row["text"]],
        )  # fmt: skip


def test_a_formatting_func_and_a_loss_of_completions_contradict_each_other(
    tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="set completion_only_loss=False, or format the dataset"):
        rows.resolved(
            model=str(model_folder), args=rows.config(tmp_path), train_dataset=rows.prompts(), processing_class=tok,
            formatting_func=lambda row: row["prompt"],
        )  # fmt: skip


def resolve_rows(
    dataset: Dataset, tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path, **options: Any
) -> RunInputs:
    args = rows.config(tmp_path, **options)
    return rows.resolved(model=str(model_folder), args=args, train_dataset=dataset, processing_class=tok)
