"""The rules of the simulated device, which test_sim.py tests; they run in processes of their own, which have it.

``python -m tests.accelerator.rules device|ranks FOLDER`` leaves what each rule says in files of FOLDER.
"""

import copy
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as spawning
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

DEVICE: dict[str, Callable[[], None]] = {}
RANKS: dict[str, Callable[[torch.device], None]] = {}

Rule = TypeVar("Rule", bound=Callable[..., None])


def rule(function: Rule) -> Rule:
    """A rule that one process sees."""
    DEVICE[function.__name__] = function
    return function


def rule_of_ranks(function: Rule) -> Rule:
    """A rule that two ranks see, each on a device of its own."""
    RANKS[function.__name__] = function
    return function


def refused(what: Callable[[], object], words: str, kind: type[Exception] = RuntimeError) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        what()


def other_stream() -> torch.Stream:
    """A stream that waits for all that the current one has to do until now."""
    stream = torch.Stream(device="sim")
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


def seeded(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1))


# 1. Operators.


def small_net() -> nn.Module:
    torch.manual_seed(0)
    head = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 300), nn.LayerNorm(300), nn.GELU(), nn.Linear(300, 10)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)


def losses(model: nn.Module, device: str, part: slice = slice(None), **how: Any) -> list[float]:
    """Three updates; how: optimizer, its options, the type of autocast."""
    images, labels = seeded(8, 3, 8, 8)[part].to(device), torch.arange(8)[part].to(device)
    amp, kind, layout = how.pop("amp", None), how.pop("optimizer", torch.optim.AdamW), how.pop("layout", None)
    optimizer = kind(model.parameters(), lr=1e-2, **how)
    if layout is not None:
        model, images = model.to(memory_format=layout), images.contiguous(memory_format=layout)
    scaler = torch.amp.GradScaler(device, enabled=amp is torch.float16)
    found = []
    torch.manual_seed(0)
    for _ in range(3):
        with torch.autocast(device, amp or torch.bfloat16, enabled=amp is not None):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return found


def trains_like_the_cpu(model: nn.Module, **how: Any) -> None:
    on_device = copy.deepcopy(model).to("sim")
    assert losses(model, "cpu", **how) == losses(on_device, "sim", **how)


@rule
def training_gives_the_losses_of_the_cpu() -> None:
    for how in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        trains_like_the_cpu(small_net(), **how)
        trains_like_the_cpu(small_net(), optimizer=torch.optim.SGD, momentum=0.9, **how)
    trains_like_the_cpu(small_net(), layout=torch.channels_last)


@rule
def models_of_timm_and_torchvision_train_like_on_the_cpu() -> None:
    import timm
    import torchvision

    class Enlarged(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(F.interpolate(images, size=(32, 32), mode="bilinear"))
            return found

    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1}
    for model in (
        timm.create_model("resnet18", num_classes=10),
        timm.create_model("vit_tiny_patch16_224", num_classes=10, drop_rate=0.1, attn_drop_rate=0.1, **size),
        torchvision.models.mobilenet_v3_small(num_classes=10),
    ):
        trains_like_the_cpu(Enlarged(model), fused=True)


@rule
def operators_give_the_bits_of_the_cpu() -> None:
    indices = torch.tensor([[0, 2], [1, 1]])
    grid = torch.linspace(-1, 1, 32).view(1, 4, 4, 2)
    operators: dict[str, Callable[[torch.Tensor], Any]] = {
        "index": lambda x: x[0, 0][indices.to(x.device)],
        "index by the host": lambda x: x[0, 0][indices],
        "gather": lambda x: x[0, 0, :2].gather(1, indices.to(x.device)),
        "scatter": lambda x: x[0, 0, :2].scatter(1, indices.to(x.device), 2.0),
        "mask": lambda x: x[x > 0],
        "where": lambda x: torch.where(x > 0, x, torch.tensor(0.5)),
        "interpolate": lambda x: F.interpolate(x, size=(7, 7), mode="bicubic", antialias=True),
        "grid_sample": lambda x: F.grid_sample(x[:1], grid.to(x.device), align_corners=False),
        "topk": lambda x: x.topk(2),
        "sort": lambda x: x.sort(descending=True),
        "cumsum": lambda x: x.cumsum(1),
        "norms": lambda x: torch._foreach_norm([x, x[0]]),
        "bytes": lambda x: (x * 100).to(torch.uint8).float().div(255),
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "half": lambda x: x.half() @ x.half(),
        "bfloat16": lambda x: x.bfloat16() @ x.bfloat16(),
        "layer_norm": lambda x: F.layer_norm(x, (4, 4)),
        "group_norm": lambda x: F.group_norm(x, 3),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "into a result": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        "complex": lambda x: torch.view_as_complex(x.view(-1, 2)).conj().resolve_conj(),
    }
    given = seeded(2, 3, 4, 4)
    for name, operator in operators.items():
        ours, theirs = operator(given.to("sim")), operator(given)
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, (tuple, list)) else [(ours, theirs)]
        for mine, cpu in pairs:
            assert mine.device.type == "sim", name
            assert torch.equal(mine.cpu(), cpu), name
            assert mine.stride() == cpu.stride(), name


