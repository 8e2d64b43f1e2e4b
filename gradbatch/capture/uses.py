"""From the walk to calls: which record explains which uses of which parameter, and that every use is explained.

Coverage by construction. A parameter's gradient is a sum over all paths from the losses to its accumulator. Each path
must pass through exactly one call whose rule accounts for it; then, and only then, the calls' per-sample gradients add
up to the parameter's. Whatever is left over is an error that names the parameter, the layer and the operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from gradbatch.capture import graph
from gradbatch.capture.records import Anchor, Record
from gradbatch.errors import CoupledSamples, UnsupportedLayer
from gradbatch.rules import rule_for, why_no_rule


@dataclass
class Use:
    """A call whose rule accounts for some uses of its layer's own parameters.

    Args:
        record: what the forward hook saw.
        name: path of the layer in the model.
        anchors: where the gradients of its outputs are taken.
        claimed: for each parameter (by its attribute name), the edges of its paths below the anchors, by the node
            that they lead into; the last of them is the parameter's accumulator.
    """

    record: Record
    name: str
    anchors: list[tuple[Node, Anchor]]
    claimed: dict[str, dict[Node, list[graph.Edge]]] = field(default_factory=dict)

    @property
    def edges(self) -> list[GradientEdge]:
        """The edges whose gradients the rule needs."""
        return [GradientEdge(node, anchor.number) for node, anchor in self.anchors]


@dataclass
class Names:
    """How errors call the parameters and layers of a model.

    Args:
        parameters: path of each wanted parameter (the first of its names).
        modules: path of each module.
        owners: the module that each wanted parameter belongs to.
    """

    parameters: Mapping[nn.Parameter, str]
    modules: Mapping[nn.Module, str]
    owners: Mapping[nn.Parameter, nn.Module]

    def layer(self, module: nn.Module) -> str:
        """Path of a module; words for the model itself and for a layer of another one."""
        return self.modules.get(module, "a layer outside of the model") or "the model itself"


def find_uses(roots: Sequence[Node], names: Names) -> tuple[list[Use], graph.Walk]:
    """Explain every use of every wanted parameter below ``roots``.

    Args:
        roots: nodes that compute the losses or outputs.
        names: the wanted parameters.

    Returns:
        The calls, and the walk they were found by.

    Raises:
        UnsupportedLayer: a use that no rule accounts for.
        CoupledSamples: a layer that normalises over the batch.
        StaleCapture: a layer's parameter was replaced since the forward.
    """
    walk = graph.walk(roots, names.parameters)
    for node in walk.order():
        if graph.runs_its_own_backward(node):
            raise UnsupportedLayer(
                "activation checkpointing with use_reentrant=True hides its parameters from the autograd graph; pass "
                "use_reentrant=False"
            )
    uses = [use for use in _calls(walk, names) if use.claimed]
    _check_coverage(walk, uses, names)
    for use in uses:
        if use.record.refusal is not None:
            raise UnsupportedLayer(f"{use.name} ({use.record.module_type.__name__}): {use.record.refusal}")
        consumers = {node for into in use.claimed.values() for edges in into.values() for node, _ in edges}
        if any(map(graph.has_foreign_hooks, consumers.union(node for node, _ in use.anchors))):
            raise UnsupportedLayer(
                f"{use.name} ({use.record.module_type.__name__}): a hook on the autograd node of its output may change "
                "the gradient where gradbatch cannot see it; use a tensor hook (output.register_hook) instead"
            )
        use.record.check_fresh(use.name)
    return uses, walk


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
        if record.couples_samples:
            raise CoupledSamples(coupling_message(name, record.module_type))
        record.check_parameters(name)
        use = Use(record, name, anchors)
        if record.rule is not None:
            _claim(use, accumulators)
        uses.append(use)
    _check_disjoint(uses)
    return uses


def _claim(use: Use, accumulators: Mapping[int, Node]) -> None:
    """Find the paths from the call's anchors to its own parameters."""
    own = {
        attribute: accumulators[id(parameter)]
        for attribute, parameter in use.record.parameters.items()
        if id(parameter) in accumulators
    }
    if not own or not use.anchors:
        return
    edges = list(graph.region([node for node, _ in use.anchors], use.record.input_nodes))
    for attribute, accumulator in own.items():
        into = graph.leading_to([accumulator], edges)
        if into:
            use.claimed[attribute] = into


