"""Grouped attention: equal to the stock function, no copy of keys or values, in force inside a verify pass alone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import MROPE_FAMILIES, PLAIN_FAMILIES, RandomDrafter, text_prompt, text_target, vision_prompt, vision_target
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from glance.attention import GROUPED, GroupedAttention, MaskBuffer, grouped_attention
from glance.decode import decode, generate, greedy_generate
from glance.session import Settings
from glance.states import decoder_of
from glance.target import StreamPositions, Target
from glance.tree import build_budget_tree, make_tree, tree_mask


def tree_of(n: int):
    """A tree of n nodes: eight candidates at each of eight offsets."""
    logps = torch.log_softmax(torch.linspace(2, 0, 8), 0).expand(8, 8)
    return build_budget_tree(torch.arange(64).view(8, 8), logps, budget=n)


class Attention(torch.nn.Module):
    """What the stock function reads off a layer."""

    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("groups", [2, 4, 7])
@pytest.mark.parametrize("nodes, length", [(1, 0), (5, 3), (63, 200)])
def test_equals_the_stock_function(groups, nodes, length):
    torch.manual_seed(groups)
    q, keys = nodes + 1, length + nodes + 1
    query = torch.randn(1, q, 2 * groups, 16).transpose(1, 2)
    key, value = torch.randn(2, 1, 2, keys, 16).unbind(0)
    layer = Attention(groups)
    mask = MaskBuffer(groups, torch.float32, torch.device("cpu")).write(tree_of(nodes), length)
    ours, weights = grouped_attention(layer, query, key, value, mask, scaling=0.3)
    stock, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, mask[:, :1], scaling=0.3)
    assert weights is None and ours.shape == (1, q, 2 * groups, 16) and ours.is_contiguous()
    torch.testing.assert_close(ours, stock)
    ours, _ = grouped_attention(layer, query[:, :, :1], key, value, None, scaling=0.3)
    stock, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query[:, :, :1], key, value, None, scaling=0.3)
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.5}, {"softcap": 5.0}, {"position_bias": torch.zeros(1, 1, 5, 8)}]
)
def test_what_it_cannot_say_goes_to_the_stock_function(changes, monkeypatch):
    seen = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kw: seen.append((args, kw)))
    mask = torch.zeros(1, 4 if changes else 1, 5, 8)  # without changes: a mask that asks for no fold
    query, key = torch.randn(1, 8, 5, 4), torch.randn(1, 2, 8, 4)
    grouped_attention(Attention(4), query, key, key, mask, scaling=1.0, **changes)
    (args, kwargs), *_ = seen
    assert args[4].shape == (1, 1, 5, 8) and changes.items() <= kwargs.items()
    grouped_attention(Attention(4), query, key, key, None, is_causal=True)  # a prefill
    assert seen[1][0][4] is None and seen[1][1]["is_causal"]


@pytest.mark.parametrize("room", [0, 40, 2000])
def test_the_mask_buffer_holds_each_rounds_mask_and_rewrites_only_the_trees_columns(room):
    rng = torch.Generator().manual_seed(0)
    masks, length, written = MaskBuffer(3, torch.float32, torch.device("cpu"), room), 7, []
    for _ in range(30):
        tree = tree_of(int(torch.randint(1, 20, (1,), generator=rng)))
        with Elements() as elements:
            mask = masks.write(tree, length)
        written.append(elements.written)
        assert torch.equal(mask, torch.from_numpy(tree_mask(tree, prefix=length)).expand(1, 3, -1, -1))
        length += int(torch.randint(1, len(tree) + 2, (1,), generator=rng))
    assert length > 100  # beyond the smaller rooms: the buffer has grown
    if room == 2000:
        most = 3 * 20 * 20  # groups x rows x columns
        assert max(written[10:]) <= 3 * most  # columns committed since, the tree's own, and the tree's mask itself


def test_wider_trees_take_no_more_columns_than_are_reserved():
    masks = MaskBuffer(4, torch.float32, torch.device("cpu"), 320)
    for i, n in enumerate(range(8, 128, 8)):  # as a tree's room grows
        mask = masks.write(tree_of(n), 100 + i)
    assert mask.stride(-2) == 320
    assert mask.untyped_storage().nbytes() >= 4 * 121 * 320 * mask.element_size()


class Elements(TorchDispatchMode):
    """Counts the elements that operations write: into fresh memory, and into targets of in-place operations."""

    written = 0
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {memory(tensor) for tensor in args if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and (memory(tensor) not in given or func._schema.is_mutable):
                self.written += tensor.numel()
                self.largest = max(self.largest, tensor.numel())
        return out


def memory(tensor):
    """Return where a tensor's memory begins: equal for a tensor and its views."""
    return tensor.untyped_storage().data_ptr()


