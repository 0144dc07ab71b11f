"""Latency tables as files: saving, loading with checks, refusing a foreign one, merging and comparing.

In: paths or tables. Out: tables, or rows that say where two tables differ. The format is JSON with a schema
version; a file that cannot be interpolated is refused as a whole.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.files import write_whole
from sparsebalance.planning.network import LinkCost, NetworkCosts
from sparsebalance.planning.table import AttentionPoint, Identity, LatencyTable, LinePoint

SCHEMA = 2
Point = TypeVar("Point", AttentionPoint, LinePoint)


def check_same_identity(table: Identity, run: Identity) -> None:
    """Raises:
    InputError: names every differing field with both values.
    """
    have, want = table.flat(), run.flat()
    differing = [f"{name} (table {have[name]!r}, run {want[name]!r})" for name in have if have[name] != want[name]]
    if differing:
        raise InputError(
            f"the latency table was measured for something else: {', '.join(differing)}; "
            "measure again with `sparsebalance profile`, or run what it was measured for"
        )


def save_table(table: LatencyTable, path: Path) -> None:
    """Write atomically as JSON."""
    write_whole(path, json.dumps({"schema": SCHEMA, **asdict(table)}, indent=1) + "\n")


def load_table(path: Path) -> LatencyTable:
    """Raises:
    InputError: no such file, not JSON, another schema, or a table that cannot be interpolated.
    """
    if not path.is_file():
        raise InputError(f"no latency table at {path}; make one with `sparsebalance profile --table {path}`")
    try:
        record = json.loads(path.read_text())
        schema = record.pop("schema")
        if schema != SCHEMA:
            raise InputError(
                f"latency table {path} has schema {schema}, but this version reads {SCHEMA}; "
                "measure it again with `sparsebalance profile`"
            )
        table = _table(record)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"latency table {path} is broken ({error}); measure it again with `sparsebalance profile`"
        ) from error
    _check_points(table, path)
    return table


def _table(record: dict[str, Any]) -> LatencyTable:
    identity, network = record["identity"], record["network"]
    router, forward, backward = record["call_ms"]
    return LatencyTable(
        identity=Identity(**{**identity, "decoder": Decoder(**identity["decoder"])}),
        provenance=record["provenance"],
        attention=tuple(AttentionPoint(**point) for point in record["attention"]),
        linear=tuple(LinePoint(**point) for point in record["linear"]),
        head=tuple(LinePoint(**point) for point in record["head"]),
        call_ms=(float(router), float(forward), float(backward)),
        residual=float(record["residual"]),
        dense=tuple(LinePoint(**point) for point in record["dense"]),
        network=None
        if network is None
        else NetworkCosts(LinkCost(**network["point_to_point"]), LinkCost(**network["all_reduce"]), network["ranks"]),
    )


def _check_points(table: LatencyTable, path: Path) -> None:
    lines: tuple[LinePoint, ...] = (*table.linear, *table.head, *table.dense)
    times = [t for p in table.attention for t in (p.router_ms, p.forward_ms, p.backward_ms)]
    times += [t for p in lines for t in (p.forward_ms, p.backward_ms)]
    others = [*table.call_ms, table.residual, *(p.spread for p in table.attention), *(p.spread for p in lines)]
    lengths = {point.length for point in table.attention}
    if len(lengths) < 2 or len(table.linear) < 2 or len(table.head) < 2:
        raise InputError(f"latency table {path} has too few points; measure it again")
    if not all(math.isfinite(t) and t > 0 for t in times):
        raise InputError(f"latency table {path} holds a time that is not above 0; measure it again")
    if not all(math.isfinite(x) and x >= 0 for x in others):
        raise InputError(f"latency table {path} holds a fixed cost or spread below 0; measure it again")
    for points in (table.linear, table.head, table.dense):
        if any(a.count >= b.count for a, b in itertools.pairwise(points)):
            raise InputError(f"latency table {path} holds counts that do not rise; measure it again")


def merge_tables(tables: Sequence[LatencyTable]) -> LatencyTable:
    """Union of the points of tables of one machine and model; a point that several have is their mean.

    Raises:
        InputError: no table, or tables of different things.
    """
    if not tables:
        raise InputError("no latency tables to merge; give at least one")
    for other in tables[1:]:
        check_same_identity(tables[0].identity, other.identity)
    router, forward, backward = np.mean([table.call_ms for table in tables], axis=0).tolist()
    networks = [table.network for table in tables if table.network is not None]
    attention = _union([point for table in tables for point in table.attention])
    return replace(
        tables[0],
        provenance={**tables[0].provenance, "merged": [dict(table.provenance) for table in tables]},
        attention=tuple(attention),
        linear=tuple(_union([point for table in tables for point in table.linear])),
        head=tuple(_union([point for table in tables for point in table.head])),
        dense=tuple(_union([point for table in tables for point in table.dense])),
        call_ms=(router, forward, backward),
        residual=float(np.sqrt(np.mean([table.residual**2 for table in tables]))),
        network=networks[0] if networks else None,
    )


def _key(point: AttentionPoint | LinePoint) -> tuple[int, int]:
    return (point.length, point.budget) if isinstance(point, AttentionPoint) else (point.count, 0)


def _union(points: Sequence[Point]) -> list[Point]:
    """One point per place: the mean of all measured there."""
    places: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        places.setdefault(_key(point), []).append(point)
    merged = []
    for _, same in sorted(places.items()):
        times = [name for name in vars(same[0]) if name.endswith("_ms")]
        means: dict[str, Any] = {name: float(np.mean([getattr(point, name) for point in same])) for name in times}
        spread = float(np.sqrt(np.sum([point.spread**2 for point in same]))) / len(same)
        merged.append(replace(same[0], **means, spread=spread))
    return merged


@dataclass(frozen=True)
class Difference:
    """One measured place of two tables: total milliseconds in each, and the ratio second / first."""

    term: str
    place: str
    first_ms: float
    second_ms: float

    @property
    def ratio(self) -> float:
        return self.second_ms / self.first_ms


def compare_tables(first: LatencyTable, second: LatencyTable) -> list[Difference]:
    """Every place that both tables measured.

    Tables of different machines may be compared, tables of different models or attention may not.

    Raises:
        InputError: the models differ, or the tables share no point.
    """
    check_same_identity(
        replace(first.identity, device="", threads=0, dtype=""),
        replace(second.identity, device="", threads=0, dtype=""),
    )
    rows: list[Difference] = []
    for term in ("attention", "linear", "head"):
        here = {_key(point): point for point in getattr(first, term)}
        for point in getattr(second, term):
            known = here.get(_key(point))
            if known is not None:
                name = f"{point.length:,} tokens, k = {point.budget}" if term == "attention" else f"{point.count:,}"
                rows.append(Difference(term, name, _total(known), _total(point)))
    if not rows:
        raise InputError(
            "the two tables share no measured point; measure both with the same data.max_length and budget"
        )
    return rows


def _total(point: AttentionPoint | LinePoint) -> float:
    return float(sum(getattr(point, name) for name in vars(point) if name.endswith("_ms")))
