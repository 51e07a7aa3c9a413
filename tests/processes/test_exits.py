"""How a process with a pusher and a receiver in it ends: exit code 0, nothing on stderr, no native crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PREPARE = """
import atexit, gc, sys, threading, time
import kvpush, peers

prefill = peers.Prefill(close_timeout_s=1.0)
decode = peers.Decode(close_timeout_s=1.0)

def move(transfer_id):
    decode.expect(transfer_id, [1], prefill.address)
    prefill.push(transfer_id, [1])
    assert decode.inbox.outcome(transfer_id).outcome == "done"
    assert prefill.inbox.outcome(transfer_id).outcome == "done"

def storm():
    "Handshakes and registrations on their way."
    strangers = [peers.Decode(f"s{i}", peers.Shape(blocks=8)) for i in range(4)]
    for number, stranger in enumerate(strangers):
        for block in range(8):
            stranger.expect(f"{number}/{block}", [block], prefill.address)
            prefill.pusher.push(f"{number}/{block}", [block])
    return strangers

move("t1")
"""

ENDINGS = {
    "closed": "decode.receiver.close(); prefill.pusher.close()",
    "prefill first": "prefill.pusher.close(); decode.receiver.close()",
    "never closed": "",
    "deleted": "del decode; gc.collect(); del prefill; gc.collect(); assert threading.active_count() == 1",
    "deleted in a cycle": """
        prefill.itself, decode.itself = prefill, decode
        del prefill, decode
        gc.collect()
        assert threading.active_count() == 1
        """,
    "closed by atexit": "atexit.register(prefill.pusher.close); atexit.register(decode.receiver.close)",
    "closed twice": "[side.close() for side in (prefill.pusher, decode.receiver) * 2]",
    "closed from two threads": """
        threads = [threading.Thread(target=side.close) for side in (prefill.pusher, decode.receiver) * 2]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """,
    "closed in a storm": "strangers = storm(); prefill.pusher.close(); [s.receiver.close() for s in strangers]",
    "left in a storm": "strangers = storm()",
    "sys.exit in a storm": "strangers = storm(); sys.exit(0)",
    "exit on another thread's watch": """
        def look():
            while True:
                prefill.pusher.stats()
        threading.Thread(target=look, daemon=True).start()
        """,
    "after an error in the constructor": """
        for options in ({"listen": prefill.address}, {"transport_factory": lambda *_: 1 / 0}):
            try:
                kvpush.PrefillPusher("p1", prefill.arena.caches, prefill.arena.shape.spec(), **options)
            except (kvpush.ConfigurationError, ZeroDivisionError):
                pass
            else:
                raise SystemExit("no error")
        """,
}


# Imports once, then forks: each child runs one ending in an interpreter that nobody else touches, and lets it finish.
ZYGOTE = """
import json, os, sys, tempfile
import kvpush, peers

ended = {}
for name, code in json.load(sys.stdin).items():
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            exec(code, {"__name__": "__main__"})
            break
        _, status = os.waitpid(child, 0)
        said.seek(0)
        ended[name] = [os.waitstatus_to_exitcode(status), said.read().decode()]
else:
    print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def ended():
    """Exit code and output by ending."""
    codes = {name: PREPARE + textwrap.dedent(code) for name, code in ENDINGS.items()}
    zygote = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", ZYGOTE],
        input=json.dumps(codes),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    return json.loads(zygote.stdout)


@pytest.mark.parametrize("ending", ENDINGS)
def test_c6_every_way_to_end_is_a_good_one(ending, ended):
    exit_code, output = ended[ending]
    ours = [line for line in output.splitlines() if " UCX " not in line]  # it may regret a connection that was cut
    assert exit_code == 0, output
    assert not ours, output
