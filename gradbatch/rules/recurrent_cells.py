r"""What one direction of a recurrent layer computes, and its backward, written out for each kind of cell.

A step multiplies its input and the hidden state before it with weights, and makes the next state of these gates,

.. math:: a_t = W x_t + b + U h_{t-1} + b', \qquad h_t = \phi(a_t, \text{state}_{t-1}).

The gradient :math:`\gamma_t` of a hidden state gives those of the gates, :math:`\delta_t`, and these the gradient of
the hidden state before, :math:`\gamma_{t-1} \mathrel{+}= U^\top \delta_t`. All that :math:`\gamma_t` is multiplied with
on the way does not depend on it, and is computed for many steps at once. So is :math:`a_t`, where the hidden states are
known. What is left of the backward is a recursion with one product of matrices a step.

Tensors have the steps first, ``[T, B, *]``; those of a single step are ``[B, *]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""The hidden state, ``[B, H]``, and an LSTM's memory."""


@dataclass(frozen=True)
class Trace:
    """What a direction computed.

    Args:
        kind: of cell.
        gates: behind their nonlinearity, ``[T, B, G]``.
        hidden_gates: the hidden state's part of them before it, where that is told apart.
        hidden: the hidden states before the first step and after each, ``[T + 1, B, H]``.
        memory: the same of an LSTM's memory.
        squashed: tanh of it after each step, ``[T, B, H]``.
    """

    kind: type[Steps]
    gates: Tensor
    hidden_gates: Tensor
    hidden: Tensor
    memory: Tensor | None = None
    squashed: Tensor | None = None

    @property
    def unprojected(self) -> Tensor:
        """The hidden states of an LSTM after each step, before their projection, ``[T, B, H]``."""
        assert self.squashed is not None
        return self.gates.chunk(4, -1)[3] * self.squashed


class Steps(ABC):
    """Some consecutive steps on the way back.

    Args:
        trace: of all steps.
        first, last: the steps ``first <= t < last``.

    Attributes:
        hidden_deltas: gradients of the hidden state's part of the gates, once all steps went back, ``[S, B, G]``.
    """

    splits_gates = False
    """Whether input and hidden state have gates of their own, and do not just add up."""
    shows_gates = False
    """Whether the hidden states are the gates behind their nonlinearity."""

    hidden_deltas: Tensor

    @abstractmethod
    def __init__(self, trace: Trace, first: int, last: int) -> None: ...

    @staticmethod
    @abstractmethod
    def activate(gates: Tensor, hidden_gates: Tensor) -> None:
        """Put ``gates`` behind their nonlinearity, in place."""

    @staticmethod
    @abstractmethod
    def advance(gates: Tensor, state: State) -> State:
        """The state after a step, by its gates behind their nonlinearity and the state before."""

    @abstractmethod
    def back(self, step: int, grad: Tensor, memory_grad: Tensor, before: Tensor | None) -> None:
        """Go one step back; the last step first.

        Args:
            step: number of the step among these.
            grad: gradient of the hidden state after it, ``[B, H]``.
            memory_grad: gradient of the memory after it, to be turned into that before it; of an LSTM only.
            before: gradient of the hidden state before it, to which is added what does not come through the gates.
        """

    @property
    def input_deltas(self) -> Tensor:
        """Gradients of the input's part of the gates, once all steps went back, ``[S, B, G]``."""
        return self.hidden_deltas


# ---------------------------------------------------------------------- kinds of cells


class _Elman(Steps):
    r""":math:`h_t = \phi(a_t)` and :math:`\delta_t = \gamma_t\, \phi'(a_t)`."""

    shows_gates = True

    def __init__(self, trace: Trace, first: int, last: int) -> None:
        self.hidden_deltas = self.slope(trace.gates[first:last].contiguous())
        self._deltas = self.hidden_deltas.unbind(0)

    @staticmethod
    @abstractmethod
    def slope(hidden: Tensor) -> Tensor:
        r""":math:`\phi'` where :math:`\phi` is ``hidden``."""

    @staticmethod
    def advance(gates: Tensor, state: State) -> State:
        return (gates,)

    def back(self, step: int, grad: Tensor, memory_grad: Tensor, before: Tensor | None) -> None:
        self._deltas[step].mul_(grad)


class Tanh(_Elman):
    r""":math:`\phi = \tanh`, :math:`\phi' = 1 - h_t^2`."""

    @staticmethod
    def activate(gates: Tensor, hidden_gates: Tensor) -> None:
        gates.tanh_()

    @staticmethod
    def slope(hidden: Tensor) -> Tensor:
        return 1 - hidden.square()


class Relu(_Elman):
    r""":math:`\phi = \max(\cdot, 0)`, :math:`\phi' = [h_t > 0]`, or 1 if it is NaN, which must not get lost."""

    @staticmethod
    def activate(gates: Tensor, hidden_gates: Tensor) -> None:
        gates.relu_()

    @staticmethod
    def slope(hidden: Tensor) -> Tensor:
        return (hidden <= 0).logical_not().to(hidden.dtype)


