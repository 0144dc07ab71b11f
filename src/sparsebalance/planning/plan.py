"""What one optimiser step looks like before it runs: samples, segments, micro-batches, step plan.

In: sample lengths and the decisions of batching and tuning. Out: frozen, validated descriptions that the
simulator, the executor and the reports all read. Words as in the README's glossary.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sparsebalance.planning.errors import InputError


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence.

    Attributes:
        id: unique within the step.
        length: tokens, >= 1.
        targets: target tokens (those that enter the loss), 0 <= targets <= length. A causal language model
            trained on every token has length - 1.
    """

    id: int
    length: int
    targets: int

    def __post_init__(self) -> None:
        for name, value in (("length", self.length), ("targets", self.targets)):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                shown = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
                raise InputError(
                    f"sample {self.id}: {name} is {shown}, but it must be a whole number of tokens; "
                    "check the length column or the length function"
                )
            object.__setattr__(self, name, int(value))  # numpy integers would not survive JSON
        if self.length < 1:
            raise InputError(
                f"sample {self.id}: length is {self.length}, but a sample has at least 1 token; "
                "drop empty samples before planning"
            )
        if not 0 <= self.targets <= self.length:
            raise InputError(
                f"sample {self.id}: {self.targets} target tokens do not fit in {self.length} tokens; "
                "targets count tokens of the sample"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a sample of `sample_length` tokens, `targets` of them target tokens."""

    sample: int
    start: int
    end: int
    sample_length: int
    targets: int

    @classmethod
    def whole(cls, sample: Sample) -> Segment:
        return cls(sample.id, 0, sample.length, sample.length, sample.targets)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == self.sample_length


@dataclass(frozen=True, slots=True)
class Latency:
    """Predicted milliseconds of one micro-batch over all layers of the model (or of one stage)."""

    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    def scaled(self, factor: float) -> Latency:
        return Latency(self.forward_ms * factor, self.backward_ms * factor)


@dataclass(frozen=True, slots=True)
class OnlineTuning:
    """How a micro-batch's budgets follow its own routing scores while it runs; `MicroBatch.budgets` are then wishes.

    Attributes:
        default: budget whose coverage all others are compared with, in blocks.
        threshold: most that tuning may change a layer's coverage, as estimated from the layer's own scores.
        min_budget, max_budget: limits in blocks.
        price: coverage that a millisecond of attention must bring in a layer ("share": layers share out the time
            that the plan gave to the micro-batch); None keeps the wishes, as far as `threshold` allows ("clamp").
        attention_ms: [len(BUDGET_GRID)] predicted milliseconds of one attention layer of this micro-batch, forward and
            backward, at BUDGET_GRID; empty where no price is given.
    """

    default: int
    threshold: float
    min_budget: int
    max_budget: int
    price: float | None = None
    attention_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A work unit: what one forward call processes, a packed row of segments.

    An empty `segments` is an explicit empty unit: its rank has nothing to compute but joins the collectives.

    Attributes:
        segments: whole samples packed one after another, or one chunk of a sample.
        budgets: attention budget (key blocks per query, own block included) per layer, for all its segments.
        latency: predicted milliseconds, a recomputed forward included.
        recompute: a chunk whose forward keeps nothing but keys and values; it runs again before its backward.
        online: set where budgets are tuned while it runs.
    """

    segments: tuple[Segment, ...]
    budgets: tuple[int, ...]
    latency: Latency
    recompute: bool = False
    online: OnlineTuning | None = None

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def targets(self) -> int:
        return sum(segment.targets for segment in self.segments)


Ranks = tuple[tuple[MicroBatch, ...], ...]
"""[data-parallel rank][execution order]"""


def chain_lengths(units: Sequence[Sequence[Segment]]) -> tuple[int, ...]:
    """Lengths of consecutive runs of one rank's units: the chunks of a sample, in order, or 1 for any other unit.

    Raises:
        InputError: a chunk does not follow directly on the chunk before it.
    """
    lengths: list[int] = []
    last: Segment | None = None
    for unit in units:
        first = unit[0] if len(unit) == 1 else None
        if first is not None and first.start:
            if last is None or (last.sample, last.end) != (first.sample, first.start):
                raise InputError(
                    f"sample {first.sample}: its chunk at token {first.start} does not follow on the one before; "
                    "chunks of a sample run on one rank, one after another"
                )
            lengths[-1] += 1
        else:
            lengths.append(1)
        last = first
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class Topology:
    """Parallel degrees: data (dp), pipeline (pp), tensor (tp), sequence (sp)."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "sp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"topology: {name} is {value!r}, but it must be a whole number >= 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp * self.sp


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which data-parallel rank runs which micro-batches, in which order, with which budgets, in one step.

    Attributes:
        policy: name of the policy that made it.
        ranks: per data-parallel rank, its micro-batches in execution order; never an empty tuple.
        predicted_step_ms: the simulator's step time.
    """

    policy: str
    topology: Topology
    block_size: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    predicted_step_ms: float

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [unit for rank in self.ranks for unit in rank]

    @property
    def targets(self) -> int:
        """Target tokens of the global batch: the denominator of the loss."""
        return sum(unit.targets for unit in self.micro_batches)

    @property
    def mean_budget(self) -> float:
        """Mean over layers and micro-batches, empty units left out, in blocks."""
        budgets = [unit.budgets for unit in self.micro_batches if unit.segments]
        return sum(map(sum, budgets)) / sum(map(len, budgets))

    def validate(self, samples: Iterable[Sample], token_cap: int | None = None) -> None:
        """Check the plan against the samples that it was made from.

        Raises:
            InputError: a token of a sample is missing or appears twice, a target token is lost, a rank has no
                unit, a unit holds more than `token_cap` tokens, a budget is below 1, or a chunk does not
                start at a multiple of the block size.
        """
        if len(self.ranks) != self.topology.dp:
            raise InputError(f"plan has {len(self.ranks)} ranks, but the topology has dp={self.topology.dp}")
        expected = {sample.id: sample for sample in samples}
        pieces: dict[int, list[Segment]] = {}
        for index, rank in enumerate(self.ranks):
            if not rank:
                raise InputError(f"rank {index} has no unit; give it an explicit empty one")
            for unit in rank:
                if token_cap is not None and unit.tokens > token_cap:
                    raise InputError(f"rank {index}: a unit holds {unit.tokens} tokens, over the cap of {token_cap}")
                if any(budget < 1 for budget in unit.budgets):
                    raise InputError(f"rank {index}: budgets {unit.budgets} hold a value below 1 block")
                for segment in unit.segments:
                    pieces.setdefault(segment.sample, []).append(segment)
        if unknown := sorted(set(pieces) - set(expected)):
            raise InputError(f"plan holds samples {unknown[:5]} that are not in the step")
        if missing := sorted(set(expected) - set(pieces)):
            raise InputError(f"plan drops samples {missing[:5]} ({len(missing)} in all)")
        for sample_id, segments in pieces.items():
            self._validate_sample(expected[sample_id], sorted(segments, key=lambda s: s.start))

    def _validate_sample(self, sample: Sample, segments: Sequence[Segment]) -> None:
        position = 0
        for segment in segments:
            if segment.start != position or segment.end <= segment.start:
                raise InputError(
                    f"sample {sample.id}: tokens [{position}, {segment.start}) are missing or planned twice"
                )
            if segment.start % self.block_size:
                raise InputError(
                    f"sample {sample.id}: a chunk starts at token {segment.start}, "
                    f"not a multiple of the block size {self.block_size}"
                )
            position = segment.end
        if position != sample.length:
            raise InputError(f"sample {sample.id}: {position} of {sample.length} tokens are planned")
        if sum(segment.targets for segment in segments) != sample.targets:
            raise InputError(f"sample {sample.id}: its {sample.targets} target tokens are not all planned")

    def digest(self) -> str:
        """SHA-256 over the whole plan; equal on two ranks exactly when their plans are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
