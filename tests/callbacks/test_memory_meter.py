import pytest
import torch

from lit_rlkv.callbacks import performance
from lit_rlkv.callbacks.performance import MemoryMeter

MIB = 2**20
linux_only = pytest.mark.skipif(
    not performance.STATUS.exists(), reason="only Linux tells what a process holds"
)


def page(resident_kib, peak_kib):
    return f"Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t {peak_kib} kB\nVmRSS:\t {resident_kib} kB\nThreads:\t4\n"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The two files of a kernel that says what we want."""
    status, clear_refs = tmp_path / "status", tmp_path / "clear_refs"
    status.write_text(page(300, 500))
    clear_refs.write_text("")
    monkeypatch.setattr(performance, "STATUS", status)
    monkeypatch.setattr(performance, "CLEAR_REFS", clear_refs)
    return tmp_path


def test_a_resident_set_is_read_in_bytes(kernel):
    meter = MemoryMeter(torch.device("cpu"))
    meter.reset_peak()
    assert (kernel / "clear_refs").read_text() == "5"
    assert meter.read() == {"resident": 300 * 1024, "resident_peak": 500 * 1024}


def test_a_peak_that_cannot_start_anew_is_not_that_of_a_phase(kernel):
    meter = MemoryMeter(torch.device("cpu"))
    (kernel / "clear_refs").unlink()
    (kernel / "clear_refs").mkdir()  # nobody can write to it
    meter.reset_peak()
    assert meter.read() == {"resident": 300 * 1024}


def test_a_platform_without_memory_status_gives_no_sizes(kernel, monkeypatch):
    monkeypatch.setattr(performance, "STATUS", kernel / "nowhere")
    assert MemoryMeter(torch.device("cpu")).read() == {}


@linux_only
def test_the_peak_of_this_process_is_that_since_the_reset():
    meter = MemoryMeter(torch.device("cpu"))
    meter.reset_peak()
    block = torch.ones(64 * MIB // 4)
    del block
    large = meter.read()
    meter.reset_peak()
    small = meter.read()
    if "resident_peak" not in large:
        pytest.skip("this kernel lets no process start its peak anew")
    assert large["resident_peak"] >= large["resident"]
    assert large["resident_peak"] - small["resident_peak"] > 48 * MIB


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_torch_has_allocated():
    meter = MemoryMeter(torch.device("cuda", 0))
    meter.wait()
    meter.reset_peak()
    before = meter.read()
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    gone = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    del gone
    after = meter.read()
    assert after["allocated"] - before["allocated"] == len(kept)
    assert after["peak"] - before["allocated"] == len(kept) + 5 * MIB
    meter.reset_peak()
    assert meter.read()["peak"] == after["allocated"]
