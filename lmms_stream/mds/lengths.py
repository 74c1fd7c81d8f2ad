"""The lengths index: tokens of every sample, as one exact processor measures it.

Two files beside the shards: `_lmms/lengths/<fingerprint>.npy`, uint32[num_samples] in shard order, plain NumPy
so that it can be memory-mapped; and `<fingerprint>.json`, which says what measured it. Where samples have media, there
is a third one, `<fingerprint>.patches.npy`, also uint32[num_samples]: rows that each gives to the tower of its media.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LengthsError
from ..plan.lengths import HASH_BYTES, Lengths, hash_lengths
from ..processors.not_shown import added

LENGTHS_FOLDER = "_lmms/lengths"
KINDS = ("text", "image", "video", "audio")  # that tokens are of
_CONTENT_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


def lengths_names(fingerprint: str) -> tuple[str, str]:
    """Names of the array and of its description, relative to the dataset."""
    return f"{LENGTHS_FOLDER}/{fingerprint}.npy", f"{LENGTHS_FOLDER}/{fingerprint}.json"


def patches_name(fingerprint: str) -> str:
    """Name of the array of patches, relative to the dataset; it is there where the description has its hash."""
    return f"{LENGTHS_FOLDER}/{fingerprint}.patches.npy"


def is_description(name: str) -> bool:
    """Whether a name relative to the dataset is that of the description of a lengths index."""
    folder, _, file = name.rpartition("/")
    return folder == LENGTHS_FOLDER and file.endswith(".json") and not file.startswith(".")


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsDescription:
    """What the JSON file of an index says. patches_hash: None where no sample has patches.

    num_tokens_of: of each of KINDS; None without patches, or if unknown because the samples are a part of the measured
    samples. num_cut: media of which not all is read. not_shown: samples with content that the chat template does not
    show, by the kind of content.
    """

    num_samples: int
    content_hash: str
    processor: Mapping[str, Any]
    patches_hash: str | None = None
    num_tokens_of: Mapping[str, int] | None = None
    num_cut: int = 0
    not_shown: Mapping[str, int] = field(default_factory=dict)


def parse_description(data: bytes, *, fingerprint: str) -> LengthsDescription:
    """What the JSON file of an index says; LengthsError when it does not.

    The hashes name files on this node, so nothing but a hash is taken for one.
    """
    try:
        said = json.loads(data)
        described = LengthsDescription(
            num_samples=int(said["num_samples"]),
            content_hash=str(said["content_hash"]),
            processor=dict(said["processor"]),
            not_shown={str(kind): int(count) for kind, count in dict(said.get("not_shown", {})).items()},
        )
        if "patches_hash" in said:
            of_kinds = said.get("num_tokens_of")  # None: samples of several datasets, of which it is not known
            num_tokens_of = None if of_kinds is None else {kind: int(of_kinds[kind]) for kind in KINDS}
            described = replace(
                described,
                patches_hash=str(said["patches_hash"]),
                num_tokens_of=num_tokens_of,
                num_cut=int(said.get("num_cut", 0)),
            )
    except (ValueError, KeyError, TypeError) as error:
        raise LengthsError(
            f"the description of lengths index {fingerprint} cannot be read ({error}): "
            "write it again with lmms-stream index"
        ) from error
    for name, value in (("content_hash", described.content_hash), ("patches_hash", described.patches_hash)):
        if value is not None and not _CONTENT_HASH.fullmatch(value):
            raise LengthsError(
                f"the description of lengths index {fingerprint} cannot be read (its {name} {value[:80]!r} is not "
                f"{2 * HASH_BYTES} hexadecimal digits): write it again with lmms-stream index"
            )
    return described


def array_matches(path: Path, *, content_hash: str) -> bool:
    """Whether the .npy file at `path` holds the values that hash to this; reads all of it, a little at a time."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                return False
            np.lib.format.read_array_header_1_0(file)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except (OSError, ValueError):
        return False
    return digest.hexdigest() == content_hash