def _check_disjoint(uses: Sequence[Use]) -> None:
    """Refuse calls nested in each other such that both would account for the same use."""
    anchored: dict[Node, list[Use]] = {}
    for use in uses:
        for node, _ in use.anchors:
            anchored.setdefault(node, []).append(use)
    for use in uses:
        if len({(node, anchor.number) for node, anchor in use.anchors}) < len(use.anchors):
            raise UnsupportedLayer(f"{use.name} ({use.record.module_type.__name__}) returns one tensor twice")
        for into in use.claimed.values():
            for node in into:
                for other in anchored.get(node, ()):
                    if other is use or set(map(id, use.record.parameters.values())) & set(
                        map(id, other.record.parameters.values())
                    ):
                        raise UnsupportedLayer(
                            f"{use.name} ({use.record.module_type.__name__}): a result of {other.name} lies inside "
                            "this call, and both use the same parameter, so it would count twice. Give the layer a "
                            "forward that computes its outputs independently of each other"
                        )


def _check_coverage(walk: graph.Walk, uses: Sequence[Use], names: Names) -> None:
    """Refuse if a path to a parameter enters through an edge that no call claims."""
    claimed: dict[int, dict[Node, set[graph.Edge]]] = {}
    for use in uses:
        for attribute, into in use.claimed.items():
            covered = claimed.setdefault(id(use.record.parameters[attribute]), {})
            for node, edges in into.items():
                covered.setdefault(node, set()).update(edges)
    for accumulator, parameter in walk.accumulators.items():
        covered = claimed.get(id(parameter), {})
        for node in {accumulator: None, **dict.fromkeys(covered)}:
            for edge in walk.consumers[node]:
                if edge not in covered.get(node, ()):
                    raise _unexplained(parameter, edge[0], walk, names)


def _unexplained(parameter: nn.Parameter, consumer: Node, walk: graph.Walk, names: Names) -> UnsupportedLayer:
    path, module = names.parameters[parameter], names.owners[parameter]
    operation, layer = consumer.name().removesuffix("0"), names.layer(module)
    if graph.is_compiled(consumer):
        reason = f"{layer} ({type(module).__name__}) was compiled by torch.compile, which hides its calls"
    elif rule_for(module) is None:
        reason = f"{layer} ({type(module).__name__}): {why_no_rule(module)}"
    elif not module._forward_hooks:
        reason = (
            f"{layer} ({type(module).__name__}) was added after extend; call gradbatch.extend(model) again"
        )
    elif not any(record.module is module for notes in walk.notes.values() for record, _ in notes):
        reason = (
            f"{layer} ({type(module).__name__}) has a rule, but left no record of a call; extend the model before the "
            "forward, and call the layer rather than use its parameters elsewhere"
        )
    else:
        reason = f"{layer} ({type(module).__name__}) has a rule, but this use lies outside of its forward"
    return UnsupportedLayer(
        f"{path} of shape {tuple(parameter.shape)} is used by {operation}, and no layer rule explains that use: "
        f"{reason}. Teach the layer with @gradbatch.layer_rule, freeze the parameter with requires_grad_(False), or "
        "leave it out with parameters="
    )


def coupling_message(name: str, module_type: type[nn.Module]) -> str:
    """The error for a layer that normalises over the batch."""
    layer = f"{name or 'the model itself'} ({module_type.__name__})"
    return (
        f"{layer} normalises over the batch, so a sample's gradient depends on the other samples. Put the layer in "
        "eval mode with running statistics (layer.eval()), or use GroupNorm instead"
    )
