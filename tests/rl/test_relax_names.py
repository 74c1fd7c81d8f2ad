"""What Relax's tests and scripts import and call, by the names below lmms_stream.relax."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmms_stream.checks import NamedLikeTheirs
from lmms_stream.doors.relax.engine.rollout import data_source
from lmms_stream.doors.relax.engine.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from lmms_stream.doors.relax.utils.data.data import BaseDataset, Dataset
from lmms_stream.doors.relax.utils.data.data_utils import (
    build_messages,
    check_sample_length,
    collect_message_multimodal_data,
    filter_long_prompts,
    parse_generalized_path,
    process_raw_sample,
    read_file,
)
from lmms_stream.doors.relax.utils.data.processing_utils import load_processor, load_tokenizer
from lmms_stream.doors.relax.utils.data.streaming_dataset import (
    CompositeStreamingReader,
    IndexManager,
    SampleBuffer,
    StreamingDataset,
    StreamingReader,
)
from lmms_stream.doors.relax.utils.misc import load_function
from lmms_stream.doors.relax.utils.types import MultimodalTypes, Sample
from lmms_stream.errors import ConfigError, DataError

from .rows import prompts, write_lines, write_parquet

FIELDS = """
    group_index index prompt tokens rollout_tokens multimodal_inputs multimodal_train_inputs response response_length
    label reward custom_advantage loss_mask weight_versions rollout_log_probs rollout_log_probs_mask
    rollout_routed_experts remove_sample abort_count teacher_log_probs student_topk_token_ids student_topk_log_probs
    teacher_at_student_topk_log_probs teacher_topk_token_ids teacher_topk_log_probs student_at_teacher_topk_log_probs
    opd_topk_token_ids opd_topk_student_log_probs opd_topk_teacher_log_probs opd_topk_ksz teacher_prompt
    teacher_multimodal_inputs teacher_tokens teacher_prompt_length teacher_image_data teacher_image_b64_list
    teacher_image_grid_thw status metadata generate_function_path train_metadata session_id non_generation_time
    spec_info prefix_cache_info
