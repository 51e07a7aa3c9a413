"""What goes wrong in a simulation. Each fault is counted when it strikes, and ends by itself or when the world heals.

A fault that needs a message or a WRITE to strike at is *armed*: it waits for the next one that fits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvpush import metadata, wire
from kvpush.errors import Failure, FailureCode, TransportError
from kvpush.events import BlocksReleased, PushFinished, ReceiveFinished
from kvpush.layout import DEFAULT_GROUP
from kvpush.link import LinkMessage
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.engine import Engine
from kvpush.testing.fake_transport import FakeWrite, Operation, WriteState
from kvpush.testing.network import Frames, InTransit
from kvpush.testing.observer import Observer
from kvpush.testing.oracle import Grant
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.scenario import Action

if TYPE_CHECKING:
    from kvpush.testing.simulation import Simulation
    from kvpush.testing.world import World

SPANS_S = (0.05, 0.4, 0.9, 1.8, 3.0, 6.0)  # how long a fault lasts, short and longer than each time limit
STALLS_S = (0.3, 1.0, 2.0, 4.0)  # of a WRITE, still asked about
LATE_S = (6.0, 8.0, 11.0)  # of a WRITE whose hold has run out by then

# What may get lost alone, on a link that goes on. TCP does not lose it; a bug, a full queue or a broken proxy may.
_LOSABLE: tuple[type | None, ...] = (
    None,
    None,
    wire.Hello,
    wire.Welcome,
    wire.MetadataRequest,
    wire.Metadata,
    wire.Register,
    wire.Cancel,
    wire.Failed,
    wire.Drained,
    wire.Heartbeat,
)


def decoded(frames: Frames) -> wire.Message | None:
    """A message, whichever way it goes; ``None`` when it is none."""
    for decode_it in (wire.decode_to_prefill, wire.decode_to_decode):
        try:
            return decode_it(frames)
        except Failure:
            continue
    return None


# --- faults that wait for a message ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Armed:
    """Waits for a message of this kind (``None``: of any) between two processes, in either direction."""

    fault: str
    path: frozenset[str]
    kind: type | None
    act: Callable[[InTransit], list[Frames]]


class Mischief:
    """Everything that waits for a message. The network asks it what to deliver."""

    def __init__(self, world: World, count: Callable[[str], None]) -> None:
        self._world = world
        self._count = count
        self.armed: list[Armed] = []

    def __call__(self, message: InTransit) -> list[Frames]:
        path = frozenset((message.sender, message.receiver))
        for armed in self.armed:
            if armed.path == path and (armed.kind is None or isinstance(decoded(message.frames), armed.kind)):
                self.armed.remove(armed)
                self._count(armed.fault)
                kind = type(decoded(message.frames)).__name__
                self._world.struck(armed.fault, f"{kind}, {message.sender} to {message.receiver}")
                return armed.act(message)
        return [message.frames]


def _arm(
    run: Simulation,
    fault: str,
    numbers: Sequence[int],
    kind: type | None,
    act: Callable[[InTransit], list[Frames]],
) -> bool:
    path = frozenset((run.target(numbers[0]).name, run.source(numbers[1]).name))
    run.mischief.armed.append(Armed(fault, path, kind, act))
    run.world.network.mischief = run.mischief
    return False  # counted when it strikes


def message_lost(run: Simulation, numbers: Sequence[int]) -> bool:
    """One message does not arrive; the link goes on."""
    kind = _LOSABLE[numbers[2] % len(_LOSABLE)]
    return _arm(run, "message_lost", numbers, kind, lambda message: [])


def message_duplicated(run: Simulation, numbers: Sequence[int]) -> bool:
    """One message arrives twice."""
    kind = _LOSABLE[numbers[2] % len(_LOSABLE)]
    return _arm(run, "message_duplicated", numbers, kind, lambda message: [message.frames, message.frames])


def metadata_damaged(run: Simulation, numbers: Sequence[int]) -> bool:
    """One bit of the handshake's answer flips, or its end is cut off."""

    def act(message: InTransit) -> list[Frames]:
        return [wire.encode(_damaged(wire.decode_to_prefill(message.frames), numbers))]

    return _arm(run, "metadata_damaged", numbers, wire.Metadata, act)


