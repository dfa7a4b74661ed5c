"""What one decode is told and keeps: its settings, clock, committed stream and choices.

Conventions that decide numbers:

- The first token comes from the prefill and belongs to no round. A round commits its accepted nodes and one bonus token,
  cut at a stop token or at the limit; tau = (n_tokens - 1) / rounds, after the cut. A round that lost tokens to the cut is
  `truncated`.
- `timing="decode_only"` opens after the prefill and after the first round's draft; `"legacy"` opens before the prefill;
  both divide by all output tokens. The device is synchronised at both ends.

The file knows nothing of models, heads or caches.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from glance.records import TIMINGS, Round

COLDEST = 1e-30  # temperature; below it, logits of some thousands overflow float32
HOTTEST = 1e30
NEUTRAL = {  # fields of a generation_config that change a greedy text, and the value at which they do not
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "sequence_bias": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}


def generation_rules(model: Any) -> dict[str, Any]:
    """Return the rules of a target's `generation_config` that change a greedy choice, by name: decoding here has none."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in NEUTRAL}
    return {name: value for name, value in found.items() if value not in (None, [], (), {}, NEUTRAL[name])}


@dataclass(frozen=True)
class Settings:
    """How to decode one prompt; refuses what makes no sense.

    Args:
        max_new_tokens: the limit, at least 1.
        stop_token_ids: ids that end the text; None means the target's own `generation_config`, () means none.
        temperature: 0 for greedy.
        top_p, top_k: restrict sampling as transformers' warpers do; 1.0 and 0 leave it alone.
        generator: a `torch.Generator` on the target's device, for sampling that repeats.
        timing: which of the two conventions `Stats.ms_per_token` reports.
        on_round: called with every `Round`.
        streamer: a transformers streamer; it receives every committed token in order.
        compile: run verify passes with static shapes through `torch.compile` (see `glance.compiled`); off by default.
    """

    max_new_tokens: int = 256
    stop_token_ids: Any = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    generator: torch.Generator | None = None
    timing: str = "decode_only"
    on_round: Callable[[Round], None] | None = None
    streamer: Any = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.timing not in TIMINGS:
            raise ValueError(f"timing must be one of {', '.join(TIMINGS)}, got {self.timing!r}")
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(
                f"temperature must be 0 (greedy) or lie in {COLDEST:g} to {HOTTEST:g}, where logits can be scaled in "
                f"float32; got {self.temperature}"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"top_p must be in (0, 1] and top_k at least 0, got top_p={self.top_p}, top_k={self.top_k}"
            )


class Clock:
    """Books a round's time by name, and the whole decode's by both conventions."""

    def __init__(self, device: torch.device):
        self._device = device
        self._opened: dict[str, float] = {}
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def open(self, timing: str) -> None:
        """Start the stopwatch of a convention; synchronises the device."""
        self._synchronise()
        self._opened[timing] = self._last = perf_counter()

    def close(self) -> dict[str, float]:
        """Return seconds since each convention's opening; synchronises the device."""
        self._synchronise()
        now = perf_counter()
        return {timing: now - opened for timing, opened in self._opened.items()}

    def start_round(self) -> None:
        """Begin a round's laps."""
        self.laps = dict.fromkeys(("draft", "tree", "verify", "commit"), 0.0)
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        """Book the milliseconds since the last lap under `name`; the host waits for a device only where it needs data."""
        now = perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + 1e3 * (now - self._last)
        self._last = now

    def _synchronise(self) -> None:
        if self._device.type in ("cuda", "mps"):
            getattr(torch, self._device.type).synchronize()


