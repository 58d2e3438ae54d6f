import pytest
import torch

from lit_rlkv.diagnostics.peak import peak_flops

CUDA = torch.device("cuda", 0)


@pytest.fixture
def named(monkeypatch):
    def name_it(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda *_: True)

    before = torch.get_float32_matmul_precision()
    yield name_it
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_products_of_bfloat16_are_counted_without_sparsity(named, name, tflops):
    named(name)
    assert peak_flops(CUDA, torch.bfloat16) == pytest.approx(tflops * 1e12)


def test_float32_is_that_of_tensor_cores_where_they_may_be_used(named):
    named("NVIDIA H200")
    torch.set_float32_matmul_precision("highest")
    assert peak_flops(CUDA, torch.float32) == pytest.approx(66.9e12)
    torch.set_float32_matmul_precision("high")
    assert peak_flops(CUDA, torch.float32) == pytest.approx(494.7e12)


def test_a_device_that_nobody_knows_has_no_peak(named):
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    named("NVIDIA of tomorrow")
    with pytest.warns(UserWarning, match="not found"):
        assert peak_flops(CUDA, torch.bfloat16) is None
