"""Small models of transformers' families, and their logits, which a test of ddp-engine compares with.

    python tests/peers/families.py > tests/golden/families.json

It needs torch and transformers. The values follow from a formula that the test repeats, so that the file has the configurations, the names and shapes
of all tensors, and some logits of one row of tokens.
"""
import json

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, CONTEXT = 61, 16


def adamw(model, rate, decay):
    """AdamW that decays matrices alone, as ddp-train does."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}], lr=rate)


def gpt2(**changes):
    settings = dict(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                    initializer_range=0.1, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))


def like_llama(family, **changes):
    settings = dict(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                    max_position_embeddings=CONTEXT, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    # Norms and biases start at 1 and 0, where errors in them would not show.
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def llama(**changes):
    return like_llama("Llama", **changes)


def rope(kind, **numbers):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **numbers}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=4, beta_fast=4.0, beta_slow=1.0)
LONG = rope("longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[1.0, 2.5, 3.0], partial_rotary_factor=0.75)


# A model, how it is saved, and flags for ours.
MODELS = {
    "GPT-2": (gpt2, {}, []),
    "GPT-2 in shards, exact gelu, n_inner, ε 1e-3": (lambda: gpt2(activation_function="gelu", n_inner=50, layer_norm_epsilon=1e-3),
                                                     {"max_shard_size": "10KB"}, []),
    "GPT-2, untied, of twice the context": (lambda: gpt2(tie_word_embeddings=False, n_positions=2 * CONTEXT), {}, ["--context", str(CONTEXT)]),
    "Llama": (llama, {}, []),
    "Llama in shards, tied, base 500, ε 1e-3": (
        lambda: llama(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-3),
        {"max_shard_size": "10KB"}, []),
    "Llama in bf16": (lambda: llama().to(torch.bfloat16), {}, []),
    "Llama 3.2: llama3, tied": (lambda: llama(**LLAMA3, tie_word_embeddings=True), {}, []),
    "Llama, linear": (lambda: llama(**rope("linear", factor=2.5)), {}, []),
    "Llama, yarn": (lambda: llama(**YARN), {}, []),
    "SmolLM2: pad token is in the data, tied": (lambda: llama(pad_token_id=2, eos_token_id=2, tie_word_embeddings=True), {}, []),
    "Llama, padded, untied": (lambda: llama(pad_token_id=2), {}, []),
    "Qwen2": (lambda: like_llama("Qwen2"), {}, []),
    "Qwen2, tied, sharded": (lambda: like_llama("Qwen2", tie_word_embeddings=True), {"max_shard_size": "10KB"}, []),
    "Qwen3": (lambda: like_llama("Qwen3", head_dim=10), {}, []),
    "Qwen3, yarn, tied": (lambda: like_llama("Qwen3", head_dim=6, tie_word_embeddings=True, **YARN), {}, []),
    "Mistral, twice the window": (lambda: like_llama("Mistral", head_dim=6, sliding_window=CONTEXT, max_position_embeddings=2 * CONTEXT), {},
                                  ["--context", str(CONTEXT)]),
    "Mistral": (lambda: like_llama("Mistral", sliding_window=None), {}, []),
    "Ministral": (lambda: like_llama("Ministral", head_dim=4, sliding_window=2 * CONTEXT), {}, []),
    "Mistral, a window of 5": (lambda: like_llama("Mistral", sliding_window=5), {}, []),
    "Ministral, a window of 5 in most layers": (
        lambda: like_llama("Ministral", head_dim=4, sliding_window=5, layer_types=["sliding_attention", "full_attention"]), {}, []),
    "Gemma 3": (lambda: like_llama("Gemma3", head_dim=6, sliding_window=5, num_hidden_layers=3, sliding_window_pattern=2, query_pre_attn_scalar=9), {}, []),
    "Gemma 2": (lambda: like_llama("Gemma2", head_dim=6, sliding_window=5, num_hidden_layers=3, query_pre_attn_scalar=9, attn_logit_softcapping=0.8,
                                   final_logit_softcapping=1.5), {}, []),
    "Gemma 2 without caps, all in windows": (lambda: like_llama("Gemma2", head_dim=6, sliding_window=5, attn_logit_softcapping=None,
                                                               final_logit_softcapping=None, layer_types=["sliding_attention"] * 2), {}, []),
    "SmolLM3": (lambda: like_llama("SmolLM3", num_hidden_layers=5, no_rope_layer_interval=2), {}, []),
    "OLMo2": (lambda: like_llama("Olmo2"), {}, []),
    "Phi-3": (lambda: like_llama("Phi3"), {}, []),
    "Phi-4-mini: longrope, partial rotary": (
        lambda: like_llama("Phi3", num_attention_heads=3, num_key_value_heads=1, original_max_position_embeddings=CONTEXT, max_position_embeddings=64,
                           tie_word_embeddings=True, **LONG), {}, ["--context", str(CONTEXT)]),
}


def fill(model):
    """Element i of all tensors, in the order of their names, is a hash of i in [-1/2, 1/2), which f32 holds exactly; plus 1 for the weights of norms."""
    state, first = model.state_dict(), 0
    for name in sorted(state):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        tensor = state[name]
        index = torch.arange(first, first + tensor.numel(), dtype=torch.int64)
        hashed = (index * 2654435761) % 2**32
        hashed = ((hashed ^ hashed >> 15) * 2246822519) % 2**32
        values = (hashed // 2**16).float() / 65536 - 0.5
        is_norm = name.endswith("weight") and ("ln_" in name or "norm" in name)
        tensor.copy_((values + is_norm).reshape(tensor.shape))
        first += tensor.numel()
    return model.eval()


def golden(model):
    model = fill(model).double()
    tokens = torch.tensor([[token * 7 % VOCABULARY for token in range(CONTEXT)]])
    with torch.no_grad():
        logits = model(tokens).logits[0, [0, CONTEXT // 2, CONTEXT - 1], ::6]
    tied = model.config.tie_word_embeddings
    shapes = {name: list(value.shape) for name, value in sorted(model.state_dict().items()) if not (tied and name == "lm_head.weight")}
    config = {"architectures": [type(model).__name__], **json.loads(model.config.to_json_string())}
    return {"config": config, "tensors": shapes, "logits": [[round(x, 6) for x in row] for row in logits.tolist()]}


if __name__ == "__main__":
    every = {name: golden(make().float()) for name, (make, saving, _) in MODELS.items() if not saving and "bf16" not in name}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in every.items())
    print("{\n" + lines + "\n}")
