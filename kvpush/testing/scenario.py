"""What one seed means: who is there, how they are set, and a list of steps. Pure data, drawn before anything runs.

A step is a name with a few small numbers, which the action of that name (:mod:`kvpush.testing.callers`,
:mod:`kvpush.testing.faults`) takes modulo what there is. So every list of steps makes sense, also one that some of them
were dropped from: that is what makes a run shrink.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpush.config import Config, HoldPolicy
from kvpush.testing.slices import Model, Spread

if TYPE_CHECKING:
    from kvpush.testing.simulation import Simulation

# Short enough that every one of them passes within a few steps.
CONFIG = Config(
    handshake_timeout_s=0.7,
    handshake_attempts=8,
    handshake_backoff_min_s=0.1,
    handshake_backoff_max_s=0.4,
    heartbeat_interval_s=0.5,
    liveness_timeout_s=1.6,
    engine_ttl_s=4,
    evict_grace_s=3,
    stall_timeout_s=1.5,
    hold_timeout_s=4,
    lease_s=3,
    receive_deadline_s=6,
    close_timeout_s=1,
    max_in_flight_bytes=4 * 128,
    max_write_bytes=2 * 128,
    max_deferred_per_engine=6,
    max_tombstones=256,
    tombstone_ttl_s=20,
)

DELAYS_S = (0.0, 0.0, 0.0002, 0.001, 0.002, 0.01, 0.1, 0.5, 1.7, 4.2)
MAX_NUMBER = 1 << 16

RANKS_RATE = 1 / 3  # of seeds in which engines have several ranks
MAX_PAIRS = 12  # of processes that talk to each other in these
MAX_STEPS_WITH_RANKS = 30


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens, and how long the world runs on after it."""

    action: str
    numbers: tuple[int, ...]
    delay_s: float

    def __str__(self) -> str:
        return f"{self.action}{self.numbers} +{self.delay_s:g} s"


@dataclass(frozen=True, slots=True)
class Action:
    """``perform`` is given the simulation and the numbers; a fault says by ``True`` that it struck. ``weight``: how
    often it is drawn, relative to the others of its sort; 0: for engines of several ranks only."""

    name: str
    weight: float
    is_fault: bool
    perform: Callable[[Simulation, Sequence[int]], bool]
    spares_bystander: bool = True  # whether a pair that has no part in it must not notice it


NUMBERS = 6  # of one step


@dataclass(frozen=True, slots=True)
class Setup:
    """Who is there, and how they are set."""

    num_prefill: int
    num_decode: int
    config: Config
    has_bystander: bool  # the last decode engine is spared by every fault, and must not notice any
    num_transfers: int  # ids in use, so few that uses of one collide
    clock_offsets_s: tuple[float, ...]
    write_latency_s: tuple[float, float]
    shape: Model = Model()  # what all of them hold
    spreads: tuple[Spread, ...] = ()  # of prefill engines, then of decode engines; none: every engine is one process

    @property
    def has_ranks(self) -> bool:
        """Whether any engine is more than one process."""
        return any(spread.num_ranks > 1 for spread in self.spreads)

    def spread(self, number: int) -> Spread:
        """Of one engine, prefill's first."""
        return self.spreads[number] if self.spreads else Spread()

    def __str__(self) -> str:
        changed = [
            f"{item.name}={getattr(self.config, item.name)}"
            for item in dataclasses.fields(self.config)
            if getattr(self.config, item.name) != getattr(CONFIG, item.name)
        ]
        bystander = ", the last of them a bystander" if self.has_bystander else ""
        low_s, high_s = self.write_latency_s
        engines = f"{self.num_prefill} prefill, {self.num_decode} decode{bystander}"
        if self.has_ranks:
            engines += f" ({', '.join(map(str, self.spreads))}; {self.shape.num_heads} heads)"
        return f"{engines}; WRITEs take {low_s:g} to {high_s:g} s; {', '.join(changed) or 'usual settings'}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seed, spelled out."""

    seed: int
    setup: Setup
    steps: tuple[Step, ...] = field(repr=False)


def draw(seed: int, actions: Mapping[str, Action]) -> Scenario:
    """What this seed means. Depends on nothing but the seed and the actions there are."""
    rng = random.Random(f"kvpush scenario {seed}")
    setup = _drawn_setup(rng)
    names = [action.name for action in actions.values() if action.is_fault and action.weight]
    # not every fault in every run: some bugs show only where others do not interfere
    likely = {name for name in names if rng.random() < 0.6}
    fault_rate = rng.choice([0.05, 0.2, 0.4, 0.6])
    steps = []
    for _ in range(rng.randint(12, 48)):
        wants_fault = rng.random() < fault_rate
        choice = [
            action
            for action in actions.values()
            if action.is_fault is wants_fault
            and (not wants_fault or action.name in likely)
            and (action.spares_bystander or not setup.has_bystander)
        ]
        if not choice:
            continue
        (action,) = rng.choices(choice, [action.weight for action in choice])
        numbers = tuple(rng.randrange(MAX_NUMBER) for _ in range(NUMBERS))
        steps.append(Step(action.name, numbers, rng.choice(DELAYS_S)))
    return _spread_out(Scenario(seed, setup, tuple(steps)), random.Random(f"kvpush ranks {seed}"))


