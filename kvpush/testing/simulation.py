"""One scenario, run: its steps, then a heal phase, and everything that must hold afterwards.

    result = Simulation(draw(seed, ACTIONS)).run()
    assert result.failure is None, result.failure

After the last step all faults are off. Then, within bounded time and a bounded number of steps, every transfer has its
outcome and its blocks back, nothing is left of any, idle engines are evicted, new transfers are served, and all engines
close.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvpush.config import HoldPolicy
from kvpush.events import Outcome
from kvpush.lifecycle import State
from kvpush.prefill import REGISTRATION_GRACE_S
from kvpush.testing import callers, faults
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.checkers import all_checkers
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.engine import Engine
from kvpush.testing.fake_transport import FakeWrite
from kvpush.testing.observer import Observer
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.scenario import Action, Scenario, Step
from kvpush.testing.slices import Spread
from kvpush.testing.violations import Violation
from kvpush.testing.world import World

T = TypeVar("T")
E = TypeVar("E", bound=Engine)

ACTIONS: dict[str, Action] = {action.name: action for action in [*callers.ACTIONS, *faults.FAULTS]}

MAX_STEPS_TO_SETTLE = 20_000  # events until everything has come to rest, with faults off
MAX_RANKS_ANEW = 3  # of an engine that comes back spread differently
MAX_REST_STEPS_PER_S = 20  # of one link that nobody uses: heartbeats, and their timers


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """What ended a run: the checker that saw it, or the type of the exception that came out of a core."""

    checker: str
    message: str

    def __str__(self) -> str:
        return f"{self.checker}: {self.message}"


@dataclass(slots=True)
class Result:
    """What became of one run."""

    seed: int
    failure: BrokenRule | None = None
    num_steps: int = 0  # events that the world carried out
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)  # that struck, by kind
    outcomes: Counter[str] = field(default_factory=Counter)
    # how a prefill and a decode engine were spread over ranks -> receives that were done between them
    served: Counter[tuple[Spread, Spread]] = field(default_factory=Counter)


class Simulation:
    """Runs a scenario once. ``observers`` see everything, beside the checkers."""

    def __init__(self, scenario: Scenario, observers: Sequence[Observer] = ()) -> None:
        setup = scenario.setup
        self.scenario = scenario
        self.world = World(
            scenario.seed, setup.config, num_layers=setup.shape.num_layers, num_heads=setup.shape.num_heads
        )
        self.world.write_latency_s = setup.write_latency_s
        self.ambush = faults.Ambush(self)
        self.world.observers += [*observers, *all_checkers(self.world), self.ambush]
        self.result = Result(scenario.seed)
        self.mischief = faults.Mischief(self.world, self.count)
        self.armed_writes: list[faults.ArmedWrite] = []
        self.fenced: list[tuple[PrefillEngine, Push, int, range]] = []
        self.strangers: list[Callable[[], None]] = []  # who hold somebody else's address, and how to end it
        self.num_bystanders = 0
        self.num_confused = 0
        self.is_healed = False
        self.prefill_ids = [f"p{i}" for i in range(setup.num_prefill)]
        self.decode_ids = [f"d{i}" for i in range(setup.num_decode)]
        # how each engine is spread over its ranks, from which life on
        self.spreads: dict[str, list[tuple[int, Spread]]] = {}
        for number, engine_id in enumerate(self.prefill_ids + self.decode_ids):
            offset_s = setup.clock_offsets_s[number]
            self.spreads[engine_id] = [(0, setup.spread(number))]
            for share, layers in setup.spread(number).parts:
                if number < setup.num_prefill:
                    self.world.prefill(engine_id, num_blocks=24, clock_offset_s=offset_s, share=share, layers=layers)
                else:
                    self.world.decode(engine_id, clock_offset_s=offset_s, share=share, layers=layers)

    # --- who is there, for actions -----------------------------------------------------------------------------------

    @property
    def prefills(self) -> list[PrefillEngine]:
        """The newest life of every rank of every prefill engine."""
        return [rank for engine_id in self.prefill_ids for rank in self.prefill_engine(engine_id)]

    @property
    def decodes(self) -> list[DecodeEngine]:
        """The newest life of every rank of every decode engine."""
        return [rank for engine_id in self.decode_ids for rank in self.decode_engine(engine_id)]

    def prefill_engine(self, engine_id: str) -> list[PrefillEngine]:
        """All its ranks, dead or alive."""
        return [rank for rank in self.world.ranks_of(engine_id) if isinstance(rank, PrefillEngine)]

    def decode_engine(self, engine_id: str) -> list[DecodeEngine]:
        """All its ranks, dead or alive."""
        return [rank for rank in self.world.ranks_of(engine_id) if isinstance(rank, DecodeEngine)]

    @property
    def bystander(self) -> list[DecodeEngine]:
        """The ranks of the engine that no fault touches."""
        return self.decode_engine(self.decode_ids[-1])

    @property
    def target_ids(self) -> list[str]:
        """Decode engines that may be struck."""
        return self.decode_ids[:-1] if self.scenario.setup.has_bystander else self.decode_ids

    def target_ranks(self, number: int) -> list[DecodeEngine]:
        """All ranks of a decode engine that may be struck, dead or alive."""
        return self.decode_engine(_picked(self.target_ids, number))

    def source_ranks(self, number: int) -> list[PrefillEngine]:
        """All ranks of a prefill engine, dead or alive."""
        return self.prefill_engine(_picked(self.prefill_ids, number))

    def decode_ranks(self, number: int) -> list[DecodeEngine]:
        """As :meth:`target_ranks`, those that run."""
        return [rank for rank in self.target_ranks(number) if rank.is_serving]

    def prefill_ranks(self, number: int) -> list[PrefillEngine]:
        """As :meth:`source_ranks`, those that run."""
        return [rank for rank in self.source_ranks(number) if rank.is_serving]

    def target(self, number: int) -> DecodeEngine:
        """A rank of a decode engine, dead or alive, which may be struck."""
        return _picked([rank for engine_id in self.target_ids for rank in self.decode_engine(engine_id)], number)

    def source(self, number: int) -> PrefillEngine:
        """A rank of a prefill engine, dead or alive."""
        return _picked(self.prefills, number)

    def decode(self, number: int) -> DecodeEngine | None:
        """As :meth:`target`, if it runs."""
        return _running(self.target(number))

    def prefill(self, number: int) -> PrefillEngine | None:
        """As :meth:`source`, if it runs."""
        return _running(self.source(number))

    def transfer(self, number: int) -> str:
        """An id."""
        return f"t{number % self.scenario.setup.num_transfers}"

    def peers_of(self, engine: Engine) -> Sequence[Engine]:
        """Who talks to it."""
        return self.decodes if isinstance(engine, PrefillEngine) else self.prefills

    def restart(self, engine: Engine) -> None:
        """The next life, unless it has begun."""
        is_ours = engine.engine_id in self.prefill_ids or engine.engine_id in self.decode_ids
        if is_ours and not engine.is_alive and engine in self.world.ranks_of(engine.engine_id):
            engine.restart()

    def spread_anew(self, engine_id: str, number: int, *, in_order: bool) -> bool:
        """All ranks of an engine end, and it comes back spread over its ranks as some engine of this run was at first.
        Whether that is another way than now."""
        for end in self.strangers if engine_id in self.prefill_ids else ():
            end()  # it comes back to its addresses
        ranks, spread = self.world.ranks_of(engine_id), _picked(self.scenario.setup.spreads, number)
        if spread.parts == [(rank.held.share, rank.held.layers) for rank in ranks] or spread.num_ranks > MAX_RANKS_ANEW:
            return False
        for rank in ranks if in_order else ():
            if rank.is_serving:
                rank.close()
        for rank in self.world.ranks_of(engine_id):  # one may have come back while another closed
            if rank.is_alive:
                rank.kill()
        self.spreads[engine_id].append((len(self.world.engines) + 1, spread))
        addresses = iter([rank.address for rank in ranks if isinstance(rank, PrefillEngine)])
        for share, layers in spread.parts:
            if engine_id in self.prefill_ids:
                address = next(addresses, None)
                self.world.prefill(engine_id, num_blocks=24, share=share, layers=layers, address=address)
            else:
                self.world.decode(engine_id, share=share, layers=layers)
        return True

    def spread_of(self, engine: Engine) -> Spread:
        """How its engine was spread over ranks in this life."""
        return [spread for life, spread in self.spreads[engine.engine_id] if life <= engine.life][-1]

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """A caller acts after a while, unless the world has healed by then; at once where there is nothing to wait."""

        def act() -> None:
            if not self.is_healed:
                call()

        if delay_s:
            self.world.schedule(delay_s, act)
        else:
            act()

    def count(self, fault: str) -> None:
        """A fault struck."""
        self.result.faults[fault] += 1

    def write_fate(self, write: FakeWrite) -> bool:
        """Whether a fault that waits for a WRITE takes this one."""
        name = self.world.by_agent[write.target].name
        for armed in self.armed_writes:
            if armed.target == name:
                self.armed_writes.remove(armed)
                self.count(armed.fault)
                self.world.struck(armed.fault, f"WRITE to {name}")
                armed.act(write)
                return armed.fault != "write_doubtful"
        return False

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Never raises for a broken rule: it is in the result."""
        start_s = self.world.clock()
        try:
            for step in self.scenario.steps:
                self._take(step)
            self._heal()
            self._settle()
            self._rest()
            self._serve_again()
            self._close()
        except Violation as exc:
            self.result.failure = BrokenRule(exc.checker, exc.message)
        except Exception as exc:  # noqa: BLE001  # whatever leaves a core is a bug, and this run's finding
            place = traceback.extract_tb(exc.__traceback__)[-1]
            where = f"{place.filename.rpartition('/')[2]}:{place.name}"
            self.result.failure = BrokenRule(f"{type(exc).__name__} in {where}", str(exc))
        self.result.num_steps = self.world.num_steps
        self.result.simulated_s = self.world.clock() - start_s
        for engine in self.world.engines:
            side = "push" if isinstance(engine, PrefillEngine) else "receive"
            for account in _accounts_of(engine):
                self.result.outcomes[f"{side} {account.outcome or 'died with its process'}"] += 1
                if isinstance(account, Receive) and account.outcome is Outcome.done and account.block_ids:
                    self.result.served[self.spread_of(account.source), self.spread_of(engine)] += 1
        return self.result

    def _take(self, step: Step) -> None:
        action = ACTIONS[step.action]
        if action.perform(self, step.numbers) and action.is_fault:
            self.count(action.name)
            self.world.struck(action.name, self._shown(action, step))
        self.world.advance(step.delay_s)
        self._check()

    def _shown(self, action: Action, step: Step) -> str:
        return f"{self.target(step.numbers[0]).name}, {self.source(step.numbers[1]).name}"

    def _check(self) -> None:
        self.world.check()
        for observer in self.world.observers:
            observer.checked()

    def _heal(self) -> None:
        self.world.noted("all faults are over")
        self.is_healed = True
        self.mischief.armed.clear()
        self.armed_writes.clear()
        self.ambush.waiting.clear()
        self.world.heal()
        for end in self.strangers:
            end()
        for engine in [*self.prefills, *self.decodes]:
            self.restart(engine)
        for prefill, push, chunk, positions in self.fenced:
            if prefill.is_alive and prefill.open_push(push.transfer_id) is push:
                prefill.compute(push, chunk, positions)
        for prefill in self.prefills:
            for push in prefill.pushes:
                if not push.is_over and not push.has_last:
                    prefill.cancel(push.transfer_id)

    @property
    def bound_s(self) -> float:
        """Time in which everything must have come to rest, with faults off."""
        config = self.scenario.setup.config
        return 2 * (config.receive_deadline_s + config.hold_timeout_s + config.lease_s + config.stall_timeout_s)

    @property
    def _is_crowded(self) -> bool:
        return self.scenario.setup.config.max_engines < max(len(self.prefills), len(self.decodes))

    def _settle(self) -> None:
        before = self.world.num_steps
        if self.scenario.setup.config.hold_policy is HoldPolicy.keep:
            self._settle_kept()
        self.world.settle(self.bound_s)
        if self.world.num_steps - before > MAX_STEPS_TO_SETTLE:
            raise Violation("settles", f"only after {self.world.num_steps - before} steps")
        self._check()

    def _settle_kept(self) -> None:
        """Blocks that are kept until proven may stay held for as long as prefill's agent lives."""
        self.world.run_for(self.bound_s, until=lambda: all(account.is_free for account in self.world.accounts))
        if still_open := [account for account in self.world.accounts if not account.is_over]:
            raise Violation("settles", f"{still_open} have no outcome after {self.bound_s:g} s")
        if not all(account.is_free for account in self.world.accounts):
            self.world.noted("blocks are kept: prefill's agents end")
            for prefill in list(self.prefills):
                prefill.close()
                self.restart(prefill)
        self.world.run_for(self.bound_s, until=lambda: all(account.is_free for account in self.world.accounts))
        for decode in list(self.decodes):
            is_holding = any(not receive.is_free for receive in decode.receives)
            # an engine that decode's caller dropped is asked no more: nothing but decode's own end gives these back
            if is_holding and not decode.core.gauges()["links"]:
                decode.close()
                self.restart(decode)

    def _rest(self) -> None:
        """Nobody calls. Empty registrations time out, idle engines are evicted, and nothing is left."""
        config = self.scenario.setup.config
        self.world.noted("rest")
        idle_s = config.engine_ttl_s + config.evict_grace_s
        # where few engines may be known at a time, the notice of an empty receive waits until another is forgotten
        rest_s = max(config.receive_deadline_s + REGISTRATION_GRACE_S, idle_s) + 1 + idle_s * self._is_crowded * 2
        before = self.world.num_steps
        self.world.advance(rest_s)
        links = len(self.prefills) * len(self.decodes)
        if self.world.num_steps - before > rest_s * MAX_REST_STEPS_PER_S * links:
            raise Violation("no-spinning", f"{self.world.num_steps - before} steps in {rest_s:g} s of rest")
        self.world.check_settled()
        self._check()
        for engine in self.world.running():
            counts = engine.transport.counts
            known = [shot for shot in engine.registry.snapshot() if shot.state != State.evicted]
            if known or engine.core.gauges()["links"] or counts.remotes_added != counts.remotes_removed:
                raise Violation("nothing-is-left", f"{engine!r} still knows {known}, {counts}, {engine.core.gauges()}")

    def _serve_again(self) -> None:
        """After the storm every pair is served, one after the other. Where only a few engines may be known at a time,
        the last pair has been forgotten before the next comes."""
        self.world.noted("every pair once more")
        config = self.scenario.setup.config
        for prefill_id in self.prefill_ids:
            for decode_id in self.decode_ids:
                if self._is_crowded:
                    self.world.advance(config.engine_ttl_s + config.evict_grace_s + 1)
                name = f"after {prefill_id} {decode_id}"
                prefills = self.prefill_engine(prefill_id)
                receives = [rank.expect(name, [0, 1], prefills[0]) for rank in self.decode_engine(decode_id)]
                pushes = [rank.push(name, [0, 1]) for rank in prefills]
                self.world.settle(self.bound_s)
                accounts: list[Push | Receive] = [*pushes, *receives]
                for account in accounts:
                    if account.outcome is not Outcome.done:
                        raise Violation("serves-again", f"{account.finished!r}")

    def _close(self) -> None:
        self.world.noted("close")
        for engine in [*self.decodes, *self.prefills]:
            start_s = self.world.clock()
            engine.close()
            if self.world.clock() > start_s + self.scenario.setup.config.close_timeout_s + 1e-6:
                raise Violation("in-time", f"{engine!r}: close() took {self.world.clock() - start_s:g} s")
            self.world.advance(0.01)
            if left := [account for account in _accounts_of(engine) if not account.is_over]:
                raise Violation("settles", f"{engine!r} is closed, and {left} have no outcome")
        self.world.check()


def _accounts_of(engine: Engine) -> Sequence[Push | Receive]:
    if isinstance(engine, PrefillEngine):
        return engine.pushes
    assert isinstance(engine, DecodeEngine), "there are two kinds"
    return engine.receives


def _picked(things: Sequence[T], number: int) -> T:
    return things[number % len(things)]


def _running(engine: E) -> E | None:
    return engine if engine.is_running else None
