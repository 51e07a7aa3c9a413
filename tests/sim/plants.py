"""Bugs to plant: each takes the place of a few words of one method, in this process, for as long as it is planted.

A plant whose words are not in the source any more is an error: the code has moved on, and so must the plant.
"""

import contextlib
import inspect
import textwrap
from dataclasses import dataclass, field

from kvpush.decode import DecodeCore
from kvpush.endings import Endings
from kvpush.loop import Loop
from kvpush.prefill import PrefillCore
from kvpush.pushes import Push
from kvpush.registrations import Registrations
from kvpush.registry import Registry


@dataclass(frozen=True)
class Edit:
    """In one method, ``old`` becomes ``new``. Further lines of either are indented like the line that ``old`` is in."""

    owner: type
    method: str
    old: str
    new: str

    def applied(self, source):
        """The source with the bug."""
        where = f"{self.owner.__name__}.{self.method}"
        first = self.old.partition("\n")[0]
        line = next((line for line in source.splitlines() if first in line), None)
        assert line is not None, f"{where}: the plant's words are not there any more: {first!r}"
        indent = "\n" + line[: len(line) - len(line.lstrip())]
        old, new = self.old.replace("\n", indent), self.new.replace("\n", indent)
        assert source.count(old) == 1, f"{where}: {old!r} is there {source.count(old)} times"
        return source.replace(old, new)


@dataclass(frozen=True)
class Plant:
    """One bug. ``catchers``: who may object to it, by name."""

    name: str
    edits: list[Edit]
    catchers: set[str] = field(default_factory=set)


def compiled(owner, method, edits):
    """A method with all its edits."""
    found = inspect.getattr_static(owner, method)
    function = found.fget if isinstance(found, property) else found
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        source = edit.applied(source)
    made = {}
    exec(compile(source, f"<planted in {owner.__name__}.{method}>", "exec"), function.__globals__, made)
    return made[method]


@contextlib.contextmanager
def planted(plant):
    """The bug is there for as long as the context lasts."""
    places = {(edit.owner, edit.method): [] for edit in plant.edits}
    for edit in plant.edits:
        places[edit.owner, edit.method].append(edit)
    with contextlib.ExitStack() as stack:
        for (owner, method), edits in places.items():
            stack.callback(setattr, owner, method, inspect.getattr_static(owner, method))
            setattr(owner, method, compiled(owner, method, edits))
        yield


SIMULATED = [
    Plant(
        "pin not taken",
        [
            Edit(Registry, "pin", "engine.pins += 1", "pass"),
            Edit(Registry, "settle", "engine.pins -= 1", "pass"),
            Edit(Registry, "settle", "assert engine.pins > 0, ", "assert engine.pins >= 0, "),
        ],
        {"pinned-while-written"},
    ),
    Plant(
        "eviction without the pin check",
        [
            Edit(
                Registry,
                "_evict_at_s",
                "if engine.pins or engine.state not in (State.unknown, State.stale):",
                "if engine.state not in (State.unknown, State.stale):",
            )
        ],
        {"UsageError in fake_transport.py:remove_remote", "KeyError in registry.py:settle"},
    ),
    Plant(
        "liveness not refreshed on push",
        [Edit(Registry, "pin", "engine.activity_s = self._clock()", "pass")],
        {"pushes-refresh"},
    ),
    Plant(
        "liveness refreshed on a handshaking engine",
        [
            Edit(
                Registry,
                "need",
                "case State.handshaking:\n    return Need.wait",
                "case State.handshaking:\n    engine.activity_s = self._clock()\n    return Need.wait",
            )
        ],
        {"pushes-refresh"},
    ),
    Plant(
        "generation not compared on a late reply",
        [Edit(Registry, "_attempted", "engine.attempt == attempt", "engine.attempt is not None")],
        {"late-answers-change-nothing"},
    ),
    Plant(
        "deferred push not re-checked",
        [
            Edit(
                PrefillCore,
                "_recheck",
                "if push.state is not PushState.writing and now_s >= push.lease_until_s:",
                "if False:",
            )
        ],
        {"wanted-when-posted"},
    ),
    Plant(
        "Drained sent while a write is in flight",
        [
            Edit(
                PrefillCore,
                "_cancelled_by_peer",
                "is_owed = self._owe_drain(link, transfer_id, message.epoch)",
                "is_owed = self._outbox.send(link, wire.Drained(transfer_id, message.epoch)) or True",
            )
        ],
        {"drained-means-quiet"},
    ),
    Plant(
        "blocks reported reusable at release",
        [
            Edit(
                PrefillCore,
                "_hold_timed_out",
                "self._endings.end_hold(push, proven=False, reason=reason)",
                "self._endings.end_hold(push, proven=True, reason=reason)",
            ),
            Edit(Endings, "pay_drain", "assert not registration.num_unproven, ", "assert True, "),
        ],
        {"source-kept", "drained-means-quiet"},
    ),
    Plant(
        "D not told of a failed handshake",
        [Edit(Endings, "_settle_account", "if cause.outcome is not Outcome.done:", "if False:")],
        {"told-at-once"},
    ),
    Plant(
        "sweep only on traffic",
        [Edit(PrefillCore, "next_due_s", "self._registry.next_due_s()", "None")],
        {"ages-by-clock"},
    ),
    Plant(
        "first error wins replaced by last",
        [
            Edit(
                Endings,
                "give_up",
                "if push.cause is None:",
                "push.cause = push.cause and cause\nif push.cause is None:",
            )
        ],
        {"first-cause"},
    ),
    Plant(
        "duplicate registration starts a second write",
        [
            Edit(PrefillCore, "_place", "if old is not None and old.is_of(new.link, new.epoch):", "if False:"),
            Edit(
                Registrations,
                "refusal",
                "refusal = _refusal_after(old, new, leg)",
                "refusal = None",
            ),
        ],
        {"each-position-once", "only-granted-blocks", "drained-means-quiet"},
    ),
    Plant(
        "a further chunk extends the lease and leaves its timer alone",
        [
            Edit(
                PrefillCore,
                "push",
                "if push.cause is None and push.state is not PushState.writing:",
                "if push.cause is None and push.state is not PushState.writing and (\n"
                "        LeaseEnd(transfer_id) not in self._timers):",
            )
        ],
        {"not-too-early"},
    ),
    Plant(
        "the engine that is dropped is not told",
        [Edit(PrefillCore, "drop_engine", "tell=True", "tell=False")],
        {"told-at-once"},
    ),
    Plant(
        "prefill's own code for a cancel said to decode",
        [Edit(Registrations, "end_transfer", "as_decode_sees_it(code), reason", "code, reason")],
        {"first-cause"},
    ),
]

