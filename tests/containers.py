"""A stand-in for `apptainer exec` and `docker run`, for machines that have neither and tests that must not miss them.

It is no mock of the part that matters here: the command runs in a root of its own, in which there is what the image
has, and beside it only what was mounted; after `docker run` it also knows only the variables that were given.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

RUNTIME = r"""#!/bin/bash
# Options as apptainer and docker take them, as far as trainkit gives them; an unknown one is an error.
set -euo pipefail
mounts=() variables=() workdir=/
shift  # exec, run
while [[ $1 == -* ]]; do
    case $1 in
        --nv | --rm | --net=host | --ipc=host | --pid=host) shift ;;
        --gpus | --user) shift 2 ;;
        --bind) IFS=, read -r -a more <<< "$2"; mounts+=("${more[@]}"); shift 2 ;;
        --volume) mounts+=("$2"); shift 2 ;;
        --pwd | --workdir) workdir=$2; shift 2 ;;
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
    wanted = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", sys.base_prefix, sys.prefix]
    # Packages may come from a second environment by a .pth file. But not trainkit itself: its code is the run's.
    own = {Path(__file__).parents[1]}
    wanted += [path for path in sys.path if path.endswith("site-packages") and Path(path) not in own]
    wanted += [sysconfig.get_path("purelib")]
    image = folder / "image.sif"
    image.write_text("\n".join(dict.fromkeys(path for path in wanted if Path(path).exists())) + "\n")
    return image
