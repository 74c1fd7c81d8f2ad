"""Planted faults are found with their exact counts, and clean datasets have no findings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.base import IGNORED_LABEL, Processor, labels_of
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.image import ImageProcessor
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.processors.preference import PreferenceProcessor
from lmms_stream.processors.text import TextProcessor
from lmms_stream.processors.tokenizers import FastTokenizer, load_tokenizer
from lmms_stream.tools.audit.checks import CHECKS, MANY, NAMES, Check, Finding, quantiles_of, with_overlong
from lmms_stream.tools.audit.repeats import CHARACTERS, Codes, similarity, sketches_of
from lmms_stream.tools.audit.report import AuditedDataset, AuditReport, audit
from lmms_stream.types import Processed, Sample
from streaming import MDSWriter

from ..arrows import ROOT
from ..conftest import write_samples
from ..processors.tiny_vlm import MARKED, picture, save_processor, stored

Messages = list[dict[str, Any]]
# Writes no system message, tools, calls, results, reasoning or message of a critic. Keys of a row plant other faults.
PLANTED = (
    "{% if messages[0].begun_twice %}{{ bos_token }}{{ bos_token }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{% if m.trained %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% if m.name and loop.last %}<|pad|>{% endif %}\n"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.quiet %}{{ m.content }}<|end|>"
    "{% elif m.endless %}{% generation %}{{ m.content }}{% endgeneration %}<|end|>"
    "{% else %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endif %}\n{% endif %}{% endfor %}"
)
NUM_CLEAN = 60
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}


def question(number: int, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": f"How does task number {number} end in asyncio?", **keys}


def answer(number: int, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"It returns the result {number * 7} after the loop.", **keys}


def chat(number: int) -> Messages:
    """A clean chat of two or four messages."""
    more = [question(1000 + number), answer(1000 + number)] if number % 3 == 0 else []
    return [question(number), answer(number), *more]


def write_rows(folder: Path, rows: list[Any], *, shard_bytes: int = 1 << 13, media: bytes = b"") -> str:
    """Rows as messages; a text is stored as it is."""
    columns = {"messages": "str", "media": "bytes"}
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=shard_bytes) as writer:
        for row in rows:
            writer.write({"messages": row if isinstance(row, str) else json.dumps(row), "media": media})
    return str(folder)


def with_template(tokenizer: Path, template: str, **special_tokens: str) -> FastTokenizer:
    loaded = load_tokenizer(str(tokenizer))
    tokens = {**loaded.special_tokens, **special_tokens}
    return dataclasses.replace(loaded, chat_templates={"default": template}, special_tokens=tokens)


def audited(url: str, processor: Processor | None, *, packing: PackingConfig | None = None, **options: Any) -> Any:
    dataset = PackedDataset([StreamConfig(remote=url)], processor=processor, packing=packing)
    return AuditedDataset.of("chats", dataset, **options)


def audit_of(url: str, processor: Processor | None, **options: Any) -> AuditReport:
    return audit([audited(url, processor, **options)], num_workers=1)


def found_in(report: AuditReport) -> dict[str, int]:
    return {each.check: each.count for each in report.findings if each.count}


def finding_of(report: AuditReport, check: str) -> Finding:
    (found,) = (each for each in report.findings if each.check == check)
    return found


def test_a_clean_dataset_has_no_finding(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    url = write_rows(tmp_path, [chat(number) for number in range(NUM_CLEAN)])
    report = audit_of(url, chat_processor, packing=PackingConfig(packing_length=512), positions=512)
    assert found_in(report) == {}
    assert report.verdict == "ok"
    assert (report.num_samples, report.num_read) == (NUM_CLEAN, NUM_CLEAN)
    samples = [chat_processor.process({"messages": json.dumps(chat(number))}) for number in range(NUM_CLEAN)]
    assert report.num_tokens == sum(len(each["input_ids"]) for each in samples)
    shares = [float((each["labels"] != IGNORED_LABEL).mean()) for each in samples]
    assert report.trained_shares == pytest.approx(
        np.quantile(shares, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1], method="inverted_cdf"), abs=1e-3
    )
    assert sum(report.histogram) == NUM_CLEAN


def planted_rows() -> tuple[list[Any], dict[str, int]]:
    """Clean chats and chats with faults; the counts of the faults."""
    n = iter(range(100, 200))
    rows: list[Any] = [chat(number) for number in range(NUM_CLEAN)]
    rows += ["not JSON", [{"role": "user"}, {"content": "no role"}]]
    rows += [[question(next(n)), answer(next(n), learn=False)] for _ in range(3)]
    rows += [[question(next(n)), answer(next(n)), question(next(n)), answer(next(n), quiet=True)] for _ in range(2)]
    rows += [[question(next(n)), answer(next(n), endless=True), question(next(n)), answer(next(n))] for _ in range(2)]
    rows += [[question(next(n), trained=True), answer(next(n))] for _ in range(4)]
    rows += [[{"role": "system", "content": "Be brief."}, *chat(next(n))] for _ in range(2)]
    rows += [{"messages": [question(next(n)), answer(next(n))], "tools": [TOOL]}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    rows += [
        [question(next(n)), answer(next(n), tool_calls=[call]), {"role": "tool", "content": "It rains."}, answer(1)]
    ]
    rows += [[question(next(n)), answer(next(n), reasoning_content="Seven times.")] for _ in range(5)]
    rows += [[question(next(n)), {"role": "critic", "content": "That is not a task."}, answer(next(n))]]
    rows += [[question(next(n)), answer(next(n)), question(next(n), name="Eva"), answer(next(n))] for _ in range(3)]
    rows += [[question(next(n)), {"role": "assistant", "content": "It ends with <|end|> in the text."}]]
    rows += [[question(next(n), begun_twice=True), answer(next(n))] for _ in range(2)]
    rows += [[{"role": "user", "content": f"<image>\nWhat is seen in picture {next(n)}?"}, answer(next(n))]]
    rows += [[question(next(n)), {"role": "assistant", "content": text}] for text in ("", "  ")]
    rows += [
        [question(next(n)), {"role": "assistant", "content": f"A broken {char} stands here."}] for char in "\ufffd\x07"
    ]
    rows += [chat(0), chat(0), chat(5)]
    rows += [[question(next(n)), {"role": "assistant", "content": "It loops. " * 200}]]
    counts = {
        "refused": 2, "fully-masked": 3, "masked-answers": 2, "untrained-ends": 2, "trained-prompts": 4,
        "dropped-system": 2, "dropped-tools": 1, "dropped-tool-calls": 1, "dropped-tool-results": 1,
        "dropped-reasoning": 5, "dropped-content": 1, "changed-prefixes": 3, "special-tokens": 1, "double-bos": 2,
        "tokens-without-media": 1, "empty-answers": 2, "odd-characters": 2, "repeated": 3, "overlong": 1,
        "beyond-positions": 1,
    }  # fmt: skip
    return rows, counts


def test_each_planted_fault_is_found_with_its_count(tmp_path: Path, tokenizer: Path) -> None:
    rows, counts = planted_rows()
    url = write_rows(tmp_path, rows)
    processor = ChatProcessor(with_template(tokenizer, PLANTED, bos_token="<|pad|>"))
    report = audit_of(url, processor, packing=PackingConfig(packing_length=512, overlong="keep"), positions=520)
    found = found_in(report)
    assert found.pop("byte-tokens", 0) <= 3  # of U+FFFD
    assert found == counts
    assert report.num_read == len(rows)
    for each in report.findings:
        assert len(each.examples) == min(3, each.count) or each.unit in ("tokens", "answers")
        for example in each.examples:
            assert NUM_CLEAN <= example.sample_id < len(rows)
            assert example.excerpt
    assert finding_of(report, "refused").examples[0].excerpt.startswith("its messages are not JSON")
    assert finding_of(report, "repeated").examples[2].excerpt == "equal to sample 5 of chats"
    verdicts = {each.check: each.verdict for each in report.findings}
    assert verdicts["dropped-reasoning"] == verdicts["changed-prefixes"] == verdicts["repeated"] == "look"
    assert verdicts["fully-masked"] == verdicts["trained-prompts"] == verdicts["dropped-tools"] == "wrong"
    assert report.verdict == "wrong"


def test_expected_findings_are_ok_and_keep_their_counts(tmp_path: Path, tokenizer: Path) -> None:
    rows, counts = planted_rows()
    url = write_rows(tmp_path, rows)
    processor = ChatProcessor(with_template(tokenizer, PLANTED, bos_token="<|pad|>"))
    report = audit([audited(url, processor)], num_workers=1, expected=list(counts))
    assert report.verdict == "ok"
    found = finding_of(report, "trained-prompts")
    assert (found.count, found.verdict, found.is_expected) == (4, "ok", True)
    with pytest.raises(ConfigError, match="--expect masked-rows: there is no such check: choose one of refused, "):
        audit([audited(url, processor)], expected=["masked-rows"])


def test_workers_and_a_limit_change_no_count(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    rows = [[question(number), answer(number, learn=number % 5 > 0)] for number in range(200)]
    url = write_rows(tmp_path, rows)
    one = audit_of(url, chat_processor)
    assert audit([audited(url, chat_processor)], num_workers=2).findings == one.findings
    assert found_in(one) == {"fully-masked": 40}
    begun: list[int] = []
    read: list[int] = []
    report = audit(
        [audited(url, chat_processor)], limit=50, num_workers=1, on_start=begun.append, on_samples=read.append
    )
    assert (report.num_read, report.num_samples, begun, sum(read)) == (50, 200, [50], 50)
    assert finding_of(report, "fully-masked").total == 50


# Failures told in public, in shapes of our own making.


class SearchingProcessor(ChatProcessor):
    """Trains on the text behind a marker that it looks for in the rendered text (unsloth#10852)."""

    marker = "<|assistant|>\nsays: "

    def process(self, sample: Sample) -> Processed:
        text = self._rendered(sample).marked[0]
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids)
        start = text.find(self.marker)
        first = len(ids) if start < 0 else encoding.char_to_token(start + len(self.marker)) or len(ids)
        return {"input_ids": ids, "labels": labels_of(ids, [(first, len(ids))])}


