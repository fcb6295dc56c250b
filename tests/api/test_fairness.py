"""Who is next: nobody starves, shares are fair, limits hold, and nothing is lost, whatever bursts come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.api.charges import AT, CPU, INSTANCES, MEMORY, PLATFORM, Amounts, Limits, subjects
from aenv.api.fairness import LONG, Group, Plan, Request, order, plan

FREE = Limits()


def request(id: str, group: Group = ("ann", "x"), since: float = 0.0, count: int = 1, cpu: int = 1000) -> Request:
    return Request(id, *group, since, {INSTANCES: count, CPU: count * cpu, MEMORY: count * 2**30})


def waiting(*requests: Request) -> dict[Group, list[Request]]:
    groups: dict[Group, list[Request]] = {}
    for one in requests:
        groups.setdefault(one.group, []).append(one)
    return groups


def using(**instances: int) -> dict[str, Amounts]:
    """What owners have, each in the experiment x; ``ann=2``."""
    use: dict[str, Amounts] = {}
    for owner, count in instances.items():
        for subject in subjects(owner, "x"):
            use.setdefault(subject, {INSTANCES: 0})[INSTANCES] += count
    return use


def planned(groups: dict[Group, list[Request]], use: dict[str, Amounts], now: float = 1.0, **limits: Limits) -> Plan:
    """With limits by subject: ``platform=...``, ``ann=...`` for an owner, ``ann_x=...`` for an experiment."""
    names = {
        PLATFORM if name == PLATFORM else f"experiment:{name.replace('_', '/')}" if "_" in name else f"owner:{name}": of
        for name, of in limits.items()
    }
    return plan(groups, use, lambda subject: names.get(subject, FREE), now=now)


def ids(requests: Iterable[Request]) -> str:
    return "".join(one.id for one in requests)


def test_who_has_the_least_comes_first() -> None:
    groups = waiting(request("a"), request("b"), request("c", ("bob", "x"), 9.0), request("d", ("cyd", "x"), 8.0))
    assert ids(planned(groups, using(ann=3, bob=1, cyd=2), platform=Limits(instances=9)).turns) == "cda"
    assert ids(planned(groups, {}, platform=Limits(instances=4)).turns) == "adcb"
    assert ids(order(groups, {}, lambda _: FREE, now=1.0)) == "adcb"


def test_within_an_owner_it_is_the_experiment_with_the_least() -> None:
    groups = waiting(request("a"), request("b"), request("c"), request("d", ("ann", "y"), 5.0))
    assert ids(planned(groups, {}).turns) == "adbc"


def test_of_those_who_have_as_much_it_is_who_waits_longest_since_it_was_given_something() -> None:
    groups = waiting(
        request("a"), request("b", ("ann", "y"), 5.0), request("c", ("bob", "x"), 6.0), request("d", ("bob", "x"), 6.0)
    )
    served = {
        "experiment:ann/x": 9.0,
        "experiment:ann/y": 8.0,
        "owner:ann": 9.0,
        "experiment:bob/x": 7.0,
        "owner:bob": 7.0,
    }
    assert ids(order(groups, using(ann=0, bob=0), lambda _: FREE, now=10.0, served=served)) == "cbad"
    assert ids(order(groups, {}, lambda _: FREE, now=10.0, served={"owner:bob": 7.0})) == "acbd"


def test_a_new_experiment_each_time_brings_its_owner_nothing() -> None:
    """Room for three, and one of each always waits: whatever ann calls hers, bob has no less."""
    served: dict[str, float] = {}
    given, alive = [], ["ann", "ann", "ann"]
    for now in range(1, 21):
        alive.pop(0)
        groups = waiting(request("a", ("ann", f"run-{now}"), now - 0.5), request("b", ("bob", "x")))
        use = using(ann=alive.count("ann"), bob=alive.count("bob"))
        limits = Limits(instances=3)
        [turn] = plan(groups, use, lambda _: limits, now=now, served=served).turns  # noqa: B023
        served |= dict.fromkeys(subjects(*turn.group)[1:], float(now))
        given.append(turn.owner)
        alive.append(turn.owner)
    assert 0 < given.count("ann") <= given.count("bob")


def test_who_is_stopped_by_a_limit_of_its_own_is_passed_over() -> None:
    groups = waiting(request("a"), request("b", ("ann", "y")), request("c", ("bob", "x"), 5.0))
    found = planned(groups, using(ann=2), ann=Limits(instances=2), platform=Limits(instances=9))
    assert (ids(found.turns), found.stopped, found.holder) == ("c", {"owner:ann": INSTANCES}, None)
    found = planned(groups, using(ann=2), ann_x=Limits(cpu=500), platform=Limits(instances=9))
    assert ids(found.turns) == "cb", "what an experiment may never have is not waited for"
    found = planned(groups, {"experiment:ann/x": {CPU: 1500}}, ann_x=Limits(cpu=2000), platform=Limits(instances=9))
    assert (ids(found.turns), found.stopped) == ("bc", {"experiment:ann/x": CPU})


def test_what_is_behind_it_there_does_not_overtake() -> None:
    groups = waiting(request("a", count=3), request("b"), request("c", ("ann", "y")))
    assert ids(planned(groups, using(ann=2), ann=Limits(instances=4)).turns) == "c"
    assert ids(planned(groups, using(ann=2), ann_x=Limits(instances=4)).turns) == "c"


def test_who_is_next_and_has_no_room_holds_the_place() -> None:
    groups = waiting(request("a", count=5), request("b", ("bob", "x"), 1.0))
    found = planned(groups, using(cyd=6), platform=Limits(instances=10))
    assert found.holder is not None
    assert (ids(found.turns), found.holder.id, found.stopped) == ("", "a", {PLATFORM: INSTANCES})
    assert ids(planned(groups, using(cyd=4), platform=Limits(instances=10)).turns) == "ab"
    assert ids(planned(groups, using(cyd=2), platform=Limits(instances=4)).turns) == "b", "it will never have room"
    passed = plan(groups, using(cyd=6), lambda _: Limits(instances=10), now=1.0, passed={"a"})
    assert ids(passed.turns) == "b"


def test_what_holds_in_vain_holds_back_only_its_own_experiment() -> None:
    groups = waiting(
        request("a", count=5),
        request("b"),
        request("c", ("ann", "y"), 1.0),
        request("d", ("bob", "x"), 1.0, count=5),
        request("e", ("cyd", "x"), 2.0),
    )
    found = plan(groups, using(dan=6), lambda _: Limits(instances=10), now=3.0, keep=False)
    assert (ids(sorted(found.turns, key=lambda one: one.id)), found.holder) == ("ce", None)
    assert found.stopped == {PLATFORM: INSTANCES}


def test_who_was_given_nothing_for_long_comes_first() -> None:
    groups = waiting(request("a"), request("b"), request("c", ("bob", "x"), LONG))
    limits = Limits(instances=10)
    use = using(ann=9, bob=0)
    assert ids(planned(groups, use, now=LONG, platform=limits).turns) == "c"
    assert ids(planned(groups, use, now=LONG + 1, platform=limits).turns) == "a"
    served = {"experiment:ann/x": LONG - 1}
    found = plan(groups, use, lambda _: limits, now=LONG + 1, served=served)
    assert ids(found.turns) == "c", "one that was given something lately does not count as waiting for long"


def test_a_rate_lets_in_so_many() -> None:
    groups = waiting(*(request(str(n)) for n in range(9)))
    found = planned(groups, {}, now=100.0, ann=Limits(rate=4))
    assert (ids(found.turns), found.stopped) == ("01234", {"owner:ann": AT})
    assert ids(planned(groups, {"owner:ann": {AT: 102.0}}, now=100.0, ann=Limits(rate=4)).turns) == ""


# Bursts


class Burst(NamedTuple):
    at: int
    owner: int
    experiment: int
    requests: int
    count: int


LIFE = 3
"""Rounds that an instance lives."""
CAPACITY = st.integers(3, 12)
BURSTS = st.lists(
    st.builds(Burst, st.integers(0, 30), st.integers(0, 2), st.integers(0, 2), st.integers(1, 8), st.integers(1, 3)),
    min_size=1,
    max_size=12,
)


class World:
    """A platform in rounds: requests come, who is next is admitted, and what has lived for long enough ends."""

    def __init__(self, limits: dict[str, Limits], life: int = LIFE) -> None:
        self.limits = limits
        self.life = life
        self.round = 0
        self.groups: dict[Group, list[Request]] = {}
        self.alive: list[tuple[int, Request]] = []
        self.admitted: dict[str, int] = {}
        self.turnovers = 0
        self.served: dict[str, float] = {}

    def of(self, subject: str) -> Limits:
        return self.limits.get(subject, FREE)

    @property
    def use(self) -> dict[str, Amounts]:
        found: dict[str, Amounts] = {}
        for _, one in self.alive:
            for subject in subjects(*one.group):
                numbers = found.setdefault(subject, dict.fromkeys(one.need, 0.0))
                for name, amount in one.need.items():
                    numbers[name] += amount
        return found

    def come(self, one: Request) -> None:
        self.groups.setdefault(one.group, []).append(one)

    def step(self, seconds: float = 1.0) -> None:
        now = self.round * seconds
        self.alive = [(until, one) for until, one in self.alive if until > self.round]
        found = plan(self.groups, self.use, self.of, now=now, served=self.served)
        for one in found.turns:
            assert self.groups[one.group].pop(0) is one, "first come, first served within an experiment"
            if not self.groups[one.group]:
                del self.groups[one.group]
            self.alive.append((self.round + self.life, one))
            self.admitted[one.id] = self.round
            self.served |= dict.fromkeys(subjects(*one.group)[1:], now)
        for subject, numbers in self.use.items():
            for name, amount in numbers.items():
                assert amount <= self.of(subject).most(name), f"{subject} has {amount} {name}"
        self.round += 1


@settings(max_examples=150, deadline=None)
@given(bursts=BURSTS, capacity=CAPACITY, own=st.integers(3, 6), seconds=st.sampled_from([0.1, 10.0, 100.0]))
def test_nothing_is_lost_and_nobody_starves(bursts: list[Burst], capacity: int, own: int, seconds: float) -> None:
    limits = {
        PLATFORM: Limits(instances=capacity),
        "owner:0": Limits(instances=own),
        "experiment:1/1": Limits(cpu=3000),
    }
    world = World(limits)
    came: dict[str, int] = {}
    bound: dict[str, int] = {}
    for round in range(31):
        coming = [(number, burst) for number, burst in enumerate(bursts) if burst.at == round]
        new: list[tuple[str, int]] = []
        for number, burst in coming:
            group = (str(burst.owner), str(burst.experiment))
            for part in range(burst.requests):
                one = request(f"{number}.{part}", group, round * seconds, burst.count)
                new.append((one.id, len(world.groups.get(group, ()))))
                world.come(one)
        before = sum(len(line) for line in world.groups.values())
        for id, place in new:
            came[id] = round
            # Who came no later may go first, one after another; who comes later, only while those who have what is
            # next in this owner's and this experiment's line still live.
            bound[id] = (before + place + 1) * (LIFE + 1) + (place + 1) * 2 * (LIFE + 1)
        world.step(seconds)
    for _ in range(len(came) * (LIFE + 1)):
        world.step(seconds)
    assert world.admitted.keys() == came.keys(), "everything is admitted, and nothing twice"
    late = {id: round - came[id] for id, round in world.admitted.items() if round - came[id] > bound[id]}
    assert not late, f"rounds that these waited: {late}"


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(2, 12),
    lead=st.integers(0, 5),
    same_owner=st.booleans(),
    sizes=st.tuples(st.integers(20, 60), st.integers(20, 60)),
)
def test_two_experiments_that_burst_have_the_same_share(
    capacity: int, lead: int, same_owner: bool, sizes: tuple[int, int]
) -> None:
    """Also when one of them came first and had everything."""
    world = World({PLATFORM: Limits(instances=capacity)})
    first, second = ("ann", "x"), ("ann", "y") if same_owner else ("bob", "x")
    for number in range(sizes[0]):
        world.come(request(f"a{number}", first))
    for _ in range(lead):
        world.step()
    for number in range(sizes[1]):
        world.come(request(f"b{number}", second, float(world.round)))
    for _ in range(LIFE):
        world.step()
    while True:
        world.step()
        if len(world.groups) < 2:
            break
        has = [sum(one.group == group for _, one in world.alive) for group in (first, second)]
        assert sum(has) == capacity, "as long as anybody waits, nothing is idle"
        assert abs(has[0] - has[1]) <= 1, f"shares are {has}"
    while world.groups:
        world.step()
    assert len(world.admitted) == sum(sizes)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(4, 10), crowd=st.integers(1, 4), data=st.data())
def test_a_batch_as_large_as_the_platform_has_its_turn(capacity: int, crowd: int, data: st.DataObject) -> None:
    """Under a stream of small requests that never ends."""
    world = World({PLATFORM: Limits(instances=capacity)})
    came = data.draw(st.integers(0, 10))
    for round in range(came + 60):
        for number in range(crowd):
            world.come(request(f"{round}.{number}", (f"owner{number}", "x"), float(round)))
        if round == came:
            world.come(request("batch", ("ann", "x"), float(round), count=capacity))
        world.step()
    assert world.admitted.get("batch", math.inf) <= came + (crowd + 3) * (LIFE + 1)


@settings(max_examples=30, deadline=None)
@given(crowd=st.integers(2, 5))
def test_who_has_much_for_ever_is_not_kept_out_for_ever(crowd: int) -> None:
    """An owner whose services stay, beside others who always have less and always want more."""
    world = World({PLATFORM: Limits(instances=6 + crowd)}, life=1)
    for number in range(5):
        world.alive.append((10**9, request(f"service{number}", ("ann", "x"))))
    world.come(request("more", ("ann", "x")))
    for round in range(40):
        for number in range(2 * crowd):
            world.come(request(f"{round}.{number}", (f"owner{number}", "x"), round * 5.0))
        world.step(5.0)
    assert world.admitted["more"] * 5.0 <= LONG + 10.0
