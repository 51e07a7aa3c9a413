"""What is special about NIXL's adapter: its exceptions, its threads, its settings, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from nixl import _bindings as nixl_bindings
from nixl._api import nixl_agent

from kvpush import nixl_transport
from kvpush.config import Config
from kvpush.errors import ConfigurationError, FailureCode, TransportError, UsageError
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.nixl_transport import NIXL_EXCEPTIONS, NixlTransport, backend_options
from kvpush.transport import Notification

pytestmark = pytest.mark.nixl

CONFIG = Config(net_devices="lo")
BINDINGS_EXCEPTIONS = (TypeError, ValueError, IndexError, KeyError, RuntimeError)
DISCONNECTED = nixl_bindings.nixlRemoteDisconnectError


class Memory:
    """Eight blocks of 256 bytes."""

    def __init__(self) -> None:
        self.buffer = np.zeros(2048, np.uint8)
        self.range = MemoryRange(self.buffer.ctypes.data, 2048, 0)
        self.rows = np.array([[self.buffer.ctypes.data, 256, 0, 256, 8]], np.uint64)


@pytest.fixture
def memory():
    return Memory()


_names = iter(range(10**6))


def unique(name):
    return f"{name}#{os.getpid()}.{next(_names)}"


@pytest.fixture
def make(memory):
    """Makes transports and closes them at the end."""
    made = []

    def make(name="agent", config=CONFIG, range_=memory.range):
        made.append(NixlTransport(unique(name), MemoryKind.dram, [range_], config))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def indices(*values):
    return np.array(values, np.int32)


def open_fds():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# --- NIXL's answers, one by one, from a stand-in for its agent -----------------------------------------------------


class Handle:
    def __init__(self, log, kind):
        self.log = log
        self.kind = kind

    def release(self):
        self.log.append(f"release {self.kind}")


class StubAgent:
    """Answers like NIXL's agent; ``behaviour`` maps a method's name to what it returns or raises instead."""

    behaviour: dict = {}
    log: list = []

    def __init__(self, name, config):
        self.name = name
        assert not config.enable_pthread

    def _do(self, method, default=None):
        self.log.append(method)
        answer = self.behaviour.get(method, default)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def create_backend(self, name, options):
        self._do("create_backend")

    def register_memory(self, descriptors, kind):
        return self._do("register_memory", "memory")

    def deregister_memory(self, memory):
        assert memory == "memory"
        self._do("deregister_memory")

    def get_agent_metadata(self):
        return self._do("get_agent_metadata", b"blob")

    def add_remote_agent(self, metadata):
        return self._do("add_remote_agent", b"peer")

    def remove_remote_agent(self, name):
        self._do("remove_remote_agent")

    def prep_xfer_dlist(self, name, rows, kind):
        side = "remote_list" if name else "local_list"
        return self._do(f"prep_{side}", Handle(self.log, side))

    def make_prepped_xfer(self, *args):
        return self._do("make_prepped_xfer", Handle(self.log, "xfer"))

    def transfer(self, xfer):
        return self._do("transfer", "PROC")

    def check_xfer_state(self, xfer):
        return self._do("check_xfer_state", "PROC")

    def get_new_notifs(self):
        return self._do("get_new_notifs", {})


class Stubbed:
    def __init__(self, memory, behaviour, log):
        self.memory = memory
        self.behaviour = behaviour
        self.log = log
        self.transport = NixlTransport("us", MemoryKind.dram, [memory.range], CONFIG)

    def add(self):
        blob = b"nixlSerDes|Agent" + (4).to_bytes(8, "little") + b"peer" + b"|..."
        return self.transport.add_remote("peer", blob, MemoryKind.dram, self.memory.rows, self.memory.rows)

    def post(self, remote):
        return self.transport.post_write(remote, indices(0), indices(0), b"n")

    def assert_balanced(self):
        counts = self.transport.counts
        assert counts.remotes_added == counts.remotes_removed
        assert counts.writes_posted == counts.writes_released
        assert counts.lists_prepared == counts.lists_released
        for kind in ("xfer", "local_list", "remote_list"):
            made = self.log.count("make_prepped_xfer" if kind == "xfer" else f"prep_{kind}")
            assert self.log.count(f"release {kind}") <= made


@pytest.fixture
def stub(monkeypatch, memory):
    monkeypatch.setattr(nixl_transport, "nixl_agent", StubAgent)
    monkeypatch.setattr(StubAgent, "behaviour", {})
    monkeypatch.setattr(StubAgent, "log", [])
    return Stubbed(memory, StubAgent.behaviour, StubAgent.log)


def test_nixl_has_no_exception_that_is_not_mapped():
    theirs = {
        value
        for name, value in vars(nixl_bindings).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert theirs == set(NIXL_EXCEPTIONS)
    assert len(NIXL_EXCEPTIONS) == 12
    assert all(exception.__bases__ == (Exception,) for exception in NIXL_EXCEPTIONS)


@pytest.mark.parametrize("exception", [*NIXL_EXCEPTIONS, *BINDINGS_EXCEPTIONS], ids=lambda e: e.__name__)
class TestEveryException:
    @pytest.mark.parametrize("method", ["add_remote_agent", "prep_local_list", "prep_remote_list"])
    def test_while_adding_a_remote(self, stub, exception, method):
        stub.behaviour[method] = exception("why")
        with pytest.raises(TransportError) as caught:
            stub.add()
        assert caught.value.code is FailureCode.handshake_failed
        self.assert_tells(caught.value, method.removesuffix("_local_list").removesuffix("_remote_list"), exception)
        stub.assert_balanced()
        assert "remove_remote_agent" in stub.log or method == "prep_local_list"
        del stub.behaviour[method]
        stub.add()

    def test_while_making_a_write(self, stub, exception):
        remote = stub.add()
        stub.behaviour["make_prepped_xfer"] = exception("why")
        with pytest.raises(TransportError) as caught:
            stub.post(remote)
        self.assert_tells(caught.value, "make_prepped_xfer", exception)
        self.assert_write_error(caught.value, exception)
        stub.transport.remove_remote(remote)
        stub.assert_balanced()

    def test_while_posting_a_write(self, stub, exception):
        """Only a disconnect proves that nothing is on its way: everything else is told by the poll, as in doubt."""
        remote = stub.add()
        stub.behaviour["transfer"] = exception("why")
        if exception is DISCONNECTED:
            with pytest.raises(TransportError) as caught:
                stub.post(remote)
        else:
            write = stub.post(remote)
            with pytest.raises(UsageError, match="in flight"):
                stub.transport.remove_remote(remote)
            with pytest.raises(TransportError) as caught:
                stub.transport.poll_write(write)
            assert "check_xfer_state" not in stub.log
        self.assert_tells(caught.value, "transfer", exception)
        self.assert_write_error(caught.value, exception)
        stub.transport.remove_remote(remote)
        stub.assert_balanced()

    def test_while_polling_a_write(self, stub, exception):
        remote = stub.add()
        write = stub.post(remote)
        stub.behaviour["check_xfer_state"] = exception("why")
        with pytest.raises(TransportError) as caught:
            stub.transport.poll_write(write)
        self.assert_tells(caught.value, "check_xfer_state", exception)
        self.assert_write_error(caught.value, exception)
        with pytest.raises(UsageError, match="has ended"):
            stub.transport.poll_write(write)
        stub.transport.remove_remote(remote)
        stub.assert_balanced()

    def test_while_reading_notifications(self, stub, exception):
        stub.behaviour["get_new_notifs"] = exception("why")
        with pytest.raises(TransportError) as caught:
            stub.transport.notifications()
        expected = FailureCode.malformed if exception is ValueError else FailureCode.internal
        assert (caught.value.code, caught.value.disconnected) == (expected, exception is DISCONNECTED)
        assert "'us'" in str(caught.value)

    @pytest.mark.parametrize("method", ["create_backend", "register_memory", "get_agent_metadata"])
    def test_while_starting(self, stub, exception, method):
        stub.behaviour[method] = exception("why")
        with pytest.raises(ConfigurationError, match=exception.__name__):
            NixlTransport("other", MemoryKind.dram, [stub.memory.range], CONFIG)
        assert ("deregister_memory" in stub.log) == (method == "get_agent_metadata")

    def test_while_releasing(self, stub, exception, caplog):
        """Nothing can be done about it, but it does not pass unseen, and the rest is released all the same."""
        stub.behaviour["remove_remote_agent"] = stub.behaviour["deregister_memory"] = exception("why")
        stub.post(stub.add())
        stub.transport.close()
        stub.assert_balanced()
        assert stub.log[-5:] == [
            "release xfer",
            "remove_remote_agent",
            "release remote_list",
            "release local_list",
            "deregister_memory",
        ]
        assert "remove_remote_agent of agent 'peer' failed" in caplog.text
        assert "deregister_memory of agent 'us' failed" in caplog.text

    @staticmethod
    def assert_tells(error, operation, exception):
        for part in (operation, "'peer'", exception.__name__, "why"):
            assert part in str(error)
        assert isinstance(error.__cause__, exception)
        assert error.__cause__.__traceback__ is None, "its frames would keep NIXL's handles alive"

    @staticmethod
    def assert_write_error(error, exception):
        is_disconnected = exception is DISCONNECTED
        assert error.disconnected == is_disconnected
        assert error.code is (FailureCode.peer_lost if is_disconnected else FailureCode.write_failed)


@pytest.mark.parametrize("method", ["transfer", "check_xfer_state"])
def test_the_status_err_is_an_error(stub, method):
    stub.behaviour[method] = "ERR"
    remote = stub.add()
    write = stub.post(remote)
    with pytest.raises(TransportError, match="'ERR'") as caught:
        stub.transport.poll_write(write)
    assert (caught.value.code, caught.value.disconnected) == (FailureCode.write_failed, False)
    stub.transport.remove_remote(remote)
    stub.assert_balanced()


def test_an_end_seen_while_posting_is_remembered(stub):
    stub.behaviour["transfer"] = "DONE"
    write = stub.post(stub.add())
    assert stub.transport.poll_write(write)
    assert "check_xfer_state" not in stub.log
    with pytest.raises(UsageError, match="has ended"):
        stub.transport.poll_write(write)


def test_metadata_that_nixl_reads_differently_is_refused_and_undone(stub):
    stub.behaviour["add_remote_agent"] = b"somebody else"
    with pytest.raises(TransportError, match="somebody else"):
        stub.add()
    assert stub.log[-2:] == ["remove_remote_agent", "release local_list"]
    stub.assert_balanced()


def test_a_handle_that_nixl_will_not_release_is_tried_again_at_the_end(stub, monkeypatch):
    refusals = [nixl_bindings.nixlBackendError("busy")]

    class Stubborn(Handle):
        def release(self):
            self.log.append("try")
            if refusals:
                raise refusals.pop()

    stub.behaviour["make_prepped_xfer"] = Stubborn(stub.log, "xfer")
    remote = stub.add()
    stub.transport.abandon_write(stub.post(remote))
    stub.transport.remove_remote(remote)
    stub.transport.close()
    assert stub.log.count("try") == 2


def test_remotes_with_the_same_rows_share_one_local_list(make, memory):
    writer = make()
    peers = [Memory() for _ in range(2)]
    transports = [make(range_=peer.range) for peer in peers]
    remotes = [
        writer.add_remote(transport.agent_name, transport.metadata(), MemoryKind.dram, memory.rows, peer.rows)
        for transport, peer in zip(transports, peers, strict=True)
    ]
    assert writer.counts.lists_prepared == 3
    writer.remove_remote(remotes[0])
    assert writer.counts.lists_released == 1
    write = writer.post_write(remotes[1], indices(0), indices(0), b"still usable")
    deadline = time.monotonic() + 5
    arrived = []
    while not arrived:
        assert time.monotonic() < deadline
        arrived = transports[1].notifications()
        if write is not None and writer.poll_write(write):
            write = None
    assert arrived == [Notification(writer.agent_name, b"still usable")]
    writer.remove_remote(remotes[1])
    assert writer.counts.lists_released == 3


# --- threads, sockets, output --------------------------------------------------------------------------------------


def test_idle_agents_cost_next_to_nothing(make):
    transports = [make() for _ in range(3)]
    wall_s, cpu_s = time.monotonic(), time.process_time()
    pause = threading.Event()
    while time.monotonic() - wall_s < 0.5:
        pause.wait(0.05)  # the loop of an idle side sleeps on its sockets
        for transport in transports:
            transport.notifications()
    share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
    assert share < 0.05, "NIXL's progress thread would burn a core per agent"


def test_nothing_is_printed(memory):
    script = (
        "import sys, numpy as np\n"
        "from kvpush.config import Config\n"
        "from kvpush.layout import MemoryKind, MemoryRange\n"
        "from kvpush.nixl_transport import NixlTransport\n"
        "b = np.zeros(4096, np.uint8)\n"
        "r = [MemoryRange(b.ctypes.data, 4096, 0)]\n"
        "NixlTransport('quiet', MemoryKind.dram, r, Config(net_devices='lo')).close()\n"
        "import logging\n"
        "logging.getLogger('nixl').warning('a warning is not hidden')\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
    result = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [line.split("WARNING")[-1].split()[-4:] for line in result.stdout.splitlines()] == [
        ["warning", "is", "not", "hidden"]
    ]


def user_timeouts_ms():
    """TCP_USER_TIMEOUT of this process's connected TCP sockets."""
    timeouts = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as sock:
                sock.getpeername()
                timeouts.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return timeouts


