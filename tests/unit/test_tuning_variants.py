"""A forecast's variants carry how they tune, down to the policy that plans."""

from __future__ import annotations

from dataclasses import replace

from sparsebalance.planner.forecast import TuningSettings, Variant, forecast
from sparsebalance.planner.scenario import Scenario
from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.decoder import named_decoder
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.plan import Sample, Topology
from sparsebalance.planning.slack import Slack

SCENARIO = Scenario(named_decoder("qwen2.5-3b"), named_device("h200"), Topology(dp=2, pp=2), 256, 8)
BATCH = [Sample(i, length, 64) for i, length in enumerate((30_000, 9_000, 4_000, 2_000))]


def test_settings_reach_the_policy() -> None:
    assert Variant("sab", SCENARIO).configured(32_768).tuning == Variant("random", SCENARIO).configured(32_768).tuning
    assert Variant("dst", SCENARIO).configured(32_768).tuning == Anchor()
    strict = Anchor(kind="min", threshold=0.05, level="global")
    assert Variant("dst", SCENARIO, TuningSettings(strict)).configured(32_768).tuning == strict
    sized = replace(SCENARIO, unit_size=1024)
    policy = Variant("sab_dst", sized, TuningSettings(Anchor(threshold=0.2), "fast")).configured(32_768)
    assert policy.tuning == Slack(aim="fast", threshold=0.2)
    assert policy.unit_size == 1024


def test_a_wider_threshold_gives_up_more_coverage_for_more_speed() -> None:
    thresholds = (0.0, 0.1, 0.3)
    variants = [Variant("random", SCENARIO)]
    variants += [Variant("dst", SCENARIO, TuningSettings(Anchor(threshold=p))) for p in thresholds]
    fixed, *tuned = forecast([BATCH], variants, 32_768).rows
    assert tuned[0].coverage >= fixed.coverage - 1e-9
    assert tuned[0].step_ms <= fixed.step_ms
    assert tuned[0].step_ms > tuned[1].step_ms > tuned[2].step_ms
    assert tuned[0].coverage > tuned[1].coverage > tuned[2].coverage