def _spread_out(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same in a third of all seeds, with engines of several ranks. These numbers come from a stream of their own:
    the other seeds mean what they would mean without."""
    if rng.random() >= RANKS_RATE:
        return scenario
    setup = scenario.setup
    num_heads, tp_sizes = rng.choice([(6, (1, 2, 3)), (6, (1, 2, 3)), (2, (1, 2, 4)), (1, (1, 2, 3))])
    shape = Model(rng.choice([2, 3]), num_heads)
    spreads: list[Spread] = []
    while not any(spread.num_ranks > 1 for spread in spreads):
        spreads = _drawn_spreads(setup, shape, tp_sizes, rng)
    most = max(spread.num_ranks for spread in spreads)
    config = dataclasses.replace(
        setup.config,
        max_engines=setup.config.max_engines * most,  # records of ranks: one transfer needs those of a whole engine
        max_write_bytes=setup.config.max_write_bytes * rng.choice([1, 2]),
    )
    setup = dataclasses.replace(setup, config=config, shape=shape, spreads=tuple(spreads))
    steps = [_for_ranks(step, rng) for step in scenario.steps[:MAX_STEPS_WITH_RANKS]]
    return dataclasses.replace(scenario, setup=setup, steps=tuple(steps))


def _for_ranks(step: Step, rng: random.Random) -> Step:
    """Now and then, what can happen only to engines of several ranks takes the place of a step."""
    (action,) = rng.choices([step.action, "rank_restarted", "spread_anew"], [0.86, 0.12, 0.02])
    return dataclasses.replace(step, action=action)


def _drawn_spreads(setup: Setup, shape: Model, tp_sizes: Sequence[int], rng: random.Random) -> list[Spread]:
    spreads: list[Spread] = []
    for _ in range(setup.num_prefill + setup.num_decode):
        pp_size = rng.choice([1, 1, 2])
        first = rng.randint(1, shape.num_layers - 1)
        stages = (first, shape.num_layers - first) if pp_size == 2 else ()
        spreads.append(Spread(pp_size, rng.choice(tp_sizes), stages))
    while _num_pairs(setup, spreads) > MAX_PAIRS:  # every pair has its heartbeats, which take time to play
        largest = max(range(len(spreads)), key=lambda i: spreads[i].num_ranks)
        spreads[largest] = Spread() if spreads[largest].pp_size == 1 else Spread(1, spreads[largest].tp_size)
    return spreads


def _num_pairs(setup: Setup, spreads: Sequence[Spread]) -> int:
    prefill, decode = spreads[: setup.num_prefill], spreads[setup.num_prefill :]
    return sum(each.num_ranks for each in prefill) * sum(each.num_ranks for each in decode)


def _drawn_setup(rng: random.Random) -> Setup:
    num_prefill, num_decode = rng.choice([1, 1, 1, 2]), rng.choice([1, 2, 2, 3])
    has_bystander = num_decode > 1 and rng.random() < 0.2
    changes: dict[str, object] = {
        "eager_handshake": rng.random() < 0.2,
        "hold_policy": HoldPolicy.keep if rng.random() < 0.1 else HoldPolicy.release,
        "handshake_attempts": rng.choice([2, 8]),
        "max_write_bytes": rng.choice([128, 256, 1024]),
        "tombstone_ttl_s": rng.choice([2.0, 20.0]),
    }
    if not has_bystander and rng.random() < 0.2:  # queues that fill
        changes["max_deferred_per_engine"] = rng.choice([1, 2])
        changes["max_registrations"] = changes["max_registrations_per_engine"] = rng.choice([1, 2, 3])
        changes["max_engines"] = rng.choice([1, 2, 3])
        changes["max_in_flight_bytes"] = 128
    offsets = tuple(rng.choice([0.0, 0.0, 1e6, -900.0]) for _ in range(num_prefill + num_decode))
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    # the longer a WRITE takes, the more happens meanwhile
    latency_s = rng.choice([(0.0001, 0.001), (0.001, 0.02), (0.01, 0.2)] + [(0.1, 1.0)] * (not has_bystander))
    return Setup(num_prefill, num_decode, config, has_bystander, rng.randint(2, 6), offsets, latency_s)
