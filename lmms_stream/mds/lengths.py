"""The lengths index: tokens of every sample, measured by an exact processor.

Two files next to the shards: `_lmms/lengths/<fingerprint>.npy`, uint32[num_samples] in shard order, plain NumPy for
memory-mapping; and `<fingerprint>.json`, a description of the processor. For samples with media there is a third file,
`<fingerprint>.patches.npy`, also uint32[num_samples]: rows of each sample for the tower of the media.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LengthsError
from ..plan.lengths import HASH_BYTES, Lengths, hash_lengths
from ..processors.not_shown import added

LENGTHS_FOLDER = "_lmms/lengths"
KINDS = ("text", "image", "video", "audio")  # kinds of tokens
_CONTENT_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


def lengths_names(fingerprint: str) -> tuple[str, str]:
    """Names of the array and of the description, relative to the dataset."""
    return f"{LENGTHS_FOLDER}/{fingerprint}.npy", f"{LENGTHS_FOLDER}/{fingerprint}.json"


def patches_name(fingerprint: str) -> str:
    """Name of the array of patches, relative to the dataset; the file exists if the description has patches_hash."""
    return f"{LENGTHS_FOLDER}/{fingerprint}.patches.npy"


def is_description(name: str) -> bool:
    """Whether a name relative to the dataset names the description of a lengths index."""
    folder, _, file = name.rpartition("/")
    return folder == LENGTHS_FOLDER and file.endswith(".json") and not file.startswith(".")


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsDescription:
    """Content of the JSON file of an index. patches_hash: None if no sample has patches.

    num_tokens_of: number of tokens of each of KINDS; None without patches, or if unknown because the samples are a part
    of the measured samples. num_cut: number of media read only in part. not_shown: number of samples with content not
    shown by the chat template, by the kind of content.
    """

    num_samples: int
    content_hash: str
    processor: Mapping[str, Any]
    patches_hash: str | None = None
    num_tokens_of: Mapping[str, int] | None = None
    num_cut: int = 0
    not_shown: Mapping[str, int] = field(default_factory=dict)


_KINDS = {  # columns of rows not read by a processor -> options that convert the rows
    ("question", "answer"): "question-answer --tokenizer …",
    ("prompt", "response"): "prompt-response --tokenizer …",
    ("conversations",): "sharegpt --tokenizer …",
    ("tokens",): "tokens --columns input_ids=tokens --processor tokens",
    ("input_ids",): "tokens --processor tokens",
}


def how_to_index(url: str, columns: Sequence[str]) -> str:
    """Return the command that writes a lengths index for a dataset with these columns, for an error.

    >>> how_to_index("s3://bucket/data", ["input_ids", "loss_spans"])
    'write one with lmms-stream index s3://bucket/data'
    """
    if {"input_ids", "loss_spans"} <= {*columns} or not columns:
        return f"write one with lmms-stream index {quote(url)}"
    if {"messages", "text"} & {*columns}:
        return f"write one with lmms-stream index {quote(url)} --tokenizer …"
    kinds = [kind for needed, kind in _KINDS.items() if {*needed} <= {*columns}]
    return (
        f"no processor of this package reads its columns ({', '.join(columns)}); convert it, with an index, by "
        f"lmms-stream convert {quote(url)} TARGET --kind {next(iter(kinds), 'KIND --tokenizer …')}"
    )


def parse_description(data: bytes, *, fingerprint: str) -> LengthsDescription:
    """Parse the JSON file of an index; LengthsError for a damaged file.

    The hashes name files on this node: only hexadecimal digits are accepted.
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
            of_kinds = said.get("num_tokens_of")  # None: unknown, samples of several datasets
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
    """Whether the values of the .npy file at `path` have this hash; reads the whole file in pieces."""
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
    """The lengths of a dataset's samples, uint32[num_samples], possibly memory-mapped, and the measuring processor.

    fingerprint: hash of everything that can change a length. content_hash: hash of the lengths. processor: description
    of the measuring processor. num_tokens_of: number of tokens of each of KINDS, if there are patches. num_cut: number
    of media read only in part, because of the processor's limits. not_shown: number of samples with content not shown
    by the chat template, by the kind of content.
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
        """Return the index of lengths. num_tokens_of: of media; other tokens are text. All-zero patches are dropped."""
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
        """Number of tokens of all samples; reads the whole index."""
        return int(np.sum(self.lengths, dtype=np.int64))

    @property
    def num_patches(self) -> int:
        """Number of patches of all samples; reads the whole index."""
        return 0 if self.patches is None else int(np.sum(self.patches, dtype=np.int64))

    def first(self, num_samples: int) -> LengthIndex:
        """Return the index of only the first samples, before an append; reads the whole index."""
        patches = None if self.patches is None else self.patches[:num_samples]
        return LengthIndex.from_array(
            self.lengths[:num_samples], fingerprint=self.fingerprint, processor=self.processor, patches=patches
        )

    def release(self) -> None:
        """Release the pages of a memory-mapped index to the kernel's page cache.

        Reading all over an index larger than memory would otherwise count as resident memory of this process.
        """
        for array in (self.lengths, self.patches):
            mapped = getattr(array, "_mmap", None)  # of a numpy.memmap
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def write(self, folder: Path) -> tuple[str, ...]:
        """Write the files below a dataset's folder; return the relative names, the description's last."""
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
        """Memory-map an index by its description; LengthsError if array and description do not fit.

        patches_path: path of the array of patches (default: next to the array, the path used by `write`).
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
    """Memory-map an array of an index. what: name of the array, for errors."""
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
    """Patches of each index, or zeros (without memory) for an index without patches; None without any patches."""
    if all(index.patches is None for index in indexes):
        return None
    zero = np.zeros(1, np.uint32)
    return [np.broadcast_to(zero, len(each.lengths)) if each.patches is None else each.patches for each in indexes]


