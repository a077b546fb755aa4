"""Our classes and vLLM's interface, by reflection and in one process."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm.engines import ROOT, environment

pytest.importorskip("vllm", reason="vllm is not installed here; make test-vllm runs these")

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

import kvconn.vllm
from kvconn.base import Fact, WorkerFacts
from kvconn.errors import ConfigError
from kvconn.offload import events
from kvconn.vllm import interface, translate
from kvconn.vllm.facade import VllmWorkerFacts
from kvconn.vllm.offload import _event

CLASSES = [kvconn.vllm.NixlConnector, kvconn.vllm.MultiConnector, kvconn.vllm.OffloadingConnector]
#: the envelope's own business, or answered by vLLM's base from what we set
INHERITED = {"role", "has_connector_metadata", "get_external_cache_hit_sources"}


def methods(cls: type) -> set[str]:
    return {
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
    }


def test_every_method_of_the_interface_is_forwarded_by_our_multiconnector() -> None:
    own = {
        name for cls in kvconn.vllm.MultiConnector.__mro__ for name in vars(cls) if cls.__module__.startswith("kvconn")
    }
    assert methods(KVConnectorBase_V1) - own - INHERITED == set()


@pytest.mark.parametrize("cls", CLASSES)
def test_parameters_have_the_names_that_vllm_calls_them_by(cls: type) -> None:
    for name in methods(KVConnectorBase_V1):
        theirs = getattr(KVConnectorBase_V1, name)
        if not callable(theirs):
            continue
        want = [p for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        have = inspect.signature(getattr(cls, name)).parameters
        assert [p.name for p in want] == [n for n in have if n in {p.name for p in want}], name


@pytest.mark.parametrize("version", interface.VERSIONS)
@pytest.mark.parametrize("cls", CLASSES)
def test_each_class_fits_the_interface_of_each_release(cls: type, version: str) -> None:
    assert interface.fits(cls, version) == []


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_is_registered_under_its_own_name(cls: type) -> None:
    assert cls.__name__.startswith("Kvconn")
    assert KVConnectorFactory.get_connector_class_by_name(cls.__name__) is cls
    assert supports_hma(cls)
    kvconn.vllm.register()  # again: nothing happens


def test_the_public_names_are_vllms() -> None:
    assert kvconn.vllm.NixlConnector is kvconn.vllm.NixlPullConnector
    with pytest.raises(ConfigError, match="NixlPushConnector: this version reads"):
        kvconn.vllm.NixlPushConnector  # noqa: B018


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, kvconn.vllm; assert not {'torch', 'vllm', 'zmq', 'nixl'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(1, {}), cwd=ROOT, timeout=60)


def test_facts_of_ranks_are_joined_and_travel() -> None:
    one, two = (VllmWorkerFacts(WorkerFacts((Fact("a", "send", 1, rank, "done"),))) for rank in (0, 1))
    joined = pickle.loads(pickle.dumps(one.aggregate(two)))
    assert [fact.rank for fact in joined.inner.facts] == [0, 1]


def cache_config(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)])


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=32)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ((FULL, WINDOW), "one KV cache group, this one has 2.*SlidingWindowSpec"),
        ((WINDOW,), "full attention and MLA, not SlidingWindowSpec"),
    ],
)
def test_models_that_the_neutral_code_has_no_rules_for_are_refused(specs: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        translate.cache_view(cache_config(*specs))


def test_tensors_that_cannot_be_read_block_by_block_are_refused() -> None:
    halves, split = torch.zeros(16, 2, 8, 64), torch.zeros(2, 8, 16, 128).permute(1, 0, 2, 3)
    with pytest.raises(ConfigError, match=r"layer a: expected 8 blocks.*layer b: a block is not one piece"):
        translate.layer_views({"a": halves, "b": split}, 8, ["a", "b"])
    (view,) = translate.layer_views({"c": torch.zeros(8, 2, 16, 128), "skip": halves}, 8, ["c", "absent"]).values()
    assert (view.count, view.stride, view.length) == (8, 2 * 16 * 128 * 4, 2 * 16 * 128 * 4)


def test_offloading_events_are_vllms_own() -> None:
    stored = events.BlockStored((b"h" * 32,), b"p" * 32, (1, 2), 2, "host")
    told = [_event(stored), _event(events.BlockRemoved((b"h" * 32,), "fs"))]
    assert [type(one) for one in told] == [BlockStored, BlockRemoved]
    assert [one.medium for one in told] == ["CPU", "fs"] and told[0].token_ids == [1, 2] and told[0].block_size == 2
    assert told[0].block_hashes == told[1].block_hashes == [maybe_convert_block_hash(b"h" * 32)]