@dataclass(frozen=True, kw_only=True)
class LengthIndex(Lengths):
    """The lengths of a dataset's samples, uint32[num_samples], possibly memory-mapped, and what measured them.

    fingerprint: hash of all that can change a length. content_hash: hash of the lengths themselves.
    processor: the description of what measured them. num_tokens_of: tokens of each of KINDS, where there are patches.
    num_cut: media of which not all is read, because they are longer than the processor takes. not_shown: samples whose
    chat template does not show some content, by the kind of content.
    """

    fingerprint: str
    processor: Mapping[str, Any]
    num_tokens_of: Mapping[str, int] | None = None
    num_cut: int = 0
    not_shown: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def from_array(
        lengths: NDArray[np.integer[Any]],
        *,
        fingerprint: str = "",
        processor: Mapping[str, Any] | None = None,
        patches: NDArray[np.integer[Any]] | None = None,
        num_tokens_of: Mapping[str, int] | None = None,
        num_cut: int = 0,
        not_shown: Mapping[str, int] | None = None,
    ) -> LengthIndex:
        """num_tokens_of: of media; the other tokens are of text. Patches that are all 0 are as none."""
        index = LengthIndex(
            lengths=lengths,
            fingerprint=fingerprint,
            content_hash=hash_lengths(lengths),
            processor=processor or {},
            not_shown=dict(not_shown or {}),
        )
        if patches is None or not np.any(patches):
            return index
        of_media = {kind: int((num_tokens_of or {}).get(kind, 0)) for kind in KINDS[1:]}
        of_kinds = {KINDS[0]: index.num_tokens - sum(of_media.values()), **of_media}
        return replace(
            index, patches=patches, patches_hash=hash_lengths(patches), num_tokens_of=of_kinds, num_cut=num_cut
        )

    @property
    def num_tokens(self) -> int:
        """Of all samples; reads all of the index."""
        return int(np.sum(self.lengths, dtype=np.int64))

    @property
    def num_patches(self) -> int:
        """Of all samples; reads all of the index."""
        return 0 if self.patches is None else int(np.sum(self.patches, dtype=np.int64))

    def first(self, num_samples: int) -> LengthIndex:
        """Return the index of the first samples only, as before others were appended; reads the whole index."""
        patches = None if self.patches is None else self.patches[:num_samples]
        return LengthIndex.from_array(
            self.lengths[:num_samples], fingerprint=self.fingerprint, processor=self.processor, patches=patches
        )

    def release(self) -> None:
        """Release the pages of a memory-mapped index to the kernel's page cache.

        Reading all over an index larger than memory would otherwise count as resident memory of this process.
        """
        for array in (self.lengths, self.patches):
            mapped = getattr(array, "_mmap", None)  # a numpy.memmap has it
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def write(self, folder: Path) -> tuple[str, ...]:
        """Write its files below a dataset's folder; returns their names relative to it, the description's last."""
        array_name, description_name = lengths_names(self.fingerprint)
        (folder / LENGTHS_FOLDER).mkdir(parents=True, exist_ok=True)
        np.save(folder / array_name, np.asarray(self.lengths, dtype=np.uint32))
        description = {
            "version": 1,
            "num_samples": len(self.lengths),
            "num_tokens": self.num_tokens,
            "content_hash": self.content_hash,
            "processor": dict(self.processor),
        }
        description |= {"not_shown": dict(self.not_shown)} if self.not_shown else {}
        names = [array_name]
        if self.patches is not None:
            names.append(patches_name(self.fingerprint))
            np.save(folder / names[-1], np.asarray(self.patches, dtype=np.uint32))
            description |= {
                "patches_hash": self.patches_hash,
                "num_patches": self.num_patches,
            }
            description |= {"num_tokens_of": dict(self.num_tokens_of)} if self.num_tokens_of is not None else {}
            description |= {"num_cut": self.num_cut} if self.num_cut else {}
        (folder / description_name).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")
        return (*names, description_name)

    @staticmethod
    def open(
        array_path: Path, description: bytes, *, fingerprint: str, patches_path: Path | None = None
    ) -> LengthIndex:
        """Memory-map an index whose description was read already; LengthsError when they do not fit.

        patches_path: of the array of patches (default: where `write` puts it, beside the other one).
        """
        described = parse_description(description, fingerprint=fingerprint)
        index = LengthIndex(
            lengths=_mapped(array_path, f"lengths index {fingerprint}", num_samples=described.num_samples),
            fingerprint=fingerprint,
            content_hash=described.content_hash,
            processor=described.processor,
            not_shown=described.not_shown,
        )
        if described.patches_hash is None:
            return index
        path = patches_path or array_path.with_name(f"{fingerprint}.patches.npy")
        patches = _mapped(path, f"the patches of lengths index {fingerprint}", num_samples=described.num_samples)
        return replace(
            index,
            patches=patches,
            patches_hash=described.patches_hash,
            num_tokens_of=described.num_tokens_of,
            num_cut=described.num_cut,
        )


def _mapped(path: Path, what: str, *, num_samples: int) -> NDArray[np.uint32]:
    """An array of an index, memory-mapped. what: it is, for errors."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise LengthsError(
            f"{what} at {path} cannot be read ({error}): write it again with lmms-stream index"
        ) from error
    if array.dtype != np.uint32 or array.shape != (num_samples,):
        raise LengthsError(
            f"{what} should be uint32[{num_samples}], found {array.dtype}{list(array.shape)} at {path}: "
            "write it again with lmms-stream index"
        )
    return array


def patches_of_all(indexes: Sequence[LengthIndex]) -> list[NDArray[np.integer[Any]]] | None:
    """The patches of each index, zeros, which take no memory, for one without; None where none has any."""
    if all(index.patches is None for index in indexes):
        return None
    zero = np.zeros(1, np.uint32)
    return [np.broadcast_to(zero, len(each.lengths)) if each.patches is None else each.patches for each in indexes]


def joint_index(
    indexes: Sequence[LengthIndex],
    *,
    lengths: NDArray[np.integer[Any]],
    patches: NDArray[np.integer[Any]] | None,
    is_all: bool,
) -> LengthIndex:
    """The index of samples of several indexes of one processor, which are released.

    lengths, patches: of those samples. is_all: each sample is among them once; only then is it known how the tokens
    divide into kinds, how many media are cut, and what is not shown.
    """
    first = indexes[0]
    for index in indexes:
        index.release()
    made = LengthIndex.from_array(
        lengths,
        fingerprint=first.fingerprint,
        processor=first.processor,
        patches=patches,
        num_tokens_of={kind: sum((each.num_tokens_of or {}).get(kind, 0) for each in indexes) for kind in KINDS},
        num_cut=sum(index.num_cut for index in indexes) if is_all else 0,
        not_shown=added(index.not_shown for index in indexes) if is_all else {},
    )
    is_known = is_all and all(index.patches is None or index.num_tokens_of is not None for index in indexes)
    return made if is_known or made.patches is None else replace(made, num_tokens_of=None)