def test_sockets_have_the_configured_user_timeout(make, memory):
    config = Config(net_devices="lo", tcp_user_timeout_s=1.234)
    writer, peer_memory = make(config=config), Memory()
    peer = make(config=config, range_=peer_memory.range)
    writer.add_remote(peer.agent_name, peer.metadata(), MemoryKind.dram, memory.rows, peer_memory.rows)
    deadline = time.monotonic() + 5
    # The connect is not waited for, and UCX counts in ticks of the processor's clock.
    while not any(1230 <= timeout <= 1238 for timeout in user_timeouts_ms()):
        assert time.monotonic() < deadline, user_timeouts_ms()
        for transport in (writer, peer):
            transport.notifications()


def listening_ports():
    """Ports on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def test_a_black_hole_delays_nobody_and_its_writes_fail_within_the_user_timeout(make, memory):
    """The peer's port is taken over by a socket whose queue is full: the kernel drops what comes, without an answer."""
    writer, peer_memory = make(config=Config(net_devices="lo", tcp_user_timeout_s=1.0)), Memory()
    before = listening_ports()
    peer = make(range_=peer_memory.range)
    ports = listening_ports() - before
    metadata = peer.metadata()
    peer.close()
    assert ports
    holes = []
    for port in ports:
        hole = socket.socket()
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hole.bind(("127.0.0.1", port))
        hole.listen(0)
        holes.append(hole)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            holes.append(filler)
    try:
        start = time.monotonic()
        remote = writer.add_remote(peer.agent_name, metadata, MemoryKind.dram, memory.rows, peer_memory.rows)
        assert time.monotonic() - start < 0.5
        with pytest.raises(TransportError) as caught:  # noqa: PT012
            write = writer.post_write(remote, indices(0), indices(0), b"lost")
            while time.monotonic() - start < 8:
                assert not writer.poll_write(write)
        assert (caught.value.code, caught.value.disconnected) == (FailureCode.peer_lost, True)
        assert 0.5 < time.monotonic() - start < 4
    finally:
        for hole in holes:
            hole.close()


