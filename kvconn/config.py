"""``kv_transfer_config`` JSON to frozen Structs; every problem at once, with the path of its key.

Rules
1. Nothing past this module sees a dict of settings: a problem is found here, at start-up, or not at all.
2. All problems are collected before one :class:`~kvconn.errors.ConfigError` is raised; an unknown key names the key
   that was probably meant.
3. Every deadline and bound of the library stands in the table :class:`Limits`.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvconn.errors import ConfigError

__all__ = [
    "ChildConfig",
    "ConnectorConfig",
    "FsTierSettings",
    "KVTransferConfig",
    "Limits",
    "ModelView",
    "ModuleTierSettings",
    "Network",
    "NixlSettings",
    "OffloadSettings",
    "ParallelConfig",
    "network",
    "parse_child",
    "parse_extra",
    "parse_kv_transfer_config",
    "parse_secondary_tiers",
    "parse_struct",
]

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
ROLES: tuple[str, ...] = ("kv_producer", "kv_consumer", "kv_both")
#: key -> the words it may have, to name the one that was probably meant
KNOWN_VALUES: dict[str, tuple[str, ...]] = {
    "kv_role": ROLES,
    "spec_name": ("CPUOffloadingSpec", "TieringOffloadingSpec"),
    "eviction_policy": ("lru", "arc"),
}
T = TypeVar("T", bound=msgspec.Struct)
#: a deadline: finite and after now (C7).
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Limits(msgspec.Struct, frozen=True):
    """The defaults of every deadline and bound, in one table; seconds unless said otherwise (C7)."""

    handshake: float = 10.0
    read: float = 60.0
    store: float = 60.0
    load: float = 60.0
    #: an engine that was told to end waits so long for what runs on it and for readers of what it holds
    drain: float = 30.0
    #: how long a request waits for a disk to say what it has and to bring it; after that it is computed
    lookup: float = 0.5
    #: how long the engine itself waits for that, once per request; a disk that is quick answers within it
    lookup_inline: float = 500e-6
    #: how long a disk that was too slow is not asked
    disk_rest: float = 30.0
    #: how long a step waits for the copy of one block that it is about to overwrite
    flush: float = 1.0
    #: a thread that may hang in a disk's driver, when it was told to end
    end_disk: float = 1.0
    lease: float = 30.0
    stall_after: float = 30.0
    quarantine_age: float = 60.0
    #: of the pool
    quarantine_share: float = 0.25
    pump_interval: float = 200e-6
    #: a worker's answer to one step of the reference engine, and its start
    step: float = 60.0
    start: float = 120.0
    #: a worker's end when it was told to, and an engine's, which waits for its workers
    end_worker: float = 10.0
    end_engine: float = 20.0
    #: a thread of ours that was told to end; the answer to ``kvconn explain``; a probe of what UCX may use
    end_thread: float = 10.0
    explain: float = 5.0
    probe: float = 10.0
    #: early notifications kept, requests waiting for one peer's handshake, peers known at once
    early_max: int = 4096
    waiting_max: int = 4096
    peers_max: int = 4096
    #: connections and requests per second that one address is answered, ten seconds' worth at once; addresses counted
    #: at once
    handshake_rate: int = 100
    addresses_max: int = 4096
    #: connections at a side channel, at most, and how long one may stay without a request
    connections_max: int = 4096
    connection_idle: float = 30.0
    #: names of peers that are being looked up, and threads that do it
    names_max: int = 128
    name_threads: int = 4
    #: seconds between two log lines about handshakes that were refused for one reason
    complain: float = 60.0
    #: blocks on their way to the host tier, to and from the secondary tiers; look-ups under way; events kept
    stores_max: int = 4096
    saves_max: int = 256
    #: bytes that a rank copies at once to write them to a secondary tier, unless one block has more
    save_bytes: int = 8 << 20
    fetches_max: int = 1024
    lookups_max: int = 64
    events_max: int = 4096


LIMITS = Limits()


class NixlKvconn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``kvconn`` object in a NixlConnector's ``kv_connector_extra_config``."""

    handshake: Seconds = LIMITS.handshake
    read: Seconds = LIMITS.read
    quarantine_age: Seconds = LIMITS.quarantine_age
    #: blocks; None: a quarter of the pool
    quarantine_max: Count | None = None
    pump_interval: Seconds = LIMITS.pump_interval
    early_max: Count = LIMITS.early_max
    waiting_max: Count = LIMITS.waiting_max
    peers_max: Count = LIMITS.peers_max
    progress: Literal["nixl", "pump", "poll"] = "pump"
    #: off: a peer on this host too is read by UCX, part by part
    batch_reads: Literal["auto", "off"] = "auto"
    #: reads from a peer that has no fence, whose bytes nothing can prove
    unfenced: Literal["allow", "refuse"] = "allow"
    #: the fleet's secret, for the side channel and for references; without it nothing is authenticated (SECURITY.md)
    key_file: Annotated[str, msgspec.Meta(pattern="^/", max_length=4096)] | None = None
    #: no key is an error at start-up
    require_auth: bool = False
    #: networks (CIDR) that peers may be in; None: anywhere
    allow: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=1024)] | None = None
    #: connections and requests per second that one address is answered
    handshake_rate: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = LIMITS.handshake_rate


