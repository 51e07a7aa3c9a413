"""A process that imports vLLM once and forks engines from there, for whoever restarts an engine many times.

Usage: ``python tests/vllm/nursery.py SOCKET``. It says ``open`` when it is ready. Who connects to the socket sends a
line of JSON, ``options`` of the engine, its ``environ`` and the path of its ``log``, hears the engine's process id, and
speaks with the engine from then on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from engine import Runner, set_environment


def import_everything() -> None:
    """What an engine would import. Nothing here may start a thread: the children would miss it."""
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvpush.integrations.vllm.connector  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1


def become_engine(connection: socket.socket) -> None:
    """In the child: its standard input and output are the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line = b""
    while not line.endswith(b"\n"):
        line += connection.recv(1)
    wanted = json.loads(line)
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((connection.fileno(), 0), (connection.fileno(), 1), (log, 2)):
        os.dup2(source, target)
    connection.close()
    sys.stdin = os.fdopen(0)
    os.environ.update(wanted["environ"])
    Runner(wanted["options"]).run()


def main() -> None:
    set_environment()
    import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        print("open", flush=True)
        while True:
            connection, _ = door.accept()
            if os.fork() == 0:
                door.close()
                become_engine(connection)
            connection.close()


if __name__ == "__main__":
    main()
