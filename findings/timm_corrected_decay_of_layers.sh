#!/usr/bin/env bash
# timm's optimizers with corrected weight decay (adamc and the like) hardly decay the lower layers under layer_decay.
#
# Version:  timm 1.0.31, torch 2.15.0, torchvision 0.29.2, numpy 2.4.6, Python 3.11
# Expected: the corrected decay, lr^2 / peak * weight_decay, is lr * weight_decay at the peak of the schedule, in every
#           layer, as adamw's: layer_decay makes lower layers learn more slowly, and decay in proportion.
# Seen:     the peak of all groups is the optimizer's rate, also where lr_scale makes the highest rate of a group 0.1 of it:
#           such a layer decays by 0.01 of what the head does, where adamw decays by 0.1. With layer_decay 0.65 and the 14
#           layers of a ViT of 12 blocks the first layer's decay is 1/270 of what it would be with adamw. A group that is
#           given max_lr_snapshot = lr * lr_scale decays as expected.
# Source:   timm/optim/_helpers.py, _max_lr_snapshot; timm/optim/adamw.py, group.setdefault('max_lr_snapshot', ...)
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet timm==1.0.31 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler


def decay(name, **more):
    """Decay of a group whose lr_scale is 0.1, over that of one whose is 1, at the peak."""
    high, low = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    groups = [{"params": [high], "lr_scale": 1.0}, {"params": [low], "lr_scale": 0.1, **more}]
    optimizer = create_optimizer_v2(groups, opt=name, lr=0.5, weight_decay=0.5)
    CosineLRScheduler(optimizer, t_initial=10).step(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    for parameter in (high, low):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return round((1 - low[0, 0].item()) / (1 - high[0, 0].item()), 4)


seen = {name: decay(name) for name in ("adamw", "adamc", "lionc")}
given = decay("adamc", max_lr_snapshot=0.05)
print(f"Decay where the rate is a tenth, as a share of the other's: {seen}; adamc with a peak of its own: {given}")
sys.exit(0 if seen == {"adamw": 0.1, "adamc": 0.01, "lionc": 0.01} and given == 0.1 else 1)
PYTHON
