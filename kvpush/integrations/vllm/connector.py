"""``KvPushConnector``: vLLM's side of the integration, and the only module here that imports vLLM.

vLLM makes two objects of this class: one in the scheduler's process, one in every worker. Both forward to the plain
objects next door; nothing is decided here.

**In one step.** The scheduler plans, ``build_connector_meta`` hands the work to the workers; a worker runs the model,
registers receives (``start_load_kv``), pushes what the model has just computed (``wait_for_save``), and returns what
has ended (``get_transfer_results`` and a :class:`~kvpush.integrations.vllm.work.Report`), which the scheduler takes in
``update_connector_output``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

import kvpush
from kvpush.errors import ConfigurationError
from kvpush.integrations.vllm.caches import Blocks, kernel_block_size_tokens, named_tensors, spec_of
from kvpush.integrations.vllm.decode_scheduler import DecodeScheduler
from kvpush.integrations.vllm.decode_worker import DecodeWorker
from kvpush.integrations.vllm.metrics import KvPushMetrics, KvPushStats
from kvpush.integrations.vllm.params import BadParams, Source, check_role
from kvpush.integrations.vllm.prefill_scheduler import PrefillScheduler
from kvpush.integrations.vllm.prefill_worker import PrefillWorker
from kvpush.integrations.vllm.settings import Settings, default_listen
from kvpush.integrations.vllm.tally import Tally
from kvpush.integrations.vllm.versions import check_version, minor_of
from kvpush.integrations.vllm.work import Report, StepWork
from kvpush.pusher import Fence

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvpush")

_ENDED_WHOLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class KvPushMetadata(KVConnectorMetadata):
    """One step's work, on its way to the workers."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class KvPushHandshake(KVConnectorHandshakeMetadata):
    """Where a worker listens, on its way to the scheduler's process."""

    def __init__(self, source: Source) -> None:
        self.source = source


class KvPushWorkerMetadata(KVConnectorWorkerMetadata):
    """What a worker has seen, on its way back."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvPushWorkerMetadata:
        """Add another worker's."""
        assert isinstance(other, KvPushWorkerMetadata)
        self.report.add(other.report)
        return self


class KvPushConnector(KVConnectorBase_V1, SupportsHMA):
    """Select it with ``kv_connector`` and ``kv_connector_module_path``; see ``docs/vllm.md``."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        settings = _settings(transfer_config.kv_connector_extra_config)
        self._is_producer = transfer_config.kv_role in ("kv_producer", "kv_both")
        self._is_consumer = transfer_config.kv_role in ("kv_consumer", "kv_both")
        if self._is_producer:
            settings.check_listen(_num_ranks(vllm_config))
        self._worker: _Worker | None = None
        self._scheduler: _Scheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = _Scheduler(vllm_config, kv_cache_config, settings)
        else:
            self._worker = _Worker(vllm_config, kv_cache_config, settings, self._is_producer, self._is_consumer)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads before tokens: then the heads of a block are contiguous, which unequal tensor parallelism needs."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. Where there are CUDA graphs, vLLM asks while it makes its configuration: wrong settings are found here,
        and not after the model was loaded."""
        _settings(extra_config)
        return False

    # --- in the scheduler's process ----------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's block pool is there."""
        self._scheduling.prefill.pins.bind(gpu_block_pool)
        self._scheduling.decode.pins.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers have told where they listen."""
        sources = {rank: shake.source for rank, shake in metadata.items() if isinstance(shake, KvPushHandshake)}
        self._scheduling.prefill.sources = sources

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group that is transferred."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        """Read its parameters. One whose parameters make no sense is computed here."""
        try:
            check_role(request.kv_transfer_params, is_producer=self._is_producer, is_consumer=self._is_consumer)
            if self._is_producer:
                self._scheduling.prefill.arrived(request)
            if self._is_consumer:
                self._scheduling.decode.arrived(request)
        except BadParams as exc:
            logger.warning("request %s: kv_transfer_params: %s; no KV is transferred", request.request_id, exc)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens' KV will come from prefill."""
        num_tokens = self._scheduling.decode.num_missing_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks for them are there."""
        group = self._scheduling.group
        self._scheduling.decode.allocated(request, blocks.get_block_ids()[group], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvPushMetadata:
        """What the workers have to do in the step that was just planned."""
        return KvPushMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done. vLLM frees blocks because of it right after this."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, KvPushWorkerMetadata) else Report()
        self._scheduling.prefill.reported(report)
        self._scheduling.decode.reported(
            report, connector_output.finished_recving or (), connector_output.failed_recving
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Its blocks may go: those that are still read or written are pinned."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for all groups."""
        is_whole = request.status in _ENDED_WHOLE
        self._scheduling.decode.finished(request.request_id)
        return False, self._scheduling.prefill.finished(request.request_id, is_whole=is_whole)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on stepping without requests."""
        return self._scheduler is not None and self._scheduler.is_busy

    def has_pending_block_frees(self) -> bool:
        """Whether to wait a step before preempting somebody."""
        return self._scheduling.prefill.has_blocks_about_to_come_back

    # --- in a worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache is allocated: start the library."""
        self._working.start(kv_caches)

    def get_handshake_metadata(self) -> KvPushHandshake | None:
        """Where this worker listens, if it does."""
        source = self._working.source
        return None if source is None else KvPushHandshake(source)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Give up what is not wanted any more, ask for what is."""
        self._working.ask(self._work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are not scheduled before their KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are pushed when all layers are computed."""

    def wait_for_save(self) -> None:
        """The model has run (on a GPU: has been launched): push what it computes."""
        self._working.push(self._work())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended."""
        return self._working.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same, for callers that do not ask for failures."""
        results = self._working.results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KvPushWorkerMetadata | None:
        """The rest of what has ended."""
        report = self._working.take_report()
        return KvPushWorkerMetadata(report) if report else None

    def get_kv_connector_stats(self) -> KvPushStats | None:
        """What was counted since the last step."""
        numbers = self._worker.tally.take() if self._worker is not None else {}
        return KvPushStats(data=numbers) if numbers else None

    def shutdown(self) -> None:
        """End everything in bounded time."""
        if self._worker is not None:
            self._worker.close()

    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvPushMetadata)
        return metadata.work

    # --- statistics --------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvPushStats:
        """vLLM's way to get numbers back into their class."""
        return KvPushStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvPushMetrics:
        """vLLM's way to export them."""
        return KvPushMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- which half this is ------------------------------------------------------------------------------------------

    @property
    def _scheduling(self) -> _Scheduler:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _working(self) -> _Worker:
        assert self._worker is not None, "called in the scheduler's process"
        return self._worker


