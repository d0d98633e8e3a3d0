"""Containers for tests: images made of this machine's own files, and a stand-in for who runs them.

The stand-in for `apptainer exec` and `docker run` is for machines that have neither and tests that must not miss them.
It is no mock of the part that matters here: the command runs in a root of its own, in which there is what the image
has, and beside it only what was mounted; after `docker run` it also knows only the variables that were given.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RUNTIME = r"""#!/bin/bash
# Options as apptainer and docker take them, as far as trainkit gives them; an unknown one is an error.
set -euo pipefail
mounts=() variables=() workdir=/
shift  # exec, run
while [[ $1 == -* ]]; do
    case $1 in
        --nv | --rm | --net=host | --ipc=host | --pid=host | -it) shift ;;
        --gpus | --user | --ulimit) shift 2 ;;
        --bind) IFS=, read -r -a more <<< "$2"; mounts+=("${more[@]}"); shift 2 ;;
        --volume | -v) mounts+=("$2"); shift 2 ;;
        --pwd | --workdir | -w) workdir=$2; shift 2 ;;
        --env)
            if [[ $2 == *=* ]]; then variables+=("$2"); elif [ -v "$2" ]; then variables+=("$2=${!2}"); fi
            shift 2 ;;
        *) echo "unknown option $1" >&2; exit 125 ;;
    esac
done
image=$1; shift
if [ "$(basename "$0")" = docker ]; then set -- env -i PATH="$PATH" "${variables[@]}" "$@"; fi
mapfile -t system < "$image"
export MOUNTS="$(printf '%s\n' "${system[@]}" "${mounts[@]}")" WORKDIR="$workdir"
exec unshare --mount bash -c '
    set -euo pipefail
    root=/mnt; mount -t tmpfs none "$root"
    while IFS=: read -r from to _; do
        to=$root${to:-$from}
        if [ -d "$from" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}"; touch "$to"; fi
        mount --rbind "$from" "$to"
    done <<< "$MOUNTS"
    mkdir -p "$root/tmp"
    unset MOUNTS
    PATH=$PATH:/usr/sbin:/sbin exec chroot "$root" sh -c "cd \"\$WORKDIR\" && exec \"\$@\"" inside "$@"' container "$@"
"""


def can_run() -> bool:
    """Whether this machine lets us mount."""
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(["unshare", "--mount", "true"], check=False).returncode
    )


def install(folder: Path) -> Path:
    """Put the stand-ins into ``folder`` as apptainer and docker; an image with this Python and all its packages."""
    for name in ("apptainer", "docker"):
        (folder / name).write_text(RUNTIME)
        (folder / name).chmod(0o755)
    wanted = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", *_pythons()]
    image = folder / "image.sif"
    image.write_text("\n".join(dict.fromkeys(path for path in wanted if Path(path).exists())) + "\n")
    return image


def _pythons() -> list[str]:
    """Folders of this Python and of all its packages."""
    # Packages may come from a second environment by a .pth file. But not trainkit itself: its code is the run's.
    own = {Path(__file__).parents[1]}
    found = [sys.base_prefix, sys.prefix, sysconfig.get_path("purelib")]
    return [*found, *(path for path in sys.path if path.endswith("site-packages") and Path(path) not in own)]


def mounts() -> str:
    """``launch.container_mounts`` for a real runtime: this machine's programs and its Python, into a `bare_root`."""
    wanted = dict.fromkeys(path for path in ["/usr", *_pythons()] if Path(path).is_dir())
    inner = [path for path in wanted if not any(Path(other) in Path(path).parents for other in wanted)]
    return "launch.container_mounts=[" + ",".join(f"{path}:{path}:ro" for path in inner) + "]"


def bare_root(folder: Path) -> Path:
    """The root of an image that has names of users and hosts, and nowhere a program."""
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home"):
        (folder / name).mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        (folder / link).symlink_to(f"usr/{link}")
    for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache"):
        shutil.copy(Path("/etc") / name, folder / "etc")
    return folder


@contextlib.contextmanager
def docker_daemon(image: str) -> Iterator[dict[str, str]]:
    """A daemon of docker's that has one image, a `bare_root`; the variables with which its client finds it.

    It shares nothing with one that may run here already, and makes neither networks nor firewall rules.
    """
    with tempfile.TemporaryDirectory(prefix="docker-") as name:  # its sockets must have short names
        place = Path(name)
        env = {"DOCKER_HOST": f"unix://{place}/sock", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        (place / "daemon.json").write_text("{}")
        options = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"]
        options += [f"--data-root={place}/data", f"--exec-root={place}/exec", f"--pidfile={place}/pid"]
        options += [f"--config-file={place}/daemon.json", "--oom-score-adjust=0", f"--host={env['DOCKER_HOST']}"]
        with (place / "log").open("w") as log:
            daemon = subprocess.Popen(["dockerd", *options], env={**os.environ, **env}, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while subprocess.run(["docker", "info"], env=env, capture_output=True, check=False).returncode:
                waits = daemon.poll() is None and time.monotonic() < deadline
                assert waits, (place / "log").read_text()[-1000:]
                time.sleep(0.2)
            tar = place / "root.tar"
            subprocess.run(["tar", "-C", bare_root(place / "root"), "-cf", tar, "."], check=True)
            subprocess.run(["docker", "import", tar, image], env=env, capture_output=True, check=True)
            yield env
        finally:
            daemon.terminate()
            daemon.wait(60)
            # The network that containers share with the machine has a file of its own, and it stays mounted.
            mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
            left = [folder for folder in mounted if folder.startswith(f"{place}/")]
            if left:
                subprocess.run(["umount", *left], check=True)
