"""What every test shares: one thread, quiet progress bars, no network, and small targets that are built once."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

settings.register_profile("glance", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("glance")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Keep to one thread: the tests are many tiny passes, and equal threads give equal sums."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def qwen3():
    """A tiny random text target."""
    import toys

    return toys.text_target("qwen3")


@pytest.fixture(scope="session")
def qwen3_vl():
    """A tiny random vision-language target with M-RoPE and deepstack."""
    import toys

    return toys.vision_target("qwen3_vl")
