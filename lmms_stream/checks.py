"""Check what users give: numbers, paths, and the collate_fn of a DataLoader."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

from .errors import ConfigError


class NamedLikeTheirs:
    """Class with the name and members of another project's class.

    NOT_CALLED: member of their class that nothing here calls -> remedy. A subclass with such a member is an error,
    unless the subclass overrides the member CALLER, and may call any member there.
    """

    NOT_CALLED: ClassVar[Mapping[str, str]] = {}
    CALLER: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        ours = next(each for each in cls.__mro__ if each.__module__.startswith("lmms_stream."))
        calls_own = getattr(cls, cls.CALLER, None) is not getattr(ours, cls.CALLER, None)
        for name, remedy in () if ours is cls or calls_own else cls.NOT_CALLED.items():
            own, known = (inspect.getattr_static(each, name, None) for each in (cls, ours))
            if own is not known:
                raise ConfigError(f"{cls.__name__} overrides {name}, which nothing here calls: {remedy}")


_PLAIN = {"int", "float", "bool", "str", "None"}  # types of fields that are checked; others have checks of their own
_MAY_BE_INFINITE = ("max_grad_norm", "spike")  # limits: infinity is none
_LONGEST_S = 1e9  # 31 years: locks and process groups take no more
_CALLED = {"int": "a whole number", "float": "a number", "bool": "True or False"}


def check_fields(config: Any, *, prefix: str = "", paths: Sequence[str] = ()) -> None:
    """Check the numbers and truth values of a dataclass by the types of its fields; NumPy's whole numbers become int.

    A field whose default is None may be None. prefix: stands before names in the ConfigError. paths: names of fields
    that hold a path, a URL or the name of a repository, or None: file URLs become paths.
    """
    for name in paths:
        value = getattr(config, name)
        if value == "" != type(config).__dataclass_fields__[name].default:  # such as an unset variable of a shell
            raise ConfigError(f"{prefix}{name} is an empty text: write a path, or . for the current folder")
        if value is not None and (path := plain_path(f"{prefix}{name}", value)) != value:
            object.__setattr__(config, name, path)
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        checked = of_type(f"{prefix}{each.name}", value, each.type, each.default)
        if checked is not value:
            object.__setattr__(config, each.name, checked)


def check_limits(
    config: Any, prefix: str, *, at_least_1: Sequence[str] = (), at_least_0: Sequence[str] = (),
    above_0: Sequence[str] = (), seconds: Sequence[str] = (),
) -> None:  # fmt: skip
    """ConfigError for a number below its limit, and for infinity without a maximum; None passes.

    seconds: limits of waits, above 0.
    """
    for name in (*at_least_1, *at_least_0, *above_0, *seconds):
        value = getattr(config, name)
        if value is None:
            continue
        if name in seconds:
            check_seconds(f"{prefix}{name}", value)
        if value == math.inf and name not in _MAY_BE_INFINITE:
            raise ConfigError(f"{prefix}{name} must be a finite number, got {value}")
        if name in at_least_1 and value < 1:
            raise ConfigError(f"{prefix}{name} must be at least 1, got {value}")
        if name in at_least_0 and not value >= 0:  # NaN is refused too
            raise ConfigError(f"{prefix}{name} must be 0 or more, got {value}")
        if name in above_0 and not value > 0:
            raise ConfigError(f"{prefix}{name} must be above 0, got {value}")


def check_seconds(name: str, value: float) -> None:
    """ConfigError for a limit of a wait beyond the range of the system's clocks, such as infinity."""
    if not 0 < value <= _LONGEST_S:
        raise ConfigError(f"{name} must be above 0, and at most {_LONGEST_S:,.0f} seconds, got {value}")


def shortened_wait(seconds: float) -> float:
    """Cap a limit of a wait at the maximum of check_seconds, for interfaces with infinite waits."""
    return min(float(seconds), _LONGEST_S)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], *, prefix: str = "") -> None:
    """Check the numbers and truth values among the arguments of a function, by name, by annotations or defaults."""
    for name, each in inspect.signature(function).parameters.items():
        if name in given:
            annotation = type(each.default) if each.annotation is each.empty else each.annotation
            of_type(f"{prefix}{name}", given[name], annotation, each.default)


def whole_number(name: str, value: Any, *, least: int) -> int:
    """The value as an int; ConfigError for another type, and for less than `least`."""
    number = int(_checked(name, value, ["int"]))
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, got {number}")
    return number


PathOrText = TypeVar("PathOrText", bound=str | Path)


