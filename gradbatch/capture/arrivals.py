"""Arrivals: what reaches a parameter must be what the walk explained, and nothing else.

Where the backward is the user's, the walk ends at the model's outputs. What the user does with parameters outside of
the forward (a penalty in the loss, a second use of a weight) is not on it. So every gradient that arrives at a
parameter, or at an intermediate that leads to one, is compared with the sum of those that the explained edges sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.errors import UnsupportedLayer, UsageError

END = "use gradbatch.backward(model, losses, ...) with one loss a sample"
"""What every message about an arrival ends with; a description that does is a whole message."""

Place = tuple[Node | int, int]
"""A node, or the identity of a parameter, and which of its outputs a gradient arrives at."""


class Arrivals:
    """Hooks that compare what is sent along explained edges with what arrives where they lead.

    Attributes:
        violation: the first arrival from somewhere else; raised at the end, so that the user's backward is not cut off.
        reached: for each backward pass, the identities of the parameters it reached.
    """

    def __init__(self) -> None:
        self.violation: UnsupportedLayer | None = None
        self.reached: dict[int, set[int]] = defaultdict(set)
        self._sent: dict[int, dict[Place, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._watched: set[Node | int] = set()
        self._expected: set[graph.Edge] = set()
        self._handles: list[Any] = []
        self._checkpoints: set[Node] = set()
        # Passes that are inside a checkpoint, whose parameters get their gradients from a pass in the pass.
        self._inside: list[int] = []

    def close(self) -> None:
        """Take all hooks off and let go of everything."""
        for handle in self._handles:
            handle.remove()
        self.__init__()  # type: ignore[misc]

    def expect(self, target: Node, consumers: Sequence[graph.Edge]) -> None:
        """Note what the explained consumers of a node send to it."""
        variable = graph.accumulated_variable(target)
        for consumer, slot in set(consumers) - self._expected:
            place = (target if variable is None else id(variable), consumer.next_functions[slot][1])

            def send(sent: tuple[Tensor | None, ...], _: Any, slot: int = slot, place: Place = place) -> None:
                gradient = sent[slot]
                if gradient is not None:
                    self._sent[graph.current_pass()][place].append(gradient)

            self._expected.add((consumer, slot))
            self._handles.append(consumer.register_hook(send))

    def expect_inside(self, node: Node) -> None:
        """Expect whatever arrives while a checkpoint is gone through: only what it runs again can send it."""

        def enter(_: Any) -> None:
            self._inside.append(graph.current_pass())

        def leave(*_: Any) -> None:
            self._inside.pop()

        if node not in self._checkpoints:
            self._checkpoints.add(node)
            self._handles += [node.register_prehook(enter), node.register_hook(leave)]

    def check_over(self) -> None:
        """Refuse a backward pass that broke off inside a checkpoint (:class:`UsageError`)."""
        if self._inside:
            raise UsageError(
                "compute: a backward pass failed inside of a checkpointed region; leave the context when one fails"
            )

    def check_inside(self, target: Node, description: str, only: int | None = None) -> None:
        """Watch an intermediate; ``only`` one output of it, where nothing is known of the others."""

        def arrive(grads: tuple[Tensor | None, ...]) -> None:
            for output, arrived in enumerate(grads):
                if only is None or output == only:
                    self._compare((target, output), arrived, description)

        if target not in self._watched:
            self._watched.add(target)
            self._handles.append(target.register_prehook(arrive))

    def check_leaf(self, parameter: nn.Parameter, path: str) -> None:
        """Watch a parameter."""

        def arrive(arrived: Tensor) -> None:
            if self._inside and graph.current_pass() != self._inside[-1]:
                self.reached[self._inside[-1]].add(id(parameter))
                return
            self.reached[graph.current_pass()].add(id(parameter))
            self._compare((id(parameter), 0), arrived, path)

        if id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            handle = parameter.register_hook(arrive)
            graph.put_first(parameter, handle.id)
            self._handles.append(handle)

    def _compare(self, place: Place, arrived: Tensor | None, description: str) -> None:
        """Compare what arrives somewhere with what the explained consumers sent."""
        sent = self._sent[graph.current_pass()].pop(place, [])
        if arrived is not None and not _is_sum(arrived, sent) and self.violation is None:
            self.violation = UnsupportedLayer(
                description
                if description.endswith(END)
                else f"{description} receives a gradient from outside of the model's forward, such as a penalty in the "
                "loss or a second use of a weight, and no sample owns it. Run the backward pass of a penalty outside "
                f"of the context, call the model's layers inside its forward, or {END}"
            )


def _is_sum(arrived: Tensor, sent: Sequence[Tensor]) -> bool:
    """Whether a gradient is what was sent, or the sum of it up to the order of addition."""
    if len(sent) == 1 and arrived is sent[0]:
        return True
    if not sent:
        # Behind a reentrant checkpoint that hands nothing on, torch goes on with zeros.
        return not arrived.any()
    if any(s.shape != arrived.shape for s in sent):
        return False
    arrived, *sent = ((t.to_dense() if t.is_sparse else t).detach() for t in (arrived, *sent))
    total = sum(sent[1:], sent[0])
    size = sum((s.abs() for s in sent[1:]), sent[0].abs())
    allowed = 8 * torch.finfo(arrived.dtype).eps * size
    close = ((arrived - total).abs() <= allowed) | ((arrived == total) | (arrived.isnan() & total.isnan()))
    return bool(close.all())
