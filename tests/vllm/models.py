"""Tiny models made on the spot: float32, seeded, with a head so peaked that equal tokens are no accident of rounding.

``python -m tests.vllm.models llama DIR`` and ``... mla|window|mixed DIR``; needs the environment with vLLM.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCAB = 512
#: tokens; two blocks
WINDOW = 64
#: of Llama-like models. ``mixed`` becomes three cache groups of two layers each, which lie over each other in one pool
LAYERS = {
    "llama": ("full_attention",) * 2,
    "window": ("sliding_attention",) * 2,
    "mixed": ("sliding_attention", "sliding_attention", "full_attention") * 2,
}


def _tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(out)


def make(kind: str, out: Path) -> None:
    """Write the model ``kind`` to ``out``."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    if kind in LAYERS:
        layers = LAYERS[kind]
        windows = {"layer_types": list(layers), "sliding_window": WINDOW} if kind != "llama" else {}
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=len(layers), num_key_value_heads=2, head_dim=64, initializer_range=0.15,
                **common, **windows,
            )
        )  # fmt: skip
    else:  # the CPU kernel for MLA knows one size: 512 latent + 64 rope
        model = DeepseekV2ForCausalLM(
            DeepseekV2Config(
                num_hidden_layers=2,
                num_key_value_heads=4,
                kv_lora_rank=512,
                q_lora_rank=None,
                qk_rope_head_dim=64,
                qk_nope_head_dim=64,
                v_head_dim=64,
                moe_intermediate_size=64,
                n_routed_experts=2,
                num_experts_per_tok=1,
                n_shared_experts=1,
                first_k_dense_replace=2,
                n_group=1,
                topk_group=1,
                initializer_range=0.1,
                **common,
            )
        )
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.to(torch.float32).save_pretrained(out)
    _tokenizer(out)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
