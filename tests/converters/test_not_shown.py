"""Content that a chat template does not show, and keys of messages that nothing reads, are counted or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.cli.main import main
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.errors import DataError
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import IGNORED_LABEL
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.tools.inspect.summary import describe_lengths, inspect_dataset, summary
from streaming import MDSWriter
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# mood #}"
)
CALL = {"type": "function", "function": {"name": "w", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}


def said(answer: dict[str, Any], **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **answer}]
    return {"messages": messages, **columns}


THINKS = said({"reasoning_content": "t"})
CALLS = {"messages": [*said({"content": None, "tool_calls": [CALL]})["messages"], *said({})["messages"]]}
ROWS = [said({}), THINKS, said({"loss_color": 1, "mood": 2}), THINKS]


@pytest.fixture(scope="module")
def plain(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template shows roles and contents only."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("plain")
    loaded.save_pretrained(folder)
    return folder


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def described(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "_lmms/dataset.json").read_text()))


@pytest.mark.parametrize(("lost", "row"), [("tool calls", CALLS), ("tools", said({}, tools=[TOOL]))])
def test_a_lost_call_is_an_error_of_its_row_unless_it_is_said_that_it_may_be_lost(
    lost: str, row: dict[str, Any], plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = lost.replace(" ", "_")
    source, target = written(tmp_path, [*ROWS, row]), tmp_path / "chats"
    command = ["convert", str(source), str(target), "--tokenizer", str(plain), "--workers", "1"]
    assert main(command) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"rows.jsonl:5: the chat template does not show the {lost} of the conversation" in shown
    assert main([*command, "--on-dropped", "warn"]) == 0  # the remedy, at the same target
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{lost} of 1 sample, reasoning of 2 samples" in table
    counted = {kind: 1, "reasoning": 2, "thoughts": 2, **({"answers": 1} if row is CALLS else {})}
    assert described(target)["not_shown"] == counted
    with pytest.raises(DataError, match=f"sample 4 .*does not show the {lost} of the conversation"):
        index_dataset(str(target), ChatProcessor.from_pretrained(str(plain)), num_workers=1)
    assert main(["index", str(target), "--tokenizer", str(plain), "--on-dropped", "warn", "--workers", "1"]) == 0
    assert f"{lost} of 1 sample, reasoning of 2 samples" in " ".join(capsys.readouterr().out.split())
    (lengths,) = inspect_dataset(str(target)).lengths
    assert lengths.not_shown == counted
    assert f"{lost} of 1 sample, reasoning of 2 samples" in describe_lengths(lengths)["supervision"]


def test_rows_with_lost_calls_are_left_out_where_rows_that_do_not_fit_are(plain: Path, tmp_path: Path) -> None:
    source = written(tmp_path, [CALLS, *ROWS])
    report = convert(
        [source], str(tmp_path / "chats"), processor=ChatProcessor.from_pretrained(str(plain)), on_error="skip",
        num_workers=1,
    )  # fmt: skip
    assert (report.num_rows, report.num_rejected, report.not_shown) == (4, 1, {"reasoning": 2, "thoughts": 2})


@pytest.mark.parametrize("changes", [{"tokenize": True}, {"tokenize": True, "concat": 8}, {"shuffle_seed": 1}])
def test_what_is_not_shown_is_counted_however_samples_are_stored(
    changes: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    source, target = written(tmp_path, [CALLS, *ROWS]), tmp_path / "chats"
    settings: dict[str, Any] = {"processor": ChatProcessor.from_pretrained(str(plain)), "num_workers": 1, **changes}
    with pytest.raises(DataError, match="does not show the tool calls"):
        convert([source], str(target), **settings)
    counted = {"tool_calls": 1, "reasoning": 2, "thoughts": 2, "answers": 1}
    for _ in range(2):  # the second time it is there already
        report = convert([source], str(target), on_dropped="warn", **settings)
        assert report.not_shown == counted
    assert described(target)["not_shown"] == counted
    append([written(tmp_path, [*ROWS, THINKS], "more")], str(target), on_dropped="warn", **settings)
    assert described(target)["not_shown"] == counted | {"reasoning": 5, "thoughts": 5}
    inspection = inspect_dataset(str(target))
    shown = [summary(inspection), *map(describe_lengths, inspection.lengths)]
    assert "tool calls of 1 sample, reasoning of 5 samples" in " ".join(line.get("supervision", "") for line in shown)
    convert([written(tmp_path, [CALLS, THINKS], "other")], str(tmp_path / "other"), on_dropped="warn", **settings)
    merge_datasets(str(tmp_path), [str(target), str(tmp_path / "other")])
    assert described(tmp_path)["not_shown"] == {
        "tool_calls": 2, "reasoning": 6, "thoughts": 6, "answers": 2
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"tokenize": True}, {"tokenize": True, "concat": 8}])
def test_empty_answers_are_counted_beside_the_dataset(changes: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    empty = {"messages": [*said({"content": " "})["messages"], *said({})["messages"]]}
    target = tmp_path / "chats"
    settings: dict[str, Any] = {"processor": ChatProcessor.from_pretrained(str(plain)), "num_workers": 1, **changes}
    report = convert([written(tmp_path, [said({}), empty, said({"mood": 2})])], str(target), **settings)
    assert report.not_shown == {"empty": 1}
    append([written(tmp_path, [empty, empty], "more")], str(target), **settings)
    assert described(target)["not_shown"] == {"empty": 3}
    counted = {} if "concat" in changes else {"empty": 3}  # documents are not samples
    assert [each.not_shown for each in inspect_dataset(str(target)).lengths] == [counted]
    if not changes:
        convert([str(target)], str(tmp_path / "part"), limit=2, num_workers=1)
        assert [each.not_shown for each in inspect_dataset(str(tmp_path / "part")).lengths] == [{}]  # unknown of a part


@pytest.mark.parametrize("concat", [None, 8])
def test_a_sample_whose_only_answer_is_not_shown_is_tokenized_where_it_may_be_lost(
    concat: int | None, plain: Path, tmp_path: Path
) -> None:
    only_call = said({"content": None, "tool_calls": [CALL]})
    source, target = written(tmp_path, [*ROWS, only_call]), tmp_path / "tokens"
    settings: dict[str, Any] = {"processor": ChatProcessor.from_pretrained(str(plain)), "tokenize": True}
    settings |= {"num_workers": 1, "concat": concat}
    with pytest.raises(DataError, match=r"rows\.jsonl:5: no token would be learnt.*--on-dropped warn"):
        convert([source], str(target), **settings)
    report = convert([source], str(target), on_dropped="warn", **settings)
    assert (report.num_rows, report.num_rejected) == (5 if concat is None else 4, 0)
    assert {"answers", "masked"} <= report.not_shown.keys()
    if concat is None:
        last = TokensProcessor().process(PackedStreamingDataset(str(target))[4])
        assert (last["labels"][1:] == IGNORED_LABEL).all()
        assert main(["verify", str(target)]) == 0


def test_samples_without_an_answer_to_train_on_are_counted_by_index(plain: Path, tmp_path: Path) -> None:
    rows = [said({}), said({"learn": False}), {"messages": said({})["messages"][:1]}]
    with MDSWriter(columns={"messages": "str"}, out=str(tmp_path / "chats")) as writer:
        for row in rows:
            writer.write({"messages": json.dumps(row["messages"])})
    chats = ChatProcessor.from_pretrained(str(plain))
    assert index_dataset(str(tmp_path / "chats"), chats, num_workers=1).not_shown == {"masked": 2}


def test_a_dry_run_shows_what_is_not_shown(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(written(tmp_path, [CALLS, *ROWS])), str(tmp_path / "chats"), "--tokenizer", str(plain)]
    assert main([*command, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows.jsonl:1: the chat template does not show the tool calls of the conversation" in shown
    assert "the chat template does not show: reasoning of 2 samples" in shown
    assert main([*command, "--dry-run", "--on-dropped", "warn"]) == 0
    assert "does not show: tool calls of 1 sample, reasoning of 2 samples" in " ".join(capsys.readouterr().out.split())


def test_lost_calls_that_an_earlier_run_counted_are_an_error_when_they_are_not_allowed(
    plain: Path, tmp_path: Path
) -> None:
    """The earlier run ends after the shard with the lost calls is measured."""
    rows = written(tmp_path, [CALLS, {"messages": [*said({})["messages"], {"role": "bad", "content": "b"}]}])
    target = str(tmp_path / "chats")
    convert([rows], target, num_workers=1, num_shards=2)
    strict = "{% for m in messages if m.role == 'bad' %}{{ raise_exception('bad') }}{% endfor %}"
    loaded = AutoTokenizer.from_pretrained(plain)
    loaded.chat_template = strict + TEMPLATE
    processor = ChatProcessor(loaded)
    for on_dropped, reason in (("warn", "sample 1 .*bad"), ("error", "sample 0 .*does not show the tool calls")):
        with pytest.raises(DataError, match=reason):
            index_dataset(target, processor, num_workers=1, work=tmp_path / "work", on_dropped=on_dropped)  # type: ignore[arg-type]


def test_keys_that_say_whether_a_message_is_trained_on(tmp_path: Path) -> None:
    keys = ("weight", "loss", "loss_weight", "loss_mask", "loss_scale", "train", "trainable", "training", "learn")
    for value in (0, 0.0, False, 1, 1.0, True, None):
        target = tmp_path / f"{value}"
        rows = [{"messages": [*said({key: value})["messages"], *said({})["messages"]]} for key in keys]
        assert not convert([written(tmp_path, rows)], str(target), num_workers=1).unread
        num_left_out = (target / "shard.00000.mds").read_bytes().count(b'"learn":false')
        assert num_left_out == (0 if value is None or value else len(keys))
    with pytest.raises(DataError, match=r"'train_detail', which names parts to train on, .*: make each part a message"):
        convert([written(tmp_path, [said({"train_detail": []})])], str(tmp_path / "parts"), num_workers=1)


def test_fractions_of_training_are_refused_with_a_remedy_that_converts(tmp_path: Path) -> None:
    source = written(tmp_path, [said({"loss_weight": 0.3}), said({"loss_weight": 1})])
    with pytest.raises(DataError, match=r"rows.jsonl:1: a message has loss_weight 0.3, .*round the value, with --map"):
        convert([source], str(tmp_path / "chats"), num_workers=1)
    rounded = "def rounded(row):\n    for message in row['messages']:\n"
    rounded += "        message['loss_weight'] = round(message.get('loss_weight', 1))\n    return row\n"
    (tmp_path / "rounding.py").write_text(rounded)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the loss leaves out every message of the assistant"):
        convert([source], str(tmp_path / "rounded"), map=f"{tmp_path}/rounding.py:rounded", num_workers=1)
    report = convert(
        [source], str(tmp_path / "rounded"), map=f"{tmp_path}/rounding.py:rounded", num_workers=1, on_error="skip"
    )
    assert (report.num_rows, report.num_rejected) == (1, 1)


def test_keys_of_messages_that_nothing_reads_are_listed_with_their_rows(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path, [*ROWS, *ROWS])
    report = convert([source], str(tmp_path / "alone"), num_workers=1)
    assert {name: unread.num_rows for name, unread in report.unread.items()} == {
        "messages[].loss_color": 2, "messages[].mood": 2,
    }  # fmt: skip
    assert report.unread["messages[].mood"].first.endswith("rows.jsonl:3")
    assert main(["convert", str(source), str(tmp_path / "chats"), "--tokenizer", str(plain), "--workers", "1"]) == 0
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "key loss_color of messages in 2 rows, first in" in table
    assert "key mood of messages" not in table  # the template reads it
