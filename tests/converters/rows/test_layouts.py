"""Rows of usual layouts: nothing of them is lost in silence, neither by what is found nor by the remedy of an error."""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.kinds import KINDS
from lmms_stream.converters.rows.mapper import Mapper, find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.rows.schemas import MESSAGES, PREFERENCE, TEXT
from lmms_stream.converters.rows.speakers import readings_of
from lmms_stream.errors import DataError
from lmms_stream.processors.base import or_error
from streaming import StreamingDataset

from ...rounds import rounds
from ..media_files import CLIP, image_bytes
from .layouts import LAYOUTS, Layout, Row, image, said, url

_AS_USUAL = SchemaOptions()
_PRINTED = re.compile(r"(?:pass|or) (--(?:kind|columns|tags|keep) .*?)(?= \(|, or |; | for |$)")


def printed(error: object) -> list[SchemaOptions]:
    """The options that an error prints, in their order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind")
    parser.add_argument("--on-error")
    for name in ("--columns", "--tags", "--keep"):
        parser.add_argument(name, nargs="+", default=())
    found = [parser.parse_args(shlex.split(words)) for words in _PRINTED.findall(str(error))]
    pairs = [[dict(pair.split("=") for pair in listed) for listed in (each.columns, each.tags)] for each in found]
    return [
        SchemaOptions(kind=each.kind, columns=columns, tags=tags, keep=tuple(each.keep))
        for each, (columns, tags) in zip(found, pairs, strict=True)
    ]


def mapper_by_remedies(rows: Sequence[Row]) -> tuple[Mapper | None, str]:
    """The mapper of rows, by the first options that an error prints, and the error; None for an error without any."""
    try:
        return find_mapper(rows, _AS_USUAL), ""
    except DataError as error:
        options = printed(error)
        return find_mapper(rows, options[0]) if options else None, str(error)


def test_the_only_key_beside_the_speakers_holds_the_content_whatever_its_name() -> None:
    messages = [{"from": "human", "zz": "hello"}, {"from": "gpt", "zz": "hi"}]
    assert [each["content_tag"] for each in readings_of(messages)] == ["zz"]
    assert readings_of([{**each, "yy": each["zz"]} for each in messages]) == []


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Texts and bytes in a row, with the names of the columns and keys that lead to them."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}" if path else key)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each, path)
    elif isinstance(value, (str, bytes)):
        yield path, value


def named(path: str, told: str) -> bool:
    """Whether a line for people says that a column, or what it is in, is not read."""
    left = ", ".join(re.findall(r"leaves out ([^;)]*)", told)).split(", ")
    return any(path == each or path.startswith(f"{each}.") for each in left)


def check_nothing_lost(row: Row, mapper: Mapper, told: str) -> None:
    (sample,) = mapper.samples(row, None)
    texts = " ".join(value for value in sample.values() if isinstance(value, str))
    media = b"".join(value for value in sample.values() if isinstance(value, bytes))
    for path, value in leaves(row):
        number = re.search(r"-\d+$", value) if isinstance(value, str) else None
        if isinstance(value, bytes):
            assert value in media or named(path, mapper.description), (path, told, mapper.description, row)
        elif number:
            text = value.removeprefix("<image>").strip()
            assert text in texts or named(path, mapper.description), (path, text, texts, told, mapper.description)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nothing_of_a_usual_layout_is_lost_in_silence(layout: Layout) -> None:
    rows = [layout.row(number) for number in range(3)]
    mapper, told = mapper_by_remedies(rows)
    if mapper is None:
        assert layout.kind is None
        return
    assert layout.kind in (None, mapper.kind.name)
    for row in rows:
        check_nothing_lost(row, mapper, told)


_TEXTS = ("prompt", "response", "question", "answer", "instruction", "input", "output", "text", "system")
_ROLES: Row = {
    **{role: f"m-{role}" for role in _TEXTS},
    "chosen": "m-chosen", "rejected": "x", "label": True, "dialog": ["m-dialog", "a"], "history": [["m-history", "a"]],
    "tools": [{"name": "m-tools"}], "images": [image(1)], "file_name": "a.png",
}  # fmt: skip
_MESSAGES: Mapping[str, list[Row]] = {
    "messages": [{"role": "user", "content": "m-messages"}, {"role": "assistant", "content": "a"}],
    "exchanges": [{"user": "m-messages", "assistant": "a"}],
    "sharegpt": [{"from": "human", "value": "m-messages"}, {"from": "gpt", "value": "a"}],
}


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.schema in (MESSAGES, PREFERENCE, TEXT)])
def test_columns_that_rows_are_said_to_be_read_from_are_stored(kind: str) -> None:
    roles, num_read = {**_ROLES, "messages": _MESSAGES.get(kind, _MESSAGES["messages"])}, 0
    optional = [role for role in KINDS[kind].may if role in roles]
    for extra in (some for number in range(3) for some in combinations(optional, number)):
        row = {KINDS[kind].columns[role][0]: roles[role] for role in (*KINDS[kind].needs, *extra)}
        mapper = or_error(find_mapper, [row], _AS_USUAL)
        sample = mapper if isinstance(mapper, DataError) else or_error(mapper, row, None)
        if isinstance(sample, DataError) or isinstance(mapper, DataError) or mapper.kind.name != kind:
            continue
        num_read += 1
        texts = " ".join(value for value in sample.values() if isinstance(value, str))
        for path, value in leaves(row):
            if isinstance(value, str) and value.startswith("m-"):
                assert value in texts or named(path, mapper.description), (path, row, mapper.description)
        assert "images" not in row or sample.get("media") == image(1) or named("images", mapper.description)
    assert num_read > 0


def _random_row(draw: random.Random) -> Row:
    """A layout's row with columns that were renamed, added or nested."""
    layout = draw.choice(LAYOUTS)
    row = layout.row(draw.randrange(200))
    names = list(row)
    renamed = {
        name: draw.choice([name, name, name.upper(), f"{name}s", f"my_{name}", name[:-1] or name, "data"])
        for name in names
    }
    if len(set(renamed.values())) == len(names):
        row = {renamed[name]: value for name, value in row.items()}
    others: list[Row] = [
        {}, {}, {"picture": image(201)}, {"photo": url(202)}, {"note": "note-203"}, {"meta": {"a": "meta-204"}},
        {"talk": said(205, "user", "assistant")}, {"clips": [image(206), image(207)]}, {"path": "a/b.png"},
    ]  # fmt: skip
    row = {**draw.choice(others), **row}
    return {"json": row, "png": image_bytes(color=9)} if draw.random() < 0.1 else row


