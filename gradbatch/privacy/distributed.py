"""Clipped sums of several processes: added up once in a step, with noise once in the total.

Each rank clips the samples of its own share of a batch (:class:`~gradbatch.privacy.PoissonSampler` deals them out). For
that it needs the whole parameters, and no communication: the norm is of one sample, over all parameters. Parameters
that every rank holds, in ``DistributedDataParallel`` or not, are summed on rank 0, which adds the noise and sends the
result to all. Of parameters sharded by ``fully_shard`` (FSDP2), each rank gets its shard of the sum and adds its noise.

gradbatch's backward passes do not reach what ``DistributedDataParallel`` and ``fully_shard`` do to gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradbatch.errors import DistributedError, UsageError
from gradbatch.privacy.noise import GaussianNoise
from gradbatch.privacy.ranks import Ranks, initialised

_Key = TypeVar("_Key", bound=Hashable)

# What is sent one by one costs a round trip each; so small tensors are sent together.
_BUCKET_BYTES = 32 << 20


@torch.no_grad()
def noised_sums(
    ranks: Ranks, sums: Mapping[_Key, Tensor], noise: GaussianNoise, std: float | Sequence[float]
) -> dict[_Key, Tensor]:
    """Add up the ranks' sums, and add noise to each total once.

    Args:
        ranks: who calls this, all at the same time.
        sums: this rank's own by parameter, in the same order on all ranks, each of the whole parameter's shape; their
            memory is used. A key that is no sharded parameter stands for something that all ranks hold.
        noise: rank 0's is used for what all ranks hold; for shards, each rank's own (:func:`noise_of_rank`).
        std: of the noise in a total; or one for each of the sums.

    Returns:
        The totals by parameter. Of a sharded one it is a ``DTensor`` that is sharded like it; else a tensor that is the
        same on all ranks, bit by bit.

    Raises:
        DistributedError: a rank is gone.
        UsageError: a sharded parameter whose shards are cut in a way that ``fully_shard`` alone does not.
    """
    stds = [std] * len(sums) if isinstance(std, float | int) else list(std)
    each = [(key, total, own) for (key, total), own in zip(sums.items(), stds, strict=True)]
    shared = [(total, own) for key, total, own in each if not is_sharded(key)]
    try:
        held = iter(_held_by_all(ranks, [total for total, _ in shared], noise, [own for _, own in shared]))
        return {k: _shards(k, total, noise, own) if is_sharded(k) else next(held) for k, total, own in each}
    except RuntimeError as error:
        if isinstance(error, UsageError):
            raise
        raise DistributedError(
            f"adding up clipped gradients failed on rank {ranks.rank}, or another rank is gone: {error}"
        ) from error


def noise_of_rank(ranks: Ranks, noise: GaussianNoise) -> GaussianNoise:
    """Noise for shards, different on each rank.

    Two shards with equal noise would give it away by their difference. So a generator that was given, perhaps with the
    same seed on each rank, is only used for a seed, together with the rank. On rank 0 it is used as it is.
    """
    if noise.generator is None or ranks.rank == 0:
        return noise
    state = noise.generator.get_state().numpy().tobytes()
    seed = hashlib.sha256(state + ranks.rank.to_bytes(8, "little")).digest()[:8]
    own = torch.Generator(noise.generator.device)
    return GaussianNoise(own.manual_seed(int.from_bytes(seed, "little", signed=True)))


def fingerprint(parameters: Iterable[Tensor]) -> list[int]:
    """A number for each parameter that all ranks hold, which differs where a bit of it differs, all but certainly.

    To be compared by :meth:`Ranks.together`: ranks that start from other parameters do not train one model.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    held = [p.detach() for p in parameters if not is_sharded(p)]
    bits = [torch.view_as_real(p) if p.is_complex() else p for p in held]
    return [int(each.contiguous().view(integers[each.itemsize]).sum(dtype=torch.int64)) for each in bits]


