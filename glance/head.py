"""A block head: what it reads off a target, how one is loaded, and what is checked before it drafts.

A decoding head is anything with `block_size`, `mask_token_id`, `target_layer_ids`, called as
`head(target_hidden=, noise_embedding=, position_ids=, past_key_values=, use_cache=True)` and returning hidden states for
the block; nothing here tests for a class. It reads the fused states of every committed token but the last (the kept
layers side by side, `KeptStates` says which state exactly), and the embeddings of `[last committed, MASK x (B-1)]`, on
plain stream places, whatever rope positions the target uses.

Shapes: B block, V vocabulary, L kept layers, d width.
"""

import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from glance.states import decoder_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LFS_POINTER = b"version https://git-lfs"


def default_device() -> torch.device:
    """Return the best device of this machine: cuda, then mps, then cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def as_device(device: torch.device | str | None) -> torch.device:
    """Return a device by name, or the best for None.

    Raises:
        ValueError: no such kind of device, or none of it on this machine.
    """
    if device is None:
        return default_device()
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cuda, mps or cpu, got {str(device)!r}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r}: this machine has {torch.cuda.device_count()} cuda devices")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device 'mps': this machine has none")
    return found


def as_dtype(name: str | None) -> torch.dtype | None:
    """Return a dtype by name; None stays None, which means the device's default."""
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name] if name else None


def check_checkpoint(path: str | Path, what: str = "checkpoint") -> None:
    """Refuse what is no checkpoint's folder and no hub id, and a folder whose files are git-lfs pointers.

    Raises:
        ValueError: names the folder and what it lacks.
    """
    folder = Path(path)
    if not folder.exists():
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
            raise ValueError(f"{what} {path}: there is no such folder")
        return
    if not (folder / "config.json").is_file():
        raise ValueError(f"{what} {folder} has no config.json: it is not the folder of a transformers checkpoint")
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(LFS_POINTER):
            raise ValueError(f"{file} is a git-lfs pointer, not the file itself: fetch it with `git lfs pull`")


@contextmanager
def loading(path: str | Path) -> Iterator[None]:
    """Turn what a library raises at a checkpoint that cannot be loaded into one line that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError, pickle.UnpicklingError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        said = " ".join(str(error).split())
        raise ValueError(said if str(path) in said else f"{path} cannot be loaded: {said[:300]}") from error


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return bfloat16 on cuda, float32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def quiet_loading() -> None:
    """Keep transformers' loading bars out of logs and notebooks: they show where there is a terminal."""
    from transformers.utils import logging

    (logging.enable_progress_bar if sys.stderr.isatty() else logging.disable_progress_bar)()