class OffloadKvconn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``kvconn`` object in an OffloadingConnector's ``kv_connector_extra_config``."""

    store: Seconds = LIMITS.store
    load: Seconds = LIMITS.load
    lookup: Seconds = LIMITS.lookup
    disk_rest: Seconds = LIMITS.disk_rest
    stores_max: Count = LIMITS.stores_max
    saves_max: Count = LIMITS.saves_max
    fetches_max: Count = LIMITS.fetches_max
    #: hold every request until its blocks are stored
    hold: bool = False


class NixlSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config`` of a NixlConnector."""

    backends: tuple[str, ...] = ("UCX",)
    num_threads: Annotated[int, msgspec.Meta(ge=0)] = 4
    kv_lease_duration: Seconds = LIMITS.lease
    #: accepted because operators' files have it; this version does not use it
    kv_recompute_threshold: Annotated[int, msgspec.Meta(ge=0)] = 64
    engine_ttl: Seconds = 3600.0
    enforce_handshake_compat: bool = True
    kvconn: NixlKvconn = NixlKvconn()


class OffloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config`` of an OffloadingConnector. ``cpu_bytes_to_use`` per rank."""

    spec_name: Literal["CPUOffloadingSpec", "TieringOffloadingSpec"] = "CPUOffloadingSpec"
    cpu_bytes_to_use: int = 64 << 20
    eviction_policy: Literal["lru", "arc"] = "lru"
    #: false: blocks of generated tokens are stored too
    offload_prompt_only: bool = True
    secondary_tiers: tuple[dict[str, Any], ...] = ()
    kvconn: OffloadKvconn = OffloadKvconn()


class FsTierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file tier: blocks below ``root_dir``, ``max_bytes`` per rank."""

    type: Literal["fs"]
    root_dir: Annotated[str, msgspec.Meta(pattern="^/")]
    max_bytes: Count


class ModuleTierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tier from elsewhere: class ``type`` in ``module_path``, which is given ``settings`` as they are."""

    type: str
    module_path: str
    settings: dict[str, Any] = {}


class MultiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config`` of a MultiConnector: ``connectors`` are :class:`ChildConfig` objects."""

    connectors: tuple[dict[str, Any], ...]


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ``kv_transfer_config``. ``engine_id`` None: a fresh one is drawn.

    ``kv_buffer_device``, ``kv_port`` and ``enable_permute_local_kv`` are accepted because operators' files have them;
    this version uses none of them.
    """

    kv_connector: str
    kv_role: Role
    engine_id: str | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}
    kv_buffer_device: str = "cpu"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    enable_permute_local_kv: bool = False


class ChildKvconn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``kvconn`` object beside ``kv_connector`` in an entry of ``connectors``, for the MultiConnector alone.

    ``quorum``: that many distinct ranks complete the child's sends; the others really serve nobody (C2).
    """

    quorum: Count | None = None


class ChildConfig(KVTransferConfig, frozen=True, forbid_unknown_fields=True):
    """An entry of a MultiConnector's ``connectors``."""

    kvconn: ChildKvconn = ChildKvconn()

    @property
    def kv_transfer(self) -> KVTransferConfig:
        """What the child itself is given."""
        own = msgspec.structs.asdict(self)
        del own["kvconn"]
        return KVTransferConfig(**own)


class ParallelConfig(msgspec.Struct, frozen=True):
    """Sizes of one engine. Ranks are ordered pp-major, then pcp, then tp: ``rank = (pp * PCP + pcp) * TP + tp``.

    ``dcp`` ranks share the tokens of every block, ``dcp_interleave`` tokens at a time; a group of them is TP ranks, or,
    with pcp > 1, all PCP ranks.
    """

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    dcp_interleave: int = 1
    dp_rank: int = 0

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.pcp

    @property
    def output_rank(self) -> int:
        """The first rank of the last pipeline stage."""
        return self.world - self.tp * self.pcp


class ModelView(msgspec.Struct, frozen=True):
    """What of the model decides the meaning of KV bytes. ``head_size`` in elements, ``num_kv_heads`` of all ranks,
    ``block_size`` in tokens of a block on one rank.

    ``packing``: ``latent`` (one shared row per token, MLA), ``kv`` (K and V packed in one tensor).
    """

    name: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    packing: Literal["latent", "kv"] = "latent"


class ConnectorConfig(msgspec.Struct, frozen=True):
    """Everything a connector is constructed from. ``rank`` is None on the scheduler half."""

    kv_transfer: KVTransferConfig
    engine_id: str
    parallel: ParallelConfig
    model: ModelView
    rank: int | None = None
    host: str = "127.0.0.1"
    port: int = 5600


