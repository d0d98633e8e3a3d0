#!/usr/bin/env bash
# accelerate launch on a machine without GPUs: --cpu with --num_processes 2 starts one process.
#
# Version:  accelerate 1.15.0, torch 2.15.0, Python 3.11
# Expected: two ranks of a gloo group, or an error.
# Seen:     with --cpu one process, and no warning. With --multi_gpu two processes, each of which takes itself for the only
#           one, so that both train everything; they meet only where ACCELERATE_USE_CPU=true is set as well.
# Source:   accelerate/commands/launch.py, accelerate/state.py
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.15.0 numpy==2.4.6
cat > "$folder/ranks.py" <<'PYTHON'
import os
import sys

from accelerate import Accelerator

with open(os.path.join(sys.argv[1], f"rank-{os.environ.get('RANK', 0)}"), "w") as file:
    file.write(str(Accelerator().num_processes))
PYTHON
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
common=(--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no "$folder/ranks.py")

sizes() { # NAME COMMAND...: the number of ranks that each process has seen
    local place=$folder/$1
    shift
    mkdir "$place"
    "$@" "$place" > "$place.log" 2>&1 || tail -5 "$place.log" >&2
    cat "$place"/rank-* | tr -d '\n'
}

launch=("$folder/venv/bin/python" -m accelerate.commands.launch)
cpu=$(sizes cpu "${launch[@]}" --cpu "${common[@]}")
gpu=$(sizes gpu "${launch[@]}" --multi_gpu "${common[@]}")
both=$(sizes both env ACCELERATE_USE_CPU=true "${launch[@]}" --multi_gpu "${common[@]}")
echo "--cpu: $cpu, --multi_gpu: $gpu, and with ACCELERATE_USE_CPU=true: $both"
[ "$cpu $gpu $both" = "1 11 22" ]
