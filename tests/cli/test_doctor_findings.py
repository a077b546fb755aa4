"""What the doctor concludes from facts, and how it reads what children, UCX and the kernel say. Facts are made up."""

import subprocess
import sys

import msgspec
import pytest
from msgspec.structs import replace

from kvconn.doctor import agent, children, disk, gpu, host, pair, ports, run, settings, ucx
from kvconn.doctor.children import Ending, complaint, explain, parse
from kvconn.doctor.findings import Finding, Report, fail, ok, warn
from kvconn.trust import read_key

GIB = 1 << 30


def levels(findings):
    return [finding.level for finding in findings]


def multi(*connectors):
    """A MultiConnector's configuration, as JSON."""
    extra = {"connectors": list(connectors)}
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return msgspec.json.encode(whole).decode()


def worst(findings):
    """The one finding that is not fine."""
    (found,) = [finding for finding in findings if finding.level != "ok"]
    assert found.means and found.set
    return found


def test_the_exit_code_is_1_only_for_what_would_break():
    assert Report({"a": (ok("x"), warn("y", "m", "s"))}, {}).code == 0
    assert Report({"a": (ok("x"),), "b": (fail("z", "m", "s"),)}, {}).code == 1


class TestVersions:
    FINE = host.Versions("0.1", "3.11.7", "linux x86_64", {"torch": "2.13.0", "nixl": "1.5.1", "nixl-cu13": "1.5.1"})

    def judge(self, **packages):
        kept = {name: version for name, version in {**self.FINE.packages, **packages}.items() if version}
        return host.judge_versions(replace(self.FINE, packages=kept))

    def test_fine(self):
        assert levels(self.judge()) == ["ok"]

    @pytest.mark.parametrize(
        ("packages", "level", "said"),
        [
            ({"nixl": None}, "fail", "nixl is not installed"),
            ({"torch": None}, "fail", "torch is not installed"),
            ({"nixl": "1.0.0", "nixl-cu13": "1.0.0"}, "fail", "nixl 1.0.0 is older than 1.5"),
            ({"nixl": "1.6.0", "nixl-cu13": "1.6.0"}, "warn", "nixl 1.6.0 is newer"),
            ({"nixl-cu13": "1.4.0"}, "fail", "nixl is 1.5.1, but nixl-cu13 1.4.0"),
            ({"vllm": "0.31.2"}, "warn", "vLLM 0.31.2 is not 0.32"),
        ],
    )
    def test_not_fine(self, packages, level, said):
        found = worst(self.judge(**packages))
        assert (found.level, said in found.title) == (level, True)

    def test_the_vllm_that_is_followed(self):
        assert levels(self.judge(vllm="0.32.0")) == ["ok", "ok"]

    def test_another_platform(self):
        assert worst(host.judge_versions(replace(self.FINE, platform="darwin arm64"))).level == "fail"


class TestHost:
    FINE = host.HostFacts(
        cpus=8, cma=True, cma_self=True, yama=1, seccomp=0, capabilities=0, memlock=-1, nofile=65536,
        shm_total=8 * GIB, shm_free=8 * GIB, shm_writable=True, clock="tsc",
    )  # fmt: skip

    def judge(self, tls=None, rdma=False, **changes):
        return host.judge_host(replace(self.FINE, **changes), tls, rdma)

    def test_fine(self):
        assert set(levels(self.judge(rdma=True))) == {"ok"}

    @pytest.mark.parametrize(
        ("changes", "level", "said"),
        [
            ({"cma": False}, "warn", "CMA is refused (no CAP_SYS_PTRACE)"),
            ({"cma": False, "yama": 3}, "warn", "ptrace_scope is 3"),
            ({"cma": False, "tls": "all"}, "fail", "UCX_TLS=all includes it"),
            ({"cma": False, "tls": "tcp"}, "warn", "UCX_TLS=tcp keeps UCX from trying"),
            ({"cma": False, "tls": "all", "cma_self": False, "seccomp": 2}, "warn", "altogether (a seccomp filter"),
            ({"shm_free": 60 << 20, "shm_total": 64 << 20}, "warn", "/dev/shm has 0.06 of 0.06 GiB free"),
            ({"shm_total": None}, "fail", "/dev/shm is missing"),
            ({"shm_writable": False}, "fail", "not writable"),
            ({"memlock": 8 << 20, "rdma": True}, "fail", "locked memory (ulimit -l) is 8192 KiB"),
            ({"nofile": 1024}, "warn", "open files (ulimit -n): 1024"),
            ({"clock": "hpet"}, "warn", "clock source hpet"),
            ({"cpus": 1}, "warn", "one CPU"),
        ],
    )
    def test_not_fine(self, changes, level, said):
        found = worst(self.judge(**changes))
        assert (found.level, said in found.title) == (level, True), found

    @pytest.mark.parametrize("changes", [{"rdma": False}, {"rdma": True, "capabilities": 1 << host.CAP_IPC_LOCK}])
    def test_a_limit_that_does_not_bind(self, changes):
        assert set(levels(self.judge(memlock=8 << 20, **changes))) == {"ok"}


