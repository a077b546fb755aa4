"""The commands over scripted engines: exit codes, what is printed where, and that engines never outlive a command."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvconn import __version__
from kvconn.cli import job
from kvconn.cli.app import app
from kvconn.cli.job import Settings, plan
from kvconn.config import ParallelConfig
from kvconn.errors import ConfigError, EngineDeadError
from tests.cli.fakes import Fleet, _Started

NAMES = "send of {id} (life 1) owed by NixlConnector ranks 1..7 for 12.0 s"
NAMED = NAMES.format(id="line-1")


@pytest.fixture
def kvconn(monkeypatch):
    """Runs a command over a scripted fleet, by its clock; afterwards no engine may be alive."""
    router = job.Router

    def run(*arguments, script=lambda engines: None):
        run.fleet = Fleet(script)
        monkeypatch.setattr(job, "EngineProcess", run.fleet)
        monkeypatch.setattr(job, "Router", partial(router, clock=run.fleet.clock))
        before = signal.getsignal(signal.SIGTERM)
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert run.fleet.alive == set()
        assert signal.getsignal(signal.SIGTERM) == before
        return result

    return run


def hide(names="", *lines):
    """P never releases; it says ``names`` about every request it holds, and ``lines``."""

    def script(engines):
        engines["P"].releases = False
        engines["P"].names = names
        engines["P"].stalls = lines

    return script


class TestExitCodes:
    def test_0_fine(self, kvconn):
        result = kvconn("demo")
        assert result.exit_code == 0, result.output
        assert "48 of 48 requests finished, every token right, nothing held" in result.stdout
        assert "48/48" in result.stdout and "KV blocks in use after drain, P" in result.stdout
        assert "finished 1/48 | P running 0 waiting" in result.stderr
        assert set(kvconn.fleet.engines) == {"P", "D", "M"}

    def test_1_mismatch_names_the_request(self, kvconn):
        def script(engines):
            engines["D"].wrong = {"line-5"}

        result = kvconn("demo", script=script)
        assert result.exit_code == 1
        assert "line-5: token" in result.stdout and "on D, output rank 0, is" in result.stdout
        assert "47/48" in result.stdout

    def test_1_a_failed_request_is_named(self, kvconn):
        def script(engines):
            engines["P"].errors = {"line-5": "no fence slot"}

        result = kvconn("demo", script=script)
        assert result.exit_code == 1
        assert "line-5 failed on P: no fence slot" in result.stdout

    def test_1_leak_names_request_and_ranks(self, kvconn):
        def script(engines):
            hide(NAMES)(engines)
            engines["P"].total_blocks = 100_000

        result = kvconn("demo", "--stall-after", 30, script=script)
        assert result.exit_code == 1
        assert "leak: P holds" in result.stdout and NAMED in result.stdout

    def test_1_stall_names_request_and_ranks(self, kvconn):
        result = kvconn("demo", "--stall-after", 30, script=hide(NAMES))
        assert result.exit_code == 1
        assert "stall: nothing moved" in result.stdout and f"P: {NAMED}" in result.stdout
        assert "M" not in kvconn.fleet.engines

    def test_1_a_dead_engine(self, kvconn):
        def script(engines):
            def poll(timeout):
                raise EngineDeadError("P: worker 3 is gone, exit code -9")

            engines["P"].poll = poll

        result = kvconn("demo", script=script)
        assert result.exit_code == 1
        assert "worker 3 is gone" in result.stderr

    def test_1_a_margin_that_proves_nothing(self, kvconn):
        def script(engines):
            engines["D"].min_margin = 1e-15

        result = kvconn("demo", script=script)
        assert result.exit_code == 1
        assert "use another --seed" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["demo", "--concurrency", 16, "--requests", 8],
                "--requests: expected at least as many as --concurrency 16",
            ),
            (["demo", "--concurrency", 0], "--concurrency: expected at least 1"),
            (["demo", "--concurrency", 500], "the trace has only 96 requests"),
            (["demo", "--contract", "hidden-ranks", "--pcp", 1], "--pcp: hidden-ranks"),
            (["demo", "--p-tp", 3], "engine P: parallel.tp: expected a size that 4 query heads"),
            (["demo", "--d-dcp", 0], "Invalid value for '--d-dcp'"),
            (["demo", "--window", 8], "--window: the sibling stores whole prompts, expected --offload off, got hold"),
            (["demo", "--stall-after", 0], "--stall-after: expected seconds > 0"),
            (["demo", "--stall-after", "nan"], "--stall-after: expected seconds > 0"),
            (["demo", "--mode", "magic"], "Invalid value"),
            (["replay"], "Missing option"),
            (["replay", "--trace", "/no/such"], "cannot be read"),
            (["replay", "--trace", os.devnull], "holds no requests"),
            (["replay", "--trace", __file__], "line 1: not JSON"),
            (["replay", "--trace", sys.executable], "line 1: not JSON but binary"),
            (["demo", "--requests", 99, "--concurrency", 98], "lower --requests 99 and --concurrency 98 to that"),
        ],
    )
    def test_2_usage(self, kvconn, arguments, said):
        result = kvconn(*arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert kvconn.fleet.engines == {}

    def test_2_a_scale_that_splits_blocks(self, kvconn, tmp_path):
        with job.shipped_trace() as path:
            result = kvconn("replay", "--trace", path, "--scale", 64)
        assert result.exit_code == 2
        assert "--scale:" in result.stderr and "multiple of the block size" in result.stderr

    def test_2_a_short_trace_says_what_to_lower(self, kvconn, tmp_path):
        with job.shipped_trace() as path:
            (tmp_path / "short").write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
        result = kvconn("replay", "--trace", tmp_path / "short")
        assert result.exit_code == 2
        assert "the trace has only 3 requests: lower --concurrency 16 to that at most" in result.stderr

    def test_2_pools_that_do_not_fit_start_nothing(self, kvconn, monkeypatch):
        monkeypatch.setattr(job, "memory_limit", lambda: job.GIB // 100)
        result = kvconn("demo")
        assert result.exit_code == 2 and kvconn.fleet.engines == {}
        assert "GiB are available for them: raise --scale or lower --concurrency" in result.stderr

    @pytest.mark.parametrize("arguments", [(), ("--ucx-tls", "bogus")])
    def test_2_transports_that_do_not_work(self, kvconn, monkeypatch, arguments):
        def start(engine):
            raise EngineDeadError("engine P: rank 0 failed during 'start':\nTraceback\nx.TransportError: no device\n")

        monkeypatch.setattr(_Started, "start", start)
        result = kvconn("demo", *arguments)
        if not arguments:
            assert result.exit_code == 1
            return
        assert result.exit_code == 2
        assert result.stderr.endswith("--ucx-tls bogus: engine P has no transport with it: no device\n")

    def test_3_the_fault_happened_and_was_named(self, kvconn):
        result = kvconn("demo", "--contract", "hidden-ranks", "--stall-after", 30, script=hide(NAMES, "noise"))
        assert result.exit_code == 3
        assert "of 48 requests never finished; blocks are owed:" in result.stdout
        assert f"P: {NAMED}" in result.stdout and "noise" not in result.stdout
        assert "M" not in kvconn.fleet.engines

    @pytest.mark.parametrize("lines", [(), ("send of line-1 is slow",), (NAMED,)])
    def test_1_the_fault_happened_and_not_all_of_it_was_named(self, kvconn, lines):
        script = hide("", *lines)
        result = kvconn("demo", "--contract", "hidden-ranks", "--stall-after", 30, script=script)
        assert result.exit_code == 1
        assert f"pending releases only {int(lines == (NAMED,))} were named" in result.stdout

    def test_1_the_fault_did_not_show(self, kvconn):
        result = kvconn("demo", "--contract", "hidden-ranks", "--stall-after", 30)
        assert result.exit_code == 1
        assert "the fault did not show" in result.stdout

    @pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=lambda by: by.name)
    def test_130_interrupted(self, kvconn, by):
        def script(engines):
            plain = engines["D"].poll

            def poll(timeout):
                os.kill(os.getpid(), by)
                return plain(timeout)

            engines["D"].poll = poll

        result = kvconn("demo", script=script)
        assert result.exit_code == 130
        assert "interrupted; the engines are shut down" in result.stderr


def test_json_is_alone_on_stdout(kvconn):
    result = kvconn("demo", "--json")
    told = json.loads(result.stdout)
    assert told["code"] == result.exit_code == 0
    assert told["report"]["finished"] == 48
    assert "replaying 48 requests" in result.stderr


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 48), (24, 48), (32, 48), (64, 64)])
def test_concurrency_raises_the_default_number_of_requests(concurrency, requests):
    made = plan(Settings(concurrency=concurrency))
    assert len(made.requests) == requests


def test_loads_that_went_wrong_have_rows(kvconn):
    def script(engines):
        engines["D"].connector = {"nixl_num_failed_transfers": 1, "params_refused": 2, "seals_refused": 3}

    assert "0 / 0 / 0 / 0" in kvconn("demo").stdout
    told = json.loads(kvconn("demo", "--json", script=script).stdout)["report"]
    names = ("failed_loads", "stale_reads", "references_refused", "unfenced_reads")
    assert [told[name] for name in names] == [1, 0, 5, 0]
    assert "references refused" in kvconn("demo", script=script).stdout


def test_hits_of_every_tier_have_rows_where_blocks_were_asked_for(kvconn):
    def script(engines):
        engines["P"].connector = {
            "offload_blocks_asked": 8,
            "offload_hit_blocks_host": 4,
            "offload_hit_blocks_secondary": 1,
            "offload_tokens_loaded": 80,
            "kv_offload_store_bytes": 3 << 20,
            "kv_offload_load_bytes": 1 << 20,
        }

    told = kvconn("demo", "--offload", "host", script=script).stdout
    for row in (
        ("P: hit rate of host memory", "50.0% (4 of 8 blocks)"),
        ("P: hit rate of files", "12.5% (1 of 8 blocks)"),
        ("P: stored, loaded (all ranks)", "3.0 MiB, 1.0 MiB"),
        ("P: prefill tokens saved", "80"),
    ):
        assert [line for line in told.splitlines() if all(part in line for part in row)], row
    assert "D: hit rate" not in told and "D: tokens not read" not in told


def test_files_of_a_replay_are_gone_afterwards(kvconn):
    seen = []

    def script(engines):
        (child, _) = kvconn.fleet.configs["P"].kv_transfer_config["kv_connector_extra_config"]["connectors"][::-1]
        (tier,) = child["kv_connector_extra_config"]["secondary_tiers"]
        seen.append(Path(tier["root_dir"]))
        assert seen[0].is_dir()
        seen[0].joinpath("file").write_text("a block")

    assert kvconn("demo", "--offload", "tiering", script=script).exit_code == 0
    assert len(seen) == 1 and not seen[0].exists()


def test_version(kvconn):
    assert kvconn("--version").stdout == f"kvconn {__version__}\n"


def test_memory_limit(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 3 kB\nMemAvailable:    1000 kB\n")
    assert job.memory_limit(tmp_path / "meminfo") == 614_400
    assert job.memory_limit(tmp_path / "none") == 8 << 30


class TestPlan:
    def test_prefill_is_the_composition_that_stalled(self):
        made = plan(Settings())
        assert made.prefill.parallel.pcp == 8 and made.prefill.parallel.world == 8
        config = made.prefill.kv_transfer_config
        nixl, offload = config["kv_connector_extra_config"]["connectors"]
        assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_producer")
        assert nixl == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
        assert (offload["kv_connector"], offload["kv_role"]) == ("OffloadingConnector", "kv_both")
        assert offload["kv_connector_extra_config"]["kvconn"] == {"hold": True}
        assert made.decode.kv_transfer_config == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
        assert made.files is None
        assert made.monolithic.kv_transfer_config is None
        assert made.prefill.model == made.decode.model == made.monolithic.model
        assert made.prefill.port != made.decode.port

    @pytest.mark.parametrize("offload", ["host", "tiering"])
    def test_a_sibling_that_loads_is_behind_nixl_on_p_and_before_it_on_d(self, offload):
        made = plan(Settings(offload=offload))
        prefill, decode = made.prefill.kv_transfer_config, made.decode.kv_transfer_config
        children = {
            name: config["kv_connector_extra_config"]["connectors"] for name, config in (("P", prefill), ("D", decode))
        }
        assert [child["kv_connector"] for child in children["P"]] == ["NixlConnector", "OffloadingConnector"]
        assert [child["kv_connector"] for child in children["D"]] == ["OffloadingConnector", "NixlConnector"]
        assert {prefill["kv_load_failure_policy"], decode["kv_load_failure_policy"]} == {"recompute"}
        settings = children["P"][1]["kv_connector_extra_config"]
        assert "kvconn" not in settings and children["D"][0]["kv_connector_extra_config"] == settings
        if offload == "host":
            assert set(settings) == {"cpu_bytes_to_use"} and made.files is None
        else:
            assert settings["secondary_tiers"][0]["root_dir"] == str(made.files)
            assert settings["cpu_bytes_to_use"] == made.prefill.num_blocks * 16 * 64 * 8 * 4

    @pytest.mark.parametrize("contract", ["world", "hidden-ranks"])
    def test_without_offloading_nixl_is_alone(self, contract):
        made = plan(Settings(offload="off", contract=contract))
        assert "NixlConnector" in made.prefill.kv_transfer_config["kv_connector"]
        assert made.decode.kv_transfer_config == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}

    def test_host_memory_of_all_ranks_counts(self, monkeypatch):
        room = job.kv_bytes(plan(Settings()).prefill) + job.kv_bytes(plan(Settings()).decode)
        monkeypatch.setattr(job, "memory_limit", lambda: room + job.OFFLOAD_BYTES)
        plan(Settings())
        with pytest.raises(ConfigError, match="the KV caches of P and D"):
            plan(Settings(offload="host"))

    def test_prefills_pool_holds_fewer_than_are_in_flight(self):
        made = plan(Settings())
        sizes = [-(-(len(request.prompt) + 1) // 16) for request in made.requests]
        in_flight = sum(sizes) * 16 / 48
        assert max(sizes) < made.prefill.num_blocks < max(sizes) + in_flight
        assert made.prefill.num_blocks < sum(sorted(sizes)[-16:])

    def test_hidden_ranks_is_a_string_of_the_testing_package(self):
        made = plan(Settings(contract="hidden-ranks"))
        nixl = made.prefill.kv_transfer_config["kv_connector_extra_config"]["connectors"][0]
        assert nixl["kv_connector"] == "HiddenRanksNixlConnector"
        assert nixl["kv_connector_module_path"] == "kvconn.testing.contract"
        assert made.monolithic is None

    def test_sizes_are_the_engines_and_p_has_eight_pcp_ranks_where_nothing_else_is_said(self):
        made = plan(Settings(p_tp=2, p_pp=2, d_tp=4, d_pp=2, d_dcp=2))
        assert made.prefill.parallel == ParallelConfig(tp=2, pp=2)
        assert made.decode.parallel == ParallelConfig(tp=4, pp=2, dcp=2)
        assert made.monolithic.parallel == ParallelConfig()
        assert plan(Settings(pcp=2, p_dcp=2)).prefill.parallel == ParallelConfig(pcp=2, dcp=2)

    def test_where_ranks_share_tokens_a_pool_has_as_many_tokens_and_fewer_blocks(self):
        one, two = plan(Settings()), plan(Settings(pcp=2, p_dcp=2, d_tp=2, d_dcp=2))
        for name in ("prefill", "decode"):
            assert getattr(two, name).num_blocks < getattr(one, name).num_blocks * 0.6

    def test_sizes_that_cannot_be_are_the_engines_to_refuse(self):
        with pytest.raises(ConfigError, match=r"engine D: parallel.tp: expected a size that 4 query heads"):
            plan(Settings(d_tp=3))

    def test_every_problem_comes_at_once(self):
        with pytest.raises(ConfigError) as caught:
            plan(Settings(concurrency=0, pcp=0, requests=0))
        assert len(caught.value.problems) == 3


def test_a_runs_engines_share_a_key_that_is_gone_after_it():
    made = plan(Settings(contract="hidden-ranks"))
    with job.fleet_key() as file:
        assert os.stat(file).st_mode & 0o777 == 0o600
        nixl, offload = extra(job.keyed(made.prefill, file))["connectors"]
        assert nixl["kv_connector_extra_config"]["kvconn"]["key_file"] == file
        assert "key_file" not in offload["kv_connector_extra_config"]["kvconn"]
        assert extra(job.keyed(made.decode, file))["kvconn"] == {"key_file": file}
    assert not os.path.exists(file)


def extra(config):
    return config.kv_transfer_config["kv_connector_extra_config"]


class TestEntryPoint:
    def test_a_missing_extra_is_one_sentence(self):
        code = (
            "import sys, importlib.util as u; find = u.find_spec;"
            "u.find_spec = lambda name, *a: None if name == 'rich' else find(name, *a);"
            "from kvconn.cli.main import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stderr == "kvconn: the command line needs rich: pip install 'kvconn[cli]'\n"

    def test_help_needs_no_torch(self):
        code = (
            "import sys; sys.argv[1:] = ['--help']\n"
            "from kvconn.cli.main import main\n"
            "try: main()\nfinally: print('torch' in sys.modules, 'nixl' in sys.modules, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and "demo" in done.stdout and "replay" in done.stdout
        assert done.stderr == "False False\n"

    def test_neither_cli_nor_engine_imports_the_testing_package(self):
        code = "import sys, kvconn.cli.app, kvconn.cli.job; sys.exit('kvconn.testing' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

    def test_nobody_reads(self):
        code = (
            "import sys; sys.argv[1:] = ['demo', *sys.argv[1:]]\n"
            "from kvconn.cli import job\nfrom tests.cli.fakes import Fleet\njob.EngineProcess = Fleet()\n"
            "from kvconn.cli.main import main; main()"
        )
        for arguments in ((), ("--json",)):
            reader, writer = os.pipe()
            os.close(reader)
            command = [sys.executable, "-c", code, *arguments]
            done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            os.close(writer)
            assert done.returncode == 141
            assert "Traceback" not in done.stderr and "Exception" not in done.stderr
