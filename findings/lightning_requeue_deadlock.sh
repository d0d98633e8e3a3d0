#!/usr/bin/env bash
# Lightning's requeueing on SLURM: its signal handler waits for all ranks, wherever in their step the signal has met them.
#
# Version:  lightning 2.6.6, torch 2.15.0, Python 3.11, two gloo ranks on CPUs, SLURM's variables and scontrol made here
# Expected: both ranks get the signal of --signal, one of them a little later; a checkpoint is written, and
#           `scontrol requeue` is called once.
# Seen:     the handler calls save_checkpoint, which has a barrier. A rank that the signal meets in its backward pass waits
#           in the handler; the other one waits for its gradients, or for a broadcast of the loop, and never comes to the
#           barrier. Nothing is requeued, and the job stands until its time limit.
# Source:   lightning/pytorch/trainer/connectors/signal_connector.py, _slurm_sigusr_handler_fn
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.15.0 numpy==2.4.6
mkdir "$folder/bin"
printf '#!/bin/sh\necho "$@" >> "%s/requeued"\n' "$folder" > "$folder/bin/scontrol"
chmod +x "$folder/bin/scontrol"
cat > "$folder/train.py" <<'PYTHON'
import os
import signal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Signalled(torch.autograd.Function):
    """Rank 0 has its signal in the backward pass, rank 1 has it before the next step."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        if Model.step == 3 and os.environ["SLURM_PROCID"] == "0":
            signal.raise_signal(signal.SIGUSR1)
        return gradient


class Model(LightningModule):
    step = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch):
        Model.step += 1
        if Model.step == 4 and os.environ["SLURM_PROCID"] == "1":
            signal.raise_signal(signal.SIGUSR1)
        return Signalled.apply(self.layer(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


torch.set_num_threads(1)
data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
trainer = Trainer(
    accelerator="cpu", devices=2, num_nodes=1, strategy="ddp", max_epochs=1, logger=False,
    enable_progress_bar=False, enable_checkpointing=False, default_root_dir=os.environ["FOLDER"],
)
trainer.fit(Model(), data)
PYTHON
export FOLDER=$folder PATH=$folder/bin:$PATH OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_JOB_ID=123 SLURM_JOB_NAME=train SLURM_NODELIST=localhost SLURM_NNODES=1
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 \
        timeout --signal KILL 90 "$folder/venv/bin/python" "$folder/train.py" > "$folder/rank-$rank" 2>&1 &
done
wait
if ! grep -q "Handling auto-requeue signal" "$folder/rank-0"; then
    tail -5 "$folder/rank-0" >&2
    exit 1
fi
if [ -e "$folder/requeued" ]; then
    echo "requeued: CHANGED"
    exit 1
fi
echo "as seen: nothing was requeued in 90 s"