class AllProcessor(ChatProcessor):
    """Takes a template without marks for one that marks everything (Megatron-Bridge#3359)."""

    def process(self, sample: Sample) -> Processed:
        ids = super().process(sample)["input_ids"]
        return {"input_ids": ids, "labels": ids.copy()}


class ShiftedProcessor(ChatProcessor):
    """Finds the first answer alone, without its end (axolotl#2089)."""

    def process(self, sample: Sample) -> Processed:
        processed = super().process(sample)
        labels = processed["labels"]
        trained = np.flatnonzero(labels != IGNORED_LABEL)
        ends = np.flatnonzero(np.diff(trained) > 1)
        first = trained[: ends[0] + 1] if len(ends) else trained
        kept = np.full_like(labels, IGNORED_LABEL)
        kept[first[:-1]] = labels[first[:-1]]
        return {"input_ids": processed["input_ids"], "labels": kept}


def test_rows_whose_marker_is_not_found_are_fully_masked(tmp_path: Path, tokenizer: Path) -> None:
    says = [[question(number), {"role": "assistant", "content": f"says: it is {number}."}] for number in range(40)]
    url = write_rows(tmp_path, [*says, *([question(number), answer(number)] for number in range(40, 60))])
    report = audit_of(url, SearchingProcessor(load_tokenizer(str(tokenizer))))
    assert found_in(report) == {"fully-masked": 20}
    assert finding_of(report, "fully-masked").verdict == "wrong"


