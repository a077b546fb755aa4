"""The connector interface: two halves, their methods, and the few plain types that cross between them and an engine.

Rules
1. This module decides nothing and imports nothing heavy; engines import it in processes that never move a byte.
2. Method names are vLLM 0.32's; their arguments are the views defined here, so that no engine's classes leak in.
3. Results of a poll are consumed by the poll (C5): nothing peeks, ``get_finished`` is derived from
   ``get_transfer_results`` here and nowhere else.
4. Everything that crosses a process is frozen and picklable.

The completion contract, numbered C1 to C13, is in docs/design.md.
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

__all__ = [
    "NO_BLOCK",
    "NO_RESULTS",
    "BlockIds",
    "CacheKind",
    "Cells",
    "ConnectorMetadata",
    "ConnectorRole",
    "Direction",
    "Fact",
    "FactState",
    "FinishReason",
    "GroupView",
    "HandshakeMetadata",
    "JoinedFacts",
    "KVBlocks",
    "KVCacheView",
    "KVConnector",
    "KVConnectorOutput",
    "LayerView",
    "Published",
    "RankFacts",
    "RequestView",
    "StepRequest",
    "StepView",
    "TransferResults",
    "WorkerFacts",
]

Direction = Literal["send", "recv"]
#: ``quiet`` says that no transfer of ours can write the blocks of a failed receive any more (C6). ``released`` is about
#: no life (its n is 0): the engine behind reference ``id``, which nobody here reads, was told so, as far as it can be.
FactState = Literal["done", "failed", "quiet", "released"]
#: block ids per cache group, each list from the prompt's first block on
BlockIds = tuple[tuple[int, ...], ...]
#: in such a list: there is no block here, or none any more
NO_BLOCK: Final = -1
CacheKind = Literal["full", "window", "state"]
#: K and V
MAX_PARTS = 2
#: of an engine; who says to be beyond them is nobody
MAX_RANKS = 1 << 20
#: bytes from one cell to the next; more is no cache, and would not fit in 64 bits when it is counted up
MAX_STRIDE = 1 << 40


class ConnectorRole(enum.Enum):
    """Which half an instance is: one SCHEDULER per engine, one WORKER per rank."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class FinishReason(enum.Enum):
    """Why a request ended. Only STOP and LENGTH leave KV that another engine may read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# --- where KV lives, as the engine tells it -----------------------------------------------------------------------


class GroupView(msgspec.Struct, frozen=True):
    """A cache group: the layers that share one block table. ``window`` in tokens, for ``kind='window'``.

    ``named``: a reference names at least so many of a window's last blocks, where there are: readers count on them.
    """

    kind: CacheKind
    layers: tuple[str, ...]
    window: int | None = None
    named: int = 0


class KVCacheView(msgspec.Struct, frozen=True):
    """The pool as the scheduler sees it. ``num_blocks`` per group pool.

    ``block_size``: tokens that one block id stands for, on all the ranks together that share a block's tokens (DCP).

    ``block_bytes``: one block with all its layers, in bytes, on the rank that has most of it; 0 where nobody asks.
    """

    num_blocks: int
    block_size: int
    groups: tuple[GroupView, ...]
    block_bytes: int = 0


class Cells(msgspec.Struct, frozen=True, array_like=True):
    """How the bytes of a block are cut: one cell of ``size`` bytes per part, head and token.

    Strides in bytes. Parts are K and V where they lie apart in a block or in tensors of their own: this tensor has
    ``parts`` of them, the first of which is number ``part``. A row of K and V in one piece is one part or two.
    """

    heads: int
    tokens: int
    size: int
    head_stride: int
    token_stride: int
    parts: int = 1
    part_stride: int = 0
    part: int = 0

    def fit(self, length: int) -> bool:
        """True when every number is possible and the last cell ends within ``length`` bytes."""
        counts, strides = (self.heads, self.tokens, self.parts), (self.head_stride, self.token_stride, self.part_stride)
        if min(self.size, *counts) < 1 or min(self.part, *strides) < 0 or self.part + self.parts > MAX_PARTS:
            return False
        if max(counts) > length or max(strides) > MAX_STRIDE:  # what the sum below does not bound
            return False
        return self.size + sum((n - 1) * stride for n, stride in zip(counts, strides, strict=True)) <= length

    def at(self, part: int, head: int, token: int) -> int:
        """Bytes from the block's first to a cell; ``part`` and ``head`` count from this tensor's first."""
        return part * self.part_stride + head * self.head_stride + token * self.token_stride


class LayerView(msgspec.Struct, frozen=True):
    """One cache tensor of one layer, in bytes: block ``b`` lies at ``address + b * stride``, ``length`` long.

    ``cells`` None: heads first, with nothing between. Tensors of one layer, K and V, have its one name.
    """

    name: str
    address: int
    stride: int
    length: int
    count: int
    group: int = 0
    kind: CacheKind = "full"
    mem_type: Literal["DRAM", "VRAM"] = "DRAM"
    device_id: int = 0
    cells: Cells | None = None


# --- what the scheduler half is told ------------------------------------------------------------------------------


class RequestView:
    """A request, read-only. ``n_prompt`` and ``n_total`` in tokens; tokens and block hashes are fetched on demand.

    ``block_hashes()`` gives one content hash per full block of the whole sequence so far, prefix included.
    ``beside(n)`` is what else decides the KV of the first ``n`` tokens (an adapter, multimodal inputs, embeddings), in
    bytes that are equal on every engine; empty for plain text.
    """

    __slots__ = ("_beside", "_block_hashes", "_tokens", "id", "n_prompt", "n_total", "params")

    def __init__(
        self,
        id: str,
        n_prompt: int,
        n_total: int,
        params: Mapping[str, Any] | None,
        tokens: Callable[[], Sequence[int]] = tuple,
        block_hashes: Callable[[], Sequence[bytes]] = tuple,
        beside: Callable[[int], bytes] = lambda n: b"",
    ) -> None:
        self.id = id
        self.n_prompt = n_prompt
        self.n_total = n_total
        self.params = params
        self._tokens = tokens
        self._block_hashes = block_hashes
        self._beside = beside

    def tokens(self) -> Sequence[int]:
        return self._tokens()

    def block_hashes(self) -> Sequence[bytes]:
        return self._block_hashes()

    def beside(self, n_tokens: int) -> bytes:
        return self._beside(n_tokens)

    def __repr__(self) -> str:
        return f"RequestView({self.id} prompt={self.n_prompt} total={self.n_total} params={self.params is not None})"


class KVBlocks(msgspec.Struct, frozen=True):
    """Blocks of one request. The first ``hashed[g]`` blocks of group g were prefix hits: their content stands."""

    ids: BlockIds
    hashed: tuple[int, ...]


class StepRequest(msgspec.Struct, frozen=True):
    """One request's share of a step: ``n`` tokens from position ``start``; ``new_blocks`` were added for it."""

    id: str
    start: int
    n: int
    new_blocks: BlockIds = ()