class TestUcx:
    FINE = ucx.UcxFacts(tls=None, devices=None, interfaces=("eth0", "lo"), rdma=())

    def judge(self, gpu=False, cma=True, remote=False, **changes):
        return ucx.judge(replace(self.FINE, **changes), gpu=gpu, cma=cma, remote=remote)

    @pytest.mark.parametrize(
        ("tls", "transport", "allowed"),
        [
            (None, "cma", True), ("", "cma", True), ("all", "cma", True), ("sm,tcp", "cma", True),
            ("tcp", "cma", False), ("^cma", "cma", False), ("^cma", "tcp", True), ("^sm", "cma", False),
            ("rc_x,\\ud_v:aux", "ud_verbs", True), ("ib", "dc_mlx5", True), ("cuda", "cuda_ipc", True),
        ],
    )  # fmt: skip
    def test_what_ucx_tls_allows(self, tls, transport, allowed):
        assert ucx.allows(tls, transport) is allowed

    @pytest.mark.parametrize(
        "changes",
        [
            {}, {"tls": "sm,self,tcp"}, {"tls": "all", "gpu": True}, {"devices": "lo,eth0"}, {"devices": "all"},
            {"received": "64k"}, {"received": "1mb"},
            {"tls": "rc,cuda,sm", "rdma": ("mlx5_0:1",), "gpu": True, "devices": "mlx5_0:1", "remote": True},
        ],
    )  # fmt: skip
    def test_fine(self, changes):
        assert set(levels(self.judge(**changes))) == {"ok"}

    @pytest.mark.parametrize(
        ("changes", "level", "said"),
        [
            ({"tls": "cma"}, "fail", "leaves no transport to connect with"),
            ({"tls": "^tcp"}, "fail", "leaves no transport to connect with"),
            ({"tls": "ib,cma"}, "fail", "leaves no transport to connect with"),
            ({"tls": "cma,tpc,tcp"}, "warn", "names 'tpc'"),
            ({"tls": "tcp"}, "warn", "leaves out CMA"),
            ({"received": "16k"}, "warn", "UCX_TCP_RX_SEG_SIZE=16k is less than"),
            ({"tls": "tcp,sm", "rdma": ("mlx5_0:1",)}, "warn", "leaves out RDMA"),
            ({"tls": "tcp,sm", "gpu": True}, "fail", "leaves out CUDA"),
            ({"devices": "mlx5_0:1"}, "fail", "none of them exists; there are eth0, lo"),
            ({"devices": "eth0,eth9"}, "warn", "no device eth9"),
            ({"remote": True}, "warn", "no RDMA device"),
        ],
    )
    def test_not_fine(self, changes, level, said):
        found = worst(self.judge(**changes))
        assert (found.level, said in found.title) == (level, True), found

    def test_a_name_close_to_one_that_exists_is_offered(self):
        assert worst(self.judge(tls="tcpp,tcp,cma")).set == "write 'tcp' if that is what you mean"

    def test_what_is_to_be_set_leaves_the_strange_name_out(self):
        _, found = [finding for finding in self.judge(tls="cma,tpc") if finding.level != "ok"]
        assert found.set == "UCX_TLS=cma,tcp, or unset UCX_TLS"

    def test_devices_come_from_sys(self, tmp_path):
        for name in ("net/eth0", "infiniband/mlx5_0/ports/1", "infiniband/mlx5_1/ports/1"):
            (tmp_path / name).mkdir(parents=True)
        facts = ucx.gather(tmp_path)
        assert (facts.interfaces, facts.rdma) == (("eth0",), ("mlx5_0:1", "mlx5_1:1"))

    def test_picks_are_read_from_the_table_of_reads_alone(self):
        text = """
[1.0] [h:1 :0]   +--------+-------------+----------------------------------+
[1.0] [h:1 :0]   | 24bc intra-node cfg#1                                   |
[1.0] [h:1 :0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda |
[1.0] [h:1 :0]   +--------+-------------+----------------------------------+
[1.0] [h:1 :0]   | Range  | Description |              Config              |
[1.0] [h:1 :0]   +--------+-------------+----------------------------------+
[1.0] [h:1 :0]   | 0..512 | zero-copy   | cuda_ipc/cuda                    |
[1.0] [h:1 :0]   | 513..inf | zero-copy | rc_mlx5/mlx5_0:1                 |
[1.0] [h:1 :0]   +--------+-------------+----------------------------------+
[1.0] [h:1 :0]   | remote memory write by ucp_put* from host memory to host |
[1.0] [h:1 :0]   +--------+-------------+----------------------------------+
[1.0] [h:1 :0]   | 0..inf | zero-copy   | tcp/lo                           |
"""
        assert ucx.picks(text) == (
            ucx.Pick("cuda/GPU0 from cuda", "0..512", "zero-copy", "cuda_ipc/cuda"),
            ucx.Pick("cuda/GPU0 from cuda", "513..inf", "zero-copy", "rc_mlx5/mlx5_0:1"),
        )
        assert ucx.picks("anything | else |") == ()

    def test_transports_are_read_from_a_context(self):
        text = "# md 1 : component 1 tcp\n#      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n# x\n"
        assert agent.resources(text) == ("tcp/eth0",)


