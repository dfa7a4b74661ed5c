"""The cache against concatenation and gathering, in place: no buffer moves and no prefix is copied."""

import gc
import warnings

import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import glance
from glance.cache import GROWTH, PathCache
from glance.decode import decode
from glance.drafters.block import BlockDrafter
from glance.session import Settings

HEADS, WIDTH = 2, 3


def states(n, seed=0, width=WIDTH):
    return torch.randn(1, HEADS, n, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("d", [WIDTH, 5])  # as in latent attention, the width of values differs
@given(steps=st.lists(st.tuples(st.integers(1, 9), st.data()), min_size=1, max_size=6), prompt=st.integers(1, 5))
def test_it_equals_concatenation_and_gathering(d, steps, prompt):
    cache, expected = PathCache(), [states(prompt, 1), states(prompt, 2, width=d)]
    cache.update(*expected, 0)
    for i, (n, data) in enumerate(steps):
        new = states(n, 10 + i), states(n, 20 + i, width=d)
        whole = [torch.cat([old, fresh], 2) for old, fresh in zip(expected, new, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(cache.update(*new, 0), whole, strict=True))
        start = expected[0].shape[2]
        path = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
        cache.keep_path(start, path)
        rows = [*range(start), *(start + p for p in path)]
        expected = [buffer[:, :, rows] for buffer in whole]
        assert cache.get_seq_length() == len(rows)
        layer = cache.layers[0]
        for buffer, right in zip((layer.keys, layer.values), expected, strict=True):
            assert torch.equal(buffer[:, :, : layer.length], right)


def test_buffers_stay_where_they_are_while_there_is_room():
    cache = PathCache(room=50)
    cache.update(states(10), states(10), 0)
    where = cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()
    for i in range(8):
        cache.update(states(5, i), states(5, i), 0)
        cache.keep_path(10 + 4 * i, [0, 1, 3, 4])
        assert (cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()) == where


def test_growing_keeps_what_was_there_and_is_rare():
    cache, whole, moves, where = PathCache(), states(1), 0, None
    cache.update(whole, -whole, 0)
    for i in range(12 * GROWTH // 64):
        new = states(64, i)
        whole = torch.cat([whole, new], 2)
        keys, values = cache.update(new, -new, 0)
        moves += where is not None and where != keys.data_ptr()
        where = keys.data_ptr()
        assert torch.equal(keys, whole) and torch.equal(values, -whole)
    assert moves <= 6


def test_truncating_forgets_the_tail():
    cache = PathCache()
    cache.update(states(9), states(9), 0)
    cache.truncate(20)
    assert cache.get_seq_length() == 9
    cache.truncate(4)
    keys, _ = cache.update(states(2, 5), states(2, 5), 0)
    assert torch.equal(keys, torch.cat([states(9)[:, :, :4], states(2, 5)], 2))


class Written(TorchDispatchMode):
    """Records the number of elements that each operation other than a view writes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("path", [[0, 1, 2], [0, 2, 5], [4]])
def test_keeping_a_path_writes_its_rows_alone(path):
    cache = PathCache(room=5000)
    for layer in range(2):
        cache.update(states(4000), states(4000), layer)
        cache.update(states(6, 1), states(6, 1), layer)
    with Written() as written:
        cache.keep_path(4000, path)
    assert (
        sum(written.sizes) <= 2 * 2 * 2 * len(path) * HEADS * WIDTH
    )  # keys and values of two layers, read and written
    assert not written.sizes or path != list(range(len(path)))
    assert torch.equal(cache.layers[1].keys[:, :, 4000 : 4000 + len(path)], states(6, 1)[:, :, path])


def test_layers_that_agree_share_a_buffer_and_others_do_not():
    cache = PathCache(room=20, n_alike=3)
    for layer, d in enumerate((WIDTH, WIDTH, 5, WIDTH, WIDTH)):
        cache.update(states(6, layer, d), -states(6, layer, d), layer)
    first, second, other, third, late = (layer.buffers for layer in cache.layers)
    assert first[0] is second[0] is third[0] and len({id(buffers[0]) for buffers in (first, other, late)}) == 3
    with Written() as written:
        cache.keep_path(1, [0, 2, 4])
    assert len(written.sizes) == 3 * 2  # one read and one write each
    for layer, d in enumerate((WIDTH, WIDTH, 5, WIDTH, WIDTH)):
        keys, values = cache.update(states(1, 9, d), -states(1, 9, d), layer)
        expected = torch.cat([states(6, layer, d)[:, :, [0, 1, 3, 5]], states(1, 9, d)], 2)
        assert torch.equal(keys, expected) and torch.equal(values, -expected)


def test_a_layer_that_grows_leaves_the_shared_buffer():
    cache = PathCache(room=GROWTH + 6, n_alike=2)
    whole = [states(6, layer) for layer in range(2)]
    for layer in range(2):
        cache.update(whole[layer], -whole[layer], layer)
    for layer in range(2):
        new = states(GROWTH + 1, 5 + layer)
        whole[layer] = torch.cat([whole[layer], new], 2)
        keys, values = cache.update(new, -new, layer)
        assert torch.equal(keys, whole[layer]) and torch.equal(values, -whole[layer])
    cache.keep_path(6, [1, 3])
    for layer in range(2):
        assert torch.equal(cache.layers[layer].keys[:, :, :8], whole[layer][:, :, [*range(6), 7, 9]])


class Watched(BlockDrafter):
    """A block drafter that remembers the target and the head's cache of the decode."""

    def begin(self, target, lap):
        super().begin(target, lap)
        self.target = target

    @property
    def caches(self):
        return {"target": self.target.cache, "head": self._cache}


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("extend", [0, 7])
def test_lengths_and_buffers_after_every_round(qwen3, qwen3_vl, image, extend):
    model = qwen3_vl if image else qwen3
    prompt = toys.vision_prompt(model) if image else toys.Prompt(toys.text_prompt(), None, {}, 0)
    stream = prompt.ids[0].tolist() + prompt.greedy(model, 40)
    knowing = toys.OracleHead(stream, 6, lambda start, offset: (0, 0, 0, 2, None)[(start + offset) % 5])
    for head in (knowing, toys.block_head(model), toys.block_head(model, second=True)):
        drafter, seen = Watched(head, 20, 3, extend), []

        def look(round_, drafter=drafter, seen=seen):
            for name, cache in drafter.caches.items():
                # The head has read all but the root and what followed it; its masked block is cut off again.
                length = round_.start + (1 + round_.accepted if name == "target" else 0)
                assert [layer.get_seq_length() for layer in cache.layers] == [length] * len(cache.layers)
            assert drafter.target.length == round_.start + 1 + round_.accepted
            seen.append([layer.keys.data_ptr() for cache in drafter.caches.values() for layer in cache.layers])

        ids, stats = decode(
            drafter, model, prompt.ids, Settings(40, stop_token_ids=(), on_round=look), prompt.positions
        )
        assert ids[0].tolist() == stream and len(seen) == stats.n_rounds > 5
        assert all(addresses == seen[0] for addresses in seen)


def tensors_alive():
    gc.collect()
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len(alive), sum(tensor.numel() for tensor in alive)


def test_memory_is_flat_over_fifty_prompts(qwen3_vl):
    head, sizes = toys.block_head(qwen3_vl), []
    for i in range(50):
        prompt = toys.vision_prompt(qwen3_vl, [(1 + i % 3, 2)], seed=i)
        glance.generate(head, qwen3_vl, prompt.ids, 6, positions=prompt.positions, stop_token_ids=())
        del prompt
        if i % 15 == 4:
            sizes.append(tensors_alive())
    assert sizes == [sizes[0]] * len(sizes)


def test_nothing_deprecated_is_used(qwen3, qwen3_vl, caplog):
    prompt = toys.vision_prompt(qwen3_vl)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, ids, positions in ((qwen3, toys.text_prompt(), None), (qwen3_vl, prompt.ids, prompt.positions)):
            settings = {"positions": positions, "stop_token_ids": ()}
            glance.generate(toys.block_head(model, second=True), model, ids, 12, extend_budget=4, **settings)
            glance.chain_generate(toys.block_head(model), model, ids, 12, **settings)
            glance.greedy_generate(model, ids, 12, **settings)
    assert "deprecat" not in caplog.text.lower()
