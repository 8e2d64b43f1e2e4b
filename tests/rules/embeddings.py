"""Cases of embedding tables and bags of embeddings."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.arrangements import AXIS_1, AXIS_2, BAGS, BAGS_WITH_END, COPIED, INTERLEAVED, ROWS
from tests.rules.case import ONE_AT_A_TIME, WITHOUT_VMAP, Case, ids

VOCABULARY = 5


def cases() -> Iterator[Case]:
    yield from _embedding()
    yield from _bags_of_one_length()
    yield from _bags_with_offsets()


def _embedding() -> Iterator[Case]:
    def case(title: str, *shape: int, draw: Any = None, **options: Any) -> Case:
        more = {
            name: options.pop(name)
            for name in ("arrangement", "oracles", "adds_up", "keywords")
            if name in options
        }
        build = partial(nn.Embedding, VOCABULARY, 3, **options)
        return Case(f"Embedding, {title}", build, draw or ids(VOCABULARY, *shape), **more)

    yield case("one id a sample")
    yield case("a sequence of ids", 7)
    yield case("a table of ids", 2, 4)
    yield case("no ids", 0)
    yield case("int32", 6, draw=ids(VOCABULARY, 6, dtype=torch.int32))
    yield case("by keyword", 3, keywords=("input",))
    yield case("padding_idx", 7, padding_idx=2)
    yield case("negative padding_idx", 7, padding_idx=-1)
    yield case("max_norm", 7, max_norm=1.0, norm_type=1.5, oracles=WITHOUT_VMAP)
    yield case("sparse", 7, sparse=True, oracles=WITHOUT_VMAP)
    yield case("sparse, padding_idx", 7, sparse=True, padding_idx=0, oracles=WITHOUT_VMAP)
    own = {"scale_grad_by_freq": True, "oracles": ONE_AT_A_TIME, "adds_up": False}
    yield case("scale_grad_by_freq", 9, **own)
    yield case("scale_grad_by_freq, padding_idx", 9, padding_idx=1, **own)
    yield case("scale_grad_by_freq, rows", 3, 4, arrangement=INTERLEAVED, **own)
    for arrangement in (ROWS, INTERLEAVED, AXIS_1, COPIED):
        yield case(arrangement.name, 4, arrangement=arrangement, padding_idx=-1)
    yield case(AXIS_2.name, 3, 2, arrangement=AXIS_2)


def _bag(title: str, draw: Callable[[int], Sequence[Tensor]], options: dict[str, Any], **more: Any) -> Case:
    build = partial(nn.EmbeddingBag, VOCABULARY, 3, **options)
    return Case(f"EmbeddingBag, {title}", build, draw, **{"oracles": WITHOUT_VMAP, **more})


# Options that every way of giving bags is tried with; scale_grad_by_freq counts over the batch.
MODES: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum, padding_idx": {"mode": "sum", "padding_idx": 1},
    "mean, negative padding_idx": {"mode": "mean", "padding_idx": -1},
    "max, padding_idx": {"mode": "max", "padding_idx": 0},
    "sum, max_norm": {"mode": "sum", "max_norm": 1.0},
    "sum, sparse": {"mode": "sum", "sparse": True},
    "mean, sparse, padding_idx": {"mode": "mean", "sparse": True, "padding_idx": 2},
    "sum, scale_grad_by_freq": {"mode": "sum", "scale_grad_by_freq": True},
    "mean, scale_grad_by_freq": {"mode": "mean", "scale_grad_by_freq": True},
    "sum, scale_grad_by_freq, padding_idx": {"mode": "sum", "scale_grad_by_freq": True, "padding_idx": 1},
}


class BagOfEmbeddings(nn.Module):
    """What ``EmbeddingBag`` is documented to compute, of ``F.embedding``.

    With ``scale_grad_by_freq`` torch 2.13 and earlier divide, on the CPU, by how often some other id occurs
    (https://github.com/pytorch/pytorch/issues/190063).
    """

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.weight, self.bag = (
            bag.weight,
            [bag],
        )  # in a list: not a submodule, whose weight would count twice

    def forward(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        (bag,) = self.bag
        if offsets is None:
            bags = list(input)
        else:
            ends = [*offsets[1:].tolist(), *([] if bag.include_last_offset else [len(input)])]
            bags = [input[start:end] for start, end in zip(offsets.tolist(), ends, strict=False)]
        return torch.stack([self._reduced(bag, ids) for ids in bags])

    def _reduced(self, bag: nn.EmbeddingBag, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight, bag.padding_idx, scale_grad_by_freq=bag.scale_grad_by_freq)
        present = ids != (-1 if bag.padding_idx is None else bag.padding_idx)
        total = (rows * present.unsqueeze(1)).sum(0)
        return total / present.sum().clamp_min(1) if bag.mode == "mean" else total


def _counting(options: dict[str, Any]) -> dict[str, Any]:
    counting = {"oracles": ONE_AT_A_TIME, "adds_up": False, "stand_in": BagOfEmbeddings}
    return counting if options.get("scale_grad_by_freq") else {}


def _bags_of_one_length() -> Iterator[Case]:
    for title, options in MODES.items():
        yield _bag(f"{title}, bags of one length", ids(VOCABULARY, 6), options, **_counting(options))
    for mode in ("sum", "mean", "max"):
        for arrangement in (ROWS, INTERLEAVED):
            yield _bag(
                f"{mode}, {arrangement.name}",
                ids(VOCABULARY, 3, 4),
                {"mode": mode, "padding_idx": 0},
                arrangement=arrangement,
            )
        yield _bag(f"{mode}, bags of one id", ids(VOCABULARY, 1), {"mode": mode})
        yield _bag(
            f"{mode}, bags of padding", lambda n: [torch.zeros(n, 3).long()], {"mode": mode, "padding_idx": 0}
        )
        yield _bag(f"{mode}, int32", ids(VOCABULARY, 4, dtype=torch.int32), {"mode": mode})
    yield _bag(
        "sum, weights",
        lambda n: [torch.randint(VOCABULARY, (n, 6)), torch.randn(n, 6, dtype=torch.double)],
        {"mode": "sum", "padding_idx": 3},
        keywords=("per_sample_weights",),
    )
    yield _bag(
        "sum, weights, rows",
        lambda n: [torch.randint(VOCABULARY, (n, 2, 6)), torch.randn(n, 2, 6, dtype=torch.double)],
        {"mode": "sum"},
        keywords=("per_sample_weights",),
        arrangement=INTERLEAVED,
    )


def lengths_of(n: int, longest: int) -> Tensor:
    """Bags of different lengths, the first, the last and some others empty."""
    return torch.tensor([(0, longest, 1, 0, longest - 1, 0)[i % 6] for i in range(n)], dtype=torch.long)


def bags(n: int, longest: int = 6) -> list[Tensor]:
    return [torch.randint(VOCABULARY, (n, longest)), lengths_of(n, longest)]


def full_bags(n: int) -> list[Tensor]:
    return [torch.randint(VOCABULARY, (n, 4)), torch.full((n,), 4)]


def empty_bags(n: int) -> list[Tensor]:
    return [torch.zeros(n, 2).long(), torch.zeros(n).long()]


def duplicates(n: int) -> list[Tensor]:
    return [torch.randint(2, (n, 6)), torch.full((n,), 6)]


def weighted_bags(n: int) -> list[Tensor]:
    return [*bags(n), torch.randn(n, 6, dtype=torch.double)]


def short_bags(n: int) -> list[Tensor]:
    return [x.int() for x in bags(n)]


def _bags_with_offsets() -> Iterator[Case]:
    for title, options in MODES.items():
        for arrangement in (BAGS, BAGS_WITH_END):
            chosen = {**options, "include_last_offset": arrangement is BAGS_WITH_END}
            name = f"{title}, {arrangement.name}"
            yield _bag(name, bags, chosen, arrangement=arrangement, **_counting(options))
    for mode in ("sum", "mean", "max"):
        for draw in (full_bags, duplicates, short_bags, empty_bags):
            name = f"{mode}, {draw.__name__.replace('_', ' ')}, offsets"
            yield _bag(name, draw, {"mode": mode}, arrangement=BAGS)
    for arrangement in (BAGS, BAGS_WITH_END):
        options = {"mode": "sum", "include_last_offset": arrangement is BAGS_WITH_END, "padding_idx": 2}
        yield _bag(
            f"sum, weights, {arrangement.name}",
            weighted_bags,
            options,
            arrangement=arrangement,
            keywords=("per_sample_weights",),
        )
    yield _bag("max, max_norm", bags, {"mode": "max", "max_norm": 1.0}, arrangement=BAGS, rereads=True)
    # Rows of -1, 0 and 1: the largest is often in several places.
    yield _bag("max, ties", bags, {"mode": "max"}, arrangement=BAGS, fill=torch.sign)
    yield _bag("max, ties, bags of one length", ids(VOCABULARY, 6), {"mode": "max"}, fill=torch.sign)
