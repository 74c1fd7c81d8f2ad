"""A row becomes a sample: its template, tools, labels, metadata and media."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.rl import Dataset, MultimodalConfig, Sample, StreamingDataset
from lmms_stream.tools.demo.vision import save_processor
from PIL import Image
from streaming import MDSWriter
from transformers import AutoProcessor, AutoTokenizer

from .rows import write_lines, write_parquet

IMAGES = {"multimodal_keys": {"image": "images"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>{% endif %}{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "?"},
]


@pytest.fixture(scope="module")
def templated(tokenizer: Path) -> Any:
    """A tokenizer of transformers' with a template that shows tools and a variable."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = TEMPLATE
    return loaded


def only(path: Path, *arguments: Any, **settings: Any) -> Sample:
    """The sample of the only row, which is the same of both datasets."""
    eager, lazy = Dataset(path, *arguments, **settings), StreamingDataset(path, *arguments, **settings)
    assert list(eager) == list(lazy)
    (sample,) = eager
    return sample


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("prompt", ["2 + 2?", MESSAGES])
@pytest.mark.parametrize("settings", [{}, {"thinks": True}, {"add_generation_prompt": False}])
def test_templates_render_what_transformers_renders(
    prompt: Any, as_text: bool, settings: dict[str, Any], templated: Any, tmp_path: Path
) -> None:
    row = {"q": prompt, "a": 4, "tools": json.dumps(TOOLS) if as_text else TOOLS, "metadata": {"level": 1}}
    sample = only(
        write_lines(tmp_path / "rows.jsonl", [row]), templated, prompt_key="q", label_key="a", tool_key="tools",
        apply_chat_template=True, apply_chat_template_kwargs=settings, system_prompt="Be brief.",
    )  # fmt: skip
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{"role": "system", "content": "Be brief."}, *asked]
    assert sample.prompt == templated.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, **{"add_generation_prompt": True, **settings}
    )
    assert (sample.label, sample.metadata) == (4, {"level": 1, "tools": TOOLS})
    assert sample.status is Sample.Status.PENDING


def test_without_a_template_prompts_stay_as_they_are(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{"text": "hi", "other": 1}])
    assert only(path).prompt == "hi"
    assert only(path, system_prompt="Be kind.").prompt == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]
    changed = only(path, custom_prompt_func=lambda prompt, row: f"{prompt} {row['other']}")
    assert changed.prompt == "hi 1"
    assert only(write_lines(tmp_path / "rows.jsonl", [{"text": MESSAGES}])).prompt == MESSAGES


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "hi", "tools": "{"}, {"tool_key": "tools"}, "'tools' is not valid JSON"),
        ({"text": "hi", "tools": {"a": 1}}, {"tool_key": "tools"}, "'tools' holds dict, not a list of tools"),
        ({"text": "hi"}, {"label_key": "label"}, "there is no 'label': name another label_key"),
        ({"text": "hi", "metadata": [1]}, {}, "'metadata' is list '.1.', not an object"),
        ({"text": 7}, {}, "'text' is int '7', not a text or a list of messages"),
        ({"text": [{"content": "hi"}]}, {}, "a message of the prompt has no role"),
        ({"text": "<image> <image>", "images": ["a"]}, IMAGES, "more slots .* than the 1"),
        ({"text": "<image>", "images": ["a", "b"]}, IMAGES, "1 of the 2 media in 'images'"),
        ({"text": "<image>", "images": 3}, IMAGES, "'images' holds int, not media"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named(
    row: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl: row 1: .*{message}"):
        Dataset(write_lines(tmp_path / "rows.jsonl", [row]), **settings)


@pytest.mark.parametrize("settings", [{}, {"label_key": "answer"}, {"prompt_key": "prompt", "label_key": "answer"}])
def test_an_error_about_a_missing_prompt_names_the_columns_of_parquet_too(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{"question": "2 + 2?", "answer": "4"}])
    with pytest.raises(DataError, match=r"row 1: '(text|prompt)' is missing, .* its columns are 'question', 'answer'"):
        Dataset(path, **settings)


def test_what_the_tokenizer_cannot_do_is_named(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"text": MESSAGES}])
    with pytest.raises(ConfigError, match="max_length counts the tokens of texts, and a prompt is a list of messages"):
        Dataset(path, str(tokenizer), None, 10)
    plain = AutoTokenizer.from_pretrained(tokenizer)
    plain.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template: set tokenizer\.chat_template"):
        Dataset(path, plain, apply_chat_template=True)