def test_nixl_itself_would_accept_rows_that_wrap_around(make, memory):
    """Why rows are checked here. When this fails, NIXL has learned to count and the check is only ours to keep."""
    writer, peer_memory = make(), Memory()
    peer = make(range_=peer_memory.range)
    writer.add_remote(peer.agent_name, peer.metadata(), MemoryKind.dram, memory.rows, peer_memory.rows)
    rows = peer_memory.rows
    rows[0, 4] = 1 << 62
    writer._agent.prep_xfer_dlist(peer.agent_name, rows, "DRAM").release()


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_reach_ucx():
    options = backend_options(Config(net_devices="lo", tcp_user_timeout_s=2.5, ucx_options="TLS=tcp, ZCOPY_THRESH=1k,"))
    assert options == {
        "ucx_error_handling_mode": "peer",
        "engine_config": "TCP_USER_TIMEOUT=2500ms,TCP_CONN_NB=y,NET_DEVICES=lo,TLS=tcp,ZCOPY_THRESH=1k",
    }


def test_ucx_options_win_over_the_defaults():
    assert "TCP_CONN_NB=n" in backend_options(Config(ucx_options="TCP_CONN_NB=n"))["engine_config"]
    assert "TCP_CONN_NB=y" not in backend_options(Config(ucx_options="TCP_CONN_NB=n"))["engine_config"]


