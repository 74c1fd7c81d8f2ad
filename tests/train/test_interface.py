"""Which network interface a rank takes, where its node's name leads nowhere."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.train.run.distributed import (
    VARIABLE,
    address_for_others,
    chosen,
    interfaces,
    own_address,
    set_interface,
)

ETH, IB = {"eth0": "10.0.0.5"}, {"ib0": "192.168.7.5"}


def test_the_interface_towards_the_first_rank_is_taken_or_the_only_one() -> None:
    assert chosen(ETH, towards=None, own="127.0.1.1") == "eth0"
    assert chosen(ETH, towards="127.0.0.1", own=None) == "eth0"  # of the node with the first rank
    assert chosen({**ETH, **IB}, towards="192.168.7.5", own="127.0.1.1") == "ib0"


@pytest.mark.parametrize(("own", "leads"), [("127.0.1.1", r"127\.0\.1\.1"), (None, "no address")])
def test_a_node_whose_interface_is_not_known_is_an_error_that_names_those_it_has(own: str | None, leads: str) -> None:
    known = r"set GLOO_SOCKET_IFNAME to one of eth0 \(10\.0\.0\.5\), ib0 \(192\.168\.7\.5\)$"
    with pytest.raises(ConfigError, match=rf"this node's name resolves to {leads}, which other nodes cannot .*{known}"):
        chosen({**ETH, **IB}, towards="127.0.0.1", own=own)


def test_loopback_is_an_interface_of_this_machine_and_its_name_has_an_address_or_none() -> None:
    assert interfaces()["lo"] == "127.0.0.1"
    own = own_address()
    assert own is None or ip_address(own)


@pytest.mark.parametrize(
    "environment",
    [
        {"MASTER_ADDR": "10.0.0.5"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", VARIABLE: "ib7"},
    ],
    ids=["no rank", "one node", "one machine", "named already"],
)
def test_an_interface_is_named_for_ranks_of_several_nodes_alone(environment: dict[str, str]) -> None:
    before = dict(environment)
    set_interface(environment)
    assert environment == before


def test_an_address_for_others_is_that_of_the_interface_that_is_named_or_leads_to_the_first_rank() -> None:
    assert address_for_others({"MASTER_ADDR": "localhost"}) == "127.0.0.1"
    assert address_for_others({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    outside = {name: each for name, each in interfaces().items() if not ip_address(each).is_loopback}
    for name, each in outside.items():
        assert address_for_others({"MASTER_ADDR": "localhost", VARIABLE: name}) == each
        assert address_for_others({"MASTER_ADDR": each}) == each  # of the node with the first rank
    if not outside:
        assert address_for_others({"MASTER_ADDR": "10.0.0.5"}) == "127.0.0.1"
