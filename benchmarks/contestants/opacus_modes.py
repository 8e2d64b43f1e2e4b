"""Opacus: per-sample gradients by its hooks or by functorch, and norms without them ("ghost").

A model with layers that it does not take (an LSTM) goes through its own ``ModuleValidator.fix`` first, as its users do.
"""

from typing import ClassVar

from torch import Tensor, nn

from benchmarks.cases import Batch
from benchmarks.contestants.base import Contestant, Refused, Step, per_sample_attribute
from benchmarks.quantities import CLIP, FROM_GRADS, Answer

PREFIX = "_module."


def acceptable(model: nn.Module) -> nn.Module:
    """The model as Opacus takes it."""
    from opacus.validators import ModuleValidator

    return model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model)


class OpacusHooks(Contestant):
    """``GradSampleModule``."""

    name = "Opacus hooks"
    offers, derives = frozenset({"BatchGrad", "clipped sum"}), True
    functorch: ClassVar[bool] = False

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        from opacus import GradSampleModule

        wrapped = GradSampleModule(acceptable(model), loss_reduction="sum", force_functorch=self.functorch)
        reduce = FROM_GRADS[quantity]

        def step() -> Answer:
            wrapped.zero_grad()
            batch.losses(wrapped).sum().backward()
            return reduce(per_sample_attribute(wrapped, "grad_sample", PREFIX))

        return step


class OpacusFunctorch(OpacusHooks):
    """The same, every layer by ``vmap`` of itself (``grad_sample_mode="functorch"``)."""

    name, functorch = "Opacus functorch", True


class OpacusGhost(Contestant):
    """``GradSampleModuleFastGradientClipping``: norms, then a second backward of the weighted losses."""

    name = "Opacus ghost"
    offers = frozenset({"BatchL2Grad", "clipped sum"})

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(
            acceptable(model), loss_reduction="sum", max_grad_norm=CLIP, use_ghost_clipping=True
        )

        def norms(keep_graph: bool) -> Tensor:
            wrapped.zero_grad()
            losses = batch.losses(wrapped)
            losses.sum().backward(retain_graph=keep_graph)
            return losses

        def squared_norms() -> Answer:
            norms(keep_graph=False)
            return {"total": wrapped.get_norm_sample().square()}

        def clipped_sum() -> Answer:
            losses = norms(keep_graph=True)
            wrapped.zero_grad()
            wrapped.disable_hooks()
            try:
                (wrapped.get_clipping_coef() * losses).sum().backward()
            finally:
                wrapped.enable_hooks()
            found = {name.removeprefix(PREFIX): p.grad for name, p in wrapped.named_parameters()}
            if any(gradient is None for gradient in found.values()):
                raise Refused("some parameters have no gradient")
            return found

        return squared_norms if quantity == "BatchL2Grad" else clipped_sum
