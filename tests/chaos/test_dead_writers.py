"""A prefill engine that dies in the middle of a WRITE: what decode calls reusable is written by nobody any more."""

from __future__ import annotations

import time

import peers
import pytest
from chaos import BIG, STUCK

WATCH_S = 0.3


class WatchfulDecode(peers.DecodeService):
    """Gives blocks to their next owner the moment that they come back, and looks who writes into them after that."""

    def late_bytes(self, transfer_id, block_ids):
        how = self.inbox.reusable(transfer_id)
        self.arena.clear(block_ids)
        end_s = time.monotonic() + WATCH_S
        while time.monotonic() < end_s:
            if not self.arena.is_clean(block_ids):
                return how, True
        return how, not self.arena.is_clean(block_ids)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_frozen", [True, False], ids=["decode frozen", "decode running"])
def test_e1_nothing_lands_in_blocks_that_came_back_from_a_dead_writer(fleet, is_frozen):
    """E1, E7(b), rule 12: megabytes of the WRITE wait in the kernel when their sender is gone."""
    whole = list(range(BIG.blocks))
    with peers.Peer(WatchfulDecode, engine_id="d0", shape=BIG, settings=STUCK) as decode:
        for life in range(5):
            with fleet.prefill(f"p{life}", shape=BIG, **STUCK) as prefill:
                source, options = prefill.call("address"), {"source_engine_id": f"p{life}"}
                decode.call("expect", f"warm-{life}", [0], source, **options)
                prefill.call("push", f"warm-{life}", [0])
                assert decode.call("outcome", f"warm-{life}").outcome == "done"
                decode.call("expect", f"hit-{life}", whole, source, **options)
                peers.until(lambda: prefill.call("stats")["registrations_waiting"], what="registered")  # noqa: B023
                if is_frozen:
                    decode.freeze()
                    prefill.call("push", f"hit-{life}", whole)
                    peers.until(lambda: prefill.call("stats")["writes_in_flight"], what="posted")  # noqa: B023
                else:
                    prefill.begin("push", f"hit-{life}", whole)
                prefill.kill()
                decode.thaw()
                event = decode.call("outcome", f"hit-{life}")
                assert event.outcome in ("failed", "done"), event
                how, is_late = decode.call("late_bytes", f"hit-{life}", whole)
                assert how in ("outcome", "proven") and not is_late, (event, how)
        assert decode.call("guards_are_intact")
