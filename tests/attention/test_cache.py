"""The key/value cache: what is written is what comes back, in both forms of its length."""

from __future__ import annotations

import pytest
import torch

from andrea.attention import KeyValueCache

LAYERS, B, H, CAPACITY, D = 2, 3, 5, 11, 7


def make(fixed_shapes=False):
    return KeyValueCache(LAYERS, B, H, CAPACITY, D, fixed_shapes=fixed_shapes)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_appended_keys_and_values_come_back_in_order(fixed_shapes):
    cache = make(fixed_shapes)
    keys, values = torch.randn(LAYERS, B, H, 6, D), torch.randn(LAYERS, B, H, 6, D)
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        for layer in range(LAYERS):
            got = cache.layer(layer).append(keys[layer, :, :, start:stop], values[layer, :, :, start:stop])
            assert torch.equal(got[0][:, :, :stop], keys[layer, :, :, :stop])
            assert torch.equal(got[1][:, :, :stop], values[layer, :, :, :stop])
            assert got[0].shape[2] == (CAPACITY if fixed_shapes else stop)
            assert not got[0][:, :, stop:].any()
        cache.advance(stop - start)
    assert cache.length == 6


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_emptied_it_starts_again_at_zero(fixed_shapes):
    cache = make(fixed_shapes)
    cache.layer(0).append(torch.ones(B, H, 4, D), torch.ones(B, H, 4, D))
    cache.advance(4)
    cache.set_lengths([0] * B)
    assert cache.length == 0
    new = torch.randn(B, H, 2, D)
    assert torch.equal(cache.layer(0).append(new, new)[0][:, :, :2], new)


def test_a_tensor_length_stays_the_same_tensor():
    """A compiled step holds on to it."""
    cache = make(fixed_shapes=True)
    length = cache.length
    cache.advance(3)
    cache.set_lengths([0] * B)
    cache.advance(2)
    assert cache.length is length and length.dtype == torch.int64 and length.item() == 2


def test_what_does_not_fit_is_an_error():
    cache = make()
    cache.advance(CAPACITY - 1)
    with pytest.raises(AssertionError, match="12 tokens do not fit a cache with a capacity of 11"):
        cache.layer(0).append(torch.zeros(B, H, 2, D), torch.zeros(B, H, 2, D))
    fixed = make(fixed_shapes=True)
    fixed.advance(CAPACITY - 1)
    with pytest.raises(IndexError):
        fixed.layer(0).append(torch.zeros(B, H, 2, D), torch.zeros(B, H, 2, D))


def test_capacity_type_and_device():
    cache = KeyValueCache(1, B, H, CAPACITY, D, dtype=torch.bfloat16, device="meta")
    assert cache.capacity == CAPACITY
    assert cache.keys[0].shape == cache.values[0].shape == (B, H, CAPACITY, D)
    assert cache.keys[0].dtype == torch.bfloat16 and cache.keys[0].device.type == "meta"


@pytest.mark.parametrize("index", range(B))
def test_one_sequence_of_a_cache_is_a_view_that_begins_empty(index):
    cache = make()
    cache.advance(4)
    part = cache.of_sequence(index)
    assert part.length == 0 and part.capacity == CAPACITY and cache.length == 4
    keys, values = torch.randn(LAYERS, 1, H, 2, D), torch.randn(LAYERS, 1, H, 2, D)
    for layer in range(LAYERS):
        part.layer(layer).append(keys[layer], values[layer])
        assert torch.equal(cache.keys[layer][index, :, :2], keys[layer, 0])
        assert torch.equal(cache.values[layer][index, :, :2], values[layer, 0])
        others = [other for other in range(B) if other != index]
        assert not cache.keys[layer][others].any() and not cache.values[layer][others].any()


def test_the_first_tokens_of_one_sequence_are_copied_to_all():
    cache = make()
    before = [torch.randn(B, H, CAPACITY, D) for _ in range(2 * LAYERS)]
    for kept, content in zip((*cache.keys, *cache.values), before, strict=True):
        kept.copy_(content)
    cache.copy_sequence(1, 4)
    for kept, content in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(kept[:, :, :4], content[1:2, :, :4].expand(B, -1, -1, -1))
        assert torch.equal(kept[:, :, 4:], content[:, :, 4:])


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_sequences_of_different_lengths_are_continued_each_at_its_own_end(fixed_shapes):
    cache = KeyValueCache(LAYERS, B, H, CAPACITY, D, fixed_shapes=fixed_shapes, ragged=True)
    old, new = torch.randn(B, H, 5, D), torch.randn(B, H, 2, D)
    cache.layer(1).append(old, -old)
    cache.advance(5)
    cache.set_lengths([2, 0, 4])
    keys, values = cache.layer(1).append(new, -new)
    assert keys.shape[2] == values.shape[2] == (CAPACITY if fixed_shapes else 6)
    for sequence, length in enumerate((2, 0, 4)):
        expected = torch.cat([old[sequence, :, :length], new[sequence]], dim=1)
        assert torch.equal(keys[sequence, :, : length + 2], expected)
        assert torch.equal(values[sequence, :, : length + 2], -expected)
    cache.advance(2)
    assert cache.length.tolist() == [4, 2, 6] and not cache.keys[0].any()
