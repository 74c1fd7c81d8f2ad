"""Which of a node's network interfaces gloo takes, where the node's own name would lead it to none that others reach.

gloo listens at the address that the node's name has. Debian and its like give it 127.0.1.1 in /etc/hosts, and a name
that nobody knows counts as 127.0.0.1: other nodes would connect to themselves, and the run would stand still.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping

from ...errors import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
logger = logging.getLogger("lmms_stream")


def set_interface(environment: MutableMapping[str, str]) -> None:
    """Name gloo's interface in the environment of a rank, where it has to be and nobody did. ConfigError: see chosen.

    environment: torchrun's, with the addresses of all ranks' store; a run on one node needs none.
    """
    size, local_size = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    if VARIABLE in environment or size is None or local_size is None or int(size) <= int(local_size):
        return
    first = environment.get("MASTER_ADDR", "")
    if first == "localhost" or first.startswith("127."):  # all of them are on this machine
        return
    own = own_address()
    if own is not None and not ipaddress.ip_address(own).is_loopback:
        return
    found = {name: each for name, each in interfaces().items() if not ipaddress.ip_address(each).is_loopback}
    if not found:  # there is no way to another machine
        return
    name = chosen(found, towards=_address_towards(first), own=own)
    environment[VARIABLE] = name
    if environment.get("LOCAL_RANK") == "0":
        logger.info(
            "the name %s leads to %s, which no other node reaches: gloo takes %s (%s)",
            socket.gethostname(), own or "no address", name, VARIABLE,
        )  # fmt: skip


def chosen(found: Mapping[str, str], *, towards: str | None, own: str | None) -> str:
    """The interface that has the address from which the first rank is reached, or the only one there is.

    found: IPv4 addresses of interfaces by name, loopback not among them. ConfigError where neither tells.
    """
    names = [name for name, each in found.items() if each == towards] or list(found)
    if len(names) != 1:
        known = ", ".join(f"{name} ({each})" for name, each in found.items())
        raise ConfigError(
            f"this node's name leads to {own or 'no address'}, which other nodes do not reach, and which of its "
            f"interfaces they do is not known: set {VARIABLE} to one of them: {known}"
        )
    return names[0]


def address_for_others(environment: Mapping[str, str]) -> str:
    """An address of this node that the other nodes of torchrun's environment reach; of one machine, loopback.

    It is that of gloo's interface where one is named, else the one from which the first rank is reached, else that of
    the node's own name, else the only one there is. ConfigError: see chosen.
    """
    first, named = environment.get("MASTER_ADDR", ""), environment.get(VARIABLE, "").split(",")[0]
    found = {name: each for name, each in interfaces().items() if not ipaddress.ip_address(each).is_loopback}
    if named in found:
        return found[named]
    if not found or first == "localhost" or first.startswith("127."):
        return "127.0.0.1"
    towards, own = _address_towards(first), own_address()
    for each in (towards, own):
        if each is not None and not ipaddress.ip_address(each).is_loopback:
            return each
    return found[chosen(found, towards=towards, own=own)]


def own_address() -> str | None:
    """The address that gloo takes by itself: the first of this node's name that it can listen at; None for none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as listener:
            try:
                listener.bind(address)
            except OSError:
                continue
            return str(address[0])
    return None


def interfaces() -> dict[str, str]:
    """The IPv4 addresses of this node's interfaces, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _address_towards(host: str) -> str | None:
    """The address from which this node would send to a host; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
