"""``kvpush demo``: one prefill and several decode processes serve prompts, one decode process is killed half-way.

``command`` orchestrates, ``fleet`` owns the processes, ``engines`` is what runs in them, ``router`` decides (pure),
``messages`` go between them; ``canary``, ``board``, ``view`` and ``summary`` check and show.
"""

from kvpush.cli.demo.command import add_arguments, run

__all__ = ["add_arguments", "run"]
