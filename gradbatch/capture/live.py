"""The way in where the backward is the user's: watch it from inside.

After the model's forward its graph is walked and probed (with random cotangents in place of the losses), and prehooks
at the calls' outputs wait for the real gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph
from gradbatch.capture.arguments import tensors_in
from gradbatch.capture.arrivals import END, Arrivals
from gradbatch.capture.checks import layer_of
from gradbatch.capture.evaluate import zeros
from gradbatch.capture.forward import Forward, Hook
from gradbatch.capture.memory import Memory
from gradbatch.capture.records import Record
from gradbatch.capture.samples import samples_of
from gradbatch.capture.search import explain
from gradbatch.capture.uses import Names
from gradbatch.errors import StaleCapture, UsageError
from gradbatch.factors import Concat, PerSampleGrad
from gradbatch.plans.contractions import Planner


class LiveCapture:
    """Watches forwards of a model and the user's backward passes through them.

    Args:
        model: the extended model.
        names: computes the wanted parameters; called at each forward.
        batch_dim: axis of the model's outputs that runs over samples.
        planner: decides how the results will be evaluated.
        mean: whether the user's loss is the mean over samples, rather than their sum.
        memory: where the samples lay in earlier steps.
        sample_ids: the sample of each row of the outputs; ``None``: each is one.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Callable[[], Names],
        batch_dim: int,
        planner: Planner,
        mean: bool,
        memory: Memory | None,
        sample_ids: Tensor | None = None,
    ) -> None:
        self._model, self._names, self._batch_dim = model, names, batch_dim
        self._planner, self._mean, self._memory, self._sample_ids = planner, mean, memory, sample_ids
        self._forwards: list[Forward] = []
        self._records: set[Record] = set()
        self._arrivals = Arrivals()
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
        self._handles, self._records, self._forwards = [], set(), []
        self._arrivals.close()

    # ---- after each forward

    def after_forward(self, args: Any, kwargs: Any, output: Any) -> None:
        """Walk and probe the graph of the model's output, and wait for its backward passes."""
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not outputs or not torch.is_grad_enabled() or any(map(graph.is_transformed, outputs)):
            return
        names = self._names()
        rows = self._count_rows(outputs, list(tensors_in((args, kwargs))))
        samples = samples_of(rows, self._sample_ids)
        by_row = [tensor for tensor in outputs if self._rows(tensor) == rows]
        random = [self._random(tensor) for tensor in by_row]

        def cotangents(weights: Tensor) -> list[Tensor]:
            return [r * weights.to(r).view(-1, *(1,) * (r.dim() - self._batch_dim - 1)) for r in random]

        # A forward on the result of an earlier one contains that one's calls.
        earlier = [forward.found for forward in self._forwards]
        found = explain(by_row, cotangents, samples, names, outputs, earlier, self._memory, self._batch_dim)
        forward = Forward(samples.count, found, names, self._planner, rows if self._mean else 1)
        self._forwards.append(forward)
        for use in found.uses:
            self._records.add(use.record)
            use.record.hold()
        if forward.is_measured:
            for tensor in by_row:  # before all other hooks
                hook = forward.hook_of_output(tensor.output_nr, self._batch_dim, samples)
                self._handles.append(graph.node_of(tensor).register_prehook(hook))
        self._watch(forward, [t for t in outputs if self._rows(t) != rows])

    def _random(self, tensor: Tensor) -> Tensor:
        # A generator of our own: the user's draws stay what they are without gradbatch.
        generator = torch.Generator(tensor.device).manual_seed(0)
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)

    def _rows(self, tensor: Tensor) -> int | None:
        return tensor.shape[self._batch_dim] if tensor.dim() > self._batch_dim else None

    def _count_rows(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        rows = next((self._rows(tensor) for tensor in outputs if self._rows(tensor) is not None), None)
        if rows is None:
            raise UsageError(
                f"the model returns {[list(t.shape) for t in outputs]}: no output has a batch axis "
                f"{self._batch_dim}. Let it return one row a sample, or use "
                "gradbatch.backward(model, losses, ...) with a vector of losses"
            )
        given = [self._rows(tensor) for tensor in inputs if self._rows(tensor) is not None]
        if self._sample_ids is None and given and rows not in given:
            raise UsageError(
                f"the model's output has {rows} rows on axis {self._batch_dim}, its inputs have {given}: what is a "
                "sample? Use gradbatch.backward(model, losses, ...) with one loss a sample, extend(model, "
                "batch_dim=...), or say with sample_ids= which sample each row belongs to"
            )
        return rows

    # ---- hooks on the graph

    def _watch(self, forward: Forward, others: Iterable[Tensor]) -> None:
        found, names, walk = forward.found, forward.names, forward.found.walk
        self._take_gradients(forward)
        targets = {node for use in found.uses for node in use.paths}
        targets.update(found.region)
        reasons = {node: names.parameters[p] for node, p in walk.accumulators.items()}
        for tensor in others:
            # Not one row a sample: it may be used inside the forward, but not by the loss.
            node = graph.node_of(tensor)
            reason = (
                f"an output of shape {tuple(tensor.shape)}, not one row a sample,"
                if tensor.dim()
                else "the model returned a scalar that the loss is made of (its own loss, as with labels=...), in "
                "which nobody can tell the samples apart. Compute the loss outside of the model, from outputs with one "
                f"row a sample (the logits), or {END}"
            )
            if graph.is_checkpoint(node):
                self._arrivals.check_inside(node, reason, tensor.output_nr)
            else:
                targets.add(node)
                reasons[node] = reason
        for target in {*targets, *walk.accumulators}:
            edges = checkpoints.in_passes_of_the_user(walk.consumers.get(target, []), walk)
            self._arrivals.expect(target, list(edges))
        for node in walk.checkpoints.keys() - walk.frames.keys():
            self._arrivals.expect_inside(node)
        for target in targets - walk.accumulators.keys() - walk.frames.keys():
            inside = f"{layer_of(target, walk, names)}, in {target.name()},"
            self._arrivals.check_inside(target, reasons.get(target, inside))
        # All parameters, also those that these calls do not use: nothing may arrive at them.
        for parameter, path in names.parameters.items():
            self._arrivals.check_leaf(parameter, path)

    def _take_gradients(self, forward: Forward) -> None:
        """Put hooks on the nodes whose gradients are needed, or on the checkpoints that they lie in."""
        found = forward.found
        hooks = [
            (node, forward.hook_of_call(number, position))
            for number, use in enumerate(found.uses)
            for position, (node, _) in enumerate(use.anchors)
        ]
        hooks += [(cut.node, forward.hook_of_node(number)) for number, cut in enumerate(found.cuts)]
        hooks += [(node, forward.hook_of_region(node)) for node in found.region]
        inside: dict[Node, list[tuple[Node, Hook]]] = {}
        for node, hook in hooks:
            checkpoint = checkpoints.outermost(node, found.walk)
            if checkpoint is None:
                self._handles.append(node.register_prehook(hook))
            else:
                inside.setdefault(checkpoint, []).append((node, hook))
        # Last: what a checkpoint itself has to send on goes to nodes inside it.
        for node, inner in inside.items():
            self._handles.append(node.register_prehook(forward.hook_of_checkpoint(node, inner)))

    # ---- at the end

    def results(self) -> dict[nn.Parameter, PerSampleGrad]:
        """Per-sample gradients of every wanted parameter.

        Raises:
            GradBatchError: there was no forward, or no backward; a pass was restricted to some parameters; something
                outside of the forward took part.
        """
        if not self._forwards:
            raise UsageError(
                "compute: the model was not called inside the context (or without gradients, or compiled as a whole by "
                "torch.compile, which calls no hooks). Run model(input) and loss.backward() inside the with block; to "
                "call parts of a model, use gradbatch.backward"
            )
        if self._arrivals.violation is not None:
            raise self._arrivals.violation
        self._arrivals.check_over()
        for name, gradient, version in (entry for forward in self._forwards for entry in forward.taken):
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
            forward.drop_foreign_passes(self._arrivals.reached)
        groups = self._joined()
        if not groups:
            raise UsageError(
                "compute: no backward pass reached the model's parameters inside the context; run loss.backward() "
                "inside the with block"
            )
        parts: list[dict[nn.Parameter, PerSampleGrad]] = []
        for group in groups:
            parts.append({})
            for forward in group:
                forward.add_to(parts[-1])
        result: dict[nn.Parameter, PerSampleGrad] = {}
        for parameter in names.parameters:
            grads = [
                part.get(parameter, zeros(parameter, group[0].samples))
                for part, group in zip(parts, groups, strict=True)
            ]
            result[parameter] = (grads[0] if len(grads) == 1 else Concat(grads)).with_planner(self._planner)
        return result

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


class _ModelHook:
    """Forward hook of the model while it is watched. A copy of the model made meanwhile is not watched."""

    def __init__(self, capture: weakref.ref[LiveCapture]) -> None:
        self._capture = capture

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        capture = self._capture()
        if capture is not None and not graph.is_being_traced():
            capture.after_forward(args, kwargs, output)

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


class _CopiedHook:
    """What a copy of a watched model gets in place of the hook."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pass