RANKS = [
    Plant(
        "a receive is done when as many WRITEs were reported as it has writers",
        [
            Edit(
                DecodeCore,
                "_arrived",
                "self._count_under_way(leg, -1)",
                "self._count_under_way(leg, -1)\nself.counters[f'reports {leg.receive.epoch}'] += 1",
            ),
            Edit(
                DecodeCore,
                "_arrived",
                "elif receive.is_complete:",
                "elif receive.is_complete or self.counters[f'reports {receive.epoch}'] >= len(receive.legs) > 1:",
            ),
        ],
        {"done-means-there"},
    ),
    Plant(
        "a push is done when one rank of decode has everything",
        [Edit(Push, "is_served", "self.is_complete and all(", "any(")],
        {"every-rank-served", "agreement"},
    ),
    Plant(
        "a push is done when everybody who has asked has everything",
        [Edit(Push, "is_complete", "self.legs.keys() >= self.readers", "True")],
        {"every-rank-served"},
    ),
    Plant(
        "Drained of one rank of prefill taken for that of all",
        [
            Edit(
                DecodeCore,
                "_drained",
                "self._prove(leg, now_s, is_confirmed=True)",
                "for each in leg.receive.legs.values():\n    self._prove(each, now_s, is_confirmed=True)",
            )
        ],
        {"quiet-before-reuse", "only-granted-blocks"},
    ),
    Plant(
        "Drained sent to all ranks when the WRITEs to one have ended",
        [
            Edit(
                PrefillCore,
                "_after_settle",
                "self._endings.pay_drain(leg.registration)",
                "for each in push.registrations:\n    self._endings.pay_drain(each)",
            ),
            Edit(Endings, "pay_drain", "assert not registration.num_unproven, ", "assert True, "),
        ],
        {"drained-means-quiet"},
    ),
    Plant(
        "a restarted rank served under the registration of the one before",
        [
            Edit(
                PrefillCore,
                "link_closed",
                "known = self._links.remove(link)",
                "known = self._links.get(link)\nif known is not None and len(known.readers) > 1:\n"
                "    return self._outbox.take()\nself._links.remove(link)",
            ),
            Edit(
                PrefillCore,
                "_welcome",
                "self._supersede_link(other, hello, now_s)",
                "self._links.remove(other.link)\nnew.generation = other.generation\n"
                "for push in self._pushes.values():\n"
                "    if new.rank in push.legs and push.legs[new.rank].registration.link is other:\n"
                "        push.legs[new.rank].registration.link = new\n"
                "        new.transfer_ids[push.transfer_id] = None",
            ),
        ],
        {"only-granted-blocks", "each-position-once"},
    ),
    Plant(
        "the other ranks not told when one rank's part fails",
        [Edit(DecodeCore, "_end", "elif not leg.is_quiet:", "elif told_by is None and not leg.is_quiet:")],
        {"told-at-once"},
    ),
    Plant(
        "a rank of decode told of a push's end only when it is the one that failed",
        [Edit(Endings, "_tell", "for leg in push.legs.values():", "for leg in list(push.legs.values())[:1]:")],
        {"told-at-once", "AssertionError in prefill.py"},
    ),
    Plant(
        "no rank of decode told of what another rank has cancelled before the push",
        [Edit(Registrations, "end_transfer", "if registration is not silent:", "if silent is None:")],
        {"told-at-once"},
    ),
]

LOCK = Plant(
    "lock dropped between read and pin",
    [
        Edit(
            Registry,
            "pin",
            "engine.activity_s = self._clock()",
            "resource = engine.resource\nself._lock.__exit__(None, None, None)\nself._lock.__enter__()\n"
            "engine.activity_s = self._clock()",
        ),
        Edit(Registry, "pin", "return engine.resource", "return resource"),
    ],
)

LOOP = Plant(
    "a loop that dies on one bad message",
    [Edit(Loop, "_guarded", "if self._failures >= MAX_FAILURES_IN_A_ROW:", "if self._failures >= 1:")],
)