def test_remedies_for_rows_like_usual_ones_lose_nothing_in_silence() -> None:
    draw, num_read = random.Random(7), 0
    for _ in range(rounds(150, 20_000)):
        row = _random_row(draw)
        mapper, told = mapper_by_remedies([row])
        if mapper is None:
            assert "--" in told, told
            continue
        refused = or_error(check_nothing_lost, row, mapper, told)
        if isinstance(refused, DataError):
            told = str(refused)
            assert re.search(r"--\w+|correct|complete|remove|number", told), told
            continue
        num_read += 1
    assert num_read > rounds(50, 7000)


def test_a_webdataset_of_images_and_texts_is_converted_with_both(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (("1.jpg", image(1)), ("1.txt", b"a red card"), ("1.json", b'{"url": "u"}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    report = convert([str(tmp_path / "a.tar")], str(tmp_path / "out"), num_workers=1)
    assert report.kind == "caption; reads txt as text, jpg as images; leaves out __key__, json"
    sample = StreamingDataset(local=str(tmp_path / "out"), batch_size=1)[0]
    assert sample["media"] == image(1)
    assert "a red card" in sample["messages"]


@pytest.mark.parametrize("row", [{"question": "q", "answer": "a"}, {"caption": "c"}])
def test_addresses_of_media_are_media_that_are_to_be_downloaded_first(row: Row) -> None:
    """PixMo's rows: without their images the questions and answers make no sense."""
    row = {"image_url": "https://a/b?c", "image_sha256": "d", **row}
    with pytest.raises(DataError, match=r"--columns images=image_url"):
        find_mapper([row], _AS_USUAL)
    with pytest.raises(DataError, match="is on the web, and conversions do not download media: download it first"):
        find_mapper([row], SchemaOptions(columns={"images": "image_url"}))(row, None)


def test_media_that_nothing_reads_are_kept_or_left_out_if_that_is_asked_for() -> None:
    row = {"picture": image(1), "text": "a"}
    with pytest.raises(
        DataError, match="column picture holds media of kind image, and the rows would be text"
    ) as raised:
        find_mapper([row], SchemaOptions())
    for option in ("--columns images=picture", "--keep picture", "--kind text"):
        assert option in str(raised.value)
    assert find_mapper([row], SchemaOptions(columns={"images": "picture"}))(row, None)["media"] == image(1)
    assert find_mapper([row], SchemaOptions(keep=("picture",)))(row, None) == {"text": "a", "picture": image(1)}
    assert find_mapper([row], SchemaOptions(kind="text"))(row, None) == {"text": "a"}
    for other in ({"path": "src/a.ts"}, {"url": "https://a/b.png"}, {"id": "a.png"}, {"note": "a.png\n"}):
        assert find_mapper([{"text": "a", **other}], SchemaOptions()).kind.name == "text"


def _turns(*names: str, keys: tuple[str, str] = ("speaker", "text")) -> list[Row]:
    return [{"turns": said(number, *names, keys=keys)} for number in range(3)]


@pytest.mark.parametrize(
    ("names", "tags"),
    [
        (("assistant", "user", "assistant"), ["role_tag=speaker content_tag=text"]),
        (("bot", "human", "bot"), ["role_tag=speaker content_tag=text user_tag=human assistant_tag=bot"]),
        (
            ("Bot", "Human", "Tool", "Bot"),
            ["role_tag=speaker content_tag=text user_tag=Human assistant_tag=Bot observation_tag=Tool"],
        ),
        (("user", "tool", "assistant"), ["role_tag=speaker content_tag=text"]),
        (("client", "assistant"), ["role_tag=speaker content_tag=text user_tag=client"]),
        (
            ("human", "function_call", "observation", "gpt"),
            ["role_tag=speaker content_tag=text user_tag=human assistant_tag=gpt function_tag=function_call"],
        ),
        (
            ("agent", "client", "agent"),
            [
                "role_tag=speaker content_tag=text user_tag=agent assistant_tag=client",
                "role_tag=speaker content_tag=text user_tag=client assistant_tag=agent",
            ],
        ),
    ],
)
def test_tags_name_known_speakers_whoever_speaks_first_and_both_readings_of_others(
    names: Sequence[str], tags: Sequence[str]
) -> None:
    rows = _turns(*names)
    for turn in (turn for row in rows for turn in row["turns"] if turn["speaker"] == "function_call"):
        turn["text"] = '{"name": "f", "arguments": {}}'
    with pytest.raises(DataError) as raised:
        find_mapper(rows, SchemaOptions())
    assert [" ".join(map("=".join, each.tags.items())) for each in printed(raised.value)] == [*tags]


@pytest.mark.parametrize("column", ["conversation", "conversations", "messages"])
@pytest.mark.parametrize(
    ("keys", "names", "tags"),
    [
        (("speaker", "text"), ("Alice", "Bob"), "role_tag=speaker content_tag=text user_tag=Alice assistant_tag=Bob ("),
        (
            ("author", "content"),
            ("human", "gpt"),
            "--tags role_tag=author user_tag=human assistant_tag=gpt for keys",
        ),
    ],
)
def test_columns_with_a_usual_name_print_the_tags_of_their_messages(
    column: str, keys: tuple[str, str], names: Sequence[str], tags: str
) -> None:
    row = {column: said(1, *names, keys=keys)}
    with pytest.raises(DataError, match=f"messages have no role .*{re.escape(tags)}") as raised:
        find_mapper([row], _AS_USUAL)(row, None)
    mapper = find_mapper([row], printed(raised.value)[0])
    messages = json.loads(mapper(row, None)["messages"])
    texts = [each[keys[1]] for each in row[column]]
    assert [(each["role"], each["content"]) for each in messages] == [("user", texts[0]), ("assistant", texts[1])]


def test_a_key_of_repeated_texts_is_not_taken_for_the_speaker() -> None:
    few = [{"talk": [{"text": "q", "name": "Alice"}, {"text": "a", "name": "Bob"}]}] * 2
    with pytest.raises(DataError, match=r"--tags role_tag=name content_tag=text user_tag=Alice assistant_tag=Bob \(if"):
        find_mapper(few, _AS_USUAL)
    many = [{"talk": [{"text": "q", "name": first}, {"text": "a", "name": second}]} for first, second in ("ab", "cd")]
    with pytest.raises(DataError) as raised:
        find_mapper(many, _AS_USUAL)
    assert "--tags" not in str(raised.value)


@pytest.mark.parametrize(("role", "names"), [("role", ("user", "assistant")), ("from", ("human", "gpt"))])
def test_messages_with_their_content_in_another_key_print_the_tags_that_read_them(
    role: str, names: Sequence[str]
) -> None:
    row = {"conversation": said(1, *names, keys=(role, "text"))}
    with pytest.raises(DataError, match="messages have no content") as raised:
        find_mapper([row], _AS_USUAL)(row, None)
    sample = find_mapper([row], printed(raised.value)[0])(row, None)
    assert [each["content"] for each in json.loads(sample["messages"])] == [f"{names[0]}-0-1", f"{names[1]}-1-1"]


@pytest.mark.parametrize(
    "row",
    [
        {"image": image(1), "question": "q", "answers": ["a"]},
        {"image": image(1), "question": "q", "answers": {"text": "a"}},
        {"image": image(1), "instruction": "q", "outputs": ["a"]},
    ],
)
def test_a_question_is_never_offered_as_a_caption(row: Row) -> None:
    with pytest.raises(DataError, match="fit no kind of rows: make other rows with --map") as raised:
        find_mapper([row], _AS_USUAL)
    assert printed(raised.value) == []


@pytest.mark.parametrize(
    ("row", "said_columns"),
    [
        ({"input_ids": [1, 2], "picture": image(1)}, ""),
        ({"dialog": ["a", "b"], "picture": image(1)}, ""),
        ({"messages": said(1, "user", "assistant"), "picture": image(1)}, ""),
        ({"dialog": ["<image>a", "b"], "picture": image(1)}, "--columns images=picture, or "),
        (
            {"text": "a", "picture": image(1), "photo": image(2)},
            "--columns images=picture (leaves out photo), or ",
        ),
        ({"text": "a", "picture": image(1), "clip": "a.wav"}, "--columns audios=clip images=picture, or "),
    ],
)
def test_columns_of_media_are_offered_to_be_read_only_if_they_can_be(row: Row, said_columns: str) -> None:
    with pytest.raises(DataError) as raised:
        find_mapper([row], _AS_USUAL)
    others = [name for name in row if name in ("picture", "photo", "clip")]
    assert f"{', '.join(others)} hold" in str(raised.value)
    assert f"without them: pass {said_columns}--keep {' '.join(others)} (kept as" in str(raised.value)
    for options in printed(raised.value):
        assert set(options.columns) <= set(find_mapper([row], options).found)


@pytest.mark.parametrize("rest", [{}, {"image": None}])
def test_image_stands_for_the_video_of_a_row_without_images(rest: Row) -> None:
    """As LLaVA-Video-178K is written."""
    row = {"video": CLIP, "conversations": [
        {"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]} | rest  # fmt: skip
    sample = find_mapper([row], _AS_USUAL)(row, None)
    parts = json.loads(sample["messages"])[0]["content"]
    assert [part["type"] for part in parts] == ["video", "text"]
    assert parts[1]["text"] == "\nq"
    assert sample["media"] == CLIP
    cases: list[tuple[str, Row, str]] = [
        ("<image><image>q", {}, "2 slots for media of kind image|0 slots .*: write <video> where each belongs, or"),
        ("<image><video>q", {"image": []}, "1 slots for media of kind image .* and 0 images: correct the row"),
    ]
    for text, more, reason in cases:
        wrong = row | more | {"conversations": [{"from": "human", "value": text}, row["conversations"][1]]}
        with pytest.raises(DataError, match=reason):
            find_mapper([wrong], _AS_USUAL)(wrong, None)


BY_MAP = r".*make other rows with --map FILE\.py:FUNCTION, or keep the columns with --keep"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DAPO", rf"column prompt holds prompts without answers, which lmms_stream\.rl reads .*: {BY_MAP}$"),
        ("batches of OpenAI", r"column body\.messages holds prompts without answers"),
        ("VQA with several answers", rf"fit no kind of rows: {BY_MAP}$"),
        ("ChatGPT's export", rf"fit no kind of rows: {BY_MAP}$"),
        ("completions of input and output", rf"fit no kind of rows: {BY_MAP}$"),
    ],
)
def test_rows_that_no_options_read_whole_are_told_what_does(name: str, message: str) -> None:
    row = next(layout.row for layout in LAYOUTS if layout.name == name)
    with pytest.raises(DataError, match=message) as raised:
        find_mapper([row(number) for number in range(3)], _AS_USUAL)
    assert "--tags" not in str(raised.value)


def test_a_question_next_to_choices_is_read_alone_if_that_is_asked_for() -> None:
    row = {"question": "q", "choices": ["a", "b"], "answer": "other"}
    assert find_mapper([row], SchemaOptions(kind="question-answer")).description.endswith("leaves out choices")
    assert find_mapper([row], SchemaOptions(keep=("choices",))).kept == {"choices": "json"}
    others: list[Row] = [
        {"choices": []}, {"question": "q (a) or (b)?"}, {"question": "c: q", "choices": None, "context": "c"}
    ]  # fmt: skip
    for other in others:
        assert find_mapper([row | other], _AS_USUAL).kind.name == "question-answer"


@pytest.mark.parametrize("messages", [said(1, "user"), said(1, "user", "assistant", "user")])
@pytest.mark.parametrize("name", ["response", "completion", "output"])
def test_an_answer_next_to_messages_of_the_user_is_read_by_the_options_that_are_printed(
    messages: list[Row], name: str
) -> None:
    row = {"messages": messages, name: "the end", "score": 1}
    with pytest.raises(
        DataError, match=rf"--columns prompt=messages response={name} \(leaves out score\), or"
    ) as raised:
        find_mapper([row], _AS_USUAL)
    mapper = find_mapper([row], printed(raised.value)[0])
    stored = json.loads(mapper(row, None)["messages"])
    assert [each["content"] for each in stored] == [*(each["content"] for each in messages), "the end"]
    whole = {**row, "messages": [*messages, {"role": "assistant", "content": "the end"}]}
    assert find_mapper([whole], _AS_USUAL).kind.name == "messages"


@pytest.mark.parametrize(
    ("row", "stored"),
    [
        ({"question": "q", "context": "c", "answer": "a"}, "q\n\nc"),
        ({"query": "q", "passage": "c", "response": "a"}, "q\n\nc"),
        ({"instruction": "d", "query": "i", "response": "a"}, "d\n\ni"),
        ({"prompt": "q", "input": "c", "completion": "a"}, "q\n\nc"),
        ({"question": "q", "article": "long c", "answer": "a"}, "q\n\nlong c"),
        ({"question": "q", "text": "long c", "answer": "a"}, "q\n\nlong c"),
        ({"instruction": "q", "passage": "c", "output": "a"}, "q\n\nc"),
        ({"instruction": "q", "inputs": "c", "output": "a"}, "q\n\nc"),
    ],
)
def test_a_text_that_a_question_is_about_is_read_by_the_options_that_are_printed(row: Row, stored: str) -> None:
    with pytest.raises(DataError, match="and nothing reads it: pass --kind alpaca --columns") as raised:
        find_mapper([row], _AS_USUAL)
    whole, without = printed(raised.value)
    kind, columns = find_mapper([row], without).kind.name, whole.columns
    messages = json.loads(find_mapper([row], whole)(row, None)["messages"])
    assert [each["content"] for each in messages] == [stored, "a"]
    (name,) = re.findall(r"column (\S+) holds what", str(raised.value))
    with pytest.raises(
        DataError, match=rf"column {name} holds what .*, or write it into .*, with --map FILE\.py:FUNCTION"
    ):
        find_mapper([{**row, name: {"title": ["a long title"]}}], _AS_USUAL)  # as HotpotQA has it
    asked = next(row[column] for column in columns.values() if column != name)
    for value in (asked, [asked], f"Question:\n{asked}. Answer: a"):  # the whole text, as trainers take it
        assert find_mapper([{**row, name: value}], _AS_USUAL).kind.name == kind
    few = [{**row, name: asked}, {**row, name: asked}, row]
    assert find_mapper(few, _AS_USUAL).kind.name == kind


def test_columns_beside_a_question_that_are_no_context_are_left_out() -> None:
    row = {"question": "who is it", "answer": "a"}
    facts: list[Row] = [
        {"document": "https://example.org/a/long/address"}, {"documents": ["an-id-of-it", "another-one"]},
        {"text": "who  is it\n a"}, {"story": 5}, {"table": "a b"}, {"context": {"url": None}},
        {"quality_explanation": "a long text of a judge"}, {"explanation": "a"},
    ]  # fmt: skip
    for fact in facts:
        assert find_mapper([row | fact], _AS_USUAL).description.endswith(f"leaves out {next(iter(fact))}")
    asked = {"instruction": "q", "input": "i", "output": "a"}
    assert find_mapper([asked], SchemaOptions(columns={"input": ""})).description.endswith("leaves out input")


def test_a_text_that_compared_answers_are_about_is_read_by_the_options_that_are_printed() -> None:
    for answers, kind in (
        ({"chosen": "a", "rejected": "b"}, "preference"),
        ({"completion": "a", "label": True}, "kto"),
    ):
        row = {"prompt": "q", "context": "c", **answers}
        with pytest.raises(
            DataError, match=rf"pass --columns prompt=prompt input=context, or --kind {kind} \("
        ) as raised:
            find_mapper([row], _AS_USUAL)
        mapper = find_mapper([row], printed(raised.value)[0])
        assert mapper.kind.name == kind
        assert json.loads(mapper(row, None)["messages"])["prompt"] == [{"role": "user", "content": "q\n\nc"}]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"question": "q", "solution": "as 1 + 1 is 2", "answer": "2"}, "question-answer"),  # LIMO
        ({"prompt": "q", "response": "2", "reasoning": "as 1 + 1 is 2"}, "prompt-response"),
        ({"instruction": "q", "output": "2", "Complex_CoT": "as 1 + 1 is 2"}, "alpaca"),
    ],
)
def test_a_worked_solution_is_not_left_out_for_its_short_answer(row: Row, kind: str) -> None:
    with pytest.raises(DataError, match="alone would be trained on: ") as raised:
        find_mapper([row], _AS_USUAL)
    worked, short = printed(raised.value)
    assert json.loads(find_mapper([row], worked)(row, None)["messages"])[1]["content"] == "as 1 + 1 is 2"
    assert find_mapper([row], short).kind.name == kind
    ((_, answer),) = KINDS[kind].needs.items() if kind == "question-answer" else [list(KINDS[kind].needs.items())[1]]
    (name,) = set(answer) & row.keys()
    assert find_mapper([{**row, name: "as 1 + 1 is 2, 2"}], _AS_USUAL).kind.name == kind


