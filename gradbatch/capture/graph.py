"""The autograd graph as a tape: walk it, and find every use of every parameter.

This file, ``reentrant.py`` and ``roots.py`` are the only ones of the package that touch what torch does not document
(besides ``node.next_functions`` and ``node.metadata``, which it does); each such access is one function, tested against
the running torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils import checkpoint

METADATA_KEY = "gradbatch"
UNFOLDED_KEY = "gradbatch unfolded"
CHECKPOINT = checkpoint.CheckpointFunction._backward_cls
Result = TypeVar("Result")

Place = tuple[Node, int]
"""A node and the number of one of its outputs."""

Edge = tuple[Node, int]
"""A consumer and the index among its ``next_functions``: the way a gradient takes down the graph."""


def is_being_traced() -> bool:
    """Whether ``torch.compile`` or ``torch.jit.trace`` is recording what is executed."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def packs_saved_tensors() -> bool:
    """Whether what autograd saves now is packed away: recomputed by activation checkpointing, or moved off the device.

    Older torch does not tell; then it is taken not to be.
    """
    look = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return look is not None and look(False) is not None


def is_transformed(tensor: Tensor) -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, …) is at work on the tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def current_pass() -> int:
    """Identity of the backward pass that is running in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def pass_keeps_graph() -> bool:
    """Whether the running backward pass was started with ``retain_graph`` or ``create_graph``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def node_of(tensor: Tensor) -> Node:
    """The node that computes a tensor with a graph."""
    node: Node | None = tensor.grad_fn
    assert node is not None
    return node


def notes(node: Node) -> list[Any]:
    """What gradbatch keeps on a node; it lives and dies with it."""
    return cast("dict[str, list[Any]]", node.metadata).setdefault(METADATA_KEY, [])


def is_compiled(node: Node) -> bool:
    """Whether the node is the backward of a graph that ``torch.compile`` made."""
    return "CompiledFunction" in node.name()


def output_edge(tensor: Tensor) -> tuple[Node, int] | None:
    """The node and output number that compute a tensor; ``None`` for a leaf."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def accumulated_variable(node: Node) -> Tensor | None:
    """The leaf into whose ``.grad`` the node accumulates; ``None`` for any other node."""
    if node.name() != "torch::autograd::AccumulateGrad":
        return None
    variable: Tensor = node.variable  # type: ignore[attr-defined]
    return variable


def kind(node: Node) -> str:
    """What a node computes the gradient of, without the number that torch appends: ``MmBackward``.

    A Python ``Function`` that somebody called ``Mm`` is none of torch's operations: ``Function MmBackward``.
    """
    return _kind(type(node))


@cache
def _kind(node_type: type) -> str:
    name = node_type.__name__
    return f"Function {name}" if issubclass(node_type, BackwardCFunction) else name.rstrip("0123456789")


def saved(node: Node, name: str) -> Any:
    """What a node of C++ saved in the forward under a name; a checkpointed region is run again to get it.

    Raises:
        AttributeError: this version of torch keeps nothing under that name.
        RuntimeError: it was freed, or modified in place.
    """
    return _read(node, f"_saved_{name}")


def saved_names(node: Node) -> list[str]:
    """Names under which a node of C++ keeps something; empty for a Python ``Function``."""
    return [name.removeprefix("_saved_") for name in dir(node) if name.startswith("_saved_")]


def saved_by_function(node: Node) -> list[Tensor]:
    """What a Python ``Function`` saved in its forward; empty for a node of C++."""
    kept = _read(node, "saved_tensors") if hasattr(type(node), "saved_tensors") else ()
    return [tensor for tensor in kept if isinstance(tensor, Tensor)]


def _read(node: Node, attribute: str) -> Any:
    kept = getattr(node, attribute)
    if _holds_leaf(kept):
        kept = _with_stand_ins(kept)
        put_hooks_on_again(node)
    return kept


def _holds_leaf(kept: Any) -> bool:
    if isinstance(kept, (tuple, list)):
        return any(map(_holds_leaf, kept))
    return isinstance(kept, Tensor) and kept.requires_grad and kept.is_leaf


def _with_stand_ins(kept: Any) -> Any:
    """What a node saved, with other tensors in place of leaves."""
    if isinstance(kept, (tuple, list)):
        return tuple(map(_with_stand_ins, kept))
    return kept.detach().requires_grad_() if _holds_leaf(kept) else kept


def put_hooks_on_again(node: Node) -> None:
    """Undo what older torch (2.6) does when a leaf that saved-tensor hooks have unpacked goes: it loses its hooks."""
    for source, _ in node.next_functions:
        leaf = None if source is None else accumulated_variable(source)
        if leaf is not None and leaf._backward_hooks is not None:
            leaf._backward_hooks = leaf._backward_hooks


def outputs(node: Node) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of what a node computes, and so of the gradients that it takes."""
    return [(torch.Size(entry.shape), entry.dtype) for entry in node._input_metadata]


def shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Shapes of what a node computes, read faster."""
    return tuple([tuple(entry.shape) for entry in node._input_metadata])


def device(node: Node, number: int) -> torch.device:
    """Where an output of a node is."""
    return torch.device(node._input_metadata[number].device)


def input_shape(node: Node, slot: int) -> torch.Size:
    """Shape of an input of a node."""
    return _input(node, slot)[0]


def is_complex(node: Node, slot: int) -> bool:
    """Whether an input of a node is complex."""
    return _input(node, slot)[1].is_complex


def _input(node: Node, slot: int) -> tuple[torch.Size, torch.dtype]:
    source, number = below(node)[slot]
    assert source is not None
    return outputs(source)[number]


def in_a_pass_of_its_own(function: Callable[[], Result]) -> Result:
    """Run something that reads saved tensors, during somebody else's backward pass.

    A region under activation checkpointing is run again once a pass, and gives out each tensor once. And a node that is
    called within a pass computes only what that pass needs; this one needs everything.
    """
    results: list[Result] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True, device="cpu")
        end = start * 1
    end.register_hook(lambda _: results.append(function()))
    # Kept, or nodes that see to it themselves would let go of what they saved.
    torch.autograd.backward(end, retain_graph=True)
    return results[0]


def is_function(node: Node) -> bool:
    """Whether the node is the backward of a ``torch.autograd.Function`` written in Python."""
    return hasattr(node, "apply")


def apply(node: Node, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Call a node by itself, without hooks: from gradients of its outputs to gradients of its inputs.

    What the engine does behind a node is left out: the results may still have to be summed to their inputs' shapes.
    """
    call: Any = node
    result = call.apply(*_all_given(node, gradients)) if is_function(node) else call(*gradients)
    return result if isinstance(result, tuple) else (result,)


