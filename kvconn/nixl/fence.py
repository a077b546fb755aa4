"""The fence: a reader can tell that blocks were still held for it when its read ended. And the seal on references.

RDMA reads do not involve the producer's processor: a read can succeed on blocks that were given to somebody else. So
every serving worker registers one array of 64-bit words beside its KV. A request that will be held has a slot of it and
a random word, written before the first forward that computes for it, and zeroed before the worker reports its release.

Rules
1. Producer: word written before the first forward; zero stored, then a barrier, then the report, whatever the reason
   (C8).
2. Reader: data quiet, then the word is read; equal is good, else read once more, because a torn word can only differ;
   still different is a failed load. Sound because the data's read had ended before the word's began.
3. A slot is one request's until one step after its release or abort; the next one gets a new word.
4. The seal is an HMAC over what the client carries, with a key that peers get in the handshake and clients never see:
   a client can neither forge ids of other blocks nor a word. It is checked after the handshake, before anything is
   posted. Without a fleet key whoever reaches the side channel gets the seal's.
5. With a fleet key every reference is signed with it besides, all of its fields, seal included. The signature is
   checked when the reference comes, before anybody connects to the host it names: only the fleet can name one.
Bookkeeping is pure; :class:`FenceWords` is the only memory here.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import secrets
import threading
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvconn.base import RequestView
from kvconn.errors import RequestError
from kvconn.params import KvconnRef, RemoteRef
from kvconn.transport.base import MemoryRegion
from kvconn.trust import FleetKey

__all__ = [
    "Fence",
    "FenceSlots",
    "FenceWords",
    "Numbers",
    "check_signature",
    "fresh_key",
    "prompt_digest",
    "seal",
    "seal_fits",
    "sign",
]

WORD = 8  # bytes


class Fence(msgspec.Struct, frozen=True, gc=False):
    """A slot and the word that stands in it while the request's blocks are held."""

    slot: int
    word: int


class Numbers:
    """Those below ``size``, to be taken and given back. It remembers what came back and none that was never taken, so
    that its memory follows the most that were out at once; and those are the low ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._never = 0  # from here on
        self._back: list[int] = []

    def take(self) -> int:
        """A free one, of which there must be one."""
        if self._back:
            return self._back.pop()
        assert self._never < self._size
        self._never += 1
        return self._never - 1

    def give(self, numbers: Iterable[int]) -> None:
        """These are free again."""
        self._back.extend(numbers)

    def __iter__(self) -> Iterator[int]:
        """The free ones."""
        yield from self._back
        yield from range(self._never, self._size)

    def __len__(self) -> int:
        return len(self._back) + self._size - self._never


class FenceSlots:
    """The scheduler half's book of slots. ``size`` slots, one per block: a request has at least one block."""

    def __init__(self, size: int) -> None:
        self._free = Numbers(size)
        #: a reference that is out needs the word no more
        self._of: dict[str, Fence | int] = {}
        self._cooling: list[int] = []
        self._closed: list[int] = []

    def open(self, id: str) -> Fence | None:
        """A slot and a fresh nonzero word for this request; None when all are taken. Asked again: the same."""
        if id in self._of:
            return self.get(id)
        if not self._free:
            return None
        fence = Fence(self._free.take(), secrets.randbelow((1 << 64) - 1) + 1)
        self._of[id] = fence
        return fence

    def get(self, id: str) -> Fence | None:
        """What a reference is to be made with; None after :meth:`handed_out`."""
        fence = self._of.get(id)
        return fence if isinstance(fence, Fence) else None

    def handed_out(self, id: str) -> None:
        """The request's reference is made: it keeps its slot, whose word is in there."""
        fence = self.get(id)
        if fence is not None:
            self._of[id] = fence.slot

    def __contains__(self, id: object) -> bool:
        return id in self._of

    def close(self, id: str) -> int | None:
        """The request is over: its slot is free one step later. Returns the slot."""
        fence = self._of.pop(id, None)
        if fence is None:
            return None
        slot = fence.slot if isinstance(fence, Fence) else fence
        self._closed.append(slot)
        return slot

    def ids(self) -> list[str]:
        """Requests that have a word."""
        return list(self._of)

    def slots(self) -> list[int]:
        """Slots whose words stand."""
        return [fence.slot if isinstance(fence, Fence) else fence for fence in self._of.values()]

    @property
    def cooling(self) -> bool:
        """True while a slot waits for the next step, or the one after it, to be free."""
        return bool(self._cooling or self._closed)

    def step(self) -> None:
        """A step begins: what was closed before the last one began is free."""
        self._free.give(self._cooling)
        self._cooling, self._closed = self._closed, []

    def __len__(self) -> int:
        return len(self._of)

    def __repr__(self) -> str:
        return f"FenceSlots(open={len(self._of)} free={len(self._free)})"


