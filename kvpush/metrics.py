"""A Prometheus collector over one pusher or receiver. Needs the extra ``kvpush[metrics]``.

    registry.register(KvpushCollector(pusher))

Nothing is counted here: a scrape reads ``stats()`` and ``engines()``. It may take up to a second when the loop hangs,
and then reports ``kvpush_healthy 0`` and no counters rather than old ones.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpush.lifecycle import State
from kvpush.side import Side

GAUGES: dict[str, str] = {
    "links": "control links that are up",
    "pushes_open": "pushes without an outcome, and those whose blocks are held",
    "pushes_held": "pushes with an outcome whose blocks are held",
    "pushes_behind_handshakes": "pushes that wait for a handshake",
    "registrations_waiting": "registrations that wait for their push",
    "blocks_registered": "block ids in registrations that have not ended",
    "pushes_in_lines": "pushes that wait for their turn to be posted",
    "writes_doubtful": "WRITEs that failed or were given up, and may still land",
    "writes_in_flight": "WRITEs posted and not settled",
    "bytes_in_flight": "bytes posted and not settled",
    "receives_open": "receives without an outcome",
    "receives_held": "receives with an outcome whose blocks are held",
    "engines": "prefill engines that are known",
    "tombstones": "ended transfers that are remembered",
    "timers": "pending timers",
}
"""What ``stats()`` reports that goes up and down, with its meaning; everything else in it only grows."""


class KvpushCollector(Collector):
    """Exports one side. Its metrics carry the engine's id as the label ``engine``."""

    def __init__(self, side: Side[Any, Any]) -> None:
        self._side = side

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus' client for every scrape, on its thread."""
        engine_id = self._side.engine_id
        yield _gauge("kvpush_healthy", "1 while the loop turns", engine_id, int(bool(self._side.healthy())))
        for name, value in sorted(self._side.stats().items()):
            if name in GAUGES:
                yield _gauge(f"kvpush_{name}", GAUGES[name], engine_id, value)
            else:
                counter = CounterMetricFamily(f"kvpush_{name}", name.replace("_", " "), labels=["engine"])
                counter.add_metric([engine_id], value)
                yield counter
        states = Tally(snapshot.state for snapshot in self._side.engines())
        remote = GaugeMetricFamily("kvpush_remote_engines", "remote engines by state", labels=["engine", "state"])
        for state in State:
            remote.add_metric([engine_id, state], states[state])
        yield remote


def _gauge(name: str, meaning: str, engine_id: str, value: int) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, meaning, labels=["engine"])
    gauge.add_metric([engine_id], value)
    return gauge