def test_prompts_that_a_missing_mark_trains_on_are_found(tmp_path: Path, tokenizer: Path) -> None:
    url = write_rows(tmp_path, [chat(number) for number in range(NUM_CLEAN)])
    report = audit_of(url, AllProcessor(load_tokenizer(str(tokenizer))))
    assert found_in(report) == {"trained-prompts": NUM_CLEAN}
    assert report.verdict == "wrong"


def test_a_template_that_ends_the_last_answer_otherwise_changes_its_prefixes(tmp_path: Path, tokenizer: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% if loop.last %}<|end|>{% else %}<|pad|>{% endif %}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
        "{% endfor %}"
    )
    rows = [chat(number) for number in range(NUM_CLEAN)]
    url = write_rows(tmp_path, rows)
    marked = audit_of(url, ChatProcessor(with_template(tokenizer, template)))
    num_long = sum(len(row) > 2 for row in rows)
    assert found_in(marked) == {"changed-prefixes": num_long}
    assert marked.verdict == "look"
    unmarked = template.replace("{% generation %}", "").replace("{% endgeneration %}", "").replace("m.", "messages[i].")
    unmarked = unmarked.replace("for m in messages", "for i in range(messages | length)")  # answers are not found
    report = audit_of(url, ChatProcessor(with_template(tokenizer, unmarked)))
    assert found_in(report)["refused"] == num_long
    assert "changes message 1 when messages follow" in finding_of(report, "refused").examples[0].excerpt
    assert report.verdict == "wrong"


