from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.config import build_config, load_config
from lmms_stream.errors import ConfigError
from lmms_stream.plan.packing import PackingConfig

from .strategies import examples


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    learning_rate: float = 1e-3
    num_warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True, slots=True)
class Logging:
    folder: Path | None = None
    every_num_steps: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    optimizer: Optimizer = field(default_factory=Optimizer)
    logging: Logging | None = None
    old_logging: Optional[Logging] = None  # noqa: UP045 - the older spelling is accepted too
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    name: str
    train: Train = field(default_factory=Train)
    packing: PackingConfig | None = None


def load(folder: Path, text: str, overrides: Sequence[str] = ()) -> Run:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(Run, path, overrides)


def refused(message: str) -> str:
    """A pattern that takes this whole message, and any path before `run.yaml`."""
    return "^" + re.escape(message).replace(re.escape("<file>"), r"\S*run\.yaml") + "$"


def test_a_file_becomes_nested_frozen_dataclasses(tmp_path: Path) -> None:
    text = """
name: first
train:
  optimizer: {learning_rate: 0.01, betas: [0.8, 0.9]}
  logging: {folder: /logs}
packing: {packing_length: 4096}
"""
    assert load(tmp_path, text) == Run(
        name="first",
        train=Train(
            optimizer=Optimizer(learning_rate=0.01, betas=(0.8, 0.9)),
            logging=Logging(folder=Path("/logs")),
        ),
        packing=PackingConfig(packing_length=4096),
    )


def test_what_a_file_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    assert load(tmp_path, "name: first") == Run(name="first")


def test_an_optional_section_may_be_null(tmp_path: Path) -> None:
    assert load(tmp_path, "{name: first, train: {logging: null}, packing: ~}") == Run(name="first")


@pytest.mark.parametrize("text", ["1e-4", "'1e-4'", "1.0e-4", "0.0001", "'0.0001'"])
def test_numbers_written_as_strings_are_read_as_numbers(tmp_path: Path, text: str) -> None:
    run = load(tmp_path, f"{{name: first, train: {{optimizer: {{learning_rate: {text}, num_warmup_steps: '7'}}}}}}")
    assert run.train.optimizer == Optimizer(learning_rate=1e-4, num_warmup_steps=7)
    overridden = load(tmp_path, "name: first", [f"train.optimizer.learning_rate={text}"])
    assert overridden.train.optimizer.learning_rate == 1e-4


@examples(50)
@given(
    rate=st.floats(allow_nan=False, allow_infinity=False),
    steps=st.integers(-(1 << 62), 1 << 62),
    compiled=st.booleans(),
)
def test_overrides_set_the_value_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, rate: float, steps: int, compiled: bool
) -> None:
    overrides = [
        f"train.optimizer.learning_rate={rate!r}",
        f"train.optimizer.num_warmup_steps={steps}",
        f"train.compile={str(compiled).lower()}",
    ]
    train = load(tmp_path_factory.mktemp("config"), "name: first", overrides).train
    assert (train.optimizer.learning_rate, train.optimizer.num_warmup_steps, train.compile) == (rate, steps, compiled)


def test_overrides_change_and_add_settings_in_turn(tmp_path: Path) -> None:
    text = "{name: first, train: {optimizer: {learning_rate: 1, num_warmup_steps: 3}, logging: null}}"
    overrides = [
        "name=second=third",
        "train.optimizer.learning_rate=2",
        "train.optimizer.learning_rate=4",
        "train.logging.every_num_steps=5",
        "train.optimizer.betas=[0.5, 0.6]",
        "packing={packing_length: 64, overlong: drop}",
        "packing.window=8",
    ]
    assert load(tmp_path, text, overrides) == Run(
        name="second=third",
        train=Train(
            optimizer=Optimizer(learning_rate=4.0, num_warmup_steps=3, betas=(0.5, 0.6)),
            logging=Logging(every_num_steps=5),
        ),
        packing=PackingConfig(packing_length=64, overlong="drop", window=8),
    )


