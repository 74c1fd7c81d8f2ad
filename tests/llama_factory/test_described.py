"""All datasets of LLaMA-Factory's dataset_info.json are converted, each kind of rows to a dataset of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.identity import described_kinds
from lmms_stream.converters.sources.specs import Spec
from lmms_stream.errors import DataError, StorageError
from lmms_stream.mds.mosaic_shards import LocalDataset
from lmms_stream.processors.stored_chat import read_chat, read_preference

ASKED = [{"from": "human", "value": "Which?"}]
ENTRIES: dict[str, Any] = {
    "plain": {"file_name": "plain.json"},
    "talks": {"file_name": "talks.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
    "pairs": {
        "file_name": "pairs.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "judged": {
        "file_name": "judged.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "wiki": {"file_name": "wiki.txt", "columns": {"prompt": "text"}},
    "c4": {"file_name": "c4.jsonl", "columns": {"prompt": "text"}},
    "far": {"hf_hub_url": "some/chats"},
    "farther": {"hf_hub_url": "some/pairs", "ranking": True},
    "farthest": {"hf_hub_url": "some/texts"},
    "beyond": {"hf_hub_url": "some/more"},
    "model scope": {"ms_hub_url": "some/chats"},
    "script": {"script_url": "some_script"},
}  # fmt: skip
FILES: dict[str, Any] = {
    "plain.json": [{"instruction": "Count.", "input": "To two.", "output": "1, 2"}],
    "talks.json": [{"talk": [*ASKED, {"from": "gpt", "value": "This."}]}],
    "pairs.json": [
        {"conversations": ASKED, "chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}}
    ],
    "judged.json": [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "label": False}
    ],
}


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset_info.json with its files, on a machine without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, content in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "wiki.txt").write_text("A line.\nAnother line.\n")
    (tmp_path / "c4.jsonl").write_text('{"text": "A page."}\n')
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def test_all_datasets_that_can_be_read_are_converted_and_the_others_named_one_by_one(
    described: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = convert(f"{described}#*", tmp_path / "out", num_workers=1)
    assert report.splits is not None
    assert {name: each.num_rows for name, each in report.splits.items()} == {
        "messages": 2, "preference": 1, "kto": 1, "text": 3,
    }  # fmt: skip
    samples = {name: LocalDataset(tmp_path / "out" / name)[:] for name in report.splits}
    chats = [[(turn["role"], turn["content"]) for turn in read_chat(each["messages"]).messages]
             for each in samples["messages"]]  # fmt: skip
    assert chats == [
        [("user", "Count.\nTo two."), ("assistant", "1, 2")],
        [("user", "Which?"), ("assistant", "This.")],
    ]
    pair = read_preference(samples["preference"][0]["messages"])
    assert [answer[0]["content"] for answer in pair.answers.values()] == ["A", "B"]  # type: ignore[index]
    assert read_preference(samples["kto"][0]["messages"]).label is False
    assert [each["text"] for each in samples["text"]] == ["A line.", "Another line.", "A page."]
    told = [line for line in caplog.messages if line.startswith("left out: ")]
    names = ["model scope", "script", "far", "farther", "farthest"]
    assert [line.partition("#")[2].partition(":")[0].partition(",")[0] for line in told] == names
    assert "#farthest, " in told[-1], "the hub is asked twice"
    assert told[-1].endswith("#beyond: the hub gave no answer for those before")


def test_a_hub_that_answers_in_between_is_asked_again(described: Path) -> None:
    asked: list[str] = []

    def opens(spec: Spec) -> None:
        asked.append(spec.text.partition("#")[2])
        if len(asked) != 2:
            raise StorageError("no answer")

    kinds = described_kinds(f"{described}#*", opens=opens)
    assert asked == ["far", "farther", "farthest", "beyond"]
    assert [each.text.partition("#")[2] for each in kinds["preference"]] == ["pairs", "farther"]


def test_datasets_of_one_kind_are_one_dataset_and_those_of_hubs_alone_are_none(described: Path, tmp_path: Path) -> None:
    described.write_text(json.dumps({name: ENTRIES[name] for name in ("plain", "talks", "script")}))
    assert convert(f"{described}#*", tmp_path / "out", num_workers=1).num_rows == 2
    assert len(LocalDataset(tmp_path / "out")) == 2
    described.write_text(json.dumps({name: ENTRIES[name] for name in ("script", "far")}))
    with pytest.raises(DataError, match="none of its datasets can be read: download them, and name files by file_name"):
        convert(f"{described}#*", tmp_path / "none", num_workers=1)
