"""What is simulated is what nodes do behind links of a rate, with a real S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lmms_stream.tools.simulate.measured import Simulation

from ..rounds import in_long_rounds
from .case import CASES, Case
from .namespaces import what_is_missing
from .truth import Measured, store_of

pytestmark = [in_long_rounds, pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing()))]

Do = Callable[[Case], tuple[Simulation, Measured]]
HALF_IDLE = 0.5  # of the CPUs' time: on a machine that has other things to do, times are its own


@pytest.fixture(scope="module")
def do(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Do]:
    with store_of(4, tmp_path_factory.mktemp("truth")) as found:
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nodes_download_what_was_foretold_and_take_as_long(do: Do, case: Case) -> None:
    told, found = do(case)
    counts = [sum(each.values()) for each in found.downloads]
    assert told.num_asked_only == 0
    assert len(found.waits_s) == told.num_steps
    if case.cache is None:
        assert counts == [node.num_downloads for node in told.nodes]
        assert found.num_bytes == [node.download_bytes for node in told.nodes]
        assert [sum(each[name] for each in found.downloads) for name in found.sizes] == told.shard_downloads.tolist()
    else:  # what gives way depends on when each worker looks
        assert told.num_again > 0
        assert sum(counts) == pytest.approx(told.num_downloads, rel=0.1)
    for received, num_bytes in zip(found.received_bytes, found.num_bytes, strict=True):
        assert num_bytes < received < 1.06 * num_bytes  # headers, the indexes, and what packets say of arrivals
    if found.idle > HALF_IDLE:
        assert found.total_s == pytest.approx(told.total_s, rel=0.15)
        assert found.wait_s == pytest.approx(told.first_wait_s + told.wait_s, rel=0.15)
