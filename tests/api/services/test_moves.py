"""What is to be done next, as a function of the record: every update ends, with enough replicas all along."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.api.services import moves
from aenv.api.services.moves import is_coming, is_done, next_moves, reason, status
from aenv.api.services.records import Member, Phase, Plan, ServiceRecord
from aenv.models import Volume
from aenv.wire import Env


def plan(generation: int) -> Plan:
    env = Env(id="env@1.0.0", name="env", version="1.0.0", created_at="", updated_at="")
    return Plan(generation=generation, env=env, startup_timeout=1.0)


def record(replicas: int, *members: Member, generation: int = 1, good: int | None = None, **more: Any) -> ServiceRecord:
    return ServiceRecord(
        id="s-1",
        name="s",
        owner="alice",
        server="server",
        keeper="k",
        created_at=0.0,
        updated_at=0.0,
        replicas=replicas,
        generation=generation,
        plan=plan(generation),
        good=None if good is None else plan(good),
        members=list(members),
        port=8081,
        **more,
    )


def member(id: str, phase: Phase = Phase.READY, generation: int = 1, **more: Any) -> Member:
    return Member(id=id, generation=generation, phase=phase, created_at=float(len(id)), **more)


VOLUME = Volume(owner="alice", name="drawer", mount="/data", size=1)


def test_scaling_touches_nobody_else() -> None:
    assert next_moves(record(3, member("a"))) == (2, [])
    assert next_moves(record(1, member("a"), member("bb"))) == (0, ["bb"])
    assert next_moves(record(1, member("a", Phase.STARTING), member("bb"))) == (0, ["a"])
    assert next_moves(record(0, member("a"), member("bb"))) == (0, ["bb", "a"])
    assert next_moves(record(2, member("a"), member("b", Phase.DOWN))) == (0, [])


def test_an_update_goes_one_by_one() -> None:
    old = [member("a"), member("b")]
    assert next_moves(record(2, *old, generation=2)) == (1, [])
    assert next_moves(record(2, *old, member("c", Phase.STARTING, 2), generation=2)) == (0, [])
    found = next_moves(record(2, *old, member("c", Phase.READY, 2), generation=2))
    assert (found.start, len(found.leave)) == (0, 1)
    left = [member("a", Phase.LEAVING), member("b"), member("c", Phase.READY, 2)]
    assert next_moves(record(2, *left, generation=2)) == (0, [])
    assert next_moves(record(2, *left[1:], generation=2)) == (1, [])


def test_storage_is_let_go_first() -> None:
    assert next_moves(record(1, member("a"), generation=2, volume=VOLUME)) == (0, ["a"])
    assert next_moves(record(1, member("a", Phase.LEAVING), generation=2, volume=VOLUME)) == (0, [])
    assert next_moves(record(1, generation=2, volume=VOLUME)) == (1, [])
    assert next_moves(record(0, member("a"), volume=VOLUME)) == (0, ["a"])


def test_how_it_is() -> None:
    assert status(record(1)) == "Pending"
    assert status(record(1, member("a", Phase.STARTING))) == "Creating"
    assert status(record(1, member("a"), good=1)) == "Running"
    assert status(record(2, member("a"), good=1)) == "Updating"
    assert status(record(1, member("a"), good=1, generation=2)) == "Updating"
    assert status(record(1, member("a", Phase.DOWN, failures=1), good=1)) == "Failed"
    assert status(record(2, member("a"), member("b", Phase.STARTING, failures=1), good=1)) == "Running"
    assert status(record(0, good=1)) == "Running"
    assert status(record(1, member("a"), deleted=True)) == "Terminated"
    assert status(record(0, generation=2, good=1)) == "Running"  # there is nobody to be updated
    assert reason(record(2, member("a"), member("b", Phase.DOWN, failures=1, reason="why"))) == (
        "1 of 2 replicas is not ready: why"
    )
    assert is_coming(record(1, member("a", Phase.DOWN, failures=1)))
    assert not is_coming(record(1, member("a", Phase.DOWN, failures=5)))
    assert not is_coming(record(0))


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "FIRST", 1.0)
    assert [moves.pause_after(failures) for failures in (1, 2, 3, 6, 7, 10_000)] == [0, 1, 2, 16, 32, 60]


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from(Phase), st.integers(1, 3)), max_size=8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_whatever_the_beginning_it_ends_as_planned(
    wanted: int, found: list[tuple[Phase, int]], stored: bool, chance: Any
) -> None:
    """Played to its end with everybody starting well, in any order: never too many, never fewer than there need be."""
    wanted = min(wanted, 1) if stored else wanted
    members = [member(f"m{place}", phase, generation) for place, (phase, generation) in enumerate(found)]
    now = record(wanted, *members, generation=3, good=2, volume=VOLUME if stored else None)
    served = now.ready
    for step in range(200):
        start, leave = next_moves(now)
        kept = [one for one in now.members if one.id not in leave or one.phase is not Phase.DOWN]
        kept = [_put(one, Phase.LEAVING) if one.id in leave else one for one in kept]
        kept += [member(f"n{step}-{number}", Phase.STARTING, 3) for number in range(start)]
        now = msgspec.structs.replace(now, members=kept)
        if not stored:
            assert now.ready >= min(served, wanted)
            assert len(now.staying) <= max(len(found), wanted + 1)
        if is_done(now) and len(now.members) == wanted:
            return
        # One of those that something can happen to.
        going = [one for one in now.members if one.phase is not Phase.READY]
        if going:
            one = chance.choice(going)
            if one.phase is Phase.LEAVING:
                kept = [other for other in now.members if other.id != one.id]
            else:
                kept = [_put(other, Phase.READY) if other.id == one.id else other for other in now.members]
            now = msgspec.structs.replace(now, members=kept)
        served = now.ready
    raise AssertionError(f"it does not end: {now.members}")


def _put(one: Member, phase: Phase) -> Member:
    return msgspec.structs.replace(one, phase=phase)
