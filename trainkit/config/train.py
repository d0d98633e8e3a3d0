"""How a run trains: how long, in which batches, how exactly, and with what loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from trainkit.config.section import Fraction, Section


class TrainConfig(Section):
    epochs: PositiveInt = 20
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Optimizer updates; replaces `epochs` when given."""
    global_batch_size: PositiveInt = 64
    """Samples per optimizer update over all ranks. Keep it fixed when you change the number of GPUs."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Samples per rank per forward pass; null: the rank's whole share at once; auto: as many as fit into memory, found
    before the first update. Lower it when memory runs out."""
    memory_limit_mb: PositiveFloat | None = None
    """MiB that a rank may use, for micro_batch_size=auto; null: all that is free: of its GPU, or on CPU its share of
    what the job (SLURM's --mem) or the machine has."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "o2"] = "auto"
    """auto picks what the device is fast at; fp16 scales the loss; o2: all of the model in fp16 but its BatchNorm, with
    fp32 weights for the optimizer, and gradients of half the size."""
    channels_last: bool = False
    """Images as [N, H, W, C] in memory: convolutions are faster that way on GPUs and on CPUs with bf16."""
    activation_checkpointing: Literal["none", "full"] | PositiveInt = "none"
    """What blocks have computed is computed again in the backward pass instead of being kept: less memory, a third more
    time. full: of all blocks; a number: of every so manyth."""
    compile: Literal["off", "model", "blocks"] = "off"
    """torch.compile of the whole model, or of each repeated block, which starts sooner. CPUs need a C++ compiler."""
    deterministic: bool = False
    """The same numbers from the same GPUs each time, at some cost; on CPUs they always are."""
    grad_clip_norm: PositiveFloat | None = None
    """Largest global norm of the gradients; null: no clipping."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do about gradients that are infinite or not a number, which never reach the weights. stop: end the run
    after 3 such updates in a row; skip: go on without them; rollback: after 3 in a row go back to the newest checkpoint
    and go on with the data after them, at most 3 times."""
    label_smoothing: Fraction = 0.0
    class_weights: Literal["balanced"] | tuple[PositiveFloat, ...] | None = None
    """How much a sample's loss counts, by its class: one number for each, or balanced: rare classes as much as common
    ones. The loss is the weighted mean over the global batch."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Average the weights over the updates as well, with this decay (0.999 to 0.9999 is usual; less at first), and
    measure both: `ema_acc1`. null: no average."""
    eval_every_epochs: PositiveInt = 1
    """Validate after every so many epochs, and always at the end."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many validations in a row that were no better, by `checkpoint.best`; null: train to the end. A
    schedule that comes down towards the end (onecycle, cosine, wsd) is not finished then: constant and step are."""
    early_stopping_min_delta: NonNegativeFloat = 0.0
    """How much better a validation must be to count as better, in the metric's own unit (accuracies: percent)."""

    @property
    def given_micro_batch_size(self) -> int | None:
        """`micro_batch_size`, if it is a number."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None
