"""What happens to one engine costs the same however many others there are."""

import pytest
from rank_cores import Other, Prefill

from kvpush import wire
from kvpush.links import Links
from kvpush.parallel import Share
from kvpush.prefill_effects import Outbox


class LinksThatNobodyWalksThrough(Links):
    def __iter__(self):
        raise AssertionError("all links are looked at")


@pytest.fixture
def prefill():
    prefill = Prefill()
    prefill.core._links = LinksThatNobodyWalksThrough()
    prefill.core._outbox._links = prefill.core._links
    assert isinstance(prefill.core._outbox, Outbox)
    return prefill


def serve(prefill, other, transfer_id, epoch):
    prefill.registers(other, transfer_id, epoch, [1])
    prefill.push(transfer_id, [2])
    if prefill.told(other, wire.MetadataRequest):
        prefill.answers(other)
    prefill.settles(prefill.write_to(other))


@pytest.mark.parametrize("end", ["link lost", "restarted", "said goodbye", "dropped", "fell silent"])
def test_an_engine_comes_is_served_and_goes_and_no_other_is_looked_at(prefill, end):
    # ten thousand engines that came back at once took 15 seconds when each looked at all others
    engines = [Other(f"d{number}", Share()) for number in range(5)]
    prefill.meets(*engines)
    for epoch, other in enumerate(engines, 1):
        serve(prefill, other, f"t{epoch}", epoch)
    gone = engines[2]
    match end:
        case "link lost":
            prefill.do(prefill.core.link_closed(gone.link, "reset", prefill.now_s))
        case "restarted":
            prefill.meets(Other("d2", Share()))
        case "said goodbye":
            prefill.hears(gone, wire.Goodbye("closing"))
        case "dropped":
            prefill.do(prefill.core.drop_engine("d2", prefill.now_s))
        case "fell silent":
            prefill.advance(prefill.config.liveness_timeout_s + 1)
    assert prefill.released
    assert prefill.core.gauges()["pushes_open"] == 0