class TestGpu:
    ONE = gpu.GpuFacts("13.0", (gpu.Gpu("G", 80 * GIB),), nodes=1)
    TWO = gpu.GpuFacts("13.0", (gpu.Gpu("G", 80 * GIB), gpu.Gpu("G", 80 * GIB)), nodes=2)

    @pytest.mark.parametrize("facts", [gpu.GpuFacts(), ONE, TWO])
    def test_fine(self, facts):
        assert levels(gpu.judge(facts, frozenset({"nixl-cu13"}))) == ["ok"]

    @pytest.mark.parametrize(
        ("facts", "level", "said"),
        [
            (gpu.GpuFacts(trouble="did not end within 60 s"), "fail", "torch cannot be asked"),
            (gpu.GpuFacts(nodes=8), "warn", "8 NVIDIA device files, but torch sees no GPU"),
            (replace(ONE, cuda="12.8"), "fail", "nixl-cu12 is not installed"),
            (replace(TWO, no_access=((0, 1), (1, 0))), "warn", "no peer access between GPUs: 0 to 1, 1 to 0"),
        ],
    )
    def test_not_fine(self, facts, level, said):
        found = worst(gpu.judge(facts, frozenset({"nixl-cu13"})))
        assert (found.level, said in found.title) == (level, True), found


class TestPair:
    MEASURED = pair.Measured(64 << 20, large=0.01, small=1e-5, notification=2e-5, memcpy=0.008, right=True)
    CMA = ucx.Pick("host memory from host", "0..inf", "zero-copy", "cma/memory")
    TCP = ucx.Pick("host memory from host", "0..inf", "software emulation", "tcp/lo")

    def judge(self, cma=True, remote=False, **facts):
        return pair.judge(pair.PairFacts("DRAM", **facts), cma=cma, remote=remote)

    def test_speed_is_told_beside_memcpy(self):
        speed, pick = self.judge(measured=self.MEASURED, picks=(self.CMA,))
        assert "a 64 MiB read 6.71 GB/s, 0.80 of memcpy's 8.39; 8 bytes 10 us" in speed.title
        assert (speed.level, pick.level) == ("ok", "ok") and "UCX picks cma/memory" in pick.title

    def test_wrong_bytes_fail(self):
        wrong = replace(self.MEASURED, right=False)
        assert worst(self.judge(measured=wrong, picks=(self.CMA,))).level == "fail"

    @pytest.mark.parametrize(("cma", "said"), [(True, "UCX_TLS or UCX_NET_DEVICES is why"), (False, "CMA is refused")])
    def test_tcp_on_one_host_is_a_warning_with_its_reason(self, cma, said):
        found = worst(self.judge(cma=cma, measured=self.MEASURED, picks=(self.TCP,)))
        assert found.level == "warn" and said in found.means

    @pytest.mark.parametrize(("large", "said"), [(0.01, "kernel or shared memory"), (0.5, "tcp")])
    def test_what_ucx_did_not_say_is_called_inferred(self, large, said):
        _, pick = self.judge(measured=replace(self.MEASURED, large=large))
        assert "inferred from its speed" in pick.title and pick.title.endswith(said)

    def test_two_hosts_are_not_claimed(self):
        assert "was not measured" in self.judge(remote=True, measured=self.MEASURED, picks=(self.CMA,))[-1].title

    def test_an_aborted_reader_is_told_with_its_stage(self):
        reader = parse('{"stage":"read 8 bytes"}\n', "[1] [h:2] cma_ep.c:81 Fatal: not permitted\n", -6, 60.0)
        facts = pair.facts_of("DRAM", reader, parse('{"stage":"serve"}', "", 0, 60.0))
        found = worst(pair.judge(facts, cma=False, remote=False))
        assert found.level == "fail"
        assert "the reader: the process was ended by SIGABRT in stage 'read 8 bytes'" in found.means
        assert "Fatal: not permitted" in found.means and "holder" not in found.means


