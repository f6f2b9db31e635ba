"""Memory for copies shares blocks. tests/training/test_waiting.py has the numbers that are read late."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from andrea.config import group_config
from andrea.model import GPT
from andrea.training.parallel.saver import ALIGNMENT_BYTES, blocks_for, empty_pinned

SIZES = st.dictionaries(st.text("abc", max_size=4), st.integers(1, 2**28), max_size=20)


@given(SIZES)
def test_tensors_lie_apart_in_blocks_whose_sizes_torch_does_not_round(n_bytes: dict[str, int]) -> None:
    sizes, places = blocks_for(n_bytes)
    assert all(size & (size - 1) == 0 for size in sizes) and places.keys() == n_bytes.keys()
    ends = [0] * len(sizes)
    for name, (block, offset) in sorted(places.items(), key=lambda item: item[1]):
        assert offset % ALIGNMENT_BYTES == 0 and offset >= ends[block]
        ends[block] = offset + n_bytes[name]
        assert ends[block] <= sizes[block]
    aligned = sum(-(-n_byte // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for n_byte in n_bytes.values())
    assert sum(sizes) <= sum(2 ** (n_byte - 1).bit_length() for n_byte in n_bytes.values()) or sum(sizes) < 2 * aligned


def test_a_large_model_s_copies_take_little_more_than_its_bytes() -> None:
    with torch.device("meta"):
        model = GPT(group_config("model", "andrea-2b"), group_config("attention", "scaled_dot"), 50257)
    n_bytes = {  # what one of 7 ranks writes: weights and momentum
        f"{name}{kind}": -(-parameter.shape[0] // 7) * parameter[0].numel() * 4
        for name, parameter in model.named_parameters()
        for kind in ("", "/momentum")
    }
    each_alone = sum(2 ** (n_byte - 1).bit_length() for n_byte in n_bytes.values())
    assert sum(blocks_for(n_bytes)[0]) < 1.1 * sum(n_bytes.values()) < each_alone


def test_copies_keep_shapes_and_types_and_can_be_saved(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.int64),
        "step": torch.tensor(2.0),
        "c": torch.randn(2, 3).bfloat16(),
    }
    copies = empty_pinned(tensors)
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    save_file(copies, tmp_path / "copies.safetensors")
    read = load_file(tmp_path / "copies.safetensors")
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
