"""The way in where the backward is the user's: watch it from inside.

After the model's forward its graph is walked and probed (with random cotangents in place of the losses), and prehooks
at the calls' outputs wait for the real gradients.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradbatch.capture import graph
from gradbatch.capture.arrivals import Arrivals
from gradbatch.capture.evaluate import evaluate, zeros
from gradbatch.capture.probe import no_layout, owned_gradients
from gradbatch.capture.records import Record, tensors_in
from gradbatch.capture.uses import Names, Use, find_uses
from gradbatch.errors import StaleCapture, UsageError
from gradbatch.factors import Concat, PerSampleGrad
from gradbatch.plans.contractions import Planner
from gradbatch.rules import SampleLayout


@dataclass
class Forward:
    """One forward of the model inside the context, and the backward passes that went through it.

    Args:
        samples: ``N``.
        uses: its calls.
        layouts: where the samples lie in each.
        unseen: elements of each call's outputs that the model's outputs do not depend on (``None``: none of them do).
        names: the wanted parameters at the time.
        passes: for each backward pass, the gradients of each call's outputs that it reached.
    """

    samples: int
    uses: list[Use]
    layouts: list[SampleLayout]
    unseen: list[list[Tensor | None]]
    names: Names
    passes: dict[int, dict[int, list[Tensor | None]]] = field(default_factory=lambda: defaultdict(dict))


class LiveCapture:
    """Watches forwards of a model and the user's backward passes through them.

    Args:
        model: the extended model.
        names: computes the wanted parameters; called at each forward.
        batch_dim: axis of the model's outputs that runs over samples.
        planner: decides how the results will be evaluated.
        mean: whether the user's loss is the mean over samples, rather than their sum.
    """

    def __init__(
        self, model: nn.Module, names: Callable[[], Names], batch_dim: int, planner: Planner, mean: bool
    ) -> None:
        self._model, self._names, self._batch_dim = model, names, batch_dim
        self._planner, self._mean = planner, mean
        self._forwards: list[Forward] = []
        self._records: set[Record] = set()
        self._arrivals = Arrivals()
        self._taken: list[tuple[str, Tensor, int]] = []
        self._handles: list[Any] = []

    def open(self) -> None:
        """Start watching."""
        hook = _ModelHook(weakref.ref(self))
        self._handles.append(self._model.register_forward_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """Stop watching and let go of everything; safe to call at any time."""
        for handle in self._handles:
            handle.remove()
        for record in self._records:
            record.let_go()
        self._handles, self._records, self._forwards, self._taken = [], set(), [], []
        self._arrivals.close()

    # ---- after each forward

    def after_forward(self, args: Any, kwargs: Any, output: Any) -> None:
        """Walk and probe the graph of the model's output, and wait for its backward passes."""
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not outputs or not torch.is_grad_enabled() or any(map(graph.is_transformed, outputs)):
            return
        names = self._names()
        samples = self._count_samples(outputs, list(tensors_in((args, kwargs))))
        by_sample = [tensor for tensor in outputs if self._rows(tensor) == samples]
        uses, walk = find_uses([graph.node_of(tensor) for tensor in outputs], names)
        # A forward on the result of an earlier one contains that one's calls.
        uses = [use for use in uses if use.record not in self._records]
        random = [self._random(tensor) for tensor in by_sample]

        def cotangents(weights: Tensor) -> list[Tensor]:
            return [r * weights.to(r).view(-1, *(1,) * (r.dim() - self._batch_dim - 1)) for r in random]

        if samples:
            gradients, layouts = owned_gradients(uses, by_sample, cotangents, samples, names)
        else:
            gradients, layouts = [[None] for _ in uses], [SampleLayout(0)] * len(uses)
        unseen = [[None if g is None else g == 0 for g in outputs] for outputs in gradients]
        forward = Forward(samples, uses, layouts, unseen, names)
        self._forwards.append(forward)
        for use in uses:
            self._records.add(use.record)
            use.record.hold()
        self._watch(forward, walk, [t for t in outputs if self._rows(t) != samples], names)

    def _random(self, tensor: Tensor) -> Tensor:
        # A generator of our own: the user's draws stay what they are without gradbatch.
        generator = torch.Generator(tensor.device).manual_seed(0)
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)

    def _rows(self, tensor: Tensor) -> int | None:
        return tensor.shape[self._batch_dim] if tensor.dim() > self._batch_dim else None

    def _count_samples(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        samples = next((self._rows(tensor) for tensor in outputs if self._rows(tensor) is not None), None)
        if samples is None:
            raise UsageError(
                f"the model returns {[list(t.shape) for t in outputs]}: no output has a batch axis "
                f"{self._batch_dim}. Let it return one row a sample, or use "
                "gradbatch.backward(model, losses, ...) with a vector of losses"
            )
        rows = [self._rows(tensor) for tensor in inputs if self._rows(tensor) is not None]
        if rows and samples not in rows:
            raise UsageError(
                f"the model's output has {samples} rows on axis {self._batch_dim}, its inputs have {rows}: what is a "
                "sample? Use gradbatch.backward(model, losses, ...) with one loss a sample, or extend(model, "
                "batch_dim=...)"
            )
        return samples

    # ---- hooks on the graph

    def _watch(self, forward: Forward, walk: graph.Walk, others: Iterable[Tensor], names: Names) -> None:
        for number, use in enumerate(forward.uses):
            for position, (node, anchor) in enumerate(use.anchors):
                hook = self._take(forward, number, position, len(use.anchors), anchor.number)
                self._handles.append(node.register_prehook(hook))
        targets = {node for use in forward.uses for into in use.claimed.values() for node in into}
        reasons = {node: names.parameters[p] for node, p in walk.accumulators.items()}
        for tensor in others:
            # Not one row a sample: it may be used inside the forward, but not by the loss.
            node = graph.node_of(tensor)
            targets.add(node)
            reasons[node] = f"an output of shape {tuple(tensor.shape)}, which is not one row a sample,"
        for target in {*targets, *walk.accumulators}:
            self._arrivals.expect(target, walk.consumers.get(target, []))
        for target in targets - walk.accumulators.keys():
            self._arrivals.check_inside(target, reasons.get(target, target.name()))
        # All parameters, also those that these calls do not use: nothing may arrive at them.
        for parameter, path in names.parameters.items():
            self._arrivals.check_leaf(parameter, path)

    def _take(
        self, forward: Forward, number: int, position: int, count: int, output: int
    ) -> Callable[[tuple[Tensor | None, ...]], None]:
        use = forward.uses[number]
        anchor = use.anchors[position][1]

        def take(grads: tuple[Tensor | None, ...]) -> None:
            slots = forward.passes[graph.current_pass()].setdefault(number, [None] * count)
            gradient = grads[output]
            if gradient is not None:
                gradient = anchor.of_output(gradient.detach())
                self._taken.append((use.name, gradient, gradient._version))
            slots[position] = gradient

        return take

    # ---- at the end

    def results(self) -> dict[nn.Parameter, PerSampleGrad]:
        """Per-sample gradients of every wanted parameter.

        Raises:
            GradBatchError: there was no forward, or no backward; a pass was restricted to some parameters; something
                outside of the forward took part.
        """
        if not self._forwards:
            raise UsageError(
                "compute: the model was not called inside the context (or without gradients). Run model(input) and "
                "loss.backward() inside the with block; to call parts of a model, use gradbatch.backward"
            )
        if self._arrivals.violation is not None:
            raise self._arrivals.violation
        for name, gradient, version in self._taken:
            if gradient._version != version:
                raise StaleCapture(
                    f"compute: the gradient of the output of {name} was changed in place after the backward (it may be "
                    "some tensor's .grad); leave the context first"
                )
        names = self._names()
        for forward in self._forwards:
            changed = {*forward.names.parameters} ^ {*names.parameters}
            if changed:
                path = next(
                    n.parameters[p] for p in changed for n in (names, forward.names) if p in n.parameters
                )
                raise StaleCapture(
                    f"compute: {path} was replaced, frozen or unfrozen after the forward, so that its gradient is not "
                    "that of the model's parameter any more. Do it before the forward or behind the context"
                )
            self._drop_foreign_passes(forward)
        groups = self._joined()
        if not groups:
            raise UsageError("compute: no backward pass reached the model's parameters inside the context")
        parts = [self._reduce(group) for group in groups]
        result: dict[nn.Parameter, PerSampleGrad] = {}
        for parameter in names.parameters:
            grads = [
                part.get(parameter, zeros(parameter, group[0].samples))
                for part, group in zip(parts, groups, strict=True)
            ]
            result[parameter] = (grads[0] if len(grads) == 1 else Concat(grads)).with_planner(self._planner)
        return result

    def _drop_foreign_passes(self, forward: Forward) -> None:
        """Forget passes that asked for no parameter (a saliency map); refuse those that asked for some."""
        for number, arrived in list(forward.passes.items()):
            reached = self._arrivals.reached.get(number, set())
            claimed = {
                id(use.record.parameters[attribute]): f"{use.name}.{attribute}"
                for index, use in enumerate(forward.uses)
                for attribute in use.claimed
                if index in arrived and any(g is not None for g in arrived[index])
            }
            fired = [node for index in arrived for node, _ in forward.uses[index].anchors]
            skipped = [
                use.name
                for index, use in enumerate(forward.uses)
                if index not in arrived and any(graph.is_reachable(node, fired) for node, _ in use.anchors)
            ]
            if not reached & set(claimed):
                del forward.passes[number]
            elif skipped or set(claimed) - reached:
                missing = skipped or [path for key, path in claimed.items() if key not in reached]
                raise UsageError(
                    f"compute: a backward pass was restricted to some parameters (inputs=...) and left out "
                    f"{missing[0]}. Run it for all of them, or select with parameters="
                )

    def _joined(self) -> list[list[Forward]]:
        """Forwards grouped by the backward passes that went through several of them, in order."""
        groups: list[list[Forward]] = []
        for forward in self._forwards:
            if not forward.passes:
                continue
            touching = [g for g in groups if any(forward.passes.keys() & other.passes.keys() for other in g)]
            merged = [member for group in touching for member in group] + [forward]
            groups = [g for g in groups if g not in touching] + [merged]
        for group in groups:
            if len({forward.samples for forward in group}) > 1:
                raise UsageError(
                    f"compute: one backward went through forwards of {[f.samples for f in group]} samples. Forwards "
                    "joined by one loss must be over the same samples; call backward for each micro-batch"
                )
        return groups

    def _reduce(self, group: Sequence[Forward]) -> dict[nn.Parameter, PerSampleGrad]:
        """Add up the passes through forwards that share their samples."""
        total: dict[nn.Parameter, PerSampleGrad] = {}
        for forward in group:
            for arrived in forward.passes.values():
                gradients = [
                    self._own(forward, index, arrived.get(index)) for index in range(len(forward.uses))
                ]
                if not forward.samples:
                    continue
                for use in forward.uses:
                    use.record.check_fresh(use.name)
                grads = evaluate(forward.uses, gradients, forward.layouts, forward.samples, self._planner)
                for parameter, grad in grads.items():
                    total[parameter] = total[parameter] + grad if parameter in total else grad
        return total

    def _own(self, forward: Forward, index: int, arrived: list[Tensor | None] | None) -> list[Tensor | None]:
        """Gradients of a call's outputs for the samples' own losses."""
        use = forward.uses[index]
        if arrived is None:
            return [None] * len(use.anchors)
        for unseen, gradient in zip(forward.unseen[index], arrived, strict=True):
            # Nobody knows whose these are: they do not reach the loss by way of what the model returned.
            if gradient is not None and (gradient if unseen is None else gradient[unseen]).any():
                raise no_layout(use, forward.samples)
        if all(unseen is None for unseen in forward.unseen[index]):
            return [None] * len(use.anchors)
        # The gradient of a mean carries 1/N; a sample's own loss does not.
        scale = forward.samples if self._mean else 1
        return [None if g is None else g * scale for g in arrived]


class _ModelHook:
    """Forward hook of the model while it is watched. A copy of the model made meanwhile is not watched."""

    def __init__(self, capture: weakref.ref[LiveCapture]) -> None:
        self._capture = capture

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        capture = self._capture()
        if capture is not None:
            capture.after_forward(args, kwargs, output)

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


class _CopiedHook:
    """What a copy of a watched model gets in place of the hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pass
