"""What is rendered and learnt is what transformers renders and masks, wherever that is right."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import IGNORED_LABEL, or_error, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor, Learn
from lmms_stream.processors.chat_template import ChatTemplate, Written
from lmms_stream.processors.text import TextProcessor
from lmms_stream.processors.tokenizers import FastTokenizer, load_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..strategies import examples

END = "{{ message['content'] }}<|end|>"
TEMPLATES = {
    "ours": (
        "{% for message in messages %}<|{{ message['role'] }}|>\n"
        "{% if message['role'] == 'assistant' %}{% generation %}" + END + "{% endgeneration %}\n"
        "{% else %}" + END + "\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "with tools, a namespace and loop controls": (
        "{%- set seen = namespace(count=0) %}{{ eos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
        "{%- for message in messages %}{%- if message.content is none %}{%- continue %}{%- endif %}\n"
        "    {%- set seen.count = seen.count + 1 %}{{ seen.count }} {{ message.role | upper }}: \n"
        "    {%- if message.role == 'assistant' %}{%- generation %}{{ message.content | trim }}<|end|>\n"
        "    {%- endgeneration -%}{%- else %}{{ message['content'] }}{%- endif %}\n{%- endfor %}"
    ),
    "marks in parts": (
        "{% for message in messages %}<|{{ message.role }}|>{% for word in (message.content or '').split(' ') %}"
        "{% if message.role == 'assistant' and loop.index0 % 2 %}{% generation %}{{ word }} {% endgeneration %}"
        "{% else %}{{ word }} {% endif %}{% endfor %}{% endfor %}<|end|>"
    ),
}
DROPS_THOUGHTS = (  # of all but the last answer, as Qwen3's does
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = TEMPLATES["ours"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
said = st.text(st.characters(codec="utf-8"), max_size=40)
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("system", "user", "assistant")), "content": said}),
    min_size=1, max_size=6,
)  # fmt: skip
tool_lists = st.none() | st.just([{"type": "function", "function": {"name": "f", "description": "é <b>"}}])


def with_template(tokenizer: Path, template: Any) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = template
    return loaded


def stored(messages: Any, tools: Any = None) -> dict[str, str]:
    return {"messages": json.dumps({"messages": messages, "tools": tools} if tools else messages)}


def learnt(processor: ChatProcessor, sample: dict[str, str]) -> str:
    processed = processor.process(sample)
    assert processor.measure(sample) == len(processed["input_ids"])
    return processor.tokenizer.decode(processed["labels"][processed["labels"] != IGNORED_LABEL])


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_what_is_learnt_are_those_of_transformers(tokenizer: Path, name: str) -> None:
    theirs = with_template(tokenizer, TEMPLATES[name])
    ours = ChatProcessor(theirs)

    @examples(120)
    @given(messages=chats, tools=tool_lists)
    def check(messages: list[dict[str, Any]], tools: Any) -> None:
        expected: Any = theirs.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        processed = ours.process(stored(messages, tools))
        assert processed["input_ids"].tolist() == expected["input_ids"]
        mask = np.array(expected["assistant_masks"], bool)
        assert np.array_equal(processed["labels"], np.where(mask, expected["input_ids"], IGNORED_LABEL))
        assert ours.measure(stored(messages, tools)) == len(expected["input_ids"])
        ((ids, spans),) = ours.tokenize_all([stored(messages, tools)])  # type: ignore[misc]
        assert ids.tolist() == expected["input_ids"]
        assert [token for start, stop in spans for token in range(start, stop)] == np.flatnonzero(mask).tolist()
        assert all(stop < following for (_, stop), (following, _) in pairwise(spans))

    check()


def test_a_mark_at_the_very_start_is_learnt_too(tokenizer: Path) -> None:
    template = "{% for message in messages %}{% generation %}" + END + "{% endgeneration %}{% endfor %}"
    processor = ChatProcessor(with_template(tokenizer, template))
    assert learnt(processor, stored([{"role": "assistant", "content": "one"}])) == "one<|end|>"


def test_marks_whose_place_cannot_be_told_are_refused(tokenizer: Path) -> None:
    template = (
        "{% macro say(message) %}so: {% generation %}" + END + "{% endgeneration %}{% endmacro %}"
        "{% for message in messages %}{{ say(message) }}{% endfor %}"
    )
    processor = ChatProcessor(with_template(tokenizer, template))
    with pytest.raises(ConfigError, match=r"has \{% generation %\} in a macro or in \{% set %\}"):
        processor.process(stored([{"role": "assistant", "content": "one"}]))


def test_of_a_template_without_marks_the_answers_are_learnt(tokenizer: Path) -> None:
    processor = ChatProcessor(with_template(tokenizer, UNMARKED))
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    assert learnt(processor, stored(messages)) == "two<|end|>four<|end|>"
    messages[2]["learn"] = False
    assert learnt(processor, stored(messages)) == "four<|end|>"
    messages[4]["learn"] = False
    assert learnt(processor, stored(messages)) == ""


def test_a_template_that_changes_earlier_answers_trains_them_as_the_whole_conversation_shows_them(
    tokenizer: Path,
) -> None:
    template = UNMARKED.replace("{% else %}", "{% if loop.last %}thought {% endif %}{% else %}", 1).replace(
        "{% if message['role'] == 'assistant' %}", "{% if loop.last %}last {% endif %}{% if message['role'] == 'x' %}"
    )
    processor = ChatProcessor(with_template(tokenizer, template))
    answer = {"role": "assistant", "content": "two"}
    follow_up = {"role": "user", "content": "three"}
    assert learnt(processor, stored([follow_up, answer, follow_up])) == "two<|end|>"
    by_index = template.replace("message in messages", "i in range(messages | length)").replace(
        "message[", "messages[i]["
    )
    unproven = ChatProcessor(with_template(tokenizer, by_index))
    for method in (unproven.process, unproven.measure):
        with pytest.raises(DataError, match="changes message 0 when messages follow, so the assistant's words cannot"):
            method(stored([answer, follow_up]))


def test_of_a_template_that_drops_earlier_thoughts_all_answers_or_the_last_can_be_learnt(tokenizer: Path) -> None:
    processor = ChatProcessor(with_template(tokenizer, DROPS_THOUGHTS))
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    assert learnt(processor, stored(messages)) == "two<|end|><think></think>four<|end|>"
    last = ChatProcessor(with_template(tokenizer, DROPS_THOUGHTS), learn="last")
    assert learnt(last, stored(messages)) == "<think></think>four<|end|>"
    assert processor_fingerprint(last) == processor_fingerprint(processor)  # lengths are the same
    messages[1]["learn"] = False
    assert learnt(processor, stored(messages)) == "<think></think>four<|end|>"


@pytest.mark.parametrize("template", [TEMPLATES["ours"], UNMARKED])
def test_the_last_answer_alone_is_learnt_where_the_processor_says_so(tokenizer: Path, template: str) -> None:
    turns = [("user", "one"), ("assistant", "two"), ("assistant", "three"), ("user", "four"), ("assistant", "five")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    loaded = with_template(tokenizer, template)
    everything, last = (ChatProcessor(loaded, learn=learn) for learn in get_args(Learn))
    assert learnt(everything, stored(messages)) == "two<|end|>three<|end|>five<|end|>"
    assert learnt(last, stored(messages)) == "five<|end|>"
    assert learnt(last, stored(messages[:-1])) == "three<|end|>"
    assert learnt(last, stored(messages[:1])) == ""
    messages[4]["learn"] = False
    assert learnt(last, stored(messages)) == ""


def test_what_is_learnt_of_chats_is_a_setting_of_the_processor(tokenizer: Path, tmp_path: Path) -> None:
    loaded = with_template(tokenizer, UNMARKED)
    loaded.save_pretrained(tmp_path / "unmarked")
    assert ProcessorConfig(tokenizer=str(tmp_path / "unmarked")).build().learn == "all"  # type: ignore[attr-defined]
    built = ProcessorConfig(tokenizer=str(tmp_path / "unmarked"), learn="last").build()
    assert isinstance(built, ChatProcessor)
    assert built.learn == "last"
    with pytest.raises(ConfigError, match=r"processor\.learn is for chats, and processor\.type is text: leave"):
        ProcessorConfig(type="text", tokenizer="x", learn="last")
    with pytest.raises(ConfigError, match=r"processor\.learn must be all or last, got 'first'"):
        ChatProcessor(loaded, learn="first")  # type: ignore[arg-type]


def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(tokenizer: Path) -> None:
    templates = {"default": TEMPLATES["ours"], "tool_use": "{{ tools | tojson }}" + TEMPLATES["ours"]}
    processor = ChatProcessor(with_template(tokenizer, templates))
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = processor.process(stored(messages, tools))["input_ids"]
    assert processor.tokenizer.decode(with_tools).startswith(json.dumps(tools) + "<|user|>")
    assert processor.tokenizer.decode(processor.process(stored(messages))["input_ids"]).startswith("<|user|>")
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatProcessor(with_template(tokenizer, {"tool_use": TEMPLATES["ours"]}))


def test_the_day_that_a_template_is_told_never_changes(tokenizer: Path) -> None:
    dated = "Today is {{ strftime_now('%d %b %Y') }}. " + TEMPLATES["ours"]
    processor = ChatProcessor(with_template(tokenizer, dated))
    ids = processor.process(stored([{"role": "assistant", "content": "x"}]))["input_ids"]
    assert processor.tokenizer.decode(ids).startswith("Today is 26 Jul 2024. ")
    assert processor.description["today"] == "2024-07-26"


def test_padding_and_truncation_of_a_tokenizer_change_nothing(tokenizer: Path) -> None:
    plain, cutting = (ChatProcessor(with_template(tokenizer, TEMPLATES["ours"])) for _ in range(2))
    loaded = with_template(tokenizer, TEMPLATES["ours"])
    loaded.backend_tokenizer.enable_truncation(5)
    loaded.backend_tokenizer.enable_padding(length=64)
    cutting = ChatProcessor(loaded)
    sample = stored([{"role": "assistant", "content": "many words " * 20}])
    assert cutting.process(sample)["input_ids"].tolist() == plain.process(sample)["input_ids"].tolist()
    assert processor_fingerprint(cutting) == processor_fingerprint(plain)
    assert loaded.backend_tokenizer.truncation["max_length"] == 5  # the user's own is left as it is


def test_special_tokens_without_a_name_are_known_in_each_version_of_transformers(tokenizer: Path) -> None:
    """They are in fingerprints: lengths that one version measured are those that another asks for."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer, additional_special_tokens=["<|user|>"])
    expected = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|user|>"]}
    assert FastTokenizer.of(loaded).special_tokens == expected


