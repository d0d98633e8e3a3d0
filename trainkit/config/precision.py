"""What ``train.precision=auto`` comes to: for those who train, and for those who say beforehand what will be."""

from __future__ import annotations

from pathlib import Path

from trainkit import reading

ON_GPUS = "bf16 on GPUs from Ampere on, fp16 on Volta and Turing, else fp32"
ON_CPUS = "bf16 on CPUs with AVX512-BF16 or AMX, else fp32"


def auto_precision(capability: tuple[int, int] | None) -> str:
    """The fastest format that trains well: on a GPU of that compute capability; None: on this machine's CPU.

    Ampere has bf16, which was emulated before; Volta and Turing have fp16. A CPU has bf16 where it multiplies that
    natively.
    """
    if capability is not None:
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    return "bf16" if cpu_has_bf16() else "fp32"


def cpu_has_bf16() -> bool:
    """Whether this machine's processor multiplies bf16 itself."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})


def cpu_flags() -> set[str]:
    """What this machine's processor can do, in Linux's words; empty elsewhere."""
    try:
        for line in reading.read_text(Path("/proc/cpuinfo")).splitlines():
            if line.startswith("flags"):
                return set(line.split())
    except OSError:
        pass
    return set()
