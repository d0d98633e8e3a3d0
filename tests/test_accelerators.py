"""What is known of a kind of accelerator where there is none."""

import pytest

from trainkit.common.accelerators import AMD, APPLE, CPU, EXCHANGES, INTEL, NVIDIA, PINS, kind_of, masked_twice


def test_torchs_word_for_a_device_tells_its_kind() -> None:
    assert kind_of("cuda") is NVIDIA
    assert kind_of("cuda", is_rocm=True) is AMD
    assert (kind_of("xpu"), kind_of("mps"), kind_of("cpu", is_rocm=True)) == (INTEL, APPLE, CPU)
    other = kind_of("npu")
    assert other.maker == "npu"
    assert other.has(EXCHANGES)
    assert not APPLE.has(EXCHANGES)
    assert not APPLE.has(PINS)


@pytest.mark.parametrize(
    ("masks", "twice"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, ["CUDA_VISIBLE_DEVICES"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}, ["HIP_VISIBLE_DEVICES"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}, []),  # of those two the first
        ({"CUDA_VISIBLE_DEVICES": "1"}, []),
        ({}, []),
    ],
)
def test_what_slurm_has_said_in_two_variables_is_taken_once(masks: dict[str, str], twice: list[str]) -> None:
    assert masked_twice(masks) == twice
