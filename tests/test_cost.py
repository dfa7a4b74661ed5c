"""What a round may cost beside the forwards: two transfers to the host, no state of a layer that no head reads."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
import torch
from torch.overrides import TorchFunctionMode
from toys import RandomDrafter, block_head, text_prompt, text_target

import glance
from glance import session
from glance.decode import _argmax, decode, greedy_generate
from glance.drafters.auto import AutoDrafter
from glance.drafters.block import BlockDrafter
from glance.drafters.costs import RoundCosts
from glance.session import Settings
from glance.states import decoder_layers
from glance.target import StreamPositions, Target

TO_HOST = ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__", "nonzero", "__array__")


class Transfers(TorchFunctionMode):
    """Stands for a device's stream: notes every call by which the host would wait for a tensor's values."""

    def __init__(self, *modules):
        super().__init__()
        self.calls, self._inside = [], 0
        for module in modules:  # what a model does in its own forward is its own
            module.register_forward_pre_hook(lambda *_: setattr(self, "_inside", self._inside + 1))
            module.register_forward_hook(lambda *_: setattr(self, "_inside", self._inside - 1))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in TO_HOST and not self._inside:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch):
    """Let the decoder take the processor for a device: values cross to the host."""
    monkeypatch.setattr(session, "on_host", lambda tensor: False)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("budget", [31, "auto"])
@pytest.mark.parametrize("branch_k", [1, 8])
def test_one_transfer_of_the_draft_and_one_of_the_choices_a_round(budget, branch_k):
    model, ids = text_target(), text_prompt(11)
    head = block_head(model)
    glance.generate(head, model, ids, 3, budget=budget, branch_k=branch_k)  # measures the costs of "auto"
    with Transfers(model, head) as transfers:
        marks = Marks(transfers)
        _, stats = glance.generate(
            head, model, ids, 80, budget=budget, branch_k=branch_k, streamer=marks, return_stats=True
        )
    assert len(marks.at) == stats.n_rounds + 2 > 8  # the prompt and the first token come before the rounds
    per_round = [b - a for a, b in pairwise(marks.at[1:])]
    once = ("cpu", "numpy")  # one transfer, told as two calls; a plain step has the choices' alone
    seen = list(map(tuple, split(transfers.calls[marks.at[1] :], per_round)))
    full = session.Entropies.AT_ONCE
    assert all(
        calls in (once, once + once) or (i % full == 0 and calls in (2 * once, 3 * once))
        for i, calls in enumerate(seen)
    )
    assert transfers.calls[marks.at[-1] :] == list(once) * (stats.n_rounds % full > 0)  # the last entropies


class Marks:
    """A streamer that notes how many calls there were when each round's tokens came."""

    def __init__(self, transfers):
        self.transfers, self.at = transfers, []

    def put(self, value):
        self.at.append(len(self.transfers.calls))

    def end(self):
        pass


def test_a_transfer_changes_no_value(monkeypatch):
    ids, values, one = torch.randint(0, 2**24, (5, 3)), torch.randn(5, 3), torch.tensor(0.25)
    here = session.fetch(ids, values, one)
    monkeypatch.setattr(session, "on_host", lambda tensor: False)
    there = session.fetch(ids, values, one)
    for own, array, right in zip(here, there, (ids, values, one), strict=True):
        assert own.shape == array.shape == tuple(right.shape)
        assert (own == right.numpy()).all() and (array == right.numpy()).all()


