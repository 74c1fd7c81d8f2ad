"""Options of a conversion, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

from ..checks import check_fields, parse_bytes
from ..errors import ConfigError, did_you_mean
from ..processors import ProcessorChoice
from ..processors.base import Processor
from ..processors.not_shown import OnDropped
from ..processors.text import TokensProcessor
from .rows.options import SchemaOptions
from .sources.csv import delimited
from .sources.table import Delimited
from .sources.units import UNIT_BYTES
from .writing.encoded_units import OnError
from .writing.encoding import MAX_SHARD_BYTES, check_compression
from .writing.shards import Cut

DEFAULT_SHARD_BYTES = 1 << 26
MAX_CONCAT = 1 << 26  # tokens; if each is a document, the sample has 1 GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """Options of a conversion; all except unit_bytes change the output.

    format: of all sources (default: by content). quote: of fields of CSV and TSV, "none", "double" or the character
    (default: double in CSV, none in TSV). schema: see SchemaOptions. processor: measures each sample; a lengths index
    is written next to the shards. tokenize: store the processor's tokens instead of the sample. compression: in
    MDSWriter's notation. on_error: a row that does not fit its kind ends the conversion, or is counted and written to
    `_lmms/rejects.jsonl` with the reason. limit: number of samples; all samples of the last row are stored.
    shuffle_seed: store all samples in random order. splits: name of a folder below the target -> its share of the
    samples, drawn by split_seed; the first split lists and counts the rows left out. shortest, longest: samples of
    fewer or more tokens are left out and counted. unit_bytes: approximate bytes of a source that a process reads at
    once. num_shards: shards of each dataset, with numbers of samples that differ by at most 1; samples_per_shard:
    samples of each shard but the last; with either, shard_bytes keeps its default. ids: a file with the samples to take
    from the only source, an MDS dataset (see read_ids). dedup: "exact" leaves out samples whose stored content equals
    an earlier sample's. delimiter, encoding, header: of CSV and TSV, see `delimited`. concat:
    concatenate the tokens of rows (from the processor, or from tokenized rows) and store samples of this number of
    tokens, with the starts of documents; limit, splits, shuffle_seed, dedup, shortest and longest then apply to
    documents. drop_tail: drop and count the tokens after the last full sample, instead of storing a shorter sample.
    drop: a file of rows to leave out (see listed_samples). drop_sources: source name in the drop list -> URL of the
    dataset of its samples. allow_repeats: store rows that several sources hold (links, copies, overlapping globs and
    slices) once per source; otherwise repeats are an error. on_dropped: tools and tool calls that the processor's chat
    template does not show are an error of the row; with "warn" they are counted with other content that is not shown.
    """

    format: str | None = None
    quote: str | None = None
    schema: SchemaOptions = field(default_factory=SchemaOptions)
    processor: Processor | None = None
    choice: ProcessorChoice | None = None
    tokenize: bool = False
    shard_bytes: int = DEFAULT_SHARD_BYTES
    compression: str | None = None
    on_error: OnError = "fail"
    limit: int | None = None
    shuffle_seed: int | None = None
    splits: Mapping[str, float] | None = None
    split_seed: int = 0
    shortest: int | None = None
    longest: int | None = None
    unit_bytes: int = UNIT_BYTES
    num_shards: int | None = None
    samples_per_shard: int | None = None
    ids: str | None = None
    dedup: Literal["exact"] | None = None
    delimiter: str | None = None
    encoding: str | None = None
    header: str | None = None
    drop_tail: bool = False
    concat: int | None = None
    drop: str | None = None
    drop_sources: Mapping[str, str] = field(default_factory=dict)
    allow_repeats: bool = False
    on_dropped: OnDropped = "error"

    def __post_init__(self) -> None:
        check_fields(self)
        check_compression(self.compression)
        if self.processor is not None and self.choice is not None:
            raise ConfigError("a processor and a tokenizer are both named: leave one of them out")
        has_processor = self.processor is not None or self.choice is not None
        if self.tokenize and not has_processor:
            raise ConfigError("--tokenize needs a tokenizer: pass --tokenizer")
        if (self.shortest or self.longest) and not has_processor and self.concat is None:
            raise ConfigError("samples are left out by their tokens, which a tokenizer counts: pass --tokenizer")
        if self.on_dropped not in get_args(OnDropped):
            raise ConfigError(f"on_dropped must be {' or '.join(get_args(OnDropped))}, got {self.on_dropped!r}")
        if not 1 << 10 <= self.shard_bytes <= MAX_SHARD_BYTES:
            raise ConfigError(f"a shard of {self.shard_bytes} bytes is not possible: choose from 1 KiB to 4 GiB - 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1 sample, got {self.limit}")
        if self.dedup not in (None, "exact"):
            raise ConfigError(f"dedup must be 'exact' or None, got {self.dedup!r}")
        if self.splits is not None and (
            not all(isinstance(share, Real) for share in self.splits.values())
            or min(self.splits.values(), default=0) <= 0
            or abs(sum(self.splits.values()) - 1) > 1e-6
        ):
            raise ConfigError(f"the shares of {dict(self.splits)} must be above 0 and add up to 1")
        if self.splits is not None:  # numbers of NumPy become Python's
            object.__setattr__(self, "splits", {name: float(share) for name, share in self.splits.items()})
        if self.split_seed and self.splits is None:
            raise ConfigError("--split-seed draws the datasets of --split: pass --split NAME=SHARE …, or leave it out")
        if self.drop_sources and self.drop is None:
            raise ConfigError(
                "--drop-source names a dataset of a drop list: pass --drop FILE, or leave --drop-source out"
            )
        self._check_sizes()
        self._check_concat()
        _ = self.delimited  # checked

    def _check_sizes(self) -> None:
        for name in ("num_shards", "samples_per_shard"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        sizes = {
            "--num-shards": self.num_shards,
            "--samples-per-shard": self.samples_per_shard,
            "--shard-size": self.shard_bytes if self.shard_bytes != DEFAULT_SHARD_BYTES else None,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both set the size of shards: pass one of them")

    def _check_concat(self) -> None:
        if self.concat is None:
            if self.drop_tail:
                raise ConfigError("--drop-tail is about the last sample of --concat: pass --concat N, or leave it out")
            return
        if not 2 <= self.concat <= MAX_CONCAT:
            raise ConfigError(f"--concat must be 2 to {MAX_CONCAT} tokens, got {self.concat}: 4096 is usual")

    @property
    def stores_tokens(self) -> bool:
        return self.tokenize or self.concat is not None

    @property
    def cut(self) -> Cut:
        return Cut(num_shards=self.num_shards, samples_per_shard=self.samples_per_shard)

    @property
    def most_shard_bytes(self) -> int:
        """Bytes of a shard before compression, at most."""
        return MAX_SHARD_BYTES if self.cut.by_samples else self.shard_bytes

    @property
    def delimited(self) -> Delimited:
        """Format of CSV and TSV; ConfigError for an invalid character or encoding."""
        return delimited(delimiter=self.delimiter, quote=self.quote, encoding=self.encoding, header=self.header)

    @property
    def measured_by(self) -> Processor | None:
        return TokensProcessor() if self.stores_tokens else self.processor


# Names of the command line -> names of fields.
_NAMES = {
    "min_tokens": "shortest",
    "max_tokens": "longest",
    "shard_size": "shard_bytes",
    "split": "splits",
    "drop_source": "drop_sources",
}
_OF_PROCESSOR = ("tokenizer", "processor", "setting")


def changed(options: ConvertOptions | None, changes: Mapping[str, Any]) -> ConvertOptions:
    """The options with changes by name: of ConvertOptions, of SchemaOptions, or an option of the command line.

    tokenizer, processor ("text", or a Processor) and setting ({"fps": 1}) are as `lmms-stream convert` takes them.
    ConfigError for another name.
    """
    options = options or ConvertOptions()
    of_schema, own = SchemaOptions.__dataclass_fields__.keys(), ConvertOptions.__dataclass_fields__.keys()
    values: dict[str, Any] = {}
    schema: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for name, value in changes.items():
        if name in of_schema:
            schema[name] = (value,) if name == "keep" and isinstance(value, str) else value
        elif name in _OF_PROCESSOR and (name != "processor" or value is None or isinstance(value, str)):
            chosen[name] = value
        elif _NAMES.get(name, name) in own:
            values[_NAMES.get(name, name)] = parse_bytes(value, name=name) if name == "shard_size" else value
        else:
            known = sorted({*own, *of_schema, *_NAMES, *_OF_PROCESSOR, "num_workers", "workers"})
            raise ConfigError(f"convert has no argument {name!r}: {did_you_mean(name, known)}")
    if any(value is not None for value in chosen.values()):
        values["choice"] = ProcessorChoice(
            tokenizer=chosen.get("tokenizer"), type=chosen.get("processor"), settings=chosen.get("setting") or {}
        )
    if schema:
        values["schema"] = replace(values.get("schema", options.schema), **schema)
    return replace(options, **values)


def nested_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE texts as settings; dots in a name separate sections.

    >>> nested_settings(["fps=1", "bagel.vae.max_side=768"])
    {'fps': '1', 'bagel': {'vae': {'max_side': '768'}}}
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise ConfigError(f"--setting {text}: expected NAME=VALUE")
        *sections, name = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return values
