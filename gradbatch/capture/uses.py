"""The module-hook reader, second half: which recorded call explains which uses of which parameter.

A parameter's gradient is a sum over all paths from the losses to its accumulator. Each path must pass through exactly
one call, of a layer or of a node, that accounts for it; then, and only then, the calls' per-sample gradients add up to
the parameter's. So a record claims only what no other call could account for too; all else is left to the node reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph, paths
from gradbatch.capture.anchors import Anchor
from gradbatch.capture.layouts import OwnerMap, Owners, Site
from gradbatch.capture.readings import KEPT
from gradbatch.capture.records import Record
from gradbatch.errors import CoupledSamples, UnsupportedLayer
from gradbatch.rules import LayerRule, Layout


@dataclass(eq=False)
class Use:
    """A call whose rule accounts for some uses of its layer's own parameters.

    Args:
        record: what the forward hook saw.
        name: path of the layer in the model.
        anchors: where the gradients of its outputs are taken.
        claimed: the parameters (by their attribute names), with their accumulators.
        paths: the edges of the paths to these below the anchors, by the node that they lead into.
    """

    record: Record
    name: str
    anchors: list[tuple[Node, Anchor]]
    claimed: dict[str, Node] = field(default_factory=dict)
    paths: dict[Node, list[graph.Edge]] = field(default_factory=dict)

    @property
    def places(self) -> list[tuple[Node, int]]:
        """The nodes, and which of their outputs, whose gradients the rule needs."""
        return [(node, anchor.number) for node, anchor in self.anchors]

    @cached_property
    def edges(self) -> set[graph.Edge]:
        """All edges that the call accounts for."""
        return {edge for edges in self.paths.values() for edge in edges}

    @property
    def nodes(self) -> set[Node]:
        """The nodes at its outputs and on its paths to its parameters."""
        return {node for node, _ in self.anchors}.union(self.paths)

    @cached_property
    def site(self) -> Site:
        """On which leading axes of the outputs the samples may lie."""
        if self.rule.arrange is not None:
            return Site([1] * len(self.anchors))
        features = [self.feature_axes(len(anchor.shape)) for _, anchor in self.anchors]
        if any(count is None for count in features):
            return Site(None)
        lead = [len(a.shape) - (n or 0) for (_, a), n in zip(self.anchors, features, strict=True)]
        return Site(lead, rows=max(1, min(lead)))

    def layout(self, owners: Owners | None) -> Layout | None:
        """Where the samples lie in the outputs, as the rule takes them; ``None`` if it cannot."""
        if self.site.lead is not None and 0 in self.site.lead and owners is not None and owners.samples > 1:
            return None  # called without a batch axis, for one sample of several
        return owners.rows(self.site.rows) if isinstance(owners, OwnerMap) else owners

    @property
    def rule(self) -> LayerRule:
        """The rule of the layer."""
        assert self.record.rule is not None
        return self.record.rule

    @cached_property
    def module(self) -> nn.Module:
        """The layer as it was called."""
        return self.record.module_as_called()

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return self.record.arguments()

    def feature_axes(self, dim: int) -> int | None:
        """Trailing axes of an output that belong to the layer's function, if its rule says so."""
        return self.rule.count_feature_axes(self.module, dim)

    def output_gradient(self, position: int, gradient: Tensor | None) -> Tensor | None:
        """A gradient that arrived at an anchor, as the rule takes it."""
        if gradient is None:
            return None
        anchor = self.anchors[position][1]
        return self.arranged(anchor.index, anchor.of_output(gradient))

    def arranged(self, index: int, tensor: Tensor) -> Tensor:
        """An output or its gradient with the rows in front, where the layer keeps them elsewhere."""
        if self.rule.arrange is None:
            return tensor
        self.record.check_kept(self.name)
        return self.rule.arrange(self.module, self.arguments, index, tensor)

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """What kernels keep for their own backward, by the claimed parameter; nothing if it was freed or changed."""
        found: dict[str, dict[str, Tensor]] = {}
        for attribute, accumulator in self.claimed.items():
            for node, _ in self.paths[accumulator]:
                if names := KEPT.get(graph.kind(node)):
                    with suppress(AttributeError, RuntimeError):
                        found[attribute] = {name: graph.saved(node, name).detach() for name in names}
        return found

    def check_hooks(self) -> None:
        """Refuse hooks on the graph that may change the gradient where nobody sees it (:class:`UnsupportedLayer`)."""
        nodes = {node for node, _ in self.edges}
        if any(map(graph.has_foreign_hooks, nodes.union(node for node, _ in self.anchors))):
            raise UnsupportedLayer(hook_message(f"{self.name} ({self.record.module_type.__name__})"))


