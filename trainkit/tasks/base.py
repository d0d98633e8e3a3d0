"""For tasks of your own: the class `Task`, and the losses of training."""

from trainkit.training.tasks.base import Losses, Task, binary_cross_entropy, training_losses

__all__ = ["Losses", "Task", "binary_cross_entropy", "training_losses"]
