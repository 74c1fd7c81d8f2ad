from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError, StorageError
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.local import LocalStorage
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus

from ..conftest import run_cli
from ..processes import run_module
from ..rounds import rounds

UNANSWERED = {"messages": [{"role": "user", "content": "hi"}]}
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def source_messages(corpus: Corpus) -> list[Any]:
    lines = [json.loads(line) for line in corpus.functions.read_text().splitlines()]
    rows = pyarrow.parquet.read_table(corpus.classes).to_pylist()
    return [row["messages"] for row in (*lines, *rows)]


def test_rows_come_back_in_source_order_with_their_content(corpus: Corpus, dataset_folder: Path) -> None:
    dataset = PackedStreamingDataset(dataset_folder)
    expected = source_messages(corpus)
    assert len(dataset) == len(expected) == corpus.num_functions + corpus.num_classes
    assert len(dataset.core.shard_infos) > 3
    assert [json.loads(sample["messages"]) for sample in dataset[:]] == expected
    assert isinstance(expected[0][0]["content"], str)
    assert isinstance(expected[-1][0]["content"], list)


def test_an_unmodified_streaming_dataset_reads_the_shards(dataset_folder: Path, tmp_path: Path) -> None:
    script = (
        "import json, sys\n"
        "from streaming import StreamingDataset\n"
        "dataset = StreamingDataset(remote=sys.argv[1], local=sys.argv[2], batch_size=1, validate_hash='xxh3_64')\n"
        "print(json.dumps([sample['messages'] for sample in dataset]))\n"
        "assert dataset[0]['media'] == b''\n"
    )
    (tmp_path / "script.py").write_text(script)
    result = run_module(str(tmp_path / "script.py"), str(dataset_folder), str(tmp_path / "local"), timeout_s=120)
    assert result.returncode == 0, result.stderr
    ours = PackedStreamingDataset(dataset_folder)
    theirs = json.loads(result.stdout.splitlines()[-1])
    assert sorted(theirs) == sorted(sample["messages"] for sample in ours[:])


def test_every_indexed_length_is_the_length_of_the_processed_sample(
    dataset_folder: Path, chat_processor: ChatProcessor
) -> None:
    dataset = PackedStreamingDataset(dataset_folder, processor=chat_processor)
    lengths = dataset.length_index().lengths
    assert len(lengths) == len(dataset)
    for sample, length in zip(dataset[:], lengths, strict=True):
        assert chat_processor.measure(sample) == len(chat_processor.process(sample)["input_ids"]) == length


def test_tokenized_samples_are_what_the_processor_makes_of_the_messages(
    corpus: Corpus, chat_processor: ChatProcessor, dataset_folder: Path, tmp_path: Path
) -> None:
    report = convert([corpus.functions, corpus.classes], str(tmp_path), processor=chat_processor, tokenize=True)
    tokens, messages = PackedStreamingDataset(tmp_path), PackedStreamingDataset(dataset_folder)
    assert report.num_rows == len(tokens) == len(messages)
    for stored, sample in zip(tokens[:], messages[:], strict=True):
        assert stored["input_ids"].dtype == stored["loss_spans"].dtype == np.int32
        expected, processed = chat_processor.process(sample), TokensProcessor().process(stored)
        assert np.array_equal(processed["input_ids"], expected["input_ids"])
        assert np.array_equal(processed["labels"], expected["labels"])
    assert report.num_tokens == tokens.length_index().lengths.sum()


def test_conversion_to_s3_gives_the_same_bytes_as_to_a_folder(
    corpus: Corpus, chat_processor: ChatProcessor, dataset_folder: Path, s3_folder: str
) -> None:
    convert([corpus.functions, corpus.classes], s3_folder, processor=chat_processor, shard_bytes=1 << 16)
    remote = open_storage(s3_folder)
    names = [str(path.relative_to(dataset_folder)) for path in dataset_folder.rglob("*") if path.is_file()]
    names = [name for name in names if "counts" not in name]
    assert len(names) > 5
    for name in names:
        assert remote.read(name) == (dataset_folder / name).read_bytes(), name


def test_an_index_written_later_equals_the_one_written_at_conversion(
    corpus: Corpus, chat_processor: ChatProcessor, dataset_folder: Path, tmp_path: Path
) -> None:
    convert([corpus.functions, corpus.classes], str(tmp_path))
    index = index_dataset(str(tmp_path), chat_processor)
    assert index.fingerprint == processor_fingerprint(chat_processor)
    expected = PackedStreamingDataset(dataset_folder, processor=chat_processor).length_index()
    assert np.array_equal(index.lengths, expected.lengths)
    assert PackedStreamingDataset(tmp_path).length_index().content_hash == expected.content_hash


