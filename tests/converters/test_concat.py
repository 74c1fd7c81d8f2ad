"""Conversions whose documents are laid end to end: what is written, whatever ends them, and what training reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.cli.main import main
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TextProcessor, TokensProcessor
from lmms_stream.tools.inspect.summary import inspect_dataset
from tokenizers import Tokenizer

from .held import chat
from .test_convert_runs import written

N = 128
OPTIONS: dict[str, Any] = {"unit_bytes": 9000, "shard_bytes": 1 << 14, "num_workers": 1, "concat": N}


def text_of(number: int) -> str:
    """Of a few words, or of more than three samples."""
    return f"Document {number}: " + " ".join(str(number * each % 977) for each in range(1 + number * 37 % 211))


def write_texts(path: Path, numbers: range) -> Path:
    path.write_text("".join(json.dumps({"text": text_of(number)}) + "\n" for number in numbers))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", range(150))


@pytest.fixture(scope="module")
def text_processor(tokenizer: Path) -> TextProcessor:
    return TextProcessor.from_pretrained(str(tokenizer))


@pytest.fixture(scope="module")
def once(texts: Path, text_processor: TextProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    convert([texts], str(folder), processor=text_processor, **OPTIONS)
    return folder


def ids_of(tokenizer: Path, numbers: range | list[int]) -> list[list[int]]:
    """The tokens of texts with an end-of-text token, by the library alone."""
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = library.token_to_id(json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"])
    assert end is not None
    return [[*library.encode(text_of(number)).ids, end] for number in numbers]


def cut(documents: list[list[int]], num_tokens: int = N) -> list[tuple[list[int], list[int]]]:
    """The tokens of each sample, and those at which a document begins or goes on."""
    stream = [(token, at == 0) for ids in documents for at, token in enumerate(ids)]
    samples = [stream[first : first + num_tokens] for first in range(0, len(stream), num_tokens)]
    return [
        ([token for token, _ in sample], [at for at, (_, begins) in enumerate(sample) if begins or not at])
        for sample in samples
    ]


def stored(folder: Path | str) -> list[tuple[list[int], list[int]]]:
    return [
        (sample["input_ids"].tolist(), sample["document_starts"].tolist())
        for sample in PackedStreamingDataset(folder)[:]
    ]


# What is written


def test_samples_are_the_documents_laid_end_to_end_and_cut(
    once: Path, tokenizer: Path, texts: Path, text_processor: TextProcessor, tmp_path: Path
) -> None:
    documents = ids_of(tokenizer, range(150))
    dataset = PackedStreamingDataset(once, processor=TokensProcessor())
    samples = stored(once)
    assert samples == cut(documents)
    assert [sample["loss_spans"].tolist() for sample in dataset[:]] == [[[0, len(ids)]] for ids, _ in samples]
    assert dataset.length_index().lengths.tolist() == [len(ids) for ids, _ in samples]
    assert {len(ids) for ids, _ in samples[:-1]} == {N}
    described = json.loads((once / "_lmms" / "dataset.json").read_text())
    num_tokens = sum(map(len, documents))
    assert (described["num_documents"], described["num_tail_tokens"], described["num_dropped_tokens"]) == (
        150, num_tokens % N, 0,
    )  # fmt: skip
    assert verify_dataset(str(once), deep=True, num_workers=1).problems == ()
    again = convert([texts], str(once), processor=text_processor, **OPTIONS)
    assert (again.was_there, again.num_documents, again.num_tokens) == (True, 150, num_tokens)
    for name, changes in {"workers": {"num_workers": 2}, "units": {"unit_bytes": 1 << 16}}.items():
        convert([texts], str(tmp_path / name), processor=text_processor, **OPTIONS | changes)
        assert written(str(tmp_path / name)) == written(str(once))


def test_a_tail_is_dropped_and_counted_where_that_is_asked_for(
    once: Path, texts: Path, text_processor: TextProcessor, tmp_path: Path
) -> None:
    options = {"processor": text_processor, "drop_tail": True, **OPTIONS}
    report = convert([texts], str(tmp_path / "out"), **options)
    kept = stored(once)
    assert (report.num_dropped_tokens, report.num_tail_tokens) == (len(kept[-1][0]), 0)
    assert stored(tmp_path / "out") == kept[:-1]
    with pytest.raises(DataError, match=r"2 documents have \d+ tokens, too few .* of 4096, .* --drop-tail out"):
        convert([f"{texts}@[:2]"], str(tmp_path / "few"), **options | {"concat": 4096})
    assert not (tmp_path / "few").exists() or not list((tmp_path / "few").rglob("*.mds"))


def test_documents_are_what_is_shuffled_split_limited_and_compared(
    texts: Path, text_processor: TextProcessor, tokenizer: Path, tmp_path: Path
) -> None:
    options = {"processor": text_processor, **OPTIONS}
    convert([texts], str(tmp_path / "shuffled"), shuffle_seed=5, **options)
    order = np.random.default_rng(5).permutation(150).tolist()
    assert stored(tmp_path / "shuffled") == cut(ids_of(tokenizer, order))
    report = convert([texts], str(tmp_path / "split"), splits={"a": 0.7, "b": 0.3}, **options)
    chosen = np.random.default_rng(0).random(150) < 0.7
    for name, numbers in {"a": np.flatnonzero(chosen), "b": np.flatnonzero(~chosen)}.items():
        expected = cut(ids_of(tokenizer, numbers.tolist()))
        assert stored(tmp_path / "split" / name) == expected
        split = report.splits[name]
        assert (split.num_documents, split.num_tail_tokens) == (len(numbers), len(expected[-1][0]) % N)
    assert report.num_documents == 150
    twice = convert([texts, f"{texts}@[:40]"], str(tmp_path / "twice"), dedup="exact", limit=160, **options)
    assert (twice.num_documents, twice.num_duplicates) == (150, 40)
    limited = convert([texts], str(tmp_path / "limited"), limit=31, **options)
    assert (limited.num_documents, stored(tmp_path / "limited")) == (31, cut(ids_of(tokenizer, range(31))))
    lengths = [len(ids) for ids in ids_of(tokenizer, range(150))]
    short = convert([texts], str(tmp_path / "short"), longest=200, **options)
    assert short.num_filtered == sum(length > 200 for length in lengths) > 0
    assert short.num_documents == 150 - short.num_filtered


def test_new_documents_are_appended_as_samples_of_their_own(
    texts: Path, once: Path, text_processor: TextProcessor, tokenizer: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    convert([texts], out, processor=text_processor, **OPTIONS)
    more = write_texts(tmp_path / "more.jsonl", range(150, 200))
    with pytest.raises(ConfigError, match=r"was converted with other options \(concat was 128, now 64\)"):
        append([more], out, processor=text_processor, **OPTIONS | {"concat": 64})
    append([texts, more], out, processor=text_processor, **OPTIONS)
    assert stored(out) == [*stored(once), *cut(ids_of(tokenizer, range(150, 200)))]
    assert json.loads((tmp_path / "out" / "_lmms" / "dataset.json").read_text())["num_documents"] == 200


def test_what_is_learnt_of_chats_follows_their_tokens(chat_processor: ChatProcessor, tmp_path: Path) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(60)))
    convert([rows], str(tmp_path / "tokens"), processor=chat_processor, tokenize=True, num_workers=1)
    convert([rows], str(tmp_path / "out"), processor=chat_processor, **OPTIONS | {"concat": 9})
    convert([tmp_path / "tokens"], str(tmp_path / "again"), **OPTIONS | {"concat": 9})  # of tokens that are stored
    made = [TokensProcessor().process(sample) for sample in PackedStreamingDataset(tmp_path / "tokens")[:]]
    labels = np.concatenate([each["labels"] for each in made])
    samples = PackedStreamingDataset(tmp_path / "out")[:]
    found = [TokensProcessor().process(sample)["labels"] for sample in samples]
    nothing = [number for number, at in enumerate(range(0, len(labels), 9)) if (labels[at : at + 9] < 0).all()]
    assert nothing
    assert [samples[number]["loss_spans"].tolist() for number in nothing] == [[[0, 1]]] * len(nothing)
    for number in nothing:  # no token before it predicts the first, so that it counts as not learnt
        found[number][0] = -100
    assert np.array_equal(np.concatenate(found), labels)
    assert stored(tmp_path / "again") == stored(tmp_path / "out")
    dry = dry_run([rows], processor=chat_processor, **OPTIONS | {"concat": 9})
    assert (dry.num_samples, dry.schema) == (60, "tokens")
    assert dry.expected is not None
    assert dry.expected.num_samples == len(samples)


def test_what_stands_around_texts_is_said_or_the_tokenizers_own(
    texts: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the command sets it, put back afterwards
    settings = ["--setting", "text_prefix=##", "--setting", "text_suffix="]
    command = ["convert", f"{texts}@[:3]", str(tmp_path / "out"), "--processor", "text", "--tokenizer", str(tokenizer)]
    assert main([*command, *settings, "--concat", "64", "--drop-tail", "--workers", "1"]) == 0
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    mark = library.encode("##").ids
    expected = cut([[*mark, *library.encode(text_of(number)).ids] for number in range(3)], 64)
    num_dropped = len(expected[-1][0])
    assert 0 < num_dropped < 64
    assert stored(tmp_path / "out") == expected[:-1]
    said = capsys.readouterr().out
    assert f"{num_dropped} tokens after the last whole sample, dropped by --drop-tail" in " ".join(said.split())
    assert "documents │ 3 " in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concat": 1}, r"--concat must be 2 to 67108864 tokens, got 1: 4096 is usual"),
        ({"concat": None, "drop_tail": True}, r"--drop-tail is about the last sample of --concat: pass --concat N"),
        ({"processor": None}, r"--concat lays tokens end to end, and the rows are 'text': pass --tokenizer PATH"),
        ({"schema": SchemaOptions(keep=("id",))}, r"the rows have id, which a sample of --concat, .* leave --keep out"),
    ],
)
def test_what_cannot_be_laid_end_to_end_is_refused(
    options: dict[str, Any], message: str, text_processor: TextProcessor, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n')
    with pytest.raises(ConfigError, match=message):
        convert([rows], str(tmp_path / "out"), **{"processor": text_processor, **OPTIONS, **options})


def test_samples_of_several_documents_are_not_documents(once: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the rows are already samples of --concat: name the original rows as"):
        convert([once], str(tmp_path / "out"), **OPTIONS)


# What training reads


def batches(once: Path, *, isolate: bool, packing_length: int = N) -> list[Any]:
    processor = ProcessorConfig(type="tokens", isolate_documents=isolate)
    config = DatasetConfig(remote=str(once), processor=processor, packing_length=packing_length, overlong="error")
    return list(PackedLoader({"texts": config.open()}, global_batch=2))


def test_packs_are_full_but_the_last(once: Path) -> None:
    found = batches(once, isolate=False)
    num_samples = len(stored(once))
    assert sorted(int(number) for batch in found for number in batch.sample_ids) == list(range(num_samples))
    short = [batch for batch in found if len(batch.sample_ids) and batch.num_tokens != N]
    assert len(short) <= 1
    assert all(batch.cu_seqlens.tolist() == [0, batch.num_tokens] for batch in found)


def test_documents_are_segments_of_their_own_where_they_are_isolated(once: Path) -> None:
    plain = {tuple(batch.sample_ids.tolist()): batch for batch in batches(once, isolate=False)}
    samples = stored(once)
    for batch in batches(once, isolate=True):
        (number,) = batch.sample_ids.tolist() or [None]
        if number is None:
            continue
        ids, starts = samples[number]
        assert batch.cu_seqlens.tolist() == [*starts, len(ids)]
        bounds = zip(starts, [*starts[1:], len(ids)], strict=True)
        assert batch.position_ids[0].tolist() == [at for start, stop in bounds for at in range(stop - start)]
        together = plain[number,]
        assert batch.input_ids.equal(together.input_ids)
        labels = together.labels.clone()
        labels[0, starts] = -100  # no document predicts the next one's first token
        assert batch.labels.equal(labels)
        assert batch.sample_bounds == [(0, len(ids))]
    shown = inspect_dataset(str(once)).samples[0].tokens
    assert shown is not None
    assert len(shown.runs) > 1
