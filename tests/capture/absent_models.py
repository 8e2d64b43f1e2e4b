"""Models some of whose samples have no gradient, coupled and not, for what is tested with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.reference import sum_of_squares

T, C = 3, 4


class Positive(torch.autograd.Function):
    """A relu of somebody's own, of which nothing is known."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class Network(nn.Module):
    """A layer, something that happens to ``[N, T, C]``, something that kills some samples, another layer.

    ``which`` are the samples' numbers, by which each is treated alike in any batch, and ``dead`` whom to kill.
    """

    def __init__(self, mix: Callable, kill: Callable) -> None:
        super().__init__()
        self.mix, self.kill = mix, kill
        self.first, self.second, self.third = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.head, self.lstm = nn.Linear(C, 3), nn.LSTM(C, C, batch_first=True)
        self.attention, self.recurrent = nn.MultiheadAttention(C, 1), nn.GRU(C, C)
        self.kernel = nn.Parameter(torch.randn(C, C, 3))
        self.double()

    def forward(self, x: Tensor, which: Tensor, dead: Tensor) -> Tensor:
        self.which = which
        return self.head(self.kill(self.mix(self, self.first(x)), dead)).flatten(1)


def rows(dead: Tensor) -> Tensor:
    return dead.view(-1, 1, 1)


def overwritten(h: Tensor, dead: Tensor) -> Tensor:
    h = h.clone()
    h[dead] = 0.25
    return h


KILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda h, dead: F.relu(h + torch.where(rows(dead), -99.0, 9.0)),
    "saturated": lambda h, dead: torch.sigmoid(h - 2000.0 * rows(dead)),
    "clamped": lambda h, dead: (h + 200.0 * rows(dead)).clamp(-100, 100),
    "own relu": lambda h, dead: Positive.apply(h - 99.0 * rows(dead)),
    "times zero": lambda h, dead: h * ~rows(dead),
    "masked": lambda h, dead: h.masked_fill(rows(dead), 0.5),
    "chosen": lambda h, dead: torch.where(rows(dead), torch.ones_like(h), h),
    "overwritten": overwritten,
    "weight of the loss": lambda h, dead: h,
    "ignored label": lambda h, dead: h,
    "hinge": lambda h, dead: h,
}


def losses_of(model: Network, kill: str, x: Tensor, which: Tensor, dead: Tensor) -> Tensor:
    output = model(x, which, dead)
    if kill == "ignored label":
        return F.cross_entropy(output, torch.where(dead, -100, 1), reduction="none")
    if kill == "hinge":
        return F.relu(output.sum(1) + torch.where(dead, -999.0, 999.0))
    return sum_of_squares(output) * (~dead if kill == "weight of the loss" else 1)


def centred(h: Tensor) -> Tensor:
    return h - 0.5 * h.mean(0)


def attended(h: Tensor) -> Tensor:
    flat = h.flatten(1)
    return (F.softmax(flat @ flat.T, -1) @ flat).view(h.shape)


def totals(h: Tensor) -> Tensor:
    """Each sample and those before it, in a loop."""
    total, found = torch.zeros_like(h[0]), []
    for row in h:
        total = total + row.tanh()
        found.append(row + 0.5 * total)
    return torch.stack(found)


def mixed_by_graph(h: Tensor) -> Tensor:
    """By edges from each sample to the next."""
    here = torch.arange(len(h))
    return h.index_add(0, (here + 1) % len(h), 0.5 * h)


COUPLED: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "sums over the batch": lambda self, h: h.flip(0).cumsum(0) + h.cumsum(0),
    "mean of the batch": lambda self, h: centred(h),
    "neighbour": lambda self, h: h + 0.5 * h.roll(1, 0).tanh(),
    "attention over the batch": lambda self, h: attended(h),
    "layer on the wrong axis": lambda self, h: self.attention(h, h, h, need_weights=False)[0],
    "statistics of the batch": lambda self, h: F.batch_norm(h.mT, None, None, training=True, eps=0.1).mT,
    "convolution over samples": lambda self, h: F.conv1d(h.permute(1, 2, 0), self.kernel, padding=1).permute(
        2, 0, 1
    ),
    "norm of the batch": lambda self, h: h / (1 + h.norm()),
    "mixed in a loop": lambda self, h: totals(h) + totals(h.flip(0)).flip(0),
    "mixed by indices": lambda self, h: mixed_by_graph(h),
}


