"""What a backward pass hands back: for each quantity, a tensor for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from torch import Tensor, nn

from gradbatch.errors import UsageError
from gradbatch.quantities import Quantity


class NoSuchResult(UsageError, KeyError):
    """There is no result under this key; the message says which keys there are."""

    __str__ = UsageError.__str__


class QuantityResult(Mapping[str, Tensor]):
    """One quantity of every parameter, by the parameter's name in the model.

    Also takes a Parameter as key, and every name of a tied parameter; iterates over each parameter once, under its
    first name.

    Args:
        quantity: what was computed.
        tensors: by name.
        names: for each parameter all its names, the first being its key in ``tensors``.
    """

    def __init__(
        self, quantity: Quantity, tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, Sequence[str]]
    ) -> None:
        self.quantity = quantity
        self._tensors = dict(tensors)
        self._by_id = {id(parameter): aliases[0] for parameter, aliases in names.items()}
        self._aliases = {alias: aliases[0] for aliases in names.values() for alias in aliases}

    def __getitem__(self, key: str | nn.Parameter) -> Tensor:
        name = self._by_id.get(id(key)) if isinstance(key, Tensor) else self._aliases.get(key)
        if name is None:
            given = f"a parameter of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise NoSuchResult(
                f"no {type(self.quantity).__name__} for {given}: it is no parameter of the model, was frozen, or was "
                f"left out by parameters=. There are: {', '.join(self._tensors)}"
            )
        return self._tensors[name]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._by_id if isinstance(key, Tensor) else key in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in self._tensors.items())
        return f"{type(self).__name__}({self.quantity!r}, {shapes})"

    def total(self) -> Tensor:
        """The quantity of all parameters together: the sum over parameters.

        Returns: ``[N]`` for squared norms, ``[N, N]`` for Gram matrices.

        Raises:
            UsageError: the quantity is not a sum over parameters, or has other shapes for some than for others.
        """
        if not self.quantity.additive:
            raise UsageError(
                f"{type(self.quantity).__name__} has no total over parameters; norms and dot products have one "
                "(a quantity of yours: set additive = True if it adds up over parameters)"
            )
        (name, first), *rest = self._tensors.items()
        total = first.clone()
        for other, tensor in rest:
            if tensor.shape != total.shape:
                raise UsageError(
                    f"{type(self.quantity).__name__} does not add up over parameters: it has shape "
                    f"{list(total.shape)} for {name} and {list(tensor.shape)} for {other}. Set additive = False"
                )
            if (tensor.dtype, tensor.device) == (total.dtype, total.device):
                total += tensor
            else:
                total = total + tensor.to(total.device)
        return total


class Results(Mapping[Quantity, QuantityResult]):
    """Results by quantity: by its type, or by the instance where one type was asked for several times.

    Empty, and every access an error, until the backward pass is over.
    """

    def __init__(self) -> None:
        self._results: list[QuantityResult] | None = None

    def fill(self, results: Sequence[QuantityResult]) -> None:
        """Hand over the results; done once, by gradbatch."""
        self._results = list(results)

    @overload
    def __getitem__(self, key: Quantity) -> QuantityResult: ...
    @overload
    def __getitem__(self, key: type[Quantity]) -> QuantityResult: ...
    def __getitem__(self, key: Quantity | type[Quantity]) -> QuantityResult:
        computed = self._computed()
        if isinstance(key, type):
            found = [result for result in computed if type(result.quantity) is key]
            if len(found) > 1:
                raise NoSuchResult(f"{key.__name__} was computed {len(found)} times: use the instance as key")
        else:
            found = [result for result in computed if result.quantity is key or result.quantity == key][:1]
        if not found:
            raise NoSuchResult(_missing(key, computed))
        return found[0]

    def __iter__(self) -> Iterator[Quantity]:
        return iter([result.quantity for result in self._computed()])

    def __len__(self) -> int:
        return len(self._computed())

    def __repr__(self) -> str:
        if self._results is None:
            return "Results(not computed yet)"
        return f"Results({', '.join(repr(result) for result in self._results)})"

    def _computed(self) -> list[QuantityResult]:
        if self._results is None:
            raise UsageError("the results are available after the with block ends; read them there")
        return self._results


def _missing(key: object, computed: Sequence[QuantityResult]) -> str:
    there = f"there are: {', '.join(repr(result.quantity) for result in computed)}"
    if isinstance(key, Quantity) or (isinstance(key, type) and issubclass(key, Quantity)):
        return f"{getattr(key, '__name__', repr(key))} was not computed; {there}"
    given = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
    first = computed[0]
    return (
        f"{given} is no quantity: results are by class of the quantity, then by parameter, as in "
        f"results[{type(first.quantity).__name__}][{next(iter(first))!r}]; {there}"
    )