def test_special_tokens_in_a_text_are_text_where_the_tokenizer_says_so(tokenizer: Path) -> None:
    splitting = with_template(tokenizer, TEMPLATES["ours"])
    splitting.split_special_tokens = True
    processor = ChatProcessor(splitting)
    sample = stored([{"role": "assistant", "content": "<|end|>"}])
    messages = json.loads(sample["messages"])
    assert processor.process(sample)["input_ids"].tolist() == splitting.apply_chat_template(messages, return_dict=False)
    assert processor_fingerprint(processor) != processor_fingerprint(ChatProcessor(load_tokenizer(str(tokenizer))))


@pytest.mark.filterwarnings("ignore:the chat template of tokenizer")
def test_characters_that_become_no_token_are_passed_over() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.normalizer = normalizers.Replace(".", "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", eos_token="b")
    loaded.chat_template = "b {% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %} b "
    loaded.chat_template += "{% endfor %}"
    processor = ChatProcessor(loaded)
    for said_, expected in ((". a .", [-100, 0, -100]), (" a a ", [-100, 0, 0, -100]), (" . ", [-100, -100])):
        assert processor.process(stored([{"role": "assistant", "content": said_}]))["labels"].tolist() == expected


@pytest.mark.parametrize("kind", [ChatProcessor, TextProcessor])
def test_a_processor_is_sent_to_a_process_that_needs_no_torch(tokenizer: Path, tmp_path: Path, kind: Any) -> None:
    processor = kind.from_pretrained(str(tokenizer))
    sample = stored([{"role": "user", "content": "é"}, {"role": "assistant", "content": "x"}]) | {"text": "one é"}
    (tmp_path / "processor").write_bytes(pickle.dumps(processor))
    program = (
        "import json, pickle, sys; processor = pickle.load(open(sys.argv[1], 'rb'));"
        "tokens = processor.process(json.loads(sys.argv[2]))['input_ids'].tolist();"
        "print(json.dumps([tokens, 'torch' in sys.modules or 'transformers' in sys.modules]))"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "processor"), json.dumps(sample)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [processor.process(sample)["input_ids"].tolist(), False]