@rule
def a_seed_gives_the_numbers_of_the_cpu() -> None:
    makers: dict[str, Callable[[str], torch.Tensor]] = {
        "randn": lambda device: torch.randn(40, device=device),
        "randperm": lambda device: torch.randperm(40, device=device),
        "bernoulli": lambda device: torch.full((40,), 0.5, device=device).bernoulli(),
        "normal": lambda device: torch.empty(40, device=device).normal_(1, 2),
        "dropout": lambda device: F.dropout(torch.ones(40, device=device), 0.3),
        "given": lambda device: torch.rand(40, device=device, generator=torch.Generator(device).manual_seed(3)),
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        ours = make("sim")
        torch.manual_seed(0)
        assert torch.equal(ours.cpu(), make("cpu")), name
    refused(lambda: torch.rand(1, device="sim", generator=torch.Generator()), "generator")


@rule
def random_numbers_of_the_device_leave_those_of_the_host_alone() -> None:
    torch.manual_seed(0)
    torch.rand(9, device="sim")
    F.dropout(torch.ones(9, device="sim"))
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


@rule
def the_loss_scaler_skips_an_update_that_is_infinite() -> None:
    for fused in (True, False):
        weight = nn.Parameter(torch.ones(3, device="sim"))
        optimizer, scaler = torch.optim.AdamW([weight], fused=fused), torch.amp.GradScaler("sim")
        scaler.scale(weight.sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [1, 1, 1]
        assert scaler.get_scale() == 2.0**15


# 2. Devices.


@rule
def tensors_of_two_places_do_not_mix() -> None:
    ours, host = torch.ones(3, device="sim"), torch.ones(3)
    for wrong in (
        lambda: ours + host,
        lambda: ours + ours.to("sim:1"),
        lambda: ours.add_(host),
        lambda: host.add_(ours),
        lambda: host.mul_(ours[0]),
        lambda: torch.stack([ours, host]),
        lambda: F.linear(ours, torch.ones(2, 3)),
        lambda: torch.add(ours, ours, out=host),
    ):
        refused(wrong, "Expected all tensors to be on the same device")
    assert (ours + torch.tensor(2.0)).tolist() == [3, 3, 3], "a number of the host is none of its tensors"


@rule
def the_current_device_is_where_tensors_are_made() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    torch.accelerator.set_device_index(1)
    try:
        assert torch.accelerator.current_device_index() == torch.ones(1, device="sim").device.index == 1
        assert (torch.ones(1, device="sim:0") + 1).device.index == 0
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(0)
    with torch.get_device_module("sim").device(1):
        assert torch.ones(1, device="sim").device.index == 1
    assert torch.ones(1, device="sim").device.index == 0
    refused(lambda: torch.ones(1, device="sim:2"), "there is no device 2")


@rule
def a_device_says_what_it_can() -> None:
    able = torch.accelerator.get_device_capability(torch.device("sim", 1))["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.float16} <= able


@rule
def parameters_stay_themselves_when_they_move() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    layer.to("sim")
    assert layer.weight is weight
    assert weight.device.type == "sim"
    assert layer.cpu().weight is weight


@rule
def files_and_copies_keep_the_device() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3, device="sim:1"), file)
    for where, found in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0")):
        file.seek(0)
        assert torch.load(file, map_location=where).device == torch.device(found)
    assert copy.deepcopy(torch.ones(3, device="sim:1")).device == torch.device("sim:1")


# 3. Memory.


@rule
def memory_is_counted() -> None:
    memory = torch.accelerator
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    before, cached = memory.memory_allocated(), memory.memory_reserved()
    made = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert memory.memory_allocated() == memory.max_memory_allocated() == before + (1 << 20)
    assert memory.memory_allocated(1) == 0
    assert memory.memory_stats()["allocation.all.current"] >= 1
    del made
    assert memory.memory_allocated() == before
    assert memory.max_memory_allocated() == before + (1 << 20)
    assert memory.memory_reserved() == memory.max_memory_reserved() == cached + (1 << 20), "it is kept for the next"
    memory.empty_cache()
    assert memory.memory_reserved() <= cached
    assert memory.get_memory_info()[1] == 2048 << 20


@rule
def memory_ends_and_the_cache_is_given_back_first() -> None:
    refused(lambda: torch.empty(3 << 30, dtype=torch.uint8, device="sim"), "out of memory", torch.OutOfMemoryError)
    for megabytes in (900, 1800):  # both do not fit
        torch.empty(megabytes << 20, dtype=torch.uint8, device="sim")
    torch.accelerator.empty_cache()


@rule
def fresh_and_freed_memory_is_nan() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(300, dtype=kind, device="sim").isnan().all()
    freed = torch.ones(3000, device="sim")
    address = freed.data_ptr()
    del freed
    again = torch.empty(3000, device="sim")
    assert again.data_ptr() == address, "the block is used again"
    assert again.isnan().all()


# 4. Pinned memory.


@rule
def pinned_memory_says_so_and_no_other_does() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True)[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    assert torch.ones(3, device="sim").to("cpu", non_blocking=True).is_pinned()


@rule
def loaders_pin_their_batches() -> None:
    data = TensorDataset(torch.arange(32.0))
    for workers in (0, 2):
        found = 0.0
        for (batch,) in DataLoader(data, batch_size=8, num_workers=workers, pin_memory=True):
            assert batch.is_pinned()
            found += batch.to("sim", non_blocking=True).sum().item()
        assert found == 31 * 16


# 5. What runs late.


@rule
def a_copy_to_pinned_memory_is_there_after_a_wait() -> None:
    ours, host, event = torch.ones(5, device="sim"), torch.empty(5, pin_memory=True), torch.Event("sim")
    waits: tuple[Callable[[], object], ...] = (
        torch.accelerator.synchronize,
        torch.accelerator.current_stream().synchronize,
        event.synchronize,
        ours.sum().item,
        lambda: torch.ones(1).to("sim"),
        lambda: ours + 1,
    )
    for wait in waits:
        host.fill_(3)
        host.copy_(ours, non_blocking=True)
        event.record()
        assert host.isnan().all()
        wait()
        assert host.tolist() == [1] * 5, wait


@rule
def a_copy_from_pinned_memory_reads_it_late() -> None:
    host = torch.ones(5).pin_memory()
    ours = host.to("sim", non_blocking=True)
    host.fill_(7)
    assert ours.tolist() == [7] * 5
    ours = torch.full((5,), 2.0).pin_memory().to("sim", non_blocking=True)
    assert ours.tolist() == [2] * 5, "what it reads lives until then"


@rule
def copies_to_other_devices_are_late_and_in_order() -> None:
    ours, host = torch.ones(5, device="sim"), torch.empty(5, pin_memory=True)
    there = ours.to("sim:1", non_blocking=True)
    host.copy_(there, non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize(1)
    assert host.tolist() == [1] * 5


@rule
def a_copy_of_pageable_memory_is_done_at_once() -> None:
    host, ours = torch.ones(5), torch.empty(5, device="sim")
    ours.copy_(host, non_blocking=True)
    host.fill_(7)
    assert ours.tolist() == [1] * 5
    host.copy_(ours, non_blocking=True)
    assert host.tolist() == [1] * 5


@rule
def who_asks_again_and_again_is_told_yes() -> None:
    ours, host, event = torch.ones(5, device="sim"), torch.empty(5, pin_memory=True), torch.Event("sim")
    no = 0
    for asked in (event, torch.accelerator.current_stream()) * 20:
        host.copy_(ours, non_blocking=True)
        event.record()
        while not asked.query():
            no += 1
        assert host.tolist() == [1] * 5
    assert 10 < no < 1000


@rule
def the_time_between_events_is_told_after_a_wait() -> None:
    """Also where nothing was to be done before them."""
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    too_soon = 0
    for _ in range(20):
        begin.record()
        end.record()
        try:
            begin.elapsed_time(end)
        except RuntimeError:
            too_soon += 1
        end.synchronize()
        assert 0 <= begin.elapsed_time(end) < 60_000
    assert too_soon > 0


@rule
def streams_that_nothing_orders_run_in_any_order() -> None:
    ours, host = [torch.full((1,), float(i), device="sim") for i in range(2)], torch.empty(1, pin_memory=True)
    found = set()
    for _ in range(30):
        for tensor in ours:
            with other_stream():
                host.copy_(tensor, non_blocking=True)
        torch.accelerator.synchronize()
        found.add(host.item())
    assert found == {0.0, 1.0}


@rule
def streams_are_current_inside_of_with() -> None:
    before, stream = torch.accelerator.current_stream(), torch.Stream(device="sim")
    with stream:
        assert torch.accelerator.current_stream() == stream != before
    assert torch.accelerator.current_stream() == before
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(before)


# 6. Races.


@rule
def reading_what_another_stream_writes_is_a_race() -> None:
    ours, stream = torch.ones(5, device="sim"), torch.Stream(device="sim")
    with stream:
        refused(lambda: ours + 1, "stream race")
    refused(lambda: stream.__enter__() and ours.cpu(), "stream race")
    stream.__exit__(None, None, None)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        assert (ours + 1).tolist() == [2] * 5


@rule
def writing_what_another_stream_uses_is_a_race() -> None:
    ours, stream = torch.ones(5, device="sim"), other_stream()
    with stream:
        made = ours + 1
    ours + 1  # two may read
    refused(lambda: ours.add_(1), "has read")
    refused(lambda: made.add_(1), "has written")
    event = stream.record_event()
    torch.accelerator.current_stream().wait_event(event)
    ours.add_(1)
    made.add_(1)


@rule
def the_host_orders_by_its_waits() -> None:
    stream, host = torch.Stream(device="sim"), torch.empty(5, pin_memory=True)
    event, kept = torch.Event("sim"), []  # as memory that stream 0 uses too is not to be freed
    waits: tuple[Callable[[], object], ...] = (torch.accelerator.synchronize, stream.synchronize, event.synchronize)
    for wait in waits:
        with stream:
            made = torch.ones(5, device="sim")
            event.record(stream)
        kept.append(made)
        refused(lambda made=made: made + 1, "stream race")  # type: ignore[misc]
        wait()
        made + 1
    with stream:
        made = torch.ones(5, device="sim")
        host.copy_(made)
    made + 1


@rule
def backward_runs_on_the_streams_of_forward() -> None:
    weight, stream = torch.ones(5, device="sim", requires_grad=True), other_stream()
    with stream:
        half = (weight * 2).sum()
    torch.accelerator.current_stream().wait_stream(stream)
    (half * 2).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4] * 5


@rule
def memory_that_another_stream_uses_is_not_reused_in_secret() -> None:
    ours, stream = torch.ones(5000, device="sim"), other_stream()
    with stream:
        ours + 1
    del ours
    refused(lambda: torch.empty(5000, device="sim"), "stream race")
    torch.accelerator.synchronize()
    ours = torch.ones(5000, device="sim")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        ours + 1
    ours.record_stream(stream)
    del ours
    for _ in range(20):
        torch.empty(5000, device="sim")


# 7. Autocast, random states, recomputation.


@rule
def autocast_has_the_lists_of_a_gpu() -> None:
    x = seeded(2, 3, 4, 4).to("sim")
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast("sim", low):
            small = x @ x
            assert {small.dtype, F.conv2d(x, x).dtype, F.linear(x, x[0, 0]).dtype} == {low}
            assert F.scaled_dot_product_attention(x, x, x).dtype == low
            for wide in (small.softmax(-1), small.sum(), small.exp(), F.layer_norm(small, (4,)), small.norm()):
                assert wide.dtype == torch.float32
            assert F.cross_entropy(small[0, 0], torch.arange(4, device="sim")).dtype == torch.float32
            assert torch.addcmul(x, small, small).dtype == torch.float32
        assert losses(small_net().to("sim"), "sim", amp=low, fused=True)[-1] < 1


@rule
def random_states_are_kept_and_restored() -> None:
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        first = torch.rand(3, device="sim")
    assert torch.equal(torch.rand(3, device="sim"), first)
    generator = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.rand(3, device="sim", generator=generator), first)
    state = generator.get_state()
    second = torch.rand(3, device="sim", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device="sim", generator=generator), second)


