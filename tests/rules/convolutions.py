"""Cases of convolutions and transposed convolutions, the same list in one, two and three dimensions."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from tests.rules.arrangements import INTERLEAVED, ROWS
from tests.rules.case import Case, floats, materialised

CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}

# Sizes differ in parity, so that a stride of 2 leaves a remainder in some dimension.
SIZES = {1: (9,), 2: (6, 5), 3: (5, 4, 4)}
GROUPS: dict[str, tuple[int, int, int]] = {  # input channels, output channels, groups
    "two groups": (4, 6, 2),
    "depthwise": (3, 3, 3),
    "depthwise with multiplier": (2, 6, 2),
    "every channel count different": (6, 9, 3),
}


def plain_options(dimensions: int) -> dict[str, dict[str, Any]]:
    """Options of ``nn.ConvNd`` by name; tuples are cut to the dimension."""

    def each(*values: int) -> tuple[int, ...]:
        return values[:dimensions]

    modes = ("circular", "reflect", "replicate")
    return {
        "plain": {},
        "no bias": {"bias": False},
        "kernel of one": {"kernel_size": 1},
        "uneven kernel": {"kernel_size": each(3, 2, 1)},
        "kernel as large as the input": {"kernel_size": SIZES[dimensions]},
        "stride with remainder": {"stride": 2},
        "uneven stride": {"stride": each(3, 2, 1), "kernel_size": each(2, 1, 3)},
        "padding": {"padding": 1},
        "padding wider than the kernel": {"padding": 2, "kernel_size": 2},
        "uneven padding": {"padding": each(0, 2, 1)},
        "valid": {"padding": "valid"},
        "same": {"padding": "same"},
        "same, even kernel": {"padding": "same", "kernel_size": each(2, 4, 2)},
        "same, even kernel, dilated": {"padding": "same", "kernel_size": 2, "dilation": each(3, 1, 1)},
        "dilation": {"dilation": 2, "kernel_size": 2},
        "dilation and stride with remainder": {"dilation": 2, "kernel_size": 2, "stride": 2, "padding": 1},
        **{f"{mode} padding": {"padding": 1, "padding_mode": mode} for mode in modes},
        **{f"uneven {mode} padding": {"padding": each(2, 0, 1), "padding_mode": mode} for mode in modes},
        "same, circular, even kernel": {"padding": "same", "padding_mode": "circular", "kernel_size": 2},
        "everything": {
            "kernel_size": each(3, 2, 2),
            "stride": each(2, 1, 2),
            "padding": each(2, 1, 1),
            "dilation": each(2, 2, 1),
            "padding_mode": "reflect",
            "bias": False,
        },
    }


def transposed_options(dimensions: int) -> dict[str, dict[str, Any]]:
    """Options of ``nn.ConvTransposeNd`` by name."""

    def each(*values: int) -> tuple[int, ...]:
        return values[:dimensions]

    return {
        "plain": {},
        "no bias": {"bias": False},
        "kernel of one": {"kernel_size": 1},
        "uneven kernel": {"kernel_size": each(3, 2, 1)},
        "stride": {"stride": 2},
        "stride wider than the kernel": {"stride": 3, "kernel_size": 2},
        "padding": {"padding": 1},
        "uneven padding": {"padding": each(0, 2, 1), "stride": each(1, 2, 2)},
        "dilation": {"dilation": 2, "kernel_size": 2},
        "output padding": {"stride": 2, "output_padding": 1},
        "uneven output padding": {
            "stride": each(3, 2, 2),
            "output_padding": each(2, 1, 0),
            "padding": each(1, 0, 1),
        },
        "output padding as large as the stride": {"dilation": 3, "kernel_size": 2, "output_padding": 1},
        "output padding larger than the stride": {
            "stride": each(2, 1, 1),
            "dilation": 4,
            "kernel_size": 2,
            "output_padding": each(3, 2, 3),
        },
        "everything": {
            "kernel_size": each(3, 2, 2),
            "stride": each(2, 3, 1),
            "padding": each(2, 1, 1),
            "dilation": each(3, 1, 2),
            "output_padding": each(2, 2, 1),
            "bias": False,
        },
    }


def layer(kind: type[nn.Module], channels: tuple[int, int, int], options: dict[str, Any]) -> nn.Module:
    inputs, outputs, groups = channels
    return kind(inputs, outputs, **{"kernel_size": 2, "groups": groups, **options})


def cases() -> Iterator[Case]:
    for kinds, options_of in ((CONVOLUTIONS, plain_options), (TRANSPOSED, transposed_options)):
        for d, kind in kinds.items():
            name = kind.__name__

            def case(
                title: str,
                options: dict[str, Any],
                channels: tuple[int, int, int] = (2, 3, 1),
                kind: type[nn.Module] = kind,
                size: tuple[int, ...] = SIZES[d],
                name: str = name,
                **more: Any,
            ) -> Case:
                build = partial(layer, kind, channels, options)
                return Case(f"{name}, {title}", build, floats(channels[0], *size), **more)

            options = options_of(d)
            for title, chosen in options.items():
                yield case(title, chosen)
            for title, channels in GROUPS.items():
                yield case(title, {}, channels)
                yield case(f"{title}, everything", options["everything"], channels)
            for arrangement in (ROWS, INTERLEAVED):
                for groups in ("two groups", "depthwise"):
                    yield Case(
                        f"{name}, {groups}, {arrangement.name}",
                        partial(layer, kind, GROUPS[groups], {"stride": 2, "padding": 1}),
                        floats(2, GROUPS[groups][0], *SIZES[d]),
                        arrangement,
                    )
            lazy = getattr(nn, f"Lazy{name}")
            shape = (4, *SIZES[d])
            yield Case(
                f"{name}, once lazy",
                partial(materialised, partial(lazy, 6, kernel_size=2, groups=2), shape),
                floats(*shape),
            )
        yield from _only_there(kinds)


def _only_there(kinds: dict[int, type[nn.Module]]) -> Iterator[Case]:
    if kinds is TRANSPOSED:
        yield Case(
            "ConvTranspose2d, output_size",
            partial(nn.ConvTranspose2d, 2, 3, 2, stride=2),
            floats(2, 3, 2),
            options={"output_size": (7, 5)},
        )
    else:
        yield Case("Conv2d, by keyword", partial(nn.Conv2d, 2, 3, 2), floats(2, 3, 4), keywords=("input",))