@pytest.mark.parametrize("name", ["response", "completion", "answer", "output"])
def test_a_text_next_to_its_answer_is_no_document(name: str) -> None:
    row = {"text": "q", name: "a"}
    with pytest.raises(DataError, match=rf"pass --columns prompt=text response={name}, or --kind text \(lea") as raised:
        find_mapper([row], _AS_USUAL)
    stored = find_mapper([row], printed(raised.value)[0])(row, None)
    assert [each["content"] for each in json.loads(stored["messages"])] == ["q", "a"]
    for more in ({name: 1}, {name: ""}, {name: None, "label": 1}, {"text": "q: a"}):
        assert find_mapper([row | more], _AS_USUAL).kind.name == "text"


@pytest.mark.parametrize("answer", [{"label": "severe"}, {"gloss": "BUS I BUY", "category": "a"}])
def test_a_label_or_a_gloss_next_to_a_text_is_not_left_out(answer: Row) -> None:
    with pytest.raises(DataError, match="may answer text") as raised:
        find_mapper([{"text": "q"} | answer], _AS_USUAL)
    stored = find_mapper([{"text": "q"} | answer], printed(raised.value)[0])({"text": "q"} | answer, None)
    assert [each["content"] for each in json.loads(stored["messages"])] == ["q", next(iter(answer.values()))]