@rule
def recomputation_draws_the_same_numbers() -> None:
    drop = nn.Dropout(0.5)
    for reentrant in (True, False):
        x = torch.ones(400, device="sim", requires_grad=True)
        y = checkpoint(lambda value: drop(value) * value, x, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        assert ((x.grad == 4) == (y != 0)).all()
        assert 100 < (y != 0).sum().item() < 300


# 9. and 10. Compilers, processes.


@rule
def graphs_are_captured_without_a_compiler() -> None:
    for backend in ("eager", "aot_eager"):
        compiled = small_net().to("sim")
        compiled.compile(backend=backend)
        assert losses(compiled, "sim") == losses(small_net().to("sim"), "sim")


@rule
def a_forked_child_cannot_use_it() -> None:
    torch.ones(1, device="sim")
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.manual_seed(0)
            torch.ones(3).sum()
            torch.ones(1, device="sim")
        except RuntimeError as error:
            code = 0 if "forked subprocess" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# 8. Collectives.


def on(device: torch.device, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@rule_of_ranks
def the_backend_of_the_device_is_found(device: torch.device) -> None:
    assert dist.get_default_backend_for_device("sim") == "simccl"
    host = torch.ones(2)
    dist.all_reduce(host)
    assert host.tolist() == [2, 2]


@rule_of_ranks
def a_collective_is_over_after_its_wait(device: torch.device) -> None:
    x = on(device, 1, 2)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    refused(lambda: x + 1, "stream race")
    refused(lambda: x.tolist(), "stream race")
    work.wait()
    assert x.tolist() == [2, 4]
    host, x = torch.empty(2, pin_memory=True), on(device, 1, 2)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    assert x.tolist() == [2, 4]
    host.copy_(x)
    dist.barrier()


@rule_of_ranks
def a_tensor_of_another_device_is_refused(device: torch.device) -> None:
    refused(lambda: dist.all_reduce(torch.ones(2, device=f"sim:{1 - device.index}")), "this rank's device")


@rule_of_ranks
def tensors_of_two_types_or_wrong_sizes_are_refused(device: torch.device) -> None:
    x = on(device, 1)
    refused(lambda: dist.all_gather_into_tensor(torch.empty(2, dtype=torch.int32, device=device), x), "type")
    refused(lambda: dist.all_gather_into_tensor(torch.empty(3, device=device), x), "3 numbers")
    refused(lambda: dist.reduce_scatter_tensor(torch.empty(2, device=device), x), "1 numbers")


@rule_of_ranks
def collectives_give_what_they_say(device: torch.device) -> None:
    rank = float(device.index)
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x = on(device, 1, 2).to(kind)
        dist.all_reduce(x)
        assert x.tolist() == [2, 4]
    x = on(device, rank)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.item() == 0.5
    x = on(device, rank, rank)
    dist.broadcast(x, 1)
    assert x.tolist() == [1, 1]
    many = [torch.empty(1, device=device) for _ in range(2)]
    dist.all_gather(many, on(device, rank))
    assert torch.cat(many).tolist() == [0, 1]
    whole, half = torch.empty(2, device=device), torch.empty(1, device=device)
    dist.all_gather_into_tensor(whole, on(device, rank))
    assert whole.tolist() == [0, 1]
    dist.reduce_scatter_tensor(half, on(device, 1, 2))
    assert half.item() == 2 + 2 * rank
    dist.reduce_scatter(half, [on(device, 1), on(device, 2)])
    assert half.item() == 2 + 2 * rank
    x = on(device, 1)
    dist.reduce(x, 0)
    assert x.item() == 2 - rank
    dist.all_to_all_single(whole, on(device, 2 * rank, 2 * rank + 1))
    assert whole.tolist() == [rank, rank + 2]
    dist.all_to_all(many, [on(device, 2 * rank), on(device, 2 * rank + 1)])
    assert torch.cat(many).tolist() == [rank, rank + 2]
    dist.gather(on(device, rank), many if rank == 0 else None)
    assert rank or torch.cat(many).tolist() == [0, 1]
    dist.scatter(half, [on(device, 5), on(device, 6)] if rank == 0 else None)
    assert half.item() == 5 + rank
    if rank == 0:
        dist.send(on(device, 9), 1)
    else:
        dist.recv(half, 0)
        assert half.item() == 9
    said: list[Any] = [None, None]
    dist.all_gather_object(said, f"rank {device.index}")
    assert said == ["rank 0", "rank 1"]


@rule_of_ranks
def groups_of_some_ranks_work(device: torch.device) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][device.index]
    mesh = init_device_mesh("sim", (2, 1), mesh_dim_names=("replicas", "shards"))
    groups: tuple[tuple[Any, int], ...] = ((alone, 1), (dist.new_group([0, 1]), 2), (mesh.get_group("replicas"), 2))
    for group, found in groups:
        x = on(device, 1)
        dist.all_reduce(x, group=group)
        assert x.item() == found


def half(device: torch.device) -> slice:
    return slice(4 * device.index, 4 * device.index + 4)


@rule_of_ranks
def data_parallel_training_gives_the_losses_of_the_cpu(device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    expected = losses(DistributedDataParallel(small_net()), "cpu", half(device))
    hows: tuple[dict[str, Any], ...] = (
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1},
        {"static_graph": True},
        {"find_unused_parameters": True},
    )
    for how in hows:
        model = DistributedDataParallel(small_net().to(device), device_ids=[device.index], **how)
        assert losses(model, "sim", half(device)) == expected, how
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        model = DistributedDataParallel(small_net().to(device), bucket_cap_mb=0.1)
        model.register_comm_hook(None, hook)
        found = losses(model, "sim", half(device))
        assert all(abs(a - b) < 0.1 for a, b in zip(found, expected, strict=True)), (found, expected)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(small_net()).to(device)
    assert losses(DistributedDataParallel(synced), "sim", half(device))[-1] < 1


@rule_of_ranks
def sharded_training_gives_the_losses_of_the_cpu(device: torch.device) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    expected = losses(DistributedDataParallel(small_net()), "cpu", half(device))
    hows: tuple[dict[str, Any], ...] = (
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mesh": init_device_mesh("sim", (2, 1), mesh_dim_names=("replicas", "shards"))},
        {"offload_policy": CPUOffloadPolicy()},
    )
    for how in hows:
        model = small_net()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, **how)
        fully_shard(model, **how)
        found = losses(model, "sim", half(device))
        near = 0.1 if "mp_policy" in how else 1e-5
        assert all(abs(a - b) < near for a, b in zip(found, expected, strict=True)), (how, found, expected)


# Running them.


def _say(path: Path, rules: dict[str, Callable[..., None]], *given: Any, until_first: bool = False) -> None:
    said: dict[str, str] = {}
    for name, function in rules.items():
        try:
            function(*given)
            said[name] = ""
        except (Exception, pytest.fail.Exception):
            said[name] = traceback.format_exc()
        path.write_text(json.dumps(said))
        if said[name] and until_first:  # ranks no longer agree on what comes next
            break


def _rank(rank: int, folder: Path) -> None:
    torch.accelerator.set_device_index(rank)
    device = torch.device("sim", rank)
    where = f"file://{folder / 'store'}"
    dist.init_process_group(
        "cpu:gloo,sim:simccl", where, timedelta(seconds=60), rank=rank, world_size=2, device_id=device
    )
    _say(folder / f"rank-{rank}.json", RANKS, device, until_first=True)
    dist.destroy_process_group()


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "ranks":
        spawning.spawn(_rank, (folder,), 2)  # type: ignore[attr-defined,no-untyped-call]
    else:
        _say(folder / "device.json", DEVICE)


if __name__ == "__main__":
    main()