class TestPorts:
    FINE = ports.PortFacts("10.0.0.5", "--host", ("10.0.0.5",), (ports.Tried(5600), ports.Tried(5601)))

    def judge(self, remote=False, **changes):
        return ports.judge(replace(self.FINE, **changes), remote=remote)

    def test_fine(self):
        assert levels(self.judge(remote=True)) == ["ok", "ok", "ok"]
        assert levels(self.judge(host="localhost", addresses=("127.0.0.1",))) == ["ok", "ok", "ok"]
        assert levels(self.judge(remote=True, host="fd00::1", addresses=("fd00::1",))) == ["ok", "ok", "ok"]

    @pytest.mark.parametrize(
        ("changes", "level", "said"),
        [
            ({"trouble": "the name 'x' leads to no address"}, "fail", "leads to no address"),
            ({"addresses": ("127.0.0.1",), "remote": True}, "fail", "is loopback"),
            ({"addresses": ("0.0.0.0",)}, "warn", "is every address"),
            ({"addresses": ("0.0.0.0",), "remote": True}, "fail", "is every address"),
            (
                {"tried": (ports.Tried(5600, "EADDRINUSE", "process 7 (python)"),)},
                "fail",
                "taken by process 7 (python)",
            ),
            ({"tried": (ports.Tried(5600, "EADDRINUSE"),)}, "fail", "port 5600 on 10.0.0.5 is taken"),
            ({"tried": (ports.Tried(5600, "EADDRNOTAVAIL"),)}, "fail", "10.0.0.5 is no address of this machine"),
            ({"tried": (ports.Tried(80, "EACCES"),)}, "fail", "cannot be listened on: EACCES"),
            ({"tried": (ports.Tried(40000),)}, "warn", "in the range 32768 to 60999"),
        ],
    )
    def test_not_fine(self, changes, level, said):
        found = worst(self.judge(**changes))
        assert (found.level, said in found.title) == (level, True), found

    def test_a_bad_port_variable(self, monkeypatch):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600a")
        assert "got '5600a'" in ports.gather(None, None, 1).trouble

    def test_replicas_beyond_the_last_port(self):
        assert "ports up to 65536" in ports.gather("127.0.0.1", 65535, 2).trouble


class TestDisk:
    FINE = disk.DiskFacts("/d", "ext4", 100 * GIB, write=0.1, sync=0.2, read=0.05, durable=0.001)

    def test_fine(self):
        (found,) = disk.judge(self.FINE)
        assert "writes 671 MB/s, with fsync 336 MB/s, reads 1342 MB/s" in found.title and "1.0 ms" in found.title

    @pytest.mark.parametrize(
        ("changes", "level", "said"),
        [
            ({"trouble": "PermissionError"}, "fail", "/d cannot be used"),
            ({"right": False}, "fail", "other bytes"),
            ({"read": 1.0}, "warn", "reads 67 MB/s"),
            ({"free": 100 << 20}, "warn", "100 MiB are free"),
            ({"kind": "tmpfs"}, "warn", "does not survive"),
            ({"kind": "nfs4"}, "warn", "network"),
            ({"kind": "fuse.s3fs"}, "warn", "network"),
        ],
    )
    def test_not_fine(self, changes, level, said):
        found = worst(disk.judge(replace(self.FINE, **changes)))
        assert (found.level, said in found.title) == (level, True), found

    def test_the_file_system_is_that_of_the_longest_mount_point(self, tmp_path):
        mounts = f"/dev/a / ext4 rw 0 0\nh:/x {tmp_path} nfs4 rw 0 0\n/dev/b {tmp_path}-other xfs rw 0 0\n"
        assert disk.kind_of(str(tmp_path / "below"), mounts) == "nfs4"
        assert disk.kind_of("/elsewhere", mounts) == "ext4"


def nixl(kvconn):
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kvconn": kvconn}}