@pytest.mark.parametrize(
    ("row", "first"),
    [
        ({"image": image(1), "html": "<b>a b</b>", "notes": "made by a script."}, {"text": "html"}),
        ({"prompt": "write f", "tests": "assert f(1) == 2", "file": "a/b.py", "translation_prompt": "in C: f"}, {}),
        ({"input": "a b", "output": "c d", "generated": "e f"}, {"prompt": "input", "response": "output"}),
        ({"question_es": "q r", "answer_es": "a", "image_id": "7.png", "image_path": "x/7.png"},
         {"images": "image_path", "prompt": "question_es", "response": "answer_es"}),
        ({"content": "two numbers", "name": "sum", "python": "def f(a, b): return a + b", "c": "int f() {}"},
         {"prompt": "content", "response": "python"}),
        ({"input_text": "a", "expected_output": {"b": 1}}, {"prompt": "input_text", "response": "expected_output"}),
        ({"question_zh": "q r", "schema_text": "CREATE TABLE t", "gold_sql": "SELECT 1"},
         {"instruction": "question_zh", "input": "schema_text", "output": "gold_sql"}),
    ],
)  # fmt: skip
def test_names_paths_notes_and_earlier_texts_are_offered_as_no_answer(row: Row, first: dict[str, str]) -> None:
    with pytest.raises(DataError, match="fit no kind of rows") as raised:
        find_mapper([row], _AS_USUAL)
    options = printed(raised.value)
    assert (dict(options[0].columns) if options else {}) == first