@pytest.mark.parametrize(("timeout_s", "expected"), [(1e-9, "1ms"), (3.0, "3000ms"), (3e8, "2147483647ms")])
def test_the_user_timeout_fits_the_socket_option(timeout_s, expected):
    engine_config = backend_options(Config(tcp_user_timeout_s=timeout_s))["engine_config"]
    assert f"TCP_USER_TIMEOUT={expected}" in engine_config.split(",")


@pytest.mark.parametrize("ucx_options", ["TLS", "TLS=tcp,self", "UCX_TLS=tcp", "tls=tcp", "=tcp", "TLS="])
def test_options_that_nixl_would_silently_ignore_are_refused(ucx_options):
    with pytest.raises(ConfigurationError, match="ucx_options="):
        backend_options(Config(ucx_options=ucx_options))


def test_several_devices_are_refused():
    with pytest.raises(ConfigurationError, match=r"net_devices='lo,eth0'.*UCX_NET_DEVICES"):
        backend_options(Config(net_devices="lo,eth0"))


def test_a_device_that_does_not_exist_is_named_and_nothing_stays_open(memory, make):
    make()
    before = open_fds()
    with pytest.raises(ConfigurationError, match="NET_DEVICES=nosuch0") as caught:
        NixlTransport(unique("a"), MemoryKind.dram, [memory.range], Config(net_devices="nosuch0"))
    assert open_fds() == before, "kept alive by the error's traceback"
    assert isinstance(caught.value.__cause__, nixl_bindings.nixlBackendError)


