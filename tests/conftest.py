"""Real parts that tests share: a corpus, a tokenizer trained on it, an S3 server, converted datasets.

The process that shares tests out among others reads this file, too: it need not import torch, so functions here do.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .compiled import ROOT, outdated
from .emulators import EMULATED, azure_emulator, gcs_emulator
from .guard.collective_log import FOLDER as COLLECTIVES
from .guard.collective_log import faults
from .kept_schemas import keep_schemas
from .processes import ENVIRONMENT, run_module
from .proxy import FaultProxy, fault_proxy
from .rounds import LONG

if TYPE_CHECKING:
    from lmms_stream.processors.chat import ChatProcessor
    from lmms_stream.tools.demo.corpus import Corpus

gc.disable()  # until all tests are imported: nothing is left to collect

# Files that take long, by the start of their names: the longest first.
LONGEST = ("jobs/test_stopping", "demo/test_demo", "docs/test_pages", "jobs/", "mds/", "converters/")
os.environ["LMMS_STREAM_WATCH_COPIES"] = "1"  # of this process and its children: see train/run/copies.py
TokensAndSpans = tuple[NDArray[Any], NDArray[Any]]  # int32[T] and int32[k, 2]
S3_BUCKET = "lmms-stream-demo"  # what s3_endpoint makes


def pytest_configure() -> None:
    """Let all processes that tests start log their collectives, in a folder of this process; see tests/guard.

    Properties are tried with the same examples in every run, and without limits of time: a busy machine fails none.
    """
    from hypothesis import HealthCheck, settings

    os.environ[COLLECTIVES] = tempfile.mkdtemp(prefix="collectives-")
    if sources := outdated(ROOT):
        raise pytest.UsageError(f"the loops of {', '.join(sources)} are not compiled: `make setup` compiles them")
    settings.register_profile("any load", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any load")
    paths = [str(Path(__file__).parent / "guard"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ[COLLECTIVES], ignore_errors=True)


@pytest.fixture(autouse=True)
def equal_collectives() -> Iterator[None]:
    """Fail if ranks of the test's processes called different collectives."""
    yield
    if found := faults(Path(os.environ[COLLECTIVES])):
        pytest.fail("\n".join(found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that the processes of a run end at about the same time."""

    def rank(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((number for number, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Leave imported modules out of all collections."""
    keep_schemas()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Some hundred chats about asyncio."""
    from lmms_stream.tools.demo.corpus import build_corpus

    library = Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
    return build_corpus(tmp_path_factory.mktemp("corpus"), library=library)


@pytest.fixture(scope="session")
def tokenizer(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lmms_stream.tools.demo.corpus import train_tokenizer

    return train_tokenizer(corpus.texts, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat_processor(tokenizer: Path) -> ChatProcessor:
    from lmms_stream.processors.chat import ChatProcessor

    return ChatProcessor.from_pretrained(str(tokenizer))


@pytest.fixture(scope="session")
def dataset_folder(corpus: Corpus, chat_processor: ChatProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as small shards with a lengths index, in a local folder."""
    from lmms_stream.converters.convert import convert

    folder = tmp_path_factory.mktemp("dataset")
    convert([corpus.functions, corpus.classes], str(folder), processor=chat_processor, shard_bytes=1 << 16)
    return folder


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A URL below which tests may write; the environment is set so that child processes reach the server too."""
    from lmms_stream.tools.demo.endpoint import s3_endpoint

    with s3_endpoint():
        yield f"s3://{S3_BUCKET}"


@pytest.fixture(autouse=True)
def own_shared_memory() -> Iterator[None]:
    """Let go of what MosaicML's library holds for good: three files of shared memory for every dataset that is open.

    It keeps those of each dataset, and all that it found of others while it looked for a number that is free, until the
    process ends: after some dozens of tests that is more files than select() can wait for. And each process of this
    machine that runs tests has numbers of its own, since two that took the same one at the same moment would both fail.
    """
    first = 1000 * os.getpid()
    held: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test's is undone before fixtures that came after it
        patch.setattr("streaming.base.shared.prefix._each_prefix_int", lambda: count(first))
        patch.setattr("streaming.base.shared.memory.atexit", SimpleNamespace(register=held.append))
        yield
    if in_use := [let_go for let_go in held if not _done(let_go)]:
        gc.collect()  # arrays that lie in it
        for let_go in in_use:  # again; what a dataset that outlives its test holds, it keeps
            _done(let_go)


def _done(let_go: Callable[[], None]) -> bool:
    """Let shared memory go, unless arrays lie in it; whether that is so."""
    try:
        let_go()
    except BufferError:
        return False
    return True


def prefix_of(request: pytest.FixtureRequest) -> str:
    """A name of this test's own, with no brackets in it, which sources take for a pattern."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", request.node.name).strip("-")


@pytest.fixture
def s3_folder(s3: str, request: pytest.FixtureRequest) -> str:
    return f"{s3}/{prefix_of(request)}"


@pytest.fixture(scope="session")
def gs() -> Iterator[str]:
    """The same in an emulator of Google Cloud Storage."""
    with gcs_emulator() as url:
        yield url


@pytest.fixture(scope="session")
def azure() -> Iterator[str]:
    """The same in an emulator of Azure Blob Storage."""
    with azure_emulator() as url:
        yield url


@pytest.fixture(params=["s3", *EMULATED] if LONG else EMULATED)
def any_store_folder(request: pytest.FixtureRequest) -> str:
    """A prefix of this test's own, in each kind of store; in `make test` in one that other tests do not use."""
    return f"{request.getfixturevalue(request.param)}/{prefix_of(request)}"


@pytest.fixture(params=["s3", *(EMULATED if LONG else [])])
def store_folder(request: pytest.FixtureRequest) -> str:
    """The same for tests that take long: in `make test` in S3 alone."""
    return f"{request.getfixturevalue(request.param)}/{prefix_of(request)}"


@pytest.fixture(scope="module")
def running_proxy(s3: str) -> Iterator[FaultProxy]:
    with fault_proxy(os.environ["S3_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """In front of the S3 server, without rules."""
    running_proxy.set_rules()
    yield running_proxy
    running_proxy.set_rules()


@pytest.fixture
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder to which transformers copies the Python files of a model; modules of earlier copies are forgotten."""
    folder = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def write_tokens(
    folder: Path, *, num_samples: int, with_index: bool = True, compression: str | None = None, longest: int = 60
) -> NDArray[np.uint32]:
    """A dataset of tokenized samples in shards of 16 KiB: sample n is its number, 20 or more times; their lengths."""
    lengths = np.random.default_rng(7).integers(20, longest, num_samples).tolist()
    samples = [
        (np.full(length, number, np.int32), np.array([[length // 2, length]], np.int32))
        for number, length in enumerate(lengths)
    ]
    return write_samples(folder, samples, with_index=with_index, compression=compression)


def write_samples(
    folder: Path,
    samples: Iterable[TokensAndSpans],
    *,
    with_index: bool = True,
    compression: str | None = None,
    shard_bytes: int = 1 << 14,
) -> NDArray[np.uint32]:
    """A dataset of tokenized samples, each its tokens and the spans of them that are learnt; their lengths."""
    from lmms_stream.mds.lengths import LengthIndex
    from lmms_stream.processors.base import processor_fingerprint
    from lmms_stream.processors.text import TokensProcessor
    from streaming import MDSWriter

    columns = {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
    lengths = []
    with MDSWriter(
        columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=shard_bytes, compression=compression
    ) as writer:
        for tokens, spans in samples:
            writer.write({"input_ids": tokens, "loss_spans": spans})
            lengths.append(len(tokens))
    measured = np.array(lengths, np.uint32)
    if with_index:
        processor = TokensProcessor()
        fingerprint = processor_fingerprint(processor)
        LengthIndex.from_array(measured, fingerprint=fingerprint, processor=processor.description).write(folder)
    return measured


def run_command(*command: str, timeout_s: float = 120, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end, with output captured; one thread per process, as torchrun would."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=os.environ | ENVIRONMENT, check=False
    )


def last_words(text: str) -> str:
    """The end of what a job said: the tracebacks of all ranks, before torchrun's report of them, are in it."""
    return text[-20_000:]


def run_cli(*arguments: str, timeout_s: float = 120, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `lmms-stream` to its end, in a forked process: docs/test_pages.py shows what new interpreters do."""
    return run_module("lmms_stream", *arguments, timeout_s=timeout_s, cwd=cwd or Path.cwd())