""".split()  # noqa: SIM905 - a list of 45 lines otherwise
REFUSED = (
    ("utils.data.data", "get_minimum_num_micro_batch_size"),
    ("utils.data.streaming_dataset", "PrefetchBuffer"),
    ("utils.data.data_utils", "resolve_path_plan"),
    ("utils.data.processing_utils", "process_vision_info"),
    ("utils.data.processing_utils", "encode_audio_for_rollout_engine"),
    ("utils.data.processing_utils", "encode_image_for_rollout_engine"),
    ("utils.data.processing_utils", "encode_video_tensor_for_rollout_engine"),
    ("utils.types", "ParamInfo"),
    ("utils.types", "RolloutBatch"),
    ("utils.types", "SFTBatch"),
)


@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_names_that_are_not_here_are_refused_with_what_to_do(module: str, name: str) -> None:
    home = importlib.import_module(f"lmms_stream.relax.{module}")
    with pytest.raises(ImportError, match=rf"lmms_stream\.relax\.{module} has no {name}: \w+"):
        getattr(home, name)
    with pytest.raises(ImportError, match=f"has no {name}: "):
        exec(f"from lmms_stream.relax.{module} import {name}")
    assert not hasattr(home, "never_was")


@pytest.mark.parametrize("name", ["engine.rollout.sglang_rollout", "utils.data.stream_dataloader", "backends"])
def test_modules_that_are_not_here_are_named(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"lmms_stream\.relax\.{name}"):
        importlib.import_module(f"lmms_stream.relax.{name}")


def test_readers_give_rows_by_number(tmp_path: Path) -> None:
    rows = prompts(6)
    lines = write_lines(tmp_path / "a.jsonl", rows, blank_every=2)
    table = write_parquet(tmp_path / "b.parquet", rows, group_rows=2)
    for path in (lines, table):
        reader = StreamingReader(str(path))
        assert [reader[number] for number in (4, 1, 3, 0, 2, 5)] == [rows[number] for number in (4, 1, 3, 0, 2, 5)]
        for beyond in (6, -1):
            with pytest.raises(IndexError, match=f"row {beyond} of 6 rows: count from 0"):
                reader[beyond]
    sliced = StreamingReader(f"{lines}@[1:3]")
    assert (len(sliced), sliced[0], sliced[1]) == (2, rows[1], rows[2])
    both = CompositeStreamingReader([str(lines), str(table)], slice(4, 10))
    assert (len(both), both[0], both[5]) == (6, rows[4], rows[3])
    assert [*both.iter_batch([3, 0, 4])] == [(3, rows[1]), (0, rows[4]), (4, rows[2])]
    assert [*read_file(f"[{lines}, {table}]@[5:7]")] == [rows[5], rows[0]]
    with pytest.raises(FileNotFoundError):
        StreamingReader(str(tmp_path / "none.jsonl"))
    (tmp_path / "rows.txt").write_text("text")
    with pytest.raises(ValueError, match=r"expected a name that ends in \.jsonl or \.parquet"):
        StreamingReader(str(tmp_path / "rows.txt"))
    with pytest.raises(ValueError, match="names no files"):
        CompositeStreamingReader([])
    with pytest.raises(ConfigError, match="row_slice has step 2, only step 1 is supported"):
        CompositeStreamingReader([str(lines)], slice(0, 4, 2))
    lines.write_text('{"text": "a"}\n{broken\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON"):
        [*read_file(str(lines))]


def test_a_buffer_holds_what_was_used_last() -> None:
    buffer = SampleBuffer(max_size=3)
    samples = [Sample(prompt=f"sample {number}") for number in range(4)]
    for number in range(3):
        buffer.put(number, samples[number])
    assert buffer.get(0) is samples[0]
    buffer.put(3, samples[3])
    assert [buffer.get(number) for number in range(4)] == [samples[0], None, samples[2], samples[3]]
    assert (len(buffer), buffer.hit_rate, buffer.get(999)) == (3, 4 / 5, None)
    buffer.clear()
    assert (len(buffer), buffer.hit_rate, buffer.get(0)) == (0, 0, None)


def test_a_cursor_gives_rows_in_the_order_of_each_epoch() -> None:
    one, other = IndexManager(total_size=100, seed=42), IndexManager(total_size=100, seed=42)
    one.shuffle(0)
    other.shuffle(0)
    assert one.indices == other.indices
    other.shuffle(1)
    assert sorted(other.indices) == sorted(one.indices) == list(range(100))
    assert one.indices != other.indices
    small = IndexManager(total_size=5)
    first, crossed = small.get_next_indices(3)
    assert (len(first), crossed) == (3, False)
    rest, crossed = small.get_next_indices(2)
    assert (sorted(first + rest), crossed, small.current_epoch) == ([0, 1, 2, 3, 4], False, 0)
    assert small.get_next_indices(6)[1] is True
    assert small.get_state() == {"epoch_id": 2, "position": 1}
    again = IndexManager(total_size=5)
    again.load_state(small.get_state())
    assert again.get_next_indices(9) == small.get_next_indices(9)
    again.reset(position=2, epoch_id=7)
    assert (again.current_epoch, again.position, again.total_size, again.seed) == (7, 2, 5, 42)
    with pytest.raises(ValueError, match="there are no rows: check the path"):
        IndexManager(0).get_next_indices(1)
    with pytest.raises(ValueError, match="the state is not an IndexManager"):
        again.load_state({"epoch_id": 0})


def test_the_designs_examples_run_with_the_imports_changed(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", prompts(60))
    settings: dict[str, Any] = {"max_length": 2048, "prompt_key": "text", "apply_chat_template": True}
    loaded = load_tokenizer(str(tokenizer))
    loaded.chat_template = "{{ messages[0]['content'] }}"
    eager = Dataset(path=str(path), tokenizer=loaded, processor=load_processor(str(tokenizer)), **settings)
    eager.shuffle(epoch_id=1)
    sample, batch = eager[0], eager.samples[0:32]
    assert (len(batch), batch[0], eager.epoch_id) == (32, sample, 1)
    lazy = StreamingDataset(path=str(path), tokenizer=loaded, processor=None, buffer_size=10000, **settings)
    samples, crossed_epoch = lazy.get_batch(32)
    assert (len(samples), crossed_epoch) == (32, False)
    assert lazy.get_batch(32)[1] is True
    assert isinstance(eager, BaseDataset)
    assert isinstance(lazy, BaseDataset)
    assert len(lazy.samples) == 60
    lazy.shuffle(epoch_id=1)
    assert lazy.samples[0:32] == batch  # eager and lazy can take each other's place


def test_settings_of_datasets_have_relaxs_names_and_defaults() -> None:
    shared: dict[str, Any] = {
        "prompt_key": "text", "metadata_key": "metadata", "seed": 42, "apply_chat_template": False,
        "use_audio_in_video": False, "multimodal_keys": None, "label_key": None, "tool_key": None,
        "system_prompt": None, "apply_chat_template_kwargs": None, "multimodal_config": None,
        "custom_prompt_func": None,
    }  # fmt: skip
    of_stream = {
        "buffer_size": 10000, "prefetch_chunk_size": 32, "prefetch_max_cached": 256, "prefetch_num_workers": 1,
    }  # fmt: skip
    for kind, expected in ((BaseDataset, shared), (StreamingDataset, of_stream)):
        parameters = inspect.signature(kind).parameters
        assert {name: parameters[name].default for name in expected} == expected
    assert [*inspect.signature(BaseDataset).parameters][:4] == ["path", "tokenizer", "processor", "max_length"]


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_flags_choose_the_class_that_makes_samples_at_once_or_when_they_are_asked_for(
    lazy: bool, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "train.jsonl", prompts(40))
    args = SimpleNamespace(
        prompt_data=str(path), input_key="text", use_streaming_dataset=lazy, streaming_buffer_size=7,
        prefetch_chunk_size=32, prefetch_max_cached=4,
    )  # fmt: skip
    found: Any = data_source.RolloutDataSourceWithBuffer(args).dataset
    assert type(found) is (StreamingDataset if lazy else Dataset)
    assert found.num_processed == (0 if lazy else 40)
    samples, _ = found.get_batch(40)  # a cache smaller than a chunk does not stop it
    assert len(samples) == 40
    if isinstance(found, StreamingDataset):
        assert found.buffer.max_size == 7
    else:
        path.unlink()
        assert found[39] == samples[39]


def test_small_datasets_keep_a_contiguous_cursor(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in "abc"])
    dataset = StreamingDataset(path=str(path), tokenizer=None, processor=None, max_length=None, prefetch_max_cached=0)
    found = []
    for _ in range(2):
        samples, _ = dataset.get_batch(8)
        found.append(("".join(str(sample.prompt) for sample in samples), dataset.index_manager.get_state()))
    dataset.index_manager.load_state(found[0][1])
    assert "".join(str(sample.prompt) for sample in dataset.get_batch(8)[0]) == "cabcabca"
    assert found == [("abcabcab", {"epoch_id": 2, "position": 2}), ("cabcabca", {"epoch_id": 5, "position": 1})]


def test_a_row_becomes_messages_and_a_sample(tokenizer: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}
    row: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]}
    messages = build_messages(row, "messages", None, as_conversation=True)
    assert messages[0]["content"][1] == {"type": "image", "image": "https://example.test/a.png"}
    assert collect_message_multimodal_data(messages)["image"] == ["https://example.test/a.png"]
    image["image_url"] = {}
    row["images"] = ["a.png"]
    for _ in range(2):  # the row is as it was
        messages = build_messages(row, "messages", None, True, {"image": "images"})
        assert collect_message_multimodal_data(messages) == {"image": ["a.png"], "video": [], "audio": []}
    assert build_messages({"q": "hi"}, "q", None, as_conversation=False) == "hi"
    asked = build_messages({"q": "hi"}, "q", "Be kind.", True, None, lambda prompt, row: prompt.upper())
    assert [message["content"] for message in asked] == ["Be kind.", "HI"]
    loaded = load_tokenizer(str(tokenizer))
    loaded.chat_template = "rendered:{{ messages[-1]['content'] }}"
    given: dict[str, Any] = {"label_key": "label", "apply_chat_template": True, "teacher_prompt_key": "teacher"}
    sample = process_raw_sample({"text": "question", "teacher": "hint", "label": "answer"}, loaded, None, **given)
    assert (sample.prompt, sample.label, sample.teacher_prompt) == ("rendered:question", "answer", None)
    assert sample.metadata == {"opd_teacher_prompt": "rendered:hint"}
    assert process_raw_sample({"text": "question", "label": "answer"}, loaded, None, **given).metadata == {}


def test_samples_are_measured_by_their_tokens(tokenizer: Path) -> None:
    loaded = load_tokenizer(str(tokenizer))
    samples = [Sample(prompt=row["text"]) for row in prompts(7)]
    lengths = [len(loaded(sample.prompt, add_special_tokens=False)["input_ids"]) for sample in samples]
    limit = sorted(lengths)[3]
    kept = filter_long_prompts(samples, loaded, None, limit)
    assert kept == [sample for sample, length in zip(samples, lengths, strict=True) if length <= limit]
    assert [check_sample_length(sample, loaded, None, limit) for sample in samples] == [
        each <= limit for each in lengths
    ]


def test_paths_are_taken_apart_and_functions_and_media_found_by_name() -> None:
    assert parse_generalized_path("data.jsonl") == ("data.jsonl", None)
    assert parse_generalized_path("data.jsonl@[0:100]") == ("data.jsonl", slice(0, 100))
    assert load_function("os.path.join")("a", "b") == "a/b"
    assert [each.placeholder for each in MultimodalTypes.all()] == ["<image>", "<video>", "<audio>"]
    assert MultimodalTypes.get("video") is MultimodalTypes.VIDEO
    assert MultimodalTypes.get("smell") is None
    assert load_processor("/nowhere") is None


def test_a_sample_has_relaxs_fields_and_takes_what_the_engine_tells() -> None:
    assert {each.name for each in dataclasses.fields(Sample)} == {*FIELDS}
    made = Sample.of("hi", "label", {})
    assert {name: getattr(made, name) for name in FIELDS} == {
        name: getattr(Sample(prompt="hi", label="label"), name) for name in FIELDS
    }
    args, status = SimpleNamespace(sglang_speculative_algorithm="EAGLE", reward_key="rule"), Sample.Status
    told = {"cached_tokens": 3, "prompt_tokens": 4, "spec_accept_token_num": 5, "spec_draft_token_num": 10,
            "spec_verify_ct": 2, "completion_tokens": 8}  # fmt: skip
    ends = (("length", status.TRUNCATED), ("abort", status.ABORTED), ("stop", status.COMPLETED))
    for version, (reason, expected) in enumerate(ends):
        made.update_from_meta_info(args, {"finish_reason": {"type": reason}, "weight_version": str(version), **told})
        assert made.status is expected
    assert made.weight_versions == ["0", "1", "2"]
    assert (made.spec_info.spec_accept_rate, made.spec_info.spec_accept_length) == (0.5, 4.0)
    assert (made.prefix_cache_info.cached_tokens, made.prefix_cache_info.prefix_cache_hit_rate) == (9, 0.75)
    other = Sample(prompt="hi")
    other.update_from_meta_info(SimpleNamespace(sglang_speculative_algorithm=None), {"finish_reason": {"type": "stop"}})
    assert other.spec_info == Sample.SpecInfo()
    with pytest.raises(DataError, match=r"finish_reason is \{'type': 'other'\}, expected .* of stop, length, abort"):
        other.update_from_meta_info(args, {"finish_reason": {"type": "other"}})
    made.reward, made.loss_mask, made.response_length = {"rule": 1.0}, [0, 1, 1], 3
    assert (made.get_reward_value(args), made.effective_response_length) == (1.0, 2)
    assert Sample.from_dict(made.to_dict()) == made
    assert made.to_dict()["spec_info"] == made.spec_info.to_dict()
    assert not hasattr(made, "never_was")


@pytest.mark.parametrize("base", [Dataset, StreamingDataset, data_source.RolloutDataSourceWithBuffer])
def test_overridden_methods_that_nothing_calls_are_refused(base: type[NamedLikeTheirs]) -> None:
    assert base.NOT_CALLED
    for name, remedy in base.NOT_CALLED.items():
        with pytest.raises(ConfigError, match=f"Own overrides {name}, which nothing here calls: {remedy}"):
            type("Own", (base,), {name: lambda *_: None})
    type("Own", (base,), {"own_helper": lambda *_: None, "shuffle": lambda *_: None})


def drop_all(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        for sample in group:
            sample.remove_sample = True


class MySource(data_source.RolloutDataSourceWithBuffer):
    pass


def test_data_sources_and_what_rollout_functions_give(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(6))
    args = SimpleNamespace(prompt_data=f"[{path}, {path}]@[2:8]", input_key="text", use_streaming_dataset=True)
    dataset = data_source._create_dataset(args, None, processor=None)
    assert (type(dataset), [each.prompt for each in dataset][-1]) == (StreamingDataset, prompts(2)[1]["text"])
    args.use_streaming_dataset = False
    assert type(data_source._create_dataset(args, None, None)) is Dataset
    source = MySource(args)
    assert isinstance(source, data_source.DataSource)
    source.update_metadata({"best": 1})
    assert (source.lengths(), len(source), source.get_metadata(), source.get_buffer_length()) == (6, 6, {"best": 1}, 0)
    source.add_samples([])
    with pytest.raises(TypeError, match="abstract"):
        data_source.DataSource()  # type: ignore[abstract]
    groups = source.get_samples(2)
    given = call_rollout_fn(lambda *given, evaluation: groups, args, 0, source, evaluation=False)
    assert given == RolloutFnTrainOutput(groups)
    assert call_rollout_fn(lambda evaluation: {"a": {}}, evaluation=True) == RolloutFnEvalOutput({"a": {}})
    assert call_rollout_fn(lambda evaluation: given, evaluation=False) is given
    args.rollout_sample_filter_path = f"{__name__}.drop_all"
    made = call_rollout_fn(lambda args, evaluation: groups, args=args, evaluation=False)
    assert isinstance(made, RolloutFnTrainOutput)
    assert all(sample.remove_sample for group in made.samples for sample in group)