def test_a_tokenizer_is_the_same_whichever_process_loads_it(tokenizer: Path, tmp_path: Path) -> None:
    program = (
        "import pickle, sys; from lmms_stream.processors.tokenizers import load_tokenizer;"
        "loaded = load_tokenizer(sys.argv[1]); assert not {'torch', 'transformers'} & set(sys.modules);"
        "open(sys.argv[2], 'wb').write(pickle.dumps(loaded))"
    )
    there = tmp_path / "there"
    arguments = [sys.executable, "-c", program, str(tokenizer), str(there)]
    subprocess.run(arguments, capture_output=True, timeout=60, check=True)
    loaded = pickle.loads(there.read_bytes())
    assert isinstance(loaded, FastTokenizer)
    assert loaded == load_tokenizer(str(tokenizer))
    arguments[3] = str(tmp_path / "absent")
    failed = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    assert f"ConfigError: tokenizer {arguments[3]!r} cannot be loaded: " in failed.stderr


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__", "messages.append(1)", "messages[0].update({})", "messages[0].pop('role')", "''['__class__']",
        "namespace(a=1).__init__", "loop.__init__", "'{0.__class__}'.format(1)", "'{a.__class__}'.format_map({'a': 1})",
        "(1).real.__class__", "messages[0]['clear']()", "(''|attr('__class__'))", "''.format.__self__",
    ],
)  # fmt: skip
def test_a_template_reaches_no_more_than_in_jinjas_sandbox(expression: str) -> None:
    written = f"{{% for message in messages %}}{{{{ {expression} }}}}{{% endfor %}}"
    messages = [{"role": "user", "content": "Hi"}]
    ours = or_error(ChatTemplate(written, {}).render, messages)
    try:
        theirs = ImmutableSandboxedEnvironment().from_string(written).render(messages=messages)
    except SecurityError:
        assert isinstance(ours, DataError)
    else:
        assert isinstance(ours, Written)
        assert ours.text == theirs
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "expression",
    [
        "message.items() | list", "message.keys() | list", "message.none", "message.get('x', 3)", "message.content.x",
        "'a-b'.split('-')", "'{}:{}'.format(1, a)", "'{a}'.format_map({'a': 2})", "loop.index0 ~ loop.last ~ loop.x",
        "(1).real", "messages.count(message)", "n.a ~ n.b", "message['keys']", "'%s' % message.role", "true.real",
    ],
)  # fmt: skip
def test_values_are_read_as_in_jinjas_sandbox(expression: str) -> None:
    written = f"{{% set n = namespace(a=1) %}}{{% for message in messages %}}{{{{ {expression} }}}}{{% endfor %}}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    messages[1]["keys"] = [1]
    theirs = ImmutableSandboxedEnvironment().from_string(written).render(messages=messages)
    assert ChatTemplate(written, {}).render(messages).text == theirs
