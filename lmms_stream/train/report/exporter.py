"""Figures of this rank for Prometheus, or for any receiver of OpenTelemetry. RankFigures -> [exporter] -> metrics.

One set of OpenTelemetry's instruments serves both, and reads the figures when a receiver asks: a step pays nothing.
OpenTelemetry's own variables set addresses and intervals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ...errors import ConfigError
from ...extras import need
from ...types import World
from ..run.settings import Reporter
from .rank_figures import QUANTILES, RankFigures

_MODULES: dict[Reporter, str] = {
    "prometheus": "opentelemetry.exporter.prometheus",
    "otlp": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
}
HOST, PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
DEFAULT_PORT = 9464  # of OpenTelemetry's specification

Point = tuple[float, Mapping[str, str]]  # value and labels
Points = Callable[[RankFigures], Iterable[Point]]


def check_exporters(report_to: Sequence[Reporter]) -> None:
    """Raise ConfigError for an exporter without its package, or without a valid port."""
    for name in report_to:
        if name in _MODULES:
            need(_MODULES[name], by=f"metrics for {name}")
    _port()


@contextmanager
def exported(figures: Callable[[], RankFigures], report_to: Sequence[Reporter], *, world: World) -> Iterator[None]:
    """Serve or send the figures inside; ConfigError if the port is taken. Without an exporter in report_to: nothing."""
    names = [name for name in report_to if name in _MODULES]
    if not names:
        yield
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    readers: list[MetricReader] = []
    server = None
    if "prometheus" in names:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        server = _serve(registry)
        readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
    if "otlp" in names:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    provider = MeterProvider(readers, resource=Resource.create({"service.name": "lmms_stream"}), shutdown_on_exit=False)
    _instruments(provider.get_meter("lmms_stream"), figures, rank=world.rank)
    try:
        yield
    finally:
        with suppress(Exception):  # the receiver of the last metrics may be gone: a run does not fail for that
            provider.shutdown(timeout_millis=5000)
        if server is not None:
            server.shutdown()
            server.server_close()


def _serve(registry: Any) -> Any:
    """Serve a registry at this rank's port in a thread; return the server."""
    from prometheus_client import start_http_server

    host, port = os.environ.get(HOST, "127.0.0.1"), _port()
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be had for prometheus ({error.strerror or error}): set {PORT} to a port "
            f"with as many free ports after it as this node has ranks, and {HOST} to an address of this node"
        ) from error
    return server


def _port() -> int:
    """Return the port of this rank: the node's first port plus the rank's number on the node."""
    text = os.environ.get(PORT, str(DEFAULT_PORT))
    port = int(text) + int(os.environ.get("LOCAL_RANK", "0")) if text.isdecimal() else -1
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{PORT} must be a port from 1 to 65535, and so must it plus the ranks of a node, got {text}")
    return port


def _instruments(meter: Any, figures: Callable[[], RankFigures], *, rank: int) -> None:
    from opentelemetry.metrics import Observation

    pid = os.getpid()

    def observed(points: Points) -> Callable[[Any], Iterator[Any]]:
        def observe(_: Any) -> Iterator[Any]:
            if os.getpid() != pid:  # OpenTelemetry's thread starts again in a fork, whose figures stand still
                return
            for value, labels in points(figures()):
                yield Observation(value, {"rank": str(rank), **labels})

        return observe

    for name, (unit, description, points) in COUNTERS.items():
        meter.create_observable_counter(f"lmms_stream.{name}", [observed(points)], unit, description)
    for name, (unit, description, points) in GAUGES.items():
        meter.create_observable_gauge(f"lmms_stream.{name}", [observed(points)], unit, description)


# Figures -> points. Names of metrics begin with lmms_stream; Prometheus adds the unit and, for counters, _total.


def _one(value: Callable[[RankFigures], float]) -> Points:
    return lambda figures: [(value(figures), {})]


def _fetched(field: str, *, scale: float = 1) -> Points:
    """Return a count of fetches by source. field: of FetchCounts."""
    return lambda figures: [
        (getattr(counts, field) * scale, {"source": source}) for source, counts in figures.loader.fetched.items()
    ]


def _made(field: str, *, scale: float = 1) -> Points:
    """Return a count of packs by worker and source. field: of MakeCounts."""
    return lambda figures: [
        (getattr(counts.with_begun, field) * scale, {"worker": worker, "source": source})
        for worker, by_source in _workers(figures)
        for source, counts in by_source.items()
    ]


def _workers(figures: RankFigures) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each worker's number, and "none" for the rank's own process, with the counts by source."""
    for number, by_source in enumerate(figures.loader.made, start=1):
        yield "none" if number == len(figures.loader.made) else str(number - 1), by_source


def _slowest(figures: RankFigures) -> list[Point]:
    """Return the slowest sample of the last minute of each source."""
    found: dict[str, tuple[int, int]] = {}
    for _, by_source in _workers(figures):
        for source, counts in by_source.items():
            found[source] = max(found.get(source, (0, 0)), (counts.slowest_us, counts.slowest_id))
    return [(us / 1e6, {"source": source, "sample": str(number)}) for source, (us, number) in found.items() if us]


def _waits(figures: RankFigures) -> list[Point]:
    return [(value, {"quantile": f"{each:g}"}) for each, value in zip(QUANTILES, figures.waits_s, strict=True)]


def _doing(figures: RankFigures) -> list[Point]:
    return [(seconds, {"doing": name}) for name, seconds in figures.doing_s.items()]


def _slow(figures: RankFigures) -> list[Point]:
    return [(1, {"kind": kind, "part": part}) for kind, part in figures.slow]


COUNTERS: dict[str, tuple[str, str, Points]] = {
    "steps": ("", "Steps of this rank since its start", _one(lambda each: each.num_steps)),
    "tokens": ("", "Tokens of samples, without padding", _one(lambda each: each.num_tokens)),
    "loss_tokens": ("", "Tokens with a label", _one(lambda each: each.num_loss_tokens)),
    "wait": ("s", "Time that steps waited for data", _one(lambda each: each.wait_s)),
    "cache_hits": ("", "Shards found on this node", _fetched("hits")),
    "downloads": ("", "Shards downloaded from the store", _fetched("misses")),
    "downloaded": ("By", "Bytes downloaded from the store", _fetched("num_bytes")),
    "from_peers": ("", "Shards from other nodes", _fetched("from_peers")),
    "peer": ("By", "Bytes from other nodes", _fetched("peer_bytes")),
    "requests": ("", "Requests to the store", _fetched("num_requests")),
    "retries": ("", "Requests repeated after a failure", _fetched("num_retries")),
    "throttled": ("s", "Pauses because the store throttled, summed over threads", _fetched("throttled_ms", scale=1e-3)),
    "evictions": ("", "Shards deleted under cache_limit", _fetched("num_evicted")),
    "doing": ("s", "Sampled time of steps: waiting for data, for other ranks, working", _doing),
    "packs": ("", "Packs made of samples", _made("num_packs")),
    "making": ("s", "Time of making packs", _made("making_us", scale=1e-6)),
    "reading": ("s", "Time of reading samples, a part of making", _made("reading_us", scale=1e-6)),
}
GAUGES: dict[str, tuple[str, str, Points]] = {
    "step_wait": ("s", "Quantiles of the waiting times of the last 1000 steps", _waits),
    "queue_depth": ("", "Items made by workers and not taken yet", _one(lambda each: each.loader.num_ready)),
    "slow_part": ("", "1 for each slow worker, disk, store and rank of the run; from rank 0", _slow),
    "slowest_sample": ("s", "Time of the slowest sample of the last minute", _slowest),
}
