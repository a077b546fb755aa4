"""``kv_transfer_config``: every problem at once, each with the path of its key."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.config import (
    KVTransferConfig,
    Limits,
    MultiSettings,
    NixlSettings,
    OffloadSettings,
    ParallelConfig,
    fresh_engine_id,
    parse_extra,
    parse_kv_transfer_config,
    side_channel_address,
)
from kvconn.errors import ConfigError

GOOD: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def problems(raw: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_kv_transfer_config(raw)
    return caught.value.problems


def extra_problems(extra: dict[str, Any], kind: Any = NixlSettings) -> tuple[str, ...]:
    config = parse_kv_transfer_config({**GOOD, "kv_connector_extra_config": extra})
    with pytest.raises(ConfigError) as caught:
        parse_extra(kind, config)
    return caught.value.problems


class TestTransferConfig:
    def test_two_keys_are_enough_and_the_rest_is_vllms_default(self) -> None:
        config = parse_kv_transfer_config(GOOD)
        assert config == KVTransferConfig("NixlConnector", "kv_producer")
        assert (config.kv_load_failure_policy, config.kv_connector_extra_config) == ("fail", {})

    @pytest.mark.parametrize("encode", [json.dumps, lambda raw: json.dumps(raw).encode(), dict])
    def test_text_bytes_and_objects_mean_the_same(self, encode: Any) -> None:
        assert parse_kv_transfer_config(encode(GOOD)) == parse_kv_transfer_config(GOOD)

    def test_every_problem_is_reported_at_once(self) -> None:
        found = problems({"kv_rol": "kv_producer", "kv_role": "kv_produce", "kv_port": "x", "engine_id": 7, "zzz": 1})
        assert [p.split(":")[0] for p in found] == [
            "kv_transfer_config.kv_rol",
            "kv_transfer_config.zzz",
            "kv_transfer_config.kv_connector",
            "kv_transfer_config.kv_role",
            "kv_transfer_config.engine_id",
            "kv_transfer_config.kv_port",
        ]

    def test_an_unknown_key_names_the_key_that_was_meant(self) -> None:
        assert problems({**GOOD, "kv_conector": "x"}) == (
            "kv_transfer_config.kv_conector: unknown key (did you mean 'kv_connector'?)",
        )
        assert problems({**GOOD, "qqqq": 1}) == ("kv_transfer_config.qqqq: unknown key",)

    def test_a_wrong_role_names_the_role_that_was_meant(self) -> None:
        (problem,) = problems({**GOOD, "kv_role": "producer"})
        assert "did you mean 'kv_producer'?" in problem

    @pytest.mark.parametrize("key", ["kv_role", "engine_id", "kv_connector"])
    def test_a_lone_surrogate_which_json_can_hold_is_a_problem_of_its_key(self, key: str) -> None:
        (problem,) = problems({**GOOD, key: "\ud800"})
        assert problem.startswith(f"kv_transfer_config.{key}: ")

    def test_a_missing_key_is_named(self) -> None:
        assert problems({"kv_role": "kv_both"}) == ("kv_transfer_config.kv_connector: missing",)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("kv_connector", 7),
            ("kv_role", None),
            ("engine_id", 7),
            ("kv_connector_module_path", []),
            ("kv_connector_extra_config", [1]),
            ("kv_connector_extra_config", {1: 2}),
            ("kv_buffer_device", 1),
            ("kv_load_failure_policy", "retry"),
            ("kv_port", 0),
            ("kv_port", 65536),
            ("kv_port", 1.5),
            ("enable_permute_local_kv", "yes"),
        ],
    )
    def test_a_wrong_value_is_named_with_its_path(self, key: str, value: Any) -> None:
        (problem,) = problems({**GOOD, key: value})
        assert problem.startswith(f"kv_transfer_config.{key}: ")

    def test_paths_start_where_the_caller_says(self) -> None:
        with pytest.raises(ConfigError, match=r"connectors\[1\]\.kv_role: missing"):
            parse_kv_transfer_config({"kv_connector": "x"}, path="connectors[1]")

    @pytest.mark.parametrize(
        "raw", ["", "{", b"\xff\xfe", '"\ud800"', "[1]", "7", "null", '{"a":' * 100_000, None, 7, ["kv_role"]]
    )
    def test_what_is_no_object_is_a_config_error(self, raw: Any) -> None:
        (problem,) = problems(raw)
        assert problem.startswith("kv_transfer_config: ")

    @FUZZ
    @given(
        raw=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda x: (
                st.lists(x, max_size=3)
                | st.dictionaries(st.text(max_size=9) | st.sampled_from(KVTransferConfig.__struct_fields__), x)
            ),
            max_leaves=10,
        )
    )
    def test_nothing_but_a_config_or_a_config_error_comes_out(self, raw: Any) -> None:
        with contextlib.suppress(ConfigError):
            parse_extra(NixlSettings, parse_kv_transfer_config(raw))

    def test_one_problem_and_several_are_headed_differently(self) -> None:
        assert str(ConfigError("a: wrong")) == "configuration error: a: wrong"
        assert str(ConfigError(["a: wrong", "b: wrong"])) == "2 configuration errors: a: wrong; b: wrong"


class TestExtraConfig:
    def test_defaults_are_the_table_of_limits(self) -> None:
        nixl = parse_extra(NixlSettings, parse_kv_transfer_config(GOOD))
        offload = parse_extra(OffloadSettings, parse_kv_transfer_config(GOOD))
        assert (nixl.kv_lease_duration, offload.kvconn.store, Limits().stall_after) == (30, 60, 30)
        table = {"handshake": 10, "read": 60, "quarantine_age": 60, "pump_interval": 200e-6, "peers_max": 4096}
        assert {name: getattr(nixl.kvconn, name) for name in table} == table

    @pytest.mark.parametrize(
        ("kind", "name"), [(NixlSettings, "hold"), (NixlSettings, "store"), (OffloadSettings, "read")]
    )
    def test_a_key_of_another_connector_is_refused(self, kind: Any, name: str) -> None:
        (problem,) = extra_problems({"kvconn": {name: 1}}, kind)
        assert problem.startswith(f"kv_transfer_config.kv_connector_extra_config.kvconn.{name}: unknown key")

    def test_given_values_are_taken(self) -> None:
        extra = {"backends": ["UCX", "LIBFABRIC"], "kv_lease_duration": 5, "kvconn": {"read": 0.5, "progress": "poll"}}
        settings_ = parse_extra(NixlSettings, parse_kv_transfer_config({**GOOD, "kv_connector_extra_config": extra}))
        assert (settings_.backends, settings_.kv_lease_duration) == (("UCX", "LIBFABRIC"), 5.0)
        assert (settings_.kvconn.read, settings_.kvconn.progress) == (0.5, "poll")

    def test_every_problem_at_every_depth_is_reported_at_once(self) -> None:
        found = extra_problems({"num_thread": 1, "engine_ttl": "x", "kvconn": {"handshak": 1, "read": None}})
        path = "kv_transfer_config.kv_connector_extra_config"
        assert [p.partition(": ")[0] for p in found] == [
            f"{path}.num_thread",
            f"{path}.engine_ttl",
            f"{path}.kvconn.handshak",
            f"{path}.kvconn.read",
        ]
        assert "did you mean 'num_threads'?" in found[0]
        assert "did you mean 'handshake'?" in found[2]

    @pytest.mark.parametrize("name", ["handshake", "read", "quarantine_age", "pump_interval"])
    @pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "30"])
    def test_a_deadline_that_is_none_is_refused(self, name: str, value: Any) -> None:
        (problem,) = extra_problems({"kvconn": {name: value}})
        assert problem.startswith(f"kv_transfer_config.kv_connector_extra_config.kvconn.{name}: ")

    @pytest.mark.parametrize("name", ["early_max", "waiting_max", "peers_max"])
    @pytest.mark.parametrize("value", [0, -1, 1.5])
    def test_a_bound_that_holds_nothing_is_refused(self, name: str, value: Any) -> None:
        assert len(extra_problems({"kvconn": {name: value}})) == 1

    @pytest.mark.parametrize(
        "extra",
        [
            {"kv_lease_duration": 0},
            {"kv_lease_duration": -5.0},
            {"engine_ttl": 0},
            {"num_threads": -1},
            {"kv_recompute_threshold": -1},
            {"backends": "UCX"},
            {"enforce_handshake_compat": 1},
            {"kvconn": {"progress": "spin"}},
            {"kvconn": []},
        ],
    )
    def test_wrong_nixl_settings_are_refused(self, extra: dict[str, Any]) -> None:
        assert len(extra_problems(extra)) == 1

    def test_offload_and_multi_have_their_own_keys(self) -> None:
        assert len(extra_problems({"cpu_bytes_to_use": "1G"}, OffloadSettings)) == 1
        assert len(extra_problems({"eviction_policy": "fifo"}, OffloadSettings)) == 1
        assert len(extra_problems({}, MultiSettings)) == 1
        assert len(extra_problems({"connectors": [GOOD, 7]}, MultiSettings)) == 1
        raw = {**GOOD, "kv_connector_extra_config": {"connectors": [GOOD, GOOD]}}
        assert parse_extra(MultiSettings, parse_kv_transfer_config(raw)).connectors == (GOOD, GOOD)

    def test_settings_are_frozen(self) -> None:
        settings_ = parse_extra(NixlSettings, parse_kv_transfer_config(GOOD))
        with pytest.raises(AttributeError):
            settings_.kvconn.read = 1.0  # type: ignore[misc]


class TestTheRest:
    @pytest.mark.parametrize(
        ("parallel", "world", "output_rank"),
        [
            (ParallelConfig(), 1, 0),
            (ParallelConfig(pcp=8), 8, 0),
            (ParallelConfig(tp=2, pp=3, pcp=4), 24, 16),
            (ParallelConfig(pp=2), 2, 1),
            (ParallelConfig(tp=4, dcp=4), 4, 0),
        ],
    )
    def test_world_and_output_rank(self, parallel: ParallelConfig, world: int, output_rank: int) -> None:
        assert (parallel.world, parallel.output_rank) == (world, output_rank)

    def test_an_engine_id_is_the_configured_one_or_fresh(self) -> None:
        config = parse_kv_transfer_config(GOOD)
        assert fresh_engine_id(msgspec.structs.replace(config, engine_id="mine")) == "mine"
        assert len({fresh_engine_id(config) for _ in range(50)}) == 50

    def test_the_side_channel_address_is_vllms_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
        monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
        assert side_channel_address() == ("127.0.0.1", 5600)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "65535")
        assert side_channel_address() == ("10.0.0.1", 65535)

    @pytest.mark.parametrize("port", ["", "0", "65536", "-1", "http", "5600 ", "²", "9" * 5000, "1.5"])
    def test_a_port_that_is_none_is_named(self, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", port)
        with pytest.raises(ConfigError, match=r"VLLM_NIXL_SIDE_CHANNEL_PORT: expected a port 1\.\.65535"):
            side_channel_address()
