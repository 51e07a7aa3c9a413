"""kv_transfer_params, as routers send them."""

import pytest

from kvpush.integrations.vllm.params import (
    BadParams,
    DecodeLeg,
    PrefillLeg,
    Source,
    answer,
    base_request_id,
    check_role,
    decode_leg,
    prefill_leg,
    prompt_digest,
)

SOURCE = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_host": "10.0.0.7", "remote_port": 5600}


@pytest.mark.parametrize(
    ("request_id", "base"),
    [
        ("cmpl-abc-0-1a2b3c4d", "cmpl-abc-0"),
        ("cmpl-abc-0-1A2B3C4D", "cmpl-abc-0"),
        ("cmpl-abc-0", "cmpl-abc-0"),
        ("x-1a2b3c4", "x-1a2b3c4"),
        ("-1a2b3c4d", "-1a2b3c4d"),
        ("a-1a2b3c4d-5e6f7a8b", "a-1a2b3c4d"),
    ],
)
def test_the_random_end_of_a_request_id_comes_off(request_id, base):
    assert base_request_id(request_id) == base


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": True}, {"other": 1}])
def test_prefill_does_nothing_unless_asked(params):
    assert prefill_leg(params, "r") is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}])
def test_decode_does_nothing_unless_asked(params):
    assert decode_leg(params, "r") is None


def test_prefill_goes_by_the_router_s_name_alone():
    assert prefill_leg({"do_remote_decode": True, "transfer_id": "t"}, "r-00000000") == PrefillLeg(("t",), "")


def test_without_a_name_prefill_answers_to_its_own_id_and_to_the_common_part():
    assert prefill_leg({"do_remote_decode": True}, "r-00000000") == PrefillLeg(("r-00000000", "r"), "")
    assert prefill_leg({"do_remote_decode": True}, "r") == PrefillLeg(("r",), "")


def test_decode_takes_the_best_name_there_is():
    best = decode_leg(SOURCE | {"transfer_id": "t", "remote_request_id": "p-1"}, "r-00000000")
    next_best = decode_leg(SOURCE | {"remote_request_id": "p-1"}, "r-00000000")
    last = decode_leg(SOURCE, "r-00000000")
    assert [leg.transfer_id for leg in (best, next_best, last)] == ["t", "p-1", "r"]


def test_decode_finds_every_rank_by_the_rule_of_ports():
    leg = decode_leg(SOURCE | {"tp_size": 2, "pp_size": 2, "remote_port": "5600"}, "r")
    assert leg.addresses == {
        (0, 0): ("10.0.0.7", 5600),
        (0, 1): ("10.0.0.7", 5601),
        (1, 0): ("10.0.0.7", 5602),
        (1, 1): ("10.0.0.7", 5603),
    }


def test_decode_believes_the_addresses_of_the_answer():
    listed = [[0, 0, "h0", 1, "life 1"], [0, 1, "h1", 2, ""]]
    leg = decode_leg(SOURCE | {"remote_sources": listed}, "r")
    assert leg.addresses == {(0, 0): ("h0", 1), (0, 1): ("h1", 2)}
    assert leg.incarnations == {(0, 0): "life 1", (0, 1): ""}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("ranks", [[(0, 0)], [(0, 0), (0, 1), (1, 0), (1, 1)]])
def test_what_prefill_answers_is_what_decode_needs(ranks, named):
    sources = {rank: Source(("h", 5 + i), f"life {i}") for i, rank in enumerate(ranks)}
    params = {"do_remote_decode": True} | ({"transfer_id": "t"} if named else {})
    leg = prefill_leg(params, "p-00000000")
    said = answer(engine_id="p0", request_id="p-00000000", leg=leg, sources=sources, num_tokens=7, lease_s=9.0)
    assert decode_leg(said, "d-11111111") == DecodeLeg("t" if named else "p-00000000", "p0", sources, 9.0)


