"""Pruned backward passes: the gradients at the outputs of calls and nodes, and nothing below them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident

from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph, packed, paths
from gradbatch.capture.graph import Place
from gradbatch.capture.owners import Differentiate, Take
from gradbatch.capture.records import PACKED
from gradbatch.capture.undisturbed import readable
from gradbatch.capture.uses import Names, Use

Arrived = Mapping[Place, Tensor | None]
Evaluate = Callable[[Arrived], None]
"""Evaluates a call or a cut, from the gradients at its places."""


def pruned_pass(
    outputs: Sequence[Tensor],
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    uses: Sequence[Use],
    places: Sequence[Place],
    walk: graph.Walk,
    names: Names,
) -> Differentiate:
    """A function that runs such a pass, from weights of the samples to the gradients.

    Args:
        outputs: where the pass starts.
        cotangents: from the weights to cotangents of ``outputs``.
        uses: calls, whose gradients come as their rules take them; these come first.
        places: outputs of nodes, whose gradients come as they are.
        walk: the graph.
        names: the layers.
    """

    sites = [*((use, use.places) for use in uses), *((None, [place]) for place in places)]

    def run(weights: Tensor, take: Take) -> None:
        pending = [(site[1], _handing_on(take, number, *site)) for number, site in enumerate(sites)]
        PrunedPass(walk, names, pending).run(outputs, cotangents(weights), keep_graph=True)

    return run


def _handing_on(take: Take, number: int, use: Use | None, places: Sequence[Place]) -> Evaluate:
    def evaluate(arrived: Arrived) -> None:
        gradients = [strided(arrived[place]) for place in places]
        take(number, gradients if use is None else [use.output_gradient(*g) for g in enumerate(gradients)])

    return evaluate


class PrunedPass:
    """A backward pass that evaluates calls and cuts on its way, and goes no further than it must.

    Args:
        walk: the graph.
        names: the layers.
        pending: what is to be evaluated, with the places whose gradients it needs.
    """

    def __init__(
        self, walk: graph.Walk, names: Names, pending: Sequence[tuple[list[Place], Evaluate]]
    ) -> None:
        self._walk, self._names = walk, names
        self._passed: list[tuple[Node, list[Place], Evaluate]] = []
        self._collected: list[tuple[list[Place], Evaluate]] = []
        self._error: Exception | None = None
        self._reached: set[Node] = set()
        self._is_packed = is_packed(walk)
        # The node that the engine went through last, on each of its threads.
        self._last: dict[int, Node] = {}
        # Through a checkpoint the engine does not come by itself.
        nodes = {node for places, _ in pending for node, _ in places}
        above = set() if walk.checkpoints else paths.above(nodes, walk)
        for places, evaluate in pending:
            node, *others = {node for node, _ in places}
            if not others and node in above:
                self._passed.append((node, places, evaluate))
            else:
                self._collected.append((places, evaluate))

    def run(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], keep_graph: bool) -> None:
        """Run the pass, and evaluate everything.

        Args:
            outputs: where it starts.
            cotangents: of ``outputs``.
            keep_graph: whether what autograd saved is kept.
        """
        edges = list(dict.fromkeys(place for places, _ in self._collected for place in places))
        handles = [
            node.register_prehook(self._hook(node, places, evaluate))
            for node, places, evaluate in self._passed
        ]
        failure = None
        try:
            with readable("the model's graph", lambda: changed(self._walk, self._names)):
                found = checkpoints.differentiate(outputs, cotangents, edges, self._walk, keep_graph)
        except Exception as error:
            # What went wrong in a hook, rather than what the engine makes of it.
            failure = self._error or error
        finally:
            for handle in handles:
                handle.remove()
        if failure is not None:
            raise failure
        for node, places, evaluate in self._passed:
            if node not in self._reached:  # it leads to outputs alone that the pass does not start from
                evaluate(dict.fromkeys(places))
        arrived = dict(zip(edges, found, strict=True))
        del found
        # From the first to the last use of each gradient, which goes then.
        last = {place: i for i, (places, _) in enumerate(self._collected) for place in places}
        for i, (places, evaluate) in enumerate(self._collected):
            evaluate({place: arrived[place] for place in places})
            for place in places:
                if last[place] == i:
                    arrived.pop(place, None)

    def _hook(
        self, node: Node, places: Sequence[Place], evaluate: Evaluate
    ) -> Callable[[Sequence[Tensor | None]], None]:
        def take(gradients: Sequence[Tensor | None]) -> None:
            self._reached.add(node)
            if self._is_packed:
                before = self._last.get(get_ident(), node)
                self._last[get_ident()] = node
                if before is not node:
                    packed.let_go(before)
            try:
                evaluate({(node, number): gradients[number] for node, number in places})
            except Exception as error:
                self._error = self._error or error
                raise

        return take


def is_packed(walk: graph.Walk) -> bool:
    """Whether there are layers in the graph whose saved tensors are computed or fetched when they are read."""
    return any(record.refusal == PACKED for notes in walk.notes.values() for record, _ in notes)


def roots_at(outputs: Sequence[Tensor], numbers: Tensor, axis: int) -> dict[Place, Tensor]:
    """The sample of each element of the tensors where such a pass starts.

    Args:
        outputs: the tensors.
        numbers: the samples of their rows.
        axis: of the rows.
    """
    return {
        (graph.node_of(output), output.output_nr): numbers.to(output.device)
        .view(-1, *(1,) * (output.dim() - axis - 1))
        .expand(output.shape)
        for output in outputs
    }


def maps_at(
    follow: Callable[[set[Place]], Mapping[Place, Tensor]], uses: Sequence[Use], places: Sequence[Place]
) -> list[list[Tensor | None]]:
    """Whose the elements of the gradients are that such a pass finds, by the operations alone.

    Args:
        follow: finds maps of the outputs of nodes.
        uses: calls.
        places: outputs of nodes.

    Returns:
        Maps in the shapes of the gradients; ``None`` where nothing arrives.
    """
    found = follow({place for use in uses for place in use.places}.union(places))
    # Where an arrangement fills up with zeros there is nobody.
    arranged = _as_taken({place: owner + 1.0 for place, owner in found.items()}, uses, places)
    return [[None if owner is None else owner.long() - 1 for owner in outputs] for outputs in arranged]


def _as_taken(
    arrived: Mapping[Place, Tensor | None], uses: Sequence[Use], places: Sequence[Place]
) -> list[list[Tensor | None]]:
    """Gradients at calls, as their rules take them, and at the outputs of nodes, as they are."""
    of_uses = [[use.output_gradient(i, arrived.get(p)) for i, p in enumerate(use.places)] for use in uses]
    return of_uses + [[arrived.get(place)] for place in places]


def adjacent_tensors(walk: graph.Walk) -> Iterator[Tensor]:
    """The user's own tensors that went into recorded calls or came out of them, as long as they live."""
    for record in {record: None for notes in walk.notes.values() for record, _ in notes}:
        for reference in record.adjacent:
            tensor = reference()
            if tensor is not None:
                yield tensor


def is_hooked(tensors: Iterable[Tensor]) -> bool:
    """Whether the user put hooks on some of these, which may do something else with the gradient in every step.

    Those of torch's own (``fully_shard``, ``register_multi_grad_hook``) look at gradients and leave them as they are.
    """
    hooks = [hook for tensor in tensors for hook in (tensor._backward_hooks or {}).values()]
    return not all(getattr(hook, "__module__", "").startswith(("torch.", "gradbatch.")) for hook in hooks)


def changed(walk: graph.Walk, names: Names) -> list[str]:
    """The parameters of recorded calls that were changed in place since the forward."""
    records = {record: None for notes in walk.notes.values() for record, _ in notes}
    found = [
        f"{path}.{attribute}" if (path := names.modules.get(record.module)) else attribute
        for record in records
        for attribute in record.changed_parameters()
    ]
    return list(dict.fromkeys(found))


def strided(gradient: Tensor | None) -> Tensor | None:
    """A gradient that is not sparse."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
