"""Gradients of a rank's parameters: summed over the ranks that hold the same ones, clipped by the norm over the model.

In: parameters by name, whose gradients backward passes add to. Out: the gradients of the step, in place.
`FlatGradients` holds them whole, in one buffer; `sharded` has those that are shared out between steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebalance.training.parallel import Ranks
from sparsebalance.training.stage import Stage
from sparsebalance.training.tensor_parallel import TensorParallel

BUCKET_BYTES = 25 * 2**20  # of gradients that one all-reduce sums


class Gradients(ABC):
    """Of the parameters that a rank holds; the engine's `Reduction`."""

    def __init__(self, ranks: Ranks, tied: str | None, tensor: TensorParallel | None) -> None:
        """Args:
        tied: name of the parameter that another worker of the pipeline holds as well, where there is one.
        tensor: how they are spread over tensor-parallel ranks, where they are.
        """
        self._ranks, self._tied, self._tensor = ranks, tied, tensor

    @property
    @abstractmethod
    def buckets(self) -> int:
        """In how many parts they are summed while the step's last backward runs."""

    @property
    @abstractmethod
    def megabytes(self) -> float:
        """Of what is summed (10^6 bytes)."""

    @property
    @abstractmethod
    def own(self) -> dict[str, Tensor]:
        """This rank's part of each gradient, by name; only after `reduce`."""

    @abstractmethod
    def begin(self) -> None:
        """Before a step: they are zero, and the parameters ready for any number of micro-batches. Collective."""

    @abstractmethod
    def last_action(self, stage: Stage, remaining: Set[Tensor] | None = None) -> AbstractContextManager[None]:
        """See `Reduction`."""

    @abstractmethod
    def complete(self, parameter: Tensor) -> None:
        """See `Reduction`."""

    @abstractmethod
    def reduce(self) -> None:
        """Sum over the processes that hold the same parameters; then what is spread over this rank's copy of the
        model: a tied weight over the two stages that hold it, and over tensor-parallel ranks what each has only a part
        of. Collective."""

    def norm(self) -> float:
        """Euclidean norm over all gradients of the model, in fp64 (a sum of millions of squares). Collective."""
        gradients = self.own
        if self._ranks.stage_worker and self._tied is not None:  # counted by the first stage
            gradients.pop(self._tied, None)
        if self._tensor is not None:
            gradients = self._tensor.counted_once(gradients)
        return math.sqrt(self._ranks.sum_over_model(self._square_sum(gradients.values())))

    def clip(self, limit: float) -> float:
        """Scale down to `limit` where the norm is larger; returns the norm before. Collective."""
        norm = self.norm()
        if norm > limit:
            for gradient in self.own.values():
                gradient.mul_(limit / norm)
        return norm

    def copies(self) -> dict[str, Tensor]:
        """Of `own`."""
        return {name: gradient.clone() for name, gradient in self.own.items()}

    def restore(self, copies: Mapping[str, Tensor]) -> None:
        """What `copies` returned, after any step since."""
        for name, gradient in self.own.items():
            gradient.copy_(copies[name])

    def _square_sum(self, gradients: Iterable[Tensor]) -> float:
        """Over the processes that have a part of these gradients each."""
        return sum((float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients), 0.0)

    def _complete_over_model(self) -> None:
        gradients = self.own
        if self._tied is not None and self._tied in gradients:
            dist.all_reduce(gradients[self._tied], group=self._ranks.ends)
        if self._tensor is not None:
            self._tensor.complete_gradients(gradients)


class FlatGradients(Gradients):
    """All gradients of a rank's parameters as views of one buffer: no copies.

    They are summed over the data-parallel ranks in buckets, the last parameters first, as a backward completes them
    (Li et al. 2020, PyTorch Distributed, section 3.2): each while the rest of the step's last backward runs, as soon
    as its gradients are complete and the bucket before it is on its way. So every rank sums the same buckets in the
    same order, whatever it runs.

    Attributes:
        buffer: all of them, [parameters].
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        ranks: Ranks,
        tied: str | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        """Args:
        named: by name; those that need no gradient have none.
        """
        super().__init__(ranks, tied, tensor)
        self._named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        parameters = list(self._named.values())
        dtype = next(iter(named.values())).dtype
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype)  # empty where all is frozen
        self._buckets: list[Tensor] = []
        self._bucket_of: dict[Tensor, int] = {}
        start = stop = self.buffer.numel()
        for parameter in reversed(parameters):
            end, start = start, start - parameter.numel()
            parameter.grad = self.buffer[start:end].view_as(parameter)
            self._bucket_of[parameter] = len(self._buckets)
            if (stop - start) * self.buffer.itemsize >= BUCKET_BYTES or not start:
                self._buckets.append(self.buffer[start:stop])
                stop = start
        self._incomplete: list[set[Tensor]] = []  # by bucket
        self._sums: list[dist.Work | None] = []  # of the buckets on their way
        self._expect_all()

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    @property
    def megabytes(self) -> float:
        return self.buffer.nbytes / 1e6

    @property
    def own(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self._named.items() if parameter.grad is not None}

    def begin(self) -> None:
        self.buffer.zero_()
        self._expect_all()

    @contextmanager
    def last_action(self, stage: Stage, remaining: Set[Tensor] | None = None) -> Iterator[None]:
        own = [parameter for _, parameter in stage.named_parameters() if parameter in self._bucket_of]
        if remaining is not None:
            self._discard([parameter for parameter in own if parameter not in remaining])
        # None are needed where nothing is summed.
        hooked = [] if self._ranks.data is None else own
        hooks = [parameter.register_post_accumulate_grad_hook(self.complete) for parameter in hooked]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._discard(own)

    def complete(self, parameter: Tensor) -> None:
        """Raises:
        RuntimeError: that was said before; its bucket may have been summed without what came in between.
        """
        incomplete = self._incomplete[self._bucket_of[parameter]]
        if parameter not in incomplete:
            shape = list(parameter.shape)
            raise RuntimeError(f"a gradient of shape {shape} was added to twice in a stage's last action of the step")
        self._discard([parameter])

    def reduce(self) -> None:
        self._discard(self._bucket_of)
        for work in self._sums:
            if work is not None:
                work.wait()
        self._complete_over_model()

    def _expect_all(self) -> None:
        self._sums.clear()
        self._incomplete = [set() for _ in self._buckets]
        for parameter, bucket in self._bucket_of.items():
            self._incomplete[bucket].add(parameter)

    def _discard(self, complete: Iterable[Tensor]) -> None:
        """Send off the next buckets, up to the first that is not complete without these gradients."""
        for parameter in complete:
            self._incomplete[self._bucket_of[parameter]].discard(parameter)
        if self._ranks.data is None:
            return
        while len(self._sums) < len(self._buckets) and not self._incomplete[len(self._sums)]:
            bucket = self._buckets[len(self._sums)]
            self._sums.append(dist.all_reduce(bucket, group=self._ranks.data, async_op=True))
