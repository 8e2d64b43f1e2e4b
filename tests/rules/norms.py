"""Cases of normalisation layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.rules.arrangements import AXIS_1, AXIS_2, COPIED, INTERLEAVED, ROWS, ROWS_ON_AXIS_1
from tests.rules.case import WITHOUT_VMAP, Case, floats, materialised

SIZES = {1: (4,), 2: (3, 4), 3: (2, 3, 2)}


def cases() -> Iterator[Case]:
    yield from _over_the_last_axes()
    yield from _group_norms()
    yield from _instance_norms()
    yield from _batch_norms()


def _over_the_last_axes() -> Iterator[Case]:
    for kind in (nn.LayerNorm, nn.RMSNorm):

        def case(
            title: str, shape: int | tuple[int, ...], draw: Any, kind: Any = kind, **options: Any
        ) -> Case:
            arrangement = {"arrangement": options.pop("arrangement")} if "arrangement" in options else {}
            return Case(f"{kind.__name__}, {title}", partial(kind, shape, **options), draw, **arrangement)

        yield case("no positions", 5, floats(5))
        yield case("positions", 5, floats(3, 4, 5))
        yield case("several axes", (3, 5), floats(3, 5))
        yield case("several axes and positions", (3, 5), floats(4, 3, 5))
        yield case("large eps", 5, floats(4, 5), eps=1.0)
        for arrangement in (AXIS_1, COPIED, ROWS, INTERLEAVED):
            yield case(arrangement.name, 5, floats(4, 5), arrangement=arrangement)
        for arrangement in (AXIS_2, ROWS_ON_AXIS_1):
            yield case(arrangement.name, 5, floats(3, 2, 5), arrangement=arrangement)
    yield Case("LayerNorm, no bias", partial(nn.LayerNorm, 5, bias=False), floats(3, 5))
    yield Case("LayerNorm, no weight", partial(without, nn.LayerNorm, "weight", 5), floats(3, 5))
    # Of a LayerNorm with one feature the weight's gradient is zero up to rounding: nothing to compare with.
    yield Case("RMSNorm, one feature", partial(nn.RMSNorm, 1), floats(4, 1))
    yield Case("RMSNorm, given eps", partial(nn.RMSNorm, 5, eps=1e-3), floats(3, 5))


def without(kind: Callable[..., nn.Module], parameter: str, *args: Any, **options: Any) -> nn.Module:
    layer = kind(*args, **options)
    layer.register_parameter(parameter, None)
    return layer


def _group_norms() -> Iterator[Case]:
    for groups in (1, 2, 6):
        yield Case(f"GroupNorm, {groups} groups", partial(nn.GroupNorm, groups, 6), floats(6, 3, 2))
    yield Case("GroupNorm, no positions", partial(nn.GroupNorm, 2, 6), floats(6))
    yield Case("GroupNorm, three dimensions", partial(nn.GroupNorm, 3, 6, eps=0.1), floats(6, 2, 3, 2))
    yield Case("GroupNorm, no bias", partial(without, nn.GroupNorm, "bias", 2, 6), floats(6, 4))
    for arrangement in (ROWS, INTERLEAVED):
        yield Case(
            f"GroupNorm, {arrangement.name}", partial(nn.GroupNorm, 2, 6), floats(3, 6, 4), arrangement
        )


INSTANCE_NORMS: dict[int, Any] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def writes_in_eval() -> bool:
    """Whether this version of torch rewrites running statistics in eval mode, rounding them (2.6 does)."""
    norm = nn.InstanceNorm1d(1, track_running_stats=True).eval()
    before = norm.running_mean._version
    norm(torch.zeros(1, 1, 2))
    return norm.running_mean._version > before


def _instance_norms() -> Iterator[Case]:
    rewritten = writes_in_eval()
    for d, kind in INSTANCE_NORMS.items():
        name, shape = kind.__name__, (3, *SIZES[d])
        yield Case(f"{name}, train", partial(kind, 3, affine=True), floats(*shape))
        yield Case(f"{name}, eval", partial(kind, 3, affine=True), floats(*shape), training=False)
        tracking = partial(kind, 3, affine=True, track_running_stats=True, eps=0.1)
        yield Case(f"{name}, tracking, train", tracking, floats(*shape), oracles=WITHOUT_VMAP)
        yield Case(f"{name}, tracking, eval", tracking, floats(*shape), training=False, rereads=rewritten)
        for parameter in ("weight", "bias"):
            build = partial(without, kind, parameter, 3, affine=True)
            yield Case(f"{name}, no {parameter}", build, floats(*shape))
        for arrangement in (ROWS, INTERLEAVED):
            yield Case(
                f"{name}, {arrangement.name}", partial(kind, 3, affine=True), floats(2, *shape), arrangement
            )
            yield Case(
                f"{name}, tracking, eval, {arrangement.name}",
                tracking,
                floats(2, *shape),
                arrangement,
                training=False,
                rereads=rewritten,
            )
        # Its own defaults: unlike the others, it has an affine map and tracks statistics.
        lazy = getattr(nn, f"Lazy{name}")
        yield Case(
            f"{name}, once lazy", partial(materialised, lazy, shape), floats(*shape), oracles=WITHOUT_VMAP
        )


BATCH_NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _batch_norms() -> Iterator[Case]:
    """In eval mode alone; in train mode it couples the samples."""
    for d, kind in BATCH_NORMS.items():
        name, shape = kind.__name__, (3, *SIZES[d])
        yield Case(name, partial(kind, 3), floats(*shape), training=False)
        yield Case(
            f"{name}, large eps, no momentum",
            partial(kind, 3, eps=1.0, momentum=None),
            floats(*shape),
            training=False,
        )
        for parameter in ("weight", "bias"):
            build = partial(without, kind, parameter, 3)
            yield Case(f"{name}, no {parameter}", build, floats(*shape), training=False)
        for arrangement in (ROWS, INTERLEAVED):
            yield Case(
                f"{name}, {arrangement.name}",
                partial(kind, 3),
                floats(2, *shape),
                arrangement,
                training=False,
            )
        lazy = getattr(nn, f"Lazy{name}")
        yield Case(f"{name}, once lazy", partial(materialised, lazy, shape), floats(*shape), training=False)
    yield Case("BatchNorm1d, no positions", partial(nn.BatchNorm1d, 3), floats(3), training=False)
    yield Case(
        "BatchNorm1d, no positions, rows", partial(nn.BatchNorm1d, 3), floats(4, 3), ROWS, training=False
    )