CLASSES: list[Row] = [{"n": f"{n} x", "of": f"the {n}", "label": n % 2, "kind": "ab"[n % 2]} for n in range(4)]
OPTIONS_BY_VALUES: dict[str, tuple[list[Row], dict[str, str]]] = {  # rows -> the first option
    "a class in numbers next to a text": ([{"text": row["n"], "label": row["label"]} for row in CLASSES],
                                          {"prompt": "text", "response": "label"}),
    "a class of one text": ([{"sentence": row["n"], "label": row["label"]} for row in CLASSES],
                            {"prompt": "sentence", "response": "label"}),
    "a class of two texts": ([{"n": row["n"], "of": row["of"], "label": row["label"]} for row in CLASSES],
                             {"instruction": "n", "input": "of", "output": "label"}),
    "a class is no text of a pair": ([{"kind": row["kind"], "n": row["n"], "of": row["of"]} for row in CLASSES],
                                     {"prompt": "n", "response": "of"}),
    "a class is no question": ([{"title": f"what {row['n']} is", "kind": row["kind"], "answer": row["of"]}
                                for row in CLASSES], {"prompt": "title", "response": "answer"}),
    "a query of a database answers": ([{"nl": "all a", "query": "SELECT a FROM b"}],
                                      {"prompt": "nl", "response": "query"}),
    "a judge's reason is no question": ([{"task": "write a b", "reason": "a is longer than b", "chosen": "c d",
                                          "rejected": "e f"}], {"prompt": "task"}),
    "a reason next to a text": ([{"text": "q", "label": True, "reason": "a"}],
                                {"prompt": "text", "response": "reason"}),
    "an image next to a class": ([{"img": f"img/{n}.png", "text": f"{n} x", "label": n % 2} for n in range(4)],
                                 {"images": "img"}),
    "a context is no answer": ([{"question": "q a", "context": "q a b c", "answers": [1, 2]}], {}),
    "an object may be the answer": ([{"en": "q a", "said": "it is now", "call": {"f": 1}}], {}),
    "a part of the question is no answer": ([{"prompt": "write a b", "brief": "a b", "n": 1}], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS_BY_VALUES)
def test_values_decide_which_columns_the_first_option_names(name: str) -> None:
    rows, first = OPTIONS_BY_VALUES[name]
    with pytest.raises(DataError) as raised:
        find_mapper(rows, _AS_USUAL)
    options = printed(raised.value)
    assert (dict(options[0].columns) if options and options[0].columns else {}) == first
    if first and "images" not in first:
        mapper = find_mapper(rows, options[0])
        assert mapper.kind.name in ("prompt-response", "alpaca", "preference")
        assert str(rows[0][[*first.values()][-1]]) in mapper(rows[0], None)["messages"]


def test_objects_that_answer_or_ask_are_stored_as_json_or_as_their_speakers() -> None:
    row = {"prompt": {"system": "s", "user": "q"}, "response": {"b": [1]}}
    messages = json.loads(find_mapper([row], _AS_USUAL)(row, None)["messages"])
    assert [(each["role"], each["content"]) for each in messages] == [
        ("system", "s"), ("user", "q"), ("assistant", '{"b":[1]}')
    ]  # fmt: skip


def test_an_answer_next_to_a_dialog_that_ends_with_the_user_is_not_left_out() -> None:
    row = {"dialog": ["q", "a", "r"], "response": "b"}
    with pytest.raises(DataError, match=r"column response holds what answers dialog, .* write it behind dialog, with"):
        find_mapper([row], _AS_USUAL)
    assert find_mapper([{**row, "dialog": ["q", "a"]}], _AS_USUAL).kind.name == "dialog"


def test_settings_of_the_template_next_to_messages_are_not_left_out() -> None:
    """As SmolTalk2 has them."""
    row = {"messages": said(1, "user", "assistant"), "chat_template_kwargs": {"enable_thinking": False, "tools": None}}
    with pytest.raises(
        DataError, match=r"column chat_template_kwargs holds settings .*: pass --kind messages \(leaves"
    ):
        find_mapper([row], _AS_USUAL)
    row["chat_template_kwargs"] = {"custom_instructions": "", "tools": None, "enable_thinking": True}
    assert find_mapper([row], _AS_USUAL).kind.name == "messages"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"input": "q", "chosen": "a", "rejected": "b"}, {"prompt": "input"}),  # Distilabel's pairs
        ({"input": "q", "output": "a"}, {"instruction": "input"}),
        ({"history": "q", "response": "a"}, {"prompt": "history"}),
    ],
)
def test_a_column_that_is_named_for_one_role_is_not_read_for_another(row: Row, columns: dict[str, str]) -> None:
    mapper = find_mapper([row], SchemaOptions(columns=columns))
    assert mapper(row, None)["messages"].count('"q"') == 1
    assert [name for name in mapper.found.values() if name in columns.values()] == [*columns.values()]


