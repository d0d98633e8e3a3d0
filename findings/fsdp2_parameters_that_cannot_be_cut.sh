#!/usr/bin/env bash
# FSDP2 and parameters that are not one tensor of one block: shared by blocks, without dimensions, without elements.
#
# Version:  torch 2.15.0, Python 3.11, two gloo ranks on CPUs
# Expected: fully_shard either takes a parameter that DDP trains, or says what is wrong and where when it is given it.
# Seen:     1. Two blocks that share a parameter, each given to fully_shard, are accepted, and so is the model; only its
#              first forward pass raises a ValueError, which says what to do. As one list they train right.
#           2. A parameter without dimensions (as timm's skipinit_gain) is refused with a ValueError that names it. In
#              ignored_params it is left as it is, and nobody averages its gradient: the ranks drift apart silently. The
#              optimizer takes it beside DTensors, fused too.
#           3. A parameter without elements is accepted. In ignored_params it makes get_total_norm raise a RuntimeError
#              about mixed Tensor and DTensor, which one without dimensions does not.
# Source:   torch/distributed/fsdp/_fully_shard/_fsdp_init.py, torch/distributed/tensor/_dispatch.py
#           (try_get_replicate_spec takes tensors of one number for replicated)
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy==2.4.6
cat > "$folder/shard.py" <<'PYTHON'
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import get_total_norm

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, ranks = dist.get_rank(), dist.get_world_size()
findings = {}


class Block(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, value in more.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        x = torch.relu(self.layer(x))
        x = x * self.gain if hasattr(self, "gain") else x
        return torch.cat([self.prompt, x]) if hasattr(self, "prompt") else x


def model(**more):
    torch.manual_seed(0)
    return nn.Sequential(Block(**more), Block(**more), nn.Linear(8, 2))


def said(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip(": ")


def backward(net, rows=slice(None)):
    torch.manual_seed(1)
    net(torch.randn(4, 8)[rows]).square().mean().backward()


mine = slice(2 * rank, 2 * rank + 2)

# 1. Shared by two blocks.
net = model()
net[1].layer.weight = net[0].layer.weight
whole = copy.deepcopy(net)
together = copy.deepcopy(net)


def one_by_one():
    for block in net[:2]:
        fully_shard(block)
    fully_shard(net)
    backward(net, mine)
    return "trained"


findings["shared, one by one"] = said(one_by_one)
fully_shard([together[0], together[1]])
fully_shard(together)
backward(together, mine)
backward(whole)
gap = (together[0].layer.weight.grad.full_tensor() - whole[0].layer.weight.grad).abs().max()
findings["shared, as a list"] = "right" if gap < 1e-6 else f"off by {gap}"

# 2. Without dimensions.
net = model(gain=torch.tensor(0.5))
findings["number"] = said(lambda: fully_shard(net) and "accepted")
net = model(gain=torch.tensor(0.5))
fully_shard(net, ignored_params={block.gain for block in net[:2]})
backward(net, mine)
grads = [torch.zeros(()) for _ in range(ranks)]
dist.all_gather(grads, net[0].gain.grad)
findings["number, ignored"] = "alike on all ranks" if torch.equal(*grads) else "differs from rank to rank"
findings["number, norm"] = said(lambda: get_total_norm([item.grad for item in net.parameters()]) is not None)
findings["number, fused"] = said(lambda: torch.optim.AdamW(net.parameters(), fused=True).step() is None)

# 3. Without elements.
net = model(prompt=torch.zeros(0, 8))
findings["empty"] = said(lambda: fully_shard(net) and "accepted")
net = model(prompt=torch.zeros(0, 8))
fully_shard(net, ignored_params={block.prompt for block in net[:2]})
backward(net, mine)
findings["empty, norm"] = said(lambda: get_total_norm([item.grad for item in net.parameters()]) is not None)

seen = {
    "shared, one by one": "ValueError: Parameter '1.layer.weight' is shared with a parameter already managed",
    "shared, as a list": "right",
    "number": "ValueError: fully_shard doesn't support scalar parameters.",
    "number, ignored": "differs from rank to rank",
    "number, norm": True,
    "number, fused": True,
    "empty": "accepted",
    "empty, norm": "RuntimeError: aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor",
}
changed = [key for key, value in seen.items() if not str(findings[key]).startswith(str(value))]
if rank == 0:
    for key, value in findings.items():
        print(f"{key}: {value}", "   CHANGED" if key in changed else "")
dist.barrier()
dist.destroy_process_group()
raise SystemExit(bool(changed))
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 shard.py 2> "$folder/errors" || {
    tail -5 "$folder/errors" >&2
    exit 1
}
echo "as seen"
