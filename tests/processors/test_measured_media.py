"""Tokens and patches of samples with media, measured from stored facts, and from bytes where need be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.base import FactsMissingError, Measured
from lmms_stream.processors.lengths import checked, measured_columns, measured_with_media, measures_media
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Sample

from ..media_words import MediaWords, chat, mixed_chats


def shown(found: Sequence[Measured | DataError]) -> list[Measured | str]:
    return [str(each) if isinstance(each, DataError) else each for each in found]


def without_media(samples: Sequence[Sample]) -> list[Sample]:
    return [{"messages": sample["messages"]} for sample in samples]


def test_samples_with_stored_facts_are_measured_without_their_bytes() -> None:
    processor, samples = MediaWords(), mixed_chats(40)
    found = list(measured_with_media(processor, without_media(samples)))
    assert processor.num_measured_whole == 0
    assert found == list(measured_with_media(processor, samples))
    assert found[0] == processor.measure_media(samples[:1])[0]
    assert all(isinstance(each, Measured) and each.tokens == processor.measure(sample)
               for each, sample in zip(found, samples, strict=True))  # fmt: skip
    assert measured_columns(processor) == ("messages",)


def test_only_samples_that_lack_facts_are_measured_again_with_all_columns() -> None:
    processor = MediaWords()
    image = [(56, 28, 1)]
    samples = [chat(3, image), chat(4, image, facts=False), chat(5), chat(6, image, facts=False)]
    asked: list[int] = []

    def whole(index: int) -> Sample:
        asked.append(index)
        return samples[index]

    found = list(measured_with_media(processor, without_media(samples), whole=whole))
    assert found == [Measured(5, 8, 2), Measured(6, 8, 2), Measured(5), Measured(8, 8, 2)]
    assert (asked, processor.num_measured_whole) == ([1, 3], 2)


def test_a_sample_that_lacks_facts_has_that_error_where_there_is_nothing_more_to_read() -> None:
    (found,) = measured_with_media(MediaWords(), without_media([chat(3, [(28, 28, 1)], facts=False)]))
    assert isinstance(found, FactsMissingError)
    assert str(found) == "a part of type 'image' has no width and height"


def test_an_error_of_one_sample_leaves_the_others_as_they_are() -> None:
    samples = [chat(1), chat(2, [(5, 5, 1)]), chat(3, [(5, 5, 1)], facts=False)]
    found = list(measured_with_media(MediaWords(), without_media(samples), whole=samples.__getitem__))
    too_small = "an image of 5x5 pixels is too small: leave it out"
    assert shown(found) == [Measured(1), too_small, too_small]


class Raises(MediaWords):
    """Raises instead of giving errors, and at a sample of no message at all something that is no DataError."""

    def measure(self, sample: Sample) -> int:
        return super().measure(sample)

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        found = super().measure_media(samples)
        for each in found:
            if isinstance(each, DataError):
                raise each
        return found


def test_a_processor_that_raises_is_asked_one_by_one() -> None:
    samples = [chat(1), chat(2, [(28, 28, 1)], facts=False), chat(2, [(5, 5, 1)]), chat(4)]
    found = list(measured_with_media(Raises(), without_media(samples), whole=samples.__getitem__))
    assert shown(found) == [
        Measured(1), Measured(3, 4, 1), "an image of 5x5 pixels is too small: leave it out", Measured(4),
    ]  # fmt: skip
    found_before = measured_with_media(Raises(), [samples[0], {"other": "x"}])
    assert next(found_before) == Measured(1)
    with pytest.raises(KeyError, match="messages"):
        next(found_before)


class Fewer(MediaWords):
    def measure(self, sample: Sample) -> int:
        return 1

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        return [Measured(1)]


def test_a_processor_that_gives_too_few_is_told_to_give_one_for_each() -> None:
    message = "measure_media gave 1 lengths of 2 samples: it must return a length for each"
    with pytest.raises(ConfigError, match=message):
        list(measured_with_media(Fewer(), [chat(1), chat(2)]))


class OtherTokens(MediaWords):
    def measure(self, sample: Sample) -> int:
        return 7


def test_a_class_with_another_measure_alone_counts_as_one_without_media() -> None:
    samples = [chat(3, [(28, 28, 1)])]
    assert not measures_media(OtherTokens())
    assert list(measured_with_media(OtherTokens(), samples)) == [Measured(7)]
    assert measured_columns(OtherTokens()) == ("messages", "media")
    assert not measures_media(TokensProcessor())
    assert measured_columns(TokensProcessor()) == TokensProcessor.columns


@pytest.mark.parametrize(
    "wrong", [Measured(5, -1), Measured(5, 1 << 32), Measured(5, 4, 6), Measured(5, 4, -1), Measured(5, 4, 2, 2, 2)]
)
def test_what_no_index_can_hold_is_refused(wrong: Measured) -> None:
    with pytest.raises(DataError, match=r"^sample 3 was measured as Measured\(.*\): patches are from 0 to 2\^32 - 1"):
        checked(wrong, what="sample 3")
    assert checked(Measured(5, (1 << 32) - 1, 2, 2, 1), what="sample 3").tokens == 5
    with pytest.raises(DataError, match=r"^sample 3 has 0 tokens"):
        checked(Measured(0), what="sample 3")
