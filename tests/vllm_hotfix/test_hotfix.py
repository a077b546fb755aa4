"""Switch, probing, patching, putting back: with small classes in vLLM's place. test_installed.py has vLLM's own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvconn.vllm import hotfix
from kvconn.vllm.hotfix import Targets, repair
from tests.vllm_hotfix.doubles import Metadata, Output, Results, faulty, methods

ROOT = Path(__file__).resolve().parents[2]
PULL, PUSH, AGGREGATOR = "NIXL pull with replicated PCP", "NIXL push with replicated PCP", "KVOutputAggregator"


def states(targets: Targets) -> dict[str, str]:
    return {outcome.name: outcome.state for outcome in repair(targets)}


# --- the switch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Targets:
    """A vLLM 0.32 in which all faults are there, installed as far as ``install`` can tell."""
    targets = faulty()
    monkeypatch.setattr(hotfix, "_version", lambda: targets.version)
    monkeypatch.setattr(hotfix, "load_targets", lambda: targets)
    return targets


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_unless_asked_for(
    value: str | None, vllm: Targets, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(hotfix.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(hotfix.VARIABLE, value)
    before = methods(vllm)
    hotfix.install()
    assert methods(vllm) == before
    assert capsys.readouterr() == ("", "")


def test_off_it_imports_nothing() -> None:
    code = (
        "import sys; from kvconn.vllm.hotfix import install; install();"
        "print({m.split('.')[0] for m in sys.modules} & {'vllm', 'torch', 'nixl', 'zmq'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, env={}
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_on_it_says_one_line_for_each_repair(
    vllm: Targets, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(hotfix.VARIABLE, "1")
    hotfix.install()
    lines = capsys.readouterr().err.splitlines()
    assert [name in line and "vllm 0.32.0" in line and "REPAIRED" in line for name, line in zip(
        (PULL, PUSH, AGGREGATOR), lines, strict=True)] == [True] * 3  # fmt: skip


def test_a_second_call_changes_nothing_and_says_nothing(
    vllm: Targets, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(hotfix.VARIABLE, "1")
    hotfix.install()
    once = methods(vllm)
    capsys.readouterr()
    hotfix.install()
    assert methods(vllm) == once
    assert capsys.readouterr().err == ""
    assert set(states(vllm).values()) == {"already"}


@pytest.mark.parametrize(
    ("value", "version", "said"),
    [
        ("yes", "0.32.0", "expected 1, got 'yes'"),
        ("1", "0.34.0", "not a version this was written for"),
        ("1", "0.29.0", "not a version this was written for"),
        ("1", "1.0.0", "not a version this was written for"),
    ],
)
def test_another_value_or_version_changes_nothing_and_says_so(
    value: str, version: str, said: str, vllm: Targets, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(hotfix.VARIABLE, value)
    monkeypatch.setattr(hotfix, "_version", lambda: version)
    before = methods(vllm)
    hotfix.install()
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "nothing changed" in line
    assert methods(vllm) == before


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.0+cpu", "0.33.0rc2"])
def test_known_versions(version: str) -> None:
    assert hotfix.KNOWN.match(version)


def test_a_vllm_that_does_not_import_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise ModuleNotFoundError("No module named 'vllm.distributed'\nsecond line")

    monkeypatch.setenv(hotfix.VARIABLE, "1")
    monkeypatch.setattr(hotfix, "_version", lambda: "0.32.0")
    monkeypatch.setattr(hotfix, "load_targets", broken)
    hotfix.install()
    (line,) = capsys.readouterr().err.splitlines()
    assert "WARNING" in line and "ModuleNotFoundError" in line


def test_the_wheel_offers_it_to_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["kvconn_hotfix"].split(":")
    assert getattr(import_module(module), name) is hotfix.install


# --- present before, gone after -----------------------------------------------------------------------------------


def poll(targets: Targets, kind: str, *, rank: int = 1, sharded: bool = False) -> set[str]:
    """What a rank's facade reports in the step that announces the release of r."""
    connector = getattr(targets, f"{kind}_connector")()
    worker = connector.connector_worker = getattr(targets, f"{kind}_worker")()
    worker.__dict__.update(pcp_rank=rank, pcp_dcp_sharded=sharded, _replicated_pcp_done_sending=set())
    metadata = Metadata()
    metadata.reqs_to_send["r"] = 1.0
    worker.start_load_kv(metadata)
    sent: set[str] = connector.get_transfer_results(set()).finished_sending
    return sent


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_replicated_ranks_report_after_the_repair(kind: str) -> None:
    targets = faulty()
    assert poll(targets, kind) == set()
    assert states(targets) == {PULL: "repaired", PUSH: "repaired", AGGREGATOR: "repaired"}
    assert poll(targets, kind) == {"r"}
    assert poll(targets, kind, rank=0) == poll(targets, kind, sharded=True) == set(), (
        "these serve; they wait for a read"
    )


