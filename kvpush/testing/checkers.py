"""The rules that time and order can break, each checked from outside of the cores.

A checker is an :class:`~kvpush.testing.Observer`. It sees what the callers, the network and the transport see, and the
public introspection of a registry (snapshots, transitions); it never looks into a core. :func:`all_checkers` makes one
of each for a world. The memory oracle (:mod:`kvpush.testing.oracle`) is the other half.

The number behind each name is the rule's in docs/testing.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpush import wire
from kvpush.config import HoldPolicy
from kvpush.errors import FailureCode
from kvpush.events import BlocksReleased, Outcome, PushFinished, ReceiveFinished, StaleReason, Transition
from kvpush.lifecycle import ENGINE, State, Trigger
from kvpush.parallel import Share, readers
from kvpush.pushes import as_decode_sees_it
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.engine import Engine
from kvpush.testing.fake_transport import FakeWrite
from kvpush.testing.observer import Observer
from kvpush.testing.oracle import Grant
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.violations import Violation
from kvpush.wire import Rank

if TYPE_CHECKING:
    from kvpush.testing.world import World

EPSILON_S = 1e-6  # two clocks that started at different times round differently
SOON_S = 0.2  # for news to cross a link that no fault has touched, behind whatever else is under way on it


@dataclass(slots=True, eq=False)
class _Claim:
    """A registration that was sent."""

    prefill: PrefillEngine
    decode: DecodeEngine
    receive: Receive
    epoch: int
    links: set[int]  # the serial numbers of the untouched links between the two at that time

    @property
    def is_settled(self) -> bool:
        """Whether this rank of prefill has done its part: what becomes of the transfer elsewhere is not its concern."""
        writer = self.prefill.held
        return not writer.is_whole_engine and self.receive.has_all_from(writer)

    def is_heard(self, world: World) -> bool:
        """Whether both run, and a link of that time still stands and has never been touched."""
        is_running = self.prefill.is_running and self.decode.is_running
        return is_running and bool(self.links & world.network.pristine(self.decode, self.prefill))


class RowsOnly(Observer):
    """Rules 1, 6 and 8: every change of an engine is a row that follows the one before, a generation is one engine's,
    and a handshake succeeds only for the attempt that was begun last."""

    name = "rows-only"

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[int, int] = {}  # life -> transitions looked at
        self._states: dict[tuple[int, int], str] = {}  # (life, generation) -> state
        self._attempts: dict[tuple[int, int], str] = {}
        self._engine_ids: dict[tuple[int, int], str] = {}

    def turned(self) -> None:
        for engine in self._world.running():
            seen = self._seen.get(engine.life, 0)
            if engine.registry.num_transitions != seen:
                self._seen[engine.life], changes = engine.registry.transitions_since(seen)
                for change in changes:
                    self._look_at(engine, change)

    def _look_at(self, engine: Engine, change: Transition) -> None:
        key = engine.life, change.generation
        if self._engine_ids.setdefault(key, change.engine_id) != change.engine_id:
            raise Violation(self.name, f"{engine!r}: generation {change.generation} was another engine's: {change}")
        source = self._states.get(key, str(ENGINE.initial))
        dest = ENGINE.dest(State(source), Trigger(change.trigger))
        if change.source != source or dest is None or change.dest != dest:
            raise Violation(self.name, f"{engine!r}: {change} does not follow {source}")
        self._states[key] = change.dest
        if change.trigger == Trigger.handshake_started:
            self._attempts[key] = change.detail
        elif change.trigger == Trigger.handshake_succeeded and self._attempts[key] != change.detail:
            reason = f"{engine!r}: {change.detail} succeeded, but {self._attempts[key]} is under way"
            raise Violation("late-answers-change-nothing", reason)


class AgesByClock(Observer):
    """Rules 3, 4 and 5: a posted push refreshes its engine; an engine is lost, idle or evicted when its time has come,
    with traffic or without, and never idle while it is written to."""

    name = "ages-by-clock"

    def __init__(self, world: World) -> None:
        self._world = world
        self._changed_s: dict[tuple[int, int], float] = {}  # (life, generation) -> its last change
        self._seen: dict[int, int] = {}
        self._handshaking: dict[tuple[int, int], float] = {}  # (life, generation) -> its last activity
        self._heard: set[tuple[int, str, Rank]] = set()  # (life, engine id, rank) of messages since the last turn

    def handled(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if peer is not None:
            self._heard.add((engine.life, peer.engine_id, peer.rank))

    def posted(self, engine: PrefillEngine, write: FakeWrite, grant: Grant) -> None:
        incarnation = grant.sink.identity.incarnation
        shots = [shot for shot in engine.registry.snapshot() if shot.incarnation == incarnation]
        for shot in shots:
            if shot.state == State.connected and shot.idle_s > EPSILON_S:
                raise Violation("pushes-refresh", f"{engine!r}: a push was posted, and {shot} counts as idle")
        if not any(shot.in_flight for shot in shots):
            raise Violation("pinned-while-written", f"{engine!r}: a WRITE to {grant.sink!r} is posted without a pin")

    def turned(self) -> None:
        for engine in self._world.running():
            seen = self._seen.get(engine.life, 0)
            if engine.registry.num_transitions != seen:
                self._seen[engine.life], changes = engine.registry.transitions_since(seen)
                for change in changes:
                    key = engine.life, change.generation
                    self._changed_s[key] = change.at_s
                    if change.dest == State.handshaking:
                        self._handshaking[key] = math.inf
                    else:
                        self._handshaking.pop(key, None)
                    if change.trigger == Trigger.ttl_expired:
                        self._check_not_written_to(engine, change)
        if self._handshaking:
            self._check_not_refreshed()
        self._heard.clear()

    def _check_not_refreshed(self) -> None:
        """Only its own messages count for an engine that is not connected yet: a push that waits for it does not."""
        for engine in self._world.running():
            for shot in engine.registry.snapshot():
                key, active_s = (engine.life, shot.generation), engine.now_s() - shot.idle_s
                if shot.state == State.handshaking and key in self._handshaking:
                    if (
                        active_s > self._handshaking[key] + EPSILON_S
                        and (engine.life, shot.engine_id, shot.rank) not in self._heard
                    ):
                        raise Violation("pushes-refresh", f"{engine!r}: {shot} was refreshed in its handshake")
                    self._handshaking[key] = active_s

    def _check_not_written_to(self, engine: Engine, change: Transition) -> None:
        incarnations = [s.incarnation for s in engine.registry.snapshot() if s.generation == change.generation]
        for grant in self._world.oracle.tracked():
            if grant.source is engine and grant.sink.identity.incarnation in incarnations:
                reason = f"{engine!r}: {change}, while a WRITE of {grant.push!r} is in flight to it"
                raise Violation("pinned-while-written", reason)

    def checked(self) -> None:
        for engine in self._world.running():
            for shot in engine.registry.snapshot():
                config, now_s = engine.config, engine.now_s()
                at_s = self._changed_s.get((engine.life, shot.generation), math.inf)
                late = ""
                match shot.state:
                    case State.handshaking if now_s > at_s + config.handshake_timeout_s + EPSILON_S:
                        late = "its attempt goes on"
                    case State.connected if shot.silent_s > config.liveness_timeout_s + EPSILON_S:
                        late = f"silent for {shot.silent_s:g} s"
                    case State.connected if not shot.in_flight and shot.idle_s > config.engine_ttl_s + EPSILON_S:
                        late = f"idle for {shot.idle_s:g} s"
                    case State.stale if shot.reason is StaleReason.idle:
                        if now_s > at_s + config.evict_grace_s + EPSILON_S:
                            late = "its grace is over"
                    case State.stale if not shot.in_flight:
                        late = "nothing is in flight"
                    case _:
                        pass
                if late:
                    raise Violation(self.name, f"{engine!r} has {shot}, although {late}")


class WantedWhenPosted(Observer):
    """Rules 9 and 13: a WRITE starts only for a push that is still wanted by both sides, within its lease."""

    name = "wanted-when-posted"

    def __init__(self, world: World) -> None:
        self._cancelled: set[tuple[int, int, int]] = set()  # (prefill's life, decode's life, epoch)

    def handled(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if not isinstance(engine, PrefillEngine):
            return
        if isinstance(message, wire.Cancel) and peer is not None:
            self._cancelled.add((engine.life, peer.life, message.epoch))
        elif isinstance(message, wire.Renew):  # whoever sent it may be gone when it is read
            for transfer_id in message.transfer_ids:
                push = engine.open_push(transfer_id)
                if push is not None:
                    push.lease_from_s = engine.now_s()

    def write_ended(self, engine: PrefillEngine, grant: Grant, failure: object) -> None:
        grant.push.lease_from_s = engine.now_s()

    def posted(self, engine: PrefillEngine, write: FakeWrite, grant: Grant) -> None:
        push, lease_s = grant.push, engine.config.lease_s
        if push.is_cancelled:
            raise Violation(self.name, f"{engine!r} writes {push!r}, which its caller has cancelled")
        if (engine.life, grant.sink.life, grant.written.epoch) in self._cancelled:
            raise Violation(self.name, f"{engine!r} writes {push!r} for {grant.receive!r}, which decode has cancelled")
        is_first = len(engine.world.oracle.in_flight_of(push)) == 1  # the lease stands still while it writes
        if is_first and engine.now_s() > push.lease_from_s + lease_s + EPSILON_S:
            raise Violation(self.name, f"{engine!r} writes {push!r}, whose lease is over")


class Drained(Observer):
    """Rule 12: who is told ``Drained``, or ``Failed(settled)``, can rely on it."""

    name = "drained-means-quiet"

    def __init__(self, world: World) -> None:
        self._world = world

    def sent(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if isinstance(message, wire.Drained) or (isinstance(message, wire.Failed) and message.settled):
            for grant in self._world.oracle.in_flight():
                if grant.source is engine and grant.sink is peer and grant.written.epoch == message.epoch:
                    reason = f"{engine!r} sends {message!r}, but a WRITE of positions {grant.positions} may still land"
                    raise Violation(self.name, reason)


class FirstCause(Observer):
    """Rule 10: the cause that decode is told while a WRITE drains is the one that prefill's caller gets."""

    name = "first-cause"

    def __init__(self, world: World) -> None:
        self._cancelled: set[tuple[int, str]] = set()  # (life, transfer id)

    def called(self, engine: Engine, call: str, transfer_id: str, detail: str) -> None:
        if call == "cancel":
            self._cancelled.add((engine.life, transfer_id))

    def sent(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if not isinstance(message, wire.Failed) or message.settled or not isinstance(engine, PrefillEngine):
            return
        push = engine.open_push(message.transfer_id)
        is_refusal = message.code in (FailureCode.already_served, FailureCode.claimed)
        if push is None or is_refusal or push.told_code is not None or not isinstance(peer, DecodeEngine):
            return
        if push.receives.get(peer.rank) is not None and push.receives[peer.rank] is peer.receive_of(message.epoch):
            push.told_code = message.code

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        if isinstance(event, BlocksReleased):
            return
        is_own = (engine.life, event.transfer_id) in self._cancelled
        if event.code is FailureCode.cancelled_by_caller and not is_own:
            raise Violation(self.name, f"{engine!r}: {event}, which its caller never cancelled")
        if isinstance(account, Push) and isinstance(event, PushFinished) and account.told_code is not None:
            code = None if event.code is None else as_decode_sees_it(event.code)
            if code != account.told_code:
                raise Violation(self.name, f"{engine!r}: decode was told {account.told_code}, the caller gets {event}")


class ToldAtOnce(Observer):
    """Rule 11: when one side gives up, the other is told, at once, over the link on which the transfer was registered.

    Only links that no fault has touched are held to it.
    """

    name = "told-at-once"

    def __init__(self, world: World) -> None:
        self._world = world
        self._claims: dict[tuple[int, str], list[_Claim]] = {}  # (prefill's life, transfer id) -> registrations
        # (decode's life, epoch) -> by life of each rank of prefill, the newest
        self._registered: dict[tuple[int, int], dict[int, _Claim]] = {}
        self._cancels: set[tuple[int, int, int]] = set()  # (decode's life, epoch, prefill's life)
        self._failed: set[tuple[int, int, int]] = set()  # likewise, what prefill has said no to
        self._unheard: list[tuple[float, _Claim, str]] = []  # (when, who must hear, of what)
        self._ended: list[_Claim] = []

    def called(self, engine: Engine, call: str, transfer_id: str, detail: str) -> None:
        """What its own caller says ends registrations for which nothing was pushed."""
        if not isinstance(engine, PrefillEngine):
            return
        for (life, waiting_id), claims in self._claims.items():
            if life != engine.life or engine.open_push(waiting_id) is not None:
                continue
            for claim in claims:
                is_meant = (
                    call == "drain"
                    or (call == "cancel" and waiting_id == transfer_id)
                    or (call == "drop_engine" and claim.decode.engine_id == detail)
                )
                if is_meant:
                    self._unheard.append((self._world.clock() + SOON_S, claim, f"{call} of {waiting_id!r}"))

    def sent(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if isinstance(message, wire.Cancel) and peer is not None:
            self._cancels.add((engine.life, message.epoch, peer.life))
        elif isinstance(message, wire.Failed) and peer is not None:
            self._failed.add((peer.life, message.epoch, engine.life))
        elif isinstance(message, wire.Register) and isinstance(engine, DecodeEngine):
            receive = engine.receive_of(message.epoch)
            if isinstance(peer, PrefillEngine) and receive is not None:
                claim = _Claim(peer, engine, receive, message.epoch, self._world.network.pristine(engine, peer))
                self._registered.setdefault((engine.life, message.epoch), {})[peer.life] = claim

    def handled(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if isinstance(message, wire.Register) and peer is not None:
            claim = self._registered.get((peer.life, message.epoch), {}).get(engine.life)
            if claim is not None:
                self._claims.setdefault((engine.life, message.transfer_id), []).append(claim)
        elif isinstance(message, wire.Cancel) and isinstance(engine, PrefillEngine) and peer is not None:
            claims = self._claims.get((engine.life, message.transfer_id), [])
            mine = [claim for claim in claims if claim.decode is peer]
            if engine.open_push(message.transfer_id) is not None or not mine or mine[-1].epoch != message.epoch:
                return
            if (peer.life, message.epoch, engine.life) in self._failed or not mine[-1].is_heard(self._world):
                return  # they crossed, or it had ended with its link: it was not registered any more
            for claim in claims:  # the other ranks of its engine, which wait for nothing any more
                if claim.decode is not peer and claim.decode.engine_id == peer.engine_id:
                    due_s = self._world.clock() + SOON_S
                    self._unheard.append((due_s, claim, f"{peer!r} has cancelled {message.transfer_id!r}"))

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        if isinstance(event, PushFinished):
            for claim in self._claims.pop((engine.life, event.transfer_id), []):
                if event.outcome is not Outcome.done and claim.decode.engine_id == event.engine_id:
                    self._unheard.append((self._world.clock() + SOON_S, claim, str(event)))
        elif isinstance(event, ReceiveFinished) and isinstance(account, Receive) and account.epoch is not None:
            is_own_decision = event.outcome is Outcome.expired or event.code is FailureCode.cancelled_by_caller
            for claim in self._registered.get((engine.life, account.epoch), {}).values():
                # what one rank of prefill said, the others have to be told
                is_news = is_own_decision or (account.told_by and claim.prefill.life not in account.told_by)
                if is_news and event.outcome is not Outcome.done:
                    self._ended.append(claim)

    def turned(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            for claim in ended:
                key = claim.decode.life, claim.epoch, claim.prefill.life
                if claim.is_heard(self._world) and key not in self._cancels and not claim.is_settled:
                    reason = f"{claim.decode!r} gave up {claim.receive!r}, and {claim.prefill!r} is not told"
                    raise Violation(self.name, reason)
        if self._unheard:
            self._unheard = [promise for promise in self._unheard if self._is_owed(*promise)]

    def _is_owed(self, due_s: float, claim: _Claim, event: str) -> bool:
        if claim.receive.is_over or claim.is_settled or not claim.is_heard(self._world):
            return False
        if self._world.clock() > due_s:
            reason = f"{claim.prefill!r}: {event}, and {claim.decode!r} still waits for {claim.receive!r}"
            raise Violation(self.name, reason)
        return True


class EveryRankServed(Observer):
    """A push is done when every rank of the decode engine that it has bytes for, or that must hear of it, has asked for
    them; not when as many have asked as there are, or one has everything."""

    name = "every-rank-served"

    def __init__(self, world: World) -> None:
        self._world = world
        # (prefill's life, transfer id) -> engine and share of those who have asked since the last push of this id
        self._asked: dict[tuple[int, str], set[tuple[str, Share]]] = {}

    def handled(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        if isinstance(message, wire.Register) and peer is not None:
            self._asked.setdefault((engine.life, message.transfer_id), set()).add((peer.engine_id, peer.held.share))

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        if not isinstance(event, PushFinished):
            return
        asked = self._asked.pop((engine.life, event.transfer_id), set())
        if event.outcome is not Outcome.done or not isinstance(account, Push):
            return
        found = {share for engine_id, share in asked if engine_id == event.engine_id}
        # an engine that came back spread differently may have asked, too
        missing = [self._missing(engine, found, share) for share in found]
        if all(missing):
            raise Violation(self.name, f"{engine!r}: {event} is done, but ranks {missing} have not asked for it")
        num_units = sum(receive.units_from(engine.held).bit_count() for receive in account.receives.values())
        if event.num_bytes != num_units * engine.held.model.unit_bytes:
            raise Violation(self.name, f"{engine!r}: {event}, but its receives have {num_units} units of it")

    @staticmethod
    def _missing(engine: Engine, asked: set[Share], share: Share) -> list[Rank]:
        """Ranks of an engine of this shape that were not heard of."""
        needed = readers(engine.held.share, share.pp_size, share.tp_size, [engine.held.model.num_heads])
        sizes = share.pp_size, share.tp_size
        return sorted(needed - {other.rank for other in asked if (other.pp_size, other.tp_size) == sizes})


class InTime(Observer):
    """Rules 10, 12, 13 and 18: every outcome, every end of a hold and every cancel comes within its own bound."""

    name = "in-time"

    def __init__(self, world: World) -> None:
        self._world = world
        self._cancelled: list[tuple[Engine, Push | Receive]] = []

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        if isinstance(event, BlocksReleased) or event.outcome is not Outcome.expired:
            return
        if isinstance(account, Push):
            due_s = account.pushed_s + engine.config.lease_s
        else:
            due_s = account.deadline_s
        if engine.now_s() < due_s - EPSILON_S:
            raise Violation("not-too-early", f"{engine!r}: {event}, which had {due_s - engine.now_s():g} s left")

    def called(self, engine: Engine, call: str, transfer_id: str, detail: str) -> None:
        if call == "cancel":
            account: Push | Receive | None = None
            if isinstance(engine, PrefillEngine):
                account = engine.open_push(transfer_id)
            elif isinstance(engine, DecodeEngine):
                account = engine.open_receive(transfer_id)
            if account is not None:
                self._cancelled.append((engine, account))

    def turned(self) -> None:
        for engine, account in self._cancelled:
            if engine.is_running and not account.is_over:
                if isinstance(account, Push) and self._world.oracle.in_flight_of(account):
                    continue
                raise Violation("cancel-ends", f"{engine!r}: {account!r} was cancelled, and is not over")
        self._cancelled.clear()

    def checked(self) -> None:
        for engine in self._world.running():
            now_s, config = engine.now_s() - EPSILON_S, engine.config
            accounts: list[Push] | list[Receive] = []
            if isinstance(engine, PrefillEngine):
                accounts = engine.pushes
                for push in accounts:
                    self._check_push(engine, push, now_s)
            elif isinstance(engine, DecodeEngine):
                accounts = engine.receives
                for receive in accounts:
                    if not receive.is_over and now_s > receive.deadline_s:
                        raise Violation(self.name, f"{engine!r}: {receive!r} is past its deadline")
            for account in accounts:
                is_late = account.is_over and not account.is_free and now_s > account.finished_s + config.hold_timeout_s
                if is_late and config.hold_policy is HoldPolicy.release:
                    raise Violation("holds-end", f"{engine!r}: {account!r} is held past hold_timeout_s")

    def _check_push(self, engine: PrefillEngine, push: Push, now_s: float) -> None:
        if push.is_over or not push.has_last:
            return
        in_flight = self._world.oracle.in_flight_of(push)
        # what the device has not computed yet, in a push that has begun, is decode's to wait for: its deadline ends it
        is_decodes = push.num_fenced > 0 and bool(push.receives)
        if not in_flight and not is_decodes and now_s > push.lease_from_s + engine.config.lease_s:
            raise Violation(self.name, f"{engine!r}: {push!r} waits past its lease")
        for grant in in_flight:
            if now_s > grant.posted_s + engine.config.stall_timeout_s:
                raise Violation(self.name, f"{engine!r}: {push!r} waits for a WRITE past stall_timeout_s")


class Bounded(Observer):
    """Rule 16: no queue, table or timer grows beyond its setting, or beyond what is open."""

    name = "bounded"

    def __init__(self, world: World) -> None:
        self._world = world

    def checked(self) -> None:
        for engine in self._world.running():
            config, gauges = engine.config, engine.core.gauges()
            limits = {
                "registrations_waiting": config.max_registrations,
                "tombstones": config.max_tombstones,
                "pushes_behind_handshakes": config.max_deferred_per_engine * max(1, len(engine.registry)),
                "writes_doubtful": config.max_tombstones,
            }
            over = {name: gauges[name] for name, limit in limits.items() if gauges.get(name, 0) > limit}
            if over or len(engine.registry) > config.max_engines:
                raise Violation(self.name, f"{engine!r}: {over}, {len(engine.registry)} engines")
            if gauges["timers"] > self._most_timers(gauges):
                raise Violation(self.name, f"{engine!r} has {gauges['timers']} timers for {gauges}")

    @staticmethod
    def _most_timers(gauges: dict[str, int]) -> int:
        if "pushes_open" in gauges:
            own = 2 * (gauges["pushes_open"] + gauges["pushes_held"])
            return own + gauges["registrations_waiting"] + gauges["writes_in_flight"]
        return gauges["receives_open"] + gauges["receives_held"] + gauges["links"]


def all_checkers(world: World) -> list[Observer]:
    """One of each, for this world."""
    return [
        RowsOnly(world),
        AgesByClock(world),
        WantedWhenPosted(world),
        Drained(world),
        FirstCause(world),
        ToldAtOnce(world),
        EveryRankServed(world),
        InTime(world),
        Bounded(world),
    ]
