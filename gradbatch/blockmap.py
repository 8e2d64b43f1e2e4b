"""Where two tensors of gradients differ: a map by sample, group and block of the parameter, not a wall of booleans.

For people who read a failed check, so it never fails itself: whatever it is given, it says what it can. It knows
tensors and nothing else of this package.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_TOLERANCE = 2e-2
_SAMPLES, _COLUMNS, _ROWS = 12, 8, 16  # at most so many lines of samples, columns of groups, lines of a grid
_AGREE, _SOME, _ALL = ".", "x", "#"


def block_map(
    actual: Tensor,
    expected: Tensor,
    groups: int = 1,
    tolerance: float | None = None,
    *,
    per_sample: bool = True,
) -> str:
    """Say in one sentence how far two tensors of gradients are apart, and draw where.

    Three maps: samples against groups, each block with its largest relative error; then, for the worst sample, output
    against input channels, and the positions of the kernel. ``.`` is a block that agrees, ``x`` one that differs in
    part, ``#`` one that differs everywhere; neighbours are drawn as one where there are too many for a line.

    Args:
        actual: ``[N, *shape]``, per-sample gradients of a parameter; or ``[*shape]`` with ``per_sample=False``.
        expected: the reference, of the same shape.
        groups: groups of a convolution; they split the first dimension of ``shape``.
        tolerance: largest relative error that still agrees; by default 1e-10 in float64 and 1e-4 in float32.
        per_sample: whether the first dimension is the samples'.

    Returns:
        Lines of text. Errors are relative to the largest entry that was expected of the same sample; not, though, to
        less than the root of the tolerance times the largest of all samples, or rounding would look like an error in a
        sample that has no gradient. Where nothing but zeros was expected they are absolute.

    Edge cases: NaN agrees with NaN, infinity with the same infinity; else they are infinite errors. Different shapes,
    empty tensors, and groups that do not divide the parameter are said so.

    Example:
        >>> expected = torch.ones(3, 4, 1, 2, dtype=torch.double)
        >>> actual = expected.clone()
        >>> actual[1, 2:] = 0.5
        >>> print(block_map(actual, expected, groups=2))
        4 of 24 elements differ by more than 1e-10, in 1 of 3 samples and 1 of 2 groups.
        Largest relative error 5e-01, sample 1 at [2, 0, 0]: 0.5, expected 1.
        <BLANKLINE>
        samples x groups  0       1
                       1  .       # 5e-01
        and 2 samples that agree
        <BLANKLINE>
        sample 1: output channels x input channels
        group 0        0  .
                       1  .
        group 1        2  #
                       3  #
        <BLANKLINE>
        sample 1: kernel [2]
                          xx
    """
    if actual.shape != expected.shape:
        return f"Shapes differ: actual {list(actual.shape)}, expected {list(expected.shape)}."
    if not per_sample:
        actual, expected = actual.unsqueeze(0), expected.unsqueeze(0)
    tolerance = _tolerance(actual, expected) if tolerance is None else tolerance
    errors = _relative_errors(actual, expected, tolerance)
    if not bool((errors > tolerance).any()):
        largest = float(errors.max()) if errors.numel() else 0.0
        return f"All {errors.numel()} elements agree within {tolerance:.0e}; largest relative error {largest:.0e}."

    note, shape = "", list(errors.shape[1:])
    if groups != 1 and (groups < 1 or not shape or shape[0] % groups):
        note, groups = f"\nThe {groups} groups do not split {shape}; drawn as one.", 1
    by_group = errors.reshape(errors.shape[0], groups, -1)
    lines = [_headline(actual, expected, errors, by_group, tolerance, per_sample) + note]
    lines += _samples_map(by_group, tolerance, per_sample)
    worst = int(by_group.amax((1, 2)).argmax())
    title = f"sample {worst}: " if per_sample else ""
    lines += _channels_map(errors[worst], groups, tolerance, title)
    lines += _kernel_map(errors[worst], tolerance, title)
    return "\n".join(lines)


def _tolerance(actual: Tensor, expected: Tensor) -> float:
    return max(_TOLERANCES.get(tensor.dtype, _HALF_TOLERANCE) for tensor in (actual, expected))


def _relative_errors(actual: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Return the elementwise errors in float64 on the CPU, relative to the largest expected entry of the sample."""
    actual, expected = (tensor.detach().cpu().double() for tensor in (actual, expected))
    if actual.numel() == 0:
        return actual
    scales = torch.where(expected.isfinite(), expected.abs(), 0).reshape(len(expected), -1).amax(1)
    scales = scales.clamp_min(math.sqrt(tolerance) * float(scales.max())) if scales.any() else scales + 1
    errors = (actual - expected).abs() / scales.reshape(-1, *[1] * (expected.dim() - 1))
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, errors.nan_to_num(nan=math.inf, posinf=math.inf))