def test_answers_and_ends_that_were_not_found_in_the_text_are_found(tmp_path: Path, tokenizer: Path) -> None:
    rows = [chat(number) for number in range(NUM_CLEAN)]
    url = write_rows(tmp_path, rows)
    report = audit_of(url, ShiftedProcessor(load_tokenizer(str(tokenizer))))
    num_long = sum(len(row) > 2 for row in rows)
    assert found_in(report) == {"masked-answers": num_long, "untrained-ends": NUM_CLEAN}
    assert report.verdict == "wrong"


def test_a_template_that_trains_on_no_end_is_found(tmp_path: Path, tokenizer: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    url = write_rows(tmp_path, [[question(number), answer(number)] for number in range(NUM_CLEAN)])
    with pytest.warns(UserWarning, match="does not mark the end of an answer"):
        processor = ChatProcessor(with_template(tokenizer, template))
    assert found_in(audit_of(url, processor)) == {"untrained-ends": NUM_CLEAN}


class BlindProcessor(ChatProcessor):
    """Leaves media out of its text and makes no tensors of them."""

    columns = ("messages", "media")  # type: ignore[assignment]

    def process(self, sample: Sample) -> Processed:
        messages = json.loads(sample["messages"])
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part.get("text", "") for part in message["content"])
        return super().process({"messages": json.dumps(messages)})


def test_media_without_tokens_are_found(tmp_path: Path, tokenizer: Path) -> None:
    def asked(number: int) -> Messages:
        image = {"type": "image", "mime": "image/png", "span": [0, 3]}
        text = {"type": "text", "text": f"What is seen in picture {number}?"}
        return [{"role": "user", "content": [image, text]}, answer(number)]

    url = write_rows(tmp_path, [*(chat(n) for n in range(30)), *(asked(n) for n in range(30, 37))], media=b"png")
    report = audit_of(url, BlindProcessor(load_tokenizer(str(tokenizer))))
    assert found_in(report) == {"media-without-tokens": 7}
    report = audit_of(url, ChatProcessor(load_tokenizer(str(tokenizer))))
    assert found_in(report) == {"refused": 7}
    assert "a message holds image, which the chat processor does not read" in report.findings[0].examples[0].excerpt


def test_media_and_their_tokens_are_compared_in_chats_of_a_media_processor(tmp_path: Path) -> None:
    save_processor(tmp_path / "processor")
    save_processor(tmp_path / "blind", template=MARKED.replace("<|vision_start|><|image_pad|><|vision_end|>", ""))
    image = ("image", picture(60, 40))
    samples = [stored(("user", [image, f"Picture {n}?"]), ("assistant", f"It is {n}.")) for n in range(12)]
    samples += [stored(("user", f"Without number {n}?"), ("assistant", f"Yes, {n}.")) for n in range(4)]
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(tmp_path / "clean")) as writer:
        for sample in samples:
            writer.write(sample)
    seeing = MultimodalProcessor.from_pretrained(str(tmp_path / "processor"))
    assert found_in(audit_of(str(tmp_path / "clean"), seeing)) == {}
    report = audit_of(str(tmp_path / "clean"), MultimodalProcessor.from_pretrained(str(tmp_path / "blind")))
    assert found_in(report) == {"media-without-tokens": 12}
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(tmp_path / "planted")) as writer:
        for sample in (*samples, stored(("user", "What is <|image_pad|>?"), ("assistant", "A token."))):
            writer.write(sample)
    found = found_in(audit_of(str(tmp_path / "planted"), seeing))
    assert found == {"special-tokens": 1, "tokens-without-media": 1}


