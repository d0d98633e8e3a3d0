"""Features: what a model's last layer is given; and how well they tell the classes apart, whatever that layer makes of
them: by nearest neighbours, and by a linear layer of their own.

All images are prepared as in evaluation. What is kept of a training split are its features alone, float32 [N, D] in the
host's memory (1.3 million of 768: 4 GB); the device sees them in parts.
"""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.common.errors import UserError
from trainkit.data.base import Samples
from trainkit.training.train_state import TrainState

_NEIGHBOURS = 20
_TEMPERATURE = 0.07
_QUERIES = 2048
"""Images that are compared at once."""
_PART = 32768
"""Training images that they are compared with at once: 256 MB of similarities."""

Labelled = tuple[Tensor, Tensor]
"""Features, float32 [N, D], and classes, int64 [N]."""


def probed(state: TrainState, samples: Samples, probes: Sequence[str], batch_size: int) -> dict[str, float]:
    """``knn_acc1`` and ``linear_acc1``, as ``probes`` names them, in percent, of the model on ``samples``.

    Raises UserError for a task that does not take an image for one class, where a split has no whole image, and what
    `features` does.
    """
    if not state.task.has("taken_for"):
        raise _refused(f"The task {state.config.task.name} does not assign one class per image.")
    test = features(state, samples, batch_size)
    train = features(state, state.splits.train, batch_size)
    for found, _ in (test, train):
        if not len(found) or not found.isfinite().all():
            raise _refused("A split has no whole image, or the features of one are not finite (NaN).")
    how = {"knn_acc1": nearest, "linear_acc1": linear}
    return {name: 100 * how[name](train, test, state.splits.info.num_classes, state.dist.device) for name in probes}


def features(state: TrainState, samples: Samples, batch_size: int) -> Labelled:
    """Compute the features of all ``samples`` that are whole, on the CPU.

    timm's models can leave their last layer out. Of others it is what the last linear layer is given.
    Raises UserError where the output of that is not the model's.
    """
    model = state.model.eval()
    seen = deque([(torch.empty(0), torch.empty(0))], maxlen=1)
    head: Any = getattr(model, "forward_head", None)
    is_timm = head is not None and "pre_logits" in inspect.signature(head).parameters
    found = torch.empty(0)
    labels = torch.empty(len(samples), dtype=torch.int64)
    count = 0
    with ExitStack() as later, torch.no_grad(), state.eval_batches(samples, batch_size) as batches:
        if is_timm:  # within a call of the model, so that hooks which enlarge images still run
            model.__dict__["forward_head"] = partial(head, pre_logits=True)
            later.callback(model.__dict__.pop, "forward_head")
        for layer in () if is_timm else model.modules():
            if isinstance(layer, nn.Linear):
                later.enter_context(layer.register_forward_hook(lambda _, given, told: seen.append((given[0], told))))
        for images, label, mask in batches:
            with state.precision.autocast():
                output = model(state.normalized(images))
            given, told = (output, output) if is_timm else seen[-1]
            is_last = told.shape == output.shape and torch.allclose(told.float(), output.float(), 0, 0, equal_nan=True)
            if given.ndim != 2 or not is_last:
                raise _refused(f"The last layer of {state.config.model.name} is not linear, of [images, features].")
            several = given[mask].float().cpu()
            if not count:  # one block, for parts that are put together would take twice the memory
                found = torch.empty(len(samples), several.shape[1])
            end = count + len(several)
            found[count:end] = several
            labels[count:end] = label[mask].cpu()
            count = end
    return found[:count], labels[:count]


def nearest(train: Labelled, test: Labelled, classes: int, device: torch.device) -> float:
    """The share of ``test`` whose class the nearest images of ``train`` vote for, each with exp(cosine / temperature).

    As Wu et al. (arXiv 1805.01978) do it, with DINO's numbers (Caron et al., arXiv 2104.14294; its eval_knn.py).
    """
    hits = 0
    for queries, labels in _parts(test, _QUERIES, device):
        unit = functional.normalize(queries)
        near = unit[:, :0]
        voted = labels[:, None][:, :0]
        for part, known in _parts(train, _PART, device):
            value, place = (unit @ functional.normalize(part).T).topk(min(_NEIGHBOURS, len(part)))
            near = torch.cat([near, value], 1)
            voted = torch.cat([voted, known[place]], 1)
            near, place = near.topk(min(_NEIGHBOURS, near.shape[1]))
            voted = voted.gather(1, place)
        votes = near.new_zeros(len(unit), classes).scatter_add_(1, voted, (near / _TEMPERATURE).exp())
        hits += int((votes.argmax(1) == labels).sum())
    return hits / len(test[1])


def linear(train: Labelled, test: Labelled, classes: int, device: torch.device) -> float:
    """The share of ``test`` that logistic regression on ``train`` takes for its class.

    Standardised features, L2 penalty with C = 1, L-BFGS until the gradient is below 1e-5: the optimum of scikit-learn's
    LogisticRegression, which would need float64 copies of all features and scores on the CPU.
    """
    variance, mean = torch.var_mean(train[0], 0, correction=0)
    mean = mean.to(device)
    std = torch.where(variance > 0, variance, 1.0).sqrt().to(device)
    total = len(train[0])
    weight = torch.zeros(classes, len(mean), device=device, requires_grad=True)
    bias = torch.zeros(classes, device=device, requires_grad=True)
    lbfgs = torch.optim.LBFGS([weight, bias], max_iter=1000, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def scored(of: Labelled) -> Iterator[Labelled]:
        for part, known in _parts(of, _PART, device):
            yield functional.linear((part - mean) / std, weight, bias), known

    def loss() -> float:
        """Loss of all of ``train``, with its gradient; each part has its share of the penalty."""
        lbfgs.zero_grad()
        value = 0.0
        for scores, known in scored(train):
            penalty = weight.square().sum() / (2 * total) * len(known)
            part = (functional.cross_entropy(scores, known, reduction="sum") + penalty) / total
            part.backward()
            value += part.item()
        return value

    lbfgs.step(loss)
    with torch.no_grad():
        hits = sum(int((scores.argmax(1) == known).sum()) for scores, known in scored(test))
    return hits / len(test[1])


def _parts(of: Labelled, size: int, device: torch.device) -> Iterator[Labelled]:
    for some, labels in zip(of[0].split(size), of[1].split(size), strict=True):
        yield some.to(device), labels.to(device)


def _refused(why: str) -> UserError:
    fix = "Omit --knn and --linear-probe, or give another model, --split or --checkpoint."
    return UserError("The features of the model cannot be probed.", why=why, fix=fix)
