"""One target and several decodes: threads, decodes inside decodes, training mode, autocast, and a mask that is ignored."""

from concurrent.futures import ThreadPoolExecutor
from threading import current_thread, main_thread

import pytest
import torch
import toys

import glance
from glance.target import check_mask
from glance.verify import state_of

N = 24
B = 6


def mixed(start, offset):
    return (0, 0, 1, 0, 3, None)[(start * 7 + offset * 5) % 6]


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_threads_share_a_target_and_each_text_is_greedy(kind):
    model = toys.text_target() if kind == "text" else toys.vision_target()
    if kind == "text":
        prompts = [toys.Prompt(toys.text_prompt(5 + i, seed=i), None, {}, 0) for i in range(4)]
    else:
        prompts = [toys.vision_prompt(model, [(2, 2 + i)], seed=i) for i in range(4)]
    greedy = [prompt.greedy(model, N) for prompt in prompts]

    def decode(job):
        i, arm = job
        ids = prompts[i].ids
        settings = {"positions": prompts[i].positions, "stop_token_ids": ()}
        head = toys.OracleHead(ids[0].tolist() + greedy[i], B, mixed) if i % 2 else toys.block_head(model)
        if arm == "ar":
            out = glance.greedy_generate(model, ids, N, **settings)
        elif arm == "chain":
            out = glance.chain_generate(head, model, ids, N, **settings)
        else:
            out = glance.generate(head, model, ids, N, budget=arm, **settings)
        return out[0, ids.shape[1] :].tolist() == greedy[i]

    jobs = [(i, arm) for arm in ("ar", "chain", 3, 15, 31, "auto") for i in range(4)] * 2
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(decode, jobs))
    assert model.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["text", "vision"])
@pytest.mark.parametrize("arm", ["ar", "chain", 15])
def test_a_decode_inside_a_decode_changes_neither(kind, arm):
    model = toys.text_target() if kind == "text" else toys.vision_target()
    prompts = [
        toys.Prompt(toys.text_prompt(7), None, {}, 0) if kind == "text" else toys.vision_prompt(model, [(2, 2)]),
        toys.Prompt(toys.text_prompt(12, seed=1), None, {}, 0)
        if kind == "text"
        else toys.vision_prompt(model, [(2, 5)], seed=1),
    ]
    greedy = [prompt.greedy(model, N) for prompt in prompts]

    def decode(i, arm, on_round=None):
        ids = prompts[i].ids
        head = toys.OracleHead(ids[0].tolist() + greedy[i], B, mixed)  # which checks the states that it is handed
        settings = {"positions": prompts[i].positions, "stop_token_ids": (), "on_round": on_round}
        if arm == "ar":
            out = glance.greedy_generate(model, ids, N, **settings)
        elif arm == "chain":
            out = glance.chain_generate(head, model, ids, N, **settings)
        else:
            out = glance.generate(head, model, ids, N, budget=arm, **settings)
        return out[0, ids.shape[1] :].tolist()

    inner = []
    assert decode(0, 15, lambda report: inner.append(decode(1, arm) == greedy[1])) == greedy[0]
    assert inner and all(inner)


def test_a_forward_of_someone_elses_in_the_middle_of_a_pass_leaves_no_states():
    """A thread that runs the target by itself knows no lock: here it does at the worst moment, before the last layer."""
    model, prompt = toys.text_target(), toys.text_prompt(7)
    greedy = toys.reference(model, prompt, N)
    others = []

    def someone_else(module, args):
        if current_thread() is not main_thread():
            return
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(toys.reference, model, prompt, 2).result() == greedy[:2])

    model.model.layers[-1].register_forward_pre_hook(someone_else)
    head = toys.OracleHead(prompt[0].tolist() + greedy, B, mixed)  # which counts the states that it is handed
    out = glance.generate(head, model, prompt, N, stop_token_ids=())
    assert out[0, prompt.shape[1] :].tolist() == greedy
    assert others and all(others)