def test_prompts_that_an_answer_quotes_are_no_trained_prompts(tmp_path: Path, tokenizer: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    )
    arguments = {"amount": 500, "from_currency": "USD", "to_currency": "EUR"}
    call = {"type": "function", "function": {"name": "convert", "arguments": arguments}}
    rows = [
        [question(1), {"role": "assistant", "content": f"You ask: {question(1)['content']} It ends."}],
        [
            {"role": "user", "content": f"Call it with {json.dumps(arguments)}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
    ]
    url = write_rows(tmp_path, rows)
    assert found_in(audit_of(url, ChatProcessor(with_template(tokenizer, template)))) == {}


# Repeats


def essay(number: int, *, changed: int = 0) -> Messages:
    """A chat of 120 words of its own, of which some are other words."""
    words = [f"{chr(97 + at % 26)}{(at + 7) * (number + 3) % 9973}" for at in range(120)]
    words[:changed] = [f"other{at}" for at in range(changed)]
    return [
        {"role": "system", "content": "You always answer in the same way, at length and with care. " * 40},
        {"role": "user", "content": " ".join(words[:20])},
        {"role": "assistant", "content": " ".join(words[20:])},
    ]


def test_near_duplicates_are_counted_apart_from_repeats(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    rows = [essay(number) for number in range(40)]
    rows += [essay(3), essay(5, changed=4), essay(7, changed=6), essay(9, changed=60)]
    url = write_rows(tmp_path, rows)
    assert found_in(audit_of(url, chat_processor)) == {"repeated": 1}
    report = audit_of(url, chat_processor, near=True)
    assert found_in(report) == {"repeated": 1, "near-duplicates": 2}
    found = finding_of(report, "near-duplicates")
    assert (found.rule, found.verdict) == ("look: 1% of a source's samples or more", "look")
    assert [(each.sample_id, each.like) for each in found.examples] == [(41, ("chats", 5, "")), (42, ("chats", 7, ""))]
    assert found.examples[0].excerpt.endswith("% of the pieces like sample 5 of chats")
    assert report.near_s > 0
    again = audit([audited(url, chat_processor, near=True)], num_workers=2)
    assert again.findings == report.findings


def test_a_sketch_estimates_the_similarity_of_texts() -> None:
    text = " ".join(essay(1)[2]["content"].split() * 3 + [f"w{number}" for number in range(300)])
    for share in (0.0, 0.02, 0.1, 0.3):
        other = text[: round(len(text) * (1 - share))] + "#" * round(len(text) * share)
        pieces = [{one[at : at + CHARACTERS] for at in range(len(one) - CHARACTERS + 1)} for one in (text, other)]
        exact = len(pieces[0] & pieces[1]) / len(pieces[0] | pieces[1])
        one, same = sketches_of([Codes.of_text(text), Codes.of_text(other)])
        assert similarity(one, same) == pytest.approx(exact, abs=0.12)
    assert not sketches_of([Codes.of_text("")]).any()
    salted = sketches_of([Codes.of_text(text), Codes.of_text(text, salt=1)])
    assert similarity(*salted) < 0.05


def test_samples_of_other_media_are_no_near_duplicates(tmp_path: Path) -> None:
    save_processor(tmp_path / "processor")
    asked = essay(1)[2]["content"]
    samples = [stored(("user", [("image", picture(60, 40 + n)), asked]), ("assistant", "A field.")) for n in range(3)]
    samples.append(stored(("user", [("image", picture(60, 40)), asked + " Say it."]), ("assistant", "A field.")))
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(tmp_path / "chats")) as writer:
        for sample in samples:
            writer.write(sample)
    seeing = MultimodalProcessor.from_pretrained(str(tmp_path / "processor"))
    report = audit_of(str(tmp_path / "chats"), seeing, near=True)
    assert found_in(report) == {"near-duplicates": 1}
    assert finding_of(report, "near-duplicates").examples[0].like == ("chats", 0, "")


# Lengths, texts, tokens and answers to compare


@pytest.mark.parametrize(
    ("overlong", "found", "verdict"),
    [
        ("error", {"overlong": 2, "beyond-positions": 2}, "wrong"),
        ("drop", {"overlong": 2}, "look"),
        ("keep", {"overlong": 2, "beyond-positions": 2}, "wrong"),
        ("truncate", {"overlong": 2, "cut-answers": 1}, "wrong"),
        ("split", {"overlong": 2}, "look"),
    ],
)
def test_samples_longer_than_a_pack_are_judged_by_the_rule_of_the_run(
    overlong: Any, found: dict[str, int], verdict: str, tmp_path: Path, chat_processor: ChatProcessor
) -> None:
    long = "It loops. " * 200
    rows = [
        *(chat(number) for number in range(30)),
        [{"role": "user", "content": long}, answer(1, learn=False)],
        [question(90), answer(90), {"role": "user", "content": long}, answer(91)],
    ]
    rows[-2].insert(0, answer(92))
    url = write_rows(tmp_path, rows)
    packing = PackingConfig(packing_length=256, overlong=overlong)
    report = audit_of(url, chat_processor, packing=packing, positions=256)
    assert found_in(report) == found
    assert report.verdict == verdict
    assert f"overlong: {overlong}" in finding_of(report, "overlong").what


def test_texts_are_audited_too(tmp_path: Path, tokenizer: Path) -> None:
    with MDSWriter(columns={"text": "str"}, out=str(tmp_path), hashes=["xxh3_64"]) as writer:
        for number in range(50):
            writer.write({"text": f"Text number {number} is plain."})
        for text in ("with <|end|> inside", "a bell \x07", "日本語の文章です。" * 3):
            writer.write({"text": text})
    processor = TextProcessor(load_tokenizer(str(tokenizer)))
    found = found_in(audit_of(str(tmp_path), processor))
    ids = processor.process({"text": "日本語の文章です。" * 3})["input_ids"].tolist()
    num_parts = sum("\ufffd" in processor.tokenizer.decode([each]) for each in ids)
    assert num_parts > 20
    assert found == {"special-tokens": 1, "odd-characters": 1, "byte-tokens": num_parts}


def test_stored_tokens_are_audited_with_and_without_a_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    loaded = load_tokenizer(str(tokenizer))
    samples = []
    for number in range(50):
        ids = np.array(loaded.encode(f"<|user|>\nNumber {number}?<|end|>\n", add_special_tokens=False).ids, np.int32)
        said = np.array(loaded.encode(f"It is {number}.<|end|>", add_special_tokens=False).ids, np.int32)
        num_cut = 1 if number < 4 else 0
        span = [[len(ids), len(ids) + len(said) - num_cut]]
        both = np.concatenate([ids, said])
        samples.append((both, np.array(span, np.int32)))
    write_samples(tmp_path, samples)
    assert found_in(audit_of(str(tmp_path), None)) == {}
    report = audit_of(str(tmp_path), None, tokenizer=str(tokenizer))
    assert found_in(report) == {"untrained-ends": 4}
    assert finding_of(report, "untrained-ends").total == 50
    long = [np.arange(number, number + 100, dtype=np.int32) for number in (0, 200, 5, 400)]
    write_samples(tmp_path / "long", [(ids, np.array([[0, 100]], np.int32)) for ids in long])
    assert found_in(audit_of(str(tmp_path / "long"), None, near=True)) == {"near-duplicates": 1}
    with pytest.raises(ConfigError, match="--near compares texts or tokens, and dataset chats holds image: leave"):
        audited(str(tmp_path), ImageProcessor(), near=True)


def pair(number: int, chosen: Messages, rejected: Messages) -> str:
    return json.dumps({"prompt": [question(number)], "chosen": chosen, "rejected": rejected})


def test_answers_to_compare_are_audited(tmp_path: Path, tokenizer: Path) -> None:
    def said(text: str) -> Messages:
        return [{"role": "assistant", "content": text}]

    processor = PreferenceProcessor(load_tokenizer(str(tokenizer)))
    clean = []
    for number in range(40):
        longer, shorter = said(f"It is {number}, and it stays there."), said(f"It was {number}.")
        clean.append(pair(number, longer, shorter) if number % 2 else pair(number, shorter, longer))
    url = write_rows(tmp_path / "clean", clean)
    assert found_in(audit_of(url, processor)) == {"length-bias": 20}
    assert audit_of(url, processor).verdict == "ok"
    faults = [pair(number, said("It is the same."), said("It is the same.")) for number in (100, 101)]
    asked = [[*said("Yes."), question(number), *said("It ends.")] for number in (200, 201)]
    faults += [pair(102, *asked), pair(103, said("It is much longer here."), said("")), pair(104, [], said("a"))]
    url = write_rows(tmp_path / "faults", [*clean[1::2], *faults])
    report = audit_of(url, processor, near=True)
    assert found_in(report) == {
        "equal-answers": 2, "differing-prompts": 1, "empty-answers": 1, "length-bias": 21, "refused": 1,
    }  # fmt: skip
    assert finding_of(report, "length-bias").verdict == "look"
    assert finding_of(report, "equal-answers").verdict == "wrong"


# The rules


def test_every_check_has_a_rule_and_a_verdict_that_follows_it() -> None:
    for check in CHECKS.values():
        assert check.rule.startswith(("wrong: ", "look: "))
        assert check.verdict(0, 1000) == "ok"
    check = Check("some", "thing")
    assert check.rule == "wrong: 1% of a source's samples or more; look: any"
    assert [check.verdict(count, 1000) for count in (1, int(1000 * MANY))] == ["look", "wrong"]
    assert CHECKS["length-bias"].verdict(19, 19) == "ok"
    assert with_overlong("error")["overlong"].verdict(1, 10_000) == "wrong"
    assert [*with_overlong("drop")] == [*NAMES]


def test_the_page_lists_each_check_with_its_rule() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{check.name}` | {check.what} | {check.rule} |" for check in CHECKS.values()]


def test_a_fault_of_one_source_is_not_hidden_by_others(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    good = write_rows(tmp_path / "good", [chat(number) for number in range(300)])
    bad = write_rows(tmp_path / "bad", [[question(n), answer(n, learn=n > 0)] for n in range(20)])
    datasets = []
    for url in (good, bad):
        dataset = PackedDataset([StreamConfig(remote=url)], processor=chat_processor)
        datasets.append(AuditedDataset.of(Path(url).name, dataset))
    report = audit(datasets, num_workers=1)
    found = finding_of(report, "fully-masked")
    assert (found.count, found.total, found.verdict) == (1, 320, "wrong")
    assert found.by_source == {"bad": (1, 20)}
    assert [*report.sources] == ["good", "bad"]


def test_samples_of_two_datasets_are_found_with_both_places(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    first = write_rows(tmp_path / "first", [*(chat(number) for number in range(30)), chat(4)])
    second = write_rows(tmp_path / "second", [chat(number) for number in (50, 7, 51, 7, 8, *range(60, 80))], media=b"")
    datasets = []
    for url, processor in ((first, chat_processor), (second, MediaColumn(chat_processor.tokenizer))):
        dataset = PackedDataset([StreamConfig(remote=url)], processor=processor)
        datasets.append(AuditedDataset.of(Path(url).name, dataset))
    report = audit(datasets, num_workers=1)
    assert found_in(report) == {"repeated": 2, "repeated-across": 3}
    found = finding_of(report, "repeated-across")
    assert (found.by_source, found.verdict) == ({"second": (3, 25)}, "wrong")
    assert found.examples[0] == ("second", 1, "", "equal to sample 7 of first", ("first", 7, ""))
    within = [(each.dataset, each.sample_id) for each in finding_of(report, "repeated").examples]
    assert within == [("first", 30), ("second", 3)]
    assert "repeated-across" not in {each.check for each in audit(datasets[:1], num_workers=1).findings}


class MediaColumn(ChatProcessor):
    """Reads the column of media, too, like the processors of media."""

    columns = ("messages", "media")  # type: ignore[assignment]


def test_quantiles_of_nothing_are_empty() -> None:
    assert quantiles_of(np.zeros(1001, np.int64)) == []