def wide_target(**changes):
    """A tiny target with eight query heads on two key-value heads of width 8, and room for long prompts."""
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 2,
    }
    return text_target("qwen3", **heads | changes)


@torch.inference_mode()
def test_a_verify_pass_writes_nothing_that_grows_with_the_prefix():
    """Keys, values and mask at a prefix of 2,000 tokens: no operation writes more elements than at 200."""
    model, sizes = wide_target(), {}
    for prefix in (200, 2000):
        with Target(model, StreamPositions(), (0,), room=prefix + 200) as target:
            target.prefill(text_prompt(prefix))
            for _ in range(2):  # the first allocates the mask
                with Elements() as elements:
                    target.verify(5, tree_of(31))
                target.keep([])
            sizes[prefix] = elements.written, elements.largest
    assert sizes[200] == sizes[2000]


@torch.inference_mode()
def test_the_stock_path_does_grow():
    """The same count sees the stock path's expanded keys, so that the test above tests something."""
    model = wide_target()
    with Target(model, StreamPositions(), room=2200) as target:
        target.verify_pass.fold(1)
        target.prefill(text_prompt(2000))
        with Elements() as elements:
            target.verify(5, tree_of(31))
    assert elements.largest >= 8 * 2000 * 8


@torch.inference_mode()
def test_in_force_inside_the_verify_pass_alone(monkeypatch):
    model, names = text_target("qwen3"), []
    monkeypatch.setattr(model, "forward", watch(model.forward, lambda: names.append(model.config._attn_implementation)))
    with Target(model, StreamPositions(), ()) as target:
        target.prefill(text_prompt())
        target.verify(5, tree_of(7))
        assert names == ["sdpa", GROUPED] and model.config._attn_implementation == "sdpa"
        monkeypatch.setattr(model, "forward", watch(model.forward, fail))
        with pytest.raises(RuntimeError):
            target.verify(5, tree_of(7))
    assert model.config._attn_implementation == "sdpa"


def watch(forward, before):
    """Call `before` ahead of every forward, which keeps its signature."""
    from functools import wraps

    @wraps(forward)
    def watched(*args, **kwargs):
        before()
        return forward(*args, **kwargs)

    return watched


def fail():
    """Break a forward."""
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    "family, changes, groups",
    [
        ("qwen3", {}, 2),
        ("qwen3", {"num_key_value_heads": 4}, 1),
        ("qwen3", {"attention": "eager"}, 1),
        ("gpt2", {}, 1),
        ("llama", {"num_key_value_heads": 1}, 4),
        ("mistral", {}, 2),
        ("gemma2", {}, 2),
    ],
)
def test_where_it_stands(family, changes, groups):
    model = text_target(family, **changes)
    assert GroupedAttention(decoder_of(model)).groups == groups


@pytest.mark.parametrize("family", [*MROPE_FAMILIES, *PLAIN_FAMILIES])
def test_exact_on_every_family_that_allows_it(family):
    model = vision_target(family)
    prompt = vision_prompt(model)
    assert GroupedAttention(decoder_of(model)).groups > 1
    greedy = greedy_generate(model, prompt.ids, 24, positions=prompt.positions)
    drafter = RandomDrafter(greedy[0].tolist(), size=12)
    ids, stats = decode(drafter, model, prompt.ids, Settings(24), prompt.positions)
    assert ids.tolist() == greedy.tolist() and stats.n_rounds < 23


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_exact_on_long_prompts(kv_heads):
    from toys import block_head

    model = wide_target(num_key_value_heads=kv_heads, num_hidden_layers=4)
    ids = text_prompt(700)
    assert torch.equal(generate(block_head(model), model, ids, 20), greedy_generate(model, ids, 20))


@torch.inference_mode()
def test_a_single_row_is_grouped_too():
    model = wide_target()
    empty = make_tree([], [], [], [], [])
    with Target(model, StreamPositions(), room=900) as target:
        target.prefill(text_prompt(800))
        with Elements() as elements:
            target.verify(5, empty)
    assert elements.largest < 800  # nothing as long as the prefix