def picture(width: int, color: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((28, width, 3), color, np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_media_go_where_their_placeholders_stand_and_are_read_once_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(picture(56, 200))
    row = {
        "text": "see <image> and <image>.",
        "images": ["data:image/png;base64," + base64.b64encode(picture(28, 10)).decode(), "b.png"],
    }
    path = write_lines(tmp_path / "rows.jsonl", [row, {"text": "none"}])
    dataset = StreamingDataset(path, None, object(), multimodal_keys={"image": "images"})
    sample, without = dataset
    assert isinstance(sample.prompt, list)
    assert [part["type"] for part in sample.prompt[0]["content"]] == ["text", "image", "text", "image", "text"]
    assert sample.multimodal_inputs is not None
    images = sample.multimodal_inputs["images"]
    assert [(image.mode, image.size, image.getpixel((0, 0))) for image in images] == [
        ("RGB", (28, 28), (10, 10, 10)),
        ("RGB", (56, 28), (200, 200, 200)),
    ]
    assert without.multimodal_inputs is None
    outside = write_lines(tmp_path / "sub" / "rows.jsonl", [{"text": "<image>", "images": ["../b.png"]}])
    with pytest.raises(DataError, match=r"media '\.\./b\.png' leads out of the media root"):
        Dataset(outside, None, object(), multimodal_keys={"image": "images"})


def test_prompts_with_images_are_measured_by_the_processor(tmp_path: Path) -> None:
    folder = save_processor(tmp_path / "processor", texts=["see and"])
    processor = AutoProcessor.from_pretrained(folder)
    rows = [
        {"text": "see <image>", "images": ["data:image/png;base64," + base64.b64encode(picture(28 * n, 10)).decode()]}
        for n in (2, 20)
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    settings: dict[str, Any] = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    lengths = [
        len(processor(text=sample.prompt, images=sample.multimodal_inputs["images"])["input_ids"][0])
        for sample in Dataset(path, str(folder), processor, **settings)
        if sample.multimodal_inputs
    ]
    assert lengths[0] < lengths[1]
    dataset = Dataset(path, str(folder), processor, lengths[0], **settings)
    assert (len(dataset), dataset.num_overlong) == (1, 1)
    with pytest.raises(ConfigError, match="max_length cannot count prompts with images"):
        Dataset(path, str(folder), object(), 5, **settings)


def test_a_teacher_is_asked_by_a_column_of_its_own(templated: Any, tmp_path: Path) -> None:
    image = "data:image/png;base64," + base64.b64encode(picture(28, 10)).decode()
    rows: list[dict[str, Any]] = [
        {"text": "2 + 2?", "teacher": "2 + 2? It is 4.", "images": [], "shown": []},
        {"text": "<image> What?", "teacher": "<image> <image> A dot.", "images": [image], "shown": [image, image]},
        {"text": "3 + 3?", "teacher": None, "images": [], "shown": []},
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {"apply_chat_template": True, "teacher_prompt_key": "teacher"}
    first, _, last = Dataset(write_lines(tmp_path / "texts.jsonl", [rows[0], rows[0], rows[2]]), templated, **given)
    assert first.metadata == {"opd_teacher_prompt": "<|user|>2 + 2? It is 4.<|end|><|assistant|>"}
    assert (first.prompt, first.teacher_prompt) == ("<|user|>2 + 2?<|end|><|assistant|>", None)
    assert last.metadata == {}
    shown: dict[str, Any] = {**given, "apply_chat_template": False, **IMAGES}
    eager = Dataset(path, None, object(), **shown, teacher_multimodal_keys={"image": "shown"})
    lazy = StreamingDataset(path, None, object(), **shown, teacher_multimodal_keys={"image": "shown"})
    for dataset in (eager, lazy, lazy):  # made, and from the buffer
        samples = [*dataset]
        assert [len((each.multimodal_inputs or {"images": []})["images"]) for each in samples] == [0, 1, 0]
        assert [len((each.teacher_multimodal_inputs or {"images": []})["images"]) for each in samples] == [0, 2, 0]
        assert [part["type"] for part in samples[1].metadata["opd_teacher_prompt"][0]["content"]] == [
            "image", "text", "image", "text",
        ]  # fmt: skip


def test_images_are_resized_to_the_tokens_of_a_config(tmp_path: Path) -> None:
    Image.new("RGB", (280, 280)).save(tmp_path / "a.png")
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "<image>", "images": ["a.png"]}])

    def size(**limits: Any) -> tuple[int, int]:
        config = MultimodalConfig(**limits) if limits else None
        (sample,) = Dataset(path, None, object(), multimodal_keys={"image": "images"}, multimodal_config=config)
        assert sample.multimodal_inputs is not None
        width, height = sample.multimodal_inputs["images"][0].size
        return width, height

    assert size() == size(image_max_token_num=100) == (280, 280)  # 10 x 10 tokens of 28 x 28 pixels
    assert size(image_max_token_num=30) == (140, 140)
    assert size(image_min_token_num=200) == (420, 420)
    assert MultimodalConfig.from_args(SimpleNamespace(image_max_token_num=30, video_fps=None)).image_max_token_num == 30
    with pytest.raises(ConfigError, match=r"video_fps is 4\.0, which is not supported: leave it out"):
        MultimodalConfig(video_fps=4.0)
    with pytest.raises(ConfigError, match="image_min_token_num is 9 and image_max_token_num 4: set 1 <= minimum"):
        MultimodalConfig(image_min_token_num=9, image_max_token_num=4)


def test_a_slot_of_image_url_takes_the_rows_media(tmp_path: Path) -> None:
    content = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "What?"}]
    row = {"text": [{"role": "user", "content": content}], "images": ["a.png"]}
    sample = only(write_lines(tmp_path / "rows.jsonl", [row]), **IMAGES)
    assert isinstance(sample.prompt, list)
    assert sample.prompt[0]["content"] == [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]


