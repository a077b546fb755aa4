"""vLLM's objects as views."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; make test-vllm runs these")

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvconn.base import GroupView, KVCacheView
from kvconn.nixl.fence import prompt_digest
from kvconn.vllm.translate import NULL_BLOCK, lost, named, request_view

N = 32


def digest(n: int = N, **beside: Any) -> bytes:
    tokens = None if "prompt_embeds" in beside else list(range(N))
    return prompt_digest(request_view(Request("r", tokens, SamplingParams(max_tokens=1), None, **beside)), n)


def picture(identifier: str, offset: int = 4) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 8), identifier)


def adapter(name: str, path: str = "/adapters/a", number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, path)


class TestWhatDecidesTheKV:
    """A reference is sealed for one prompt: equal tokens are not enough."""

    def test_plain_text_is_its_tokens(self) -> None:
        assert digest() == digest(cache_salt="someone") != digest(n=16)

    def test_another_picture_behind_the_same_placeholders(self) -> None:
        pictures = [picture("a"), picture("b"), picture("a", offset=5)]
        assert len({digest(mm_features=[one]) for one in pictures} | {digest()}) == 4
        assert digest(mm_features=[picture("a")]) == digest(mm_features=[picture("a")])

    def test_a_picture_behind_the_tokens_that_are_read_changes_nothing(self) -> None:
        late = picture("a", offset=20)
        assert digest(16, mm_features=[late]) == digest(16) and digest(mm_features=[late]) != digest()

    def test_another_adapter_whatever_its_number_and_path_on_this_host(self) -> None:
        assert digest(lora_request=adapter("a")) == digest(lora_request=adapter("a", "/elsewhere", 7))
        assert len({digest(lora_request=adapter("a")), digest(lora_request=adapter("b")), digest()}) == 3

    def test_other_embeddings(self) -> None:
        ones, zeros = torch.ones(N, 8, dtype=torch.bfloat16), torch.zeros(N, 8, dtype=torch.bfloat16)
        assert digest(prompt_embeds=ones) == digest(prompt_embeds=ones.clone()) != digest(prompt_embeds=zeros)
        longer = torch.cat([ones, zeros])
        assert digest(prompt_embeds=longer) == digest(prompt_embeds=ones)


class TestWindowsOfStock:
    """vLLM's own producer names the last blocks of a window, and its null block where it let one go."""

    CACHE = KVCacheView(512, 32, (GroupView("full", ("a",)), GroupView("window", ("b",), 64)))

    def handed(self, window: Any, held: Any = 95, **more: Any) -> dict[str, Any]:
        return {"remote_block_ids": [[1, 2, 3], window], "remote_num_tokens": held, **more}

    def test_null_blocks_are_not_named(self) -> None:
        assert named(self.handed([NULL_BLOCK, 5, 6]), self.CACHE)["remote_block_ids"] == [[1, 2, 3], [5, 6]]
        assert named(self.handed([5, 6, 7]), self.CACHE) == self.handed([5, 6, 7])

    @pytest.mark.parametrize("params", [None, {}, {"remote_block_ids": "x"}, {"remote_block_ids": [[1]]}])
    def test_what_is_wrong_is_left_to_the_parser(self, params: Any) -> None:
        assert named(params, self.CACHE) == params
        assert named(self.handed({"5": 6}), self.CACHE) == self.handed({"5": 6})
        assert not lost(params or {}, self.CACHE, 94) and not lost(self.handed({"5": 6}), self.CACHE, 94)
        assert not lost(self.handed([5, 6], "95"), self.CACHE, 94)

    def test_a_block_that_the_next_token_sees_and_stock_let_go_of_is_lost(self) -> None:
        """The last of 95 tokens sees token 31, which alone of its block is seen."""
        assert lost(self.handed([5, 6]), self.CACHE, 94) and not lost(self.handed([4, 5, 6]), self.CACHE, 94)
        assert not lost(self.handed([5, 6], 96), self.CACHE, 95)
        assert not lost(self.handed([5, 6], kvconn={}), self.CACHE, 94)  # ours hands nothing over then
