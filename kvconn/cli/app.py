"""The commands. Only :mod:`kvconn.cli.main` imports this module, after it has seen that typer and rich are there.

Rules
1. A command turns options into :class:`~kvconn.cli.job.Settings`, runs the job, prints, exits with the verdict's code.
2. A ConfigError is usage (2), a dead engine is wrong (1), Ctrl-C and SIGTERM shut the engines down first (130).
3. Whatever imports torch is imported inside the command.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import msgspec
import typer
from rich.console import Console

from kvconn.cli.verdict import INTERRUPTED, USAGE, WRONG, judge
from kvconn.errors import ConfigError, KvconnError

if TYPE_CHECKING:
    from kvconn.cli.job import Settings

__all__ = ["app"]

app = typer.Typer(
    help="KV-cache connectors for disaggregated LLM serving: run the whole path on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Requests = Annotated[int | None, typer.Option(help="Requests to replay; at least as many as --concurrency. [48]")]
Concurrency = Annotated[int, typer.Option(help="Requests in flight.")]
ModeOption = Annotated[Literal["transformer", "content-addressed"], typer.Option(help="What the engines compute.")]
ContractOption = Annotated[
    Literal["world", "hidden-ranks"],
    typer.Option(help="hidden-ranks: P's ranks > 0 stay silent, as before the fix; the stall must be named (exit 3)."),
]
Pcp = Annotated[int, typer.Option(help="P's context-parallel workers.")]
UcxTls = Annotated[str | None, typer.Option(help="UCX_TLS of both engines, e.g. tcp.")]
StallAfter = Annotated[
    float | None, typer.Option(help="Seconds until a pending release is named. [30; 10 with hidden-ranks]")
]
Seed = Annotated[int, typer.Option(help="Seed of the weights.")]
Json = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout instead of the table.")]


@app.command()
def demo(
    requests: Requests = None,
    concurrency: Concurrency = 16,
    mode: ModeOption = "transformer",
    contract: ContractOption = "world",
    pcp: Pcp = 8,
    ucx_tls: UcxTls = None,
    stall_after: StallAfter = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Replay the trace that ships with kvconn: P with eight ranks, D with one, NIXL between them."""
    from kvconn.cli.job import Settings

    _finish(
        Settings(
            requests=requests,
            concurrency=concurrency,
            mode=mode,
            contract=contract,
            pcp=pcp,
            ucx_tls=ucx_tls,
            stall_after=stall_after,
            seed=seed,
        ),
        as_json,
    )


@app.command()
def replay(
    trace: Annotated[Path, typer.Option(help="A trace in Mooncake's JSONL format.")],
    scale: Annotated[int, typer.Option(help="Divides lengths; a hash id stands for 512/scale tokens.")] = 32,
    requests: Requests = None,
    concurrency: Concurrency = 16,
    mode: ModeOption = "transformer",
    contract: ContractOption = "world",
    pcp: Pcp = 8,
    ucx_tls: UcxTls = None,
    stall_after: StallAfter = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Replay a request trace through a prefill and a decode engine and compare with one engine alone."""
    from kvconn.cli.job import Settings

    _finish(
        Settings(
            trace=trace,
            scale=scale,
            requests=requests,
            concurrency=concurrency,
            mode=mode,
            contract=contract,
            pcp=pcp,
            ucx_tls=ucx_tls,
            stall_after=stall_after,
            seed=seed,
        ),
        as_json,
    )


def _finish(settings: Settings, as_json: bool) -> NoReturn:
    """Run, print, exit."""
    from kvconn.cli import job
    from kvconn.cli.show import View, print_report

    errors = Console(stderr=True)
    try:
        with _sigterm_interrupts(), View(errors) as view:
            report = job.run(job.plan(settings), view)
    except ConfigError as err:
        for problem in err.problems:
            _complain(errors, problem)
        sys.exit(USAGE)
    except KvconnError as err:
        _complain(errors, str(err))
        sys.exit(WRONG)
    except KeyboardInterrupt:
        _complain(errors, "interrupted; the engines are shut down")
        sys.exit(INTERRUPTED)
    verdict = judge(report, settings.contract)
    if as_json:
        sys.stdout.write(
            msgspec.json.encode({"code": verdict.code, "verdict": verdict.lines, "report": report}).decode() + "\n"
        )
    else:
        print_report(Console(), report, verdict)
    sys.exit(verdict.code)


def _complain(console: Console, what: str) -> None:
    console.print(f"kvconn: {what}", style="red", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is Ctrl-C: what is being run is shut down, not orphaned."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
