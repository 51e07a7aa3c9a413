"""The links of a pusher: found by engine as by walking through all of them, and without doing so."""

from hypothesis import given
from hypothesis import strategies as st

from kvpush import wire
from kvpush.links import Links
from kvpush.parallel import Share
from kvpush.pushes import Link


def link_of(number, engine_id):
    hello = wire.Hello(engine_id, f"{number:032x}", Share(), "p0", Share(), {}, {"kv": 16}, f"agent {number}", number)
    return Link(b"link %d" % number, hello, frozenset(), {})


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.sampled_from(["add", "again", "remove"]))))
def test_links_are_found_by_their_engine_in_the_order_in_which_they_came(steps):
    links, model = Links(), []
    for number, engine_id, step in steps:
        known = next((link for link in model if link.link == b"link %d" % number), None)
        if step == "remove":
            assert links.remove(b"link %d" % number) is known
            model = [link for link in model if link is not known]
        elif known is None:
            new = link_of(number, engine_id)
            links.add(new)
            model.append(new)
        elif step == "again":
            links.add(known)
        assert list(links.values()) == model
        assert len(links) == len(model)
        assert all(links[link.link] is link for link in model)
        for engine_id_ in "abc":
            assert links.of_engine(engine_id_) == [link for link in model if link.hello.engine_id == engine_id_]
    links.clear()
    assert not links
    assert links.of_engine("a") == []


def test_rule16_nothing_is_left_of_an_engine_whose_links_are_gone():
    links = Links()
    for number in range(100):
        links.add(link_of(number, f"d{number}"))
        links.remove(b"link %d" % number)
    assert not links._by_engine
