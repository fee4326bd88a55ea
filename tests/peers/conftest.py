"""The common part of tests of several processes: one run per transport; nothing may be left."""

from collections.abc import Generator

import pytest
from hostile import Victim, start_victim

from tensorwire.testing import assert_no_leak, warm_up

FAILED = pytest.StashKey[bool]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--transport") or ["shm", "tcp"]
        metafunc.parametrize("transport", chosen, indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """One run per transport."""
    name: str = request.param
    warm_up(name)
    return name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


class Failed(Exception):
    """Lets `assert_no_leak` pass: a failure's traceback still holds what the test had."""


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest) -> Generator[None]:
    """Checks after the test's own variables are gone."""
    for name in request.config.getoption("--transport") or []:
        warm_up(name)
    try:
        with assert_no_leak():
            yield
            if request.node.stash.get(FAILED, False):
                raise Failed
    except Failed:
        pass


@pytest.fixture(scope="module")
def everything() -> Generator[Victim]:
    """One for all tests of a module."""
    with start_victim() as victim:
        yield victim


@pytest.fixture
def victim(everything: Victim) -> Generator[Victim]:
    """A process with regions and honest peers, which the test must not harm."""
    with everything.unharmed():
        yield everything
