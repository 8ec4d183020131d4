"""Eight simulated CPU devices for every test, most use the first one alone; programs compiled once;
the order."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

# Of the environment, so that processes under test have them too. Many tests compile the same small
# programs: once in a run is enough, and once for several runs. JAX finds a program again where
# flags and options are equal, also those of one compilation. Modules are kept too: of each process
# under test that is a quarter of a second. Without XLA's fusion emitters the gradient of a tiny
# model compiles in 0.6 s of a core instead of 3.1; in one part, not split for threads that the
# other worker needs, a run's programs compile in 4.1 s instead of 5.4. From 0.11 on JAX has no
# other code for fusions, and no option.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + (
        ""
        if version("jax") >= "0.11"
        else " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    ),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_COMPILATION_CACHE_DIR": os.environ.get(
        "TEST_COMPILATION_CACHE", str(Path(__file__).parent.parent / ".pytest_cache" / "jax")
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # where nothing answers: a dry run asks the hub for a model's config.json
    "HF_ENDPOINT": "http://127.0.0.1:9",
}

import pytest

if TYPE_CHECKING:
    from tiny_runs import Workshop

# Traces stay in JAX's caches: looking through a million objects again and again took a tenth of a
# worker's time.
gc.set_threshold(10_000, 10, 10)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # so in a shell's background; processes under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

FIRST = (
    "test_forks",
    "test_sessions",
    "test_pool",
    "test_environments",
    "test_openenv",
    "test_math",
    "test_rollouts",
    "test_agents",
    "test_player",
    "test_judge",
    "test_code",
)
"""Files that fork a hundred times: from a process that has run others and holds gigabytes a fork
takes 0.1 s of kernel time, from a new one a hundredth."""
RUNS = (
    "test_ray",
    "test_resume",
    "test_processes",
    "test_fleet",
    "test_assembly",
    "test_objectives_runs",
    "test_reward_model",
    "test_python",
    "test_buckets",
    "test_evaluation",
    "test_replay",
    "test_sft",
    "test_custom",
    "test_doctor",
    "test_compat_runs",
    "test_launch",
    "test_view_page",
    "test_examples",
    "test_learning",
)
"""Files of whole runs, side by side: most of them find the programs of the files before."""
LONGEST = (
    "test_families_train",
    "test_families",
    "test_mesh",
    "test_compiled_decode",
    "test_plan",
    "test_offload",
    "test_lora",
    "test_sampler",
    "test_attention",
    "test_sampler_turns",
    "test_step",
    "test_proof",
    "test_compiled",
    "test_maxtext",
    "test_proof_update",
    "test_precision",
    "test_checkpoint",
    "test_figures",
)
"""Files that take ten seconds and more: begun next, so that no worker ends with one of them while
the other has nothing to do."""


@pytest.hookimpl(tryfirst=True)  # before those without a mark are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # README's command installs neither: in the fast tier no test is skipped for want of a
        # package.
        if "transformers" in getattr(item, "fixturenames", ()) and not item.get_closest_marker(
            "system"
        ):
            item.add_marker(pytest.mark.slow)
    order = [*FIRST, *RUNS, *LONGEST]
    items.sort(
        key=lambda item: order.index(item.path.stem) if item.path.stem in order else len(order)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # here, so that the process that only hands tests out needs no JAX
    from tiny_runs import compile_quickly

    mark = item.get_closest_marker("compile_quickly")
    compile_quickly(mark is None or mark.args != (False,))


MOST_MAPPINGS = 16_000
"""Mappings of memory above which a worker forgets its compiled programs. Each program has some, and
Linux ends a process that wants more than 65,530 (vm.max_map_count). With so many it has some
3.5 GB of memory."""
TESTS_BETWEEN_LOOKS = 8
"""After so many tests a worker counts its mappings: counting takes a hundredth of a second, and
the tests of one file may compile enough programs to reach the limit."""
num_ended_tests = itertools.count(1)


def num_mappings() -> int:
    """Returns how many mappings of memory this process has; 0 where Linux does not say."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def pytest_runtest_teardown() -> None:
    if next(num_ended_tests) % TESTS_BETWEEN_LOOKS == 0 and num_mappings() > MOST_MAPPINGS:
        import jax
        from tiny_runs import forget_programs

        forget_programs()
        jax.clear_caches()
        gc.collect()


def tier(item: pytest.Item) -> str:
    for name in ("system", "slow"):
        if item.get_closest_marker(name):
            return name
    return "fast"


class Costs:
    """Appends to the file named by CPU_SECONDS what each test costs: seconds in programs, in the
    kernel, by the clock; its tier, whether it ran or was skipped, its name (`cpu_seconds.py` reads
    them). What several tests share, a fixture of a file, has a line of its own. Processes that
    others start and leave, such as Ray's, are in the clock's seconds alone."""

    tier = "fast"
    """Of the test that runs."""
    outcome = "ran"
    shared = (0.0, 0.0, 0.0)
    """Seconds of that test that went into fixtures of its file, which it was the first to need."""

    @staticmethod
    def now() -> tuple[float, float, float]:
        user, system, user_of_children, system_of_children, clock = os.times()
        return user + user_of_children, system + system_of_children, clock

    @classmethod
    def write(cls, seconds: tuple[float, ...], name: str) -> None:
        with open(os.environ["CPU_SECONDS"], "a") as file:
            file.write(
                "\t".join([*(f"{one:.2f}" for one in seconds), cls.tier, cls.outcome, name]) + "\n"
            )


def since(before: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(Costs.now(), before, strict=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    Costs.tier, Costs.outcome, Costs.shared = tier(item), "ran", (0.0, 0.0, 0.0)
    before = Costs.now()
    result = yield
    if "CPU_SECONDS" in os.environ:
        own = tuple(all_ - shared for all_, shared in zip(since(before), Costs.shared, strict=True))
        Costs.write(own, item.nodeid)
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        Costs.outcome = "skipped"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Generator[None, object, object]:
    before = Costs.now()
    try:
        return (yield)
    finally:
        if "CPU_SECONDS" in os.environ and fixturedef.scope in ("module", "session"):
            seconds = since(before)
            user, system, clock = (a + b for a, b in zip(Costs.shared, seconds, strict=True))
            Costs.shared = (user, system, clock)
            Costs.write(seconds, f"{fixturedef.baseid}: fixture {fixturedef.argname}")


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """What the files before have left in this process is looked through once more, and never again:
    else one collection comes to take two seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_import_path() -> Generator[None]:
    """Folders of reward files stay on the import path of whoever loads them: of a process of tests
    only until its file has ended, as a folder `trl` in one of them would look like that package."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """The package, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    return module


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    from tiny_runs import Workshop

    return Workshop(tmp_path_factory.mktemp("workshop"), num_hidden_layers=1)