def owner_of_rows(self: Network, h: Tensor) -> Tensor:
    return torch.arange(len(h)).repeat_interleave(T)


def in_one_sequence(self: Network, h: Tensor) -> Tensor:
    """Attention over the rows of all samples, with a mask between them."""
    rows, owner = self.second(h.flatten(0, 1)), owner_of_rows(self, h)
    scores = (rows @ rows.T).masked_fill(owner[:, None] != owner, -torch.inf)
    return (scores.softmax(-1) @ self.third(rows)).view(h.shape)


def ragged_rows(self: Network, h: Tensor) -> Tensor:
    real = torch.arange(T) <= (self.which % T).unsqueeze(1)
    return torch.zeros_like(h).masked_scatter(real.unsqueeze(-1), self.second(h[real]))


def experts(self: Network, h: Tensor) -> Tensor:
    """One of two layers for each sample."""
    odd, result = self.which % 2 == 1, torch.zeros_like(h)
    result[odd], result[~odd] = self.second(h[odd]), self.third(h[~odd])
    return result


def dispatched(self: Network, h: Tensor) -> Tensor:
    """The same of rows, by products with zeros and ones."""
    rows, odd = h.flatten(0, 1), (owner_of_rows(self, h) + self.which[0]) % 2
    gate = F.one_hot(odd, 2).to(h)
    place = F.one_hot(torch.arange(len(rows)), len(rows)).to(h)
    sent = torch.einsum("re,rp,rc->epc", gate, place, rows)
    done = torch.stack([self.second(sent[0]), self.third(sent[1])])
    return torch.einsum("re,rp,epc->rc", gate, place, done).view(h.shape)


def shuffled(self: Network, h: Tensor) -> Tensor:
    order = h.detach().sum((1, 2)).argsort()
    return Positive.apply(self.second(h[order]))[order.argsort()]


def shuffled_under_checkpoint(self: Network, h: Tensor) -> Tensor:
    order = h.detach().sum((1, 2)).argsort()
    run = lambda x: F.relu(self.second(x[order]) @ self.third.weight)[order.argsort()]  # noqa: E731
    return checkpoint(run, h, use_reentrant=False)


def packed(self: Network, h: Tensor) -> Tensor:
    lengths = 1 + self.which % T
    rows = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(self.lstm(rows)[0], batch_first=True, total_length=T)[0]


def pooled(self: Network, h: Tensor) -> Tensor:
    rows = self.second(h.flatten(0, 1))
    return h + h.new_zeros(len(h), C).index_add(0, owner_of_rows(self, h), rows).unsqueeze(1)


def among_neighbours(self: Network, h: Tensor) -> Tensor:
    """Sums over the nodes of each sample's own graph, by one matrix for all; every second graph has no edges."""
    edges = torch.block_diag(*[torch.full((T, T), 0.5 * (n % 2)) for n in self.which.tolist()])
    return h + (edges.to(h) @ self.second(h.flatten(0, 1))).view(h.shape)


APART: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "nothing": lambda self, h: self.second(h),
    "time first": lambda self, h: self.recurrent(h.transpose(0, 1))[0].transpose(0, 1),
    "one by one": lambda self, h: torch.stack([self.second(row) for row in h]),
    "one by one, by index": lambda self, h: torch.cat([self.second(h[n : n + 1]) for n in range(len(h))]),
    "convolution": lambda self, h: F.conv1d(h.mT, self.kernel, padding=1).mT,
    "table of positions": lambda self, h: h + F.normalize(self.kernel[0], dim=0).mT,
    "one sequence": in_one_sequence,
    "ragged rows": ragged_rows,
    "experts": experts,
    "dispatched": dispatched,
    "shuffled": shuffled,
    "shuffled under checkpoint": shuffled_under_checkpoint,
    "packed": packed,
    "pooled": pooled,
    "graphs": among_neighbours,
}
