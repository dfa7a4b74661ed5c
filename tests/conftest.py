"""What every test shares: few threads, quiet progress bars, no network, and small targets that are built once.

GLANCE_TEST_THREADS sets the threads of torch (default 1: the tests are many tiny passes).
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(  # no deadline and no judgement of slow draws: a busy machine is not a fault
    "glance",
    deadline=None,
    print_blob=True,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("glance")


@pytest.fixture(autouse=True, scope="session")
def few_threads():
    """Keep to one thread unless told otherwise, and keep loading quiet."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(int(os.environ.get("GLANCE_TEST_THREADS", "1")))
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


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A toy pair and toy tasks on disk: `target/`, `head/`, `data/`. To be read only: who writes there takes a copy."""
    import toy_run

    folder = tmp_path_factory.mktemp("toy")
    toy_run.write_pair(folder)
    toy_run.write_tasks(folder / "data")
    return folder