def test_a_name_is_that_of_one_prompt():
    """A list of prompts has one name, and a client may use its own again."""
    ours, theirs = [1, 2, 3], [1, 2, 4]
    pushed = [prefill_leg({"do_remote_decode": True, "transfer_id": "t"}, "r", ids) for ids in (ours, theirs)]
    wanted = [decode_leg(SOURCE | {"transfer_id": "t"}, "r", ids) for ids in (ours, theirs)]
    assert [leg.transfer_ids for leg in pushed] == [(leg.transfer_id,) for leg in wanted]
    assert wanted[0].transfer_id != wanted[1].transfer_id
    assert all(leg.transfer_id.startswith("t#") for leg in wanted)


@pytest.mark.parametrize("token_ids", [[1], [2, 1], [1, 2, 0], [], [258]])
def test_other_tokens_have_another_digest(token_ids):
    assert prompt_digest(token_ids) != prompt_digest([1, 2])
    assert len(prompt_digest(token_ids)) == 24
    assert prompt_digest(None) == ""


@pytest.mark.parametrize("named", [True, False])
def test_the_answer_for_another_prompt_is_refused_at_once(named):
    leg = prefill_leg({"do_remote_decode": True} | ({"transfer_id": "t"} if named else {}), "p-00000000", [1, 2])
    sources = {(0, 0): Source(("h", 5))}
    said = answer(engine_id="p0", request_id="p-00000000", leg=leg, sources=sources, num_tokens=2, lease_s=9.0)
    assert decode_leg(said, "d-11111111", [1, 2]).transfer_id in leg.transfer_ids
    with pytest.raises(BadParams, match="prefill engine 'p0' computed another prompt"):
        decode_leg(said, "d-11111111", [1, 3])
    decode_leg(said | {"transfer_id": "a name of the router's own"}, "d-11111111", [1, 3])


def test_a_name_must_fit_into_a_message_with_its_digest():
    longest = "x" * (512 - 25)
    assert decode_leg(SOURCE | {"transfer_id": longest}, "r", [1]).transfer_id.startswith(longest)
    with pytest.raises(BadParams, match="transfer_id and the digest of the prompt"):
        decode_leg(SOURCE | {"transfer_id": longest + "x"}, "r", [1])


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": ""},
        {"remote_engine_id": 7},
        {"remote_host": None},
        {"remote_host": "0.0.0.0"},
        {"remote_port": None},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": 65535, "tp_size": 2},
        {"remote_port": True},
        {"remote_port": "5600x"},
        {"tp_size": "2"},
        {"tp_size": 5000},
        {"tp_size": 4096, "pp_size": 2},
        {"transfer_id": 5},
        {"transfer_id": "x" * 513},
        {"remote_request_id": ""},
        {"remote_transfer": 5},
        {"transfer_id": "t", "remote_transfer": "t#other"},
        {"remote_sources": 5},
        {"remote_sources": [[0, 0, "h", 5]]},
        {"remote_sources": [[0, -1, "h", 5, ""]]},
        {"remote_sources": [[0, 0, "h", 0, ""]]},
        {"remote_sources": [[0, 0, "h", 5, 7]]},
        {"remote_sources": []},
        {"remote_sources": [[0, 1, "h", 5, ""]]},
        {"remote_sources": [[0, 0, "h", 5, ""], [1, 1, "h", 6, ""]]},
        {"remote_lease_s": 0},
        {"remote_lease_s": "9"},
        {"remote_lease_s": float("nan")},
    ],
)
def test_parameters_that_lead_nowhere_are_refused(change):
    with pytest.raises(BadParams):
        decode_leg(SOURCE | change, "r")


def test_a_prefill_name_that_cannot_travel_is_refused():
    with pytest.raises(BadParams, match="transfer_id"):
        prefill_leg({"do_remote_decode": True, "transfer_id": ""}, "r")


@pytest.mark.parametrize("asked", ["do_remote_decode", "do_remote_prefill"])
def test_a_server_that_is_asked_for_what_it_does_not_do_says_so(asked):
    able = {"is_producer": asked == "do_remote_decode", "is_consumer": asked == "do_remote_prefill"}
    check_role({asked: True}, **able)
    check_role({asked: False}, is_producer=False, is_consumer=False)
    check_role(None, is_producer=False, is_consumer=False)
    with pytest.raises(BadParams, match=f"{asked}: this server's kv_role is neither kv_"):
        check_role({asked: True}, is_producer=not able["is_producer"], is_consumer=not able["is_consumer"])
