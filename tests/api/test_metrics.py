"""The Prometheus collector says what stats() and engines() say."""

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

import kvpush
from kvpush.metrics import GAUGES, KvpushCollector

SPEC = kvpush.KVCacheSpec(dims="BKHND", model="m")


def _caches() -> dict[str, torch.Tensor]:
    return {"layers.0": torch.zeros(4, 2, 1, 4, 8)}


@pytest.mark.nixl
def test_a_scrape_shows_both_sides() -> None:
    config = kvpush.Config(net_devices="lo")
    with (
        kvpush.PrefillPusher("p0", _caches(), SPEC, config=config) as pusher,
        kvpush.DecodeReceiver("d0", _caches(), SPEC, config=config) as receiver,
    ):
        prometheus = CollectorRegistry(auto_describe=True)  # as the default one: it refuses what is exported twice
        prometheus.register(KvpushCollector(pusher, receiver))
        receiver.expect("t", [1], source=pusher.address, source_engine_id="p0")
        pusher.push("t", [2])
        assert [event.outcome for event in pusher.wait(20)] == ["done"]
        assert [event.outcome for event in receiver.wait(20)] == ["done"]
        page = generate_latest(prometheus).decode()
        assert 'kvpush_pushes_done_total{engine="p0",rank="0.0"} 1.0' in page
        assert 'kvpush_receives_done_total{engine="d0",rank="0.0"} 1.0' in page
        assert 'kvpush_remote_engines{engine="p0",rank="0.0",state="connected"} 1.0' in page
        assert 'kvpush_healthy{engine="d0",rank="0.0"} 1.0' in page
        named = {name for side in (pusher, receiver) for name in side._loop._core.gauges()}
        assert page.count("# TYPE kvpush_healthy gauge") == 1
        with pytest.raises(kvpush.ConfigurationError, match="p0"):
            KvpushCollector(pusher, pusher)
        assert named == set(GAUGES), "a gauge that is missing there would be exported as a counter"
