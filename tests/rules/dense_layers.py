"""Cases of linear and bilinear layers, and of activations with parameters."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from tests.rules.arrangements import AXIS_1, AXIS_2, COPIED, INTERLEAVED, ROWS, ROWS_ON_AXIS_1
from tests.rules.case import Case, floats, materialised, pairs_of_floats


def cases() -> Iterator[Case]:
    yield from _linear()
    yield from _bilinear()
    yield from _prelu()


def _linear() -> Iterator[Case]:
    build = partial(nn.Linear, 3, 5)
    yield Case("Linear, no positions", build, floats(3))
    yield Case("Linear, one axis of positions", build, floats(6, 3))
    yield Case("Linear, two axes of positions", build, floats(2, 4, 3))
    yield Case("Linear, an axis of one position", build, floats(1, 3))
    yield Case("Linear, no position at all", build, floats(0, 3))
    yield Case("Linear, many positions", partial(nn.Linear, 2, 3), floats(40, 2))
    yield Case("Linear, no bias", partial(nn.Linear, 3, 5, bias=False), floats(4, 3))
    yield Case("Linear, one output", partial(nn.Linear, 3, 1), floats(3))
    yield Case("Linear, by keyword", build, floats(2, 3), keywords=("input",))
    yield Case("Linear, once lazy", partial(materialised, partial(nn.LazyLinear, 5), (3,)), floats(3))
    for arrangement in (AXIS_1, COPIED, ROWS, INTERLEAVED):
        # Four samples is what the tests draw, so once there are as many positions as samples.
        for positions in (4, 3):
            yield Case(
                f"Linear, {arrangement.name}, {positions} positions", build, floats(positions, 3), arrangement
            )
    for arrangement in (AXIS_2, ROWS_ON_AXIS_1):
        yield Case(f"Linear, {arrangement.name}", build, floats(4, 2, 3), arrangement)


def _bilinear() -> Iterator[Case]:
    build = partial(nn.Bilinear, 2, 3, 4)
    yield Case("Bilinear, no positions", build, pairs_of_floats((2,), (3,)))
    yield Case("Bilinear, positions", build, pairs_of_floats((2, 4, 2), (2, 4, 3)))
    yield Case(
        "Bilinear, no bias", partial(nn.Bilinear, 2, 3, 4, bias=False), pairs_of_floats((5, 2), (5, 3))
    )
    yield Case("Bilinear, by keyword", build, pairs_of_floats((2,), (3,)), keywords=("input2",))
    for arrangement in (AXIS_1, ROWS, INTERLEAVED):
        yield Case(f"Bilinear, {arrangement.name}", build, pairs_of_floats((4, 2), (4, 3)), arrangement)


def _prelu() -> Iterator[Case]:
    one, several = nn.PReLU, partial(nn.PReLU, 3)
    yield Case("PReLU, one slope, no features", one, floats())
    yield Case("PReLU, one slope", one, floats(3))
    yield Case("PReLU, one slope, positions", one, floats(3, 4, 2))
    yield Case("PReLU, a slope a channel", several, floats(3))
    yield Case("PReLU, a slope a channel, positions", several, floats(3, 4))
    yield Case("PReLU, a slope a channel, images", several, floats(3, 4, 2))
    for arrangement in (AXIS_1, AXIS_2, ROWS, INTERLEAVED):
        yield Case(f"PReLU, one slope, {arrangement.name}", one, floats(4, 2, 3), arrangement)
    for arrangement in (ROWS, INTERLEAVED):
        yield Case(f"PReLU, a slope a channel, {arrangement.name}", several, floats(4, 3, 2), arrangement)