class StepView(msgspec.Struct, frozen=True):
    """One engine step, also an empty one. ``finished`` ended since the last step."""

    seq: int
    requests: Collection[StepRequest] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()


# --- what crosses between the halves ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConnectorMetadata:
    """Base of what a scheduler half ships to its worker halves with a step. Pickled by the engine."""


@dataclass(frozen=True)
class HandshakeMetadata:
    """Base of what a serving worker half publishes to peers through its scheduler half."""


class Fact(msgspec.Struct, frozen=True):
    """One rank's word on one life: ``(id, direction, n)``, who says it, and what it says (C3, C4).

    ``more``: ranks that say the same, as bits; only facts that were joined have it.

    ``child`` is the path of the reporting connector below the outermost one, outermost index first. ``why``, of a
    failure: peer, stage and age, for whoever asked for the load.
    """

    id: str
    direction: Direction
    n: int
    rank: int
    state: FactState
    child: tuple[int, ...] = ()
    why: str = ""
    more: int = 0

    @property
    def ranks(self) -> int:
        """Who says it, as bits."""
        return self.more | (1 << self.rank if 0 <= self.rank < MAX_RANKS else 0)


class RankFacts(Collection[Fact]):
    """Facts of one rank as they leave its process: encoded, and without the rank, so that ranks that say the same have
    the same bytes. Decoded by whoever looks."""

    __slots__ = ("encoded", "rank")

    def __init__(self, rank: int, encoded: bytes) -> None:
        self.rank = rank
        self.encoded = encoded

    @classmethod
    def of(cls, facts: Collection[Fact]) -> Collection[Fact]:
        """Encoded, if they are of one rank alone and their ids are text, which a client's need not be."""
        ranks = {-1 if fact.more else fact.rank for fact in facts}
        rank = ranks.pop() if len(ranks) == 1 else -1
        if not 0 <= rank < MAX_RANKS:
            return tuple(facts)
        try:
            return cls(rank, _encode([(f.id, f.direction, f.n, f.state, f.child, f.why) for f in facts]))
        except UnicodeEncodeError:  # half a surrogate pair, from a client's JSON
            return tuple(facts)

    def by(self, ranks: int) -> list[Fact]:
        """As said by ``ranks``, as bits."""
        rank = (ranks & -ranks).bit_length() - 1
        more = 0 if ranks == 1 << rank else ranks
        return [
            Fact(id, direction, n, rank, state, child, why, more)
            for id, direction, n, state, child, why in _decode(self.encoded)
        ]

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.by(1 << self.rank))

    def __len__(self) -> int:
        return len(_decode(self.encoded))

    def __bool__(self) -> bool:
        return True  # nothing is not encoded

    def __contains__(self, fact: object) -> bool:
        return fact in tuple(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collection) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RankFacts({self.rank}: {len(self)})"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, Direction, int, FactState, tuple[int, ...], str]]).decode