def test_a_conversion_that_is_asked_again_says_that_it_is_done(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", *[GOOD] * 50)
    target = tmp_path / "out"
    options: dict[str, Any] = {"processor": chat_processor, "splits": {"a": 0.5, "b": 0.5}, "num_workers": 1}
    first = convert([source], str(target), **options)
    files = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    said: list[str] = []
    again = convert([source], str(target), **options, on_error="skip", progress=Progress(say=said.append))
    (text,) = said
    assert text.startswith(f"{target}/a, {target}/b: is there already, of the same sources and options: nothing to do")
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == files
    assert again.was_there
    assert replace(again, seconds=first.seconds, kind=first.kind, was_there=False) == first
    with pytest.raises(StorageError, match="holds a dataset already"):
        convert([source], str(target), **options, limit=10)
    with pytest.raises(StorageError, match="holds a dataset already"):
        convert([write_jsonl(source, *[GOOD] * 51)], str(target), **options)
    rejecting = write_jsonl(tmp_path / "other.jsonl", GOOD, UNANSWERED)
    convert([rejecting], str(tmp_path / "rejects"), on_error="skip", num_workers=1)
    with pytest.raises(StorageError, match="holds a dataset already"):  # it would be an error
        convert([rejecting], str(tmp_path / "rejects"), num_workers=1)


DROPS_THOUGHTS = (  # of all but the last answer, as Qwen3's does; answers cannot be found by numbers of messages
    "{% for i in range(messages | length) %}<|{{ messages[i]['role'] }}|>{% if loop.last %}"
    "{% if messages[i]['role'] == 'assistant' %}<think></think>{% endif %}{% endif %}"
    "{{ messages[i]['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_ANSWERS = {"messages": [*GOOD["messages"], *GOOD["messages"]]}


def thoughtless(tokenizer: Path) -> ChatProcessor:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    loaded.chat_template = DROPS_THOUGHTS
    return ChatProcessor(loaded)


def test_what_training_could_not_process_is_an_error_of_the_conversion(tokenizer: Path, tmp_path: Path) -> None:
    processor = thoughtless(tokenizer)
    source = write_jsonl(tmp_path / "rows.jsonl", *[TWO_ANSWERS] * 20)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template changes message 1 .*--learn last"):
        convert([source], str(tmp_path / "out"), processor=processor, num_workers=1)
    with pytest.raises(DataError, match=r"no sample is left to write \(.*rows\.jsonl:1: the chat template changes"):
        convert([source], str(tmp_path / "out"), processor=processor, num_workers=1, on_error="skip")
    schema = SchemaOptions(learn="last")
    assert convert([source], str(tmp_path / "out"), processor=processor, num_workers=1, schema=schema).num_rows == 20
    assert verify_dataset(str(tmp_path / "out"), deep=True, processor=processor, num_workers=1).problems == ()
    labels = processor.process(PackedStreamingDataset(tmp_path / "out")[0])["labels"]
    assert processor.tokenizer.decode(labels[labels >= 0]) == "<think></think>hello<|end|>"


@pytest.mark.parametrize(("tokenize", "num_workers"), [(False, 1), (True, 2), *rounds([], [(False, 2), (True, 1)])])
def test_each_answer_can_be_a_sample_of_its_own(
    tokenizer: Path, tmp_path: Path, tokenize: bool, num_workers: int
) -> None:
    processor = thoughtless(tokenizer)
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD, TWO_ANSWERS, UNANSWERED, *[TWO_ANSWERS] * 9)
    options: Any = {"processor": processor, "tokenize": tokenize, "on_error": "skip", "num_workers": num_workers}
    report = convert([source], str(tmp_path / "out"), schema=SchemaOptions(learn="each"), **options)
    assert (report.num_rows, report.num_rejected) == (21, 1)
    reads = TokensProcessor() if tokenize else processor
    assert verify_dataset(str(tmp_path / "out"), deep=True, processor=reads, num_workers=1).problems == ()
    texts = []
    for sample in PackedStreamingDataset(tmp_path / "out")[:]:
        made = reads.process(sample)
        learnt = made["labels"] >= 0
        texts.append(
            (processor.tokenizer.decode(made["input_ids"]), processor.tokenizer.decode(made["labels"][learnt]))
        )
    asked = "<|user|>hi<|end|><|assistant|>"
    answered = "<think></think>hello<|end|>"
    assert texts[:3] == [
        (f"{asked}{answered}", answered),
        (f"{asked}{answered}", answered),
        (f"{asked}hello<|end|>{asked}{answered}", answered),
    ]
    assert len(texts) == 21


def test_a_deep_check_processes_every_sample(tokenizer: Path, tmp_path: Path) -> None:
    processor = thoughtless(tokenizer)
    source = write_jsonl(tmp_path / "rows.jsonl", *[GOOD] * 5, TWO_ANSWERS, *[GOOD] * 1500)
    with pytest.raises(DataError, match=r"rows\.jsonl:6: the chat template changes message 1"):
        convert([source], str(tmp_path / "measured"), processor=processor, num_workers=1)
    convert([source], str(tmp_path / "out"), num_workers=1)
    problems = verify_dataset(str(tmp_path / "out"), deep=True, processor=processor, num_workers=1).problems
    (what,) = [each.what for each in problems if each.where == "sample 5 (number 5 of shard.00000.mds)"]
    assert "the chat template changes message 1" in what
    report = convert([source], str(tmp_path / "skips"), processor=processor, num_workers=1, on_error="skip")
    assert (report.num_rows, report.num_rejected) == (1505, 1)
    write_jsonl(source, *[GOOD] * 1000, TWO_ANSWERS)
    with pytest.raises(DataError, match=r"rows\.jsonl:1001: the chat template changes message 1"):
        convert([source], str(tmp_path / "looked-at"), processor=processor, num_workers=1)


def test_a_second_conversion_into_a_target_is_refused_unless_it_may_overwrite(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD)
    target = tmp_path / "out"
    convert([source], str(target))
    (target / "mine.txt").write_text("kept")
    write_jsonl(source, GOOD, GOOD)
    with pytest.raises(StorageError, match=r"holds a dataset already: choose another target, or pass --overwrite"):
        convert([source], str(target))
    assert convert([source], str(target), overwrite=True).num_rows == 2
    assert len(PackedStreamingDataset(target)) == 2
    assert (target / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant message with content"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "no assistant message with content"),
        ({"note": "hi"}, "expected a list of messages in column 'messages', found columns note"),
        ({"messages": ["hi"]}, "a message must be an object with a role, found 'hi'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content must be a string or a list of parts, found int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "content parts of type 'smell' are not supported",
        ),
    ],
)
def test_a_row_that_fits_no_kind_ends_the_conversion_or_is_counted(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD, row, GOOD)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {reason}") as raised:
        convert([source], str(tmp_path / "fails"))
    assert "--on-error skip" in str(raised.value)
    assert not (tmp_path / "fails" / "index.json").exists()
    report = convert([source], str(tmp_path / "skips"), on_error="skip")
    assert (report.num_rows, report.num_rejected) == (2, 1)
    reject = json.loads((tmp_path / "skips" / "_lmms" / "rejects.jsonl").read_text())
    assert reject["source"] == str(source)
    assert reject["row"] == 2
    assert reason in reject["reason"]