class _Scheduler:
    """What the connector is in the scheduler's process."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self.group = _only_group(kv_cache_config)
        block_size_tokens = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        self.prefill = PrefillScheduler(
            vllm_config.kv_transfer_config.engine_id,
            block_size_tokens,
            vllm_config.parallel_config.world_size,
            settings.push_chunks,
            bool(vllm_config.cache_config.enable_prefix_caching),
            lease_s=settings.config.lease_s,
        )
        self.decode = DecodeScheduler(block_size_tokens, settings.config.lease_s, settings.config.receive_deadline_s)

    def step(self, scheduler_output: SchedulerOutput) -> StepWork:
        """A step was planned."""
        state = scheduler_output.kv_connector_block_state
        group = self.group

        def block_ids_of(request_id: str) -> list[int] | None:
            block_ids = None if state is None else state.get_block_ids(request_id)
            return None if block_ids is None else block_ids[group]

        self.prefill.planned(scheduler_output.num_scheduled_tokens, block_ids_of)
        work, received = self.prefill.take_work(), self.decode.take_work()
        work.cancels, work.expects, work.renewals = received.cancels, received.expects, received.renewals
        work.is_idle = not scheduler_output.total_num_scheduled_tokens
        return work

    @property
    def is_busy(self) -> bool:
        return self.prefill.is_busy or self.decode.is_busy


class _Worker:
    """What the connector is in a worker: the library's two ends, as far as the role has them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: Settings,
        is_producer: bool,
        is_consumer: bool,
    ) -> None:
        self.tally = Tally()
        self.source: Source | None = None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._group = _only_group(kv_cache_config)
        self._settings = settings
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._blocks = Blocks(1)
        self._pusher: kvpush.PrefillPusher | None = None
        self._receiver: kvpush.DecodeReceiver | None = None
        self._prefill: PrefillWorker | None = None
        self._decode: DecodeWorker | None = None
        self._report = Report()
        self._is_on_gpu = False
        self._is_idle = False  # this step

    def start(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache and open the library's ends."""
        layer_names = set(self._kv_cache_config.kv_cache_groups[self._group].layer_names)
        tensors = named_tensors({name: cache for name, cache in kv_caches.items() if name in layer_names})
        first = next(iter(tensors.values()))
        self._is_on_gpu = first.device.type != "cpu"
        self._blocks = Blocks.of(first, self._kv_cache_config.num_blocks)
        pp_rank, tp_rank, dp_rank = _ranks(self._vllm_config)
        parallel = self._vllm_config.parallel_config
        model = self._vllm_config.model_config
        spec = spec_of(
            first,
            model=_compatibility(self._vllm_config, self._settings, kernel_block_size_tokens(first)),
            total_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
            tp=(tp_rank, parallel.tensor_parallel_size),
            pp=(pp_rank, parallel.pipeline_parallel_size),
        )
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        config = self._settings.config
        if self._is_producer:
            rank = (dp_rank * parallel.pipeline_parallel_size + pp_rank) * parallel.tensor_parallel_size + tp_rank
            listen = self._settings.listen_of_rank(rank)
            advertise = self._settings.advertise or None
            self._pusher = kvpush.PrefillPusher(
                engine_id, tensors, spec, listen=listen, advertise=advertise, config=config
            )
            self._prefill = PrefillWorker(self._pusher, self.tally)
            self.source = Source(self._pusher.address, self._pusher.incarnation)
            logger.info("kvpush: prefill engine %s listens on %s port %d", engine_id, *self._pusher.address)
        if self._is_consumer:
            self._receiver = kvpush.DecodeReceiver(engine_id, tensors, spec, config=config)
            self._decode = DecodeWorker(self._receiver, self.tally)
            logger.info("kvpush: decode engine %s is ready", engine_id)

    def ask(self, work: StepWork) -> None:
        """Everything that does not depend on this step's forward."""
        self._is_idle = work.is_idle
        if self._prefill is not None:
            for number in work.withdrawals:
                self._prefill.withdraw(number)
            for transfer_ids in work.refusals:
                self._prefill.refuse(transfer_ids)
        if self._decode is not None:
            for request_id in work.cancels:
                self._decode.cancel(request_id)
            for expect in work.expects:
                self._decode.expect(self._blocks.of_expect(expect))
            for renewal in work.renewals:
                self._decode.renew(renewal)

    def push(self, work: StepWork) -> None:
        """The blocks that this step completes."""
        if self._prefill is None or not work.chunks:
            return
        ready: Fence | None = _recorded_event() if self._is_on_gpu else None
        for chunk in work.chunks:
            self._prefill.push(self._blocks.of_chunk(chunk), ready)

    def results(self) -> KVConnectorTransferResults:
        """What vLLM has to know of."""
        results = KVConnectorTransferResults()
        if self._prefill is not None:
            ended, lost = self._prefill.poll()
            self._report.ended_sends.update(ended)
            self._report.lost_sends |= lost
        if self._decode is not None:
            ends = self._decode.poll(may_wait=self._is_idle)
            results.finished_recving, results.failed_recving = ends.finished, ends.failed
            self._report.held.update(ends.held)
            self._report.released.update(ends.released)
        return results

    def take_report(self) -> Report:
        """What the scheduler's half has to know of."""
        report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        """End everything in bounded time."""
        for side in self._sides():
            report = side.close()
            if report.unsettled or not report.is_thread_stopped:
                logger.warning("kvpush: %s: closed with %s", side, report)

    def _sides(self) -> Iterable[kvpush.PrefillPusher | kvpush.DecodeReceiver]:
        return [side for side in (self._pusher, self._receiver) if side is not None]


def _recorded_event() -> Any:
    """Passed when the device has done everything that was launched so far."""
    event: Any = torch.cuda.Event  # its methods have no types
    recorded = event()
    recorded.record()
    return recorded


def _only_group(kv_cache_config: KVCacheConfig) -> int:
    """The one group of layers that is transferred."""
    group_ids = tuple(kv_cache_config.transfer_group_ids)
    if len(group_ids) != 1 or len(kv_cache_config.kv_cache_groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups)
        raise ConfigurationError(
            f"KvPushConnector transfers one group of layers that share their block lists; this model has "
            f"{len(kv_cache_config.kv_cache_groups)}: {kinds}. If it only mixes kinds of attention, try "
            f"--disable-hybrid-kv-cache-manager"
        )
    spec = kv_cache_config.kv_cache_groups[group_ids[0]].kv_cache_spec
    if getattr(spec, "sliding_window", None) is not None or kv_cache_config.has_mamba_layers:
        raise ConfigurationError(
            f"KvPushConnector transfers full attention; this model's layers are {type(spec).__name__}"
        )
    return int(group_ids[0])


def _settings(extra_config: dict[str, Any]) -> Settings:
    """What the operator said, and that this vLLM will do. It listens by default where vLLM's own NIXL connectors do."""
    listen = default_listen(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT)
    settings = Settings.of(extra_config, default_listen=listen)
    check_version(vllm.__version__, allow_untested=settings.allow_untested_vllm)
    return settings


def _num_ranks(vllm_config: VllmConfig) -> int:
    """How many ports there are from the first one to the last of this engine. Other data ranks check their own."""
    parallel = vllm_config.parallel_config
    num_data_ranks = int(parallel.data_parallel_index) + 1
    return num_data_ranks * int(parallel.pipeline_parallel_size) * int(parallel.tensor_parallel_size)


def _ranks(vllm_config: VllmConfig) -> tuple[int, int, int]:
    """Pipeline, tensor and data rank of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    dp_rank = int(vllm_config.parallel_config.data_parallel_index)
    return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group), dp_rank


def _compatibility(vllm_config: VllmConfig, settings: Settings, block_size_tokens: int) -> str:
    """What must be equal on both sides, besides what the library compares itself.

    The kernels' block size among it: how a kernel orders the tokens of a block is its own business (on a CPU it packs
    them for its vector units), so a part of a block means nothing to a kernel with other blocks.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    model = vllm_config.model_config
    backends = sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config))
    return " ".join(
        (
            f"vllm={minor_of(vllm.__version__)}",
            f"model={settings.model or model.model}",
            f"revision={model.revision}",
            f"quantization={model.quantization}",
            f"cache_dtype={vllm_config.cache_config.cache_dtype}",
            f"attention={','.join(backends)}",
            f"block_size={block_size_tokens}",
        )
    )
