"""A Prometheus collector over the pushers and receivers of a process. Needs the extra ``kvpush[metrics]``.

    registry.register(KvpushCollector(pusher, receiver))

Nothing is counted here: a scrape reads ``stats()`` and ``engines()``. It may take up to a second when the loop hangs,
and then reports ``kvpush_healthy 0`` and no counters rather than old ones.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpush.errors import ConfigurationError
from kvpush.lifecycle import State
from kvpush.side import Side

LABELS = ("engine", "rank")
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
    """Exports the pushers and receivers of one process. Their metrics carry the engine's id as the label ``engine``.

    One collector for all of them: Prometheus wants every metric once, whoever has it. Two sides with one id are told
    apart by the label ``rank`` (``pp.tp``), which is theirs in the engine.
    """

    def __init__(self, *sides: Side[Any, Any]) -> None:
        """Raises ConfigurationError for two sides that no label tells apart."""
        self._sides = {(side.engine_id, f"{side.rank[0]}.{side.rank[1]}"): side for side in sides}
        if not sides or len(self._sides) < len(sides):
            raise ConfigurationError(
                f"KvpushCollector takes the pushers and receivers of a process, each with an engine id and rank of its "
                f"own, and not {[side.engine_id for side in sides]}"
            )

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus' client for every scrape, on its thread."""
        gauges = _Families(GaugeMetricFamily, [*LABELS])
        counters = _Families(CounterMetricFamily, [*LABELS])
        remote = GaugeMetricFamily("kvpush_remote_engines", "remote engines by state", labels=[*LABELS, "state"])
        for labels, side in self._sides.items():
            gauges.add("kvpush_healthy", "1 while the loop turns", labels, int(bool(side.healthy())))
            for name, value in sorted(side.stats().items()):
                if name in GAUGES:
                    gauges.add(f"kvpush_{name}", GAUGES[name], labels, value)
                else:
                    counters.add(f"kvpush_{name}", name.replace("_", " "), labels, value)
            states = Tally(snapshot.state for snapshot in side.engines())
            for state in State:
                remote.add_metric([*labels, state], states[state])
        yield from gauges
        yield from counters
        yield remote


class _Families:
    """Metrics of one kind by name, with a sample from each side that has it."""

    def __init__(self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], labels: list[str]) -> None:
        self._kind = kind
        self._labels = labels
        self._by_name: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def add(self, name: str, meaning: str, labels: tuple[str, str], value: int) -> None:
        family = self._by_name.get(name)
        if family is None:
            family = self._by_name[name] = self._kind(name, meaning, labels=self._labels)
        family.add_metric(labels, value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._by_name.values())