def _damaged(message: wire.Message, numbers: Sequence[int]) -> wire.Message:
    assert isinstance(message, wire.Metadata), "armed for it"
    name = ("blob", "geometry", "digest", "blob")[numbers[2] % 4]
    data = bytearray(getattr(message, name))
    if numbers[3] % 4 == 0:
        del data[-1 - numbers[4] % 8 :]
    else:
        data[numbers[4] % len(data)] ^= 1 << numbers[5] % 8
    return msgspec.structs.replace(message, **{name: bytes(data)})


def handshake_by_another(run: Simulation, numbers: Sequence[int]) -> bool:
    """Another decode engine's metadata answers, or that of an earlier life."""
    others = [engine for engine in run.world.engines if isinstance(engine, DecodeEngine)]

    def act(message: InTransit) -> list[Frames]:
        asked = wire.decode_to_prefill(message.frames)
        assert isinstance(asked, wire.Metadata), "armed for it"
        other = others[numbers[2] % len(others)]
        if other.identity.incarnation == asked.incarnation:
            return [message.frames]
        mine = other.identity
        return [
            wire.encode(
                metadata.build(asked.attempt, mine.incarnation, mine.agent_name, other.metadata, other.geometry)
            )
        ]

    return _arm(run, "handshake_by_another", numbers, wire.Metadata, act)


def handshake_late(run: Simulation, numbers: Sequence[int]) -> bool:
    """An answer comes when the attempt is over, perhaps in the middle of the next one."""
    kinds = (wire.Metadata, wire.Metadata, wire.MetadataRequest, wire.Welcome)
    span_s = (0.75, 1.0, 1.2)[numbers[3] % 3]
    path = {run.target(numbers[0]).name, run.source(numbers[1]).name}
    kind, num_held = kinds[numbers[2] % len(kinds)], [0]
    until_the_next = bool(numbers[4] % 2)

    def hold(message: InTransit) -> bool:
        if {message.sender, message.receiver} != path or not isinstance(decoded(message.frames), kind):
            return False
        num_held[0] += 1
        if num_held[0] == 1:
            run.count("handshake_late")
            how = "until the next one" if until_the_next else f"for {span_s:g} s"
            run.world.struck("handshake_late", f"{kind.__name__}, {message.sender} to {message.receiver}, {how}")
        if until_the_next and num_held[0] == 2:
            run.world.schedule(0.0, run.world.network.release)  # both, in either order
        elif not until_the_next:
            run.world.schedule(span_s, run.world.network.release)
        return num_held[0] == 1 or until_the_next

    run.world.network.hold = hold
    return False


def garbage(run: Simulation, numbers: Sequence[int]) -> bool:
    """A message that is none, or of another protocol version."""
    engine: Engine = run.target(numbers[0]) if numbers[2] % 2 else run.source(numbers[1])
    spared = run.bystander if run.scenario.setup.has_bystander else []
    links = [link for link in run.world.network.links_of(engine) if run.world.peer_of(engine, link) not in spared]
    if not links or not engine.is_alive:
        return False
    rng = random.Random(numbers[3])
    frames = (
        [b"kvpush/1", rng.randbytes(numbers[4] % 40)],
        [b"kvpush/9", b"\x80"],
        [rng.randbytes(9)],
        [b"kvpush/1", wire.encode(wire.Heartbeat())[1], b"more"],
        [],
    )[numbers[5] % 5]
    engine.link_event(LinkMessage(links[numbers[3] % len(links)], frames))
    return True


