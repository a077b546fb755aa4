"""A transport with faults, around any other.

Rules
1. A policy names the nth post or notification, counted from 0 over the life of the decorator.
2. A fault adds nothing that the transport below could not do: a failed post was not posted, a read that never finishes
   is under way below and lands, its handle stays PENDING (it is never quiet, C6), whatever is asked.
3. Everything else goes through unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvconn.errors import TransportError
from kvconn.transport.base import Descs, HandleState, MemoryRegion, MemType, Transport

__all__ = ["FaultPolicy", "FaultTransport"]


class FaultPolicy(msgspec.Struct, frozen=True):
    """Which posts and outgoing notifications meet which fault. ``delay``: until that many later ones were sent."""

    fail_posts: frozenset[int] = frozenset()
    never_finish: frozenset[int] = frozenset()
    drop: frozenset[int] = frozenset()
    duplicate: frozenset[int] = frozenset()
    delay: dict[int, int] = {}


class FaultTransport(Transport):
    """``inner`` with the faults of ``policy``."""

    def __init__(self, inner: Transport, policy: FaultPolicy) -> None:
        self.inner = inner
        self.policy = policy
        self.name = inner.name
        #: posts and notifications so far.
        self.posts = 0
        self.sent = 0
        self._endless: set[int] = set()
        #: (number of notifications after which it goes, peer, message)
        self._held: list[tuple[int, str, bytes]] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.inner.register(regions)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def add_peer(self, blob: bytes) -> str:
        return self.inner.add_peer(blob)

    def remove_peer(self, peer: str) -> None:
        self.inner.remove_peer(peer)

    def peer_gone(self, peer: str) -> bool:
        return self.inner.peer_gone(peer)

    def post_read(
        self,
        peer: str,
        local: Descs,
        remote: Descs,
        *,
        local_mem: MemType = "DRAM",
        remote_mem: MemType = "DRAM",
        local_device: int = 0,
        remote_device: int = 0,
    ) -> int:
        number, self.posts = self.posts, self.posts + 1
        if number in self.policy.fail_posts:
            raise TransportError(f"post_read: post {number} from {peer} fails, as ordered")
        handle = self.inner.post_read(
            peer,
            local,
            remote,
            local_mem=local_mem,
            remote_mem=remote_mem,
            local_device=local_device,
            remote_device=remote_device,
        )
        if number in self.policy.never_finish:
            self._endless.add(handle)
        return handle

    def poll(self, handle: int) -> HandleState:
        state = self.inner.poll(handle)
        return HandleState.PENDING if handle in self._endless else state

    def reason(self, handle: int) -> str:
        return "" if handle in self._endless else self.inner.reason(handle)

    def release(self, handle: int) -> None:
        if handle in self._endless:
            raise TransportError(f"release of handle {handle}: it never finishes, as ordered")
        self.inner.release(handle)

    def notify(self, peer: str, message: bytes) -> None:
        number, self.sent = self.sent, self.sent + 1
        if number in self.policy.delay:
            self._held.append((number + self.policy.delay[number], peer, message))
        elif number not in self.policy.drop:
            for _ in range(2 if number in self.policy.duplicate else 1):
                self.inner.notify(peer, message)
        self._let_go(one for one in self._held if one[0] <= number)

    def _let_go(self, due: Iterable[tuple[int, str, bytes]]) -> None:
        for one in list(due):
            self._held.remove(one)
            self.inner.notify(one[1], one[2])

    def notifications(self) -> list[tuple[str, bytes]]:
        return self.inner.notifications()

    def close(self) -> None:
        self.inner.close()
        self._endless.clear()
        self._held.clear()

    def __repr__(self) -> str:
        return f"FaultTransport({self.inner!r} posts={self.posts} endless={len(self._endless)} held={len(self._held)})"
