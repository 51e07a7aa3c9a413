"""Two living processes under one engine id: refused and said, where a restart and a reconnect go on working."""

import msgspec.structs
from core_worlds import SOON_S, make_connected, run_to_the_end

from kvpush import wire
from kvpush.namesakes import Namesakes
from kvpush.prefill_effects import Send, Warn
from kvpush.rarely import INTERVAL_S


class Caller:
    """Whoever says Hello over a new link, as the connected decode engine but for its incarnation."""

    def __init__(self, prefill, decode):
        self.prefill = prefill
        (self.hello,) = [link.hello for link in prefill.core._links.values()]
        self.num_links = 0

    def says_hello(self, incarnation):
        """The answer, the warnings, and the link that it came by."""
        self.num_links += 1
        link = b"link %d" % self.num_links
        hello = msgspec.structs.replace(self.hello, incarnation=incarnation, agent_name=f"agent {incarnation}")
        effects = self.prefill.core.message(link, hello, self.prefill.now_s())
        self.prefill._perform([e for e in effects if not isinstance(e, Warn) and getattr(e, "link", b"") != link])
        (answer,) = [
            effect.message
            for effect in effects
            if isinstance(effect, Send) and isinstance(effect.message, wire.Welcome | wire.Refused)
        ]
        return answer, [effect.text for effect in effects if isinstance(effect, Warn)], link


def make_caller():
    world, prefill, decode = make_connected()
    return world, prefill, Caller(prefill, decode)


def test_an_incarnation_that_comes_back_beside_the_one_that_took_its_place_is_refused_and_said_once_a_minute():
    world, prefill, caller = make_caller()
    first = caller.hello.incarnation
    assert isinstance(caller.says_hello("second")[0], wire.Welcome)  # looks like a restart
    for round_number in range(3):
        refused, warnings, _ = caller.says_hello(first)
        assert isinstance(refused, wire.Refused) and refused.code == "superseded"
        assert "engine ids must be unique" in refused.reason and "'d0'" in refused.reason
        assert len(warnings) == (round_number == 0)
        assert all(refused.reason in warning for warning in warnings)
    assert prefill.core.counters["namesakes_refused"] == 3
    assert [link.hello.incarnation for link in prefill.core._links.values()] == ["second"]  # undisturbed
    world.clock.advance(INTERVAL_S)
    _, warnings, _ = caller.says_hello(first)
    assert len(warnings) == 1


def test_restarts_and_reconnects_are_no_namesakes():
    _, prefill, caller = make_caller()
    for incarnation in ("second", "second", "third", "third", "fourth"):
        answer, warnings, link = caller.says_hello(incarnation)
        assert isinstance(answer, wire.Welcome) and not warnings
    prefill.core.link_closed(link, "broken", prefill.now_s())
    answer, warnings, _ = caller.says_hello("fourth")
    assert isinstance(answer, wire.Welcome) and not warnings
    assert prefill.core.counters["namesakes_refused"] == 0


def test_when_the_newer_one_is_gone_the_older_may_come_back_and_then_it_is_the_newer_one():
    _, prefill, caller = make_caller()
    first = caller.hello.incarnation
    _, _, link = caller.says_hello("second")
    prefill.core.link_closed(link, "killed", prefill.now_s())
    answer, _, _ = caller.says_hello(first)
    assert isinstance(answer, wire.Welcome)
    answer, _, _ = caller.says_hello("second")
    assert isinstance(answer, wire.Refused)


def test_decode_s_caller_is_told_why():
    world, prefill, decode = make_connected()
    caller = Caller(prefill, decode)
    caller.says_hello("second")
    receive = decode.expect("t", [7], prefill)  # over a link that is not its own any more
    world.run_until(lambda: receive.is_over, 60)
    assert (receive.outcome, receive.code) == ("failed", "superseded")
    assert "engine ids must be unique" in receive.finished.reason
    assert not receive.is_free  # it had been registered, as far as it knew
    assert len(prefill.warnings) == 1
    prefill.core.link_closed(b"link 1", "gone", prefill.now_s())
    world.run_until(lambda: receive.is_free, 60)
    assert receive.is_free_for_sure  # it asked, and was told: drained
    again, push = decode.expect("u", [8], prefill, deadline_s=20), prefill.push("u", [3])
    world.run_until(lambda: again.is_over and push.is_over, 60)
    assert again.outcome == push.outcome == "done"
    world.advance(SOON_S)
    run_to_the_end(world)


def test_rule16_the_memory_of_it_is_bounded_and_the_oldest_are_forgotten():
    namesakes = Namesakes(limit=3)
    for number in range(100):
        namesakes.admitted("d0", f"{number}")
        namesakes.admitted(f"e{number}", "x")
    assert list(namesakes._newest) == ["e98", "d0", "e99"]
    assert list(namesakes._replaced) == [("d0", "96"), ("d0", "97"), ("d0", "98")]


def test_whoever_has_the_id_again_has_not_been_replaced():
    namesakes = Namesakes(limit=3)
    for incarnation in ("one", "two", "one"):
        namesakes.admitted("d0", incarnation)
    assert [namesakes.has_been_replaced("d0", each) for each in ("one", "two", "three")] == [False, True, False]