def confused_peer(run: Simulation, numbers: Sequence[int]) -> bool:
    """A decode engine says what it has no business to say: it registers again for nothing, asks for blocks that its
    cache does not have, cancels what is another's, answers what nobody asked."""
    decode, prefill = run.decode(numbers[0]), run.prefill(numbers[1])
    if decode is None or prefill is None:
        return False
    links = [link for link in run.world.network.links_of(prefill) if run.world.peer_of(prefill, link) is decode]
    if not links:
        return False
    waiting = [push.transfer_id for push in prefill.pushes if not push.is_over]
    transfer_id = waiting[numbers[2] % len(waiting)] if waiting else run.transfer(numbers[2])
    if numbers[5] % 2 == 0:  # just when a push waits for its handshake
        run.ambush.waiting.append(("sent MetadataRequest", partial(_register_for_nothing, run, prefill, decode)))
        return False  # counted when it strikes
    if transfer_id.startswith("b"):
        return False  # what belongs to the bystander is not taken from it in its name
    run.num_confused += 1
    epoch = 2**40 + run.num_confused
    message: wire.ToPrefill
    match numbers[3] % 5:
        case 0 | 1:
            message = wire.Register(transfer_id, epoch, (), 3000)
        case 2:
            want = wire.Want(DEFAULT_GROUP, 0, (10**6).to_bytes(4, "little"))
            message = wire.Register(transfer_id, epoch, (want,), 3000)
        case 3:
            others = [grant.written.epoch for grant in run.world.oracle.tracked() if grant.sink is not decode]
            # not one that this engine has still to use: a WRITE for it would come after what it was told
            foreign = next((n for n in others if n <= decode.last_epoch and decode.receive_of(n) is None), epoch)
            message = wire.Cancel(transfer_id, foreign, FailureCode.cancelled_by_caller, "not mine")
        case _:
            me = decode.identity
            message = metadata.build(numbers[4] % 9, me.incarnation, me.agent_name, decode.metadata, decode.geometry)
    prefill.link_event(LinkMessage(links[-1], wire.encode(message)))
    return True


def _register_for_nothing(run: Simulation, prefill: PrefillEngine, decode: DecodeEngine, _transfer_id: str) -> None:
    """For everything that was pushed and is open."""
    links = [link for link in run.world.network.links_of(prefill) if run.world.peer_of(prefill, link) is decode]
    for transfer_id in _open_ids(prefill) if links and prefill.is_running else []:
        run.count("confused_peer")
        run.world.struck("confused_peer", f"{decode.name} wants nothing of {transfer_id} any more")
        run.num_confused += 1
        message = wire.Register(transfer_id, 2**40 + run.num_confused, (), 3000)
        prefill.link_event(LinkMessage(links[-1], wire.encode(message)))


# --- links -----------------------------------------------------------------------------------------------------------


def messages_delayed(run: Simulation, numbers: Sequence[int]) -> bool:
    """A path is slow for a while."""
    one, other = run.target(numbers[0]).name, run.source(numbers[1]).name
    run.world.network.delay(one, other, (0.01, 0.1, 0.5, 1.0)[numbers[2] % 4])
    run.world.schedule(_span(numbers[3]), partial(run.world.network.delay, one, other, 0.0))
    return bool(run.world.network.num_links(one, other))


def messages_reordered(run: Simulation, numbers: Sequence[int]) -> bool:
    """A link breaks; what was under way on it comes after the next link's first messages, or not at all."""
    notices = (0.0002, 0.002, 0.02, 0.3)
    notice_s = notices[numbers[2] % 4], notices[numbers[3] % 4]
    one, other = run.target(numbers[0]).name, run.source(numbers[1]).name
    return bool(run.world.network.sever(one, other, arriving=numbers[4] % 4, notice_s=notice_s))


def link_cut(run: Simulation, numbers: Sequence[int]) -> bool:
    """A connection is reset: both sides are told at once."""
    return bool(run.world.network.cut(run.target(numbers[0]).name, run.source(numbers[1]).name))


