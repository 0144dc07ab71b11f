"""What became of the samples: how many were packed, cut, truncated, dropped or not used, and that none was lost.

In: the plans of a run, and what reading the data already counted. Out: an `Account`, checked to add up, and plain
sentences of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sparsebalance.planning.errors import CheckFailed
from sparsebalance.planning.plan import MicroBatch, Segment, StepPlan

BINS = 10  # of the fill of micro-batches, from empty to full


@dataclass(frozen=True)
class Share:
    """Samples that were treated alike, the micro-batches that hold them, and their tokens; repeats included."""

    samples: int = 0
    micro_batches: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Account:
    """What became of the rows of a data set. Made, and checked to add up, by `account`.

    Attributes:
        steps: planned.
        rows_read: samples of the data set. truncated, dropped: of those, for being over the length limit, with the
            tokens lost that way. without_targets: that train nothing. not_used: read, but in no step.
        samples, tokens, targets: that are planned, each sample once however often it is.
        repeats, repeated_tokens, repeated_targets: planned again, by later epochs or to fill a batch, on top of those.
        alone: whole samples that have a micro-batch to themselves. packed: whole samples that share one.
            cut: samples in `chunks` chunks; a micro-batch that holds chunks and whole samples counts as packed.
        empty: micro-batches of ranks that had no sample in a step.
        capacity: tokens that a micro-batch may hold.
        fill_mean, fill_p10: tokens / capacity of micro-batches that are not empty: mean, and tenth percentile.
        fill_bins: micro-batches by fill, each bin a tenth of the capacity, the last one open.
    """

    steps: int
    rows_read: int
    truncated: int
    truncated_tokens: int
    dropped: int
    dropped_tokens: int
    without_targets: int
    not_used: int
    samples: int
    tokens: int
    targets: int
    repeats: int
    repeated_tokens: int
    repeated_targets: int
    alone: Share
    packed: Share
    cut: Share
    chunks: int
    empty: int
    capacity: int
    fill_mean: float
    fill_p10: float
    fill_bins: tuple[int, ...]

    @property
    def micro_batches(self) -> int:
        """That are not empty."""
        return self.alone.micro_batches + self.packed.micro_batches + self.cut.micro_batches

    def sentences(self) -> list[str]:
        """The account for a reader; what did not happen is left out, but for losses."""
        return [
            self._became(),
            f"{self.tokens + self.repeated_tokens:,} tokens, {self.targets + self.repeated_targets:,} of them targets, "
            f"in {_count(self.steps, 'step')}; micro-batches are {self.fill_mean:.0%} full on average, the emptiest "
            f"tenth at most {self.fill_p10:.0%} (of {self.capacity:,} tokens).",
            *self._remarks(),
        ]

    def _became(self) -> str:
        fates = [
            f"{self.packed.samples:,} packed in {self.packed.micro_batches:,}" if self.packed.samples else "",
            f"{self.cut.samples:,} cut in {self.chunks:,} chunks" if self.cut.samples else "",
            f"{self.alone.samples:,} alone" if self.alone.samples else "",
        ]
        again = f", planned {_count(self.samples + self.repeats, 'time')} in all," if self.repeats else ""
        return (
            f"{_count(self.samples, 'sample')}{again} became {_count(self.micro_batches, 'micro-batch')}: "
            f"{', '.join(filter(None, fates))}; {self._losses()}."
        )

    def _losses(self) -> str:
        if not self.dropped and not self.truncated:
            return "none was lost (0 dropped, 0 truncated)"
        dropped = f"{self.dropped:,} dropped" + (f" ({_count(self.dropped_tokens, 'token')})" if self.dropped else "")
        cut_off = f" ({_count(self.truncated_tokens, 'token')} cut off)" if self.truncated else ""
        return f"of {_count(self.rows_read, 'row')} read, {dropped} and {self.truncated:,} truncated{cut_off}"

    def _remarks(self) -> list[str]:
        remarks = {
            f"{_count(self.not_used, 'sample')} not used: in no batch of the steps planned.": self.not_used,
            f"{_count(self.repeats, 'repeat')} of samples, by later epochs or to fill a batch: "
            f"{self.repeated_tokens:,} tokens beside the {self.tokens:,} planned once.": self.repeats,
            f"{_count(self.without_targets, 'sample')} without a target token, training nothing.": self.without_targets,
            f"{_count(self.empty, 'empty micro-batch')}: ranks without a sample in a step.": self.empty,
        }
        return [remark for remark, count in remarks.items() if count]


@dataclass
class Accountant:
    """Takes in plans step by step, for runs whose plans are not kept."""

    _known: dict[int, tuple[int, int]] = field(default_factory=dict)  # sample -> length, targets
    _counts: Counter[str] = field(default_factory=Counter)
    _sizes: list[int] = field(default_factory=list)

    def add(self, plan: StepPlan) -> None:
        """One more step.

        Raises:
            CheckFailed: a planned sample is incomplete or differs from step to step.
        """
        self._counts += _of_samples(plan, self._counts["steps"], self._known)
        for unit in plan.micro_batches:
            self._counts += _of_unit(unit)
            self._sizes += [unit.tokens] if unit.segments else []
        self._counts["steps"] += 1

    def account(
        self,
        *,
        capacity: int,
        rows_read: int,
        truncated: int = 0,
        truncated_tokens: int = 0,
        dropped: int = 0,
        dropped_tokens: int = 0,
        without_targets: int = 0,
        not_used: int = 0,
    ) -> Account:
        """What became of the samples so far; see `account`."""
        known, counts = self._known, self._counts
        kept = rows_read - dropped
        if not self._sizes:
            raise CheckFailed(f"no sample of {rows_read:,} read is planned; account for at least one step")
        if len(known) + not_used != kept:
            raise CheckFailed(
                f"{rows_read:,} rows were read and {dropped:,} of them dropped, which leaves {kept:,}, but "
                f"{len(known):,} samples are planned and {not_used:,} not used: the samples do not add up"
            )
        if truncated > kept or min(truncated, dropped, not_used) < 0:
            raise CheckFailed(
                f"of {kept:,} rows kept, {truncated:,} cannot be truncated, {dropped:,} dropped and {not_used:,} not "
                "used: the counts do not add up"
            )
        fill = np.array(self._sizes) / capacity
        bins = np.bincount(np.minimum(fill * BINS, BINS - 1).astype(np.int64), minlength=BINS)
        return Account(
            steps=counts["steps"],
            rows_read=rows_read,
            truncated=truncated,
            truncated_tokens=truncated_tokens,
            dropped=dropped,
            dropped_tokens=dropped_tokens,
            without_targets=without_targets,
            not_used=not_used,
            samples=len(known),
            tokens=sum(length for length, _ in known.values()),
            targets=sum(targets for _, targets in known.values()),
            repeats=counts["repeats"],
            repeated_tokens=counts["repeated tokens"],
            repeated_targets=counts["repeated targets"],
            alone=_share(counts, "alone"),
            packed=_share(counts, "packed"),
            cut=_share(counts, "cut"),
            chunks=counts["chunks"],
            empty=counts["empty"],
            capacity=capacity,
            fill_mean=float(fill.mean()),
            fill_p10=float(np.quantile(fill, 0.1)),
            fill_bins=tuple(bins.tolist()),
        )


def account(
    plans: Iterable[StepPlan],
    *,
    capacity: int,
    rows_read: int,
    truncated: int = 0,
    truncated_tokens: int = 0,
    dropped: int = 0,
    dropped_tokens: int = 0,
    without_targets: int = 0,
    not_used: int = 0,
) -> Account:
    """Count what plans do with samples whose ids are unique in the data set.

    Args:
        plans: of all steps.
        capacity: tokens that a micro-batch may hold: the unit size where the policy packs to one, else the cap.
        rows_read: of the data. truncated, truncated_tokens, dropped, dropped_tokens, without_targets: of those.
        not_used: read and kept, but in no step: counted from the batches, so that a plan that loses one is found.

    Raises:
        CheckFailed: there are no plans, a planned sample is incomplete or differs from step to step, or planned,
            dropped and unused samples are not all that were read.
    """
    books = Accountant()
    for plan in plans:
        books.add(plan)
    return books.account(
        capacity=capacity,
        rows_read=rows_read,
        truncated=truncated,
        truncated_tokens=truncated_tokens,
        dropped=dropped,
        dropped_tokens=dropped_tokens,
        without_targets=without_targets,
        not_used=not_used,
    )


def _of_samples(plan: StepPlan, step: int, known: dict[int, tuple[int, int]]) -> Counter[str]:
    """Counts of samples that are cut or planned again. Adds the others to `known`.

    Raises:
        CheckFailed: a sample is incomplete, or another one than an earlier step's of the same id.
    """
    pieces: dict[int, list[Segment]] = {}
    for unit in plan.micro_batches:
        for segment in unit.segments:
            pieces.setdefault(segment.sample, []).append(segment)
    counts: Counter[str] = Counter()
    for sample, segments in pieces.items():
        segments.sort(key=lambda segment: segment.start)
        length = segments[0].sample_length
        edges = [(segment.start, segment.end) for segment in segments]
        if edges[0][0] or edges[-1][1] != length or any(a[1] != b[0] for a, b in pairwise(edges)):
            raise CheckFailed(
                f"step {step} plans tokens {edges[:4]} of sample {sample}, which has {length:,}: "
                "each must be planned exactly once"
            )
        size = length, sum(segment.targets for segment in segments)
        if known.get(sample, size) != size:
            raise CheckFailed(
                f"sample {sample} has {size[0]:,} tokens and {size[1]:,} targets in step {step}, but "
                f"{known[sample][0]:,} and {known[sample][1]:,} in an earlier step: ids must be unique in the data"
            )
        if sample in known:
            counts.update({"repeats": 1, "repeated tokens": size[0], "repeated targets": size[1]})
        known[sample] = size
        counts["cut samples"] += not segments[0].is_whole
    return counts


def _of_unit(unit: MicroBatch) -> Counter[str]:
    whole = [segment.tokens for segment in unit.segments if segment.is_whole]
    chunks = [segment.tokens for segment in unit.segments if not segment.is_whole]
    kind = "alone" if len(unit.segments) == 1 else "packed"
    return Counter(
        {
            f"{kind} samples": len(whole),
            f"{kind} micro-batches": int(bool(whole)),
            f"{kind} tokens": sum(whole),
            "cut micro-batches": int(bool(chunks) and not whole),
            "cut tokens": sum(chunks),
            "chunks": len(chunks),
            "empty": int(not unit.segments),
        }
    )


def _share(counts: Counter[str], kind: str) -> Share:
    return Share(counts[f"{kind} samples"], counts[f"{kind} micro-batches"], counts[f"{kind} tokens"])


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
