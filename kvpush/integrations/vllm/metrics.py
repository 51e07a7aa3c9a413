"""The connector's numbers in vLLM's log lines and on its ``/metrics`` page."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvpush.errors import FailureCode
from kvpush.events import Outcome
from kvpush.integrations.vllm.tally import added, summary

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60]


class KvPushStats(KVConnectorStats):
    """Counts and durations of one interval."""

    def reset(self) -> None:
        """Start again."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KvPushStats:
        """The sum of both."""
        return KvPushStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data


class KvPushMetrics(KVConnectorPromMetrics):
    """Prometheus metrics, one set an engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters = {
            f"{side}_{outcome}": self._per_engine(
                self._counter_cls, f"vllm:kvpush_{side}_{outcome}", f"KV cache {side} that ended as {outcome}"
            )
            for side in ("pushes", "receives")
            for outcome in Outcome
        }
        self._counters["pushed_bytes"] = self._per_engine(
            self._counter_cls, "vllm:kvpush_pushed_bytes", "bytes of KV cache that were written and confirmed"
        )
        for side in ("push", "receive"):
            self._counters |= self._failures(side)
        self._histograms = {
            name: self._per_engine(
                self._histogram_cls, f"vllm:kvpush_{metric}_seconds", documentation, buckets=_SECONDS
            )
            for name, metric, documentation in (
                ("push_s", "push", "from the first chunk pushed to the whole transfer confirmed"),
                ("receive_s", "receive", "from the blocks registered to the whole transfer received"),
            )
        }

    def _per_engine(self, kind: Any, name: str, documentation: str, **options: Any) -> Any:
        metric = kind(name=name, documentation=documentation, labelnames=self._labelnames, **options)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _failures(self, side: str) -> dict[str, Any]:
        """One counter with a label, under the names that the tally has for its codes. All codes are there from the
        start: an increase from nothing to one is not seen by those who watch increases."""
        counter = self._counter_cls(
            name=f"vllm:kvpush_{side}_failures",
            documentation=f"KV cache transfers ({side}) that failed or expired, by cause",
            labelnames=[*self._labelnames, "code"],
        )
        return {
            f"{side}_failures_{code}": {
                index: counter.labels(*values, code.value) for index, values in self.per_engine_labelvalues.items()
            }
            for code in FailureCode
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's numbers."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            for duration_s in value if name in self._histograms else ():
                self._histograms[name][engine_idx].observe(duration_s)
