"""The fleet's key file, what is derived from it, and the networks peers may be in."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvconn import trust
from kvconn.config import NixlKvconn, NixlSettings, parse_extra, parse_kv_transfer_config
from kvconn.errors import ConfigError
from kvconn.trust import FleetKey, Trust, load_trust, numeric, read_key, warn_without_key

SECRET = "0123456789abcdef" * 2


def key_file(directory: Path, secret: str | bytes = SECRET, mode: int = 0o600) -> str:
    path = directory / "fleet.key"
    path.write_bytes(secret.encode() if isinstance(secret, str) else secret)
    path.chmod(mode)
    return str(path)


def problem(file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key(file)
    (only,) = caught.value.problems
    assert only.startswith(f"{file}: ")
    return only


def settings(**kvconn: Any) -> NixlKvconn:
    raw = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kvconn": kvconn}}
    return parse_extra(NixlSettings, parse_kv_transfer_config(raw)).kvconn


class TestKeyFile:
    @pytest.mark.parametrize("mode", [0o600, 0o400])
    def test_its_owners_alone_is_good(self, tmp_path: Path, mode: int) -> None:
        assert read_key(key_file(tmp_path, mode=mode)).fingerprint == FleetKey(SECRET.encode()).fingerprint

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o666, 0o620, 0o601])
    def test_open_to_others_is_refused_with_its_mode(self, tmp_path: Path, mode: int) -> None:
        assert f"expected mode 0600 or 0400, got {mode:04o}" in problem(key_file(tmp_path, mode=mode))

    @pytest.mark.parametrize("secret", [b"", b"\n", b"x" * 31, b" " * 64, b"x" * 4097, b"x" * 100_000])
    def test_too_short_or_too_long_is_refused_and_not_quoted(self, tmp_path: Path, secret: bytes) -> None:
        found = problem(key_file(tmp_path, secret))
        assert "expected 32 to 4096 bytes, got " in found and "xxx" not in found

    def test_white_space_at_its_ends_means_nothing(self, tmp_path: Path) -> None:
        wanted = FleetKey(SECRET.encode()).fingerprint
        for ends in ("{}\n", "{}\r\n", " {} \n"):
            assert read_key(key_file(tmp_path, ends.format(SECRET))).fingerprint == wanted

    def test_what_is_no_file_is_refused_and_nothing_waits(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo", 0o600)
        assert "expected a regular file" in problem(str(tmp_path / "fifo"))
        (tmp_path / "dir").mkdir(mode=0o700)
        assert "expected a regular file" in problem(str(tmp_path / "dir"))
        assert "cannot be read: No such file" in problem(str(tmp_path / "none"))
        assert "openssl rand" in problem(str(tmp_path / "none"))
        assert "cannot be read" in problem("/a\x00b")

    @pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
    def test_somebody_elses_file_is_refused(self, tmp_path: Path) -> None:
        file = key_file(tmp_path)
        os.chown(file, 12345, 12345)
        assert "got one of user 12345" in problem(file)


class TestDerivedKeys:
    def test_it_is_hkdf_of_rfc_5869(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Test case 1 of the RFC's appendix: salt, input and info are ours to choose, the first 32 bytes its OKM's."""
        monkeypatch.setattr(trust, "_SALT", bytes.fromhex("000102030405060708090a0b0c"))
        info = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")

        class Use(str):
            def encode(self, *_: Any) -> bytes:
                return info

        okm = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
        assert FleetKey(b"\x0b" * 22).derive(Use()).hex() == okm

    def test_each_use_and_each_secret_has_its_own(self) -> None:
        a, b = FleetKey(b"a" * 32), FleetKey(b"b" * 32)
        assert len({a.derive("x"), a.derive("y"), b.derive("x"), b.derive("y")}) == 4
        assert a.derive("x") == FleetKey(b"a" * 32).derive("x") and len(a.derive("x")) == 32

    def test_the_secret_is_in_no_text(self) -> None:
        key = FleetKey(SECRET.encode())
        assert repr(Trust(key)) == f"Trust(key=FleetKey({key.fingerprint}), allow=None, rate=100)"
        assert SECRET not in repr(key) and len(key.fingerprint) == 8


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("10.0.0.1", "10.0.0.1"),
            ("::1", "::1"),
            ("[fd00::1]", "fd00::1"),
            ("fe80::1%eth0", "fe80::1%eth0"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ],
    )
    def test_its_usual_forms(self, text: str, address: str) -> None:
        assert str(numeric(text)) == address

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "localhost",
            "10.0.0",
            "010.0.0.1",
            "1;2",
            "0x7f.1",
            "[::1",
            "10.0.0.1/8",
            "٣.0.0.1",
            "fe80::1%",
            "fe80::1%a;tcp://10.0.0.1",
            "fe80::1% a",
            "fe80::1%a/b",
            "fe80::1%" + "a" * 16,
        ],
    )
    def test_anything_else_is_none(self, text: str) -> None:
        assert numeric(text) is None

    @pytest.mark.parametrize(
        ("allow", "address", "may"),
        [
            (None, "203.0.113.9", True),
            (["10.0.0.0/8"], "10.255.0.1", True),
            (["10.0.0.0/8"], "11.0.0.1", False),
            (["10.0.0.0/8"], "::ffff:10.0.0.1", True),  # over an IPv6 socket
            (["10.0.0.0/8"], "::ffff:11.0.0.1", False),
            (["10.0.0.0/8", "fd00::/8"], "fd12::1", True),
            (["fd00::/8"], "10.0.0.1", False),
            (["192.0.2.7"], "192.0.2.7", True),
            (["192.0.2.7"], "192.0.2.8", False),
            (["fe80::/10"], "fe80::1%eth0", True),
        ],
    )
    def test_a_network_allows_its_own(self, allow: list[str] | None, address: str, may: bool) -> None:
        where = numeric(address)
        assert where is not None
        assert load_trust(settings(**({"allow": allow} if allow else {}))).allows(where) is may