Join = Callable[[str, Sequence[NDArray[np.integer[Any]]]], NDArray[np.integer[Any]]]


def concatenated(indexes: Sequence[LengthIndex], *, join: Join = lambda _, parts: np.concatenate(parts)) -> LengthIndex:
    """Return the index of all samples of several indexes, in turn, with a hash of their hashes.

    join: makes an array from parts, which have a joint hash.
    """
    patches = patches_of_all(indexes)
    content_hash, patches_hash = _joint_hash([each.content_hash for each in indexes]), ""
    if patches is not None:
        patches_hash = _joint_hash([each.patches_hash for each in indexes])
    of_kinds = [each.num_tokens_of or {KINDS[0]: each.num_tokens} for each in indexes] if patches is not None else []
    found = replace(
        indexes[0],
        lengths=join(content_hash, [each.lengths for each in indexes]),
        content_hash=content_hash,
        patches=None if patches is None else join(patches_hash, patches),
        patches_hash=patches_hash,
        num_tokens_of={kind: sum(each.get(kind, 0) for each in of_kinds) for kind in KINDS} if of_kinds else None,
        num_cut=sum(each.num_cut for each in indexes),
        not_shown=added(each.not_shown for each in indexes),
    )
    for each in indexes:
        each.release()
    return found


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashlib.blake2b(" ".join(hashes).encode(), digest_size=HASH_BYTES).hexdigest()


def joint_index(
    indexes: Sequence[LengthIndex],
    *,
    lengths: NDArray[np.integer[Any]],
    patches: NDArray[np.integer[Any]] | None,
    is_all: bool,
) -> LengthIndex:
    """Return the index of samples from several indexes of a processor, and release the indexes.

    lengths, patches: of the chosen samples. is_all: each sample is chosen exactly once; otherwise num_tokens_of,
    num_cut and not_shown are unknown.
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
