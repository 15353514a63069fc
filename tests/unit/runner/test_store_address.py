"""The store in which processes meet has no passwords: it listens at an address alone where one is given."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from tango_hpc.models.parallel.ranks import listen_at, open_store
from tango_hpc.runner.environment import free_port


def listening(port: int) -> set[str]:
    """The IPv4 addresses at which this machine listens on `port`, and "v6" for any of the other kind."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address, _, number = local.partition(":")
        if int(number, 16) == port and state == "0A":
            found.add(socket.inet_ntoa(struct.pack("<I", int(address, 16))))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        if int(line.split()[1].rpartition(":")[2], 16) == port and line.split()[3] == "0A":
            found.add("v6")
    return found


@pytest.mark.parametrize(("world", "here"), [("2", "2"), ("1", "1")])
def test_on_one_machine_it_is_not_to_be_reached_from_outside(
    monkeypatch: pytest.MonkeyPatch, world: str, here: str
) -> None:
    port = free_port()
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
        ("WORLD_SIZE", world),
        ("LOCAL_WORLD_SIZE", here),
    ):
        monkeypatch.setenv(name, value)
    store = open_store(10, hosts=True)
    assert listening(port) == {"127.0.0.1"}
    store.set("met", "yes")
    assert open_store(10, hosts=False).get("met") == b"yes"


def test_across_nodes_it_listens_at_the_address_that_is_named() -> None:
    port = free_port()
    with listen_at("127.0.0.2", port, spans_nodes=True) as listener:  # type: ignore[union-attr]
        assert listener.getsockname() == ("127.0.0.2", port) and listening(port) == {"127.0.0.2"}
    # A name, as Debian has the node's own in /etc/hosts, may stand for another address on other nodes.
    assert listen_at("localhost", port, spans_nodes=True) is None


def test_an_address_that_others_translate_is_no_reason_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert listen_at("192.0.2.7", free_port(), spans_nodes=True) is None  # of no machine: RFC 5737
    assert "192.0.2.7 is no address of this node's interfaces" in capsys.readouterr().out


def test_a_name_that_several_nodes_look_up_is_answered_on_every_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in (("ADDR", "localhost"), ("PORT", str(port))):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    store = open_store(10, hosts=True)
    store.set("met", "yes")
    assert listening(port) & {"0.0.0.0", "v6"}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")
    assert open_store(10, hosts=False).get("met") == b"yes"
