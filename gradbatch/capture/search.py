"""Explain every use of every parameter: by a call of a layer, by a node of the graph, or through the shared region.

Calls that forward hooks recorded are tried first. What they leave open, and calls in whose outputs the samples cannot
be told apart, is explained by the nodes that consume the parameter. A consumer whose output is shared by the samples
joins the shared region, and its own consumers are asked instead, further and further up, until every edge that leads
into a parameter or into the region comes from a node whose output gradients are owned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import checks, graph, shared
from gradbatch.capture.absent import take_back_doubtful
from gradbatch.capture.checkpoints import in_front
from gradbatch.capture.explanation import Explanation
from gradbatch.capture.graph import Place
from gradbatch.capture.layouts import Owners
from gradbatch.capture.memory import Memory
from gradbatch.capture.nodes import Cut, site_of
from gradbatch.capture.owners import Differentiate, find_owners
from gradbatch.capture.passes import adjacent_tensors, is_hooked, maps_at, pruned_pass, roots_at
from gradbatch.capture.propagation import Run
from gradbatch.capture.reach import owners_by_reach
from gradbatch.capture.recollection import Recollection
from gradbatch.capture.samples import Samples
from gradbatch.capture.undisturbed import undisturbed
from gradbatch.capture.uses import Names, Use, find_uses
from gradbatch.errors import CoupledSamples
from gradbatch.rules import Layout, SampleLayout

EDGES_AT_ONCE = 256


def explain(
    outputs: Sequence[Tensor],
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    samples: Samples,
    names: Names,
    roots: Sequence[Tensor] = (),
    earlier: Sequence[Explanation] = (),
    memory: Memory | None = None,
    batch_dim: int = 0,
) -> Explanation:
    """Explain every use of every wanted parameter.

    Args:
        outputs: tensors that depend on them.
        cotangents: from weights of their rows to cotangents of ``outputs``.
        samples: which sample each row belongs to; without any there is nothing to explain.
        names: the wanted parameters.
        roots: further tensors whose graph is explained, although nothing is known to flow into them.
        earlier: explanations of forwards on whose results this one may be built.
        memory: what earlier steps found out; ``None``: everything is measured.
        batch_dim: axis of the outputs that runs over rows.

    Raises:
        CoupledSamples: samples are not independent of each other.
        UnsupportedLayer: a use that cannot be explained.
        StaleCapture: a tensor was changed since the forward.
    """
    watched = [*outputs, *roots]
    roots = list(map(in_front, watched))
    arguments = roots[: len(outputs)], cotangents, samples, names, roots, watched, earlier, memory, batch_dim
    search = _Search(*arguments)
    try:
        return search.run()
    except CoupledSamples:
        if search.recollection is None or not search.recollection.forget_shared():
            raise
    return _Search(*arguments).run()


class _Search:
    """The state of :func:`explain`."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        cotangents: Callable[[Tensor], Sequence[Tensor]],
        samples: Samples,
        names: Names,
        roots: Sequence[Tensor],
        watched: Sequence[Tensor],
        earlier: Sequence[Explanation],
        memory: Memory | None,
        batch_dim: int,
    ) -> None:
        self.outputs, self.cotangents, self.samples, self.names = outputs, cotangents, samples.count, names
        self.of_rows, self.batch_dim, self.watched = samples.of_rows, batch_dim, watched
        self.uses, self.walk = find_uses([graph.node_of(root) for root in roots], names)
        self.known = {edge for explanation in earlier for edge in explanation.edges}
        records = {use.record for explanation in earlier for use in explanation.uses}
        self.uses = [use for use in self.uses if use.record not in records]
        self.inner = {node for explanation in earlier for node in explanation.inner}
        self.roots: dict[Node, set[int]] = {}
        for root in roots:
            self.roots.setdefault(graph.node_of(root), set()).add(root.output_nr)
        self.numbers: dict[Node, list[int]] = {}
        self.owners: dict[Place, Owners | None] = {}
        self.gradients: dict[Place, Tensor | None] = {}
        self.layouts: dict[Use, Layout | None] = {}
        self.use_gradients: dict[Use, list[Tensor | None]] = {}
        self.forced: set[Node] = set()
        self.exponents: Tensor | None = None
        self.doubted = False
        self.has_ids = samples.ids is not None
        hooked = memory is None or is_hooked(chain(self.watched, adjacent_tensors(self.walk)))
        self.recollection = None if memory is None or hooked else self._recollection(memory)

    def _recollection(self, memory: Memory) -> Recollection | None:
        if self.has_ids or self.samples < 2:
            return None
        axis = self.batch_dim
        roots = {
            (graph.node_of(output), output.output_nr): Run(
                math.prod(output.shape[:axis]), math.prod(output.shape[axis + 1 :])
            )
            for output in self.outputs
        }
        return Recollection(memory, self.walk, self.samples, roots)

    @cached_property
    def implied(self) -> Recollection | None:
        """Where the operations say that the samples lie, remembered or not."""
        return self.recollection or self._recollection(Memory())

    @cached_property
    def relevant(self) -> set[Node]:
        """Nodes from which a wanted parameter is reached."""
        found: set[Node] = set()
        pending = list(self.walk.accumulators)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += [consumer for consumer, _ in self.walk.consumers[node]]
        return found

    # ---- the search

    def run(self) -> Explanation:
        """Ask, and let the region grow, until everything is owned."""
        if not self.samples:
            return self._empty()
        rounds = 0
        while True:
            region, entries = self._region()
            self._recall(entries)
            if self._drop(entries):
                continue
            uses = [use for use in self.uses if use not in self.layouts]
            asked = [node for node in entries if not self._is_tested(node)]
            if not uses and not asked:
                break
            self._test(uses, self._with_consumers(asked, 2**rounds - 1))
            rounds += 1
        cuts = [self._cut(node, slots) for node, slots in entries.items()]
        order = shared.order_of([node for node in self.walk.order() if node in region])
        self._check(order, cuts)
        if self.recollection is not None:
            self.recollection.store()
        return Explanation(
            self.uses,
            [layout for use in self.uses if (layout := self.layouts[use]) is not None],
            cuts,
            order,
            [self.use_gradients.get(use) for use in self.uses],
            [self._gradients_of(cut) for cut in cuts],
            self.walk,
        )

    def _check(self, region: Sequence[Node], cuts: Sequence[Cut]) -> None:
        """Refuse what is explained, but would be wrong."""
        checks.check_nodes([*region, *(cut.node for cut in cuts)], self.walk, self.names)
        edges = self.known.union(*(use.edges for use in self.uses))
        checks.check_earlier(self.inner, edges, self.walk, self.names)
        checks.check_calls(self.uses)
        if self.samples > 1 and not self.names.coupled:
            shared_ones = [
                g for (node, _), g in self.gradients.items() if node in self.forced and g is not None
            ]
            finite = all(bool(g.isfinite().all()) for g in shared_ones)
            border = {cut.node for cut in cuts}
            checks.check_region(region, border, self.samples, self.walk, self.names, finite, self.doubted)
            checks.check_statistics(cuts, self.walk, self.names)

    def _recall(self, entries: Mapping[Node, Sequence[int]]) -> None:
        """Take over what earlier steps found."""
        if self.recollection is None:
            return
        for use in self.uses:
            if use not in self.layouts:
                self.recollection.of_use(use, self.layouts)
        for place in [(node, number) for node in entries for number in self._outputs(node)]:
            if place not in self.owners:
                self.recollection.of_place(place, self.owners)

    def _drop(self, entries: Mapping[Node, Sequence[int]]) -> bool:
        """Leave calls to the node reader in which samples share elements, and grow the region by such nodes."""
        before = len(self.uses), len(self.forced)
        self.uses = [use for use in self.uses if self.layouts.get(use, self) is not None]
        self._force([node for node in entries if self._is_tested(node) and self._is_mixed(node)])
        return (len(self.uses), len(self.forced)) != before

    def _gradients_of(self, cut: Cut) -> dict[int, Tensor | None] | None:
        places = {number: (cut.node, number) for number in cut.owners}
        if any(place not in self.gradients for place in places.values()):
            return None
        return {number: self.gradients[place] for number, place in places.items()}

    def _empty(self) -> Explanation:
        """Without samples nothing can be measured, and nothing needs to be."""
        region, entries = self._region()
        cuts = [
            Cut(node, tuple(slots), {}, checks.layer_of(node, self.walk, self.names))
            for node, slots in entries.items()
        ]
        gradients: list[list[Tensor | None]] = [[None] * len(use.anchors) for use in self.uses]
        layouts = [SampleLayout(0) for _ in self.uses]
        order = shared.order_of([node for node in self.walk.order() if node in region])
        return Explanation(self.uses, [*layouts], cuts, order, [*gradients], [{} for _ in cuts], self.walk)

    def _cut(self, node: Node, slots: Sequence[int]) -> Cut:
        owners = {n: found for n in self._outputs(node) if (found := self.owners[node, n]) is not None}
        assert len(owners) == len(self._outputs(node)), "a node with an output that nobody owns is no cut"
        return Cut(node, tuple(slots), owners, checks.layer_of(node, self.walk, self.names))

    def _region(self) -> tuple[set[Node], dict[Node, list[int]]]:
        """The shared region as far as it is known, and the nodes outside that consume a parameter or a value of it."""
        claimed = set(self.known).union(*(use.edges for use in self.uses))
        region = set(self.forced)
        # What was forced into the region may depend on data, if samples are coupled; what is computed from it too.
        certain: set[Node] = set(self.walk.accumulators)
        entries: dict[Node, list[int]] = {}
        pending: list[Node] = [*self.walk.accumulators, *region]
        visited: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in visited:
                continue
            visited.add(node)
            for edge in self.walk.consumers[node]:
                consumer, slot = edge
                if edge in claimed or consumer in region:
                    continue
                entries.setdefault(consumer, []).append(slot)
                # Losses and outputs are where the samples are told apart, even if they come from parameters alone.
                if consumer not in self.roots and shared.grows_by_structure(consumer, certain):
                    region.add(consumer)
                    certain.add(consumer)
                    pending.append(consumer)
        return region, {node: sorted(set(slots)) for node, slots in entries.items() if node not in region}

    def _outputs(self, node: Node) -> list[int]:
        """Which of a node's outputs something is computed from, or is a loss."""
        found = self.numbers.get(node)
        if found is None:
            used = {graph.below(consumer)[slot][1] for consumer, slot in self.walk.consumers[node]}
            found = self.numbers[node] = sorted(used | self.roots.get(node, set()))
        return found

    def _is_tested(self, node: Node) -> bool:
        return all((node, number) in self.owners for number in self._outputs(node))

    def _is_mixed(self, node: Node) -> bool:
        return any(self.owners[node, number] is None for number in self._outputs(node))

    def _with_consumers(self, nodes: Sequence[Node], levels: int) -> list[Node]:
        """Nodes, and those above them that may be asked next: a pass costs the same for many as for one."""
        found, level = dict.fromkeys(nodes), list(nodes)
        for _ in range(levels):
            level = [consumer for node in level for consumer, _ in self.walk.consumers[node]]
            level = [node for node in dict.fromkeys(level) if node not in found and not self._is_tested(node)]
            if len(found) + len(level) > EDGES_AT_ONCE:
                break
            found.update(dict.fromkeys(level))
        return list(found)

    def _test(self, uses: Sequence[Use], nodes: Sequence[Node]) -> None:
        """Measure who owns the outputs of calls and nodes."""
        places = [(node, number) for node in nodes for number in self._outputs(node)]
        sites = [use.site for use in uses] + [site_of(node, number) for node, number in places]
        every = {place for use in uses for place in use.places}.union(places)
        dtypes = {graph.outputs(node)[number][1] for node, number in every}
        like = self.outputs[0].detach()
        with self._untouched():
            differentiate = self._pass_to(uses, places)
            numbers = self.of_rows(torch.arange(self.samples, device="cpu"))
            roots = roots_at(self.outputs, numbers, self.batch_dim)
            follow = partial(maps_at, partial(self._follow, roots), uses, places)
            found = find_owners(differentiate, sites, self.samples, like, dtypes, self.exponents, follow)
            if self.samples > 1 and not self.names.coupled:
                arguments = uses, places, self.walk, roots, numbers, lambda: self.implied
                self.doubted |= take_back_doubtful(found, *arguments)
        self.exponents = found.exponents
        results = list(zip(found.owners, found.certain, found.gradients, found.lasting, strict=True))
        for use, (owners, certain, gradients, lasting) in zip(uses, results, strict=False):
            self.layouts[use] = layout = use.layout(owners)
            self.use_gradients[use] = list(gradients)
            if self.recollection is not None and lasting:
                self.recollection.note_use(use, layout, certain)
        for place, (owners, certain, gradients, lasting) in zip(places, results[len(uses) :], strict=True):
            self.owners[place], self.gradients[place] = owners, gradients[0]
            if self.recollection is not None and lasting:
                self.recollection.note_place(place, owners, certain)

    def _follow(self, roots: Mapping[Place, Tensor], places: Collection[Place]) -> dict[Place, Tensor]:
        certain = {} if self.implied is None else self.implied.certain
        return owners_by_reach(self.walk, self.samples, certain, roots, places)

    def _pass_to(self, uses: Sequence[Use], places: Sequence[Place]) -> Differentiate:
        return pruned_pass(
            self.outputs,
            lambda weights: self.cotangents(self.of_rows(weights)),
            uses,
            places,
            self.walk,
            self.names,
        )

    def _untouched(self) -> AbstractContextManager[None]:
        return undisturbed(chain(self.watched, adjacent_tensors(self.walk)), self.names)

    def _force(self, mixed: Sequence[Node]) -> None:
        """Take shared nodes into the region, with everything below them that leads to a parameter."""
        pending = list(mixed)
        while pending:
            node = pending.pop()
            if node in self.forced or node in self.walk.accumulators:
                continue
            self.forced.add(node)
            pending += [
                below for below, _ in graph.below(node) if below is not None and below in self.relevant
            ]
            # What consumes it is asked next, and has been already, or will be.
            above = {consumer for consumer, _ in self.walk.consumers[node]}
            pending += [
                consumer for consumer in above if self._is_tested(consumer) and self._is_mixed(consumer)
            ]
        # A call must not hide a path into the region, at its outputs or inside of it.
        self.uses = [use for use in self.uses if self.forced.isdisjoint(use.nodes)]
