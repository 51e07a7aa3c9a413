"""A receive that ends before its link is up: prefill learns of it, and a push that waits says for whom."""

from core_worlds import CONFIG, SOON_S, connect, is_a, make_connected, make_pair, make_world, run_to_the_end

from kvpush import wire


def test_a_cancel_before_the_link_is_up_ends_the_push_as_soon_as_it_is():
    world, prefill, decode = make_pair()
    receive = decode.expect("t", [7, 8], prefill)
    decode.cancel("t")
    assert (receive.outcome, receive.is_free_for_sure) == ("cancelled", True)  # nothing was registered
    push = prefill.push("t", [3, 4])
    world.advance(SOON_S)
    assert (push.outcome, push.code) == ("cancelled", "cancelled_by_peer")
    assert prefill.core.gauges()["registrations_waiting"] == 0
    run_to_the_end(world)


def test_a_push_that_comes_after_such_a_cancel_ends_with_it_and_the_id_can_be_used_again():
    world, prefill, decode = make_pair()
    decode.expect("t", [7], prefill)
    decode.cancel("t")
    world.advance(SOON_S)
    assert prefill.push("t", [3]).outcome == "cancelled"
    decode.expect("u", [7], prefill)
    decode.cancel("u")
    world.advance(SOON_S)
    receive = decode.expect("u", [7], prefill)
    world.advance(SOON_S)
    push = prefill.push("u", [3])
    world.run_until(lambda: receive.is_over and push.is_over)
    assert receive.outcome == push.outcome == "done"
    run_to_the_end(world)


def test_rule19_it_ends_nothing_that_another_engine_has_registered_for():
    world = make_world()
    prefill, owner, stranger = world.prefill("p0"), world.decode("d0"), world.decode("d1")
    connect(world, prefill, owner, stranger)
    receive = owner.expect("t", [7], prefill)
    world.advance(SOON_S)
    links = {known.hello.engine_id: link for link, known in prefill.core._links.items()}
    cancel = wire.Withdraw("t", 10**6, "cancelled_by_peer", "mine")
    assert prefill.core.message(links["d1"], cancel, prefill.now_s()) == []
    push = prefill.push("t", [3])
    world.run_until(lambda: receive.is_over and push.is_over)
    assert receive.outcome == push.outcome == "done"
    run_to_the_end(world)


def test_the_newer_use_of_the_id_is_not_ended_by_the_older_ones_cancel():
    world, prefill, decode = make_pair()
    decode.expect("t", [7], prefill)
    decode.cancel("t")
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.run_until(lambda: receive.is_over and push.is_over)
    assert receive.outcome == push.outcome == "done"
    run_to_the_end(world)


def test_rule16_a_notice_is_not_kept_for_an_address_where_nobody_is():
    world, prefill, decode = make_pair()
    world.network.black_hole("p0", "d0")
    decode.expect("t", [7], prefill)
    decode.cancel("t")
    (record,) = decode.core._prefills.values()
    assert len(record.notices) == 1
    world.advance(CONFIG.handshake_attempts * (CONFIG.handshake_timeout_s + CONFIG.handshake_backoff_max_s) + SOON_S)
    assert record.notices == []
    dials = decode.core.counters["handshakes_started"]
    world.advance(10.0)
    assert decode.core.counters["handshakes_started"] == dials == CONFIG.handshake_attempts
    world.heal()
    run_to_the_end(world)


# --- for whom a push waited in vain ----------------------------------------------------------------------------------


def test_a_push_that_nobody_registered_for_says_so():
    world, prefill, _ = make_pair()
    push = prefill.push("t", [3])
    run_to_the_end(world)
    assert push.code == "lease_expired" and "no decode engine has registered for it" in push.finished.reason


def test_a_push_whose_engine_was_lost_before_it_came_names_the_engine_and_the_error():
    world, prefill, decode = make_connected()
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    decode.kill()
    world.advance(SOON_S)
    push = prefill.push("t", [3])
    run_to_the_end(world)
    assert push.code == "lease_expired"
    assert "engine 'd0' is evicted (lost)" in push.finished.reason and "last error: " in push.finished.reason


def test_a_push_behind_an_engine_that_never_answers_names_its_state_and_the_error():
    world, prefill, decode = make_pair(handshake_attempts=100, lease_s=4, handshake_backoff_max_s=30)
    world.network.hold = is_a(wire.Metadata)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.run_until(lambda: push.is_over, 60)
    assert (push.outcome, push.code) == ("expired", "lease_expired")
    assert "it could not be written: engine 'd0' is " in push.finished.reason
    assert "last error: engine 'd0': no metadata within 1 s" in push.finished.reason
    world.advance(SOON_S)
    assert receive.finished.reason == push.finished.reason
    world.network.hold = None
    world.network.release()
    run_to_the_end(world)


def test_no_engine_is_left_handshaking_when_decode_has_closed():
    world, prefill, decode = make_pair()
    world.network.black_hole("p0", "d0")
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    assert [engine.state for engine in decode.registry.snapshot()] == ["handshaking"]
    decode.core.close(decode.now_s())
    effects = decode.core.transport_closed(decode.now_s())
    assert "Dial" not in {type(effect).__name__ for effect in effects}
    assert [(engine.state, engine.reason) for engine in decode.registry.snapshot()] == [("evicted", "closing")]
