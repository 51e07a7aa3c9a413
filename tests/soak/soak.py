"""``make soak``: one prefill and four decode processes under everything at once, from a seed.

Random sizes, chunks, prefix hits and orders; cancels on both sides; pushes and registrations that never find each
other; decode engines that are killed, frozen, dropped or leave, and come back at once; a prefill engine that freezes.
At the end every transfer must have exactly one outcome on each side that still lives, the two must agree, every byte of
a done receive and every canary must be right, and nothing may be left of it all.

    SOAK_S=900 SEED=1 python tests/soak/soak.py
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import soak_engines  # noqa: E402  # finds peers

import peers  # noqa: E402  # isort: skip

NUM_DECODES = 4
MAX_OPEN = 48
TURN_S = 0.004
END_S = 90.0  # for everything that is open when the time is over
LIVENESS_S = 1.5
CALM_S = 4.0  # after a fault, before an undisturbed transfer must be done on both sides
SHAPE = peers.Shape(blocks=768, heads=4, tokens=16, head_size=64)  # 16 KiB a block and layer
SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 0.3,
    "liveness_timeout_s": LIVENESS_S,
    "stall_timeout_s": 1.0,
    "handshake_timeout_s": 1.0,
    "handshake_backoff_max_s": 0.5,
    "lease_s": 8.0,
    "hold_policy": "keep",  # so that every release must be a proven one
    "max_tombstones": 2048,  # soon full: memory that grows after that is a leak
}
# how one side may have ended when the other is done: it had decided so before it knew
DECISIONS = {
    "already_served",
    "cancelled_by_caller",
    "closing",
    "deadline",
    "engine_dropped",
    "lease_expired",
    "peer_lost",
    "peer_restarted",
    "superseded",
    "write_failed",
    "write_stalled",
}
FAULTS = {"kill": 4, "freeze": 5, "leave": 2, "freeze prefill": 2, "drop on prefill": 1, "drop on decode": 1}


@dataclass
class Transfer:
    transfer_id: str
    engine: int
    life: int
    steps: list[tuple[str, Callable[[], bool]]]  # (side, what to do); in order within a side, mixed between them
    is_whole: bool  # both halves are there, and nobody cancels
    opened_s: float
    is_pushed: bool = False
    is_expected: bool = False
    prefill_end: soak_engines.Ended | None = None
    decode_end: soak_engines.Ended | None = None
    is_disturbed: bool = False
    is_decode_gone: bool = False  # killed, or left, before it said how this ended


@dataclass
class Member:
    """One process, and whether it can be talked to."""

    name: str
    peer: peers.Peer
    life: int = 0
    thaw_s: float | None = None
    is_starting: bool = True
    calm_from_s: float = 0.0

    def answers(self) -> bool:
        if self.is_starting and self.peer._pipe.poll():
            self.peer.wait_until_up()
            self.is_starting = False
        return not self.is_starting and self.thaw_s is None


@dataclass
class Figures:
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    undisturbed: int = 0


class Soak:
    def __init__(self, seed: int, duration_s: float, ucx_options: str) -> None:
        self.random = random.Random(seed)
        self.seed, self.duration_s = seed, duration_s
        self.settings = SETTINGS | {"ucx_options": ucx_options}
        self.problems: list[str] = []
        self.figures = Figures()
        self.transfers: dict[str, Transfer] = {}
        self.open: dict[str, Transfer] = {}
        self.prefill = Member("p0", self._start_prefill())
        self.prefill.peer.wait_until_up()
        self.prefill.is_starting = False
        self.source: tuple[str, int] = self.prefill.peer.call("address")
        self.decodes: list[Member] = []
        self.base = peers.Resources(0, 0, 0.0)
        self.next_fault_s = 0.0

    # --- processes ---------------------------------------------------------------------------------------------------

    def _start_prefill(self) -> peers.Peer:
        return peers.Peer(
            soak_engines.SoakPrefill,
            engine_id="p0",
            shape=SHAPE,
            listen="127.0.0.1:0",
            settings=self.settings,
            seed=f"{self.seed}/p0",
        )

    def _start_decode(self, number: int, life: int) -> peers.Peer:
        return peers.Peer(
            soak_engines.SoakDecode,
            engine_id=f"d{number}",
            shape=SHAPE,
            settings=self.settings,
            seed=f"{self.seed}/d{number}/{life}",
        )

    def members(self) -> list[Member]:
        return [self.prefill, *self.decodes]

    def warm_up(self) -> None:
        """Four engines come, are pushed to and leave; what prefill has then is its base line."""
        for number in range(NUM_DECODES):
            with self._start_decode(number, -1) as decode:
                transfer_id = f"warm-{number}"
                assert decode.call("expect_some", transfer_id, 0, 64, self.source, 30.0)
                assert self.prefill.peer.call("push_chunk", transfer_id, 0, 64, last=True)
                for peer in (self.prefill.peer, decode):
                    (end,) = peers.until(lambda peer=peer: peer.call("harvest")[0])
                    assert end.outcome == "done", end
                decode.leave()
        self._until_all_evicted()
        self.base = self.prefill.peer.call("resources")

    def _until_all_evicted(self) -> None:
        def are_evicted() -> bool:
            return all(engine.state == "evicted" for engine in self.prefill.peer.call("engines"))

        peers.until(are_evicted, what="prefill has let every engine go")

    # --- transfers ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Plan a transfer with one of the engines: what is asked for when, and by whom."""
        chance, number = self.random, self.random.randrange(NUM_DECODES)
        member = self.decodes[number]
        transfer_id = f"t{len(self.transfers)}"
        total = chance.choice((1, 2, 4, 8, 16, 16, 32, 128))
        hit = chance.randrange(total) if chance.random() < 0.2 else 0
        wanted = chance.randint(1, total - hit) if chance.random() < 0.1 else total - hit
        deadline_s = chance.uniform(4.0, 12.0)
        cuts = sorted(chance.sample(range(1, total), min(chance.choice((0, 0, 0, 1, 3)), total - 1)))
        bounds = list(zip([0, *cuts], [*cuts, total], strict=True))
        if chance.random() < 0.3:
            chance.shuffle(bounds)
        last = bounds[-1]
        pushes = [
            ("prefill", lambda b=bound: self._push(transfer_id, b[0], b[1] - b[0], last=b == last)) for bound in bounds
        ]
        expects = [("decode", lambda: self._expect(transfer_id, hit, wanted, deadline_s))]
        is_whole = True
        kind = chance.random()
        if kind < 0.04:
            pushes, is_whole = [], False
        elif kind < 0.08:
            expects, is_whole = [], False
        elif kind < 0.16:
            pushes.insert(chance.randint(0, len(pushes)), ("prefill", lambda: self._cancel("prefill", transfer_id)))
            is_whole = False
        elif kind < 0.24:
            expects.append(("decode", lambda: self._cancel("decode", transfer_id)))
            is_whole = False
        steps = self._mixed(pushes, expects)
        transfer = Transfer(transfer_id, number, member.life, steps, is_whole, time.monotonic())
        self.transfers[transfer_id] = self.open[transfer_id] = transfer

    def _mixed(self, *lists: list[Any]) -> list[Any]:
        left = [list(steps) for steps in lists if steps]
        mixed = []
        while left:
            steps = self.random.choice(left)
            mixed.append(steps.pop(0))
            left = [steps for steps in left if steps]
        return mixed

    def _push(self, transfer_id: str, first_block: int, count: int, *, last: bool) -> bool:
        transfer = self.transfers[transfer_id]
        if transfer.prefill_end is not None:
            return True  # it is over: a chunk would begin another push
        if not self.prefill.peer.call("push_chunk", transfer_id, first_block, count, last=last):
            return False
        transfer.is_pushed = True
        return True

    def _expect(self, transfer_id: str, first_block: int, count: int, deadline_s: float) -> bool:
        transfer = self.transfers[transfer_id]
        peer = self.decodes[transfer.engine].peer
        if not peer.call("expect_some", transfer_id, first_block, count, self.source, deadline_s):
            return False
        transfer.is_expected = True
        return True

    def _cancel(self, side: str, transfer_id: str) -> bool:
        transfer = self.transfers[transfer_id]
        (self.prefill if side == "prefill" else self.decodes[transfer.engine]).peer.call("cancel", transfer_id)
        return True

    def _advance(self, transfer: Transfer) -> None:
        """Take the next step, if whoever takes it answers."""
        if not transfer.steps:
            return
        side, step = transfer.steps[0]
        member = self.prefill if side == "prefill" else self.decodes[transfer.engine]
        is_moot = side == "decode" and transfer.is_decode_gone
        if is_moot or (member.answers() and step()):
            transfer.steps.pop(0)
        else:  # nobody answers, or blocks of transfers that a fault holds up leave no room
            transfer.is_disturbed = True

    def _harvest(self) -> None:
        for member in self.members():
            if not member.answers():
                continue
            ended, broken = member.peer.call("harvest")
            self.problems += [f"{member.name}: {what}" for what in broken]
            for end in ended:
                if end.outcome:
                    self._ended(member, end)

    def _ended(self, member: Member, end: soak_engines.Ended) -> None:
        transfer = self.transfers[end.transfer_id]
        field_name = "prefill_end" if member is self.prefill else "decode_end"
        if getattr(transfer, field_name) is not None:
            self.problems.append(f"{member.name}: {end} is a second end, after {getattr(transfer, field_name)}")
        setattr(transfer, field_name, end)
        self.figures.num_bytes += end.num_bytes
        self._close_when_over(transfer)

    def _close_when_over(self, transfer: Transfer) -> None:
        if self._is_over(transfer):
            del self.open[transfer.transfer_id]
            self._judge(transfer)

    def _is_over(self, transfer: Transfer) -> bool:
        if transfer.transfer_id not in self.open or transfer.steps:
            return False
        is_over_on_prefill = transfer.prefill_end is not None or not transfer.is_pushed
        is_over_on_decode = transfer.decode_end is not None or not transfer.is_expected or transfer.is_decode_gone
        return is_over_on_prefill and is_over_on_decode

    def _judge(self, transfer: Transfer) -> None:
        """The two sides agree, and what nothing disturbed is done."""
        sent, got = transfer.prefill_end, transfer.decode_end
        names = [end.outcome if end else "-" for end in (sent, got)]
        self.figures.ends[" / ".join(names)] += 1
        for side, end in (("prefill", sent), ("decode", got)):
            if end is not None and end.code:
                self.figures.codes[f"{side}: {end.code}"] += 1
        if sent and got and sent.outcome != got.outcome:
            for one, other in ((sent, got), (got, sent)):
                if one.outcome == "done" and other.code not in DECISIONS:
                    self.problems.append(f"the two sides disagree: {sent} on prefill, {got} on decode")
        calm_s = max(self.prefill.calm_from_s, self.decodes[transfer.engine].calm_from_s)
        if transfer.is_whole and not transfer.is_disturbed and transfer.opened_s >= calm_s:
            self.figures.undisturbed += 1
            if names != ["done", "done"]:
                self.problems.append(f"nothing disturbed it, and yet: {sent} on prefill, {got} on decode")

    # --- faults ------------------------------------------------------------------------------------------------------

    def _disturb(self, member: Member, for_s: float = 0.0) -> None:
        member.calm_from_s = time.monotonic() + for_s + CALM_S
        for transfer in self.open.values():
            if member is self.prefill or self.decodes[transfer.engine] is member:
                transfer.is_disturbed = True

    def _fault(self) -> None:
        kind = self.random.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
        number = self.random.randrange(NUM_DECODES)
        member = self.prefill if kind == "freeze prefill" else self.decodes[number]
        if member.is_starting or (member.thaw_s is not None and kind != "kill") or not self.prefill.answers():
            return
        self.figures.faults[kind] += 1
        match kind:
            case "freeze" | "freeze prefill":
                frozen_s = self.random.choice((0.05, 0.3, 1.0, 4.0 if kind == "freeze" else 2.5))
                member.peer.freeze()
                member.thaw_s = time.monotonic() + frozen_s
                self._disturb(member, frozen_s)
            case "kill":
                member.peer.kill()
                self._replace(number)
            case "leave":
                self._harvest()
                member.peer.leave()
                self._replace(number)
            case "drop on prefill":
                self._disturb(member)
                self.prefill.peer.call("drop_engine", member.name)
            case "drop on decode":
                self._disturb(member)
                member.peer.call("drop_engine", "p0")

    def _replace(self, number: int) -> None:
        """The next life begins at once; what the last one knew went with it."""
        member = self.decodes[number]
        self._disturb(member)
        member.peer.close()
        for transfer in list(self.open.values()):
            if transfer.engine == number:
                transfer.is_decode_gone = True
                self._close_when_over(transfer)
        member.life += 1
        member.peer = self._start_decode(number, member.life)
        member.thaw_s, member.is_starting = None, True

    def _thaw_the_due(self, *, all_of_them: bool = False) -> None:
        for member in self.members():
            if member.thaw_s is not None and (all_of_them or time.monotonic() >= member.thaw_s):
                member.peer.thaw()
                member.thaw_s = None

    # --- the run -----------------------------------------------------------------------------------------------------

    def _turn(self, *, is_ending: bool) -> None:
        self._thaw_the_due(all_of_them=is_ending)
        if not is_ending:
            while len(self.open) < MAX_OPEN and self.random.random() < 0.5:
                self._begin()
            if time.monotonic() >= self.next_fault_s:
                self._fault()
                self.next_fault_s = time.monotonic() + self.random.expovariate(1 / 1.5)
        for transfer in self.random.sample(list(self.open.values()), len(self.open)):
            if is_ending or self.random.random() < 0.3:
                self._advance(transfer)
                self._close_when_over(transfer)
        self._harvest()

    def run(self) -> None:
        start_s = time.monotonic()
        self.decodes = [Member(f"d{number}", self._start_decode(number, 0)) for number in range(NUM_DECODES)]
        for member in self.decodes:
            member.calm_from_s = start_s + CALM_S
        next_report_s, num_shown = start_s + 60.0, 0
        while time.monotonic() - start_s < self.duration_s:
            turn_s = time.monotonic()
            self._turn(is_ending=False)
            peers.until(lambda: time.monotonic() >= turn_s + TURN_S)  # noqa: B023  # leave the others some CPU
            for problem in self.problems[num_shown:]:
                print(f"{time.monotonic() - start_s:6.1f} s: problem: {problem}", flush=True)
            num_shown = len(self.problems)
            if time.monotonic() >= next_report_s:
                next_report_s += 60.0
                print(f"{time.monotonic() - start_s:6.0f} s: {self._progress()}", flush=True)
            if not all(member.peer._process.is_alive() for member in self.members()):
                raise AssertionError("an engine ended that nobody had ended")
        end_s = time.monotonic()
        while self.open and time.monotonic() - end_s < END_S:
            self._turn(is_ending=True)
        self.problems += [f"never came to its end: {transfer}" for transfer in list(self.open.values())[:5]]
        self._check_rest()

    def _progress(self) -> str:
        return (
            f"{len(self.transfers)} transfers, {len(self.open)} open, {self.figures.num_bytes >> 20} MiB, "
            f"{sum(self.figures.faults.values())} faults, {len(self.problems)} problems"
        )

    def _check_rest(self) -> None:
        """Nothing is held, every block is back, every engine leaves, and prefill is what it was."""

        def is_at_rest(member: Member) -> bool:
            self._harvest()
            return member.answers() and not member.peer.call("num_in_use")

        for member in self.members():
            try:
                peers.until(lambda: is_at_rest(member), 30.0)  # noqa: B023
            except AssertionError:
                self.problems.append(f"{member.name}: {member.peer.call('num_in_use')} transfers still hold blocks")
            self.problems += [f"{member.name}: {what}" for what in member.peer.call("final_check")]
            if not member.peer.call("is_healthy"):
                self.problems.append(f"{member.name} is not healthy")
            if member.peer.call("stats")["internal_errors"]:
                self.problems.append(f"{member.name}: internal errors")
        for member in self.decodes:
            if member.peer.leave():
                self.problems.append(f"{member.name}: exit code {member.peer.join()}")
        self._until_all_evicted()
        self._check_prefill()

    def _check_prefill(self) -> None:
        stats = self.prefill.peer.call("stats")
        allowed = {"tombstones", "timers"}
        gauges = ("links", "pushes_open", "pushes_held", "registrations_waiting", "pushes_behind_handshakes")
        gauges += ("pushes_in_lines", "writes_in_flight", "bytes_in_flight", "writes_doubtful")
        self.problems += [f"p0: {name}={stats[name]}" for name in gauges if stats[name] and name not in allowed]
        end: peers.Resources = self.prefill.peer.call("resources")
        self.end = end
        if end.descriptors > self.base.descriptors + 2 or end.threads > self.base.threads:
            self.problems.append(f"p0 leaks: {self.base} before, {end} after")
        if end.rss_mib > self.base.rss_mib * 1.1 + 16:
            self.problems.append(f"p0 grew: {self.base} before, {end} after")

    def summary(self) -> str:
        figures = self.figures
        lines = [
            f"seed             {self.seed}, {self.duration_s:g} s, UCX {self.settings['ucx_options'] or 'default'}",
            f"transfers        {len(self.transfers)}, {figures.num_bytes >> 20} MiB confirmed; "
            f"{figures.undisturbed} that nothing disturbed",
            f"faults           {_listed(figures.faults)}",
            f"prefill / decode {_listed(figures.ends)}",
            f"codes            {_listed(figures.codes)}",
            f"p0 before        {self.base}",
            f"p0 after         {getattr(self, 'end', None)}",
        ]
        lines += [f"problem          {problem}" for problem in self.problems[:20]]
        verdict = f"FAILED, {len(self.problems)} problems" if self.problems else "OK"
        return "\n".join([*lines, f"kvpush soak: {verdict}"])

    def close(self) -> None:
        for member in self.members():
            member.peer.close()


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S") or 900))
    some_seed = random.SystemRandom().randrange(2**32)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED") or some_seed))
    parser.add_argument("--ucx-options", default="TLS=tcp", help="empty: UCX's own choice, shared memory on one host")
    options = parser.parse_args()
    print(f"kvpush soak: SEED={options.seed} SOAK_S={options.seconds:g}", flush=True)
    soak = Soak(options.seed, options.seconds, options.ucx_options)
    try:
        soak.warm_up()
        soak.run()
    except AssertionError as exc:
        soak.problems.append(f"{type(exc).__name__}: {exc}")
    finally:
        soak.close()
    print(soak.summary(), flush=True)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
