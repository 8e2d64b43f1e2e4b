"""Random features of a data set's gradients in a file, and the influence of samples on others from them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbatch.analysis.ids import ids_of
from gradbatch.analysis.projection import RandomProjection
from gradbatch.errors import UsageError

BLOCK = 4096  # samples at a time


class FeatureStore:
    r"""A row of random features for each sample of a data set, in a memory-mapped file.

    The system keeps in memory what is being read, so the file may be larger than that. What was written is in the file
    as soon as the system has got to it, at the latest when the process ends; a store is opened again by its path.

    Args:
        path: of the file, raw float32; beside it, ``.json`` says what it is.
        size: samples of the data set; ``None``: the store is there.
        projection: that the features are of; ``None``: the store is there.

    Attributes:
        features: ``[size, K]``, mapped to the file; NaN in rows that were not written yet.
        projection: that makes them.

    Raises:
        UsageError: there is no store, or one of another size or projection, or its file was cut off; the path, or its
            ``.json``, is a file of something else; there is no room for it, or no permission.

    Edge cases: one file takes one writer at a time.

    References:
        TRAK: Attributing Model Behavior at Scale (Park et al., 2023), https://arxiv.org/abs/2303.14186

    Example:
        >>> import torch, gradbatch, tempfile, pathlib
        >>> from gradbatch.analysis import FeatureStore, RandomProjection
        >>> model, x = gradbatch.extend(torch.nn.Linear(5, 1)), torch.randn(20, 5)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "features"
        >>> store = FeatureStore(path, 20, RandomProjection(64))
        >>> for ids in torch.arange(20).split(8):
        ...     results = gradbatch.backward(model, model(x[ids]).square().sum(1), store.projection)
        ...     store.write(ids, results[RandomProjection].total())
        >>> FeatureStore(path).influence(store.features[:3]).shape
        torch.Size([20, 3])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int | None = None,
        projection: RandomProjection | None = None,
    ) -> None:
        self.path = Path(path)
        about = self.path.with_name(self.path.name + ".json")
        found = _about(about, self.path)
        is_there = found is not None and found["whole"] and self.path.exists()
        if found is not None and is_there:
            stored = RandomProjection(found["features"], found["seed"])
            wanted = (found["size"] if size is None else size), projection or stored
            if wanted != (found["size"], stored):
                raise UsageError(
                    f"{path} holds {found['size']} samples of {stored}, not {size} of {projection}; take another path"
                )
            size, projection = found["size"], stored
        if size is None or projection is None or size < 1:
            raise UsageError(
                f"there is no store at {path}; a new one takes the data set's size and a projection"
            )
        self.projection: RandomProjection = projection
        expected = size * projection.features * torch.float32.itemsize
        entry = {"size": size, "features": projection.features, "seed": projection.seed}
        try:
            if not is_there:
                # First: a file that is there without it is somebody else's.
                about.write_text(json.dumps({**entry, "whole": False}))
                _reserve(self.path, expected)
            elif self.path.stat().st_size != expected:
                # Mapped nevertheless, it would be filled up with zeros, which look like features.
                raise UsageError(
                    f"{path} has {self.path.stat().st_size} bytes, not {expected}: it was cut off, or is another file"
                )
            self.features: Tensor = torch.from_file(
                str(self.path), shared=True, size=size * projection.features, dtype=torch.float32
            ).view(size, projection.features)
            if not is_there:
                self.features.fill_(torch.nan)
                # Last: a store whose making was broken off is made anew.
                about.write_text(json.dumps({**entry, "whole": True}))
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"a store at {path} of {expected} bytes: {reason}") from error

    def write(self, ids: Tensor | Sequence[int], features: Tensor) -> None:
        """Write the rows of some samples; later ones replace earlier ones.

        Args:
            ids: of the samples, ``[N]``, from 0.
            features: ``[N, K]``.

        Raises:
            UsageError: the shapes do not fit, or an id is out of range, or no whole number.
        """
        places = ids_of(ids, len(self.features))
        if features.shape != (*places.shape, self.projection.features):
            raise UsageError(
                f"ids {list(places.shape)} and features {list(features.shape)}; expected [N] and "
                f"[N, {self.projection.features}]"
            )
        self.features[places] = features.detach().to("cpu", torch.float32)

    def missing(self) -> list[int]:
        """Ids of the samples without a row, or with one that is not finite."""
        rows = [(~block.isfinite()).any(1) for block in self.features.split(BLOCK)]
        return torch.cat(rows).nonzero()[:, 0].tolist()

    def influence(self, others: Tensor, damping: float | None = None) -> Tensor:
        r"""Influence of each sample of the store on others, ``[size, M]``.

        .. math:: \langle \varphi_n, \varphi'_m \rangle \qquad\text{or}\qquad
            \varphi_n^\top \Big( \frac{1}{N} \sum_i \varphi_i \varphi_i^\top + \lambda I \Big)^{-1} \varphi'_m

        The first estimates :func:`~gradbatch.analysis.influence` (TracIn) without bias. The second, with a damping, is
        TRAK's for one model: there, gradients are of the model's output (the log odds of the right class) and not of
        the loss, and each row is multiplied with how the loss changes with that output.

        Args:
            others: features by the same projection, ``[M, K]``.
            damping: :math:`\lambda`, positive, in squared units of a gradient; ``None``: dot products alone.

        Raises:
            UsageError: features of another number, a damping that is not positive, or rows that are missing where there
                is one.

        Edge cases: without damping, NaN in missing rows. Computed in float64.
        """
        if others.dim() != 2 or others.shape[1] != self.projection.features:
            raise UsageError(f"others is {list(others.shape)}; expected [M, {self.projection.features}]")
        directions = others.detach().to("cpu", torch.double).mT  # [K, M]
        if damping is not None:
            directions = torch.linalg.solve(self._second_moment(damping), directions)
        return torch.cat([block.double() @ directions for block in self.features.split(BLOCK)])

    def _second_moment(self, damping: float) -> Tensor:
        if not damping > 0:
            raise UsageError(f"damping is {damping!r}; it is positive")
        missing = self.missing()
        if missing:
            raise UsageError(f"samples without finite features: {len(missing)}, the first is {missing[0]}")
        moment = damping * torch.eye(self.projection.features, dtype=torch.double)
        for block in self.features.split(BLOCK):
            moment += block.double().mT @ block.double() / len(self.features)
        return moment


def _about(about: Path, path: Path) -> dict[str, Any] | None:
    """What a store's ``.json`` says; ``None`` where neither file is there."""
    try:
        found = json.loads(about.read_text())
        return {"whole": True, **{name: found[name] for name in ("size", "features", "seed")}, **found}
    except FileNotFoundError as error:
        if path.exists():
            raise UsageError(f"{path} is there and is no store; take another path") from error
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{about} is no description of a store; take another path") from error


def _reserve(path: Path, size: int) -> None:
    """Make a file of so many bytes, for which there is room: to write to a hole in a file on a full disk kills."""
    with path.open("wb") as file:
        file.truncate(size)
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except AttributeError:
            pass  # not on this system
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not on this file system
                raise
