"""The kept states of a target: what chosen decoder layers return, recorded while a pass runs, and put side by side.

The kept state of layer i is what decoder layer i returns (transformers' `hidden_states[i + 1]`), before Qwen3-VL's
deepstack addition, which happens between layers; of the last layer it is the final norm's output. Only the layers asked
for are held.

Shapes: q rows of a pass, L kept layers, d width.
"""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn


class KeptStates:
    """Records what chosen decoder layers return while it is entered; training and decoding both read states with it.

    Attributes:
        recording: a decode turns it off outside its own passes, since others may run the same layers.
        thread: the thread whose passes are recorded; None for all. Someone else's forward may run in the middle of a pass.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]):
        self.decoder = decoder_of(model)
        self.layers = decoder_layers(model)
        self.layer_ids = tuple(layer_ids)
        self.recording = True
        self.thread: int | None = None
        bad = [i for i in self.layer_ids if not 0 <= i < len(self.layers)]
        if bad:
            raise ValueError(f"target_layer_ids {bad} are outside the target's layers 0..{len(self.layers) - 1}")
        self._states: dict[int, torch.Tensor] = {}
        self._hooks: list = []

    def __enter__(self) -> "KeptStates":
        last = len(self.layers) - 1
        for i in set(self.layer_ids):
            module = self.decoder if i == last else self.layers[i]
            self._hooks.append(module.register_forward_hook(self._recorder(i)))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._states.clear()

    def _recorder(self, layer: int):
        def record(module: nn.Module, args: tuple, output: Any) -> None:
            if self.recording and (self.thread is None or self.thread == get_ident()):
                self._states[layer] = output if isinstance(output, torch.Tensor) else output[0]

        return record

    def take(self) -> list[torch.Tensor]:
        """Return the last forward's states, `(batch, q, d)` per layer asked for, and let go of them."""
        missing = [i for i in self.layer_ids if i not in self._states]
        if missing:
            raise RuntimeError(f"the target returned no state for layers {missing}: is every layer run as a module?")
        states = [self._states[i] for i in self.layer_ids]
        self._states.clear()
        return states


def fuse(states: Sequence[torch.Tensor], n: int = 0, rows: torch.Tensor | None = None) -> torch.Tensor | None:
    """Put kept states `(batch, q, d)` of L layers side by side, `(batch, n, L * d)`: of `rows` (n,), the first n, or all.

    None for L = 0.
    """
    if not states:
        return None
    home = states[-1].device
    if any(state.device != home for state in states):  # layers may sit on several devices
        states = [state.to(home) for state in states]
    if rows is not None:
        rows = rows.to(home)
        states = [state.index_select(1, rows) for state in states]
    elif n:
        states = [state.narrow(1, 0, n) for state in states]
    return torch.cat(states, dim=-1)


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that runs the language layers."""
    return model.get_decoder()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the language model's decoder layers, in order."""
    config = model.config.get_text_config(decoder=True)
    for child in decoder_of(model).children():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return child
    raise ValueError(f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers to read from")
