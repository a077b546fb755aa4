"""Our classes and vLLM's interface, by reflection and in one process."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.engines import ROOT, environment

pytest.importorskip("vllm", reason="vllm is not installed here; make test-vllm runs these")

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import kvconn.vllm
from kvconn.base import NO_BLOCK, Fact, GroupView, KVCacheView, WorkerFacts
from kvconn.config import ParallelConfig
from kvconn.errors import ConfigError
from kvconn.geometry import regions_of
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
    assert [bin(fact.ranks) for fact in joined.inner.facts] == ["0b11"]


def cache_config(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)])


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=32
)
MAMBA = MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=32)


def test_groups_are_full_or_windows() -> None:
    view = translate.cache_view(cache_config(FULL, WINDOW, FULL))
    assert [(group.kind, group.window) for group in view.groups] == [("full", None), ("window", 32), ("full", None)]
    assert view.block_size == 16 and view.groups[1].layers == ("layer.1",)


def test_a_window_under_one_group_of_full_attention_counts_as_full() -> None:
    """As --disable-hybrid-kv-cache-manager makes them: blocks are kept for all tokens."""
    (group,) = translate.cache_view(cache_config(replace(FULL, sliding_window=32))).groups
    assert group.kind == "full"


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ((FULL, CHUNKED), "full attention, sliding windows or MLA, got ChunkedLocalAttentionSpec.*vLLM's own"),
        ((MAMBA, FULL), "full attention, sliding windows or MLA, got MambaSpec"),
        (
            (FULL, replace(WINDOW, block_size=32)),
            r"one block size for all cache groups, got \[16, 32\] tokens.*--disable",
        ),
        ((replace(WINDOW, extra_retained_tokens=3),), "windows that keep no extra tokens, got 3"),
        ((), "has none: take kv_transfer_config out"),
    ],
)
def test_models_that_the_neutral_code_has_no_rules_for_are_refused(specs: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        translate.cache_view(cache_config(*specs))


def vllm_config(**sizes: int) -> Any:
    """As far as a half is constructed from it."""
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1}
    model = SimpleNamespace(
        model="m", dtype=torch.float32, use_mla=True, get_total_num_hidden_layers=lambda: 2, get_head_size=lambda: 576
    )
    more = {"decode_context_parallel_size": 1, "data_parallel_index": 0, "cp_kv_cache_interleave_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**one, **more, **sizes}),
        model_config=model,
        cache_config=SimpleNamespace(block_size=16),
        kv_transfer_config=SimpleNamespace(
            kv_connector="NixlConnector", kv_role="kv_producer", engine_id="e", kv_connector_extra_config={}
        ),
    )


def test_sizes_of_the_engine_are_vllms() -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "decode_context_parallel_size": 2}
    parallel = translate.connector_config(vllm_config(**sizes, cp_kv_cache_interleave_size=8), worker=False).parallel
    assert parallel == ParallelConfig(tp=4, pp=2, dcp=2, dcp_interleave=8)


def test_decode_context_parallelism_is_refused_by_name() -> None:
    """vLLM's CPU kernels return no softmax LSE, which it needs: it can't be run here, and so isn't promised."""
    given = vllm_config(tensor_parallel_size=2, decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size: expected 1, got 2: .*leave --decode-context"):
        kvconn.vllm.NixlConnector(given, KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_offloading_of_windows_is_refused_by_name() -> None:
    given = vllm_config()
    given.kv_transfer_config.kv_connector = "OffloadingConnector"
    with pytest.raises(ConfigError, match=r"full attention in every layer, got a window \(layer.1\): take it out, or"):
        kvconn.vllm.OffloadingConnector(given, KVConnectorRole.SCHEDULER, cache_config(FULL, WINDOW))


def test_tensors_that_cannot_be_read_block_by_block_are_refused() -> None:
    halves, split = torch.zeros(16, 2, 8, 64), torch.zeros(2, 8, 16, 128).permute(1, 0, 2, 3)
    with pytest.raises(ConfigError, match=r"layer a: expected 8 blocks.*layer b: a block of it is not one piece"):
        translate.layer_views({"a": halves, "b": split}, KVCacheView(8, 16, (GroupView("full", ("a", "b")),)))
    view = KVCacheView(8, 16, (GroupView("full", ("c", "absent")),))
    (layer,) = translate.layer_views({"c": torch.zeros(8, 2, 16, 128), "skip": halves}, view).values()
    assert (layer.count, layer.stride, layer.length) == (8, 2 * 16 * 128 * 4, 2 * 16 * 128 * 4)


def test_layers_of_two_groups_in_one_tensor_are_two_regions() -> None:
    """vLLM lays groups over each other: a block is the group's whose id it is."""
    one = torch.zeros(8, 2, 16, 128)
    view = translate.cache_view(cache_config(FULL, WINDOW))
    regions = regions_of(translate.layer_views({"layer.0": one, "layer.1": one}, view).values())
    assert [(region.name, region.group, region.base) for region in regions] == [
        ("layer.0", 0, one.data_ptr()), ("layer.1", 1, one.data_ptr())
    ]  # fmt: skip


def test_null_blocks_of_a_window_are_none_and_its_hit_is_told() -> None:
    """What vLLM found of a window lies mostly behind it: only the scheduler's number says how far the hit goes."""
    null, cached, new = (SimpleNamespace(block_id=id, is_null=not id, block_hash=id % 2 or None) for id in (0, 7, 8))
    view = translate.cache_view(cache_config(FULL, WINDOW))
    given = SimpleNamespace(blocks=((cached, cached, cached, new), (null, null, null, new)))
    blocks = translate.kv_blocks(given, view, 3 * 16)
    assert blocks.ids == ((7, 7, 7, 8), (NO_BLOCK, NO_BLOCK, NO_BLOCK, 8)) and blocks.hashed == (3, 3)
    assert translate.block_ids([[7, 8], [0, 8]], view) == ((7, 8), (NO_BLOCK, 8))


def test_offloading_events_are_vllms_own() -> None:
    stored = events.BlockStored((b"h" * 32,), b"p" * 32, (1, 2), 2, "host")
    told = [_event(stored), _event(events.BlockRemoved((b"h" * 32,), "fs"))]
    assert [type(one) for one in told] == [BlockStored, BlockRemoved]
    assert [one.medium for one in told] == ["CPU", "fs"] and told[0].token_ids == [1, 2] and told[0].block_size == 2
    assert told[0].block_hashes == told[1].block_hashes == [maybe_convert_block_hash(b"h" * 32)]