def plain_path(name: str, path: PathOrText) -> PathOrText:
    """Return the path that a file URL names, or one below ~; other paths, URLs and names of repositories as they are.

    Raises ConfigError, which begins with `name`, for a file URL with a host, and for what is not text or a Path.

    >>> [plain_path("path", path) for path in ("file:///data/a%20b", "s3://bucket/data", "data")]
    ['/data/a b', 's3://bucket/data', 'data']
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"{name} must be a path or a URL, got {path!r}")
    text = str(path)
    if text == "~" or text.startswith("~/"):
        home = Path(text).expanduser()  # as a shell does, which YAML and Python do not
        return home if isinstance(path, Path) else str(home)  # type: ignore[return-value]
    if not text.startswith("file:/"):
        return path
    rest = text.removeprefix("file:").removeprefix("//")  # a Path of a file URL has one slash
    if not rest.startswith("/"):
        raise ConfigError(f"{name} {path} has a host or no whole path: write file:///…, or a path")
    plain: Any = type(path)(unquote(rest)) if isinstance(path, Path) else unquote(rest)  # an enum of texts is a text
    return plain  # type: ignore[no-any-return]


def local_path(name: str, path: str | Path) -> Path:
    """Return the path of this machine that a path or a file URL names; ConfigError for another URL."""
    plain = plain_path(name, path)
    if "://" in str(plain):
        raise ConfigError(f"{name} {path} is a URL, and a path of this machine belongs there: write a path")
    return Path(plain)


# The collate_fn of a DataLoader, which the part of torch.utils.data that calls the dataset has, whatever its name.

_DEFAULTS = {  # for what no collate_fn and no data_collator is given: package, its public name -> whose default
    ("torch.utils.data", "default_collate"): "DataLoader",
    ("transformers", "default_data_collator"): "Trainer",
    ("transformers", "DataCollatorWithPadding"): "Trainer",
}
_WRAPPED = {"RemoveColumnsCollator": "data_collator", "_Counted": "collate_fn"}  # of transformers, StreamingDataLoader
_TRAINER = "pass the dataset to FSDP2SFTTrainer of lmms_stream, which takes the same arguments"
_MAX_FRAMES = 8  # between a dataset and the fetcher: accelerate's shards of it, and generators


def check_collator(owner: str, *, loader: str, trainer: str = _TRAINER) -> int:
    """Raise ConfigError if a DataLoader calls the caller, and joins samples by torch's or transformers' default.

    Return the batch_size of a DataLoader without workers around the caller, otherwise 1.
    owner: the class of the dataset. loader, trainer: what to do instead with a DataLoader, and with transformers'
    Trainer. Other collators, and a DataLoader with batch_size None, pass.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
            fetcher: Any = frame.f_locals.get("self")
            if hasattr(fetcher, "auto_collation") and hasattr(fetcher, "collate_fn"):
                break
        if frame.f_back is None:
            return 1
        frame = frame.f_back
    else:
        return 1
    collator = fetcher.collate_fn if fetcher.auto_collation else None
    while inside := _WRAPPED.get(type(collator).__name__):
        collator = getattr(collator, inside)
    named = collator if inspect.isfunction(collator) else type(collator)
    default = next((whose for (package, name), whose in _DEFAULTS.items() if named is _loaded(package, name)), None)
    if default == "DataLoader":
        raise ConfigError(f"a DataLoader without a collate_fn cannot join what {owner} gives: {loader}")
    if default == "Trainer":
        raise ConfigError(f"transformers' Trainer without a data_collator cannot join what {owner} gives: {trainer}")
    iterator: Any = frame.f_back and frame.f_back.f_back and frame.f_back.f_back.f_locals.get("self")
    return getattr(getattr(iterator, "_index_sampler", None), "batch_size", None) or 1


def _loaded(package: str, name: str) -> Any:
    """Return what a package that is imported already has by this name; None for another."""
    return getattr(sys.modules.get(package), name, None)


def of_type(name: str, value: Any, annotation: Any, default: Any) -> Any:
    """The value, checked if the annotation is of numbers and truth values; None passes where it is the default."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = text.replace(" ", "").split("|")
    if not _PLAIN.issuperset(kinds) or not _CALLED.keys() & {*kinds} or (value is None and default is None):
        return value
    return _checked(name, value, kinds)


def _checked(name: str, value: Any, kinds: list[str]) -> Any:
    is_truth = type(value).__name__ in ("bool", "bool_")  # NumPy's, too
    if ("str" in kinds and not is_truth and not isinstance(value, Real)) or ("None" in kinds and value is None):
        return value
    if is_truth and "bool" in kinds:
        return bool(value)
    if not is_truth and "int" in kinds and hasattr(value, "__index__"):
        with suppress(TypeError):  # an array or a tensor of fractions
            return value if type(value) is int else index(value)
    if not is_truth and "float" in kinds and isinstance(value, Real) and value == value:  # no NaN
        return plain_number(value)
    called = " or ".join(_CALLED[kind] for kind in kinds if kind in _CALLED)
    raise ConfigError(f"{name} must be {called}, got {value!r}{_remedy(value, kinds)}")


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def plain_number(number: Any) -> int | float:
    """Convert a number of any library, such as NumPy, to a Python number."""
    return number if isinstance(number, int | float) else float(number)


def _remedy(value: Any, kinds: list[str]) -> str:
    """Advice for a number in the wrong form."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    if type(value).__name__ in ("bool", "bool_") or not math.isfinite(number):
        return ""
    if number == int(number) and "bool" not in kinds:
        return f": write {int(number)}"
    return f": write {number}" if "float" in kinds else ""


# Sizes in bytes as people write and read them: "500mb", "1.5 GiB".


_UNITS = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def parse_bytes(text: int | str, *, name: str = "cache_limit") -> int:
    """A number of bytes: an int, or text as "500mb" or "1.5gb" (of 1024, as MosaicML Streaming counts).

    name: of what is given, for the ConfigError when it is no such number.

    >>> parse_bytes("1.5kb")
    1536
    """
    number = str(text).strip().lower()
    unit = next((unit for unit in ("kb", "mb", "gb", "tb", "b") if number.endswith(unit)), "")
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{name} {text!r} is not a number of bytes: write it as 500mb or 1.5gb")
    return size


def shown_bytes(num_bytes: float) -> str:
    """A number of bytes for people, in units of 1024.

    >>> shown_bytes(1536), shown_bytes(12)
    ('1.5 KiB', '12 bytes')
    """
    if num_bytes < 1024:
        return f"{num_bytes:,.0f} bytes"
    steps = min(4, (int(num_bytes).bit_length() - 1) // 10)
    return f"{num_bytes / 1024**steps:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[steps - 1]}"