def link_unnoticed(run: Simulation, numbers: Sequence[int]) -> bool:
    """A connection is gone, and one side or both do not notice for a while, if heartbeats do not tell them."""
    notices = (0.0002, 0.5, 3.0)
    notice_s = notices[numbers[2] % 3], notices[numbers[3] % 3]
    one, other = run.target(numbers[0]).name, run.source(numbers[1]).name
    return bool(run.world.network.sever(one, other, arriving=0, notice_s=notice_s))


def black_hole(run: Simulation, numbers: Sequence[int]) -> bool:
    """A path swallows everything for a while; then what waited in it arrives."""
    one, other = run.target(numbers[0]), run.source(numbers[1])
    run.world.black_hole(one, other)
    run.world.schedule(_span(numbers[2]), partial(run.world.mend, one, other))
    return True


def queue_full(run: Simulation, numbers: Sequence[int]) -> bool:
    """A link's send queue is full, which ends the link."""
    names = [run.target(numbers[0]).name, run.source(numbers[1]).name]
    sender, receiver = names if numbers[2] % 2 else names[::-1]
    return run.world.network.choke(sender, receiver)


# --- processes -------------------------------------------------------------------------------------------------------


def _victim(run: Simulation, numbers: Sequence[int]) -> Engine | None:
    """Mostly a decode engine: they come and go. Never prefill beside a bystander."""
    if numbers[2] % 4 == 0 and not run.scenario.setup.has_bystander:
        return run.prefill(numbers[1])
    return run.decode(numbers[0])


def _victims(run: Simulation, numbers: Sequence[int]) -> list[Engine]:
    """A process; sometimes all of its engine, as when a host or a launcher goes, and sometimes all but the first."""
    victim = _victim(run, numbers)
    if victim is None:
        return []
    ranks = [rank for rank in run.world.ranks_of(victim.engine_id) if rank.is_running]
    return [ranks, ranks[1:] or ranks, [victim], [victim], [victim]][numbers[4] % 5]


def frozen(run: Simulation, numbers: Sequence[int]) -> bool:
    """SIGSTOP, and SIGCONT after a while."""
    victims = _victims(run, numbers)
    for victim in victims:
        victim.freeze()
        run.world.schedule(_span(numbers[3]), partial(_thaw, victim, 0.0))
    return bool(victims)


def clock_paused(run: Simulation, numbers: Sequence[int]) -> bool:
    """The machine below is suspended: the process stands still, and its clock with it."""
    victim = _victim(run, numbers)
    if victim is None:
        return False
    span_s = _span(numbers[3])
    victim.freeze()
    run.world.schedule(span_s, partial(_thaw, victim, span_s))
    return True


def _thaw(victim: Engine, clock_stood_s: float) -> None:
    if victim.is_alive and victim.is_frozen:
        victim.thaw(clock_stood_s=clock_stood_s)


def killed(run: Simulation, numbers: Sequence[int]) -> bool:
    """SIGKILL. Another life begins after a while."""
    victims = _victims(run, numbers)
    for victim in victims:
        victim.kill()
        run.world.schedule(_span(numbers[3]), partial(run.restart, victim))
    return bool(victims)


def restarted(run: Simulation, numbers: Sequence[int]) -> bool:
    """SIGKILL, and another life at once with the same id and address, before anybody has noticed."""
    victims = _victims(run, numbers)
    for victim in victims:
        victim.kill()
        run.restart(victim)
    return bool(victims)


def vanished(run: Simulation, numbers: Sequence[int]) -> bool:
    """The host is gone and nobody is told. It comes back after a while."""
    victim = _victim(run, numbers)
    if victim is None:
        return False
    peers = run.peers_of(victim)
    for peer in peers:
        run.world.black_hole(victim, peer)
    victim.kill()

    def come_back() -> None:
        for peer in peers:
            run.world.mend(victim, peer)
        run.restart(victim)

    run.world.schedule(_span(numbers[3]), come_back)
    return True


