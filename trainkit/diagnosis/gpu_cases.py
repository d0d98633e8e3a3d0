"""What a rank says of its GPU, of the driver and of CUDA, before it ends. The first row that fits is the cause."""

from __future__ import annotations

from trainkit.diagnosis.case import AGAIN, RESUME, WITHOUT, Case, case

GPUS: tuple[Case, ...] = (
    case(
        "rank", "gpu-out-of-memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUDNN_STATUS_ALLOC_FAILED"
        r"|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory",
        "{who} ran out of GPU memory.",
        AGAIN + " train.micro_batch_size={half_the_batch}",
        "The result stays the same with a smaller micro batch:",
    ),
    case(
        "rank", "cuda-sees-none",
        r"CUDA sees none[\s\S]*is built (?P<built>without CUDA|for ROCm [\d.]+)"
        r"[\s\S]*Install a torch that is built with CUDA",
        "{who} was given GPUs, and CUDA sees none: torch is built {built}.",
        "python -m pip install --force-reinstall torch", "Install a torch with CUDA, then resume:",
    ),
    case(
        "rank", "cuda-sees-none", r"CUDA sees none[\s\S]*Do not set (?P<mask>\w+) yourself",
        "{who} was given GPUs, and CUDA sees none: {mask} hides them.",
        "env -u {mask} " + RESUME,
        "Do not set it yourself, nor in `setup` of the cluster profile:",
    ),
    case(
        "rank", "cuda-sees-none",
        r"GPUs are granted, and CUDA sees none|No CUDA GPUs are available|no CUDA-capable device is detected"
        r"|CUDA error: invalid device ordinal|No HIP GPUs are available|no ROCm-capable device is detected",
        "{who} was given GPUs, and CUDA sees none.",
        WITHOUT, "If it is the node; else its driver, torch's build or the mask, as its words say:",
    ),
    case(
        "rank", "driver-too-old", r"NVIDIA driver on your system is too old \(found version 12",
        "The driver of {on_node} is older than torch's build of CUDA needs.",
        "python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
        "Install a torch that is built for CUDA 12, then submit again:",
    ),
    case(
        "rank", "driver-too-old", r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        "The driver of {on_node} is older than torch's build of CUDA needs.",
        "python -m pip install --force-reinstall 'torch<2.8' --index-url https://download.pytorch.org/whl/cu118",
        "Install a torch that is built for CUDA 11, then submit again:",
    ),
    case(
        "rank", "wrong-torch-build",
        r"no kernel image is available|Torch not compiled with CUDA enabled|not compatible with the current PyTorch",
        "torch was not built for the GPU of {on_node}.",
        'python -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_arch_list())"',
        "Install a torch whose list names its architecture, then submit again:",
    ),
    case(
        "rank", "bad-gpu",
        r"uncorrectable ECC|GPU is lost|fallen off the bus|Driver/library version mismatch|CUDA unknown error"
        r"|hardware error|Xid|unspecified launch failure|NVML: Unknown Error|ERROR_SYSTEM_NOT_READY"
        r"|system not yet initialized",
        "A GPU of {on_node}, or its driver, is broken.", WITHOUT, "Tell the site's staff, and do without the node:",
    ),
    case(
        "rank", "gpu-busy", r"busy or unavailable|Duplicate GPU detected",
        "The GPU of {who} is used by another process, or by two ranks.",
        WITHOUT, "If it is not two ranks on one GPU (--gpus-per-task and --gpus-per-node together):",
    ),
    case(
        "rank", "label-out-of-range", r"device-side assert triggered|Target \d+ is out of bounds|IndexError: Target",
        "{who} met a label that is no class of the data, or an index outside of a table.",
        "python -m jobs.submit {run} --executor debug --gpus-per-node 0",
        "On the CPU the message names the value:",
    ),
    case(
        "rank", "illegal-access", r"illegal memory access|misaligned address",
        "A GPU kernel of {who} wrote where it must not: a bug in a kernel, or a bad GPU.",
        WITHOUT, "If it comes again on another node, it is the kernel (CUDA_LAUNCH_BLOCKING=1 names it):",
    ),
    case(
        "rank", "cuda-error",
        r"(CUDA|HIP|cuDNN|cublas runtime|cuda runtime) error\b.*?: (?P<words>[^\n]*)"
        r"|(?P<other>(CUBLAS|CUDNN|CUSOLVER)_STATUS_\w+)",
        "{who} met an error of CUDA: {words}.",
        WITHOUT, "If it comes again on another node, it is the code or torch (CUDA_LAUNCH_BLOCKING=1 names the line):",
    ),
)  # fmt: skip