def _headline(
    actual: Tensor, expected: Tensor, errors: Tensor, by_group: Tensor, tolerance: float, per_sample: bool
) -> str:
    bad = by_group > tolerance
    (samples, groups), flat = bad.shape[:2], int(errors.argmax())
    sample, *index = (int(i) for i in torch.unravel_index(torch.tensor(flat), errors.shape))
    where = [f"{int(bad.any(2).any(1).sum())} of {samples} samples"] if per_sample else []
    where += [f"{int(bad.any(2).any(0).sum())} of {groups} groups"] if groups > 1 else []
    places = [f"sample {sample}"] * per_sample + [f"at {index}"] * bool(index)
    place = f", {' '.join(places)}" if places else ""
    got, wanted = (float(tensor.detach().flatten()[flat]) for tensor in (actual, expected))
    return (
        f"{int(bad.sum())} of {bad.numel()} elements differ by more than {tolerance:.0e}"
        f"{', in ' if where else ''}{' and '.join(where)}.\n"
        f"Largest relative error {float(errors.max()):.0e}{place}: {got:.6g}, expected {wanted:.6g}."
    )


def _samples_map(errors: Tensor, tolerance: float, per_sample: bool) -> list[str]:
    """Draw samples (those that differ, the worst of them if many) against groups, with each block's largest error."""
    columns = _spans(errors.shape[1], _COLUMNS)
    title = " x ".join(["samples"] * per_sample + ["groups"] * (errors.shape[1] > 1))
    if not title:
        return []
    lines = [
        "",
        _line(title, "".join(f"{_label(span):8}" for span in columns) if errors.shape[1] > 1 else ""),
    ]
    differing = (errors > tolerance).any(2).any(1).nonzero().flatten()
    worst_first = differing[errors[differing].amax((1, 2)).argsort(descending=True, stable=True)]
    for sample in sorted(worst_first[:_SAMPLES].tolist()):
        cells = (_cell(errors[sample, span.start : span.stop], tolerance) for span in columns)
        lines.append(_line(f"{sample if per_sample else '':>16}", "".join(f"{cell:8}" for cell in cells)))
    if len(differing) > _SAMPLES:
        lines.append(f"and {len(differing) - _SAMPLES} more samples that differ less")
    if len(differing) < len(errors):
        lines.append(f"and {len(errors) - len(differing)} samples that agree")
    return lines


def _channels_map(errors: Tensor, groups: int, tolerance: float, title: str) -> list[str]:
    """Draw one sample's output channels, group by group, against its input channels."""
    if errors.numel() == 1:
        return []
    if errors.dim() == 1:
        axes, grid = "elements", errors.reshape(groups, -1, 1)
    else:
        axes = "output channels x input channels" if errors.dim() > 2 else "rows x columns"
        grid = errors.reshape(errors.shape[0], errors.shape[1], -1)
    outputs, columns = grid.shape[0] // groups, _spans(grid.shape[1], 4 * _COLUMNS)
    merged = f", {len(columns[0])} of these a column" if len(columns[0]) > 1 else ""
    lines = ["", f"{title}{axes}{merged}"]
    # Groups that differ, and as many that agree as fit beside them: the contrast tells a mistake from noise.
    bad = (grid > tolerance).reshape(groups, -1).any(1)
    shown = sorted(bad.int().argsort(descending=True, stable=True)[: max(2, _ROWS // outputs)].tolist())
    for group in shown:
        for span in _spans(outputs, _ROWS):
            row = range(group * outputs + span.start, group * outputs + span.stop)
            head = f"group {group}" if groups > 1 and span.start == 0 else ""
            blocks = (grid[row.start : row.stop, column.start : column.stop] for column in columns)
            label = _label(row) if errors.dim() > 1 else ""
            lines.append(_line(f"{head:9}{label:>7}", "".join(_mark(block, tolerance) for block in blocks)))
    if len(shown) < groups:
        lines.append(
            f"and {groups - len(shown)} more groups, {int(bad.sum() - bad[shown].sum())} of which differ"
        )
    return lines


def _kernel_map(errors: Tensor, tolerance: float, title: str) -> list[str]:
    """Draw the positions of one sample's kernel, over all channels; its planes below each other."""
    if errors.dim() < 3:
        return []
    kernel = errors.shape[2:]
    lines = ["", f"{title}kernel {list(kernel)}"]
    planes = errors.flatten(0, 1).movedim(0, -1).reshape(-1, kernel[-1], errors.shape[0] * errors.shape[1])
    columns = _spans(planes.shape[1], 4 * _COLUMNS)
    for rows in _spans(planes.shape[0], _ROWS):
        blocks = (planes[rows.start : rows.stop, column.start : column.stop] for column in columns)
        lines.append(_line("", "".join(_mark(block, tolerance) for block in blocks)))
    return lines


def _line(label: str, marks: str) -> str:
    return f"{label:16}  {marks}".rstrip()


def _cell(errors: Tensor, tolerance: float) -> str:
    mark = _mark(errors, tolerance)
    return mark if mark == _AGREE else f"{mark} {float(errors.max()):.0e}"


def _mark(errors: Tensor, tolerance: float) -> str:
    bad = errors > tolerance
    return _ALL if bool(bad.all()) else _SOME if bool(bad.any()) else _AGREE


def _spans(length: int, most: int) -> Sequence[range]:
    """Cut ``range(length)`` into at most ``most`` neighbouring pieces, of one element each if they fit."""
    width = max(1, -(-length // most))
    return [range(start, min(start + width, length)) for start in range(0, length, width)]


def _label(span: range) -> str:
    return str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
