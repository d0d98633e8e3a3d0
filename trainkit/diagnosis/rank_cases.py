"""What a rank says of its end. The first row that fits the rank that failed first is the cause.

The texts are those of Python, torch, CUDA, NCCL, gloo and the kernel; tests/diagnosis/recorded.yaml keeps them.
"""

from __future__ import annotations

from trainkit.diagnosis.case import AGAIN, LOG, RESUME, WITHOUT, Case, case
from trainkit.diagnosis.gpu_cases import GPUS

RANKS: tuple[Case, ...] = (
    *GPUS,
    case(
        "rank", "hang", r"no progress for (?P<seconds>\d+) s",
        "{who} made no progress for {seconds} s and kept the others waiting: a hang.",
        RESUME, "If the same rank hangs again, exclude its node (--exclude); else look at what it does:",
    ),
    case(
        "rank", "port-in-use", r"EADDRINUSE|[Aa]ddress already in use|server socket has failed to listen"
        r"|Rank 0 cannot open",
        "The port where the ranks meet is in use on {on_node}.", RESUME, "A new attempt takes a new port:",
    ),
    case(
        "rank", "versions-differ",
        r"NCCL version mismatch|Mismatched NCCL version|Duplicate registration|undefined symbol"
        r"|compiled using NumPy 1|numpy\.\w+ size changed|torchvision::nms does not exist|same version of trainkit"
        r"|PyTorch and torchvision were compiled with different CUDA",
        "Versions differ: of torch, of NCCL, or of what belongs to them, on {on_node} or between nodes.",
        "srun --nodelist {hosts} python -c 'import torch; print(torch.__version__, torch.version.cuda)'",
        "All nodes must use one environment; this shows what each has:",
    ),
    case(
        "rank", "nccl-network",
        r"no socket interface found|NCCL WARN NET/|ncclSystemError|ncclRemoteError|unhandled system error"
        r"|ibv_\w+ failed|ncclInternalError|Gloo connectFullMesh failed|Connect timeout \[",
        "{which} could not talk over the network of {on_node}.",
        "NCCL_DEBUG=INFO " + RESUME + " --exclude {host}", "Without that node, and with NCCL's own words:",
    ),
    case(
        "rank", "nccl-cuda",
        r"ncclUnhandledCudaError|unhandled cuda error|NCCL error in: .*invalid (argument|usage)",
        "NCCL met an error of CUDA on {who}: {error}.",
        "NCCL_DEBUG=WARN " + WITHOUT, "Without that node, and with the reason in NCCL's own words:",
    ),
    case(
        "rank", "no-compiler", r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler",
        "train.compile needs a compiler of C and C++, and {on_node} has none.", AGAIN + " train.compile=off",
        "Install g++ there, or have it loaded (launch.modules=[gcc]); without it:",
    ),
    case(
        "rank", "wandb-login",
        r"api_key not configured|wandb.*(AuthenticationError|[Pp]ermission denied|API key|401|403)"
        r"|CommError.*([Pp]ermission denied|not logged in|401|403|entity \S+ not found)",
        "wandb does not know who you are on {on_node}, or may not write to that project: {error}.",
        "wandb login", "On the login node, then resume (WANDB_MODE=offline does without):",
    ),
    case(
        "rank", "no-internet",
        r"Network is unreachable|HTTPSConnectionPool|Max retries exceeded|urlopen error|LocalEntryNotFoundError"
        r"|couldn't connect to 'https|We couldn't connect"
        r"|outgoing traffic has been disabled|ConnectTimeout|[Oo]ffline ?mode is ?enabled"
        r"|https?://\S+.*(Could not resolve|Temporary failure|Connection timed out)|httpx?\.Connect(Error|Timeout)"
        r"|wandb.*(Error communicating|Network error|[Uu]nable to connect|timed out)|Could not resolve host: ",
        "{who} wanted something from the internet, and {on_node} does not reach it.",
        "python -m jobs.prepare --help",
        "Fetch data and weights on the login node first (WANDB_MODE=offline for wandb):",
    ),
    case(
        "rank", "name-not-resolved",
        r"Name or service not known|Temporary failure in name resolution(?!.*https?)"
        r"|No address associated with hostname|Could not resolve hostname|gai error",
        "{on_node} cannot find the address of a host by its name.",
        "{there}getent hosts {hosts}", "If it is a host of the internet, the node has none; see:",
    ),
    case(
        "rank", "another-secret", r"why: (?P<others>rank .*) there, with another secret",
        "Not all ranks met: {others} there, with another secret.", RESUME, "Give all nodes one secret:",
    ),
    case(
        "rank", "ranks-missing",
        r"ranks did not join within \d+ s: rank (?P<lagging>\d+)|ranks did not join within|did not reach rank 0 at"
        r"|monitoredBarrier|Monitored Barrier"
        r"|store based barrier on rank|Timed out initializing process group|\d+/\d+ (clients|workers) joined",
        "Not all ranks met: {error}.", "python -m jobs.logs {run} --attempt {attempt} --rank {lagging} --err",
        "The log of the one that is missing:",
    ),
    case(
        "rank", "collective-timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|send)|watchdog timeout"
        r"|collective operation timeout|Some NCCL operations have failed or timed out|wait timeout after \d+ms",
        "A collective timed out on {who}: {behind} did not come to it.",
        "python -m jobs.logs {run} --attempt {attempt} --rank {lagging} --err",
        "The log of the one that was waited for:",
    ),
    case(
        "rank", "shared-memory-full",
        r"out of shared memory|unable to (write|open|mmap|resize).*</?(torch_|psm_)|/dev/shm"
        r"|is killed by signal: Bus error",
        "{on_node} has too little shared memory (/dev/shm) for the loader's workers.",
        AGAIN + " data.workers=0",
    ),
    case(
        "rank batch", "quota-full", r"Disk quota exceeded|Errno 122",
        "Your quota is used up: {who} could not write.",
        "du -sh {runs}", "Remove old runs or checkpoints, then resume; this shows what they take:",
    ),
    case(
        "rank batch", "disk-full", r"No space left on device|Errno 28\b|PytorchStreamWriter failed|file write failed",
        "The disk is full: {who} could not write.",
        "df -h {run}", "Free some space, then resume; this shows the disk:",
    ),
    case(
        "rank batch", "file-system", r"Stale file handle|Input/output error|Errno (5|116)\b|Transport endpoint"
        r"|Read-only file system",
        "The file system of {on_node} failed while {who} used it.", WITHOUT, "Do without the node:",
    ),
    case(
        "rank", "file-missing",
        r"FileNotFoundError: .*?(?P<path>[^\s'\"]*/[^'\"\n]*?)\.?['\"]?$|Found 0 files in subfolders of: (?P<other>.*)",
        "{on_node} does not see {path}.", "{there}ls -ld {path}",
        "Data must lie where all nodes see it (data.root=FOLDER); this shows what the node sees:",
    ),
    case(
        "rank batch", "permission", r"PermissionError|Permission denied",
        "{who} may not read or write a file: {error}.", "ls -ld {run} {runs}", "Correct its permissions, then resume:",
    ),
    case(
        "rank", "too-many-files", r"Too many open files|received 0 items of ancdata|Errno 24\b",
        "{who} has too many files open.", AGAIN + " data.workers=2", "With fewer workers, or a higher `ulimit -n`:",
    ),
    case(
        "rank", "too-many-threads", r"can't start new thread|Resource temporarily unavailable|pthread_create failed",
        "{who} may start no more threads or processes.", AGAIN + " data.workers=2", "With fewer workers:",
    ),
    case(
        "rank batch", "missing-module", r"ModuleNotFoundError: No module named '(?P<module>[^'\n]+)'"
        r"|Error while finding module specification for '(?P<other>[^'\n]+)'|: No module named (?P<third>\S+)",
        "{who} found no module {module}: it is not in the environment of the job, nor in the run's code.",
        "python -m pip install {module}",
        "Or correct the import, or start from the folder that holds it; then submit again:",
    ),
    case(
        "rank", "library-too-old", r"version [`'](?P<version>(GLIBC\w*|CXXABI)_[\d.]+)' not found",
        "The system of {on_node} is older than a package needs ({version}).", WITHOUT,
        "On nodes with a newer system, or in an environment made on such a node:",
    ),
    case(
        "rank", "library-missing",
        r"(ImportError|OSError|Error): (?P<library>lib\S+?): cannot open"
        r"|(Could not|Unable to) load (any of )?(library )?\{?(?P<other>lib[\w.-]+)",
        "{on_node} does not have the library {library}.", RESUME,
        "Load its module in `setup` of the cluster profile, or install the package that brings it:",
    ),
    case(
        "rank", "syntax-error", r"^(Syntax|Indentation|Tab)Error: (?P<words>.*)",
        "{at} is not valid Python: {words}.", AGAIN, "Mend {at}:",
    ),
    case(
        "rank", "import-error", r"^(?:  why: )?ImportError: (?P<words>.*)",
        "{who} could not import what {at} asks for: {words}.", AGAIN, "Mend {at}:",
    ),
    case(
        "rank", "weights-mismatch",
        r"Error\(s\) in loading state_dict|size mismatch for|Missing key\(s\) in state_dict",
        "The weights do not fit the model: {error}.", AGAIN,
        "Choose the model that they were made for (model.name and its options), or weights of this one; then:",
    ),
    case(
        "rank", "broken-file",
        r"BadZipFile|BadGzipFile|not a gzip file|Error while deserializing header|failed finding central directory"
        r"|PytorchStreamReader failed|UnpicklingError|end-of-stream marker|unexpected end of (data|file)"
        r"|tarfile.ReadError|[Dd]ataset (not found or|is) corrupted|image file is truncated|cannot identify image file"
        r"|zlib\.error"
        r"|invalid hash value|(MD5|SHA\S*|checksum)\S* (mismatch|does not match)|[Cc]hecksum mismatch|BadZipfile",
        "{who} read a file that is damaged or was not fetched to its end: {error}.",
        RESUME, "Remove it (the traceback leads to it), fetch it again, then:",
    ),
    case(
        "rank", "unused-parameters",
        r"parameters that were not used in producing loss|Expected to have finished reduction",
        "Some parameters of the model take no part in its loss, and DDP waits for their gradients.",
        AGAIN + " strategy.find_unused_parameters=true", "Take them out of the model, or let DDP look for them:",
    ),
    case(
        "rank", "nonfinite",
        r"not finite|[Nn]on-?[Ff]inite|\bis nan\b|infinite or NaN|[Ll]oss is (nan|inf)|returned nan values",
        "The training diverged: {error}.", AGAIN + " optim.lr={half_the_lr} train.grad_clip_norm=1.0",
        "With a smaller learning rate:",
    ),
    case(
        "end", "illegal-instruction", r"Illegal instruction|killed by SIGILL",
        "A package was built for another CPU than that of {on_node}.", WITHOUT,
    ),
    case(
        "end", "bus-error", r"Bus error|killed by SIGBUS",
        "{who} lost a file that it had mapped into memory: /dev/shm is full, or the file was cut short under it.",
        "{there}df -h /dev/shm", "With fewer data.workers, or more memory; this shows how full it is:",
    ),
    case(
        "end", "segfault", r"Segmentation fault|killed by SIG(SEGV|FPE)|Floating point exception",
        "{who} crashed in compiled code{crashed_at}.", LOG, "Its last words (PYTHONFAULTHANDLER=1 shows where):",
    ),
    case(
        "end", "killed", r"^(Killed|killed by SIGKILL)|exit code (137|-9)\b",
        "{who} was killed (SIGKILL) without a word of its own, as the kernel does when memory runs out.",
        RESUME + "{more_memory}",
    ),
    case(
        "rank batch", "killed", r"exitcode *: -9\b|Signal 9 \(SIGKILL\)|: line \d+: +\d+ Killed\b",
        "{who} was killed (SIGKILL) without a word of its own, as the kernel does when memory runs out.",
        RESUME + "{more_memory}",
    ),
    case(
        "rank batch", "segfault", r"exitcode *: -11\b|Signal 11 \(SIGSEGV\)|: line \d+: +\d+ Segmentation fault\b",
        "{who} crashed in compiled code.", LOG, "Its last words (PYTHONFAULTHANDLER=1 shows where):",
    ),
    case(
        "end", "signalled", r"^killed by (?P<signal>SIG\w+)|^(?P<other>Terminated|Aborted|Hangup)",
        "{who} was ended by a signal: {error}.", LOG, "Its last words:",
    ),
)  # fmt: skip