class TestSettings:
    def test_fine(self):
        facts = settings.gather('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
        assert levels(settings.judge(facts)) == ["ok"]

    @pytest.mark.parametrize(
        ("raw", "said"),
        [
            ("{", "kv_transfer_config: not JSON"),
            ('{"kv_connector": "NixlConector", "kv_role": "kv_both"}', "kv_transfer_config.kv_connector"),
            ('{"kv_connector": "NixlConnector"}', "kv_transfer_config.kv_role: missing"),
            (multi(), "connectors: expected at least one connector"),
            (
                multi({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}),
                "[0].kv_load_failure_policy: expected the engine's one policy, 'fail'",
            ),
            (
                multi(nixl({"key_file": "/no/such/key"})),
                "connectors[0].kv_connector_extra_config.kvconn.key_file: /no/",
            ),
            (multi(nixl({"require_auth": True})), "kvconn.require_auth: expected a key_file beside it"),
            (multi(nixl({"allow": ["host"]})), "kvconn.allow: expected networks"),
        ],
    )
    def test_not_fine(self, raw, said):
        found = worst(settings.judge(settings.gather(raw)))
        assert found.level == "fail" and said in found.title

    def test_a_key_is_shown_by_its_fingerprint(self, tmp_path):
        key = tmp_path / "fleet.key"
        key.write_text("s" * 32)
        key.chmod(0o600)
        (found,) = settings.judge(settings.gather(multi(nixl({"key_file": str(key)}))))
        assert found.title.endswith(f"; fleet key {read_key(str(key)).fingerprint}") and "sss" not in found.title

    def test_children_of_children_end_somewhere(self):
        raw = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        for _ in range(40):
            raw = msgspec.json.decode(multi(raw))
        found = worst(settings.judge(settings.gather(multi(raw))))
        assert "more than 8 deep" in found.title

    def test_every_connector_of_ours_has_settings_or_children(self):
        assert {*settings.SETTINGS, "MultiConnector"} == set(settings.CONNECTORS)

    def test_a_class_that_is_not_ours_is_a_warning(self):
        loaded = settings.Loaded("kv_transfer_config", "m.C")
        facts = settings.ConfigFacts({"kv_transfer_config": "C"}, ("kv_both",), (), (loaded,))
        assert worst(settings.judge(facts)).level == "warn"


class TestChildren:
    def test_what_is_no_line_of_ours_is_ignored(self):
        out = 'hello\n{"stage":"a"}\n[1]\n{"result":{"x":1}}\n{"stage":"b"}\n\xff'
        assert parse(out, "", 0, 1.0) == Ending(0, 1.0, "b", "", b'{"x":1}')

    def test_a_result_of_another_kind_is_none(self):
        assert children.decoded(Ending(0, 1.0, result=b'{"right": 1}'), pair.Measured) is None

    @pytest.mark.parametrize(
        ("ending", "said"),
        [
            (Ending(None, 45.0, "serve"), "did not end within 45 s, stage 'serve'"),
            (Ending(-9, 1.0, "import"), "ended by SIGKILL in stage 'import'"),
            (Ending(1, 1.0, "import", "ValueError: x"), "in stage 'import': ValueError: x"),
            (Ending(3, 1.0, "import", stderr="a\nlast\n"), "status 3 in stage 'import'; its last words: last"),
        ],
    )
    def test_an_end_in_words(self, ending, said):
        assert said in explain(ending)

    def test_the_fatal_line_says_most(self):
        text = "[1] [h:1] x.c:1 UCX ERROR small\n[1] [h:1] x.c:2 Fatal: the reason\n==== backtrace ====\n 0 x\n"
        assert complaint(text) == "x.c:2 Fatal: the reason"

    def test_a_child_that_hangs_is_killed_at_its_deadline(self, monkeypatch, tmp_path):
        (tmp_path / "hangs.py").write_text("while True: pass")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        ending = children.run_child(["connector", "p", "hangs", "C"], 2.0)
        assert (ending.status, ending.stage) == (None, "import hangs")

    def test_an_unknown_order_is_an_error(self):
        assert children.run_child(["no-such"], 30.0).error == "ValueError: no such child: 'no-such'"

    def test_a_child_whose_parent_is_gone_ends_at_once(self):
        done = subprocess.run(
            [sys.executable, "-m", "kvconn.doctor.child", "1", "no-such"], capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (1, b"")


def test_a_probe_that_raises_is_a_finding_and_not_the_end(monkeypatch):
    def broken():
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(host, "gather_versions", broken)
    monkeypatch.setattr(gpu, "gather", gpu.GpuFacts)
    monkeypatch.setattr(agent, "gather", lambda: agent.AgentFacts(trouble="no agent"))
    report = run.examine(run.Options(host="127.0.0.1", port=5600))
    (found,) = report.findings["versions"]
    assert isinstance(found, Finding) and found.level == "fail"
    assert "RuntimeError: unforeseen" in found.title and "A fault of kvconn" in found.means
    assert "transfer" not in report.findings and report.findings["ports"]