class JoinedFacts(Collection[Fact]):
    """Facts of several ranks, those that say the same as one, failures first; grows as ranks are added."""

    __slots__ = ("_joined", "_loose", "_same")

    def __init__(self, facts: Collection[Fact]) -> None:
        #: what came encoded -> the ranks whose it is
        self._same: dict[bytes, int] = {}
        self._loose: list[Fact] = []
        self._joined: list[Fact] | None = None
        self.add(facts)

    def add(self, facts: Collection[Fact]) -> None:
        """What a rank says, or several."""
        self._joined = None
        if isinstance(facts, RankFacts):
            ranks, bit = self._same.get(facts.encoded, 0), 1 << facts.rank
            if not ranks & bit:
                self._same[facts.encoded] = ranks | bit
                return
        self._loose += facts

    def _all(self) -> list[Fact]:
        if self._joined is None:
            said = [RankFacts(0, encoded).by(ranks) for encoded, ranks in self._same.items()]
            joined = said[0] if len(said) == 1 and not self._loose else _joined(itertools.chain(*said, self._loose))
            if any(fact.state == "failed" for fact in joined):
                joined.sort(key=lambda fact: fact.state != "failed")  # a rank is quiet after it failed
            self._joined = joined
        return self._joined

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        return bool(self._same or self._loose)

    def __contains__(self, fact: object) -> bool:
        return fact in tuple(self)

    def __repr__(self) -> str:
        return f"JoinedFacts({len(self)})"


def _joined(facts: Iterable[Fact]) -> list[Fact]:
    """Those that say the same as one; what a rank says twice comes again, to be counted."""
    first: dict[tuple[object, ...], Fact] = {}
    ranks: dict[tuple[object, ...], int] = {}
    again: list[Fact] = []
    for fact in facts:
        about = (fact.n, fact.id, fact.state, fact.direction, fact.child)
        others = ranks.get(about, 0)
        if not others:
            first[about] = fact
        ranks[about] = both = others | fact.ranks
        if both == others:
            again.append(fact)
    joined = [
        one if ranks[about] == one.ranks else msgspec.structs.replace(one, more=ranks[about])
        for about, one in first.items()
    ]
    return joined + again


class Published(msgspec.Struct, frozen=True):
    """Handshake metadata of a serving rank that changed after start-up, by the rank's place and its child's path."""

    pp: int
    tp: int
    payload: bytes
    child: tuple[int, ...] = ()


class WorkerFacts(msgspec.Struct, frozen=True):
    """A worker half's facts of one step; ranks' facts are joined in rank order."""

    facts: Collection[Fact] = ()
    published: tuple[Published, ...] = ()

    def aggregate(self, other: WorkerFacts) -> WorkerFacts:
        """Both. What was joined before grows, and is the new one's: a thousand ranks are joined one by one."""
        grown = isinstance(self.facts, JoinedFacts)
        joined = self.facts if isinstance(self.facts, JoinedFacts) else JoinedFacts(self.facts)
        joined.add(other.facts)
        return self if grown and not other.published else WorkerFacts(joined, self.published + other.published)

    def __reduce__(self) -> tuple[object, ...]:
        return WorkerFacts, (RankFacts.of(self.facts), self.published)


