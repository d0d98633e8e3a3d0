#!/usr/bin/env bash
# The moving average of a model with a mask of -inf among its buffers is NaN after one update.
#
# Version:  torch 2.15.0, timm 1.0.31, torchvision 0.29.2, Python 3.11
# Expected: a buffer that never changes stays as it is in the average; or all ways of averaging fail alike.
# Seen:     timm's ModelEmaV3 and torch's AveragedModel(use_buffers=True), as it is and with get_ema_multi_avg_fn, make NaN
#           of it, for they add a share of the difference, and -inf less -inf is NaN. Training goes on without a sign; all
#           scores of the averaged model are NaN. AveragedModel with get_ema_avg_fn and timm's ModelEmaV2, which add two
#           products, keep the mask, and ModelEmaV3(exclude_buffers=True) does.
# Source:   torch/optim/swa_utils.py, get_ema_multi_avg_fn and get_swa_multi_avg_fn; timm/utils/model_ema.py, ModelEmaV3
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 timm==1.0.31 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from timm.utils import ModelEmaV2, ModelEmaV3
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn


class Causal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, tokens):
        tokens = self.layer(tokens)
        return (tokens @ tokens.mT + self.mask).softmax(-1) @ tokens


model = Causal()
tokens = torch.randn(2, 4, 4)
arms = {
    "timm's ModelEmaV3": (ModelEmaV3(model, decay=0.9), True),
    "timm's ModelEmaV3, exclude_buffers": (ModelEmaV3(model, decay=0.9, exclude_buffers=True), False),
    "timm's ModelEmaV2": (ModelEmaV2(model, decay=0.9), False),
    "torch's AveragedModel": (AveragedModel(model, use_buffers=True), True),
    "the same with get_ema_multi_avg_fn": (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True), True),
    "the same with get_ema_avg_fn": (AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True), False),
}
changed = 0
with torch.no_grad():
    assert model(tokens).isfinite().all()
    for name, (average, expected) in arms.items():
        for _ in range(2):
            getattr(average, "update_parameters", getattr(average, "update", None))(model)
        lost = bool(average.module(tokens).isnan().any())
        print(f"{name}: {'NaN' if lost else 'finite'}{'' if lost == expected else ', CHANGED'}")
        changed += lost != expected
sys.exit(changed > 0)
PYTHON
