"""Folders as transformers writes them: models of each family with random weights, and a byte-level tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

SMALL = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 96, "eos_token_id": 0, "bos_token_id": 0}
SCALED = {"rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 40}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
SEQUENTIAL = {"use_parallel_residual": False, "hidden_act": "gelu_new", "rotary_pct": 0.7}
LINEAR = {"rope_type": "linear", "factor": 2.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {"vocab_size": 400, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 96, "eos_token_id": 0},
    ),
    "gpt2, exact gelu": (
        "GPT2",
        {"vocab_size": 400, "n_embd": 48, "n_layer": 2, "n_head": 4, "activation_function": "gelu"},
    ),
    "gpt_neox": ("GPTNeoX", NEOX | {"rope_parameters": {"partial_rotary_factor": 0.5}}),  # as Pythia
    "gpt_neox, one after the other": ("GPTNeoX", NEOX | SEQUENTIAL),
    "gpt_neox, tied, all turn, linear": (
        "GPTNeoX",
        NEOX
        | {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "rope_parameters": LINEAR | {"partial_rotary_factor": 1.0},
        },
    ),
    "llama": ("Llama", SMALL | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),  # as SmolLM2
    "llama 3.1": ("Llama", SMALL | {"head_dim": 24, "rope_parameters": SCALED | {"rope_type": "llama3"}}),
    "llama, linear": ("Llama", SMALL | {"rope_parameters": LINEAR | {"rope_theta": 500.0}}),
    "llama, untied, biases": (
        "Llama",
        SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "llama, biases in attention": ("Llama", SMALL | {"attention_bias": True}),
    "qwen2": ("Qwen2", SMALL),  # biases of queries, keys and values alone
    "qwen2, windows": ("Qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "mistral": ("Mistral", SMALL | {"sliding_window": 7}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 16, "tie_word_embeddings": True}),  # heads wider than hidden_size / 4
    "qwen3, windows": (
        "Qwen3",
        SMALL
        | {"head_dim": 12, "use_sliding_window": True, "sliding_window": 9}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}


def write_model(folder: Path, family: str, **changes: Any) -> Any:
    """Write a model with random weights, large enough that logits differ by much. Returns it."""
    import transformers

    name, values = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**(values | changes)))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are all alike would hide a mistake
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    return model.eval()


def write_tokenizer(folder: Path, n_vocab: int) -> None:
    """A tokenizer.json of at most n_vocab tokens, trained on a module of Python's library. Id 0 is <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - 3,  # the model has rows without a token, as many models have
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([Path(argparse.__file__).read_text(encoding="utf-8")], trainer)
    trained.save(str(folder / "tokenizer.json"))