def test_what_was_found_is_told() -> None:
    details = {o.name: o.detail for o in repair(faulty())}
    assert "dropped on the way out" in details[PULL]
    assert "never recorded" in details[PUSH]
    assert "two reports of one rank" in details[AGGREGATOR] and "a second time" in details[AGGREGATOR]


class Counter:
    """An aggregator of a world of two or three, and what it says to one step's reports."""

    def __init__(self, targets: Targets, world: int = 2) -> None:
        self.world, self.aggregator = world, targets.aggregator(world)

    def __call__(self, *reports: tuple[int, str], name: str = "finished_sending") -> set[str]:
        outputs = [SimpleNamespace(kv_connector_output=Output()) for _ in range(self.world)]
        for rank, id in reports:
            part = outputs[rank].kv_connector_output
            setattr(part, name, {*(getattr(part, name) or ()), id})
        before = [set(getattr(o.kv_connector_output, name) or ()) for o in outputs]
        parts = [o.kv_connector_output for o in outputs]
        joined = self.aggregator.aggregate(outputs, 0)
        assert joined is outputs[0], "callers chain on the output rank's own object"
        assert [set(getattr(p, name) or ()) for p in parts] == before, "a worker's part is not changed"
        return getattr(joined.kv_connector_output, name) or set()


@pytest.fixture
def counter() -> Counter:
    targets = faulty()
    repair(targets)
    return Counter(targets)


def test_stock_counts_reports_and_the_repair_counts_ranks(counter: Counter) -> None:
    stock = Counter(faulty())
    assert [stock((1, "r")), stock((1, "r"))] == [set(), {"r"}], "freed although rank 0 has not spoken"
    assert [counter((1, "r")), counter((1, "r")), counter((0, "r"))] == [set(), set(), {"r"}]


def test_a_late_report_on_a_send_opens_nothing(counter: Counter) -> None:
    assert counter((0, "r"), (1, "r")) == {"r"}
    assert counter((0, "r"), (1, "r")) == counter((1, "r")) == set()
    assert counter.aggregator.left == {}


def test_a_receive_after_completion_is_a_new_life(counter: Counter) -> None:
    first = counter((0, "r"), (1, "r"), name="finished_recving")
    again = counter((0, "r"), (0, "r"), name="finished_recving"), counter((1, "r"), name="finished_recving")
    assert (first, *again) == ({"r"}, set(), {"r"})


def test_a_step_without_an_output_counts_nothing_as_before(counter: Counter) -> None:
    report = SimpleNamespace(kv_connector_output=Output(finished_sending={"r"}))
    assert counter.aggregator.aggregate([None, report], 0) is None
    assert [counter((1, "r")), counter((0, "r"))] == [set(), {"r"}]