def address_taken(run: Simulation, numbers: Sequence[int]) -> bool:
    """Prefill dies, and another prefill engine gets its address for a while."""
    victim = run.prefill(numbers[1])
    if victim is None:
        return False
    victim.kill()
    held = victim.held
    stranger = run.world.prefill(
        "px", config=victim.config, address=victim.address, share=held.share, layers=held.layers
    )

    def come_back() -> None:
        if stranger.is_alive:
            stranger.kill()
        run.restart(victim)

    run.strangers.append(come_back)
    run.world.schedule(_span(numbers[3]), come_back)
    return True


# --- WRITEs ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ArmedWrite:
    """Waits for the next WRITE to a process."""

    fault: str
    target: str
    act: Callable[[FakeWrite], None]


def _arm_write(run: Simulation, fault: str, numbers: Sequence[int], act: Callable[[FakeWrite], None]) -> bool:
    run.armed_writes.append(ArmedWrite(fault, run.target(numbers[0]).name, act))
    run.world.write_fate = run.write_fate
    return False  # counted when it strikes


def write_stalled(run: Simulation, numbers: Sequence[int]) -> bool:
    """A WRITE takes long; its handle is still asked about when it ends."""
    return _arm_write(run, "write_stalled", numbers, partial(_stall, run, STALLS_S[numbers[2] % len(STALLS_S)]))


def write_late(run: Simulation, numbers: Sequence[int]) -> bool:
    """A WRITE lands when its handle has been released and its source belongs to somebody else."""
    return _arm_write(run, "write_late", numbers, partial(_stall, run, LATE_S[numbers[2] % len(LATE_S)]))


def _stall(run: Simulation, span_s: float, write: FakeWrite) -> None:
    run.world.fabric.stall(write)

    def go_on() -> None:
        run.world.fabric.resume(write)
        run.world.finish(write)

    run.world.schedule(span_s, go_on)


def write_failed(run: Simulation, numbers: Sequence[int]) -> bool:
    """A WRITE ends in an error, perhaps after some of it has landed, and perhaps with its connection."""

    def fail(write: FakeWrite) -> None:
        if write.state is WriteState.in_flight and write.error is None and not write.is_abandoned:
            landed = min(numbers[3] % 3, len(write.lengths_bytes))
            if numbers[4] % 2 and not run.world.fabric.can_complete(write):
                landed = 0
            run.world.fail_write(write, disconnected=bool(numbers[2] % 2), landed_segments=landed)

    def act(write: FakeWrite) -> None:
        run.world.schedule((0.0002, 0.001, 0.1)[numbers[5] % 3], partial(fail, write))

    return _arm_write(run, "write_failed", numbers, act)


def write_doubtful(run: Simulation, numbers: Sequence[int]) -> bool:
    """A WRITE is reported as failed, and lands all the same, soon or late."""
    lands_after_s = (0.0005, 0.05, 1.0, 5.0)[numbers[2] % 4]
    return _arm_write(run, "write_doubtful", numbers, lambda write: run.world.doubt_write(write, lands_after_s))


def nixl_refuses(run: Simulation, numbers: Sequence[int]) -> bool:
    """The transport takes neither the next remote nor the next WRITE."""
    prefill = run.prefill(numbers[1])
    if prefill is None:
        return False
    operation = (Operation.add_remote, Operation.post_write)[numbers[2] % 2]
    is_lost = operation is Operation.post_write and bool(numbers[3] % 2)
    code = FailureCode.handshake_failed if operation is Operation.add_remote else FailureCode.write_failed
    error = TransportError(FailureCode.peer_lost if is_lost else code, f"{operation} refused", disconnected=is_lost)
    run.world.fabric.fail_next(prefill.agent_name, operation, error)
    return True


# --- callers at the worst moment -------------------------------------------------------------------------------------

MOMENTS = (
    "posted",
    "posted",
    "posted",
    "landed",
    "ended",
    "emitted",
    "handled Register",
    "handled Metadata",
    "handled Welcome",
    "handled Failed",
    "sent Failed",
    "sent Drained",
    "sent Cancel",
    "sent MetadataRequest",
)


