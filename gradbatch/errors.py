"""The errors of gradbatch: each says what was wrong, where, and what to do about it.

Every error is a :class:`GradBatchError`, so that one ``except`` catches what gradbatch refuses and nothing else. The
kinds are told apart by who has to act: the caller, the author of the model, or the author of a rule or a quantity.
"""


class GradBatchError(RuntimeError):
    """Base of every error that gradbatch raises."""


class UsageError(GradBatchError):
    """An argument, a loss or a sequence of calls that gradbatch cannot take: the caller has to change the call."""


class UnsupportedLayer(GradBatchError):
    """A part of the model hides how a parameter is used (compiled code, reentrant checkpointing)."""


class CoupledSamples(GradBatchError):
    """One sample's gradient depends on another sample (BatchNorm in train mode, a contrastive loss, …)."""


class DistributedError(GradBatchError):
    """Another process of a distributed run failed, does something else, or is gone: none of them can go on."""


class StaleCapture(GradBatchError):
    """A captured tensor, parameter or buffer was changed between forward and backward: its gradient would be wrong."""


class RuleError(GradBatchError):
    """A layer rule failed, or returned something that cannot be its parameters' per-sample gradients."""


class QuantityError(GradBatchError):
    """A quantity failed, or returned something that is no tensor; what it raised is the ``__cause__``."""


class SlowPathWarning(UserWarning):
    """An operation has no rule, and is evaluated once for each sample: right, but slow."""


class VerificationError(GradBatchError):
    """Per-sample gradients differ from the reference; the message holds the block map of where."""