def test_chats_that_the_converter_stored_are_prompts_with_their_media(templated: Any, tmp_path: Path) -> None:
    data = picture(28, 77)
    parts = [{"type": "image", "mime": "image/png", "span": [0, len(data)]}, {"type": "text", "text": "What is it?"}]
    stored = {"messages": [{"role": "user", "content": parts}], "tools": TOOLS}
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(tmp_path / "shards")) as writer:
        writer.write({"messages": json.dumps(stored), "media": data})
    sample = only(tmp_path / "shards", templated, object(), prompt_key="messages", tool_key="tools")
    assert isinstance(sample.prompt, list)
    assert sample.prompt[0]["content"][1] == {"type": "text", "text": "What is it?"}
    assert sample.metadata == {"tools": TOOLS}
    assert sample.multimodal_inputs is not None
    assert sample.multimodal_inputs["images"][0].getpixel((0, 0)) == (77, 77, 77)


@pytest.mark.parametrize(
    "shows", ["{{ message.content | trim }}", "{{ '' + message.content }}", "{{ message.content }}"]
)
def test_a_null_content_of_a_prompt_is_no_text(shows: str, tokenizer: Path, tmp_path: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = "{% for message in messages %}<|{{ message.role }}|>" + shows + "{% endfor %}"
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt: list[dict[str, Any]] = [*MESSAGES[:1], answer]
    path = write_lines(tmp_path / "rows.jsonl", [{"text": prompt, "images": []}])
    assert only(path, loaded, apply_chat_template=True).prompt == "<|user|>2 + 2?<|assistant|>"
    assert only(path).prompt == [prompt[0], answer | {"content": ""}]
    assert only(path, **IMAGES).prompt[1] == answer | {"content": ""}


def _data_url() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 10, 10)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _asks(part: dict[str, Any]) -> dict[str, Any]:
    return {"text": [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]}


