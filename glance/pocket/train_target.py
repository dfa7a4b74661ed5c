"""Training the pocket target from nothing: see cells, transcribe lines, then the five tasks.

Five stages in one resumable run. *vision*: the vision tower alone learns the characters of each slot and colour, shape
and size of each thing on 64 px strips (`losses.CellHeads`). *transcription*: strips are read out, with the pointer loss
from the first step (`losses.Pointer`). *tasks*: the five tasks and whole pages of lines, learning rate falling to almost
nothing. *polish*: the same once more, with four times the weight on what depends on the question. *forms*: a last, longer
fall in which almost half of the pages are forms, whose lines and look-ups are learned last. Matrices of blocks train with
Muon, everything else with AdamW; bfloat16 autocast where that is fast, else float32, and the checkpoint says which. No
dropout and no sampling in the loop: a run that is stopped and resumed takes the same steps, bit for bit, on the same
machine and thread count.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen3VLForConditionalGeneration

from glance.files import append_lines, json_line
from glance.pocket.batches import Batch, PageStream, collate
from glance.pocket.losses import CellHeads, Pointer
from glance.pocket.model import BatchForward, Watch, build_config, save_target
from glance.pocket.render import sample
from glance.pocket.tokenizer import build_tokenizer
from glance.precision import describe, training_precision
from glance.train.muon import build_muon


@dataclass(frozen=True)
class Stage:
    """One stretch of training. `mixture` weighs page kinds of one height."""

    name: str
    mixture: dict[str, float]
    batch: int
    steps: int
    learning_rate: float  # AdamW
    language_rate: float  # Muon, language blocks
    vision_rate: float  # Muon, vision blocks and mergers
    language: bool = True
    cells_weight: float = 1.0
    pointer_weight: float = 0.5
    asked_weight: float = 1.0  # of answer tokens that depend on the question
    warmup: int = 50
    floor: float = 0.05  # of the learning rate, at the end

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"stage {self.name}: batch {self.batch} and steps {self.steps} must be at least 1")

    def scale(self, step: int) -> float:
        """Return the learning rate's factor at a step: linear warm-up, then a cosine down to `floor`."""
        fall = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / self.warmup) * (self.floor + (1 - self.floor) * fall)


STRIPS = {"lines64": 0.78, "strip64": 0.22}
PAGES = {"chartqa": 1.0, "docvqa": 1.2, "infovqa": 1.0, "textvqa": 0.9, "caption": 0.9, "lines": 0.4}
POLISH = {"chartqa": 1.0, "docvqa": 1.4, "infovqa": 1.1, "textvqa": 1.3, "caption": 0.4, "lines": 0.2}
FORMS = {"chartqa": 1.0, "docvqa": 2.6, "infovqa": 0.7, "textvqa": 1.4, "caption": 0.3, "lines": 0.2}
PLAN = (
    Stage("vision", STRIPS, 48, 2000, 2e-3, 2e-3, 2e-3, language=False),
    Stage("transcription", STRIPS, 48, 500, 1e-3, 2e-3, 1e-3, floor=0.5),
    Stage("tasks", PAGES, 32, 2000, 1e-3, 2e-3, 1e-3, cells_weight=0.3, floor=0.01),
    Stage("polish", POLISH, 32, 800, 7e-4, 1.4e-3, 7e-4, cells_weight=0.2, asked_weight=4.0, warmup=30, floor=0.01),
    Stage("forms", FORMS, 32, 2000, 7e-4, 1.4e-3, 7e-4, cells_weight=0.2, asked_weight=4.0, warmup=30, floor=0.01),
)


