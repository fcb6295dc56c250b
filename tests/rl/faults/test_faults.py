"""Every fault in every phase of an episode: it ends as failed, with an honest kind, and no number comes out of it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.rl.rules import RETRIED
from tests.rl.bench import TURNS, Bench
from tests.rl.faults.table import TABLE, run
from tests.rl.proofs import has_no_number

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = sorted(name for name in TABLE if "hangs" not in name and "time-out" not in name and "stalled" not in name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"rl-faults-{place % 2}")) for place, name in enumerate(TABLE)],
)
async def test_every_cell(bench: Bench, name: str) -> None:
    case = TABLE[name]
    trajectory = await run(bench, case)
    failed = has_no_number(trajectory, case.kinds, {case.phase})
    assert trajectory.retried == []
    if case.phase in ("create", "reset"):
        assert (failed.turn, trajectory.turns) == (None, [])
    if case.phase in ("tool", "model") and case.agent is None:
        assert failed.turn == (1 if case.phase == "tool" else 0)
    await bench.empty()


@pytest.mark.xdist_group("rl-faults-0")
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    name=st.sampled_from(QUICK),
    turn=st.integers(0, TURNS - 1),
    retries=st.integers(0, 1),
    swallow=st.booleans(),
)
async def test_any_fault_in_any_turn_with_any_agent(
    bench: Bench, name: str, turn: int, retries: int, swallow: bool
) -> None:
    case = TABLE[name]
    trajectory = await run(bench, case, turn=turn, retries=retries, swallow=swallow)
    failed = has_no_number(trajectory, case.kinds, {case.phase})
    kinds = [found.kind for found in trajectory.retried]
    assert set(kinds) <= set(RETRIED) & case.kinds
    assert all(kinds.count(kind) <= retries for kind in kinds)
    if retries and failed.kind in RETRIED:
        assert kinds.count(failed.kind) == retries
    await bench.empty()