class LSTM(Steps):
    r"""Input, forget and output gate :math:`i, f, o` behind a logistic function, and :math:`g` behind tanh.

    .. math:: c_t = f c_{t-1} + i g, \qquad h_t = o \tanh c_t

    .. math:: \mu_t = f_{t+1} \mu_{t+1} + \gamma_t\, o\, (1 - \tanh^2 c_t)

    .. math:: \delta^i = \mu g\, i (1 - i), \quad \delta^f = \mu c_{t-1} f (1 - f), \quad
        \delta^g = \mu i (1 - g^2), \quad \delta^o = \gamma \tanh(c_t)\, o (1 - o)
    """

    def __init__(self, trace: Trace, first: int, last: int) -> None:
        assert trace.memory is not None and trace.squashed is not None
        gates, squashed = trace.gates[first:last], trace.squashed[first:last]
        i, f, g, o = gates.chunk(4, -1)
        hidden, written, kept = o * squashed, i * g, trace.memory[first:last] * f
        self.hidden_deltas = torch.empty_like(gates)
        by_i, by_f, by_g, by_o = self.hidden_deltas.chunk(4, -1)
        torch.addcmul(written, written, i, value=-1, out=by_i)
        torch.addcmul(kept, kept, f, value=-1, out=by_f)
        torch.addcmul(i, written, g, value=-1, out=by_g)
        torch.addcmul(hidden, hidden, o, value=-1, out=by_o)
        self._slopes = torch.addcmul(o, hidden, squashed, value=-1).unbind(0)
        self._forget, self._through_output = f.unbind(0), by_o.unbind(0)
        self._through_memory = self.hidden_deltas.unflatten(-1, (4, -1))[:, :, :3].unbind(0)

    @staticmethod
    def activate(gates: Tensor, hidden_gates: Tensor) -> None:
        size = gates.shape[-1] // 4
        both, g, o = gates.split_with_sizes([2 * size, size, size], -1)
        both.sigmoid_()
        g.tanh_()
        o.sigmoid_()

    @staticmethod
    def advance(gates: Tensor, state: State) -> State:
        i, f, g, o = gates.chunk(4, -1)
        memory = torch.addcmul(i * g, f, state[1])
        return o * memory.tanh(), memory

    def back(self, step: int, grad: Tensor, memory_grad: Tensor, before: Tensor | None) -> None:
        memory_grad.addcmul_(grad, self._slopes[step])
        self._through_memory[step].mul_(memory_grad.unsqueeze(1))
        self._through_output[step].mul_(grad)
        memory_grad.mul_(self._forget[step])


class GRU(Steps):
    r"""Reset and update gate :math:`r, z` behind a logistic function, and :math:`n` of a hidden state that was reset.

    .. math:: n_t = \tanh(W_n x_t + b_n + r u), \quad u = U_n h_{t-1} + b'_n, \qquad h_t = (1 - z) n + z h_{t-1}

    .. math:: \delta^n = \gamma (1 - z) (1 - n^2), \quad \delta^u = \delta^n r, \quad \delta^r = \delta^u u (1 - r),
        \quad \delta^z = \gamma (h_{t-1} - n) z (1 - z)

    The input has :math:`\delta^r, \delta^z, \delta^n`, the hidden state :math:`\delta^r, \delta^z, \delta^u`, and
    :math:`\gamma z` besides.
    """

    splits_gates = True

    def __init__(self, trace: Trace, first: int, last: int) -> None:
        gates = trace.gates[first:last]
        r, z, n = gates.chunk(3, -1)
        u = trace.hidden_gates[first:last].chunk(3, -1)[2]
        self._size = r.shape[-1]
        self._deltas = gates.new_empty(*gates.shape[:-1], 4 * self._size)
        by_r, by_z, by_u, by_n = self._deltas.chunk(4, -1)
        closed = 1 - z
        torch.mul(1 - n.square(), closed, out=by_n)
        torch.mul(by_n, r, out=by_u)
        torch.mul(by_u, u, out=by_r).mul_(1 - r)
        torch.mul(trace.hidden[first:last] - n, z, out=by_z).mul_(closed)
        self.hidden_deltas = self._deltas[..., : 3 * self._size]
        self._steps = self._deltas.unflatten(-1, (4, -1)).unbind(0)
        self._update = z.unbind(0)

    @property
    def input_deltas(self) -> Tensor:
        both, _, new = self._deltas.split_with_sizes([2 * self._size, self._size, self._size], -1)
        return torch.cat([both, new], -1)

    @staticmethod
    def activate(gates: Tensor, hidden_gates: Tensor) -> None:
        size = gates.shape[-1] // 3
        both, n = gates.split_with_sizes([2 * size, size], -1)
        hidden_both, u = hidden_gates.split_with_sizes([2 * size, size], -1)
        both.add_(hidden_both).sigmoid_()
        n.addcmul_(both[..., :size], u).tanh_()

    @staticmethod
    def advance(gates: Tensor, state: State) -> State:
        _, z, n = gates.chunk(3, -1)
        return (torch.addcmul(n, z, state[0] - n),)

    def back(self, step: int, grad: Tensor, memory_grad: Tensor, before: Tensor | None) -> None:
        self._steps[step].mul_(grad.unsqueeze(1))
        if before is not None:
            before.addcmul_(grad, self._update[step])