def _all_given(node: Node, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients with zeros for those that are ``None``, which a Python ``Function`` does not take."""
    like = next(g for g in gradients if g is not None)
    return [
        torch.zeros(shape, dtype=dtype, device=like.device) if g is None else g
        for g, (shape, dtype) in zip(gradients, outputs(node), strict=True)
    ]


def apply_with(
    node: Node, gradients: Sequence[Tensor | None], change: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, ...]:
    """Call a Python ``Function``'s backward as :func:`apply` does, with what its forward saved changed."""
    function: Any = node
    kept = [None if tensor is None else change(tensor) for tensor in function.saved_tensors]
    result = type(function)._forward_cls.backward(_Context(node, kept), *_all_given(node, gradients))
    return result if isinstance(result, tuple) else (result,)


class _Context:
    """The context of a ``Function``, with other saved tensors."""

    def __init__(self, node: Node, saved: Sequence[Any]) -> None:
        self._node, self.saved_tensors = node, tuple(saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def runs_its_own_backward(node: Node) -> bool:
    """Whether the node reaches parameters behind the graph's back, as other libraries' checkpointing does."""
    return type(node).__name__ == "CheckpointFunctionBackward" and not is_checkpoint(node)


def is_checkpoint(node: Node) -> bool:
    """Whether the node is a region under torch's reentrant activation checkpointing."""
    return type(node) is CHECKPOINT


@dataclass(eq=False)
class Unfolded:
    """A region under reentrant activation checkpointing, run again as a part of the graph.

    Args:
        outputs: what it computes, by output of its node; ``None`` where that has no graph.
        inputs: the nodes by which it hangs on the graph below, with the place of each in ``next_functions``.
        arguments: number of the function's arguments.
        places: of the tensors among them.
        recall: computes what its nodes saved again, and holds it.
        forget: lets go of that.
    """

    outputs: Sequence[Tensor | None]
    inputs: dict[Node, int]
    arguments: int
    places: Sequence[int]
    recall: Callable[[], object]
    forget: Callable[[], None]

    @property
    def edges(self) -> list[tuple[Node | None, int]]:
        """Where the gradients of its outputs go."""
        return [(None, 0) if o is None else (node_of(o), o.output_nr) for o in self.outputs]


def unfolded(node: Node) -> Unfolded | None:
    """What a checkpoint was unfolded to, as long as a walk keeps it."""
    found: Unfolded | None = cast("dict[str, Any]", node.metadata).get(UNFOLDED_KEY, lambda: None)()
    return found


def below(node: Node) -> Sequence[tuple[Node | None, int]]:
    """Where the gradients of a node's inputs go: ``next_functions``, and into checkpoints that are unfolded."""
    edges: Sequence[tuple[Node | None, int]] = node.next_functions
    for source, _ in edges:
        if type(source) is CHECKPOINT:
            return [_into(*edge) for edge in edges]
    return edges


def _into(source: Node | None, number: int) -> tuple[Node | None, int]:
    while source is not None and is_checkpoint(source) and (region := unfolded(source)) is not None:
        source, number = region.edges[number]
    return source, number


def has_foreign_hooks(node: Node) -> bool:
    """Whether somebody else than gradbatch put hooks on the node, which may change the gradients that pass it."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref() or {}  # all hooks on the node
        handle.remove()
        for hook in hooks.values():
            if not getattr(hook, "__module__", "").startswith("gradbatch."):
                return True
    return False


def put_first(leaf: Tensor, hook: int) -> None:
    """Let a hook on a leaf see the gradient before all other hooks, which may change it on its way to ``.grad``."""
    hooks: Any = leaf._backward_hooks
    others = {key: value for key, value in hooks.items() if key != hook}
    first = hooks[hook]
    # Inserted anew: torch goes by the order of insertion, which OrderedDict.move_to_end does not change.
    hooks.clear()
    hooks[hook] = first
    hooks.update(others)


@dataclass
class Walk:
    """What lies below some tensors in the autograd graph.

    Args:
        consumers: for each node, the edges that lead into it.
        accumulators: the nodes that accumulate into a wanted parameter, with the parameter.
        notes: what forward hooks left on the nodes, per node that has something.
        structure: types of the nodes and which of them their edges lead to, by their place in :meth:`order`: equal for
            two graphs that the same operations made.
        checkpoints: what the regions under reentrant activation checkpointing consist of, each before those inside it.
        frames: the innermost of these that a node lies in; none for the nodes outside.
    """

    consumers: dict[Node, list[Edge]] = field(default_factory=dict)
    accumulators: dict[Node, nn.Parameter] = field(default_factory=dict)
    notes: dict[Node, list[Any]] = field(default_factory=dict)
    structure: list[Any] = field(default_factory=list)
    checkpoints: dict[Node, Unfolded] = field(default_factory=dict)
    frames: dict[Node, Node] = field(default_factory=dict)

    def order(self) -> Iterable[Node]:
        """The nodes in the order in which the walk met them."""
        return self.consumers.keys()
