"""The door of compiled programs: the bound of steps in flight, and compiler options."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from small import num_compiled, roles

from shoal.mesh import MAX_IN_FLIGHT, programs


class Output:
    """Stands for an array of a running program."""

    nbytes = 4

    def __init__(self, log: list[str], name: str, deleted: bool = False) -> None:
        self.log, self.name, self.deleted = log, name, deleted

    def is_ready(self) -> bool:
        return False

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> Output:
        self.log.append(self.name)
        return self


@pytest.fixture(autouse=True)
def own_queues(monkeypatch):
    monkeypatch.setattr(programs, "_in_flight", {})


def test_a_call_waits_for_the_oldest_of_two_programs_in_flight():
    log: list[str] = []
    program = roles().trainer.jit(lambda x: (x, x + 1))
    program._in_flight.extend([Output(log, "first"), Output(log, "second")])
    program(jnp.zeros(2))
    assert log == ["first"] and len(program._in_flight) == MAX_IN_FLIGHT


def test_a_part_of_a_sequence_neither_waits_nor_is_waited_for():
    """Except on CPU devices, where few programs with collectives may be under way."""
    log: list[str] = []
    program = roles().trainer.jit(lambda x: x + 1, queued=False)
    assert program._is_queued
    program._is_queued = False
    program._in_flight.extend([Output(log, "first"), Output(log, "second")])
    program(jnp.zeros(2))
    assert log == [] and len(program._in_flight) == MAX_IN_FLIGHT


def test_what_was_donated_is_not_waited_for():
    log: list[str] = []
    program = roles().trainer.jit(lambda x: x + 1)
    program._in_flight.extend([Output(log, "gone", deleted=True), Output(log, "kept")])
    program(jnp.zeros(2))
    assert log == []


@pytest.mark.parametrize("name", ["is_ready", "block_until_ready"])
def test_what_another_thread_donates_during_the_wait_is_not_waited_for(name):
    program = roles().trainer.jit(lambda x: x + 1)
    for deleted in (True, False):
        output = Output([], "first")

        def fails(output: Output = output, deleted: bool = deleted) -> None:
            output.deleted = deleted
            raise RuntimeError("Array has been deleted")

        setattr(output, name, fails)
        program._in_flight.extend([output, Output([], "second")])
        with contextlib.nullcontext() if deleted else pytest.raises(RuntimeError):
            # any other fault is raised
            program(jnp.zeros(2))
        program._in_flight.clear()


def test_an_unknown_compiler_option_is_dropped_with_a_warning(monkeypatch):
    monkeypatch.setattr(programs, "_unknown", set())
    role = replace(roles().trainer, compiler_options=(("xla_no_such_option", True),))
    program, made_as_early = role.jit(lambda x: x * 2), role.jit(lambda x: x * 4)
    with pytest.warns(UserWarning, match="no option xla_no_such_option"):
        assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert made_as_early(jnp.ones(3)).tolist() == [4, 4, 4]
    # now known: no second warning
    assert role.jit(lambda x: x * 3)(jnp.ones(3)).tolist() == [3, 3, 3]


def test_options_of_some_programs_yield_to_the_users():
    role = replace(roles().trainer, compiler_options=(("kept", 1), ("both", 1)))
    kind = role.mesh.devices.flat[0].device_kind
    assert dict(role.with_options({kind: {"both": 2, "new": 2}}).compiler_options) == {
        "kept": 1,
        "both": 1,
        "new": 2,
    }
    assert role.with_options({"another": {"new": 2}}) == role


def test_a_program_compiles_for_shapes_without_running():
    program = roles().trainer.jit(lambda x: x.sum())
    compiled = program.compile(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert compiled.memory_analysis() is not None and num_compiled(program) == 0
