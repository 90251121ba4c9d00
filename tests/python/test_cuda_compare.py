"""Comparisons of memory on a GPU, by their double in the fake driver; and the kernel's text."""

import re
import shutil
import subprocess
from pathlib import Path

import comparisons
import gpus
import needs
import pytest
from trainers import Ranks

needs.fake_gpus()
needs.package("cuda.bindings")

CLIENT = Path(__file__).parents[2] / "client/python"
CHUNK = 16384  # of the kernel, bytes


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Calls a function in a process that has a GPU."""
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch, Ranks() as ranks:
        for name, value in gpus.environment(folder, 1).items():
            patch.setenv(name, value)

        def run(function, *arguments):
            return ranks.run(function, 1, [""], *arguments)[0]

        run.folder = folder
        yield run


@pytest.mark.parametrize("size", [1, 15, 16, 17, 4096, CHUNK, CHUNK + 1, 40 * CHUNK + 7])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_range_differs_by_its_first_and_by_its_last_byte(offset, size, machine):
    assert machine(comparisons.compare_one, offset, size, None) == []
    assert machine(comparisons.compare_one, offset, size, 0) == [0]
    assert machine(comparisons.compare_one, offset, size, size - 1) == [0]


def test_what_lies_beside_a_range_does_not_count_and_an_empty_one_never_differs(machine):
    assert machine(comparisons.compare_beside_what_differs) == []


def test_sides_may_have_any_alignment(machine):
    assert machine(comparisons.compare_at_other_alignments) == [[], [0]] * 5


@pytest.mark.parametrize("seed", range(3))
def test_it_says_which_of_many_pairs_differ(seed, machine):
    found, expected = machine(comparisons.compare_random_pairs, seed)
    assert found == expected
    assert 0 < len(expected) < 600


def test_bits_are_compared_not_numbers(machine):
    nan, other_nan, zero, negative_zero = 0x7FC00000, 0x7FC00001, 0, 0x80000000
    first, second = [nan, nan, zero], [nan, other_nan, negative_zero]
    assert machine(comparisons.compare_numbers, first, second) == [1, 2]


def test_each_comparison_has_its_own_answer_and_there_may_be_more_pairs_later(machine):
    answers = machine(comparisons.compare_again_and_again)
    assert answers == [[], [1], [2], [2, comparisons.MANY - 1], [0], []]


def test_it_waits_for_its_stream_alone_and_compares_in_its_order(machine):
    beside, done_before, answer, done = machine(comparisons.compare_in_the_stream_s_order)
    assert beside == []
    assert (done_before, answer, done) == (False, [0], True)


def test_a_comparison_that_nobody_waits_for_does_not_disturb_the_next(machine):
    assert machine(comparisons.start_twice) == [1]


def test_a_comparison_allocates_nothing_and_waits_for_its_event_alone(machine):
    calls = machine(comparisons.calls_of_comparisons, str(machine.folder))
    assert calls == ["cuEventSynchronize"] * 4


def test_a_stream_that_is_captured_is_refused(machine):
    (reason, text), found = machine(comparisons.compare_while_captured)
    assert reason == "SESSION_STATE"
    assert "captured into a CUDA graph" in text and "after the graph's launch" in text
    assert found == [0]


def test_memory_goes_with_the_comparison_when_its_stream_has_come_so_far(machine):
    assert machine(comparisons.drop_comparisons) == {
        "there": (1, 0),
        "gone": (0, 0),
        "gone while its stream stands": (1, 1),
        "another one has gone afterwards": (0, 0),
    }


def test_a_forked_child_leaves_it_alone(machine):
    assert machine(comparisons.fork_with_a_comparison) == (0, [0])


def test_a_device_that_has_failed_has_no_answer(tmp_path, monkeypatch):
    for name, value in gpus.environment(tmp_path, 1).items():
        monkeypatch.setenv(name, value)
    with Ranks() as ranks:
        function = comparisons.compare_when_the_device_fails
        assert ranks.run(function, 1, [""]) == ["CUDA_FAILED"]


def test_the_kernel_s_text_is_what_nvcc_makes_of_its_source(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        needs.lack("nvcc, of a CUDA toolkit")
    text = (CLIENT / "src/dmuond/same_bytes.ptx").read_text()
    release = re.search(r"with nvcc (\S+)\.", text)[1]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    if f"release {release}," not in version.stdout:
        needs.lack(f"nvcc {release}, which the text is made with; make_ptx.sh makes it anew")
    made = tmp_path / "same_bytes.ptx"
    subprocess.run([CLIENT / "kernels/make_ptx.sh", made], check=True)
    assert made.read_text() == text