def load_block_head(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Load a `dflash` block head, frozen, from a folder with `config.json` and safetensors weights.

    Args:
        path: the folder, or a hub id that transformers resolves.
        dtype: default bfloat16 on cuda, float32 elsewhere.
        device: default cuda, mps or cpu, the first there is.

    Returns:
        A `dflash.DFlashDraftModel`, or a `DFlash2DraftModel` where the config names one.

    Raises:
        ValueError: no config, no mask token id, a block smaller than 2, or weights that do not fit the config.
    """
    from dflash import DFlash2DraftModel, DFlashDraftModel
    from transformers import AutoConfig

    check_checkpoint(path, "head")
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        held = ", ".join(sorted(file.name for file in folder.glob("*.bin"))) or "no weights"
        raise ValueError(f"head {folder} has {held}: a head's weights are read from safetensors alone")
    quiet_loading()
    device = as_device(device)
    with loading(path):
        config = AutoConfig.from_pretrained(path)
    second = "DFlash2DraftModel" in (getattr(config, "architectures", None) or []) or (
        head_setting(config, "selector_rank") is not None
    )
    kind = DFlash2DraftModel if second else DFlashDraftModel
    if head_setting(config, "mask_token_id") is None:
        raise ValueError(
            f"{path}: the config has no mask_token_id (in dflash_config or beside it), so no block can be filled"
        )
    with loading(path):
        head, report = kind.from_pretrained(
            path,
            dtype=dtype or default_dtype(device),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with the folder's name
            output_loading_info=True,
        )
    wrong = {key: sorted(map(str, report[key]))[:3] for key in ("missing_keys", "mismatched_keys") if report.get(key)}
    if wrong:
        raise ValueError(f"{path}: weights and config differ: {json.dumps(wrong)}")
    if strange := sorted(map(str, report.get("unexpected_keys") or ())):
        raise ValueError(
            f"{path}: {len(strange)} weights that {kind.__name__} does not know, {strange[0]} first: "
            "a head of another class, or of another release of dflash"
        )
    if head.block_size < 2:
        raise ValueError(f"{path}: block_size is {head.block_size}; a block has a root and at least one offset")
    return head.to(device).eval().requires_grad_(False)


def head_setting(config: Any, name: str, default: Any = None) -> Any:
    """Read a drafting setting where dflash keeps it: in `dflash_config`, else on the config itself."""
    inner = getattr(config, "dflash_config", None) or {}
    return inner.get(name, getattr(config, name, default))


def check_head(head: Any) -> None:
    """Refuse what is not a block head: the three facts that drafting rests on must be there."""
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        if getattr(head, name, None) is None:
            raise ValueError(f"the head ({type(head).__name__}) has no {name}; a block head needs one")
    if head.block_size < 2:
        raise ValueError(f"the head's block_size is {head.block_size}; it must be at least 2")


def check_head_mode(head: Any) -> None:
    """Refuse a head in training mode, before it drafts: dropout would cost acceptance without a word."""
    if isinstance(head, nn.Module) and any(module.training for module in head.modules()):
        raise ValueError(
            f"the head ({type(head).__name__}) is in training mode, where dropout may spoil its drafts: "
            "call head.eval() first"
        )


def check_pair(head: Any, model: nn.Module) -> None:
    """Refuse a head that does not fit the target, naming everything that does not.

    Raises:
        ValueError: layer ids outside the target, another width, a mask id outside the vocabulary, a vocabulary of
            another size, or another convention for kept states.
    """
    wrong = []
    n_layers, rows = len(decoder_layers(model)), model.get_input_embeddings().weight.shape[0]
    width = model.get_input_embeddings().weight.shape[1]
    check_head(head)
    outside = [i for i in head.target_layer_ids if not 0 <= i < n_layers]
    if outside:
        wrong.append(f"target_layer_ids {outside} are outside the target's layers 0..{n_layers - 1}")
    if not 0 <= head.mask_token_id < rows:
        wrong.append(f"mask_token_id {head.mask_token_id} is outside the target's {rows} embedding rows")
    config = getattr(head, "config", None)
    if getattr(config, "hidden_size", width) != width:
        wrong.append(f"hidden_size {config.hidden_size} is not the target's {width}")
    if getattr(head, "fc", None) is not None and head.fc.in_features != len(head.target_layer_ids) * width:
        wrong.append(
            f"it reads {head.fc.in_features} features, {len(head.target_layer_ids)} kept layers give "
            f"{len(head.target_layer_ids) * width}"
        )
    known = {rows, model.config.get_text_config(decoder=True).vocab_size}  # a resized table may be padded further
    if getattr(config, "vocab_size", rows) not in known:
        wrong.append(f"vocab_size {config.vocab_size} is not the target's {' or '.join(map(str, sorted(known)))}")
    layers = getattr(config, "num_target_layers", None)
    if layers not in (None, n_layers):
        wrong.append(f"num_target_layers {layers} is not the target's {n_layers}")
    if config is not None and head_setting(config, "kept_state", "layer_output") != "layer_output":
        wrong.append(f"kept_state {head_setting(config, 'kept_state')!r} is not 'layer_output', the convention here")
    if wrong:
        raise ValueError(f"the head does not fit the target: {'; '.join(wrong)}")


def block_embedding(head: Any, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what embeds a block's ids `(..., B)` for the head: raw target embeddings times its `input_embedding_scale`."""
    scale = float(head_setting(getattr(head, "config", None), "input_embedding_scale", 1.0))
    table = model.get_input_embeddings()
    raw = table if type(table) is nn.Embedding else lambda ids: F.embedding(ids, table.weight)  # Gemma's own scales
    return raw if scale == 1.0 else lambda ids: raw(ids) * scale


def block_logits(head: Any, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what turns the head's hidden states `(..., d)` into logits `(..., V)`: its `compute_logits` if it has one."""
    output_head = model.get_output_embeddings()
    if hasattr(head, "compute_logits"):
        return lambda hidden: head.compute_logits(hidden, output_head)
    return output_head