class FenceWords:
    """A page-aligned array of 64-bit words: a serving worker's fence, or a reader's scratch."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(mmap.PAGESIZE, size * WORD))
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, count=size)
        self._barrier = threading.Lock()
        self._written = 0  # words below this: only their pages exist

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    @property
    def size(self) -> int:
        return len(self._words)

    def region(self) -> MemoryRegion:
        """For registration."""
        return MemoryRegion(self.address, self.size * WORD)

    def write(self, fence: Fence) -> None:
        """Let the word stand."""
        self._written = max(self._written, fence.slot + 1)
        self._words[fence.slot] = fence.word

    def zero(self, slot: int) -> None:
        """Take the word down, seen by everybody before this returns: the lock is the barrier."""
        self._words[slot] = 0
        with self._barrier:
            pass

    def zero_all(self) -> None:
        """Before memory moves: sleep, reset, shutdown."""
        self._words[: self._written] = 0
        with self._barrier:
            pass

    def read(self, slot: int) -> int:
        return int(self._words[slot])

    def slot_address(self, slot: int) -> int:
        return self.address + slot * WORD

    def __repr__(self) -> str:
        return f"FenceWords(size={self.size} standing={int(np.count_nonzero(self._words))})"


def fresh_key() -> bytes:
    """A producer's seal key, new at every start."""
    return secrets.token_bytes(32)


def prompt_digest(view: RequestView, n_tokens: int) -> bytes:
    """sha256 over the first ``n_tokens`` tokens and what is beside them: what a reference's blocks are the KV of."""
    digest = hashlib.sha256(np.asarray(view.tokens()[:n_tokens], dtype=np.int64).tobytes())
    digest.update(view.beside(n_tokens))
    return digest.digest()


def seal(key: bytes, ref: RemoteRef, fence: Fence, prompt: bytes) -> str:
    """HMAC-SHA256 (hex) over the canonical encoding, msgpack of a tuple, of what a client could change.

    ``prompt`` is the :func:`prompt_digest`: a good reference handed over with another prompt would put wrong KV into
    the reader's prefix cache, for everybody.
    """
    canonical = msgspec.msgpack.encode(
        (ref.transfer_id, fence.word, fence.slot, ref.block_ids, ref.num_tokens, ref.host, ref.port, prompt)
    )
    return hmac.new(key, canonical, hashlib.sha256).hexdigest()


def seal_fits(key: bytes, ref: RemoteRef, prompt: bytes) -> bool:
    """True when the reference is as its producer sealed it, for the prompt it was sealed for."""
    ours = ref.kvconn
    if ours is None or ours.slot is None or ours.word is None or ours.seal is None:
        return False
    return hmac.compare_digest(seal(key, ref, Fence(ours.slot, ours.word), prompt).encode(), ours.seal.encode())


def sign(key: FleetKey, ref: RemoteRef) -> str:
    """HMAC-SHA256 (hex) with the fleet's key over the msgpack of every field of ``ref`` but the signature itself."""
    ours = msgspec.structs.replace(ref.kvconn or KvconnRef(), signature=None)
    fields = (*msgspec.structs.astuple(msgspec.structs.replace(ref, kvconn=None)), *msgspec.structs.astuple(ours))
    return hmac.new(key.derive("references"), msgspec.msgpack.encode(fields), hashlib.sha256).hexdigest()


def check_signature(key: FleetKey, ref: RemoteRef) -> None:
    """Raise RequestError unless an engine of this fleet made the reference, and every field of it is as it was."""
    given = ref.kvconn.signature if ref.kvconn is not None else None
    if given is None:
        raise RequestError(
            "kv_transfer_params.kvconn.signature",
            "a reference signed with the fleet key (its producer is stock, or has no kvconn.key_file)",
            given,
        )
    if not any(hmac.compare_digest(sign(one, ref).encode(), given.encode()) for one in key.accepted):
        raise RequestError(
            "kv_transfer_params.kvconn.signature",
            "what a producer of this fleet returned, unchanged (it does not fit: another fleet key, or edited)",
            given,
        )
