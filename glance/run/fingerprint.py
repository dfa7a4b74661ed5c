"""Fingerprints of what decides a run's tokens: weights, processors, images. Two runs are one only where these are equal.

Conventions that decide numbers: a model's fingerprint is of what was loaded, not of files, so that it holds for folders, hub
ids and shards alike. Every element counts through torch's own hash of a tensor (the exclusive or of all elements' bits), and
a few elements of each tensor are hashed as they stand: some seconds for 16 GB. It tells two checkpoints apart; it proves
nothing against someone who wants them to look alike.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from glance.files import file_sha256, plain

SAMPLE = 64  # elements of a tensor that are hashed as they stand, evenly spread
NOT_THE_MODEL = ("transformers_version", "torch_dtype", "dtype")  # of a config; dtype has a place of its own


@torch.inference_mode()
def weights_sha256(model: torch.nn.Module) -> str:
    """Fingerprint a model: its class, its configs, and every parameter and buffer by name, shape, dtype and content."""
    digest = sha256(type(model).__name__.encode())
    for name in ("config", "generation_config"):
        digest.update(_config_text(getattr(model, name, None)).encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = [(name, tensor, _content(tensor)) for name, tensor in sorted(tensors, key=lambda item: item[0])]
    for name, tensor, content in found:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {content}".encode())
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> list[Any]:
    """Return the hash of all elements, then some elements themselves."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return []
    places = torch.linspace(0, flat.numel() - 1, min(SAMPLE, flat.numel()), device=flat.device, dtype=torch.float64)
    some = flat[places.long()].cpu()
    whole = flat.cpu() if flat.device.type not in ("cpu", "cuda") else flat
    return [torch.hash_tensor(whole).item(), *some.tolist()]


def _config_text(config: Any) -> str:
    """Write a config down without what says where it came from or how it is run."""
    if config is None:
        return ""
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return json.dumps(_without(plain(values)), sort_keys=True, default=str)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without(v) for k, v in value.items() if not k.startswith("_") and k not in NOT_THE_MODEL}
    return [_without(item) for item in value] if isinstance(value, list) else value


def processor_sha256(processor: Any) -> str:
    """Fingerprint a processor or a tokenizer by the files that it saves: vocabulary, chat template, image settings."""
    digest = sha256(type(processor).__name__.encode())
    with TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(folder).as_posix()} {file_sha256(path)}".encode())
    return digest.hexdigest()


def files_sha256(paths: Iterable[Path]) -> str:
    """Fingerprint files by their content, in order; a file that has not changed since is not read again."""
    digest = sha256()
    for path in paths:
        facts = path.stat()
        digest.update(_file_sha256(path, facts.st_size, facts.st_mtime_ns).encode())
    return digest.hexdigest()


@lru_cache(maxsize=100_000)
def _file_sha256(path: Path, size: int, modified_ns: int) -> str:
    """Hash a file once per path, size and time of change."""
    return file_sha256(path)
