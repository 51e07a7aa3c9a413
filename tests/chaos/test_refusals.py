"""What counts as the proof that a prefill engine's process is gone: its port refuses, and nothing less."""

from __future__ import annotations

import socket

import peers
from chaos import QUICK

from kvpush import probe


def test_a_port_refuses_or_it_does_not():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        assert not probe.refuses(address)
    assert probe.refuses(address)
    assert probe.refuses(("localhost", address[1]))


def test_every_address_of_a_name_must_refuse(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closed:
        good, bad = listening.getsockname(), closed.getsockname()
        closed.close()

        def found(*addresses):
            kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*kind, address) for address in addresses])

        found(bad, bad)
        assert probe.refuses(("name", 1))
        found(bad, good)
        assert not probe.refuses(("name", 1))

        def unknown(*_, **__):
            raise socket.gaierror("no such name")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        assert not probe.refuses(("name", 1))


def test_e7_a_dial_that_failed_without_a_refusal_proves_nothing(fleet, monkeypatch):
    """E7(d), rule 12: ZeroMQ reports a host that vanished like one that refuses; the port itself is asked again."""
    prefill = fleet.prefill()
    with peers.Decode(**QUICK, handshake_backoff_max_s=0.2) as decode:
        decode.expect("t1", [1, 2], prefill.call("address"), deadline_s=1.0)
        peers.until(lambda: prefill.call("stats")["registrations_waiting"], what="registered")
        asked = []
        monkeypatch.setattr(probe, "refuses", lambda address: bool(asked.append(address)))
        prefill.kill()
        event = decode.inbox.outcome("t1")
        assert event.outcome == "expired" and event.code == "deadline" and not event.blocks_reusable
        assert len(asked) > 1 and "t1" not in decode.inbox.released
        monkeypatch.undo()
        assert decode.inbox.reusable("t1") == "proven"


def test_refusals_that_cannot_be_checked_are_not_believed(fleet, monkeypatch):
    """Rule 16: the checks are bounded, and so is what is concluded without one."""
    monkeypatch.setattr(probe, "MAX_PROBES", 0)
    prefill = fleet.prefill()
    with peers.Decode(**QUICK, handshake_backoff_max_s=0.2) as decode:
        decode.expect("t1", [1], prefill.call("address"), deadline_s=0.5)
        peers.until(lambda: prefill.call("stats")["registrations_waiting"], what="registered")
        prefill.kill()
        assert not decode.inbox.outcome("t1").blocks_reusable
        assert decode.receiver.healthy() and decode.receiver.stats()["internal_errors"] == 0
