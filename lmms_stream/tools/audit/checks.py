"""Checks of supervision, with their rules. Counts per source -> findings with verdicts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, did_you_mean
from ...processors.not_shown import DROPPED

Verdict = Literal["ok", "look", "wrong"]
Unit = Literal["samples", "answers", "tokens", "pairs"]
VERDICTS: tuple[Verdict, ...] = ("ok", "look", "wrong")  # ascending
UNITS: tuple[Unit, ...] = ("samples", "answers", "tokens", "pairs")
MAX_EXAMPLES = 3  # of a finding
NUM_SHARES = 1000  # bins of the trained share: its quantiles are exact to 0.1 %
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MANY = 0.01  # share of a source from which a fault is wrong


class Check(NamedTuple):
    """A check. look, wrong: least share of a source's units for the verdicts "look" and "wrong"; 0: any, None: never.
    least: number of units for a verdict on a source. needs: facts of a dataset without which the check has no meaning
    (see AuditedDataset.facts), separated by spaces.
    """

    name: str
    what: str
    unit: Unit = "samples"
    look: float | None = 0.0
    wrong: float | None = MANY
    least: int = 1
    needs: str = ""

    @property
    def rule(self) -> str:
        """The rule of the verdict, for users."""
        rules = []
        if self.wrong is not None:
            rules.append(f"wrong: {_share(self.wrong, self.unit)}")
        if self.look is not None and (self.wrong is None or self.wrong > self.look):
            rules.append(f"look: {_share(self.look, self.unit)}")
        if self.least > 1:
            rules.append(f"from {self.least} {self.unit} on")
        return "; ".join(rules)

    def verdict(self, count: int, total: int) -> Verdict:
        """Return the verdict on a source with `count` of `total` units.

        >>> Check("masked", "no token is trained on").verdict(1, 1000)
        'look'
        """
        if not count or total < self.least:
            return "ok"
        share = count / max(total, 1)
        if self.wrong is not None and share >= self.wrong:
            return "wrong"
        return "look" if self.look is not None and share >= self.look else "ok"


def _share(share: float, unit: Unit) -> str:
    return f"{share:.0%} of a source's {unit} or more" if share else "any"


_DROPPED: dict[str, tuple[str, float | None]] = {  # kind of content -> its words, and its share for "wrong"
    "system": ("the chat template does not write the system message", MANY),
    "tools": ("the chat template does not write tools, or parts of them", 0.0),
    "tool_calls": ("the chat template does not write tool calls, or parts of them", 0.0),
    "tool_results": ("the chat template does not write results of tools", MANY),
    "reasoning": ("the chat template does not write reasoning", None),
    "content": ("the chat template does not write text of a message", MANY),
}
CHECKS = {
    check.name: check
    for check in (
        Check("refused", "the processor refuses the sample", wrong=0.0),
        Check("fully-masked", "no token is trained on", needs="labels"),
        Check("masked-answers", "an answer is not trained on, though others of the sample are", "answers",
              needs="labels chats tokenizer"),
        Check("untrained-ends", "the end of an answer is not trained on", "answers", needs="labels spans tokenizer"),
        Check("trained-prompts", "text of a prompt is trained on", needs="labels chats tokenizer"),
        *(
            Check(f"dropped-{kind.replace('_', '-')}", what, wrong=wrong, needs="template")
            for kind, (what, wrong) in _DROPPED.items()
        ),
        Check("changed-prefixes", "an answer or its context changes if messages follow", wrong=None, needs="turns"),
        Check("special-tokens", "a text holds a special token of the tokenizer", needs="texts tokenizer"),
        Check("double-bos", "the token of the beginning stands twice", wrong=0.0, needs="tokenizer"),
        Check("media-without-tokens", "media have no tokens in the text", wrong=0.0, needs="chats"),
        Check("tokens-without-media", "the text has placeholders or tokens of media, and there are no media",
              needs="chats"),
        Check("cut-answers", "tokens that are trained on lie behind packing_length and are cut off", needs="packs"),
        Check("overlong", "longer than packing_length", wrong=None, needs="packs"),
        Check("beyond-positions", "longer than the positions of the model", wrong=0.0, needs="positions"),
        Check("repeated", "equal to an earlier sample", wrong=0.1),
        Check("repeated-across", "equal to a sample of an earlier dataset", wrong=0.1, needs="others"),
        Check("near-duplicates", "similar to an earlier sample, and not equal", look=MANY, wrong=None, needs="near"),
        Check("empty-answers", "an answer has no text, no media and no tool calls", "answers", needs="answers"),
        Check("byte-tokens", "a token stands for a part of a character, or is unknown", "tokens", 0.01, 0.1,
              needs="tokenizer"),
        Check("odd-characters", "a text has U+FFFD, half a surrogate pair or a control character", needs="texts"),
        Check("equal-answers", "chosen and rejected are equal", "pairs", wrong=0.0, needs="pairs"),
        Check("differing-prompts", "chosen and rejected answer different prompts", "pairs", wrong=0.0, needs="pairs"),
        Check("length-bias", "the chosen answer is longer than the rejected answer", "pairs", 0.7, None, 20, "pairs"),
    )
}  # fmt: skip
NAMES = tuple(CHECKS)
ROWS = {name: row for row, name in enumerate((*NAMES, *UNITS))}  # of the counts of a source


def with_overlong(how: str) -> dict[str, Check]:
    """Return the checks for a run's rule for samples longer than packing_length (see PackingConfig.overlong)."""
    whats = {
        "error": ("longer than packing_length: the run ends with an error (overlong: error)", 0.0),
        "drop": ("longer than packing_length: the run leaves the sample out (overlong: drop)", None),
        "split": ("longer than packing_length: later pieces do not see the earlier pieces (overlong: split)", None),
        "keep": ("longer than packing_length: a pack of its own (overlong: keep)", None),
        "truncate": ("longer than packing_length: the rest is cut off (overlong: truncate)", None),
    }
    what, wrong = whats[how]
    return CHECKS | {"overlong": CHECKS["overlong"]._replace(what=what, wrong=wrong)}