def test_an_empty_override_takes_an_optional_section_away(tmp_path: Path) -> None:
    assert load(tmp_path, "{name: first, packing: {packing_length: 8}}", ["packing="]).packing is None


@pytest.mark.parametrize(
    ("text", "key", "closest"),
    [
        ("{name: first, trian: {}}", "trian", "train"),
        ("{name: first, train: {optimiser: {}}}", "train.optimiser", "train.optimizer"),
        (
            "{name: first, train: {optimizer: {learning_rat: 1}}}",
            "train.optimizer.learning_rat",
            "train.optimizer.learning_rate",
        ),
        ("{name: first, train: {logging: {foldr: x}}}", "train.logging.foldr", "train.logging.folder"),
        ("{name: first, train: {old_logging: {foldr: x}}}", "train.old_logging.foldr", "train.old_logging.folder"),
        ("{name: first, packing: {windows: 3}}", "packing.windows", "packing.window"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_the_closest_key_and_the_file(
    tmp_path: Path, text: str, key: str, closest: str
) -> None:
    with pytest.raises(ConfigError, match=refused(f"<file>: unknown key '{key}': did you mean '{closest}'?")):
        load(tmp_path, text)


def test_a_key_that_is_not_text_is_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\S*run\.yaml: unknown key '7': choose one of name, train, packing$"):
        load(tmp_path, "{name: first, 7: 3}")


def test_an_unknown_key_in_an_override_is_refused_alike(tmp_path: Path) -> None:
    message = "<file>: unknown key 'train.optimizer.lerning_rate': did you mean 'train.optimizer.learning_rate'?"
    with pytest.raises(ConfigError, match=refused(message)):
        load(tmp_path, "name: first", ["train.optimizer.lerning_rate=1"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{name: first, train: {optimizer: {num_warmup_steps: many}}}",
            "train.optimizer.num_warmup_steps: Input should be a valid integer, "
            "unable to parse string as an integer, got 'many'",
        ),
        (
            "{name: first, train: {optimizer: {num_warmup_steps: 1.5}}}",
            "train.optimizer.num_warmup_steps: Input should be a valid integer, "
            "got a number with a fractional part, got 1.5",
        ),
        (
            "{name: first, train: {optimizer: {learning_rate: fast}}}",
            "train.optimizer.learning_rate: Input should be a valid number, "
            "unable to parse string as a number, got 'fast'",
        ),
        ("{name: 5}", "name: Input should be a valid string, got 5: write it in quotes"),
        ("{name: first, train: {precision: fp8}}", "train.precision: Input should be 'bf16' or 'fp32', got 'fp8'"),
        ("{train: {}}", "name: Field required"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_path_and_the_file(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=refused(f"<file>: {problem}")):
        load(tmp_path, text)


@dataclass(frozen=True, kw_only=True)
class Mixed:
    seed: int = 0
    rate: float | None = None
    flag: bool | int = False
    weights: dict[int, dict[str, float]] | dict[str, float] | None = None
    counts: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{seed: true}", "seed must be a number, got True"),
        ("{rate: no}", "rate must be a number, got False"),
        ("{counts: [1, yes]}", "counts.1 must be a number, got True"),
        ("{weights: {a: on}}", "weights.a must be a number, got True"),
        ("{weights: {0: {a: 1}, true: {a: 2}}}", "weights: a key must be a number, got True"),
        ("{weights: {0: {a: 1}, 2.5: {a: 2}}}", "weights: a key must be a whole number, got 2.5"),
    ],
)
def test_truth_values_are_no_numbers_and_phases_begin_at_whole_steps(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=refused(f"<file>: {problem}")):
        load_config(Mixed, path)


def test_truth_values_stay_where_they_are_meant(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{flag: yes, weights: {0: {a: 1}, 10.0: {a: 2}}}")
    assert load_config(Mixed, path) == Mixed(flag=True, weights={0: {"a": 1.0}, 10: {"a": 2.0}})


@pytest.mark.parametrize("section", ["7", "[1, 2]", "text"])
def test_a_value_in_place_of_a_section_is_refused(tmp_path: Path, section: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: train\.optimizer: .*, got "):
        load(tmp_path, f"{{name: first, train: {{optimizer: {section}}}}}")


def test_all_wrong_values_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: name: .*, got 5: .*; train\.compile: .*, got 'perhaps'$"):
        load(tmp_path, "{name: 5, train: {compile: perhaps}}")


def test_a_value_that_a_section_itself_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packing_length must be from 1 to 1073741824 tokens, got 0"):
        load(tmp_path, "{name: first, packing: {packing_length: 0}}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=refused("<file>: no such config file: check the path")):
        load_config(Run, path)


@pytest.mark.parametrize("text", ["name: [1", "a: b: c", "\tname: x"])
def test_a_file_that_is_not_yaml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^\S*run\.yaml: not a readable YAML file: .+") as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ConfigError, match=r"^\S*run\.yaml: not a readable YAML file: .*codec can't decode"):
        load_config(Run, path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"^\S*run\.yaml: not a readable YAML file: .*Is a directory"):
        load_config(Run, path)


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("[1, 2]", "list"), ("just text", "str")])
def test_a_file_without_a_mapping_at_the_top_is_refused(tmp_path: Path, text: str, found: str) -> None:
    message = (
        f"<file>: expected a mapping of settings at the top, found {found}: write sections, as docs/settings.md and "
    )
    message += "docs/lmms_engine.md have them"
    with pytest.raises(ConfigError, match=refused(message)):
        load(tmp_path, text)


@pytest.mark.parametrize("override", ["train.compile", "", "=true", "--fast"])
def test_an_override_without_key_or_equals_sign_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=refused(f"override {override!r} is not of the form key.sub=value")):
        load(tmp_path, "name: first", [override])


def test_an_override_whose_value_is_not_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override 'name=\[1': the value is not YAML: .+") as caught:
        load(tmp_path, "name: first", ["name=[1"])
    assert "\n" not in str(caught.value)


def test_an_override_below_a_plain_value_is_refused(tmp_path: Path) -> None:
    message = "override 'name.first=1': 'name' holds a value, not a mapping"
    with pytest.raises(ConfigError, match=refused(message)):
        load(tmp_path, "name: first", ["name.first=1"])


def test_a_mapping_from_elsewhere_is_checked_under_the_name_of_its_source() -> None:
    assert build_config(Optimizer, {"learning_rate": "1e-4"}, source="the checkpoint") == Optimizer(learning_rate=1e-4)
    with pytest.raises(ConfigError, match=refused("the checkpoint: unknown key 'beta': did you mean 'betas'?")):
        build_config(Optimizer, {"beta": 1}, source="the checkpoint")


def test_the_given_mapping_is_left_unchanged() -> None:
    data = {"name": "first", "train": {"optimizer": {"learning_rate": "1e-4"}}}
    build_config(Run, data, source="here")
    assert data == {"name": "first", "train": {"optimizer": {"learning_rate": "1e-4"}}}


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size must be at least 1, got {self.size}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    listed: list[Inner] = field(default_factory=list)
    named: dict[str, Inner] | None = None
    free: dict[str, Any] = field(default_factory=dict)


def test_unknown_keys_inside_lists_and_mappings_are_found() -> None:
    with pytest.raises(ConfigError, match=r"x: unknown key 'listed\.1\.sice': did you mean 'listed\.1\.size'\?"):
        build_config(Outer, {"listed": [{}, {"sice": 3}]}, source="x")
    with pytest.raises(ConfigError, match=r"x: unknown key 'named\.a\.sice': did you mean 'named\.a\.size'\?"):
        build_config(Outer, {"named": {"a": {"sice": 3}}}, source="x")
    built = build_config(Outer, {"named": {"a": {"size": 3}}, "free": {"any": {"thing": 1}}}, source="x")
    assert built == Outer(named={"a": Inner(size=3)}, free={"any": {"thing": 1}})


def test_a_rule_of_a_section_is_reported_with_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^run\.yaml: size must be at least 1, got 0$"):
        build_config(Outer, {"listed": [{"size": 0}]}, source="run.yaml")
