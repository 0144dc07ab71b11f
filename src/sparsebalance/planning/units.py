"""Work units: whole samples packed into rows, long samples cut in chunks.

In: the samples of a step and a unit size or a cap in tokens. Out: units, the packed rows of segments that one forward
call processes each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Sample, Segment

Unit = tuple[Segment, ...]
Placement = tuple[tuple[Unit, ...], ...]  # [data-parallel rank][execution order]

EMPTY: tuple[Unit, ...] = ((),)  # a rank without samples says so with one empty unit


def check_not_empty(samples: Sequence[Sample]) -> None:
    """Raises:
    InputError: no samples.
    """
    if not samples:
        raise InputError("the step has no samples; a global batch needs at least one")


def check_cap(samples: Sequence[Sample], token_cap: int) -> None:
    """Raises:
    InputError: no samples, or a sample that alone is over the cap of a micro-batch.
    """
    check_not_empty(samples)
    longest = max(samples, key=lambda sample: (sample.length, -sample.id))
    if longest.length > token_cap:
        raise InputError(
            f"sample {longest.id} has {longest.length} tokens, over the cap of {token_cap} tokens per "
            "micro-batch; raise token_cap, or truncate or drop longer samples"
        )


def check_unit_size(size: int, block_size: int, token_cap: int) -> None:
    """Raises:
    InputError: a unit size that is no multiple of the block size, or over the cap.
    """
    if size < block_size or size % block_size:
        raise InputError(f"unit size {size} is no multiple of the block size {block_size}; chunks are whole blocks")
    if size > token_cap:
        raise InputError(f"unit size {size} is over the cap of {token_cap} tokens per micro-batch; lower it")


def cut(sample: Sample, unit_size: int | None, block_size: int) -> tuple[Segment, ...]:
    """The sample whole, or in the fewest chunks of at most `unit_size` tokens, as equal as whole blocks allow.

    Where its target tokens lie is not known to a plan made of lengths alone: they are taken to be its last ones,
    as in instruction data.
    """
    if unit_size is None or sample.length <= unit_size:
        return (Segment.whole(sample),)
    count = -(-sample.length // unit_size)
    size = -(-sample.length // (count * block_size)) * block_size
    first_target = sample.length - sample.targets
    chunks = []
    for start in range(0, sample.length, size):
        end = start + size if start + size < sample.length else sample.length  # min and max would take half of the time
        targets = end - (start if start > first_target else first_target)
        chunks.append(Segment(sample.id, start, end, sample.length, targets if targets > 0 else 0))
    return tuple(chunks)


def pack_first_fit(segments: Sequence[Segment], token_cap: int) -> tuple[Unit, ...]:
    """Longest first into the first unit with room; one empty unit where there is nothing to pack.

    A segment over the cap gets a unit of its own. The first unit with room is found by descending a tree of the most
    room below each node, so n segments take n log n (Johnson 1973, Near-optimal bin packing algorithms).
    """
    return pack_sorted(longest_first(segments), token_cap) or EMPTY


def longest_first(segments: Sequence[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda s: (-s.tokens, s.sample))


def pack_sorted(ordered: Sequence[Segment], token_cap: int) -> tuple[Unit, ...]:
    """`pack_first_fit` of segments that are sorted already; no unit where there is nothing to pack."""
    leaves = 1 << max(len(ordered) - 1, 0).bit_length()  # unit i has its room at room[leaves + i], its parent's at half
    room = [token_cap] * (2 * leaves)
    units: list[list[Segment]] = []
    for segment in ordered:
        wanted = min(segment.tokens, token_cap)
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < wanted:
                node += 1
        if node - leaves == len(units):
            units.append([])
        units[node - leaves].append(segment)
        room[node] -= wanted
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return tuple(map(tuple, units))


def split_packs(packs: Sequence[Unit], count: int) -> tuple[Unit, ...]:
    """The packs, the largest of them split in two until there are `count`, or only single samples are left to split."""
    whole = [pack for pack in packs if len(pack) < 2]
    heap = [(-_tokens(pack), place, pack) for place, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    made = len(packs)
    while heap and made < count:
        halves: tuple[list[Segment], list[Segment]] = ([], [])
        for segment in longest_first(heapq.heappop(heap)[-1]):
            min(halves, key=_tokens).append(segment)
        for half in map(tuple, halves):
            if len(half) > 1:
                heapq.heappush(heap, (-_tokens(half), made, half))
            else:
                whole.append(half)
            made += 1
        made -= 1
    return (*whole, *(pack for _, _, pack in sorted(heap)))


def _tokens(unit: Sequence[Segment]) -> int:
    return sum(segment.tokens for segment in unit)
