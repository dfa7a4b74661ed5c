"""compile=True: padded static shapes change nothing but speed, and one compiled pass serves many prompts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toys import OracleHead, block_head, text_prompt, text_target, vision_prompt, vision_target

from glance import compiled
from glance.decode import chain_generate, generate, greedy_generate
from glance.verify import compiled_pass


@pytest.fixture()
def graphs(monkeypatch):
    """Compile by capturing graphs alone, without generating code: shapes and guards are what is tested. Counts captures."""
    captured = []

    def backend(graph, inputs):
        captured.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    yield captured
    torch._dynamo.reset()


@pytest.mark.parametrize("budget", [0, 7])
@pytest.mark.parametrize("quality", ["perfect", "mixed", "wrong"])
def test_exact_whatever_the_head(graphs, budget, quality):
    model, ids = text_target(), text_prompt(11)
    stream = greedy_generate(model, ids, 80)[0].tolist()
    rank_of = {
        "perfect": lambda start, offset: 0,
        "mixed": lambda start, offset: (start * 7 + offset * 3) % 3 if (start + offset) % 4 else None,
        "wrong": lambda start, offset: None,
    }[quality]
    head = OracleHead(stream, rank_of=rank_of)  # which checks that it reads the states of every place, each once
    assert generate(head, model, ids, 40, budget=budget, compile=True)[0].tolist() == stream[:51]


def test_one_capture_serves_all_prompts_of_a_reserve(graphs):
    model = text_target()
    head, counts = block_head(model), []
    for length in (9, 17, 30):
        ids = text_prompt(length, seed=length)
        assert torch.equal(generate(head, model, ids, 20, budget=7, compile=True), greedy_generate(model, ids, 20))
        counts.append(len(graphs))
    assert counts[0] > 0 and counts == counts[:1] * 3


def test_exact_after_an_image_and_for_a_chain(graphs):
    model = vision_target()
    prompt = vision_prompt(model)
    greedy = greedy_generate(model, prompt.ids, 20, positions=prompt.positions)
    head = block_head(model)
    for run in (generate, chain_generate):
        assert torch.equal(run(head, model, prompt.ids, 20, positions=prompt.positions, compile=True), greedy)


def test_with_generated_code(tmp_path, monkeypatch):
    """The real compiler, once, on two layers; needs a C++ compiler, as torch.compile on a CPU does.

    It gets a cache of its own: torch's is shared by runs for different kinds of CPU, and code of one fails on another.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import shutil

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler: torch.compile cannot generate code for this CPU")
    torch._dynamo.reset()
    model, ids = text_target(num_hidden_layers=2), text_prompt(9)
    head = block_head(model, layer_ids=(0, 1))
    assert torch.equal(generate(head, model, ids, 16, budget=5, compile=True), greedy_generate(model, ids, 16))


def test_what_takes_no_mask_is_refused():
    model = text_target()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        compiled_pass(model, (), 8)


def test_threads_share_a_compiled_pass(graphs):
    model = text_target()
    prompts = [text_prompt(7 + i, seed=i) for i in range(3)]
    greedy = [greedy_generate(model, ids, 20)[0].tolist() for ids in prompts]

    def decode(i):
        return generate(block_head(model), model, prompts[i], 20, budget=7, compile=True)[0].tolist() == greedy[i]

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(decode, [0, 1, 2] * 2))