def test_pairs_that_begin_alike_are_no_whole_texts_next_to_a_question() -> None:
    row = {"query": "q", "chosen": "It is a", "rejected": "It is b"}
    with pytest.raises(DataError, match=r"column query holds what is asked, .*: pass --columns prompt=query, or"):
        find_mapper([row], _AS_USUAL)
    stored = json.loads(find_mapper([row], SchemaOptions(columns={"prompt": "query"}))(row, None)["messages"])
    assert [each["content"] for each in (*stored["prompt"], *stored["chosen"])] == ["q", "It is a"]
    del row["query"]
    assert json.loads(find_mapper([row], _AS_USUAL)(row, None)["messages"])["prompt"] == "It is"


def test_calls_of_functions_are_calls_whatever_their_speaker_is_called() -> None:
    """As ms-swift and LLaMA-Factory name them."""
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    for keys, call_role, tool_role in ((("role", "content"), "tool_call", "tool_response"), (
        ("from", "value"), "function_call", "observation")):  # fmt: skip
        talk = [("user", "q"), (call_role, call), (tool_role, "r"), ("assistant", "a")]
        row = {"messages": [dict(zip(keys, each, strict=True)) for each in talk]}
        stored = json.loads(find_mapper([row], _AS_USUAL)(row, None)["messages"])
        assert [each["role"] for each in stored] == ["user", "assistant", "tool", "assistant"]
        assert stored[1]["content"] is None
        assert stored[1]["tool_calls"] == [{"type": "function", "function": json.loads(call)}]