class TransferResults(msgspec.Struct, frozen=True):
    """What one poll of one worker half found. Consumed by that poll."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()


#: most polls find nothing
NO_RESULTS: Final = TransferResults()


@dataclass
class KVConnectorOutput:
    """A worker's connector results for one step, and, aggregated, the engine's.

    ``failure_reasons``: why those of ``failed_recving`` failed, where the scheduler half knows it.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    failure_reasons: dict[str, str] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        """Nobody says anything that a connector decides about: so are most steps."""
        return self.kv_connector_worker_meta is None and not (
            self.finished_sending or self.finished_recving or self.failed_recving or self.invalid_block_ids
        )


class KVConnector(ABC):
    """A KV connector: one class, two roles.

    The engine makes one instance with ``ConnectorRole.SCHEDULER`` beside its scheduler and one with
    ``ConnectorRole.WORKER`` in every worker process, and calls the methods of that half only. Constructor:
    ``Connector(config, role, kv_cache)`` with a :class:`kvconn.config.ConnectorConfig` and a :class:`KVCacheView`.

    **Contract.** When ``request_finished`` returned True for a request, every worker half of the engine reports that
    id exactly once as finished sending, after the metadata that announces it was bound (C1); the engine frees the
    blocks when it has heard all of them. When ``update_state_after_alloc`` gave blocks for external tokens of an
    asynchronous load, every worker half reports that id exactly once as finished receiving.
    """

    role: ConnectorRole
    #: False: an output that is ``silent`` changes nothing in this half, which need not be shown it
    hears_silence: bool = True
    _metadata: ConnectorMetadata | None = None

    # -- scheduler half ------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """A request entered the engine's queue. Called once per request."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` (a block-aligned local hit) this connector can bring.

        Returns ``(n, asynchronous)``; ``n`` None means "not yet, ask again". Idempotent (C10).
        """
        return 0, False

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        """Blocks were given to an admitted request; ``num_external_tokens`` of them are this connector's to fill."""

    @abstractmethod
    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """What the worker halves must know of this step. Called once per step, empty ones included."""

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Returns ``(delay the free, kv_transfer_params for the client)``."""
        return False, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Called with the aggregated output before the engine reads it. May replace its sets: veto, never originate."""

    def get_finished_count(self) -> int | None:
        """How many reports complete an id; None: one per worker of the engine (C2)."""
        return None

    def set_handshake_metadata(self, metadata: Mapping[tuple[int, int], HandshakeMetadata]) -> None:
        """The worker halves' handshake metadata, by (pp rank, tp rank)."""

    def drain(self) -> None:
        """The engine is about to end: hold nothing for requests that arrive from now on. What arrived before goes on as
        ever; the engine goes on stepping until nothing is delayed, or no time is left. Idempotent."""

    def has_pending_push_work(self) -> bool:
        """True while this half needs empty steps although no request is delayed."""
        return False

    def take_events(self) -> Iterable[Any]:
        """KV events since the last call."""
        return ()

    def reset_cache(self) -> bool | None:
        """Forget cached content. False: could not."""
        return None

    # -- worker half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        """The cache tensors of this rank, once, before the first step."""

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        """What peers need to read from this rank; None if it serves nobody."""
        return None

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """This step's metadata, before any forward of the step."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._metadata = None

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Called every step before ``bind_connector_metadata``, before any block of the step is written."""

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        """Start this step's loads. Must not block on the network."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before layer ``layer_name`` reads its cache."""

    def save_kv_layer(self, layer_name: str, **kwargs: object) -> None:
        """After layer ``layer_name`` wrote its cache."""

    def wait_for_save(self) -> None:
        """After the forward, also of an empty step."""

    @abstractmethod
    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """The poll: what finished on this rank since the last one (C5). Consumes."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The older poll; the same results, derived (C5). Consumes."""
        results = self.get_transfer_results(finished_req_ids)
        return set(results.finished_sending), set(results.finished_recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Unused: failures are reported per request (docs/design.md, vLLM)."""
        return set()

    def build_connector_worker_meta(self) -> Any:
        """Facts beside the sets, after the poll: a :class:`WorkerFacts` or None."""
        return None

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        """Counters since the last call, or None: a :class:`kvconn.metrics.Stats`."""
        return None

    def explain(self, now: float) -> list[str]:
        """One line per thing that this half waits for or holds: request, stage, who owes, age in seconds.

        For the stall table and ``kvconn explain``, which asks from another thread: it must change nothing.
        """
        return []

    def shutdown(self) -> None:
        """Stop threads, close sockets, destroy agents. Idempotent."""