def test_the_first_repeated_report_is_told_once(counter: Counter, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        counter((1, "r"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 1 repeated finished_sending of 'r'" in line


def test_where_ids_come_back_a_completed_send_may_open_again(monkeypatch: pytest.MonkeyPatch, counter: Counter) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert counter((0, "r"), (1, "r")) == counter((0, "r"), (1, "r")) == {"r"}


# --- where it must keep away --------------------------------------------------------------------------------------


def fixed() -> Targets:
    targets = faulty()

    class Connector(targets.pull_connector):  # type: ignore[misc, name-defined]
        def get_transfer_results(self, finished_req_ids: set[str]) -> Results:
            results: Results = self.connector_worker.get_transfer_results()
            return results

    class Aggregator:
        def __init__(self, world: int) -> None:
            self.world = world
            self.ranks: dict[tuple[str, str], set[int]] = {}
            self.sent: set[str] = set()

        def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
            done: dict[str, set[str]] = {"finished_sending": set(), "finished_recving": set()}
            for rank, output in enumerate(outputs):
                for name, ids in done.items():
                    for id in getattr(output.kv_connector_output, name) or ():
                        if name == "finished_sending" and id in self.sent:
                            continue
                        ranks = self.ranks.setdefault((name, id), set())
                        ranks.add(rank)
                        if len(ranks) == self.world:
                            del self.ranks[name, id]
                            ids.add(id)
            self.sent |= done["finished_sending"]
            outputs[output_rank].kv_connector_output = Output(done["finished_sending"], done["finished_recving"])
            return outputs[output_rank]

    return faulty(
        pull_connector=Connector, pull_worker=targets.pull_worker, push_connector=Connector,
        push_worker=targets.pull_worker, aggregator=Aggregator,
    )  # fmt: skip


def test_a_fixed_vllm_is_left_alone() -> None:
    targets = fixed()
    before = methods(targets)
    assert set(states(targets).values()) == {"healthy"}
    assert methods(targets) == before


def test_ranks_that_hide_because_fewer_are_counted_are_left_alone() -> None:
    """Up to 0.29: the count was lowered to the ranks that serve. A report more would free early."""
    targets = faulty()
    for connector in (targets.pull_connector, targets.push_connector):
        connector.get_finished_count = lambda self: 1  # type: ignore[attr-defined]
    before = methods(targets)
    assert states(targets) == {PULL: "healthy", PUSH: "healthy", AGGREGATOR: "repaired"}
    assert {**methods(targets), "aggregate": None} == {**before, "aggregate": None}


def eager_worker() -> type:
    """Reports on every rank as soon as a release is announced: no worker that the repair was written for."""

    class Worker:
        def start_load_kv(self, metadata: Metadata) -> None:
            self.announced = set(metadata.reqs_to_send)

        def get_transfer_results(self) -> Results:
            return Results(set(self.announced))

    return Worker


def renamed_worker() -> type:
    class Worker:
        def start_load_kv(self, metadata: Metadata) -> None:
            self.no_such_thing.add(1)  # type: ignore[attr-defined]

    return Worker


def lying_worker() -> type:
    """Forgets everything: the repair cannot help it."""

    class Worker:
        def start_load_kv(self, metadata: Metadata) -> None:
            pass

        def get_transfer_results(self) -> Results:
            return Results()

    return Worker


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (eager_worker, "PCP rank 0 reported a release that nobody had read"),
        (renamed_worker, "AttributeError"),
        (lying_worker, "after the repair"),
    ],
)
def test_a_worker_it_does_not_know_is_put_back_with_one_warning(worker: Any, said: str) -> None:
    kind = worker()
    targets = faulty(pull_worker=kind, push_worker=kind)
    before = methods(targets)
    outcomes = {o.name: o for o in repair(targets)}
    assert outcomes[PULL].state == "failed"
    assert said in outcomes[PULL].detail
    assert "WARNING: nothing changed" in str(outcomes[PULL])
    assert outcomes[PUSH].state == "failed"
    assert {**methods(targets), "aggregate": None} == {**before, "aggregate": None}


@pytest.mark.parametrize(
    "aggregate",
    [
        lambda self, outputs, output_rank=0: None,
        lambda self, outputs, output_rank=0: outputs[output_rank],
        lambda self, outputs, output_rank: 1 / 0,
    ],
)
def test_an_aggregator_it_does_not_know_is_left_alone(aggregate: Any) -> None:
    kind = type("Aggregator", (), {"__init__": lambda self, n: None, "aggregate": aggregate})
    targets = faulty(aggregator=kind)
    assert states(targets)[AGGREGATOR] == "failed"
    assert kind.aggregate is aggregate


def test_classes_without_the_methods_are_left_alone() -> None:
    empty = type("Empty", (), {"__init__": lambda self, *args: None})
    targets = Targets("0.32.0", empty, empty, empty, empty, Metadata, empty, Output)
    assert states(targets) == dict.fromkeys((PULL, PUSH, AGGREGATOR), "failed")
    assert not {"get_transfer_results", "start_load_kv", "aggregate"} & set(vars(empty))
