"""When a monitor measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gradbatch.errors import UsageError

Cadence = int | Callable[[int], bool]


def logarithmic(per_decade: int = 20) -> Callable[[int], bool]:
    """A cadence that is dense at the start and sparse later.

    Args:
        per_decade: how many steps are measured between ``k`` and ``10 k``, where there are so many.

    Returns: whether a step is measured; what ``GradientMonitor(every=...)`` takes.

    Example:
        >>> from gradbatch.analysis import logarithmic
        >>> [step for step in range(200) if logarithmic(5)(step)]
        [0, 1, 2, 3, 4, 6, 10, 16, 25, 40, 63, 100, 158]
    """
    if not 1 <= per_decade < math.inf:
        raise UsageError(f"per_decade is {per_decade!r}; it is 1 or more")

    def measured(step: int) -> bool:
        if step < 1:
            return step == 0
        # The first mark that could be rounded to this step.
        mark = math.ceil(per_decade * math.log10(step - 0.5))
        return round(10 ** (mark / per_decade)) == step

    return measured


def comes_to(cadence: Cadence, step: int) -> bool:
    """Whether a step is measured."""
    return bool(cadence(step)) if callable(cadence) else step % cadence == 0


def cadences(
    every: Cadence | Mapping[str, Cadence], statistics: Sequence[str], usual: int
) -> dict[str, Cadence]:
    """When each statistic is measured.

    Args:
        every: for all of them, or for some by name.
        statistics: that there are.
        usual: for those that a mapping does not name.

    Raises:
        UsageError: a cadence below 1, or a name that is none of the statistics.
    """
    given = every if isinstance(every, Mapping) else dict.fromkeys(statistics, every)
    for name, cadence in given.items():
        if name not in statistics:
            raise UsageError(f"every names {name!r}; the preset measures {', '.join(map(repr, statistics))}")
        # True is 1, and measures every step: hardly what is meant.
        whole = isinstance(cadence, int) and not isinstance(cadence, bool)
        if not callable(cadence) and not (whole and cadence >= 1):
            of = f" for {name!r}" if isinstance(every, Mapping) else ""
            raise UsageError(
                f"every is {cadence!r}{of}; it is a number of steps, 1 or more, or a function of the step"
            )
    return {name: given.get(name, usual) for name in statistics}
