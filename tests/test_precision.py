"""Low precision is used where it is fast, and nowhere else."""

import pytest
import torch

from glance import precision


@pytest.fixture
def timed(monkeypatch):
    """Say what products take by dtype, in place of a measurement."""

    monkeypatch.delenv("GLANCE_PRECISION", raising=False)

    def set_times(bfloat16: float, float32: float = 1.0) -> None:
        times = {torch.bfloat16: bfloat16, torch.float32: float32}
        monkeypatch.setattr(precision, "product_ms", lambda dtype, device: times[dtype])

    return set_times


@pytest.mark.parametrize(
    ("bfloat16", "choice"), [(0.5, "bfloat16"), (1.1, "bfloat16"), (1.5, "float32"), (60.0, "float32")]
)
def test_training_takes_bfloat16_where_it_is_fast(timed, bfloat16, choice):
    timed(bfloat16)
    assert precision.training_precision("auto", "cpu") == choice
    assert precision.is_fast(torch.float32, "cpu")
    assert precision.describe("cpu").endswith(f"training in {choice}")


@pytest.mark.parametrize("asked", ["bfloat16", "float32"])
def test_what_is_asked_for_is_not_measured(monkeypatch, asked):
    monkeypatch.setattr(precision, "product_ms", lambda *args: pytest.fail("measured"))
    assert precision.training_precision(asked, "cpu") == asked


@pytest.mark.parametrize("given", ["bfloat16", "float32"])
def test_the_environment_takes_the_place_of_the_measurement(monkeypatch, given):
    monkeypatch.setattr(precision, "product_ms", lambda *args: pytest.fail("measured"))
    monkeypatch.setenv("GLANCE_PRECISION", given)
    assert precision.training_precision("auto", "cpu") == given
    assert precision.training_precision("float32", "cpu") == "float32"
    assert precision.describe("cpu") == f"GLANCE_PRECISION is set: training in {given}"
    monkeypatch.setenv("GLANCE_PRECISION", "half")
    with pytest.raises(ValueError, match="GLANCE_PRECISION must be bfloat16 or float32, got 'half'"):
        precision.training_precision("auto", "cpu")


def test_float16_is_judged_like_bfloat16(monkeypatch):
    times = {torch.float16: 30.0, torch.bfloat16: 0.5, torch.float32: 1.0}
    monkeypatch.setattr(precision, "product_ms", lambda dtype, kind: times[dtype])
    assert not precision.is_fast(torch.float16, "cpu") and precision.is_fast(torch.bfloat16, "cuda:0")


def test_a_product_is_timed_once_per_dtype_and_device():
    assert precision.product_ms(torch.bfloat16, "cpu") is precision.product_ms(torch.bfloat16, "cpu")
    assert precision.product_ms(torch.float32, "cpu") > 0