def test_an_error_that_is_kept_keeps_no_agent_alive(memory, make):
    make()
    peer_memory = Memory()
    before = open_fds()
    writer = NixlTransport(unique("w"), MemoryKind.dram, [memory.range], CONFIG)
    peer = NixlTransport(unique("p"), MemoryKind.dram, [peer_memory.range], CONFIG)
    remote = writer.add_remote(peer.agent_name, peer.metadata(), MemoryKind.dram, memory.rows, peer_memory.rows)
    errors = []
    with pytest.raises(TransportError) as caught:
        writer.post_write(remote, indices(99), indices(0), b"")
    errors.append(caught.value)
    write = writer.post_write(remote, indices(0), indices(0), b"n")
    peer.close()
    with pytest.raises(TransportError) as caught:  # noqa: PT012
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            writer.poll_write(write)
    errors.append(caught.value)
    with pytest.raises(TransportError, match="transfer") as caught:
        writer.post_write(remote, indices(0), indices(0), b"n")
    errors.append(caught.value)
    writer.close()
    assert open_fds() == before
    assert [error.disconnected for error in errors] == [False, True, True]


@pytest.mark.parametrize("ranges", [[], [MemoryRange(4096, 0, 0)]])
def test_empty_memory_is_refused(ranges):
    with pytest.raises(ConfigurationError, match="ranges"):
        NixlTransport("a", MemoryKind.dram, ranges, CONFIG)


def test_several_cuda_devices_are_refused():
    with pytest.raises(ConfigurationError, match=r"\[0, 1\]"):
        NixlTransport("a", MemoryKind.vram, [MemoryRange(4096, 64, 0), MemoryRange(8192, 64, 1)], CONFIG)


def test_the_cuda_device_is_claimed_before_the_agent_is_made(stub, monkeypatch):
    monkeypatch.setattr("torch.cuda.set_device", lambda device: stub.log.append(f"device {device}"))
    del stub.log[:]
    NixlTransport("gpu", MemoryKind.vram, [MemoryRange(4096, 64, 3), MemoryRange(8192, 64, 3)], CONFIG).close()
    assert stub.log[0] == "device 3"
    assert stub.log[1] == "create_backend"


def test_a_cuda_device_that_cannot_be_used_is_a_configuration_error(monkeypatch):
    def refuse(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.cuda.set_device", refuse)
    with pytest.raises(ConfigurationError, match="CUDA device 5"):
        NixlTransport("gpu", MemoryKind.vram, [MemoryRange(4096, 64, 5)], CONFIG)


def test_the_agent_is_a_real_one(make):
    assert isinstance(make()._agent, nixl_agent)