def test_choices_are_argmaxima_and_the_same_from_a_device(monkeypatch):
    rows = torch.randint(0, 4, (200, 9), generator=torch.Generator().manual_seed(0)).float()  # many ties
    rows[0, 3] = -float("inf")
    here = session.Choice(Settings(1))(rows)
    assert here == [row.index(max(row)) for row in rows.tolist()]  # the first of the largest
    assert here == rows.argmax(-1).tolist() == [_argmax(row[None, None]) for row in rows]  # as the oracle's
    wide = torch.randint(0, 4, (3, 151_936), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert session.Choice(Settings(1))(wide) == wide.argmax(-1).tolist() == [_argmax(row[None, None]) for row in wide]
    monkeypatch.setattr(session, "on_host", lambda tensor: False)
    assert session.Choice(Settings(1))(rows) == here


@pytest.mark.parametrize("listen", [False, True])
@pytest.mark.parametrize(("n", "temperature"), [(20, 0.0), (90, 0.0), (40, 0.7)])
def test_entropies_are_scipys_and_there_when_a_round_is_heard(listen, n, temperature):
    """Of the target's own distribution, whatever the temperature."""
    model, ids, heard = text_target(), text_prompt(11), []
    on_round = (lambda r: heard.append(r.entropy)) if listen else None
    drafter = AutoDrafter(block_head(model), costs=RoundCosts((0, 31), (1.0, 5.0), 0.2))
    out, stats = decode(drafter, model, ids, Settings(n, on_round=on_round, temperature=temperature))
    rows = model(out).logits[0].double().softmax(-1).numpy()
    right = [scipy.stats.entropy(rows[r.start]) for r in stats.rounds]
    assert np.allclose([r.entropy for r in stats.rounds], right, rtol=1e-3)
    assert heard == ([r.entropy for r in stats.rounds] if listen else [])


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("fill", ["nan", "inf", "-inf"])
def test_rows_that_are_not_finite_are_refused(monkeypatch, here, row, fill):
    monkeypatch.setattr(session, "on_host", lambda tensor: here)
    rows = torch.randn(4, 9)
    rows[row] = float(fill)
    with pytest.raises(ValueError, match="not finite"):
        session.Choice(Settings(1))(rows)
    rows = torch.randn(4, 9)
    rows[row, 5] = float(fill)
    if fill == "-inf":
        session.Choice(Settings(1))(rows)  # one token that cannot come
    else:
        with pytest.raises(ValueError, match="not finite"):
            session.Choice(Settings(1))(rows)


def split(calls, counts):
    """Cut a list into pieces of these lengths."""
    pieces, at = [], 0
    for count in counts:
        pieces.append(calls[at : at + count])
        at += count
    return pieces


@pytest.mark.usefixtures("device")
def test_the_oracle_has_one_transfer_a_step():
    model = text_target()
    with Transfers(model) as transfers:
        greedy_generate(model, text_prompt(11), 5)
        few = len(transfers.calls)
        greedy_generate(model, text_prompt(11), 25)
    assert len(transfers.calls) - few == few + 2 * 20  # .cpu().numpy() is told as two calls


def test_a_prefill_holds_the_kept_layers_states_alone():
    """While the last layer runs, of the layers before it only the kept ones' outputs are alive."""
    model, alive, outputs = text_target(), [], []
    layers = decoder_layers(model)

    def note(module, args, output):
        gc.collect()
        alive.append([i for i, ref in enumerate(outputs) if ref() is not None])
        outputs.append(weakref.ref(output if isinstance(output, torch.Tensor) else output[0]))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.inference_mode(), Target(model, StreamPositions(), (0, 2)) as target:
        _, fused = target.prefill(text_prompt(50))
        assert fused.shape == (1, 50, 64)
        gc.collect()
        assert [ref() for ref in outputs] == [None] * len(layers)  # the fused copy is all that is left
    for hook in hooks:
        hook.remove()
    assert set(alive[-1]) <= {0, 2, len(layers) - 2} and 1 not in alive[-1]


def test_states_of_rounds_without_a_draft_wait_for_the_next(monkeypatch):
    """A head that is never worth its draft still finds every committed state when it is probed."""
    model, ids, seen = text_target(), text_prompt(11), []
    head = block_head(model)
    drafter = AutoDrafter(head, costs=RoundCosts((0, 31), (1.0, 5.0), 0.2))
    draft = BlockDrafter.draft

    def draft_and_tell(self, root, fused):
        seen.append(fused.shape[1])
        return draft(self, root, fused)

    monkeypatch.setattr(BlockDrafter, "draft", draft_and_tell)
    out, stats = decode(drafter, model, ids, Settings(60))
    assert torch.equal(out, greedy_generate(model, ids, 60))
    places = [r.start for r in stats.rounds if len(r.top_ids)]
    assert len(places) < 8 and max(seen[1:]) > 8 and [sum(seen[: i + 1]) for i in range(len(seen))] == places


def test_a_round_does_not_read_what_the_drafter_does_not_ask_for():
    model, ids = text_target(), text_prompt(11)
    stream = greedy_generate(model, ids, 60)[0].tolist()
    out, _ = decode(RandomDrafter(stream), model, ids, Settings(20))
    assert out[0].tolist() == stream[:31]
