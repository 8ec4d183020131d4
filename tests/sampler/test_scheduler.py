"""What runs next: no row twice, nobody forgotten, in the order of arrival by bucket, prompts kept
while needed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.sampler.scheduler import Admission, AdmittedSubgroup, Scheduler

BUCKETS = (64, 128, 256)


def prefill(bucket: int, *entries: tuple[int, int, int]) -> Admission:
    """Of (position, id, row)."""
    return Admission(
        bucket, tuple(AdmittedSubgroup(position, id, 0, row, row) for position, id, row in entries)
    )


def check_prefill(
    admission: Admission, waiting: list[tuple[int, int, int]], scheduler: Scheduler
) -> None:
    """One bucket, the head's; of that bucket those that came first; each enters a row of its own
    replica."""
    ids, rows, positions = (
        [getattr(entry, name) for entry in admission.entries] for name in ("id", "row", "position")
    )
    batch = scheduler.batch_rows(admission.bucket)
    assert admission.bucket == waiting[0][1] and 1 <= len(ids) <= batch <= scheduler.prefill_rows
    size = scheduler.padded(admission.bucket)
    assert admission.bucket <= size and batch * size <= max(
        scheduler.prefill_tokens, scheduler.replicas * size
    )
    assert len(set(positions)) == len(set(rows)) == len(rows) and max(positions) < batch
    each, own = batch // scheduler.replicas, scheduler.num_rows // scheduler.replicas
    assert [position // each for position in positions] == [row // own for row in rows]
    assert ids == [id for id, bucket, _ in waiting if bucket == admission.bucket][: len(ids)]


class Machine(RuleBasedStateMachine):
    """A plain model beside the scheduler: a list that waits, who holds which row, and whose keys
    each row has."""

    @initialize(
        rows=st.integers(1, 6),
        prefilled=st.integers(1, 4),
        joined=st.integers(1, 3),
        replicas=st.integers(1, 3),
        tokens=st.sampled_from([64, 256, 1 << 30]),
        prefill_chunk=st.sampled_from([64, 256]),
    )
    def start(self, rows, prefilled, joined, replicas, tokens, prefill_chunk):
        self.rows = rows * replicas
        self.scheduler = Scheduler(
            self.rows,
            min(rows, prefilled) * replicas,
            min(rows, joined) * replicas,
            replicas,
            tokens,
            prefill_chunk,
            max(BUCKETS),
        )
        self.waiting: list[tuple[int, int, int]] = []
        self.parts: dict[int, int] = {}  # of each request that is in
        self.entered: dict[int, int] = {}
        self.running: dict[int, tuple[int, int]] = {}
        self.keys: dict[int, int] = {}
        self.next_id, self.admitted = 0, []

    @rule(
        new=st.lists(st.tuples(st.sampled_from(BUCKETS), st.integers(1, 4)), min_size=1, max_size=4)
    )
    def submit(self, new):
        for bucket, parts in new:
            self.scheduler.submit(self.next_id, bucket, parts)
            self.waiting.append((self.next_id, bucket, parts))
            self.next_id += 1

    @rule()
    def admit(self):
        admission = self.scheduler.admit()
        if admission is None:
            # alone and waiting, one must get in
            assert self.running or not (self.waiting or self.parts)
            return
        rows = [entry.row for entry in admission.entries]
        assert not set(rows) & set(self.running) and len(set(rows)) == len(rows)
        if admission.bucket:
            check_prefill(admission, self.waiting, self.scheduler)
            self.admitted += [entry.id for entry in admission.entries]
            self.parts |= {
                id: parts
                for id, _, parts in self.waiting
                if id in {e.id for e in admission.entries}
            }
            self.waiting = [one for one in self.waiting if one[0] not in self.parts]
        own = self.rows // self.scheduler.replicas
        each = self.scheduler.join_rows // self.scheduler.replicas
        for entry in admission.entries:
            assert entry.subgroup == self.entered.get(entry.id, 0)
            self.entered[entry.id] = entry.subgroup + 1
            if not admission.bucket:
                # the prompt is still there, on the same replica
                assert self.keys[entry.source] == entry.id
                assert entry.source // own == entry.row // own == entry.position // each
            self.running[entry.row] = entry.id, entry.subgroup
        self.keys |= {entry.row: entry.id for entry in admission.entries}

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        row = data.draw(st.sampled_from(sorted(self.running)))
        self.scheduler.release(row)
        id, _ = self.running.pop(row)
        if self.entered[id] == self.parts[id] and id not in {
            one for one, _ in self.running.values()
        }:
            self.scheduler.finish(id)
            del self.parts[id]

    @precondition(lambda self: self.waiting or self.parts)
    @rule(data=st.data())
    def cancel(self, data):
        id = data.draw(st.sampled_from([*self.parts, *(id for id, _, _ in self.waiting)]))
        self.scheduler.cancel(id)
        self.parts.pop(id, None)
        self.running = {row: owner for row, owner in self.running.items() if owner[0] != id}
        self.waiting = [one for one in self.waiting if one[0] != id]

    @precondition(lambda self: self.waiting or self.parts)
    @rule(data=st.data())
    def submit_again(self, data):
        id = data.draw(st.sampled_from([*self.parts, *(id for id, _, _ in self.waiting)]))
        with pytest.raises(ValueError, match=f"request {id} was submitted already"):
            self.scheduler.submit(id, 64)

    @invariant()
    def it_agrees_with_the_model(self):
        if not hasattr(self, "scheduler"):
            return
        found = self.scheduler
        assert found.running == self.running and list(found.waiting) == self.waiting
        kept = []
        for one in found.entering.values():
            if one.is_source_free:
                kept.append(one.source)
        assert sorted([*found.running, *found.free, *kept]) == list(range(self.rows))
        assert set(found.entering) == {
            id for id, parts in self.parts.items() if self.entered[id] < parts
        }
        assert len(set(self.admitted)) == len(self.admitted)
        assert found.idle == (not self.parts and not self.waiting)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 8),
    prefilled=st.integers(1, 4),
    parts=st.integers(1, 3),
    buckets=st.lists(st.sampled_from(BUCKETS), max_size=30),
    order=st.randoms(use_true_random=False),
)
def test_everyone_is_admitted_once_and_in_the_order_of_its_bucket(
    rows, prefilled, parts, buckets, order
):
    scheduler, came = Scheduler(rows, min(prefilled, rows), min(prefilled, rows)), []
    left = dict.fromkeys(range(len(buckets)), parts)
    for id, bucket in enumerate(buckets):
        scheduler.submit(id, bucket, parts)
    while not scheduler.idle:
        while (admission := scheduler.admit()) is not None:
            came += [entry.id for entry in admission.entries if entry.subgroup == 0]
        row = order.choice(sorted(scheduler.running))
        id, _ = scheduler.running[row]
        scheduler.release(row)
        left[id] -= 1
        if not left[id]:
            scheduler.finish(id)
    assert not any(left.values()) and sorted(came) == list(range(len(buckets)))
    for bucket in BUCKETS:
        of_bucket = [id for id in came if buckets[id] == bucket]
        assert of_bucket == sorted(of_bucket)


def test_a_prefill_waits_until_it_can_be_filled():
    scheduler = Scheduler(num_rows=4, prefill_rows=2)
    for id in range(6):
        scheduler.submit(id, 64)
    assert scheduler.admit() == prefill(64, (0, 0, 0), (1, 1, 1))
    assert scheduler.admit() == prefill(64, (0, 2, 2), (1, 3, 3))
    assert scheduler.admit() is None
    scheduler.release(2)
    assert scheduler.admit() is None  # one row is free, two wait, others still run
    scheduler.release(0)
    assert scheduler.admit() == prefill(64, (0, 4, 0), (1, 5, 2))


def test_a_rare_bucket_at_the_head_goes_first_and_alone():
    scheduler = Scheduler(num_rows=4, prefill_rows=4)
    for id, bucket in enumerate((128, 64, 64, 128)):
        scheduler.submit(id, bucket)
    assert scheduler.admit() == prefill(128, (0, 0, 0), (1, 3, 1))
    assert scheduler.admit() == prefill(64, (0, 1, 2), (1, 2, 3))


def test_a_prefill_of_long_prompts_has_fewer_rows():
    scheduler = Scheduler(num_rows=16, prefill_rows=8, replicas=2, prefill_tokens=512)
    assert [scheduler.batch_rows(bucket) for bucket in (64, 128, 256, 1024)] == [8, 4, 2, 2]
    for id in range(6):
        scheduler.submit(id, 128)
    assert scheduler.admit() == prefill(128, (0, 0, 0), (1, 1, 1), (2, 2, 8), (3, 3, 9))


def test_siblings_enter_as_rows_are_free_and_their_prompt_stays_for_them():
    scheduler = Scheduler(num_rows=3, prefill_rows=2, join_rows=2)
    for id in range(3):
        scheduler.submit(id, 64, num_subgroups=3)
    assert scheduler.admit() == prefill(64, (0, 0, 0), (1, 1, 1))
    assert scheduler.admit() == Admission(0, (AdmittedSubgroup(0, 0, 1, 2, 0),))
    assert scheduler.admit() is None
    scheduler.release(1)  # the first of request 1 has ended, the row holds the keys of its siblings
    assert scheduler.admit() == Admission(0, (AdmittedSubgroup(0, 1, 1, 1, 1),))
    scheduler.release(0)
    scheduler.release(2)
    assert scheduler.admit() == Admission(
        0, (AdmittedSubgroup(0, 0, 2, 0, 0), AdmittedSubgroup(1, 1, 2, 2, 1))
    )
    for row in (0, 1):
        scheduler.release(row)
    scheduler.finish(0)
    assert scheduler.admit() == prefill(64, (0, 2, 0))
    assert scheduler.admit() == Admission(0, (AdmittedSubgroup(0, 2, 1, 1, 0),))


def test_rows_of_a_prefill_enter_rows_of_their_replica():
    scheduler = Scheduler(num_rows=8, prefill_rows=4, join_rows=4, replicas=2)
    for id in range(10):
        scheduler.submit(id, 64)
    assert scheduler.admit() == prefill(64, (0, 0, 0), (1, 1, 1), (2, 2, 4), (3, 3, 5))
    assert scheduler.admit() == prefill(64, (0, 4, 2), (1, 5, 3), (2, 6, 6), (3, 7, 7))
    scheduler.release(0)  # of request 0
    assert scheduler.admit() is None  # two wait
    scheduler.release(7)
    assert scheduler.admit() == prefill(64, (0, 8, 0), (2, 9, 7))


def test_a_prefill_waits_until_most_of_its_rows_have_a_place_of_their_replica():
    """It costs the same however few rows are used: with one row for the places of one replica it is
    not worth it."""
    scheduler = Scheduler(num_rows=16, prefill_rows=4, join_rows=4, replicas=4)
    for id in range(24):
        scheduler.submit(id, 64)
    while scheduler.admit():
        pass
    for row in range(4):  # all of the first replica
        scheduler.release(row)
    assert scheduler.admit() is None
    scheduler.release(4)
    assert scheduler.admit() is None
    scheduler.release(8)
    admitted = scheduler.admit()
    assert admitted and [entry.row for entry in admitted.entries] == [0, 4, 8]