def test_a_file_of_rejects_alone_is_an_error_even_when_rows_may_be_skipped(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", {"note": "hi"})
    with pytest.raises(DataError, match="columns note fit no kind of rows"):
        convert([source], str(tmp_path / "out"), on_error="skip")
    with pytest.raises(DataError, match=r"no sample is left to write \(.*rows\.jsonl:1: no assistant message"):
        convert([write_jsonl(source, UNANSWERED)], str(tmp_path / "out"), on_error="skip", kind="messages")
    assert not any((tmp_path / "out").rglob("*.*"))


def test_a_line_that_is_not_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", GOOD, "", "{broken")
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        convert([source], str(tmp_path / "out"))
    write_jsonl(source, GOOD, [1, 2])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: expected a JSON object, found list"):
        convert([source], str(tmp_path / "out"))


def test_unreadable_sources_are_named(tmp_path: Path) -> None:
    empty = write_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty \(0 bytes\): leave it out"):
        convert([empty], str(tmp_path / "out"))
    with pytest.raises(StorageError, match=r"absent\.jsonl: no such file"):
        convert([tmp_path / "absent.jsonl"], str(tmp_path / "out"))
    (tmp_path / "rows.xyz").write_text("what is this?")
    with pytest.raises(DataError, match=r"rows\.xyz"):
        convert([tmp_path / "rows.xyz"], str(tmp_path / "out"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not parquet at all PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        convert([tmp_path / "bad.parquet"], str(tmp_path / "out"))
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": pyarrow.array([], pyarrow.string())}), tmp_path / "no.parquet"
    )
    with pytest.raises(DataError, match=r"no\.parquet holds no rows"):
        convert([tmp_path / "no.parquet"], str(tmp_path / "out"))
    assert not (tmp_path / "out" / "index.json").exists()


def test_tokenize_needs_a_processor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenize needs a tokenizer"):
        convert([tmp_path / "rows.jsonl"], str(tmp_path / "out"), tokenize=True)


def test_other_fields_of_a_message_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, GOOD["messages"][1]]}
    stored = json.loads(find_mapper([row], SchemaOptions())(row, None)["messages"])
    assert stored[0] == {"role": "assistant", "content": None, "tool_calls": [call]}


def test_a_store_that_fails_in_mid_conversion_holds_no_dataset(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard.00002.mds").mkdir()  # where the third shard cannot be written
    with pytest.raises(StorageError, match=r"shard\.00002\.mds"):
        convert([corpus.functions], str(tmp_path / "out"), shard_bytes=1 << 14)
    with pytest.raises(StorageError, match="holds no dataset"):
        PackedStreamingDataset(tmp_path / "out")
    assert isinstance(open_storage(tmp_path), LocalStorage)


@pytest.mark.parametrize("option", ["--kind", "--schema"])
def test_the_kind_of_rows_is_insisted_on_by_either_spelling(option: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", {"text": "a", "messages": GOOD["messages"]})
    result = run_cli("convert", str(source), str(tmp_path / "out"), option, "text")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "_lmms" / "dataset.json").read_text())["schema"] == "text"


def test_the_processor_is_chosen_by_what_the_rows_are(tokenizer: Path, tmp_path: Path) -> None:
    answers = {"chosen": GOOD["messages"], "rejected": [GOOD["messages"][0], {"role": "assistant", "content": "bye"}]}
    for kind, row in (("chat", GOOD), ("text", {"text": "some words"}), ("preference", answers)):
        rows = write_jsonl(tmp_path / f"{kind}.jsonl", row)
        targets = [tmp_path / kind, tmp_path / f"{kind}-named"]
        assert run_cli("convert", str(rows), str(targets[0]), "--tokenizer", str(tokenizer)).returncode == 0
        assert convert([rows], targets[1], tokenizer=str(tokenizer), processor=kind).num_tokens
        lengths = [{path.name for path in (target / "_lmms" / "lengths").iterdir()} for target in targets]
        assert lengths[0] == lengths[1] != set(), kind


def test_rows_that_a_tokenizer_does_not_measure_say_so(tokenizer: Path, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "tokens.jsonl", {"input_ids": [1, 2, 3]})
    with pytest.raises(ConfigError, match=r"the rows are 'tokens': the rows are tokens already: leave --tokenizer out"):
        convert([rows], tmp_path / "out", tokenizer=str(tokenizer))
    with pytest.raises(ConfigError, match="--processor tokens reads tokens, not texts: leave --tokenizer out"):
        convert([rows], tmp_path / "out", tokenizer=str(tokenizer), processor="tokens")
    assert convert([rows], tmp_path / "out").num_tokens is None
    assert convert([rows], tmp_path / "counted", processor="tokens").num_tokens == 3


def test_a_conversion_in_python_takes_the_names_of_the_command_line(tokenizer: Path, tmp_path: Path) -> None:
    row = {"dialogue": GOOD["messages"], "id": 7}
    rows = write_jsonl(tmp_path / "rows.jsonl", row, row)
    names = {
        "kind": "messages", "columns": {"messages": "dialogue"}, "keep": "id", "tokenizer": str(tokenizer),
        "min_tokens": 1, "shard_size": "1mb", "on_error": "skip", "workers": 1, "limit": 1,
    }  # fmt: skip
    report = convert([rows], tmp_path / "python", **names)  # type: ignore[arg-type]
    options = "--kind messages --columns messages=dialogue --keep id --min-tokens 1 --shard-size 1mb --on-error skip"
    words = [*options.split(), "--tokenizer", str(tokenizer), "--workers", "1", "--limit", "1"]
    assert run_cli("convert", str(rows), str(tmp_path / "command"), *words).returncode == 0
    assert report.num_rows == 1
    shards = [(tmp_path / name / "shard.00000.mds").read_bytes() for name in ("python", "command")]
    assert shards[0] == shards[1]
    with pytest.raises(ConfigError, match="convert has no argument 'tokeniser': did you mean 'tokenizer'"):
        convert([rows], tmp_path / "wrong", tokeniser="x")
    with pytest.raises(ConfigError, match="a processor and a tokenizer are both named: leave one of them out"):
        convert(
            [rows],
            tmp_path / "wrong",
            tokenizer=str(tokenizer),
            processor=ChatProcessor.from_pretrained(str(tokenizer)),
        )
