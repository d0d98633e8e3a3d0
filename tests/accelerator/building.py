"""Builds the extension of the simulated device, once per source, torch and Python; needs g++ and torch's headers."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("sim.cpp")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_sim")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def _torch() -> Path:
    """Return torch's folder without importing it: the caller may be a process that must not have the device."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def why_not() -> str | None:
    """Why the device cannot be built here; None if it can or is built."""
    if extension().exists():
        return None
    if _compiler() is None:
        return "the simulated device needs g++, which is not here"
    python = Path(sysconfig.get_paths()["include"], "Python.h")
    for header in (python, _torch() / "include" / "torch" / "library.h"):
        if not header.exists():
            return f"the simulated device needs {header}, which is not here"
    return None


def extension() -> Path:
    """Return the path of the built extension; its name is a hash of all that it is made of."""
    made_of = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version("torch").encode(), sys.version.encode())
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "trainkit-sim" / name / "_sim.so"


def build() -> Path:
    """The built extension. One process builds, others wait for it; a file of that name is always whole."""
    path = extension()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            _compile(made)
            made.replace(path)
    return path


def _compile(made: Path) -> None:
    torch, compiler = _torch(), _compiler()
    assert compiler is not None, why_not()
    include = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = [compiler, *FLAGS, *(f"-I{folder}" for folder in include), str(SOURCE), "-o", str(made)]
    command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The simulated device does not build:\n{done.stderr[-4000:]}")
