"""What runs next: no group twice, nobody forgotten, first come first served within a bucket."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.sampler.scheduler import Admission, Scheduler

BUCKETS = (64, 128, 256)


def check_admission(admission: Admission, waiting: list[tuple[int, int]], scheduler: Scheduler) -> None:
    """One bucket, the head's; of that bucket those that came first; each row enters a group of its own replica."""
    assert admission.bucket == waiting[0][1]
    assert 1 <= len(admission.ids) == len(admission.groups) == len(set(admission.rows)) <= scheduler.prefill_rows
    rows, groups = (count // scheduler.replicas for count in (scheduler.prefill_rows, scheduler.num_groups))
    assert [row // rows for row in admission.rows] == [group // groups for group in admission.groups]
    same = [id for id, bucket in waiting if bucket == admission.bucket]
    assert list(admission.ids) == same[: len(admission.ids)]
    assert len(set(admission.groups)) == len(admission.groups)


class Machine(RuleBasedStateMachine):
    """A plain model beside the scheduler: a list that waits, and who holds which group."""

    @initialize(groups=st.integers(1, 6), rows=st.integers(1, 4), replicas=st.integers(1, 3))
    def start(self, groups, rows, replicas):
        self.groups = groups * replicas
        self.scheduler = Scheduler(self.groups, min(rows, groups) * replicas, replicas)
        self.waiting: list[tuple[int, int]] = []
        self.running: dict[int, int] = {}
        self.next_id, self.admitted = 0, []

    @rule(buckets=st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=4))
    def submit(self, buckets):
        for bucket in buckets:
            self.scheduler.submit(self.next_id, bucket)
            self.waiting.append((self.next_id, bucket))
            self.next_id += 1

    @rule()
    def admit(self):
        admission = self.scheduler.admit()
        if admission is None:
            assert not self.waiting or self.running  # alone and waiting, one must get in
            return
        check_admission(admission, self.waiting, self.scheduler)
        assert not set(admission.groups) & set(self.running.values())
        self.admitted += admission.ids
        self.running |= dict(zip(admission.ids, admission.groups, strict=True))
        self.waiting = [entry for entry in self.waiting if entry[0] not in admission.ids]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.scheduler.finish(id)
        del self.running[id]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_before_it_runs(self, data):
        entry = data.draw(st.sampled_from(self.waiting))
        self.scheduler.finish(entry[0])
        self.waiting.remove(entry)

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def submit_again(self, data):
        id = data.draw(st.sampled_from([*self.running, *(id for id, _ in self.waiting)]))
        with pytest.raises(ValueError, match=f"request {id} was submitted already"):
            self.scheduler.submit(id, 64)

    @invariant()
    def it_agrees_with_the_model(self):
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.running == self.running
        assert list(self.scheduler.waiting) == self.waiting
        taken = list(self.scheduler.running.values())
        assert len(taken) <= self.groups and sorted([*taken, *self.scheduler.free]) == list(range(self.groups))
        assert len(set(self.admitted)) == len(self.admitted)
        assert self.scheduler.idle == (not self.waiting and not self.running)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None,
                                suppress_health_check=[HealthCheck.too_slow])


@settings(deadline=None, max_examples=60)
@given(groups=st.integers(1, 8), rows=st.integers(1, 4), buckets=st.lists(st.sampled_from(BUCKETS), max_size=30),
       order=st.randoms(use_true_random=False))
def test_everyone_is_admitted_once_and_in_the_order_of_its_bucket(groups, rows, buckets, order):
    scheduler, came = Scheduler(groups, min(rows, groups)), []
    for id, bucket in enumerate(buckets):
        scheduler.submit(id, bucket)
    rounds = 0
    while not scheduler.idle:
        while (admission := scheduler.admit()) is not None:
            came += admission.ids
            assert len(scheduler.running) <= groups
        scheduler.finish(order.choice(sorted(scheduler.running)))
        rounds += 1
    assert rounds == len(buckets) and sorted(came) == list(range(len(buckets)))
    for bucket in BUCKETS:
        of_bucket = [id for id in came if buckets[id] == bucket]
        assert of_bucket == sorted(of_bucket)


def test_a_prefill_waits_until_it_can_be_filled():
    scheduler = Scheduler(num_groups=4, prefill_rows=2)
    for id in range(6):
        scheduler.submit(id, 64)
    assert scheduler.admit() == Admission(64, (0, 1), (0, 1), (0, 1))
    assert scheduler.admit() == Admission(64, (2, 3), (2, 3), (0, 1))
    assert scheduler.admit() is None
    scheduler.finish(2)
    assert scheduler.admit() is None  # one group is free, two wait, others still run
    scheduler.finish(0)
    assert scheduler.admit() == Admission(64, (4, 5), (0, 2), (0, 1))


def test_a_rare_bucket_at_the_head_goes_first_and_alone():
    scheduler = Scheduler(num_groups=4, prefill_rows=4)
    for id, bucket in enumerate((128, 64, 64, 128)):
        scheduler.submit(id, bucket)
    assert scheduler.admit() == Admission(128, (0, 3), (0, 1), (0, 1))
    assert scheduler.admit() == Admission(64, (1, 2), (2, 3), (0, 1))


def test_rows_of_a_prefill_enter_groups_of_their_replica():
    scheduler = Scheduler(num_groups=8, prefill_rows=4, replicas=2)
    for id in range(10):
        scheduler.submit(id, 64)
    assert scheduler.admit() == Admission(64, (0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 2, 3))
    assert scheduler.admit() == Admission(64, (4, 5, 6, 7), (2, 3, 6, 7), (0, 1, 2, 3))
    scheduler.finish(2)
    assert scheduler.admit() is None  # two wait
    scheduler.finish(7)
    assert scheduler.admit() == Admission(64, (8, 9), (4, 7), (2, 3))


def test_a_prefill_waits_until_most_of_its_rows_have_a_group_of_their_replica():
    """It costs the same however few rows are used: with one row for the groups of one replica it is not worth it."""
    scheduler = Scheduler(num_groups=16, prefill_rows=4, replicas=4)
    for id in range(24):
        scheduler.submit(id, 64)
    placed = dict(pair for _ in range(4) for one in [scheduler.admit()] if one
                  for pair in zip(one.groups, one.ids, strict=True))
    for group in range(4):  # all of the first replica
        scheduler.finish(placed[group])
    assert scheduler.admit() is None
    scheduler.finish(placed[4])
    assert scheduler.admit() is None
    scheduler.finish(placed[8])
    admitted = scheduler.admit()
    assert admitted and admitted.groups == (0, 4, 8)
