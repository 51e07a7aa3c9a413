"""The control links of a pusher, found by their id and by the engine at their other end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvpush.pushes import Link, LinkId
from kvpush.wire import Rank


class Links(Mapping[LinkId, Link]):
    """Those that are up, oldest first. Thousands of engines may say Hello at once, so that nothing may look at all."""

    def __init__(self) -> None:
        self._links: dict[LinkId, Link] = {}
        self._by_engine: dict[str, dict[LinkId, Link]] = {}

    def add(self, link: Link) -> None:
        """It is up. Nothing changes when it is there already."""
        self._links[link.link] = link
        self._by_engine.setdefault(link.hello.engine_id, {})[link.link] = link

    def remove(self, link_id: LinkId) -> Link | None:
        """It is gone. ``None`` when it was not known."""
        link = self._links.pop(link_id, None)
        if link is not None:
            of_engine = self._by_engine[link.hello.engine_id]
            del of_engine[link_id]
            if not of_engine:
                del self._by_engine[link.hello.engine_id]
        return link

    def clear(self) -> None:
        """All are gone."""
        self._links.clear()
        self._by_engine.clear()

    def of_engine(self, engine_id: str) -> list[Link]:
        """The links of all ranks of one engine, oldest first."""
        return list(self._by_engine.get(engine_id, {}).values())

    def of_rank(self, engine_id: str, rank: Rank) -> list[Link]:
        """The links of one of them, oldest first."""
        return [link for link in self.of_engine(engine_id) if link.rank == rank]

    def __getitem__(self, link_id: LinkId) -> Link:
        return self._links[link_id]

    def __iter__(self) -> Iterator[LinkId]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)
