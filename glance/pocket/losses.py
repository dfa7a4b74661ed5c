"""Throw-away heads that teach where and what to read; they are trained beside the target and never shipped.

`CellHeads` asks each cell's state for its characters (one per slot) and for its colour, shape and size. `Pointer` asks the
state after the pointer layer for the cell and slot that the next token comes from, and pushes half of the reading layers'
heads to attend to that cell. With the language loss alone, reading emerges far more slowly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glance.pocket.canvas import CELL, CHARACTERS, COLOURS, HEIGHT, SHAPES, SLOTS, WIDTH
from glance.pocket.model import Watch

CLASSES = (len(COLOURS) + 1, len(SHAPES) + 1, 3)


def weigh_empty(classes: int) -> torch.Tensor:
    """Return class weights that count "nothing here" a tenth."""
    weights = torch.ones(classes)
    weights[0] = 0.1
    return weights


class CellHeads(torch.nn.Module):
    """Characters, colour, shape and size off each cell's state."""

    def __init__(self, hidden: int = 256):
        super().__init__()
        self.characters = torch.nn.Linear(hidden, SLOTS * len(CHARACTERS))
        self.things = torch.nn.Linear(hidden, sum(CLASSES))

    def loss(self, cells: torch.Tensor, slots: torch.Tensor, things: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss on characters and on things (mean over colour, shape and size)."""
        logits = self.characters(cells).view(-1, len(CHARACTERS)).float()
        on_characters = F.cross_entropy(logits, slots.view(-1), weight=weigh_empty(len(CHARACTERS)))
        said = things[..., 0] >= 0
        if not said.any():
            return on_characters, on_characters * 0
        split = self.things(cells[said]).float().split(CLASSES, -1)
        losses = [
            F.cross_entropy(z, y, weight=weigh_empty(len(z[0])))
            for z, y in zip(split, things[said].unbind(-1), strict=True)
        ]
        return on_characters, sum(losses) / len(losses)

    @torch.no_grad()
    def accuracy(self, cells: torch.Tensor, slots: torch.Tensor, things: torch.Tensor) -> dict[str, float]:
        """Return the share of drawn characters, and of drawn things (all three classes), that are right."""
        out = {}
        drawn = slots > 0
        if drawn.any():
            guess = self.characters(cells).view(*slots.shape, -1).argmax(-1)
            out["characters"] = (guess == slots)[drawn].float().mean().item()
        there = things[..., 0] > 0
        if there.any():
            split = self.things(cells[there]).split(CLASSES, -1)
            guess = torch.stack([z.argmax(-1) for z in split], -1)
            out["things"] = (guess == things[there]).all(-1).float().mean().item()
        return out


class Pointer(torch.nn.Module):
    """Where on the page the next token comes from."""

    def __init__(self, hidden: int = 256):
        super().__init__()
        self.cell = torch.nn.Linear(hidden, WIDTH * HEIGHT // CELL**2)
        self.slot = torch.nn.Linear(hidden, SLOTS)

    def loss(self, watch: Watch, pointers: torch.Tensor) -> torch.Tensor:
        """Return the loss on cell and slot plus the attention's loss on the cell."""
        pointed = pointers[..., 0] >= 0
        if not pointed.any():
            return watch.pointer_states.sum() * 0
        cell, slot = pointers[pointed].unbind(-1)
        states = watch.pointer_states.float()[pointed]
        states = F.rms_norm(states, (states.shape[-1],))
        loss = F.cross_entropy(self.cell(states).float(), cell)
        if (slot >= 0).any():
            loss = loss + F.cross_entropy(self.slot(states[slot >= 0]).float(), slot[slot >= 0])
        for logp in watch.attention_logp:
            picked = logp.transpose(1, 2)[pointed]  # (tokens, heads, c)
            picked = picked.gather(-1, cell[:, None, None].expand(-1, picked.shape[1], 1))
            loss = loss - picked.clamp(min=-9).mean() / len(watch.attention_logp)
        return loss

    @torch.no_grad()
    def accuracy(self, watch: Watch, pointers: torch.Tensor) -> float:
        """Return the share of pointed tokens whose cell is right."""
        pointed = pointers[..., 0] >= 0
        if not pointed.any():
            return float("nan")
        states = watch.pointer_states.float()[pointed]
        guess = self.cell(F.rms_norm(states, (states.shape[-1],))).argmax(-1)
        return (guess == pointers[pointed][:, 0]).float().mean().item()