@pytest.mark.parametrize("as_object", [True, False])
def test_images_in_messages_are_read_or_an_error(as_object: bool, templated: Any, tmp_path: Path) -> None:
    url = _data_url()
    path = write_lines(
        tmp_path / "rows.jsonl", [_asks({"type": "image_url", "image_url": {"url": url} if as_object else url})]
    )
    sample = only(path, templated, object())
    assert [image.size for image in (sample.multimodal_inputs or {})["images"]] == [(8, 6)]
    with pytest.raises(DataError, match=r"holds media of kind image, but no processor .* --multimodal-keys"):
        only(path, templated, apply_chat_template=True)
    rendered = only(path, templated, object(), apply_chat_template=True, multimodal_keys={"image": "images"})
    assert len((rendered.multimodal_inputs or {})["images"]) == 1
    assert "'type': 'image'" in str(rendered.prompt)


def test_parts_that_nothing_reads_are_an_error(templated: Any, tmp_path: Path) -> None:
    for part, why in (
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "has the type 'input_audio' .* which nothing reads"),
        ({"type": "image_url", "image_url": {}}, "a part of type 'image_url' has no url"),
    ):
        path = write_lines(tmp_path / "rows.jsonl", [_asks(part)])
        for settings in ({}, {"apply_chat_template": True}):
            with pytest.raises(DataError, match=why):
                only(path, templated, **settings)


@pytest.mark.parametrize("text", [json.dumps(MESSAGES), str(MESSAGES)])
def test_messages_as_text_are_not_what_the_user_says(text: str, templated: Any, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"q": text}])
    with pytest.raises(DataError, match=r"list of messages as text.*custom_prompt_func"):
        only(rows, templated, prompt_key="q", apply_chat_template=True)
    read = only(
        rows, templated, prompt_key="q", apply_chat_template=True, custom_prompt_func=lambda prompt, row: MESSAGES
    )
    assert read.prompt == "<|user|>2 + 2?<|end|><|assistant|>5<|end|><|user|>?<|end|><|assistant|>"
    assert only(rows, templated, prompt_key="q").prompt == text


def test_a_function_of_prompts_that_fails_names_the_row_and_is_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"q": "1"}, {"q": "x"}])
    options: dict[str, Any] = {"prompt_key": "q", "custom_prompt_func": lambda prompt, row: str(int(prompt))}
    for kind in (Dataset, StreamingDataset):
        with pytest.raises(DataError, match=r"row 2: custom_prompt_func .*ValueError.* for str 'x': correct it"):
            kind(path, **options).get_batch(2)
        skipping = kind(path, on_error="skip", **options)
        assert ([each.prompt for each in skipping], skipping.num_unreadable) == (["1"], 1)
        with pytest.raises(
            IndexError, match="sample 1 of a dataset of 2 rows, 1 of them dropped: call get_batch, or open"
        ):
            _ = skipping[1]
    with pytest.raises(ConfigError, match="system_prompt must be a text, got 3: write one, or leave it out"):
        Dataset(path, prompt_key="q", system_prompt=3)


@pytest.mark.parametrize("kind", [Dataset, StreamingDataset])
@pytest.mark.parametrize(
    "named", [IMAGES, {"teacher_prompt_key": "images"}, {"teacher_multimodal_keys": {"image": "images"}}]
)
def test_a_column_that_the_first_rows_lack_is_warned_of(
    kind: Any, named: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = write_lines(tmp_path / "rows.jsonl", [{"q": "1"}, {"q": "2"}])
    for path in (lines, write_parquet(tmp_path / "rows.parquet", [{"q": "1"}, {"q": "2"}])):
        caplog.clear()
        dataset = kind(path, prompt_key="q", **named)
        dataset.get_batch(2)
        dataset.get_batch(2)
        assert [record.message for record in caplog.records] == [
            "none of the first 2 rows has the column 'images' of multimodal_keys or of the teacher, so their prompts "
            "lack it: correct the name if it is misspelt"
        ]
    caplog.clear()
    kind(write_lines(lines, [{"q": "1"}, {"q": "2", "images": None}]), prompt_key="q", **named).get_batch(2)
    assert not caplog.records