def check_names(names: Collection[str]) -> None:
    """Raise ConfigError for an unknown name of a check."""
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"--expect {name}: there is no such check: {did_you_mean(name, NAMES)}")


class Place(NamedTuple):
    """A sample of an audited dataset. source: the source row, "" if unknown."""

    dataset: str
    sample_id: int
    source: str

    def __str__(self) -> str:
        return f"sample {self.sample_id} of {self.dataset}" + (f" ({self.source})" if self.source else "")


class Example(NamedTuple):
    """A sample with a finding. source: see Place. excerpt: a short piece of the reason. like: the earlier sample that
    a sample repeats.
    """

    dataset: str
    sample_id: int
    source: str
    excerpt: str
    like: Place | None = None

    @property
    def place(self) -> Place:
        return Place(self.dataset, self.sample_id, self.source)


class OfSource(NamedTuple):
    """Number of units of a source with a finding, of all units of the source."""

    num_found: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of a check. verdict: the worst of the sources, "ok" if expected. by_source: sources with a count."""

    check: str
    what: str
    unit: Unit
    rule: str
    count: int
    total: int
    verdict: Verdict
    is_expected: bool
    by_source: Mapping[str, OfSource]
    examples: Sequence[Example]

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceView:
    """Amounts of a source. trained_shares: quantiles (see QUANTILES) of the trained share of a sample's tokens."""

    num_samples: int
    num_tokens: int
    num_trained: int
    trained_shares: Sequence[float]
    histogram: Sequence[int]


def finding(
    check: Check,
    counts: Mapping[str, NDArray[np.int64]],
    *,
    examples: Sequence[Example],
    expected: Collection[str] = (),
) -> Finding:
    """Return the finding of a check. counts: source -> int64[len(ROWS)], in the order of ROWS."""
    by_source = {
        source: OfSource(int(row[ROWS[check.name]]), int(row[ROWS[check.unit]])) for source, row in counts.items()
    }
    verdict = worst([check.verdict(*each) for each in by_source.values()])
    is_expected = check.name in expected
    return Finding(
        check=check.name,
        what=check.what,
        unit=check.unit,
        rule=check.rule,
        count=sum(each.num_found for each in by_source.values()),
        total=sum(each.total for each in by_source.values()),
        verdict="ok" if is_expected else verdict,
        is_expected=is_expected,
        by_source={source: each for source, each in by_source.items() if each.num_found},
        examples=examples[:MAX_EXAMPLES],
    )


def quantiles_of(histogram: NDArray[np.int64]) -> list[float]:
    """Return the QUANTILES of values counted in NUM_SHARES + 1 bins of the values 0, 0.001, … 1; [] without values.

    >>> quantiles_of(np.bincount([0, 500, 500, 1000], minlength=1001))
    [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    """
    total = int(histogram.sum())
    if not total:
        return []
    ranks = np.ceil(np.array(QUANTILES) * total).clip(1, total)
    return (np.searchsorted(histogram.cumsum(), ranks) / NUM_SHARES).tolist()  # type: ignore[no-any-return]


def bars_of(histogram: NDArray[np.int64]) -> list[int]:
    """Return the counts of shares in ten bins from 0 to 1; the last bin includes 1."""
    bins = np.minimum(np.arange(NUM_SHARES + 1) * 10 // NUM_SHARES, 9)
    return np.bincount(bins, weights=histogram, minlength=10).astype(int).tolist()  # type: ignore[no-any-return]


def kinds_dropped() -> list[str]:
    """Return the names of the checks of not_shown.DROPPED, in the same order."""
    return [f"dropped-{kind.replace('_', '-')}" for kind in DROPPED]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst verdict; "ok" without verdicts."""
    return VERDICTS[max((VERDICTS.index(each) for each in verdicts), default=0)]


def as_json(value: Any) -> Any:
    """Convert findings and tuples to JSON values."""
    if isinstance(value, Finding):
        named = {name: getattr(value, name) for name in Finding.__dataclass_fields__}
        return as_json({**named, "share": value.share})
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: as_json(each) for key, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value