def on_host(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's values can be read without a transfer."""
    return tensor.is_cpu


def fetch(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Return tensors of one device as arrays, float32 or int64, in one transfer: as float32, exact for ids below 2**24."""
    if on_host(tensors[0]):
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1).float() for tensor in tensors]).cpu().numpy()
    parts = np.split(packed, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    of = [(tensor.shape, np.float32 if tensor.is_floating_point() else np.int64) for tensor in tensors]
    return [part.reshape(shape).astype(kind) for part, (shape, kind) in zip(parts, of, strict=True)]


class Choice:
    """Turns target logits into the target's own choices: the argmax, or draws from its conditionals."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._warpers = []
        if settings.temperature > 0:
            self._warpers.append(TemperatureLogitsWarper(float(settings.temperature)))
            if settings.top_k:
                self._warpers.append(TopKLogitsWarper(settings.top_k))
            if settings.top_p < 1:
                self._warpers.append(TopPLogitsWarper(settings.top_p))

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """Choose for each row of `(n, V)`; return n ids, in one transfer to the host."""
        logits = logits.float()
        if not self._warpers and on_host(logits):  # numpy's argmax is several times faster than torch's on a CPU
            rows = logits.numpy()
            ids = rows.argmax(-1).tolist()  # of a row's first nan, if it has one
            top = map(rows.item, range(len(rows)), ids)
        else:
            top, ids = logits.max(dim=-1)
            scores = logits
            for warper in self._warpers:
                scores = warper(None, scores)
            if self._warpers:
                probs = scores.softmax(-1).nan_to_num(1.0)  # rows not finite are refused below, not by multinomial
                ids = torch.multinomial(probs, 1, generator=self._settings.generator)[:, 0]
            ids, top = fetch(ids, top)
            ids = ids.tolist()
            top = top.tolist()
        if not isfinite(sum(top)):
            raise ValueError("the target's logits are not finite (nan or inf): check its weights and dtype")
        return ids


class Entropies:
    """Fills in the entropies of finished rounds, AT_ONCE at a time.

    Batched: computed one by one they cost a quarter of a plain round's overhead, and as many launches on a GPU. With
    `on_round` every round has its own before it is heard.
    """

    AT_ONCE = 32

    def __init__(self, settings: Settings):
        self._at_once = 1 if settings.on_round else self.AT_ONCE
        self._waiting: list[tuple[Round, torch.Tensor]] = []

    def add(self, report: Round, logits: torch.Tensor) -> None:
        """Keep a round and the root's row of its logits `(N+1, V)`."""
        self._waiting.append((report, logits[0].clone() if len(logits) > 1 else logits[0]))
        if len(self._waiting) >= self._at_once:
            self.fill()

    def fill(self) -> None:
        """Compute what is waiting, in one transfer to the host."""
        if not self._waiting:
            return
        reports, rows = zip(*self._waiting, strict=True)
        (values,) = fetch(torch.special.entr(torch.stack(rows).float().softmax(-1)).sum(-1))
        for report, value in zip(reports, values.tolist(), strict=True):
            report.entropy = value
        self._waiting.clear()


@contextmanager
def ended(streamer: Any) -> Iterator[None]:
    """Tell a streamer that nothing more comes, also where a decode raises: a reader may be waiting."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def check_unpadded(inputs: Mapping[str, Any]) -> None:
    """Refuse a prompt with padding: rounds have no use for it, and it would be read as text.

    Raises:
        ValueError: zeros in `attention_mask`; says how many.
    """
    mask = inputs.get("attention_mask")
    if mask is not None and (zeros := int((torch.as_tensor(mask) == 0).sum())):
        raise ValueError(
            f"the prompt has {zeros} padding tokens (zeros in attention_mask): encode one prompt without padding"
        )


def settings_of(max_new_tokens: int, given: dict[str, Any]) -> Settings:
    """Return the settings of a call's keywords; refuse a padded prompt, and what is no setting.

    Raises:
        ValueError: padding. TypeError: a keyword that is no setting, as Python's own; one line each.
    """
    given = dict(given)
    check_unpadded(given)
    given.pop("attention_mask", None)
    names = [item.name for item in fields(Settings)]
    strange = [name for name in given if name not in names]
    if strange:
        raise TypeError(
            f"{strange[0]} is not a setting of a decode; there are: {', '.join(names)}. What a processor returns beside "
            "input_ids and attention_mask enters through positions=VisionPositions.from_inputs(inputs)"
        )
    return Settings(max_new_tokens, **given)


class Commit(NamedTuple):
    """What a round added to the text, after the cut at a stop token or at the limit."""

    tokens: list[int]
    accepted: int  # of the path
    bonus: int | None  # None where the cut took it
    truncated: bool  # whether the cut took anything


class Stream:
    """The committed text: cuts what it is given at the first stop token and at the limit, and feeds the streamer."""

    def __init__(self, input_ids: torch.Tensor, first: int, stops: frozenset[int], settings: Settings):
        self._input_ids = input_ids
        self._stops = stops
        self._limit = settings.max_new_tokens
        self._streamer = settings.streamer
        self.tokens: list[int] = []
        self.finish = ""  # "", "stop" or "length"
        if self._streamer is not None:
            self._streamer.put(input_ids[0].cpu())
        self.commit([], first)

    def commit(self, path: list[int], bonus: int) -> Commit:
        """Append a path's tokens and the bonus, up to and including the first stop token and up to the limit."""
        tokens = [*path, bonus][: self._limit - len(self.tokens)]
        stop = next((i for i, token in enumerate(tokens) if token in self._stops), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
            self.finish = "stop"
        self.tokens += tokens
        if not self.finish and len(self.tokens) >= self._limit:
            self.finish = "length"
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens))
        truncated = len(tokens) <= len(path)
        return Commit(tokens, min(len(path), len(tokens)), None if truncated else bonus, truncated)

    def ids(self) -> torch.Tensor:
        """Return prompt and text, `(1, P + n)`."""
        new = torch.tensor([self.tokens], dtype=self._input_ids.dtype, device=self._input_ids.device)
        return torch.cat([self._input_ids, new], dim=1)
