"""Products of all positions of an operand with each other, which ghost norms of several parameters may share."""

import torch
from torch import Tensor


class Positions:
    """An operand that two parameters have in common, such as the left one of both weights of a recurrent layer.

    Args:
        operand: ``[N, G, P, T]``.
    """

    def __init__(self, operand: Tensor) -> None:
        self.operand = operand
        self._products: Tensor | None = None

    def products(self) -> Tensor:
        """Inner products over channels, ``[N, G, T, T]``; kept from the first of two calls to the second."""
        found, self._products = self._products, None
        if found is None:
            found = self._products = torch.matmul(self.operand.mT, self.operand)
        return found
