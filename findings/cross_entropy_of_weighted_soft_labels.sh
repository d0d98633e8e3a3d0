#!/usr/bin/env bash
# torch's cross entropy with class weights has another size for labels that are probabilities, as mixup's are.
#
# Version:  torch 2.15.0, numpy 2.4.6, Python 3.11
# Expected: a batch of labels, given as numbers or as one-hot rows, has one loss and one gradient; and its mean over two
#           halves is that of the whole.
# Seen:     1. With weight= and the mean, numbers are divided by the sum of the samples' weights, rows by the number of
#              samples: with weights 1 and 9 in equal numbers rows give five times the loss, and five times the gradient.
#              Who switches mixup on, trains at another rate.
#           2. Numbers: the mean of the losses of two halves, as of micro batches or ranks, is not the loss of the whole.
#           3. label_smoothing weights what it spreads by the class that it falls to, not by that of the sample: where a
#              common class has weight 1 and a rare one 9, nine tenths of the spread of every sample count for the rare.
# Source:   torch.nn.CrossEntropyLoss, the formulas of reduction="mean"; aten/src/ATen/native/LossNLL.cpp
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.nn.functional import cross_entropy, one_hot

weight = torch.tensor([1.0, 9.0])
labels = torch.tensor([0, 0, 1, 0, 1, 1])
scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.5, 0.0], [0.0, 3.0], [1.0, 1.0]])
numbers = cross_entropy(scores, labels, weight=weight)
rows = cross_entropy(scores, one_hot(labels, 2).float(), weight=weight)
halves = [cross_entropy(scores[part], labels[part], weight=weight) for part in (slice(3), slice(3, 6))]
shares = []
for true in (0, 1):  # what the spread of a sample of either class counts, over all that its loss may count
    some = torch.tensor([true])
    flat = torch.tensor([[0.0, 0.0]], requires_grad=True)
    cross_entropy(flat, some, weight=weight, label_smoothing=1.0, reduction="sum").backward()
    spread = cross_entropy(flat, some, weight=weight, label_smoothing=1.0, reduction="sum")
    shares.append(round(float(spread.detach() / cross_entropy(flat, some, reduction="sum").detach()), 3))
times = round(float(rows / numbers), 4)
apart = round(float(sum(halves) / 2 / numbers), 4)
print(f"Rows over numbers: {times}; mean of the halves over the whole: {apart}; weight of the spread: {shares}")
sys.exit(0 if times == 5.0 and abs(apart - 1) > 0.02 and shares == [5.0, 5.0] else 1)
PYTHON