@dataclass
class Run:
    """Everything that training changes, and where it stands."""

    seed: int
    plan: tuple[Stage, ...]
    stage: int = 0
    step: int = 0  # within the stage
    seconds: float = 0.0
    optimisers: list = field(default_factory=list)
    precision: str = "auto"  # of products: "bfloat16", "float32", or what is fast here

    def __post_init__(self) -> None:
        self.precision = training_precision(self.precision, "cpu")
        torch.manual_seed(self.seed)
        self.tokenizer = build_tokenizer()
        self.model = Qwen3VLForConditionalGeneration(build_config(self.tokenizer)).train()
        self.cells = CellHeads()
        self.pointer = Pointer()
        self.forward = BatchForward(self.model)
        self.optimisers = self.build_optimisers()

    def build_optimisers(self) -> list[torch.optim.Optimizer]:
        """Return AdamW, Muon for the language blocks, Muon for the vision blocks, in this order."""
        rest = []
        language = []
        vision = []
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed" not in name
            if is_matrix and "language_model.layers" in name:
                language.append(parameter)
            elif is_matrix and "visual" in name:
                vision.append(parameter)
            else:
                rest.append(parameter)
        rest += [*self.cells.parameters(), *self.pointer.parameters()]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.02},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        return [
            torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.97), fused=True),
            build_muon(language, 1e-3, self.precision),
            build_muon(vision, 1e-3, self.precision),
        ]

    def autocast(self) -> torch.autocast:
        """Return the context in which products are taken."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bfloat16")

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Every trained parameter."""
        return [p for module in (self.model, self.cells, self.pointer) for p in module.parameters()]

    def save(self, path: Path) -> None:
        """Write a checkpoint, in one move."""
        state = {
            "seed": self.seed,
            "precision": self.precision,
            "plan": [asdict(stage) for stage in self.plan],
            "where": (self.stage, self.step, self.seconds),
            "modules": [module.state_dict() for module in (self.model, self.cells, self.pointer)],
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Take up a checkpoint.

        Raises:
            ValueError: it is of another seed, or a stage that it has begun differs from the plan's.
        """
        state = torch.load(path, weights_only=True)
        self.stage, self.step, self.seconds = state["where"]
        begun = self.stage + (self.step > 0)
        if state["seed"] != self.seed or state["plan"][:begun] != [asdict(stage) for stage in self.plan[:begun]]:
            raise ValueError(f"{path}: a checkpoint of another run (seed or stages differ); choose another folder")
        if state.get("precision", "bfloat16") != self.precision:
            made = state.get("precision", "bfloat16")
            raise ValueError(
                f"{path}: a checkpoint made in {made}, and this machine trains in {self.precision}: "
                f"go on where it was made, or choose another folder"
            )
        for module, values in zip((self.model, self.cells, self.pointer), state["modules"], strict=True):
            module.load_state_dict(values)
        for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)

    def compute_losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the stage's losses on a batch, unweighted."""
        stage = self.plan[self.stage]
        if not stage.language:
            cells, _ = self.forward.see(batch.pixels)
            characters, things = self.cells.loss(cells, batch.slots, batch.things)
            return {"characters": characters, "things": things}
        watch = Watch(attention=stage.pointer_weight > 0)
        states, cells = self.forward(batch.pixels, batch.ids, batch.start, watch)
        asked = batch.labels >= 0
        each = F.cross_entropy(self.model.lm_head(states[asked]).float(), batch.labels[asked], reduction="none")
        weights = 1 + (stage.asked_weight - 1) * batch.asked[asked].float()
        losses = {"language": (each * weights).sum() / weights.sum()}
        if stage.cells_weight > 0:
            losses["characters"], losses["things"] = self.cells.loss(cells, batch.slots, batch.things)
        if stage.pointer_weight > 0:
            losses["pointer"] = self.pointer.loss(watch, batch.pointers)
        return losses

    def take_step(self, batch: Batch) -> dict[str, float]:
        """Train on one batch and return its losses."""
        stage = self.plan[self.stage]
        scale = stage.scale(self.step)
        for optimiser, rate in zip(
            self.optimisers, (stage.learning_rate, stage.language_rate, stage.vision_rate), strict=True
        ):
            for group in optimiser.param_groups:
                group["lr"] = rate * scale
        with self.autocast():
            losses = self.compute_losses(batch)
        weights = {"language": 1.0, "pointer": stage.pointer_weight}
        sum(loss * weights.get(name, stage.cells_weight) for name, loss in losses.items()).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return {name: loss.item() for name, loss in losses.items()}

    @torch.no_grad()
    def probe(self, batches: dict[str, Batch]) -> dict[str, dict[str, float]]:
        """Measure teacher-forced accuracy on held-out pages: tokens, pointed cells, characters, things."""
        rows = {}
        for name, batch in batches.items():
            with self.autocast():
                watch = Watch()
                if self.plan[self.stage].language:
                    states, cells = self.forward(batch.pixels, batch.ids, batch.start, watch)
                    asked = batch.labels >= 0
                    right = self.model.lm_head(states[asked]).argmax(-1) == batch.labels[asked]
                    row = {"tokens": right.float().mean().item()}
                    row["pointer"] = self.pointer.accuracy(watch, batch.pointers)
                else:
                    row, (cells, _) = {}, self.forward.see(batch.pixels)
                row |= self.cells.accuracy(cells, batch.slots, batch.things)
            rows[name] = {key: round(value, 4) for key, value in row.items()}
        return rows


def draw_probes(run: Run, count: int) -> dict[str, Batch]:
    """Draw the stage's held-out pages, a batch per page kind."""
    kinds = run.plan[run.stage].mixture
    return {kind: collate(run.tokenizer, [sample(kind, i, "eval") for i in range(count)]) for kind in kinds}


def write_row(path: Path, row: dict) -> None:
    """Append a row to the log and print it."""
    append_lines(path, [row])
    print(json_line(row).rstrip(), flush=True)


def train_stage(run: Run, out: Path, *, every: int, probes: int, workers: int, until: float) -> bool:
    """Train the run's stage to its end; return False where the time ran out before.

    Args:
        every: steps between log rows; every fourth of them also writes a checkpoint and a loadable snapshot.
        probes: held-out pages per kind that are measured with each log row.
        until: `time.time()` after which to stop, resumable.
    """
    stage = run.plan[run.stage]
    stream = PageStream(run.tokenizer, stage.mixture, stage.batch, stage.name, run.seed, run.step)
    options = {"num_workers": workers, "prefetch_factor": 6} if workers else {}
    batches = iter(torch.utils.data.DataLoader(stream, batch_size=None, **options))
    held = draw_probes(run, probes)
    sums = {}
    since = 0
    begin = time.time()
    while run.step < stage.steps:
        losses = run.take_step(next(batches))
        since = since + 1
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss
        out_of_time = time.time() > until
        if run.step % every == 0 or run.step == stage.steps or out_of_time:
            spent = time.time() - begin
            run.seconds = run.seconds + spent
            begin = time.time()
            row = {"seconds": round(run.seconds), "stage": stage.name, "step": run.step, "of": stage.steps}
            row["pages_per_s"] = round(since * stage.batch / spent, 1)
            row |= {name: round(total / since, 4) for name, total in sums.items()}
            sums = {}
            since = 0
            write_row(out / "log.jsonl", row | {"held_out": run.probe(held)})
            if run.step % (4 * every) == 0 or run.step == stage.steps or out_of_time:
                run.save(out / "checkpoint.pt")
                save_target(run.model, run.tokenizer, out / "snapshot")
        if out_of_time:
            return False
    return True


def train_target(
    out: Path,
    *,
    plan: tuple[Stage, ...] = PLAN,
    seed: int = 1,
    every: int = 50,
    probes: int = 24,
    workers: int = 1,
    max_seconds: float = math.inf,
) -> Run:
    """Train the pocket target in a folder, from its checkpoint where there is one.

    Args:
        out: gets `log.jsonl`, `checkpoint.pt` and `snapshot/`, a folder that `from_pretrained` loads.
        max_seconds: stop after this long; calling again goes on.

    Returns:
        The run; `save_target(run.model, run.tokenizer, folder)` ships it.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out.mkdir(parents=True, exist_ok=True)
    print(describe("cpu"), flush=True)
    run = Run(seed, plan)
    until = time.time() + max_seconds
    if (out / "checkpoint.pt").is_file():
        run.load(out / "checkpoint.pt")
    while run.stage < len(plan):
        if not train_stage(run, out, every=every, probes=probes, workers=workers, until=until):
            return run
        run.stage = run.stage + 1
        run.step = 0
    run.stage = len(plan) - 1
    run.step = plan[-1].steps
    return run
