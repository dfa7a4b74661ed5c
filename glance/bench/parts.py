"""What the benchmark times and how it looks inside: the pocket pair or random models of its size, stopwatches.

A random target's text means nothing and costs what a trained one's does. A random head's is accepted never; `KnowingHead`
has its cost and a stated quality.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from glance.paths import POCKET
from glance.run.experiment import load_pair

VOCABULARY = 710  # of the pocket target


class Stopwatch:
    """A streamer that notes when each token came, so that a loop's steps are timed without its prefill."""

    def __init__(self):
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(perf_counter())

    def end(self) -> None:
        pass

    def ms_per_token(self) -> float:
        """Return milliseconds per token after the first; the prompt came first of all."""
        return 1e3 * (self.at[-1] - self.at[1]) / (len(self.at) - 2)


def random_target(heads: int = 4, kv_heads: int = 2, layers: int = 6, width: int = 256) -> nn.Module:
    """Build a random text target."""
    settings = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "head_dim": 64}
    settings |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": VOCABULARY}
    settings |= {"max_position_embeddings": 8192, "initializer_range": 0.1}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**settings), attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def small_pair() -> tuple[nn.Module, nn.Module, str]:
    """Return a target without stop tokens, a head and their name: the pocket pair, or a random one where that is missing."""
    if not pocket_is_here():
        model = random_target()
        return model, random_head(model), "random target"
    pair = load_pair(str(POCKET / "target"), str(POCKET / "head"), dtype="float32")
    pair.target.generation_config.eos_token_id = None
    return pair.target, pair.head, "pocket target"


def pocket_is_here() -> bool:
    """Say whether the pocket target and its head are in their folder."""
    return all((POCKET / name / "config.json").is_file() for name in ("target", "head"))


def random_head(model: nn.Module, config: Any = None) -> nn.Module:
    """Build a random block head for a target: three layers, blocks of 16; or one of another head's config."""
    from dflash import DFlashDraftModel

    if config is None:
        text = model.config.get_text_config()
        config = Qwen3Config(**text.to_dict() | {"num_hidden_layers": 3, "layer_types": None})
        config.num_target_layers = text.num_hidden_layers
        config.block_size = 16
        config.dflash_config = {"mask_token_id": 1, "target_layer_ids": [1, 3, 4]}
    torch.manual_seed(1)
    return DFlashDraftModel(config).eval().requires_grad_(False)


class KnowingHead:
    """A real head's cost with a known quality: its pass is run, and its logits are replaced by made-up ones.

    The right token is first with probability 0.8, second with 0.1, out of reach else.

    Attributes:
        pass_of: the real head.
        rigging_ms: what replacing them took so far, which no real head does.
    """

    def __init__(self, head: nn.Module, stream: Sequence[int]):
        self.pass_of = head
        self._place = 0
        self.rigging_ms = 0.0
        right = torch.tensor([*stream, *[2] * 64])
        draws = torch.from_numpy(np.random.default_rng(0).random(len(right)))
        places = torch.arange(len(right))
        self._rigged = torch.randn(len(right), VOCABULARY, generator=torch.Generator().manual_seed(0))
        self._rigged[places, (right + 1) % VOCABULARY] = 30.0
        self._rigged[places, right] = torch.where(draws < 0.8, 31.4, torch.where(draws < 0.9, 28.6, -30.0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pass_of, name)

    def __call__(self, **inputs: Any) -> torch.Tensor:
        began = perf_counter()
        self._place = int(inputs["position_ids"][0, inputs["target_hidden"].shape[1]])
        self.rigging_ms += 1e3 * (perf_counter() - began)
        return self.pass_of(**inputs)

    def compute_logits(self, hidden: torch.Tensor, output_head: nn.Module) -> torch.Tensor:
        """Return logits `(1, n, V)` with the right tokens at their drawn ranks."""
        logits = output_head(hidden)
        began = perf_counter()
        place = self._place + 1
        logits[0] = self._rigged[place : place + hidden.shape[1]]
        self.rigging_ms += 1e3 * (perf_counter() - began)
        return logits


def random_prompt(length: int) -> torch.Tensor:
    """Return random ids `(1, length)`, no special token of the pocket tokenizer among them."""
    return torch.randint(16, 700, (1, length), generator=torch.Generator().manual_seed(length))


class Forwards:
    """Sums forward time per round; counts nested calls once. A round begins with a call of the first module.

    Attributes:
        laps: (milliseconds, those inside forwards): a pair before the first module's first call, then one per round; the
            last ends with the decode.
    """

    def __init__(self, *modules: nn.Module, aside_ms: Callable[[], float] = lambda: 0.0):
        """Watch modules while entered; what `aside_ms`, a running total, grows by is left out."""
        self._modules = modules
        self._aside_ms = aside_ms
        self._inside = False
        self._ms = 0.0
        self._last = perf_counter()
        self._aside = aside_ms()
        self.laps: list[tuple[float, float]] = []

    def __enter__(self) -> "Forwards":
        for module in self._modules:  # not by hooks, which take a slower way through every call
            module.forward = self._counted(module.forward, laps=module is self._modules[0])
        return self

    def __exit__(self, *exc: object) -> None:
        for module in self._modules:
            del module.forward  # the class's own again
        self.lap(perf_counter())

    def _counted(self, run: Callable, laps: bool) -> Callable:
        @wraps(run)
        def inside(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            if self._inside:
                return run(*args, **kwargs)
            if laps:
                began = self.lap(began)
            self._inside = True
            out = run(*args, **kwargs)
            self._inside = False
            self._ms += 1e3 * (perf_counter() - began)
            return out

        return inside

    def lap(self, now: float) -> float:
        """Close a round and return the time at which the next one begins."""
        aside = self._aside_ms()
        self.laps.append((1e3 * (now - self._last) - (aside - self._aside), self._ms))
        self._ms = 0.0
        self._aside = aside
        self._last = perf_counter()
        return self._last