def is_sharded(parameter: Any) -> bool:
    """Whether a parameter is spread over processes, a ``DTensor``."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "device_mesh")


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Gather the parameters that ``fully_shard`` has spread over processes, for the time of a backward pass.

    Enter it on all ranks between the forward and :func:`gradbatch.backward`. In it, ``model.named_parameters()`` are
    whole, in the memory that they need; results have the same names as ever. Backward passes inside of it send nothing,
    so ranks may make different numbers of them; ``loss.backward()`` does not belong into it.

    Args:
        model: any module; nothing happens if no part of it is sharded.

    Raises:
        UsageError: a model in the older ``FullyShardedDataParallel``, or one with parameters that stay sharded (tensor
            parallelism).
    """
    sharded = _sharded_modules(model)
    try:
        for module in sharded:
            module.set_reshard_after_backward(False, recurse=False)
            module.unshard()
        for name, parameter in model.named_parameters():
            if is_sharded(parameter) and parameter.requires_grad:
                raise UsageError(
                    f"{name} is a DTensor that fully_shard does not gather (tensor parallelism); samples' gradients "
                    "are taken of whole parameters"
                )
        yield
    except BaseException:
        # A pass that broke off leaves fully_shard in the middle of a backward. It is one module's to be reset.
        for module in sharded:
            with suppress(RuntimeError, AttributeError):
                module.reset_iter_state()
        raise
    finally:
        for module in sharded:
            module.set_reshard_after_backward(True, recurse=False)
            module.reshard()


def _sharded_modules(model: nn.Module) -> list[Any]:
    if not initialised():
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UsageError(
                f"{path or 'the model'} is a FullyShardedDataParallel, which flattens parameters; use "
                "torch.distributed.fsdp.fully_shard instead"
            )
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _held_by_all(
    ranks: Ranks, totals: Sequence[Tensor], noise: GaussianNoise, stds: Sequence[float]
) -> list[Tensor]:
    """Summed and noised on rank 0, and sent to all."""
    if ranks.size == 1:
        noise.add_to(totals, stds)
        return list(totals)
    flats, views = _buckets(totals)
    first = dist.get_global_rank(ranks.group, 0)  # type: ignore[arg-type]
    for flat in flats:
        dist.reduce(flat, first, group=ranks.group)
    if ranks.rank == 0:
        noise.add_to(views, stds)
    for flat in flats:
        dist.broadcast(flat, first, group=ranks.group)
    return views


def _buckets(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors to send, and for each given one a view in them."""
    views: list[Tensor] = list(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    flats = []
    for indices in kinds.values():
        for part in _parts(indices, [tensors[index].nbytes for index in indices]):
            if len(part) == 1 and tensors[part[0]].is_contiguous():
                flats.append(tensors[part[0]])
                continue
            flat = torch.cat([tensors[index].reshape(-1) for index in part])
            flats.append(flat)
            for index, piece in zip(part, flat.split([tensors[i].numel() for i in part]), strict=True):
                views[index] = piece.view(tensors[index].shape)
    return flats, views


def _parts(indices: Iterable[int], sizes: Iterable[int]) -> Iterator[list[int]]:
    """Indices in runs of at most so many bytes, or of one."""
    part: list[int] = []
    room = _BUCKET_BYTES
    for index, size in zip(indices, sizes, strict=True):
        if part and size > room:
            yield part
            part, room = [], _BUCKET_BYTES
        part.append(index)
        room -= size
    if part:
        yield part


def _shards(parameter: Any, total: Tensor, noise: GaussianNoise, std: float) -> Tensor:
    """This rank's shard of the sum, with noise. Where replicas hold the same shard, the first draws for all."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placements = parameter.device_mesh, parameter.placements
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise UsageError(
            f"a parameter is spread as {placements}; gradients are summed for fully_shard's shards alone"
        )
    partial = DTensor.from_local(total, mesh, [Partial()] * mesh.ndim, run_check=False)
    local = partial.redistribute(placements=placements).to_local()
    local = local.wait() if hasattr(local, "wait") else local  # still on its way
    replicas = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    if all(mesh.get_coordinate()[axis] == 0 for axis in replicas):
        noise.add_to([local], std)
    for axis in replicas:
        group = mesh.get_group(axis)
        dist.broadcast(local, dist.get_global_rank(group, 0), group=group)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
