"""``tests.vllm.child`` where vLLM's CPU attention for MLA also writes caches whose blocks lie apart (BLHNC).

It reads those by their strides; its write takes blocks for neighbours and raises. vLLM offers the layout all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.vllm import child


def _write(self: Any, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: Any, *_: Any) -> None:
    if cache.numel() == 0:
        return
    slots = slots.flatten().long()
    used = slots >= 0
    rows = torch.cat([latent, rope.squeeze(1)], dim=-1)[used].to(cache.dtype)
    cache[slots[used] // cache.shape[1], slots[used] % cache.shape[1]] = rows


def main() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    CPUMLAImpl.do_kv_cache_update = _write
    child.main()


if __name__ == "__main__":
    main()
