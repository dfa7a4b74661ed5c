"""Whether low precision pays on a device: matrix products are timed once per process, in milliseconds.

Processors without bfloat16 instructions run its products tens of times slower than float32's; most laptops are of that
kind. What trains, reads states or audits in low precision asks here first. `GLANCE_PRECISION`, set to bfloat16 or float32,
takes the place of the measurement wherever "auto" is asked for.
"""

import os
from functools import lru_cache
from time import perf_counter

import torch

CHOICES = ("bfloat16", "float32")
REPEATS = 5


def side_of(kind: str) -> int:
    """Return the side of the square matrices that are timed: on an accelerator small ones would time the launch alone."""
    return 256 if kind == "cpu" else 2048


@lru_cache
def product_ms(dtype: torch.dtype, kind: str) -> float:
    """Return the fastest of a few products of two square matrices on a kind of device, in milliseconds."""
    side = side_of(kind)
    one = torch.ones(side, side, dtype=dtype, device=kind)
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
    """Return "bfloat16" or "float32": what was asked for, and for "auto" what is set outside, or bfloat16 where it is fast.

    Raises:
        ValueError: another word, asked for or set outside.
    """
    if asked in CHOICES:
        return asked
    if asked != "auto":
        raise ValueError(f"precision must be auto, bfloat16 or float32, got {asked!r}")
    given = os.environ.get("GLANCE_PRECISION", "")
    if given and given not in CHOICES:
        raise ValueError(f"GLANCE_PRECISION must be bfloat16 or float32, got {given!r}")
    return given or ("bfloat16" if is_fast(torch.bfloat16, device) else "float32")


def describe(device: torch.device | str) -> str:
    """Say in one line what was measured, or set, and what training takes."""
    kind = torch.device(device).type
    choice = training_precision("auto", kind)
    if os.environ.get("GLANCE_PRECISION"):
        return f"GLANCE_PRECISION is set: training in {choice}"
    low = product_ms(torch.bfloat16, kind)
    full = product_ms(torch.float32, kind)
    side = side_of(kind)
    return (
        f"{side} x {side} products on this {kind}: bfloat16 {low:.2g} ms, float32 {full:.2g} ms; training in {choice}"
    )