# Mostly in the middle of a handshake: when the engine wakes, the answer comes before the timers that have run out.
FREEZING_MOMENTS = (*["sent MetadataRequest"] * 4, "handled Register", "posted", "landed", "sent Failed")


class Ambush(Observer):
    """Waits for a moment of some transfer, and strikes right then."""

    def __init__(self, run: Simulation) -> None:
        self._run = run
        self.waiting: list[tuple[str, Callable[[str], None]]] = []  # moment, what to do to the transfer

    def posted(self, engine: PrefillEngine, write: FakeWrite, grant: Grant) -> None:
        self._come("posted", grant.push.transfer_id)

    def landed(self, write: FakeWrite, grant: Grant) -> None:
        self._come("landed", grant.push.transfer_id)

    def write_ended(self, engine: PrefillEngine, grant: Grant, failure: Failure | None) -> None:
        self._come("ended", grant.push.transfer_id)

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        self._come("emitted", account.transfer_id)

    def handled(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        self._see("handled", message)

    def sent(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        self._see("sent", message)

    def _see(self, verb: str, message: wire.Message) -> None:
        if self.waiting:
            self._come(f"{verb} {type(message).__name__}", getattr(message, "transfer_id", ""))

    def _come(self, moment: str, transfer_id: str) -> None:
        for waiting in self.waiting:
            if waiting[0] == moment:
                self.waiting.remove(waiting)
                self._run.world.schedule(0.0, partial(waiting[1], transfer_id))
                return


def _open_ids(engine: Engine) -> list[str]:
    """What is open here, but for what belongs to the bystander."""
    accounts: Sequence[Push | Receive] = ()
    if isinstance(engine, PrefillEngine):
        accounts = engine.pushes
    elif isinstance(engine, DecodeEngine):
        accounts = engine.receives
    return [a.transfer_id for a in accounts if not a.is_over and not a.transfer_id.startswith("b")]


def cancel_at_worst(run: Simulation, numbers: Sequence[int]) -> bool:
    """A caller cancels just when something else happens."""
    who = numbers[1] % 3  # prefill, decode, both

    def strike(transfer_id: str) -> None:
        run.count("cancel_at_worst")
        run.world.struck("cancel_at_worst", transfer_id or "everything that is open")
        for engine in list(run.world.running()):
            side = 0 if isinstance(engine, PrefillEngine) else 1
            if numbers[2] % 2 and engine.rank[1] != numbers[3] % engine.held.share.tp_size:
                continue  # some ranks are told, and the others are not
            if who in (side, 2):
                for named in _open_ids(engine):
                    if named == transfer_id or not transfer_id:
                        engine.cancel(named)

    run.ambush.waiting.append((MOMENTS[numbers[0] % len(MOMENTS)], strike))
    return False  # counted when it strikes


def frozen_at_worst(run: Simulation, numbers: Sequence[int]) -> bool:
    """An engine freezes just when something else happens, and wakes up with everything overdue at once."""

    def strike(transfer_id: str) -> None:
        victim: Engine | None = run.decode(numbers[1])
        if numbers[2] % 4 and not run.scenario.setup.has_bystander:
            victim = run.prefill(numbers[3])
        if victim is not None:
            run.count("frozen_at_worst")
            run.world.struck("frozen_at_worst", victim.name)
            victim.freeze()
            run.world.schedule((0.9, 3.0, 3.0, 6.0)[numbers[4] % 4], partial(_thaw, victim, 0.0))

    run.ambush.waiting.append((FREEZING_MOMENTS[numbers[0] % len(FREEZING_MOMENTS)], strike))
    return False  # counted when it strikes


RESTARTING_MOMENTS = (
    "handled Register",
    "handled Register",
    "sent MetadataRequest",
    "handled Metadata",
    "posted",
    "landed",
)


def rank_restarted(run: Simulation, numbers: Sequence[int]) -> bool:
    """One rank of an engine is killed just when something happens to a transfer of its, starts again at once, and is
    asked again for what its predecessor was asked for: to the rest of its engine nothing has happened."""

    def strike(transfer_id: str) -> None:
        ranks: list[DecodeEngine | PrefillEngine] = []
        if numbers[1] % 3 or run.scenario.setup.has_bystander:
            ranks += [rank for engine_id in run.target_ids for rank in run.decode_engine(engine_id)]
        else:
            ranks += run.prefills
        victims = [rank for rank in ranks if rank.is_serving and _open_ids(rank)]
        if victims:
            victim = victims[numbers[2] % len(victims)]
            run.count("rank_restarted")
            run.world.struck("rank_restarted", victim.name)
            victim.kill()
            run.restart(victim)
            _ask_again(run, victim)

    run.ambush.waiting.append((RESTARTING_MOMENTS[numbers[0] % len(RESTARTING_MOMENTS)], strike))
    return False  # counted when it strikes


def _ask_again(run: Simulation, dead: DecodeEngine | PrefillEngine) -> None:
    """The successor gets what was open."""
    if isinstance(dead, DecodeEngine):
        (reader,) = [rank for rank in run.decode_engine(dead.engine_id) if rank.rank == dead.rank]
        for receive in dead.receives:
            blocks = reader.free_blocks()[: len(receive.block_ids)]
            if not receive.is_over and len(blocks) == len(receive.block_ids):
                source = run.prefill_engine(receive.source.engine_id)[0]
                reader.expect(receive.transfer_id, blocks, source, first_block=min(receive.block_ids, default=0))
    else:
        (writer,) = [rank for rank in run.prefill_engine(dead.engine_id) if rank.rank == dead.rank]
        for push in dead.pushes:
            if not push.is_over:
                writer.push(push.transfer_id, writer.free_blocks()[: len(push.block_ids)])


def spread_anew(run: Simulation, numbers: Sequence[int]) -> bool:
    """An engine leaves, in order or not, and comes back under its id spread over more or fewer ranks."""
    is_prefill = numbers[2] % 4 == 0 and not run.scenario.setup.has_bystander
    ranks: Sequence[Engine] = run.source_ranks(numbers[1]) if is_prefill else run.target_ranks(numbers[0])
    return run.spread_anew(ranks[0].engine_id, numbers[4], in_order=bool(numbers[3] % 2))


def _span(number: int) -> float:
    return SPANS_S[number % len(SPANS_S)]


FAULTS = [
    Action("message_lost", 2, True, message_lost),
    Action("message_duplicated", 2, True, message_duplicated),
    Action("messages_delayed", 2, True, messages_delayed),
    Action("messages_reordered", 3, True, messages_reordered),
    Action("link_cut", 2, True, link_cut),
    Action("link_unnoticed", 2, True, link_unnoticed),
    Action("black_hole", 2, True, black_hole),
    Action("queue_full", 1, True, queue_full),
    Action("garbage", 1, True, garbage),
    Action("confused_peer", 2, True, confused_peer),
    Action("handshake_late", 2, True, handshake_late),
    Action("handshake_by_another", 1, True, handshake_by_another),
    Action("metadata_damaged", 1, True, metadata_damaged),
    Action("address_taken", 0.5, True, address_taken, spares_bystander=False),
    Action("frozen", 2, True, frozen),
    Action("clock_paused", 1, True, clock_paused),
    Action("killed", 1, True, killed),
    Action("restarted", 2, True, restarted),
    Action("vanished", 1, True, vanished),
    Action("write_stalled", 3, True, write_stalled),
    Action("write_late", 2, True, write_late),
    Action("write_failed", 3, True, write_failed),
    Action("write_doubtful", 2, True, write_doubtful),
    Action("nixl_refuses", 1, True, nixl_refuses, spares_bystander=False),
    Action("cancel_at_worst", 4, True, cancel_at_worst),
    Action("frozen_at_worst", 3, True, frozen_at_worst),
    # drawn only where there are ranks
    Action("rank_restarted", 0, True, rank_restarted),
    Action("spread_anew", 0, True, spread_anew),
]
