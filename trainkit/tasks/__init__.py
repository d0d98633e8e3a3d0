"""Tasks of your own: what they are made from."""

from trainkit.tasks.base import Losses, Task, binary_cross_entropy, training_losses

__all__ = ["Losses", "Task", "binary_cross_entropy", "training_losses"]
