"""Kinds of accelerators, without torch: how each is called, found and hidden, and what it has and has not.

Only this module and `trainkit.distributed.device` name one. What is trained goes by torch's own words for them all:
``device.type``, `torch.accelerator`, `torch.Stream`, `torch.Event`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

DEVICE = "TRAINKIT_DEVICE"
"""``cpu``: train on the CPU also where GPUs are granted, for clusters whose GPUs are only names (slurm/devcluster).
``npu:8``: this machine has so many of an accelerator that is torch's by a plugin, and that nobody here can count."""
COMPILES = "torch.compile"
EXCHANGES = "a backend that carries tensors between ranks"
PINS = "pinned memory"
REPLICATES = "torch.nn.DataParallel"
SYNCHRONIZES_BATCHNORM = "SyncBatchNorm"
TELLS_ALLOCATIONS = "a record of allocations"
SHARES = ("mps", "shard")
"""Generic resources of SLURM's that are shares of GPUs. Runs with MPS compute at the same time, others in turns."""


@dataclass(frozen=True)
class Kind:
    """One kind of accelerator, or the CPU."""

    maker: str
    """Name that users know."""
    device_type: str
    """Name in torch."""
    masks: tuple[str, ...] = ()
    """Variables that leave a process some of a node's devices; ranks are given the first one."""
    formats: tuple[str, ...] = ()
    """Number formats that all of its models multiply themselves, the fastest that trains well first; none: ask."""
    lacks: frozenset[str] = frozenset()

    def has(self, feature: str) -> bool:
        """True if torch gives it that feature, one of those above."""
        return feature not in self.lacks

    def mask_in(self, env: Mapping[str, str]) -> str | None:
        """Variable that hides some of its devices from a process with that environment; None: none does."""
        for mask in self.masks:
            if mask in env:
                return env[mask]
        return None


_HALF = ("bf16", "fp16", "fp32")
NVIDIA = Kind("NVIDIA", "cuda", ("CUDA_VISIBLE_DEVICES",))
# torch built for ROCm calls AMD's GPUs cuda; HIP honours the variable of CUDA, too.
AMD = Kind("AMD", "cuda", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), _HALF)
INTEL = Kind("Intel", "xpu", ("ZE_AFFINITY_MASK",), _HALF, frozenset({REPLICATES}))
# torch.compile for it is a prototype; gloo takes none of its tensors, even of one rank.
_APPLE_LACKS = frozenset({COMPILES, EXCHANGES, PINS, REPLICATES, SYNCHRONIZES_BATCHNORM, TELLS_ALLOCATIONS})
APPLE = Kind("Apple", "mps", formats=("fp32", "fp16", "bf16"), lacks=_APPLE_LACKS)
CPU = Kind("CPU", "cpu", lacks=frozenset({SYNCHRONIZES_BATCHNORM}))
MAKERS = (NVIDIA, AMD, INTEL, APPLE)
ROCR = "ROCR_VISIBLE_DEVICES"
"""A mask below HIP's, which SLURM sets for AMD's GPUs: of what it leaves HIP's own counts anew."""
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", ROCR)
OUT_OF_MEMORY = (
    *("CUDA out of memory", "HIP out of memory", "XPU out of memory", "MPS backend out of memory"),
    *("CUDA error: out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED"),
)
"""Texts of errors that have no type of their own."""


def mask_variables(env: Mapping[str, str], first: int, last: int) -> dict[str, str]:
    """Variables that leave a process the devices from ``first`` up to ``last`` of those that it would see with
    ``env``, whoever has made them; none where both are equal."""

    found: dict[str, str] = {}
    for kind in MAKERS:
        # An empty mask of Intel's hides nothing; no kind of theirs is asked for where no GPU is.
        if kind.masks and (kind is not INTEL or first < last):
            inherited = kind.mask_in(env)
            devices = list(map(str, range(last))) if inherited is None else inherited.split(",")
            found[kind.masks[0]] = ",".join(devices[first:last])
    return found


def masked_twice(env: Mapping[str, str]) -> list[str]:
    """Variables by which AMD's GPUs would be left out once more.

    Where gres.conf does not say whose GPUs it lists, SLURM sets the same mask in all variables, but HIP's counts anew
    what the other has left: with ROCR_VISIBLE_DEVICES=1 and CUDA_VISIBLE_DEVICES=1 there is none.
    """
    return [mask for mask in AMD.masks if ROCR in env and env.get(mask) == env[ROCR]]


def interface_variables(name: str) -> dict[str, str]:
    """Variables by which gloo, NCCL and oneCCL take a network interface. To NCCL eth0 is how a name begins, and =eth0
    is all of it."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "CCL_KVS_IFACE": name}


def kind_of(device_type: str, *, is_rocm: bool = False) -> Kind:
    """The kind that torch calls so. One that nobody here knows came by a plugin of torch's, and is asked itself what it
    can.

    Args:
        is_rocm: torch is built for AMD's GPUs.
    """
    if is_rocm and device_type == AMD.device_type:
        return AMD
    for kind in (NVIDIA, INTEL, APPLE, CPU):
        if kind.device_type == device_type:
            return kind
    return Kind(device_type, device_type, lacks=frozenset({REPLICATES, TELLS_ALLOCATIONS}))