def parse_kv_transfer_config(
    raw: str | bytes | Mapping[str, Any], path: str = "kv_transfer_config"
) -> KVTransferConfig:
    """JSON (text or object) to a checked :class:`KVTransferConfig`. Raises ConfigError with every problem found.

    The connector's own ``kv_connector_extra_config`` is checked by :func:`parse_extra` with the connector's settings
    type; children of a MultiConnector by this function again.
    """
    if isinstance(raw, str | bytes):
        try:
            raw = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as err:
            raise ConfigError(f"{path}: not JSON: {err}") from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: expected an object, got {type(raw).__name__}")
    return _to_struct(KVTransferConfig, raw, path)


def parse_child(raw: Mapping[str, Any], path: str) -> ChildConfig:
    """An entry of a MultiConnector's ``connectors``. Raises ConfigError with every problem found."""
    return _to_struct(ChildConfig, raw, path)


def parse_extra(kind: type[T], config: KVTransferConfig, path: str = "kv_transfer_config") -> T:
    """``kv_connector_extra_config`` as ``kind``. Raises ConfigError with every problem found."""
    return _to_struct(kind, config.kv_connector_extra_config, f"{path}.kv_connector_extra_config")


def parse_secondary_tiers(
    settings: OffloadSettings, path: str = "kv_transfer_config.kv_connector_extra_config.secondary_tiers"
) -> list[tuple[str, FsTierSettings | ModuleTierSettings]]:
    """Each tier with its path. Raises ConfigError with every problem of every tier."""
    tiers: list[tuple[str, FsTierSettings | ModuleTierSettings]] = []
    problems: list[str] = []
    for index, raw in enumerate(settings.secondary_tiers):
        where = f"{path}[{index}]"
        kind: type[FsTierSettings | ModuleTierSettings] = ModuleTierSettings if "module_path" in raw else FsTierSettings
        if kind is FsTierSettings and "type" in raw and raw["type"] != "fs":
            problems.append(
                f"{where}.type: expected 'fs', or a class beside a module_path, "
                f"got {raw['type']!r}{_hint(raw['type'], ['fs'])}"
            )
            continue
        try:
            tiers.append((where, _to_struct(kind, raw, where)))
        except ConfigError as err:
            problems += err.problems
    if problems:
        raise ConfigError(problems)
    return tiers


def parse_struct(kind: type[T], raw: Mapping[str, Any], path: str) -> T:
    """``raw`` as ``kind``. Raises ConfigError with every problem found."""
    return _to_struct(kind, raw, path)


def fresh_engine_id(config: KVTransferConfig) -> str:
    """The configured engine id, or an unguessable one."""
    return config.engine_id or uuid.uuid4().hex


def side_channel_address() -> tuple[str, int]:
    """Host and base port of the side channel, from vLLM's variables. Raises ConfigError."""
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    raw = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 5) or not 0 < int(raw) < 65536:
        raise ConfigError(f"VLLM_NIXL_SIDE_CHANNEL_PORT: expected a port 1..65535, got {raw!r}")
    return host, int(raw)


def network(text: str) -> Network:
    """``10.0.0.0/8``, ``fd00::/8``, or one address. Raises ValueError."""
    found = ipaddress.ip_network(text)
    if isinstance(found, ipaddress.IPv6Network) and found.network_address.ipv4_mapped is not None:
        raise ValueError(f"{text!r} is IPv4 within IPv6: write it as IPv4")
    return found


def _networks_problem(texts: Sequence[str] | None) -> str | None:
    for text in texts or ():
        try:
            network(text)
        except ValueError as err:
            return f"expected networks such as '10.0.0.0/8' or 'fd00::/8': {err}"
    return None


#: key -> what its type cannot say: the problem of a value, or None
CHECKS: dict[str, Callable[[Any], str | None]] = {"allow": _networks_problem}


def _to_struct(kind: type[T], raw: Mapping[str, Any], path: str) -> T:
    problems: list[str] = []
    _collect(kind, raw, path, problems)
    if problems:
        raise ConfigError(problems)
    return msgspec.convert(raw, kind, strict=True)


def _collect(kind: type[msgspec.Struct], raw: Mapping[str, Any], path: str, problems: list[str]) -> None:
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    for key in raw:
        if key not in fields:
            problems.append(f"{path}.{key}: unknown key{_hint(key, list(fields))}")  # noqa: PERF401 - one way to add
    for name, info in fields.items():
        if name not in raw:
            if info.required:
                problems.append(f"{path}.{name}: missing")
            continue
        value = raw[name]
        if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct) and isinstance(value, Mapping):
            _collect(info.type, value, f"{path}.{name}", problems)
            continue
        try:
            if isinstance(value, str):
                value.encode()  # JSON may hold lone surrogates
            msgspec.convert(value, info.type, strict=True)
        except (msgspec.ValidationError, UnicodeError) as err:
            problems.append(f"{path}.{name}: {err}{_value_hint(name, value)}")
            continue
        why = CHECKS[name](value) if name in CHECKS else None
        if why is not None:
            problems.append(f"{path}.{name}: {why}")


def _hint(key: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(key), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _value_hint(name: str, value: object) -> str:
    known = KNOWN_VALUES.get(name)
    return _hint(value, known) if known is not None and isinstance(value, str) else ""