class TestSettings:
    @pytest.mark.parametrize(
        ("kvconn", "word"),
        [
            ({"allow": ["10.0.0.1/8"]}, "kvconn.allow: expected networks such as"),  # host bits: which did they mean?
            ({"allow": ["10.0.0.0/33"]}, "kvconn.allow: "),
            ({"allow": ["host.example"]}, "kvconn.allow: "),
            ({"allow": ["::ffff:10.0.0.0/104"]}, "write it as IPv4"),
            ({"allow": []}, "kvconn.allow: "),
            ({"allow": "10.0.0.0/8"}, "kvconn.allow: "),
            ({"key_file": "fleet.key"}, "kvconn.key_file: "),  # of which directory?
            ({"handshake_rate": 0}, "kvconn.handshake_rate: "),
            ({"require_auth": 1}, "kvconn.require_auth: "),
        ],
    )
    def test_a_wrong_value_is_found_at_start_up(self, kvconn: dict[str, Any], word: str) -> None:
        with pytest.raises(ConfigError) as caught:
            settings(**kvconn)
        assert word in caught.value.problems[0]

    def test_no_key_where_one_is_required_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"kvconn\.require_auth: expected a key_file beside it"):
            load_trust(settings(require_auth=True))
        assert load_trust(settings(require_auth=True, key_file=key_file(tmp_path))).key is not None

    def test_a_bad_key_file_is_named_with_its_path_in_the_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"extra_config\.kvconn\.key_file: /.*fleet\.key: expected mode"):
            load_trust(settings(key_file=key_file(tmp_path, mode=0o644)))

    def test_without_a_key_one_warning_per_process_says_what_that_means(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(trust, "_warned", False)
        with caplog.at_level(logging.WARNING, "kvconn"):
            warn_without_key(Trust(FleetKey(SECRET.encode())))
            assert caplog.records == []
            warn_without_key(Trust())
            warn_without_key(Trust())
        (record,) = caplog.records
        assert "NO FLEET KEY" in record.message and "any address" in record.message