def decoders(model):
    head = toys.block_head(model)
    return {
        "tree": lambda: glance.generate(head, model, toys.text_prompt(), 6),
        "chain": lambda: glance.chain_generate(head, model, toys.text_prompt(), 6),
        "ar": lambda: glance.greedy_generate(model, toys.text_prompt(), 6),
    }


@pytest.mark.parametrize("arm", ["tree", "chain", "ar"])
@pytest.mark.parametrize("where", ["whole", "one layer"])
def test_a_target_in_training_mode_is_refused_and_left_as_it_was(arm, where):
    model = toys.text_target(attention_dropout=0.5)
    part = model if where == "whole" else model.model.layers[2]
    part.train()
    modes = [module.training for module in model.modules()]
    with toys.forwards(model) as passes, pytest.raises(ValueError, match=r"in training mode.*call target\.eval\(\)"):
        decoders(model)[arm]()
    assert not passes and modes == [module.training for module in model.modules()]


@pytest.mark.parametrize("budget", [7, "auto"])
def test_a_head_in_training_mode_is_refused_before_the_prompt_is_read_and_left_as_it_was(budget, qwen3):
    head = toys.block_head(qwen3)
    head.layers[1].train()
    modes = [module.training for module in head.modules()]
    with pytest.raises(ValueError, match=r"in training mode.*call head\.eval\(\)"):
        glance.generate(head, qwen3, toys.text_prompt(), 6, budget=budget)
    assert modes == [module.training for module in head.modules()]


@pytest.mark.parametrize("arm", ["tree", "chain", "ar"])
def test_a_decode_under_autocast_is_refused(arm, qwen3):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast is on for cpu"):
        decoders(qwen3)[arm]()


def deaf(model):
    """Make a target's attention ignore the mask that it is given, as a wrongly registered kernel would."""
    for layer in model.model.layers:
        own = layer.self_attn.forward

        def forward(*args, own=own, **kwargs):
            kwargs["attention_mask"] = None
            return own(*args, **kwargs)

        layer.self_attn.forward = forward
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_target_that_ignores_the_mask_is_refused_at_the_first_tree(attention, dtype):
    model = deaf(toys.text_target(attention=attention)).to(dtype)
    with pytest.raises(ValueError, match="keep a tree's branches apart"):
        decoders(model)["tree"]()
    decoders(model)["chain"]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "qwen3_vl", "gemma4", "hunyuan_vl"])
def test_the_mask_is_looked_at_once_per_target(family, dtype):
    model = toys.vision_target(family) if family in ("qwen3_vl", "gemma4", "hunyuan_vl") else toys.text_target(family)
    model = model.to(dtype)
    head = toys.block_head(model).to(dtype)
    assert state_of(model).branches_apart == {}
    with toys.forwards(model) as first:
        glance.generate(head, model, toys.text_prompt(), 6, budget=7)
    assert state_of(model).branches_apart == {"sdpa": True}
    with toys.forwards(model) as second:
        glance.generate(head, model, toys.text_prompt(), 6, budget=7)
    assert len(second) < len(first)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_layer_whose_rows_all_see_each_other_is_refused(attention, layer):
    model = toys.text_target(attention=attention)
    part = model.model.layers[layer].self_attn
    own = part.forward

    def forward(*args, **kwargs):
        mask = kwargs["attention_mask"]
        return own(*args, **kwargs | {"attention_mask": None if mask is None else torch.zeros_like(mask)})

    part.forward = forward
    with pytest.raises(ValueError, match="keep a tree's branches apart"):
        decoders(model)["tree"]()


def test_a_target_whose_kernels_round_by_the_number_of_rows_is_not_refused():
    """As in half precision on a GPU: a pass of two rows and one of four differ in every product."""
    model = toys.text_target()

    def rounded(module, args, output):
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(output.shape[1]))
        return output * (1 + 2**-6 * noise)

    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(rounded)
    check_mask(model, toys.text_prompt())
    assert state_of(model).branches_apart == {"sdpa": True}
