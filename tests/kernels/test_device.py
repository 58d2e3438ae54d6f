import pytest
import torch

from lit_rlkv.kernels.decode_attention import launch
from lit_rlkv.kernels.device import A100, H100, L40S, assume_device, device_info
from lit_rlkv.kernels.shadow_attention.tiles import tiles_for

CPU = torch.device("cpu")


def test_launches_without_a_gpu_are_planned_for_an_h100_by_default():
    assert device_info(CPU) == H100
    with assume_device(A100):
        assert device_info(torch.device("meta")) == A100
        with pytest.raises(RuntimeError, match="inside"), assume_device(L40S):
            raise RuntimeError("inside")
        assert device_info(CPU) == A100
    assert device_info(CPU) == H100


@pytest.mark.gpu
def test_the_sizes_of_a_real_gpu_override_the_assumed_ones():
    with assume_device(L40S):
        found = device_info(torch.device("cuda"))
    assert found.n_multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count


def test_a_program_has_what_cuda_leaves_of_a_multiprocessors_shared_memory():
    # 227, 163 and 99 KiB, as CUDA's programming guide has it.
    assert [device.program_bytes / 1024 for device in (H100, A100, L40S)] == [227, 163, 99]


def test_launch_sizes_depend_on_the_device():
    like = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    forward, stages, splits = {}, {}, {}
    for device in (H100, A100, L40S):
        with assume_device(device):
            forward[device] = tiles_for(like, 128).forward.queries
            found = launch.plan(like.expand(8, 4, -1, -1), *[like.expand(8, 4, 8192, -1)] * 2)
            stages[device], splits[device] = found.n_stages, found.n_splits
    assert forward == {H100: 128, A100: 64, L40S: 64}
    assert stages == {H100: 4, A100: 4, L40S: 3}
    # 32 programs; four for each multiprocessor are 528, 432 and 568: 17, 14 and 18 splits.
    assert splits == {H100: 16, A100: 8, L40S: 16}
