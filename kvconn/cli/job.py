"""A replay from its settings: what runs where, and running it.

Rules
1. :func:`plan` decides everything and touches only the trace file; what cannot work is a ConfigError before a process
   starts, every problem at once where they are independent.
2. :func:`run` starts engines and, whatever happens, shuts all of them down.
3. P and D have the sizes that were asked for, P eight PCP ranks and D one without, and the connectors of
   :mod:`kvconn.cli.connectors`; the yardstick is one worker without a connector.
4. Files of a replay are in a directory of its own, which is removed however it ends.
5. The engines of a run share a fleet key of their own, drawn for it and gone after it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec.structs import replace

from kvconn.cli.connectors import OFFLOAD_BYTES, Offload, decode_connectors, loads, offloading, prefill_connectors
from kvconn.cli.verdict import Contract
from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess
from kvconn.engine.config import EngineConfig, ModelSpec, check, kv_cache_view
from kvconn.engine.ports import free_ports
from kvconn.engine.router import (
    Progress,
    ReplayReport,
    Router,
    decode_blocks,
    make_report,
    prefill_blocks,
    run_monolithic,
)
from kvconn.engine.trace import TraceRequest, read_trace, to_requests
from kvconn.errors import ConfigError, EngineDeadError

__all__ = ["Plan", "Settings", "plan", "run", "shipped_trace"]

Mode = Literal["transformer", "content-addressed"]
Kv = Literal["latent", "gqa"]
BLOCK_SIZE = 16
GIB = 1 << 30
REQUESTS = 48
PCP = 8
SIZES = ("p_tp", "p_pp", "p_dcp", "d_tp", "d_pp", "d_dcp")
#: how long nothing may move, beyond the age at which engines name a pending release
STALL_SLACK = 5.0
STALL_AFTER: dict[Contract, float] = {"world": 30.0, "hidden-ranks": 10.0}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says.

    ``trace`` None: the shipped one; ``requests`` None: as many as are useful; ``pcp`` None: eight ranks, or one where P
    has another size.
    """

    trace: Path | None = None
    scale: int = 32
    requests: int | None = None
    concurrency: int = 16
    mode: Mode = "transformer"
    kv: Kv = "latent"
    contract: Contract = "world"
    offload: Offload = "hold"
    pcp: int | None = None
    p_tp: int = 1
    p_pp: int = 1
    p_dcp: int = 1
    d_tp: int = 1
    d_pp: int = 1
    d_dcp: int = 1
    window: int = 0
    ucx_tls: str | None = None
    stall_after: float | None = None
    seed: int = 0

    @property
    def p(self) -> ParallelConfig:
        """P's sizes."""
        others = (self.p_tp, self.p_pp, self.p_dcp)
        pcp = self.pcp if self.pcp is not None else PCP if others == (1, 1, 1) else 1
        return ParallelConfig(tp=self.p_tp, pp=self.p_pp, pcp=pcp, dcp=self.p_dcp)

    @property
    def d(self) -> ParallelConfig:
        """D's sizes."""
        return ParallelConfig(tp=self.d_tp, pp=self.d_pp, dcp=self.d_dcp)


class Plan(msgspec.Struct, frozen=True):
    """Everything a replay needs, checked. ``monolithic`` None: nothing to compare, a stall is expected.

    ``files``: a directory to make for the replay and to remove afterwards.
    """

    requests: tuple[TraceRequest, ...]
    concurrency: int
    stall_limit: float
    prefill: EngineConfig
    decode: EngineConfig
    monolithic: EngineConfig | None
    files: Path | None = None


class Watcher(Protocol):
    """Is told how far a replay is; :class:`kvconn.cli.show.View` is one."""

    def phase(self, what: str) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def compared(self, finished: int, total: int) -> None: ...


# --- deciding -----------------------------------------------------------------------------------------------------


def plan(settings: Settings) -> Plan:
    """The replay these settings ask for. Raises ConfigError."""
    _check(settings)
    model = ModelSpec(mode=settings.mode, kv=settings.kv, window=settings.window, seed=settings.seed)
    requests = _requests(settings, model)
    stall_after = settings.stall_after if settings.stall_after is not None else STALL_AFTER[settings.contract]
    in_flight = settings.concurrency
    ports = free_ports(2)
    base = EngineConfig(
        name="M",
        num_blocks=decode_blocks(requests, in_flight, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=in_flight,
        model=model,
        env={"UCX_TLS": settings.ucx_tls} if settings.ucx_tls else {},
        stall_after=stall_after,
    )
    p, d = settings.p, settings.d
    pool = prefill_blocks(requests, in_flight, BLOCK_SIZE * p.dcp)
    files = _scratch() if settings.offload == "tiering" else None
    host_bytes = pool * kv_cache_view(base).block_bytes if files is not None else OFFLOAD_BYTES
    sibling = offloading(settings.offload, host_bytes, files)
    decode = replace(
        base,
        name="D",
        parallel=d,
        kv_transfer_config=decode_connectors(settings.offload, sibling),
        num_blocks=decode_blocks(requests, in_flight, BLOCK_SIZE * d.dcp),
        port=ports[0],
    )
    prefill = replace(
        base,
        name="P",
        parallel=p,
        kv_transfer_config=prefill_connectors(settings.contract, settings.offload, sibling),
        num_blocks=pool,
        port=ports[1],
    )
    for config in (prefill, decode, base):
        check(config)
    _check_memory(prefill, decode, host_bytes if loads(settings.offload) else 0)
    return Plan(
        requests=tuple(requests),
        concurrency=in_flight,
        stall_limit=stall_after + STALL_SLACK,
        prefill=prefill,
        decode=decode,
        monolithic=base if settings.contract == "world" else None,
        files=files,
    )


def _scratch() -> Path:
    """Where nobody has a directory."""
    return Path(tempfile.gettempdir(), f"kvconn-replay-{secrets.token_hex(8)}")


@contextmanager
def shipped_trace() -> Iterator[Path]:
    """The small trace of our own, as a file."""
    with resources.as_file(resources.files("kvconn.data").joinpath("trace-small.jsonl")) as path:
        yield path


def _check_memory(prefill: EngineConfig, decode: EngineConfig, host_bytes: int) -> None:
    """Pools and each rank's host tier must fit; the yardstick's is D's size and runs when P and D are gone."""
    tiers = host_bytes * (prefill.parallel.world + decode.parallel.world)
    needed, available = kv_bytes(prefill) + kv_bytes(decode) + tiers, memory_limit()
    if needed > available:
        raise ConfigError(
            f"the KV caches of P and D need {needed / GIB:.1f} GiB, {available / GIB:.1f} GiB are available for them:"
            " raise --scale or lower --concurrency"
        )


def kv_bytes(config: EngineConfig) -> int:
    """What the pools of all ranks take at most."""
    return config.num_blocks * kv_cache_view(config).block_bytes * config.parallel.world


def memory_limit(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that pools may take: most of what this machine has to give."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        found = None
    return int(found[1]) * 1024 * 6 // 10 if found else 8 * GIB


def _check(settings: Settings) -> None:
    problems = []
    if settings.concurrency < 1:
        problems.append(f"--concurrency: expected at least 1, got {settings.concurrency}")
    if settings.requests is not None and settings.requests < max(1, settings.concurrency):
        problems.append(
            f"--requests: expected at least as many as --concurrency {settings.concurrency}, got {settings.requests}"
        )
    sizes = ("pcp", settings.p.pcp), *((name, getattr(settings, name)) for name in SIZES)
    problems += [f"--{name.replace('_', '-')}: expected at least 1, got {size}" for name, size in sizes if size < 1]
    if settings.contract == "hidden-ranks" and settings.p.pcp < 2:
        problems.append(f"--pcp: hidden-ranks hides ranks > 0, expected at least 2, got {settings.p.pcp}")
    if settings.window and settings.offload != "off":
        problems.append(f"--window: the sibling stores whole prompts, expected --offload off, got {settings.offload}")
    if settings.stall_after is not None and not 0 < settings.stall_after < 1e6:
        problems.append(f"--stall-after: expected seconds > 0, got {settings.stall_after}")
    if problems:
        raise ConfigError(problems)


def _requests(settings: Settings, model: ModelSpec) -> list[TraceRequest]:
    if settings.trace is not None:
        rows = read_trace(settings.trace)
    else:
        with shipped_trace() as path:
            rows = read_trace(path)
    wanted = settings.requests if settings.requests is not None else min(max(REQUESTS, settings.concurrency), len(rows))
    given = [("--requests", wanted), ("--concurrency", settings.concurrency)]
    if above := [f"{name} {value}" for name, value in given if value > len(rows)]:
        raise ConfigError(f"the trace has only {len(rows)} requests: lower {' and '.join(above)} to that at most")
    return to_requests(rows[:wanted], scale=settings.scale, block_size=BLOCK_SIZE, vocab_size=model.vocab_size)


# --- running ------------------------------------------------------------------------------------------------------


def run(job: Plan, watcher: Watcher) -> ReplayReport:
    """Replay, drain, compare. Raises EngineDeadError, ContractError (the yardstick failed), ConfigError."""
    watcher.phase(
        f"starting P ({_sizes(job.prefill)}{job.prefill.num_blocks} blocks) and D"
        f" ({_sizes(job.decode)}{job.decode.num_blocks} blocks)"
    )
    with (
        _files(job.files),
        fleet_key() as file,
        engines(keyed(job.prefill, file), keyed(job.decode, file)) as (prefill, decode),
    ):
        watcher.phase(f"replaying {len(job.requests)} requests, {job.concurrency} in flight")
        replayed = Router(
            prefill,
            decode,
            job.requests,
            concurrency=job.concurrency,
            stall_limit=job.stall_limit,
            drain_limit=job.stall_limit,
            on_progress=watcher.progress,
        ).run()
    floor = job.prefill.model.margin_floor
    if job.monolithic is None or replayed.stall is not None:
        return make_report(replayed, None, floor)
    watcher.phase("running the same requests on one engine, to compare")
    with engines(job.monolithic) as (engine,):
        expected = run_monolithic(engine, job.requests, stall_limit=job.stall_limit, on_progress=watcher.compared)
    return make_report(replayed, expected, floor)


def _sizes(config: EngineConfig) -> str:
    """The sizes that are not 1, for a line that goes on."""
    sizes = {name: getattr(config.parallel, name) for name in ("tp", "pp", "pcp", "dcp")}
    return "".join(f"{name}={size}, " for name, size in sizes.items() if size != 1)


@contextmanager
def fleet_key() -> Iterator[str]:
    """A file with a secret that nobody else has."""
    with tempfile.TemporaryDirectory(prefix="kvconn-") as directory:
        file = os.path.join(directory, "fleet.key")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32))
        yield file


def keyed(config: EngineConfig, file: str) -> EngineConfig:
    """The same engine with the fleet key in this file."""
    return replace(config, kv_transfer_config=_keyed(config.kv_transfer_config or {}, file))


def _keyed(transfer: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Every NIXL connector in ``transfer`` gets it."""
    extra = dict(transfer.get("kv_connector_extra_config", {}))
    if "connectors" in extra:
        extra["connectors"] = [_keyed(child, file) for child in extra["connectors"]]
    elif "Nixl" in transfer["kv_connector"]:
        extra["kvconn"] = {**extra.get("kvconn", {}), "key_file": file}
    return {**transfer, "kv_connector_extra_config": extra}


@contextmanager
def _files(folder: Path | None) -> Iterator[None]:
    if folder is not None:
        folder.mkdir(mode=0o700)
    try:
        yield
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def engines(*configs: EngineConfig) -> Iterator[tuple[EngineProcess, ...]]:
    """Started engines, shut down in reverse order however the block ends."""
    with ExitStack() as shutdowns:
        made = tuple(EngineProcess(config) for config in configs)
        for one in made:
            shutdowns.callback(one.shutdown)
            _start(one)
        yield made


def _start(engine: EngineProcess) -> None:
    """Start it. UCX's transports are the operator's choice: that they do not work is a ConfigError."""
    try:
        engine.start()
    except EngineDeadError as err:
        chosen = engine.config.env.get("UCX_TLS")
        if chosen is None or "TransportError" not in str(err):
            raise
        why = str(err).strip().splitlines()[-1].rpartition("TransportError: ")[2]
        raise ConfigError(f"--ucx-tls {chosen}: engine {engine.config.name} has no transport with it: {why}") from None
