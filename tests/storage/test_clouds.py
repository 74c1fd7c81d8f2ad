"""What goes wrong between here and the stores of Amazon, Google and Azure: tried again, bounded in time, or named."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from lmms_stream.errors import StorageError
from lmms_stream.plugins.stores.azure import AzureStorage
from lmms_stream.storage.retry import Retry
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import StoredObject

from ..conftest import prefix_of, run_command
from ..emulators import EMULATED
from ..proxy import FaultProxy, Rule, fault_proxy
from ..rounds import rounds

VARIABLES = {"s3": "S3_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "azure": "AZURE_STORAGE_SERVICE_ENDPOINT"}
AZURE_URL = "azure://account.blob.core.windows.net/container/x"
WRITES = {"gs": "POST", "azure": "PUT"}


@pytest.fixture(params=EMULATED)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(scheme: str, request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(scheme)}/{prefix_of(request)}"


@pytest.fixture(params=["s3", *EMULATED])
def any_scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def any_url(any_scheme: str, request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(any_scheme)}/{prefix_of(request)}"


@pytest.fixture
def proxy(scheme: str, url: str) -> Iterator[FaultProxy]:
    with fault_proxy(os.environ[VARIABLES[scheme]], variable=VARIABLES[scheme]) as proxy:
        yield proxy


@pytest.fixture
def any_proxy(any_scheme: str, any_url: str) -> Iterator[FaultProxy]:
    with fault_proxy(os.environ[VARIABLES[any_scheme]], variable=VARIABLES[any_scheme]) as proxy:
        yield proxy


FAULTS = [
    Rule(times=2, status=503),
    Rule(times=2, reset=True),
    Rule(times=2, reset_after=1000),
    Rule(times=2, cut_after=1000),
]


@pytest.mark.parametrize("rule", FAULTS, ids=["503", "reset", "reset within", "short"])
def test_what_fails_is_read_again(rule: Rule, url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    store, data = open_storage(url), os.urandom(3 << 20)
    store.write("data", data)
    proxy.set_rules(rule)
    store.download("data", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert proxy.traffic().num_requests("GET", "/data$") == 3
    proxy.set_rules(rule)
    assert store.read_range("data", start=5000, stop=9000, tag=store.stat("data").tag) == data[5000:9000]


@pytest.mark.parametrize("status", rounds([503], [429, 500, 503]))
def test_an_outage_is_waited_out_whatever_the_number_of_attempts(
    status: int, any_scheme: str, any_url: str, tmp_path: Path
) -> None:
    data, num_refused = os.urandom(1 << 20), rounds(3, 8)
    open_storage(any_url).write("data", data)
    with fault_proxy(os.environ[VARIABLES[any_scheme]], variable=VARIABLES[any_scheme]) as proxy:
        store, methods = open_storage(any_url, retry=Retry(attempts=1)), ("GET", "PUT", "POST")
        proxy.set_rules(*(Rule(method=method, status=status, times=num_refused) for method in methods))
        store.download("data", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        assert proxy.traffic().num_requests("GET", "/data$") > num_refused
        proxy.set_rules(*(Rule(method=method, reset=True, times=num_refused) for method in methods))
        store.write("more", data)
        assert store.read("more") == data


def test_a_store_that_stays_overloaded_is_an_error_that_says_so(any_url: str, any_proxy: FaultProxy) -> None:
    any_proxy.set_rules(Rule(status=503))
    expected = (
        rf"^{any_url}/data: the store was overloaded or unwell for 2 s \(attempt [3-9], its last answer was: .*\): "
        "try again later, send fewer requests at once, or raise timeout_s$"
    )
    with pytest.raises(StorageError, match=expected):
        open_storage(any_url, retry=Retry(attempts=1, timeout_s=2)).read("data")


def test_a_body_that_is_always_cut_short_ends_after_the_attempts(any_url: str, any_proxy: FaultProxy) -> None:
    open_storage(any_url).write("data", os.urandom(10_000))
    any_proxy.set_rules(Rule(cut_after=1000))
    with pytest.raises(StorageError, match=r"/data: .*\(after 2 attempts\): check "):
        open_storage(any_url, retry=Retry(attempts=2)).read("data")


def test_what_fails_is_written_again(scheme: str, url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    store, data = open_storage(url), os.urandom(18 << 20)
    (tmp_path / "data").write_bytes(data)
    proxy.set_rules(Rule(method=WRITES[scheme], times=2, status=503))
    store.upload(tmp_path / "data", "data")
    store.write("little", b"x")
    assert (store.read("data"), store.read("little")) == (data, b"x")


def test_a_server_that_hangs_is_given_up_in_time(url: str, proxy: FaultProxy) -> None:
    store = open_storage(url, retry=Retry(timeout_s=5))
    store.write("data", b"x")
    proxy.set_rules(Rule(hang=True))
    with pytest.raises(StorageError, match=r"/data: no complete answer within 5 s \(attempt 1[,)].*: check "):
        store.read("data")


CREDENTIALS = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "check AZURE_ACCOUNT_NAME, AZURE_ACCOUNT_ACCESS",
}
CONTAINERS = {"s3": "bucket", "gs": "bucket", "azure": "container"}


def test_who_is_refused_is_told_what_to_check(any_scheme: str, any_url: str, any_proxy: FaultProxy) -> None:
    any_proxy.set_rules(Rule(status=403))
    with pytest.raises(
        StorageError, match=rf"{any_url}/data: the credentials are refused \(.*\): {CREDENTIALS[any_scheme]}"
    ):
        open_storage(any_url).read("data")
    assert any_proxy.traffic().num_requests("GET", "/data$") == 1


def test_an_endpoint_that_does_not_answer_is_named(
    any_scheme: str, any_url: str, any_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = VARIABLES[any_scheme]
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=rf"within 1 s \(attempt .*127\.0\.0\.1.*\): check .*{variable}"):
        open_storage(any_url, retry=Retry(timeout_s=1)).read("data")
    monkeypatch.setenv(variable, "http://no-such-host.invalid")
    with pytest.raises(StorageError, match=rf"no-such-host.*\(after 2 attempts\): check .*{variable}"):
        open_storage(any_url, retry=Retry(attempts=2)).read("data")


def test_a_bucket_that_is_missing_is_named_with_the_remedy(any_scheme: str, any_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    absent = open_storage(re.sub("[^/]+/([^/]+)$", r"no-such-bucket/\1", any_url))
    actions: list[Callable[[], object]] = [
        lambda: absent.read("x"), lambda: absent.list_objects(""), lambda: absent.delete("x"),
        lambda: absent.write("x", b""), lambda: absent.upload(tmp_path / "file", "x"),
    ]  # fmt: skip
    if any_scheme != "s3":  # which tells the facts of an object by headers alone
        actions.append(lambda: absent.stat("x"))
    for action in actions:
        with pytest.raises(
            StorageError,
            match=f"{CONTAINERS[any_scheme]} 'no-such-bucket' does not exist: create it or correct the URL",
        ):
            action()


def test_a_disk_that_is_full_is_not_taken_for_the_network(url: str) -> None:
    store = open_storage(url)
    store.write("data", b"x" * 10_000)
    with pytest.raises(StorageError, match=r"No space left on device"):
        store.download("data", Path("/dev/full"))


def test_stores_go_to_other_processes(url: str) -> None:
    store = open_storage(url)
    store.write("data", b"x")
    assert pickle.loads(pickle.dumps(store)).read("data") == b"x"


# What needs no server


def test_urls_name_bucket_or_account_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "elsewhere")
    store = open_storage("azure://account.blob.core.windows.net/container/some/prefix/")
    assert isinstance(store, AzureStorage)
    assert (store.container, store.prefix) == ("container", "some/prefix")
    for url, asked in (
        ("gs:///prefix", "names no bucket: write gs://BUCKET/PREFIX"),
        ("azure://account", "names no account and container: write azure://ACCOUNT.blob.core.windows.net/CONTAINER"),
    ):
        with pytest.raises(StorageError, match=asked):
            open_storage(url)


def test_missing_credentials_of_google_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GCS_KEY", "GCS_SECRET", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StorageError, match=r"no Google credentials were found \(.*none\.json.*set GOOGLE_APPLICATION_"):
        open_storage("gs://bucket/x").read("data")


def test_missing_credentials_of_azure_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_ACCOUNT_ACCESS_KEY", "AZURE_STORAGE_SERVICE_ENDPOINT", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")  # and no machine's own, which is on the net
    with pytest.raises(StorageError, match=r"no Azure credentials were found \(.*\): set AZURE_ACCOUNT_ACCESS_KEY"):
        open_storage(AZURE_URL, retry=Retry(attempts=1)).read("data")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "not a key")
    with pytest.raises(StorageError, match=r"AZURE_ACCOUNT_ACCESS_KEY is not the key of a storage account \(.*\): "):
        open_storage(AZURE_URL, retry=Retry(attempts=1)).read("data")


@pytest.mark.parametrize(
    ("url", "module", "command"),
    [
        ("gs://bucket/x", "google.cloud.storage", "pip install 'lmms-stream[gcs]'"),
        (AZURE_URL, "azure.storage.blob", "pip install 'lmms-stream[azure]'"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_command(
    url: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StorageError, match=re.escape(command)):
        open_storage(url).read("data")


def test_libraries_of_stores_are_imported_where_they_are_asked() -> None:
    code = (
        "import sys; from lmms_stream.storage.storage import open_storage; "
        f"[open_storage(url) for url in ('s3://b/x', 'gs://b/x', {AZURE_URL!r})]; "
        "print(sorted({'boto3', 'google.cloud.storage', 'azure.core', 'requests', 'streaming'} & set(sys.modules)))"
    )
    result = run_command(sys.executable, "-c", code)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("oci://bucket/x", r"\.oci/config.*: write ~/\.oci/config \(oci setup config\)"),
        ("sftp:///x", r"must include the hostname\.: check user and password in the URL \(sftp://USER@HOST/PATH\)"),
        ("hf://datasets/a b/c", r"write hf://datasets/ORGANIZATION/NAME/PATH"),
        ("dbfs://x", r"pip install 'mosaicml-streaming\[databricks\]'"),
    ],
)
def test_what_no_further_attempt_mends_is_not_tried_again(
    url: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_storage(url)
    with pytest.raises(StorageError, match=remedy) as caught:
        store.download("data", tmp_path / "data")
    assert "attempts" not in str(caught.value)


class _Alipan:
    """The calls of alipcs_py by which MosaicML's package lists a folder; nobody here has an account."""

    def __init__(self, *arguments: object, **keywords: object):
        self.files = ("/set/a/x.jsonl", "/set/y.jsonl")

    def refresh(self) -> None: ...

    def get_file(self, remotepath: str) -> SimpleNamespace:
        return SimpleNamespace(file_id=remotepath)

    def list_iter(self, folder: str, recursive: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(path=path.removeprefix(f"{folder}/")) for path in self.files]


