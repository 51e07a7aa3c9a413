"""NIXL merges the descriptors that kvpush.plan says it merges: neighbours in one row, and no others."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch

from kvpush.layout import KVCacheSpec, geometry_of, memory_ranges
from kvpush.plan import descriptors_after_merging, pair

pytestmark = pytest.mark.nixl

DEADLINE_S = 20.0


def pages(num_blocks, layers, tokens):
    """All layers of a block side by side, in one storage."""
    storage = torch.zeros(num_blocks, layers, 2, 2, tokens, 64, dtype=torch.bfloat16)
    return storage, geometry_of({f"l{i}": storage[:, i] for i in range(layers)}, KVCacheSpec("BKHND"))


def apart(num_blocks, layers, tokens, dims="KBNHD"):
    sizes = {"B": num_blocks, "K": 2, "H": 2, "N": tokens, "D": 64}
    tensors = {f"l{i}": torch.zeros([sizes[axis] for axis in dims], dtype=torch.bfloat16) for i in range(layers)}
    return tensors, geometry_of(tensors, KVCacheSpec(dims))


class Agents:
    """Two agents with telemetry, which says how many descriptors a WRITE had in the end."""

    def __init__(self, ours, theirs):
        from nixl._api import nixl_agent, nixl_agent_config

        self.agents = []
        for name, geometry in (("merging-p", ours), ("merging-d", theirs)):
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"], capture_telemetry=True)
            agent = nixl_agent(f"{name}#{os.getpid()}.{id(self)}", config)
            ranges = memory_ranges(geometry)
            agent.register_memory([(r.address, r.length_bytes, r.device_id, "") for r in ranges], "DRAM")
            self.agents.append(agent)
        self.peer = self.agents[0].add_remote_agent(self.agents[1].get_agent_metadata()).decode()

    def descriptors(self, plan, local_indices, remote_indices):
        ours, theirs = self.agents
        local = ours.prep_xfer_dlist("", plan.local_rows, "DRAM")
        remote = ours.prep_xfer_dlist(self.peer, plan.remote_rows, "DRAM")
        handle = ours.make_prepped_xfer("WRITE", local, local_indices, remote, remote_indices, b"")
        state = ours.transfer(handle)
        end = time.monotonic() + DEADLINE_S
        while state == "PROC" and time.monotonic() < end:
            theirs.get_new_notifs()
            state = ours.check_xfer_state(handle)
        assert state == "DONE"
        return ours.get_xfer_telemetry(handle).descCount


@pytest.mark.parametrize(
    ("ours", "theirs", "layers", "local_slots", "remote_slots", "expected"),
    [
        pytest.param(pages(16, 4, 4), pages(24, 4, 4), range(4), range(2, 10), range(5, 13), 1, id="whole-pages"),
        pytest.param(pages(16, 4, 4), pages(24, 4, 4), range(4), [2, 4, 6], [3, 5, 7], 3, id="pages-apart"),
        pytest.param(pages(16, 4, 4), pages(24, 4, 4), range(1, 3), [2, 3, 4], [3, 4, 5], 6, id="some-layers"),
        pytest.param(apart(16, 3, 4), apart(24, 3, 4), range(3), range(2, 10), range(5, 13), 6, id="runs-of-blocks"),
        pytest.param(apart(16, 3, 8), apart(24, 3, 4), range(3), [4, 5, 8, 9], [7, 8, 2, 3], 12, id="d9-slots"),
        pytest.param(pages(16, 4, 8), pages(24, 4, 4), range(4), [4, 5], [7, 9], 32, id="d9-heads-before-tokens"),
    ],
)
def test_nixl_posts_as_many_descriptors_as_the_plan_counts(ours, theirs, layers, local_slots, remote_slots, expected):
    (source, our_geometry), (target, their_geometry) = ours, theirs
    plan = pair(our_geometry, their_geometry, min_tile_bytes=256)
    found = plan.groups[0].indices(layers, np.array(local_slots), np.array(remote_slots))
    assert descriptors_after_merging(plan, *found) == expected
    assert Agents(our_geometry, their_geometry).descriptors(plan, *found) == expected
    assert source is not None and target is not None
