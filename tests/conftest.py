"""Which tests run, and in which order: for tests/python and tests/faults alike."""

import pytest

# Each of pytest's processes takes one file after another: those that take longest come first.
LONGEST = (
    "test_faults",
    "test_parallelisms",
    "test_fsdp2",
    "test_mesh_roles",
    "test_gpu_join",
    "test_daemon_deaths",
    "test_fsdp2_deaths",
    "test_frameworks",
    "test_torch_habits",
    "test_distribution",
    "test_golden_bits",
    "test_limits",
    "test_other_worlds",
    "test_conformance",
)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="those marked with `rest`, too")


def pytest_configure(config):
    """Who asks for tests by name gets them; xdist's processes are asked with the same arguments."""
    if config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword:
        config.option.all = True


def pytest_collection_modifyitems(config, items):
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if config.option.all:
        return
    for item in items:
        for mark in item.iter_markers("rest"):
            item.add_marker(pytest.mark.skip(f"left to ./dev test --all: {mark.args[0]}"))
