"""The common part of all tests: marks that need a device, and a clean environment."""

import os
import signal
import zlib
from pathlib import Path

import pytest
import warm
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# A busy machine is no failure.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# It hides output that a killed process has not written.
os.environ.pop("PYTHONUNBUFFERED", None)

# numpy's OpenBLAS starts a thread per core, which waits busily: half of the CPU time of its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts what runs in the background deaf to it, and with it all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


def missing_rdma() -> str:
    return "" if any(Path("/sys/class/infiniband").glob("*")) else "no RDMA device"


def missing_gpu() -> str:
    torch = pytest.importorskip("torch")
    return "" if torch.cuda.is_available() else "no CUDA device"


def missing_fuse() -> str:
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "no access to /dev/fuse"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        action="append",
        choices=["shm", "tcp", "rdma"],
        help="what the tests of tests/peers use; default: shm and tcp, which every machine has",
    )

    parser.addoption(
        "--gpu",
        action="store_true",
        help="tests/gpu use NVIDIA's driver and a GPU, not the stand-in for them",
    )

    parser.addoption(
        "--part",
        choices=["everyday", "rest"],
        help="everyday: what a newcomer waits for, `make test`; rest: all others. Default: all",
    )

    parser.addoption(
        "--rpc-calls",
        type=int,
        default=1000,
        help="calls after which tests/rpc looks for what they have left; 100000 for a long look",
    )


# Parameters that say by which way bytes travel: each test takes its turn among them.
WAYS = ("path", "runtime", "transport", "transports", "wire")
# tests/rpc: attachments by both transports, then the runtime by both, then grpcio.
SYSTEM = "system"


def pytest_configure(config: pytest.Config) -> None:
    """Has torch imported once, not by each process that a test starts: see tests/warm.py."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and not config.getoption("collectonly"):
        warm.install(warm.begin_nursery())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the part that was asked for."""
    if (part := config.getoption("--part")) is None:
        return
    chosen, left = [], []
    for item in items:
        (chosen if is_everyday(item) == (part == "everyday") else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen


def is_everyday(item: pytest.Item) -> bool:
    """Tells whether a case is what a newcomer waits for.

    Benches and slow tests are not. The first case of each other function is, but by a way that is
    drawn by the function's name; conformance of rpc by an attachment and by the runtime.
    It goes by a case's parameters alone: with `--last-failed` only a few cases are there.
    """
    if item.get_closest_marker("slow") or item.path.name.startswith("test_bench"):
        return False
    turn = zlib.crc32(item.nodeid.partition("[")[0].encode())
    for name in item.callspec.params if hasattr(item, "callspec") else ():
        together, place, count = place_of(item, name)
        wanted = {0}
        if SYSTEM in together:
            wanted = {turn % 2, 2 + turn % 2}
        elif together[0] in WAYS:
            wanted = {turn % 2}
        if place not in {min(each, count - 1) for each in wanted}:
            return False
    return True


def place_of(item: pytest.Item, name: str) -> tuple[list[str], int, int]:
    """Returns the parameters that get their values with this one, their place, and how many are.

    pytest's own indices of a list go on counting where another list starts again.
    """
    together, values = [name], []
    fixtures = item._fixtureinfo.name2fixturedefs.get(name)
    if name == "transport" and "peers" in item.path.parts:
        values = item.config.getoption("--transport") or ["shm", "tcp"]
    elif fixtures and fixtures[-1].params:
        values = list(fixtures[-1].params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if name in (stripped := [each.strip() for each in names]):
            together, values = stripped, list(mark.args[1])
    own = [item.callspec.params[each] for each in together]
    for place, value in enumerate(values):
        row = getattr(value, "values", None) if hasattr(value, "marks") else None
        row = row or (value if len(together) > 1 else (value,))
        if all(one is other for one, other in zip(row, own, strict=True)):
            return together, place, len(values)
    return together, item.callspec.indices[name], max(1, len(values))


UNFINISHED = "tensorwire/unfinished"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With `--last-failed` nothing to do is well done, if a run has ended and nothing has failed.

    A run that an error of pytest itself has ended knows neither what failed in it nor what would.
    """
    cache = getattr(session.config, "cache", None)  # There is none with `-p no:cacheprovider`.
    if cache is None or hasattr(session.config, "workerinput"):
        return
    if not session.config.getoption("lf", False):
        cache.set(UNFINISHED, exitstatus == pytest.ExitCode.INTERNAL_ERROR)
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        if not cache.get("cache/lastfailed", {}) and not cache.get(UNFINISHED, False):
            session.exitstatus = pytest.ExitCode.OK


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuses a test whose time limit is not below the limit that ends the run."""
    last = float(item.config.getini("faulthandler_timeout"))
    for mark in item.iter_markers("timeout"):
        if mark.args[0] >= last:
            raise pytest.UsageError(f"{item.nodeid}: faulthandler_timeout is only {last:g} s")


MISSING = {"rdma": missing_rdma, "gpu": missing_gpu, "fuse": missing_fuse}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, missing in MISSING.items():
        if item.get_closest_marker(mark) and (reason := missing()):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def clean_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the TENSORWIRE_ variables of the developer's shell."""
    for name in os.environ:
        if name.startswith("TENSORWIRE_"):
            monkeypatch.delenv(name)
    if request.node.get_closest_marker("cold"):
        monkeypatch.setenv(warm.COLD, "1")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT
