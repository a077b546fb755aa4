"""The commands. Only :mod:`kvconn.cli.main` imports this module, after it has seen that typer and rich are there.

Rules
1. A command turns options into :class:`~kvconn.cli.job.Settings` (doctor: :class:`~kvconn.doctor.run.Options`), runs
   the job, prints, exits with the verdict's or the report's code.
2. A ConfigError is usage (2), a dead engine is wrong (1), Ctrl-C and SIGTERM shut the engines down first (130).
3. Whatever imports torch is imported inside the command.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import msgspec
import typer
from rich.console import Console

import kvconn
from kvconn.cli.verdict import INTERRUPTED, PIPE_CLOSED, USAGE, WRONG, judge
from kvconn.errors import ConfigError, KvconnError

if TYPE_CHECKING:
    from kvconn.chaos import run as chaos_run

__all__ = ["app"]

INTERRUPTED_ENGINES = "interrupted; the engines are shut down"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Requests = Annotated[int | None, typer.Option(help="Requests to replay; at least as many as --concurrency. [48]")]
Concurrency = Annotated[int, typer.Option(help="Requests in flight.")]
ModeOption = Annotated[Literal["transformer", "content-addressed"], typer.Option(help="What the engines compute.")]
KvOption = Annotated[
    Literal["latent", "gqa"],
    typer.Option(help="What a token keeps: one latent row (MLA), or keys and values per head."),
]
ContractOption = Annotated[
    Literal["world", "hidden-ranks"],
    typer.Option(help="hidden-ranks: P's ranks > 0 stay silent, as before the fix; the stall must be named (exit 3)."),
]
OffloadOption = Annotated[
    Literal["host", "tiering", "hold", "off"],
    typer.Option(
        help="The sibling. host: P and D keep prompt blocks in host memory and load them; tiering: in files too; hold:"
        " P holds each request until its blocks are stored; off: none."
    ),
]
Pcp = Annotated[
    int | None, typer.Option(help="P's prefill context-parallel ranks. [8; 1 where P has another size]", min=1)
]
PTp = Annotated[int, typer.Option("--p-tp", help="P's tensor-parallel ranks.", min=1)]
PPp = Annotated[int, typer.Option("--p-pp", help="P's pipeline stages.", min=1)]
PDcp = Annotated[int, typer.Option("--p-dcp", help="Ranks of P, TP or PCP, that share the tokens of a block.", min=1)]
DTp = Annotated[int, typer.Option("--d-tp", help="D's tensor-parallel ranks.", min=1)]
DPp = Annotated[int, typer.Option("--d-pp", help="D's pipeline stages.", min=1)]
DDcp = Annotated[int, typer.Option("--d-dcp", help="TP ranks of D that share the tokens of a block.", min=1)]
Window = Annotated[int, typer.Option(help="Tokens that every second layer sees; 0: all layers see all.", min=0)]
UcxTls = Annotated[str | None, typer.Option(help="UCX_TLS of both engines, e.g. tcp.")]
StallAfter = Annotated[
    float | None, typer.Option(help="Seconds until a pending release is named. [30; 10 with hidden-ranks]")
]
Seed = Annotated[int, typer.Option(help="Seed of the weights.")]
Json = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout instead of the table.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvconn {kvconn.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV-cache connectors for disaggregated LLM serving: run the whole path on this machine."""


@app.command()
def demo(
    requests: Requests = None,
    concurrency: Concurrency = 16,
    mode: ModeOption = "transformer",
    kv: KvOption = "latent",
    contract: ContractOption = "world",
    offload: OffloadOption = "hold",
    pcp: Pcp = None,
    p_tp: PTp = 1,
    p_pp: PPp = 1,
    p_dcp: PDcp = 1,
    d_tp: DTp = 1,
    d_pp: DPp = 1,
    d_dcp: DDcp = 1,
    window: Window = 0,
    ucx_tls: UcxTls = None,
    stall_after: StallAfter = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Replay the trace that ships with kvconn: P with eight ranks, D with one, NIXL between them."""
    _finish(
        as_json,
        requests=requests,
        concurrency=concurrency,
        mode=mode,
        kv=kv,
        contract=contract,
        offload=offload,
        pcp=pcp,
        p_tp=p_tp,
        p_pp=p_pp,
        p_dcp=p_dcp,
        d_tp=d_tp,
        d_pp=d_pp,
        d_dcp=d_dcp,
        window=window,
        ucx_tls=ucx_tls,
        stall_after=stall_after,
        seed=seed,
    )


@app.command()
def replay(
    trace: Annotated[Path, typer.Option(help="A trace in Mooncake's JSONL format.")],
    scale: Annotated[int, typer.Option(help="Divides lengths; a hash id stands for 512/scale tokens.")] = 32,
    requests: Requests = None,
    concurrency: Concurrency = 16,
    mode: ModeOption = "transformer",
    kv: KvOption = "latent",
    contract: ContractOption = "world",
    offload: OffloadOption = "hold",
    pcp: Pcp = None,
    p_tp: PTp = 1,
    p_pp: PPp = 1,
    p_dcp: PDcp = 1,
    d_tp: DTp = 1,
    d_pp: DPp = 1,
    d_dcp: DDcp = 1,
    window: Window = 0,
    ucx_tls: UcxTls = None,
    stall_after: StallAfter = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Replay a request trace through a prefill and a decode engine and compare with one engine alone."""
    _finish(
        as_json,
        trace=trace,
        scale=scale,
        requests=requests,
        concurrency=concurrency,
        mode=mode,
        kv=kv,
        contract=contract,
        offload=offload,
        pcp=pcp,
        p_tp=p_tp,
        p_pp=p_pp,
        p_dcp=p_dcp,
        d_tp=d_tp,
        d_pp=d_pp,
        d_dcp=d_dcp,
        window=window,
        ucx_tls=ucx_tls,
        stall_after=stall_after,
        seed=seed,
    )


@app.command()
def explain(
    pid: Annotated[int | None, typer.Option(help="Only the engines that this process is part of.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--run-dir", help="Where engines keep their sockets. [KVCONN_RUN_DIR]")
    ] = None,
    as_json: Json = False,
) -> None:
    """What running engines wait for: requests, who owes what since when, leases, quarantine."""
    from kvconn.cli import explain as explaining

    reports, problems = explaining.explain(pid, directory)
    console = _Console()
    if as_json:
        _write(console, explaining.to_json(reports, problems))
    else:
        explaining.print_reports(console, reports)
        errors = _Console(stderr=True)
        for problem in problems:
            _complain(errors, problem)
    sys.exit(WRONG if problems else 0)


@app.command()
def doctor(
    host: Annotated[str | None, typer.Option(help="Side channel host. [VLLM_NIXL_SIDE_CHANNEL_HOST]")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Side channel base port. [VLLM_NIXL_SIDE_CHANNEL_PORT]")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Data-parallel replicas; each has the next port.")] = 1,
    remote: Annotated[bool, typer.Option("--remote", help="P and D will be on two hosts.")] = False,
    kv_transfer_config: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="Check this configuration too.")
    ] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Check this directory for a disk tier too.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure reads between two processes.")] = True,
    as_json: Json = False,
) -> None:
    """Look at this machine before engines start: what would break, what would be slow, what to set."""
    from kvconn.cli.examine import print_findings, to_json, transfer_config
    from kvconn.doctor.run import Options, examine

    errors, console = _Console(stderr=True), _Console()
    with _exiting(errors):
        config = transfer_config(kv_transfer_config)
        options = Options(
            host=host,
            port=port,
            replicas=replicas,
            remote=remote,
            config=config,
            directory=directory,
            measure=measure,
        )
        with _interruptible(), errors.status("looking") as status:
            report = examine(options, lambda what: status.update(f"looking at: {what}"))
    if as_json:
        _write(console, to_json(report))
    else:
        print_findings(console, report)
    sys.exit(report.code)