def test_texts_with_a_speaker_are_no_documents() -> None:
    """OpenAssistant's messages, a row each."""
    row = {"message_id": "i", "parent_id": None, "text": "t", "role": "prompter", "lang": "en"}
    with pytest.raises(DataError, match=r"column role says who speaks, .*: pass --kind text \(leaves .*, or join"):
        find_mapper([row], _AS_USUAL)
    assert find_mapper([row], SchemaOptions(kind="text")).kind.name == "text"
    assert find_mapper([{**row, "role": "admin"}], _AS_USUAL).kind.name == "text"


def test_an_answer_that_calls_functions_calls_them() -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    tools = [{"name": "f"}, {"name": "g"}]
    for answer in (calls, json.dumps(calls)):
        row = {"prompt": "q", "response": answer, "tools": tools}
        stored = json.loads(find_mapper([row], _AS_USUAL)(row, None)["messages"])
        assert stored["tools"] == tools
        called = [{"type": "function", "function": call} for call in calls]
        assert stored["messages"][1] == {"role": "assistant", "content": None, "tool_calls": called}
    row = {"prompt": "q", "response": json.dumps(calls)}  # without tools it is text
    assert json.loads(find_mapper([row], _AS_USUAL)(row, None)["messages"])[1]["content"] == json.dumps(calls)


