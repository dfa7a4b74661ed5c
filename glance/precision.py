"""Whether low precision pays on a device: matrix products are timed once per process, in milliseconds.

Processors without bfloat16 instructions run its products tens of times slower than float32's; most laptops are of that
kind. What trains, reads states or audits in low precision asks here first.
"""

from functools import lru_cache
from time import perf_counter

import torch

SIDE = 256  # of the square matrices that are timed
REPEATS = 5


@lru_cache
def product_ms(dtype: torch.dtype, device: str) -> float:
    """Return the fastest of a few products of two SIDE x SIDE matrices, in milliseconds."""
    one = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    times = []
    for _ in range(REPEATS + 1):
        began = perf_counter()
        (one @ one)[0, 0].item()  # the item waits for a device
        times.append(1e3 * (perf_counter() - began))
    return min(times[1:])


def is_fast(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Say whether products in `dtype` are at least as fast as in float32, give or take a fifth; float32 always is."""
    kind = torch.device(device).type
    return dtype == torch.float32 or product_ms(dtype, kind) <= 1.2 * product_ms(torch.float32, kind)


def training_precision(asked: str, device: torch.device | str) -> str:
    """Return "bfloat16" or "float32": what was asked for, and for "auto" bfloat16 where it is fast."""
    if asked != "auto":
        return asked
    return "bfloat16" if is_fast(torch.bfloat16, device) else "float32"


def describe(device: torch.device | str) -> str:
    """Say in one line what was measured."""
    kind = torch.device(device).type
    low = product_ms(torch.bfloat16, kind)
    full = product_ms(torch.float32, kind)
    choice = training_precision("auto", kind)
    return (
        f"{SIDE} x {SIDE} products on this {kind}: bfloat16 {low:.2g} ms, float32 {full:.2g} ms; training in {choice}"
    )
