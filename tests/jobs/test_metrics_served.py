"""Metrics that ranks serve to Prometheus: the log's own figures, by rank, source and worker."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.loader.counts import LoaderCounts
from lmms_stream.train.report.exporter import DEFAULT_PORT, GAUGES, PORT, exported
from lmms_stream.train.report.rank_figures import RankMeter
from lmms_stream.train.report.train_log import read_log
from lmms_stream.types import World
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import last_words

from .launcher import run_job
from .runs import JOB_S, write_chat_run

STEPS = 6


@pytest.fixture(scope="module")
def served(few_chats: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of a run of two ranks with a worker each, and the metrics that each rank served at the end."""
    folder = tmp_path_factory.mktemp("served")
    path = write_chat_run(folder / "run.yaml", few_chats, tokenizer, max_steps=STEPS, timeout_s=60)
    done = run_job(2, "tests.jobs.metrics_job", str(path), timeout_s=JOB_S)
    assert done.returncode == 0, last_words(done.stderr)
    return folder / "default"


def metrics_of(output: Path) -> dict[str, list[Metric]]:
    """The metrics of both ranks, by name."""
    found: dict[str, list[Metric]] = {}
    for rank in range(2):
        for metric in text_string_to_metric_families((output / f"metrics-{rank}.txt").read_text()):
            found.setdefault(metric.name, []).append(metric)
    return found


def test_metrics_of_two_ranks_are_the_figures_of_the_log(served: Path) -> None:
    found, records = metrics_of(served), read_log(served)

    def values(name: str, **labels: str) -> list[float]:
        return [
            sample.value
            for metric in found[f"lmms_stream_{name}"]
            for sample in metric.samples
            if sample.name.endswith("_total") == (metric.type == "counter") and labels.items() <= sample.labels.items()
        ]

    assert values("steps") == [STEPS] * 2
    assert sum(values("tokens")) == sum(record["num_tokens"] for record in records)
    assert sum(values("loss_tokens")) == sum(record["num_loss_tokens"] for record in records)
    longest = sum(record["data/wait_share"] * record["seconds"] for record in records)  # of the slower rank each
    assert max(values("wait_seconds")) <= longest * 1.0001 <= sum(values("wait_seconds")) * 1.0002
    assert sum(values("cache_hits")) == sum(record["data/cache_hits"] for record in records)
    assert sum(values("downloads")) == sum(record["data/cache_misses"] for record in records)
    for rank in "01":
        (making,), (reading,) = (
            values("making_seconds", rank=rank, worker="0"),
            values("reading_seconds", rank=rank, worker="0"),
        )
        assert 0 < reading < making
        assert values("packs", rank=rank, worker="0", source="data") >= [2 * STEPS]  # and some ahead
        (slowest,) = values("slowest_sample_seconds", rank=rank)
        assert 0 < slowest <= making
        waits = [values("step_wait_seconds", rank=rank, quantile=each) for each in ("0.5", "0.95", "0.99")]
        assert waits == sorted(waits)
        assert values("queue_depth", rank=rank)


def test_each_query_of_the_dashboard_names_metrics_that_are_served(served: Path) -> None:
    """A slow part has a metric only where something is slow: not here, but on a busy machine."""
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]
    named = {name for query in queries for name in re.findall(r"lmms_stream_\w+", query)}
    rank = (served / "metrics-0.txt").read_text()
    found = {sample.name for metric in text_string_to_metric_families(rank) for sample in metric.samples}
    assert "slow_part" in GAUGES
    assert named == found - {"target_info"} | {"lmms_stream_slow_part"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


class Receiver(BaseHTTPRequestHandler):
    """Keeps the bodies of requests by path."""

    bodies: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append((self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class NoLoader:
    """What a RankMeter asks a loader for, before its first batch."""

    counts = LoaderCounts({}, [], 0)


def test_a_receiver_of_opentelemetry_gets_the_figures_at_the_end_at_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = RankMeter(NoLoader())  # type: ignore[arg-type]
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        with exported(meter.figures, ["otlp"], world=World(rank=1, world_size=2)):
            meter.add(30, 20, wait_s=0.5)
        server.shutdown()
    ((path, body),) = Receiver.bodies
    assert path == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    (tokens,) = found["lmms_stream.tokens"].sum.data_points
    assert (tokens.as_int, [(each.key, each.value.string_value) for each in tokens.attributes]) == (30, [("rank", "1")])
    (wait,) = found["lmms_stream.wait"].sum.data_points
    assert wait.as_double == 0.5


def test_a_port_in_use_is_named_with_the_variable_that_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = RankMeter(loader=None)  # type: ignore[arg-type]  # nobody asks for its figures
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv(PORT, str(port))
        with (
            pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be had for prometheus .*: set {PORT}"),
            exported(meter.figures, ["prometheus"], world=World()),
        ):
            pass
    monkeypatch.setenv(PORT, "metrics")
    with (
        pytest.raises(ConfigError, match=f"{PORT} must be a port from 1 to 65535, .* got metrics"),
        exported(meter.figures, ["prometheus"], world=World()),
    ):
        pass
    assert DEFAULT_PORT == 9464  # of OpenTelemetry's specification