@pytest.mark.parametrize("name", ["problem", "prompt", "instruction"])
def test_a_question_under_another_name_is_not_left_out_next_to_media(name: str) -> None:
    row = {"images": [image(1)], name: "q", "answer": "a"}
    with pytest.raises(DataError, match=rf"--columns prompt={name} response=answer|instruction"):
        find_mapper([row], _AS_USUAL)
    mapper = find_mapper([row], SchemaOptions(columns={"question": ""}))
    assert mapper.description == f"question-answer; reads answer, images; leaves out {name}"


def test_names_of_columns_that_look_like_values_say_that_the_first_row_of_csv_names_them() -> None:
    row = {"Find the degree of Q(sqrt(2), sqrt(3), sqrt(18)) over Q": "a", "0": "b", "4": "c", "B": "d"}
    with pytest.raises(DataError, match=r"\('0' looks like a value: the first row of CSV is to name the columns\)"):
        find_mapper([row], _AS_USUAL)


def test_a_column_with_a_dot_is_not_said_to_be_left_out() -> None:
    with pytest.raises(DataError, match=r"--columns images=img\.jpg text=txt \(leaves out __key__, img\)"):
        find_mapper([{"__key__": "0", "img.jpg": image(1), "img": 3, "txt": "a"}], _AS_USUAL)
    with pytest.raises(DataError, match=r"--columns images=img\.jpg text=txt \(leaves out __key__\)"):
        find_mapper([{"__key__": "0", "img.jpg": image(1), "txt": "a"}], _AS_USUAL)
    mapper = find_mapper([{"img.jpg": image(1), "img": 3, "txt": "a"}], SchemaOptions(columns={"images": "img.jpg"}))
    assert mapper.description.endswith("leaves out img")
