"""``kvconn doctor`` as a command: on this machine, and on machines made hostile for it."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvconn.transport.ucx import cma_usable
from tests.support import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
#: process_vm_readv's number, where we know it.
NUMBERS = {"x86_64": 310, "aarch64": 270}
#: runs a command under a seccomp filter that refuses process_vm_readv, as a container's may.
REFUSING = """
import ctypes, os, struct, sys
number, *command = sys.argv[1:]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
code = b"".join(struct.pack("HBBI", *step) for step in (
    (0x20, 0, 0, 0),  # load the call's number
    (0x15, 0, 1, int(number)),  # is it that one?
    (0x06, 0, 0, 0x00050000 | 1),  # EPERM
    (0x06, 0, 0, 0x7FFF0000),  # allowed
))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, code)), 0, 0) == 0, ctypes.get_errno()
os.execv(command[0], command)
"""
HIDDEN = ("UCX_TLS", "UCX_NET_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def doctor(*arguments, before=(), port=None, **env):
    """Exit code and report, as JSON."""
    command = [*before, sys.executable, "-m", "kvconn.cli", "doctor", "--json", "--port", port or free_port()]
    done = subprocess.run(
        [str(part) for part in (*command, *arguments)],
        capture_output=True, text=True, timeout=110, check=False, env=environment(**env), cwd=ROOT,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["code"] == done.returncode
    return report


def titles(report, level):
    return [finding["title"] for finding in report["findings"] if finding["level"] == level]


def matching(report, text):
    """The one finding whose title has ``text``."""
    (found,) = [finding for finding in report["findings"] if text in finding["title"]]
    return found


def test_this_machine_is_measured(tmp_path):
    report = doctor("--dir", tmp_path)
    assert (report["code"], titles(report, "fail")) == (0, [])
    measured = report["facts"]["read from host memory"]["measured"]
    assert measured["right"] is True and measured["size"] == 64 << 20
    assert min(measured[name] for name in ("large", "small", "notification", "memcpy")) > 0
    picks = [pick["wire"] for pick in report["facts"]["read from host memory"]["picks"]]
    assert picks and all(("cma" in wire) == cma_usable() for wire in picks)
    assert any("tcp/" in name for name in report["facts"]["agent"]["transports"])
    assert report["facts"]["agent"]["ucx"].count(".") == 2
    assert min(report["facts"]["disk"][name] for name in ("write", "sync", "read", "durable")) > 0
    assert list(tmp_path.iterdir()) == []


def test_ucx_tls_that_leaves_nothing_to_connect_with():
    report = doctor(UCX_TLS="cma")
    assert report["code"] == 1
    assert matching(report, "leaves no transport to connect with")["set"] == "UCX_TLS=cma,tcp, or unset UCX_TLS"
    assert "NIXL_ERR_BACKEND" in matching(report, "no NIXL agent can be made")["means"]
    assert "read from host memory" not in report["facts"]


def test_a_device_that_does_not_exist():
    report = doctor("--no-measure", UCX_NET_DEVICES="mlx5_77:1")
    assert report["code"] == 1
    assert "lo" in matching(report, "UCX_NET_DEVICES=mlx5_77:1: none of them exists")["title"]


def test_tcp_on_one_host_is_a_warning_that_ucx_itself_confirms():
    report = doctor(UCX_TLS="tcp")
    assert report["code"] == 0
    assert matching(report, "UCX picks tcp/")["level"] == "warn"


def test_nixl_missing(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").write_text("raise ImportError('no such wheel')")
    report = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert report["code"] == 1
    found = matching(report, "no NIXL agent can be made")
    assert "nixl cannot be imported: no such wheel; install it with `pip install nixl`" in found["means"]


def test_a_nixl_that_aborts_the_process(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").write_text(
        "import os\nos.write(2, b'[1.0] [h:1] ucx.c:1 Fatal: made to abort\\n')\nos.abort()"
    )
    report = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert report["code"] == 1
    means = matching(report, "no NIXL agent can be made")["means"]
    assert "ended by SIGABRT in stage 'make a NIXL agent with UCX'" in means and "made to abort" in means


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="process_vm_readv's number is not known here")
class TestRefusedCma:
    before = (sys.executable, "-c", REFUSING, NUMBERS.get(platform.machine(), 0))

    @pytest.mark.parametrize("env", [{}, {"UCX_TLS": "cma,tcp"}])
    def test_reads_go_another_way_and_the_operator_is_told(self, env):
        """Measured: refused even to itself, UCX leaves CMA out. (Allowed to itself only, it would abort.)"""
        report = doctor(before=self.before, **env)
        assert report["code"] == 0
        assert "--cap-add=SYS_PTRACE" in matching(report, "CMA is refused altogether (a seccomp filter is on)")["set"]
        assert report["facts"]["read from host memory"]["measured"]["right"] is True
        assert matching(report, "for host memory UCX picks")["level"] == "warn"


def test_a_taken_port_is_named_with_who_has_it():
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        report = doctor("--no-measure", port=port)
    assert report["code"] == 1
    found = matching(report, f"side channel port {port} on 127.0.0.1 is taken")
    assert f"process {os.getpid()} (" in found["title"]


def test_replicas_need_the_ports_above():
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        second = mine.getsockname()[1]
        report = doctor("--no-measure", "--replicas", 2, port=second - 1)
    assert matching(report, f"port {second} on")["level"] == "fail"


def test_a_bad_configuration_with_the_paths_of_its_keys(tmp_path):
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector", "kv_role": "kv_produce"},
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"cpu_byte_to_use": 1},
                },
            ]
        },
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    report = doctor("--no-measure", "--kv-transfer-config", file)
    where = "kv_transfer_config.kv_connector_extra_config.connectors"
    assert report["code"] == 1
    assert "did you mean 'kv_producer'?" in matching(report, f"{where}[0].kv_role")["title"]
    assert "did you mean 'cpu_bytes_to_use'?" in matching(report, f"{where}[1].kv_connector_extra_config")["title"]


def test_a_connector_by_module_path_is_imported_in_a_child(tmp_path):
    (tmp_path / "theirs.py").write_text("import os\nos.abort()")
    config = {"kv_connector": "Theirs", "kv_role": "kv_both", "kv_connector_module_path": "theirs"}
    report = doctor(
        "--no-measure", "--kv-transfer-config", json.dumps(config), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"
    )
    assert report["code"] == 1
    assert "SIGABRT in stage 'import theirs'" in matching(report, "Theirs cannot be loaded")["means"]


def test_a_directory_that_is_not_there(tmp_path):
    report = doctor("--no-measure", "--dir", tmp_path / "none")
    assert report["code"] == 1
    assert "No such file" in matching(report, "cannot be used")["means"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "--port"),
        (["--replicas", "0"], "--replicas"),
        (["--kv-transfer-config", "no/such/file"], "expected a JSON object or a readable file"),
    ],
)
def test_usage(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "kvconn.cli", "doctor", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr


def test_in_words():
    done = subprocess.run(
        [sys.executable, "-m", "kvconn.cli", "doctor", "--no-measure", "--remote", "--port", str(free_port())],
        capture_output=True, text=True, timeout=60, check=False, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "fail side channel host 127.0.0.1 is loopback" in line)
    assert lines[at + 1].strip().startswith("means: P tells its clients") and "set: " in lines[at + 2]
    assert lines[-1].endswith("1 failures: what failed would break an engine")


@pytest.mark.parametrize(("kill", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_child_outlives_the_command(kill, status, tmp_path):
    """A nixl that hangs keeps a child alive until the command is ended."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").write_text(f"open({str(tmp_path / 'here')!r}, 'w').close()\nwhile True: pass")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvconn.cli", "doctor", "--port", str(free_port())],
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until((tmp_path / "here").exists, 60, "the child that hangs")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.send_signal(kill)
        assert process.wait(20) == status
        wait_until(lambda: not any(_alive(pid) for pid in children), 20, "the children's end")
    finally:
        process.kill()
        process.wait()


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