@dataclass
class Names:
    """How errors call the parameters and layers of a model.

    Args:
        parameters: path of each wanted parameter (the first of its names).
        modules: path of each module.
        owners: the module that each wanted parameter belongs to.
        coupled: whether samples may depend on each other, as the user has said.
    """

    parameters: Mapping[nn.Parameter, str]
    modules: Mapping[nn.Module, str]
    owners: Mapping[nn.Parameter, nn.Module]
    coupled: bool = False

    def layer(self, module: nn.Module) -> str:
        """Path of a module; words for the model itself and for a layer of another one."""
        return self.modules.get(module, "a layer outside of the model") or "the model itself"


def find_uses(roots: Sequence[Node], names: Names) -> tuple[list[Use], graph.Walk]:
    """Calls of layers below ``roots`` that explain uses of wanted parameters, each as the only one.

    Args:
        roots: nodes that compute the losses or outputs.
        names: the wanted parameters.

    Returns:
        The calls, and the walk they were found by.

    Raises:
        UnsupportedLayer: a part of the graph that cannot be seen.
        CoupledSamples: a layer that normalises over the batch.
        StaleCapture: a layer's parameter was replaced since the forward.
    """
    walk = checkpoints.walk(roots, names.parameters)
    for node in walk.order():
        if graph.runs_its_own_backward(node):
            raise UnsupportedLayer(
                f"{type(node).__module__}.{node.name()}: reentrant activation checkpointing that is not torch's "
                "hides its parameters from the autograd graph; use torch.utils.checkpoint"
            )
    uses = [use for use in _calls(walk, names) if use.claimed]
    return [use for use in uses if _is_alone(use, walk)], walk


def _calls(walk: graph.Walk, names: Names) -> list[Use]:
    """Every recorded call below the roots, with what it claims."""
    places: dict[Record, list[tuple[Node, Anchor]]] = {}
    for node, notes in walk.notes.items():
        for record, anchor in notes:
            places.setdefault(record, [])
            if anchor is not None:
                places[record].append((node, anchor))
    accumulators = {id(parameter): node for node, parameter in walk.accumulators.items()}
    uses = []
    for record, anchors in places.items():
        name = names.layer(record.module)
        if record.couples_samples and not names.coupled:
            raise CoupledSamples(coupling_message(name, record.module_type))
        record.check_parameters(name)
        use = Use(record, name, anchors)
        if record.rule is not None and record.refusal is None and not record.couples_samples:
            _claim(use, accumulators)
        uses.append(use)
    return _disjoint(uses)


def _claim(use: Use, accumulators: Mapping[int, Node]) -> None:
    """Find the paths from the call's anchors to its own parameters."""
    own = {
        attribute: accumulators[id(parameter)]
        for attribute, parameter in use.record.parameters.items()
        if id(parameter) in accumulators
    }
    if not own or not use.anchors:
        return
    edges = list(paths.region([node for node, _ in use.anchors], use.record.input_nodes))
    use.paths = paths.leading_to(list(own.values()), edges)
    use.claimed = {attribute: node for attribute, node in own.items() if node in use.paths}


def _is_alone(use: Use, walk: graph.Walk) -> bool:
    """Whether the intermediates on the call's paths to its parameters are used by it alone."""
    # All of a node's edges below the anchors are there, each once; so it is enough to count.
    return all(
        node in walk.accumulators or len(walk.consumers[node]) == len(edges)
        for node, edges in use.paths.items()
    )


def _disjoint(uses: Sequence[Use]) -> list[Use]:
    """The calls without those of which an output lies inside another one: they would count a use twice."""
    anchored: dict[Node, list[Use]] = {}
    for use in uses:
        for node, _ in use.anchors:
            anchored.setdefault(node, []).append(use)
    return [use for use in uses if not _overlaps(use, anchored)]


def _overlaps(use: Use, anchored: Mapping[Node, Sequence[Use]]) -> bool:
    if len(set(use.places)) < len(use.anchors):
        return True  # returns one tensor twice
    own = set(map(id, use.record.parameters.values()))
    inside = [other for node in use.paths for other in anchored.get(node, ())]
    return any(other is use or own & set(map(id, other.record.parameters.values())) for other in inside)


def hook_message(layer: str) -> str:
    """The error for a hook on a node, which may change the gradients that pass it."""
    return (
        f"{layer}: a hook on the autograd node of its output may change the gradient where gradbatch cannot see it; "
        "use a tensor hook (output.register_hook) instead"
    )


def coupling_message(name: str, module_type: type[nn.Module]) -> str:
    """The error for a layer that normalises over the batch."""
    layer = f"{name or 'the model itself'} ({module_type.__name__})"
    return (
        f"{layer} normalises over the batch, so a sample's gradient depends on the other samples. Put the layer in "
        "eval mode with running statistics (layer.eval()), or use GroupNorm instead"
    )
