"""What callers do that no peer can: signals, forks, odd types. Nothing hangs, leaks or is silently lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import kvpush

SPEC = kvpush.KVCacheSpec(dims="BKHND", model="m")
CONFIG = kvpush.Config(net_devices="lo")


def _caches() -> dict[str, torch.Tensor]:
    return {"layers.0": torch.zeros(8, 2, 1, 4, 64)}


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("num_signals", [1, 2], ids=["inside a call", "twice"])
def test_rule18_a_signal_handler_may_close_whatever_it_interrupts(num_signals: int) -> None:
    program = textwrap.dedent(
        f"""
        import os, signal, sys, threading, torch, kvpush
        cache = {{"layers.0": torch.zeros(8, 2, 1, 4, 64)}}
        spec, config = kvpush.KVCacheSpec(dims="BKHND"), kvpush.Config(net_devices="lo")
        pusher = kvpush.PrefillPusher("p0", cache, spec, config=config)
        closed = []
        def handler(*_):
            closed.append(pusher.close())
            if len(closed) >= {num_signals}:
                os._exit(0)
        signal.signal(signal.SIGTERM, handler)
        # the lock that push() and poll() take is held by this very thread when the handler runs
        with pusher._ledger.lock, pusher._close_lock:
            for _ in range({num_signals}):
                os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(3)
        """
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.nixl
@pytest.mark.processes
def test_a_forked_child_is_told_that_it_has_no_loop() -> None:
    with kvpush.PrefillPusher("p0", _caches(), SPEC, config=CONFIG) as pusher:
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                pusher.push("t", [1])
            except kvpush.Closed as exc:
                os._exit(0 if "fork" in str(exc) else 4)
            finally:
                os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pusher.push("t", [1])
        pusher.cancel("t")
        assert [event.outcome for event in pusher.wait(20)] == ["cancelled"]


@pytest.mark.nixl
def test_ids_of_string_subclasses_travel() -> None:
    transfer_id, engine_id = np.str_("t1"), np.str_("p0")
    with (
        kvpush.PrefillPusher(engine_id, _caches(), SPEC, config=CONFIG) as pusher,
        kvpush.DecodeReceiver(np.str_("d0"), _caches(), SPEC, config=CONFIG) as receiver,
    ):
        receiver.expect(transfer_id, [1], source=pusher.address, source_engine_id=engine_id)
        pusher.push(transfer_id, [2])
        assert [event.outcome for event in receiver.wait(20)] == ["done"]
        assert pusher.stats()["internal_errors"] == receiver.stats()["internal_errors"] == 0


@pytest.mark.nixl
@pytest.mark.parametrize(
    "block_ids",
    [
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1, 2]).to_sparse(),
        torch.empty(2, dtype=torch.int64, device="meta"),
        np.ma.array([0, 64], mask=[0, 1]),
    ],
    ids=["bf16", "sparse", "meta", "masked"],
)
def test_block_ids_that_are_none_are_refused_by_both_sides(block_ids: object) -> None:
    with (
        kvpush.PrefillPusher("p0", _caches(), SPEC, config=CONFIG) as pusher,
        kvpush.DecodeReceiver("d0", _caches(), SPEC, config=CONFIG) as receiver,
    ):
        with pytest.raises(kvpush.UsageError):
            pusher.push("t", block_ids)  # type: ignore[arg-type]
        with pytest.raises(kvpush.UsageError):
            receiver.expect("t", block_ids, source=pusher.address, source_engine_id="p0")  # type: ignore[arg-type]


@pytest.mark.nixl
def test_times_and_names_of_wrong_types_are_refused() -> None:
    with (
        kvpush.PrefillPusher("p0", _caches(), SPEC, config=CONFIG) as pusher,
        kvpush.DecodeReceiver("d0", _caches(), SPEC, config=CONFIG) as receiver,
    ):
        for timeout_s in (float("nan"), "1", None, True):
            with pytest.raises(kvpush.UsageError):
                pusher.wait(timeout_s)  # type: ignore[arg-type]
            with pytest.raises(kvpush.UsageError):
                pusher.drain(timeout_s)  # type: ignore[arg-type]
        for transfer_ids in ("abc", None, 5):
            with pytest.raises(kvpush.UsageError):
                receiver.renew(transfer_ids, source=pusher.address, source_engine_id="p0")  # type: ignore[arg-type]
        pusher.push("t", [1])  # a refused drain() has not begun to drain
        pusher.cancel("t")
        assert pusher.wait(float("inf")), "an endless wait ends with the first event"


@pytest.mark.parametrize("side", [kvpush.PrefillPusher, kvpush.DecodeReceiver])
def test_a_constructor_that_refuses_leaves_nothing_open(side: type) -> None:
    apart = {"layers.0": torch.zeros(8, 2, 4, 16, 16)[..., ::2]}
    before = len(os.listdir("/proc/self/fd"))
    for caches, spec, config in [(apart, SPEC, CONFIG), (_caches(), None, CONFIG), (_caches(), SPEC, {"lease_s": 1})]:
        with pytest.raises(kvpush.ConfigurationError):
            side("e0", caches, spec, config=config)
    assert len(os.listdir("/proc/self/fd")) == before
