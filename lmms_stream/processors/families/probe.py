"""A processor of any family -> its kinds of media: the installed processor is run on a few small media."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..media.facts import VideoFacts
from .clips import Clips
from .family import AUTO_CLASS, Family, TokenIds
from .files import ProcessorFiles
from .installed import RECIPE, Answer, AsInstalled, Installed, Kind, Same, as_it_is, in_rows, model_types_of
from .settings import MediaSettings

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger("lmms_stream")
_SIDES = ((64, 64), (96, 40), (40, 300), (16, 16))  # width and height of the images in the test
_NUM_FRAMES = (2, 7)
_SECONDS = (0.8, 1.5)
_RARE = 8  # tokens with this factor fewer repeats than the most frequent token are repeated by chance
_READ_BY = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_NOT_FOLLOWED = ("image_min_pixels", "image_max_pixels", "video_min_pixels", "video_max_pixels", "use_audio_in_video")
ATTENTIONS = ("flash_attention_2", "flex_attention", "sdpa_varlen", "sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class Described:
    """See FamilyMaker: facts of a family that its processor does not provide.

    of_installed: the processor's tensors -> tensors of batches. towers: None to search for the towers by name in the
    model. is_of_rows: the model can read a single row of the tensors, and the smallest input is a row.
    """

    name: str = ""
    model_types: tuple[str, ...] = ()
    processor_classes: tuple[str, ...] = ()
    model_class: str = AUTO_CLASS
    attentions: tuple[str, ...] = ATTENTIONS
    towers: Mapping[str, str] | None = None
    features: Callable[..., Any] | None = None
    of_installed: Same = as_it_is
    is_of_rows: bool = False

    def of(self, files: ProcessorFiles, settings: MediaSettings, token_ids: TokenIds) -> Family:
        """See FamilyMaker. ConfigError for a processor that cannot be loaded or tested."""
        name = self.name or files.processor_class or files.model_type
        for setting in _NOT_FOLLOWED:
            if (value := getattr(settings, setting)) is not None:
                raise ConfigError(
                    f"processor.{setting} {value} is not supported for {name}, which follows only the settings of its "
                    "folder: leave it out, or save the processor with other limits"
                )
        installed = Installed(files, None)
        try:
            processor = installed.processor
        except Exception as error:
            raise ConfigError(
                f"processor {files.name!r} cannot be loaded by the installed transformers ({_first_line(error)}): "
                "install the packages that it needs, or use another"
            ) from error
        asked = _Asked(installed, processor, self, files)
        kinds, dummies = asked.kinds()
        said = [dict(each) for each in (files.image, files.video, files.sound, files.processor)]
        digest = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()
        made = AsInstalled(
            name=name,
            model_types=self.model_types
            or (files.model_type and (files.model_type,))
            or model_types_of(files.processor_class),
            kinds=kinds,
            installed=installed,
            settings=settings,
            clips=_clips(processor, settings) if "audio" in kinds else None,
            settings_digest=digest,
            model_class=self.model_class,
            attentions=self.attentions,
            towers=self.towers,
            own_features=self.features,
            own_tensors=self.of_installed,
            dummies=dummies,
        )
        return cast("Family", made)


class _Asked:
    """The processor of a folder, and its answers."""

    def __init__(self, installed: Installed, processor: Any, described: Described, files: ProcessorFiles):
        self.installed = installed
        self.processor = processor
        self.described = described
        self.path = files.name
        self.template = files.chat_templates.get("default")
        tokenizer = processor.tokenizer
        self.added = {str(token): int(number) for token, number in tokenizer.get_added_vocab().items()}
        self.added |= {
            str(token): int(tokenizer.convert_tokens_to_ids(str(token))) for token in tokenizer.all_special_tokens
        }
        self.names = {number: token for token, number in self.added.items()}

    def kinds(self) -> tuple[dict[str, Kind], dict[str, dict[str, NDArray[Any]]]]:
        """Kinds of media that the processor reads, and the smallest inputs of each. ConfigError if it reads no
        media.
        """
        kinds, dummies, reasons = {}, {}, []
        for kind, name in _READ_BY.items():
            if getattr(self.processor, name, None) is None:
                continue
            try:
                kinds[kind], dummies[kind] = self._kind(kind)
            except Exception as error:  # noqa: BLE001 - any error of a processor of any model
                reasons.append(f"{kind}: {_first_line(error)}")
        if "video" in dummies and dummies["video"].keys() == dummies.get("image", {}).keys():
            del dummies["video"]  # frames are passed to the model like images
        if not kinds:
            raise ConfigError(
                f"processor {self.path!r} ({type(self.processor).__name__}) did not show the tokens and tensors of "
                f"media in a test ({'; '.join(reasons) or 'it reads none'}): {RECIPE}"
            )
        for reason in reasons:
            logger.warning("%s cannot be read by the processor at %s", reason, self.path)
        return kinds, dummies

    def _kind(self, kind: str) -> tuple[Kind, dict[str, NDArray[Any]]]:
        written = self._written(kind)
        answers = self._answers(kind, written)
        tokens = self._repeated(answers)
        names = self.names
        seen = {int(number) for answer in answers for number in answer.ids}
        beside = sorted(names[number] for number in seen if number in names and names[number] not in tokens)
        tensors: dict[str, bool] = {}
        values: dict[str, dict[int, int]] = {}
        made = [self.described.of_installed(answer.tensors) for answer in answers]
        for name in made[0]:
            arrays = [each[name] for each in made]
            sizes = [(1, len(answer.ids)) for answer in answers]
            if sizes == [each.shape for each in arrays] and all(each.dtype.kind in "iub" for each in arrays):
                if name != "attention_mask" and name != "input_ids":
                    values[name] = _by_token(name, arrays, answers, tokens.values())
                continue
            tensors[name] = len({array.shape[1:] for array in arrays}) > 1
        if not any(made[0][name].dtype.kind == "f" for name in tensors):
            raise ValueError(f"no tensors of numbers beside the tokens, but {', '.join(made[0])}")
        # For a medium of one token, some models mistake the axis of tokens for another axis.
        counts = [int(np.isin(answer.ids, [*tokens.values()]).sum()) for answer in answers]
        several = [each for each, count in zip(made, counts, strict=True) if count > 1] or made
        smallest = min(several, key=lambda each: sum(each[name].size for name in tensors))
        dummy = {name: smallest[name][:1] if self.described.is_of_rows else smallest[name] for name in tensors}
        is_alone = kind == "image" and not self._reads_several(written)
        return Kind(written, tokens, beside, tensors, values, is_alone), in_rows(dummy, tensors)

    def _answers(self, kind: str, written: str) -> list[Answer]:
        """Return the answers about all media that the processor takes (it may refuse small media); at least two."""
        answers, refusals = [], []
        for given in self._media(kind):
            try:
                answers.append(self.installed.asked(kind, 1, given, text=written))
            except Exception as error:  # noqa: BLE001 - any error of any model's processor
                refusals.append(error)
        if len(answers) < 2:
            raise refusals[0]
        return answers

    def _reads_several(self, written: str) -> bool:
        """Return whether two images of a sample become the same tokens as each alone."""
        random = np.random.default_rng(1)
        images = [random.integers(1, 255, (height, width, 3), np.uint8) for width, height in _SIDES[:2]]
        try:
            both = self.installed.asked("image", 2, self.installed.pictures(images), text=written).ids
        except Exception:  # noqa: BLE001 - any error of any model's processor
            return False
        each = [
            self.installed.asked("image", 1, self.installed.pictures([image]), text=written).ids for image in images
        ]
        between = self.processor.tokenizer("and", add_special_tokens=False)["input_ids"]
        return np.array_equal(both, np.concatenate([each[0], between, each[1]]))

    def _written(self, kind: str) -> str:
        """Text of the chat template for a medium: from its first special token to its last, or all of the text."""

        def text(media: int) -> str:
            content = [{"type": "text", "text": "first"}, *[{"type": kind}] * media, {"type": "text", "text": "last"}]
            said = [{"role": "user", "content": content}]
            # The tokenizer's own method: some processors have a template for videos that is not in the folder.
            return str(self.processor.tokenizer.apply_chat_template(said, tokenize=False, chat_template=self.template))

        without, one, two = (text(number) for number in (0, 1, 2))
        start = next(
            (at for at, pair in enumerate(zip(without, one, strict=False)) if pair[0] != pair[1]), len(without)
        )
        inserted = one[start : start + len(one) - len(without)]
        marks = [
            (inserted.find(token), inserted.rfind(token) + len(token)) for token in self.added if token in inserted
        ]
        if marks:
            inserted = inserted[min(at for at, _ in marks) : max(stop for _, stop in marks)]
        inserted = inserted.strip()
        if not inserted or two.count(inserted) != 2:
            raise ValueError(f"the chat template writes {inserted!r} for one and not twice for two")
        return inserted

    def _media(self, kind: str) -> list[dict[str, Any]]:
        random = np.random.default_rng(0)
        if kind == "audio":
            rate = int(self.processor.feature_extractor.sampling_rate)
            clips = [random.normal(0, 0.1, int(seconds * rate)).astype(np.float32) for seconds in _SECONDS]
            return [self.installed.sound(clip, rate) for clip in clips]
        if kind == "video":
            pictures = [(count, side) for count in _NUM_FRAMES for side in _SIDES[:2]]
            return [
                self.installed.film(
                    random.integers(1, 255, (count, height, width, 3), np.uint8), range(count),
                    VideoFacts(width, height, count, 2.0),
                )
                for count, (width, height) in pictures
            ]  # fmt: skip
        return [self.installed.pictures([random.integers(1, 255, (h, w, 3), np.uint8)]) for w, h in _SIDES]

    def _repeated(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Named tokens that are repeated in a row, the most frequent first."""
        names = self.names
        counts: dict[int, int] = {}
        for answer in answers:
            ids = answer.ids
            for number in ids[1:][ids[1:] == ids[:-1]].tolist():
                counts[number] = counts.get(number, 0) + 1
        most = max(counts.values(), default=0)
        found = [number for number in counts if number in names and counts[number] * _RARE > most]
        found.sort(key=lambda number: -counts[number])
        if not found:
            raise ValueError("no token is repeated for a larger medium")
        return {names[number]: number for number in found}


def _by_token(name: str, arrays: Sequence[NDArray[Any]], answers: Sequence[Answer], tokens: Any) -> dict[int, int]:
    """Value of each repeated token; ValueError if other tokens have a value, too, or if values do not follow from
    tokens.
    """
    found: dict[int, int] = {}
    for array, answer in zip(arrays, answers, strict=True):
        for number, value in zip(answer.ids.tolist(), array[0].tolist(), strict=True):
            if value and number not in tokens:
                raise ValueError(f"{name} is {value} for token {number}, which is none of the medium's")
            if number in tokens and found.setdefault(number, value) != value:
                raise ValueError(f"{name} does not follow from the tokens")
    return found


def _clips(processor: Any, settings: MediaSettings) -> Clips:
    rate = int(processor.feature_extractor.sampling_rate)
    most = settings.audio_max_length
    longest = sys.maxsize if most is None else int(most * rate)
    return Clips(rate=rate, num_bins=0, hop=1, num_points=1, max_samples=longest, padded_to=0)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