def test_names_that_a_store_gives_with_their_folder_are_those_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("streaming")
    for name in ("alipcs_py", "alipcs_py.commands", "alipcs_py.alipcs", "alipcs_py.commands.upload"):
        module = ModuleType(name)
        module.__dict__.update({"AliPCSApiMix": _Alipan, "EncryptType": SimpleNamespace(No=0)})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("ALIPAN_WEB_REFRESH_TOKEN", "token")
    store = open_storage("alipan:///set")
    assert [each.key for each in store.list_objects("")] == ["a/x.jsonl", "y.jsonl"]
    assert [each.key for each in store.list_objects("a/")] == ["a/x.jsonl"]


class _Oci:
    """The calls of oci by which an object's size and tag are read; nobody here has an account."""

    def __init__(self, **keywords: object): ...

    def get_namespace(self) -> SimpleNamespace:
        return SimpleNamespace(data="team")

    def head_object(self, *place: str) -> SimpleNamespace:
        return SimpleNamespace(headers={"content-length": "7", "etag": f'"{" ".join(place)}"'})


def test_a_bucket_of_oci_is_named_with_its_namespace_or_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("streaming")
    module = ModuleType("oci")
    module.__dict__.update({
        "config": SimpleNamespace(from_file=dict),
        "object_storage": SimpleNamespace(ObjectStorageClient=_Oci),
        "retry": SimpleNamespace(DEFAULT_RETRY_STRATEGY=None),
    })  # fmt: skip
    monkeypatch.setitem(sys.modules, "oci", module)
    for url in ("oci://bucket/set", "oci://bucket@team/set"):
        assert open_storage(url).stat("a/x.mds") == StoredObject("a/x.mds", 7, "team bucket set/a/x.mds")


@pytest.mark.parametrize("scheme", ["gcs", "S3", "http"])
def test_a_scheme_that_no_store_has_is_refused_at_once(scheme: str) -> None:
    with pytest.raises(
        StorageError, match=rf"{scheme}://b/x: no store has the scheme '{scheme}': write one of s3://, gs"
    ):
        open_storage(f"{scheme}://b/x")
