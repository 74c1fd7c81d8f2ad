"""The lengths index: tokens of every sample, as one exact processor measures it.

Two files beside the shards: `_lmms/lengths/<fingerprint>.npy`, uint32[num_samples] in shard order, plain NumPy
so that it can be memory-mapped; and `<fingerprint>.json`, which says what measured it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LengthsError
from ..plan.lengths import HASH_BYTES, Lengths, hash_lengths

LENGTHS_FOLDER = "_lmms/lengths"
_CONTENT_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


def lengths_names(fingerprint: str) -> tuple[str, str]:
    """Names of the array and of its description, relative to the dataset."""
    return f"{LENGTHS_FOLDER}/{fingerprint}.npy", f"{LENGTHS_FOLDER}/{fingerprint}.json"


def is_description(name: str) -> bool:
    """Whether a name relative to the dataset is that of the description of a lengths index."""
    folder, _, file = name.rpartition("/")
    return folder == LENGTHS_FOLDER and file.endswith(".json") and not file.startswith(".")


def parse_description(data: bytes, *, fingerprint: str) -> dict[str, Any]:
    """num_samples, content_hash and processor of an index, as its JSON file says; LengthsError when it does not.

    The content_hash names files on this node, so nothing but a hash is taken for one.
    """
    try:
        described = json.loads(data)
        parsed: dict[str, Any] = {
            "num_samples": int(described["num_samples"]),
            "content_hash": str(described["content_hash"]),
            "processor": dict(described["processor"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise LengthsError(
            f"the description of lengths index {fingerprint} cannot be read ({error}): "
            "write it again with lmms-stream index"
        ) from error
    if not _CONTENT_HASH.fullmatch(parsed["content_hash"]):
        raise LengthsError(
            f"the description of lengths index {fingerprint} cannot be read (its content_hash "
            f"{parsed['content_hash'][:80]!r} is not {2 * HASH_BYTES} hexadecimal digits): write it again with "
            "lmms-stream index"
        )
    return parsed


def array_matches(path: Path, *, content_hash: str) -> bool:
    """Whether the .npy file at `path` holds the lengths that hash to this; reads all of it, a little at a time."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    try:
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):  # type: ignore[no-untyped-call]
                return False
            np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except (OSError, ValueError):
        return False
    return digest.hexdigest() == content_hash


@dataclass(frozen=True, kw_only=True)
class LengthIndex(Lengths):
    """The lengths of a dataset's samples, uint32[num_samples], possibly memory-mapped, and what measured them.

    fingerprint: hash of all that can change a length. content_hash: hash of the lengths themselves.
    processor: the description of what measured them.
    """

    fingerprint: str
    processor: Mapping[str, Any]

    @staticmethod
    def from_array(
        lengths: NDArray[np.integer[Any]], *, fingerprint: str = "", processor: Mapping[str, Any] | None = None
    ) -> LengthIndex:
        return LengthIndex(
            lengths=lengths,
            fingerprint=fingerprint,
            content_hash=hash_lengths(lengths),
            processor=processor or {},
        )

    @property
    def num_tokens(self) -> int:
        """Of all samples; reads all of the index."""
        return int(np.sum(self.lengths, dtype=np.int64))

    def release(self) -> None:
        """Give pages of a memory-mapped index back to the kernel, which keeps them as long as it has room.

        Reading all over an index larger than memory would otherwise count as resident memory of this process.
        """
        mapped = getattr(self.lengths, "_mmap", None)  # a numpy.memmap has it
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)

    def write(self, folder: Path) -> tuple[str, str]:
        """Write both files below a dataset's folder; returns their names relative to it."""
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
        (folder / description_name).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")
        return array_name, description_name

    @staticmethod
    def open(array_path: Path, description: bytes, *, fingerprint: str) -> LengthIndex:
        """Memory-map an index whose description was read already; LengthsError when they do not fit."""
        described = parse_description(description, fingerprint=fingerprint)
        num_samples = described["num_samples"]
        try:
            lengths = np.load(array_path, mmap_mode="r", allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise LengthsError(
                f"lengths index {fingerprint} at {array_path} cannot be read ({error}): "
                "write it again with lmms-stream index"
            ) from error
        if lengths.dtype != np.uint32 or lengths.shape != (num_samples,):
            raise LengthsError(
                f"lengths index {fingerprint} should be uint32[{num_samples}], found {lengths.dtype}"
                f"{list(lengths.shape)} at {array_path}: write it again with lmms-stream index"
            )
        return LengthIndex(
            lengths=lengths,
            fingerprint=fingerprint,
            content_hash=described["content_hash"],
            processor=described["processor"],
        )
