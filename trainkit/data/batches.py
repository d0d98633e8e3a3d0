"""Batches of any data set of torch's for a loop of the user's own: in one order, whatever the number of ranks.

The order is that of `trainkit.data.order`. A sample's random numbers are a function of (seed, epoch, index), those of
torch, of `random` and of NumPy: neither ranks nor loader processes nor a restart change what is drawn for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.common.errors import UserError
from trainkit.data.loader import Loading
from trainkit.data.order import derive_seed, epoch_order
from trainkit.distributed.device import random_numbers_kept, seed_all


@dataclass(frozen=True)
class RankFetch:
    """Makes a rank's share of a batch in a loader process: (epoch, indices) -> what `collate` makes of the samples."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int

    def __getitems__(self, keys: tuple[int, list[int]]) -> Any:
        epoch, indices = keys
        samples = []
        with random_numbers_kept():
            for index in indices:
                seed_all(derive_seed(self.seed, epoch, index))
                samples.append(self.dataset[index])
            return self.collate(samples)


class EpochOrder:
    """Indices of a rank's shares of global batches, by their position in all epochs."""

    def __init__(self, size: int, global_batch_size: int, seed: int, *, shuffle: bool) -> None:
        self._size = size
        self._batch = global_batch_size
        self._seed = seed
        self._shuffle = shuffle

    def shares(self, first: int, end: int, rank: int, world_size: int) -> Iterator[tuple[int, list[int]]]:
        """Epoch and indices of each global batch's share, from position ``first`` up to ``end``."""
        per_epoch = self._size // self._batch
        share = self._batch // world_size
        known = -1
        for position in range(first, end):
            epoch, step = divmod(position, per_epoch)
            if epoch != known:
                order = torch.arange(self._size)
                if self._shuffle:
                    order = epoch_order(self._size, self._seed, epoch)
                known = epoch
            begin = step * self._batch + rank * share
            yield epoch, order[begin : begin + share].tolist()


class Epoch(Iterator[Any]):
    """One epoch of `RankBatches`: its number, from 0, and the batches that are left of it."""

    def __init__(self, number: int, batches: Iterator[Any]) -> None:
        self.number = number
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)


class RankBatches:
    """This rank's shares of global batches, from where the run was to the end of the last epoch.

    Made by `Rank.batches`. Iterate over it once, or epoch by epoch over `epochs`; made by `Rank.wrap` of a data loader
    it gives one epoch at a time, as that did. `Rank.saved` saves it by its name. ``position`` counts the global batches
    taken so far, in all epochs; ``steps_per_epoch`` are in one; ``total`` is 0 as long as nobody has said how many
    epochs there are.

    Example:
        >>> for images, labels in batches:
        ...     train(images, labels)
        ...     if batches.ends_epoch:
        ...         validate()
        ...     state.step()
    """

    def __init__(
        self, fetch: RankFetch, loading: Loading, *, global_batch_size: int, epochs: int | None, shuffle: bool
    ) -> None:
        dataset = fetch.dataset
        seed = fetch.seed
        self.dataset = dataset
        self._fetch = fetch
        self._loading = loading
        self._order = EpochOrder(len(dataset), global_batch_size, seed, shuffle=shuffle)
        self._facts = {
            "samples": len(dataset),
            "global_batch_size": global_batch_size,
            "shuffle": shuffle,
            "seed": seed,
        }
        self.before: Callable[[], None] = lambda: None
        """Called before each batch, when all that was done with the one before it is done."""
        self.planned: Callable[[], None] = lambda: None
        """Called when the loop has said how many epochs there are."""
        self.after: Callable[[], None] = lambda: None
        """Called when all epochs are over."""
        self.is_saved = False
        self.is_over = False
        self._begun = 0
        self._is_read = False
        self._is_by_epoch = epochs is None
        self._present: Epoch | None = None
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = len(dataset) // global_batch_size
        self.total = (epochs or 0) * self.steps_per_epoch
        self.position = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0, that the present batch is of; before the first, that of the next one."""
        return max(self.position - 1, 0) // self.steps_per_epoch

    @property
    def ends_epoch(self) -> bool:
        """True while the last batch of an epoch is the present one."""
        return self.position > 0 and self.position % self.steps_per_epoch == 0

    def __len__(self) -> int:
        """Global batches of all epochs; of one, if that is what a loop over it takes."""
        return self.steps_per_epoch if self._is_by_epoch else self.total

    def __iter__(self) -> Iterator[Any]:
        if self._present is not None:
            yield from self._present
            return
        if self._is_by_epoch:
            if self.is_saved:
                raise UserError(
                    "Nobody has said how many epochs there are.",
                    why="A run that goes on would make all of them once more.",
                    fix="Write `for epoch in NAME.epochs(EPOCHS):` around `for batch in NAME:`.",
                )
            yield from self._until((self.position // self.steps_per_epoch + 1) * self.steps_per_epoch)
            return
        if self._is_read:
            raise UserError(
                "These batches have ended: one loop goes over all epochs.",
                why=f"rank.batches() was told {self.total // self.steps_per_epoch} epochs.",
                fix="Give rank.batches(..., epochs=N), and take `for batch in batches:` without a loop around it; or "
                "take `for epoch in batches.epochs():` and `for batch in epoch:` inside it.",
            )
        yield from self._until(self.total)
        self._is_read = True
        self._end()

    def epochs(self, count: int | None = None) -> Iterator[Epoch]:
        """Epochs that are left, each to be iterated over for its batches, for what is done at the end of each.

        Args:
            count: epochs in all; None: as many as `Rank.batches` was told.

        A run that was interrupted between an epoch's last batch and the next epoch's first begins with that epoch, of
        which no batch is left: so what the loop does after its batches is done again, and must do without their names.

        Example:
            >>> for epoch in batches.epochs():
            ...     for images, labels in epoch:
            ...         train(images, labels)
            ...         state.step()
            ...     validate(epoch.number)
        """
        if count is not None:
            self.total = count * self.steps_per_epoch
            self.planned()
        first = self.position // self.steps_per_epoch
        if self.ends_epoch and self._begun < first and not self.is_over:
            first -= 1
        flow: Iterator[Any] = iter(())
        for number in range(first, self.total // self.steps_per_epoch):
            end = (number + 1) * self.steps_per_epoch
            begin = number * self.steps_per_epoch
            if number == first or self.position != begin:
                self.position = max(self.position, begin)  # the loop has left the epoch before its end
                flow = self._until(self.total)
            self._present = Epoch(number, itertools.islice(flow, end - self.position))
            yield self._present
        self._present = None
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self.after()

    def _until(self, end: int) -> Iterator[Any]:
        loading = self._loading
        keys = self._order.shares(self.position, end, loading.rank, loading.world_size)
        with loading.plain_batches(self._fetch, keys) as batches:
            for batch in batches:
                self._begun = self.position // self.steps_per_epoch
                self.before()
                self.position += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the position, and what it counts."""
        return {"position": self.position, "begun": self._begun, "is_over": self.is_over, **self._facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises UserError where the position would be of other batches."""
        for name, value in self._facts.items():
            if state.get(name) != value:
                words = name.replace("_", " ")
                raise UserError(
                    f"The batches are others than before: {words} is {value}, and was {state.get(name)}.",
                    why="A run goes on in the middle of an epoch only with the same samples in the same batches.",
                    fix="Give rank.batches() what it was given before, or begin another run.",
                )
        self.position = int(state["position"])
        self._begun = int(state["begun"])
        self.is_over = bool(state["is_over"])