@app.command()
def plan(
    d: Annotated[str, typer.Option("--d", metavar="FILE|JSON", help="The engine that reads.")],
    p: Annotated[str | None, typer.Option("--p", metavar="FILE|JSON", help="The engine that is read.")] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST:PORT", help="Ask the engine that is read, at its side channel."),
    ] = None,
    key_file: Annotated[str | None, typer.Option(help="The fleet's key, where that engine wants one.")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Length of the prompt to count for.")] = 1024,
    svg: Annotated[Path | None, typer.Option(help="Draw who reads what of whom into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Can these two engines exchange KV? Who reads what of whom, or every field that is in the way (exit 1)."""
    from kvconn.cli import planning

    errors, console = _Console(stderr=True), _Console()
    with _exiting(errors), _interruptible():
        found = planning.plan(d, p, source, key_file, tokens)
    if svg is not None and not found.problems:
        _draw(errors, "--svg", svg, planning.to_svg(found))
    if as_json:
        _write(console, planning.to_json(found))
    else:
        planning.print_survey(console, found)
    sys.exit(WRONG if found.problems else 0)


@app.command()
def chaos(
    minutes: Annotated[float, typer.Option(help="How long faults go on; the end takes some seconds more.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Which faults and requests, in which order.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=40, help="Requests in flight.")] = 12,
    ucx_tls: Annotated[str, typer.Option(help="UCX_TLS of the engines; '' leaves it as it is.")] = "tcp",
    as_json: Json = False,
) -> None:
    """Faults against live engines under load: kills, stops, aborts, dead peers. Is anything lost, wrong or leaked?"""
    from kvconn.chaos.run import Settings

    if not 0 < minutes <= 10_000:  # nan as well
        raise typer.BadParameter("expected more than 0 and at most 10000", param_hint="--minutes")
    _run_chaos(as_json, Settings(minutes=minutes, seed=seed, concurrency=concurrency, ucx_tls=ucx_tls))


@app.command()
def soak(
    requests: Annotated[
        int, typer.Option(min=100, help="Small requests, one after the other in a closed loop.")
    ] = 20_000,
    seed: Annotated[int, typer.Option(help="Which requests, aborts and faults.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests in flight.")] = 12,
    picture: Annotated[Path | None, typer.Option(help="Write the curves here, as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Many small requests, 5% aborted and 1% with a fault: throughput, memory, files and handles must stay flat."""
    from kvconn.chaos.book import Shares
    from kvconn.chaos.run import Settings

    if picture is not None and not picture.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {picture.parent}", param_hint="--picture")
    settings = Settings(
        requests=requests,
        seed=seed,
        concurrency=concurrency,
        engines=False,
        shares=Shares(0.05, 0.01),
        prompt=96,
        answer=6,
    )
    _run_chaos(as_json, settings, picture)


def _run_chaos(as_json: bool, settings: chaos_run.Settings, picture: Path | None = None) -> NoReturn:
    """Run, print, exit."""
    from kvconn.chaos.run import run
    from kvconn.cli import chaos as showing

    errors, console = _Console(stderr=True), _Console()
    with _exiting(errors, INTERRUPTED_ENGINES), _interruptible():
        report = run(settings, lambda line: errors.print(line, highlight=False, markup=False, soft_wrap=True))
    if as_json:
        _write(console, showing.to_json(report))
    else:
        showing.print_report(console, report)
    if picture is not None:
        _draw(errors, "--picture", picture, showing.to_svg(report))
    sys.exit(showing.code(report))


def _finish(as_json: bool, **options: Any) -> NoReturn:
    """Run with these :class:`~kvconn.cli.job.Settings`, print, exit."""
    from kvconn.cli import job
    from kvconn.cli.show import View, print_report

    errors = _Console(stderr=True)
    settings = job.Settings(**options)
    with _exiting(errors, INTERRUPTED_ENGINES), _interruptible(), View(errors) as view:
        report = job.run(job.plan(settings), view)
    verdict = judge(report, settings.contract)
    console = _Console()
    if as_json:
        told = {"code": verdict.code, "verdict": verdict.lines, "report": report}
        _write(console, msgspec.json.encode(told).decode())
    else:
        print_report(console, report, verdict)
    sys.exit(verdict.code)


def _write(console: _Console, text: str) -> None:
    """One line to stdout as it is."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        console.on_broken_pipe()


class _Console(Console):
    """Ends the command quietly, engines shut down, when nobody reads any more (``| head``)."""

    def on_broken_pipe(self) -> NoReturn:
        self.quiet = True
        with suppress(OSError, ValueError):  # a file that is not the system's
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # what is buffered still has to go somewhere
        raise SystemExit(PIPE_CLOSED)


def _complain(console: Console, what: str) -> None:
    console.print(f"kvconn: {what}", style="red", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _exiting(errors: Console, interrupted: str = "interrupted") -> Iterator[None]:
    """What ends a command before its result ends it here: said on stderr, with its exit status."""
    try:
        yield
    except ConfigError as err:
        for problem in err.problems:
            _complain(errors, problem)
        sys.exit(USAGE)
    except KvconnError as err:
        _complain(errors, str(err))
        sys.exit(WRONG)
    except KeyboardInterrupt:
        _complain(errors, interrupted)
        sys.exit(INTERRUPTED)


def _draw(errors: Console, option: str, path: Path, picture: str) -> None:
    """Write a picture where ``option`` says."""
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as err:
        _complain(errors, f"{option}: cannot write {path}: {err}")
        sys.exit(USAGE)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise: what is being run is shut down, not orphaned. Else Ctrl-C ends the process at once."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as a shell's background job
    signals = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGINT)
    before = {one: signal.signal(one, interrupt) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
