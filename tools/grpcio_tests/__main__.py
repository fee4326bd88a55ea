"""Runs grpcio's own Python tests with tensorwire's factories in the place of grpcio's.

    python tools/grpcio_tests FOLDER [--only WORD ...] [--systems NAME ...] [--json FILE]

FOLDER is an unpacked source tree of gRPC, which nothing here downloads. Its tests are copied to a
temporary folder. They run with grpcio's own factories first, then with each system; a test that
passes with grpcio and fails with a system is run three times more with both, alone. Exit code 1:
there is a difference that `expectations.toml` does not explain.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STARTUP = HERE / "startup"
TEST_S = 150
MODULE_S = 400
AGAIN = 3
BASELINE = "grpcio"


@dataclass(frozen=True)
class Outcome:
    """How a test ended.

    Attributes:
        how: "passed", "failed", "skipped", "cut off", or "uncollected" for a whole module.
        why: the reason, if it did not pass.
        used: the paths of its calls: "attached", "ahead", "runtime".
    """

    how: str
    why: str = ""
    used: str = ""


Outcomes = dict[str, Outcome]


def system(secure_too: str = "", **keywords: Any) -> dict[str, dict[str, Any]]:
    """Returns the keywords of each of the six factories."""
    secure = {key: keywords[key] for key in keywords if key == "limits"}
    if secure_too:
        secure["plaintext_transports"] = [secure_too]
    server = {**keywords, **secure}
    channel = {"insecure_channel": keywords, "secure_channel": secure, "server": server}
    return {**channel, **{f"aio.{name}": given for name, given in channel.items()}}


TCP = {"transports": ["tcp"], "secure_too": "tcp"}
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    BASELINE: {},
    "attachments": system(runtime=False),
    "attachments, all payload": system(runtime=False, limits={"threshold_bytes": 1}),
    "attachments, all payload, tcp": system(runtime=False, limits={"threshold_bytes": 1}, **TCP),
    "runtime": system(runtime=True),
    "runtime, all payload": system(runtime=True, limits={"threshold_bytes": 1}),
    "runtime, tcp": system(runtime=True, **TCP),
}


@dataclass
class Suite:
    """The copied tests.

    Attributes:
        root: the folder of the copy.
        paths: further folders of PYTHONPATH.
        modules: paths of the test modules, relative to the root.
    """

    root: Path
    paths: list[Path]
    modules: list[str] = field(default_factory=list)

    def environment(self, factories: dict[str, Any]) -> dict[str, str]:
        paths = [STARTUP, self.root, *self.paths]
        path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            **{key: value for key, value in os.environ.items() if "TENSORWIRE_RPC" not in key},
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "TENSORWIRE_GRPCIO_TESTS": json.dumps(factories) if factories else "",
        }

    def run(self, factories: dict[str, Any], module: str, tests: Iterable[str] = ()) -> Outcomes:
        """Runs a module, or some of its tests; goes on after a test that ends the process."""
        found: Outcomes = {}
        deselected: list[str] = []
        while True:
            said, ended = self._run_once(factories, module, [*tests], deselected)
            found.update(said)
            cut = [test for test, outcome in said.items() if outcome.how == "cut off"]
            if ended or not cut:
                return found
            deselected += [f"--deselect={test}" for test in said]
            if tests and not set(tests) - set(found):
                return found

    def _run_once(
        self, factories: dict[str, Any], module: str, tests: list[str], deselected: list[str]
    ) -> tuple[Outcomes, bool]:
        record = self.root / "outcomes"
        record.write_text("")
        options = [
            "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "grpcio_tests_recorder",
            "-W", "ignore", "-c", os.devnull, f"--rootdir={self.root}",
            f"--timeout={TEST_S}", "--timeout-method=signal",
            "--assert=plain", "-o", "python_functions=none", "-o", "python_classes=none",
            "-o", "faulthandler_timeout=0",
        ]  # fmt: skip
        command = [sys.executable, "-m", "pytest", *options, *deselected, *(tests or [module])]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env={
                **self.environment(factories),
                "TENSORWIRE_GRPCIO_OUTCOMES": str(record),
            },
            stdout=(self.root / "output").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(MODULE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        return read(record.read_text()), process.returncode in (0, 1, 2, 5)


def read(record: str) -> Outcomes:
    """Parses the record that the plugin has written."""
    found: Outcomes = {}
    for line in record.splitlines():
        word, test, more = line.split("\t")
        if word == "begun":
            found[test] = Outcome("cut off", "its process ended, or was killed for its time")
        elif word == "ended":
            before = found[test]
            how = "passed" if before.how == "cut off" else before.how
            found[test] = Outcome(how, "" if how == "passed" else before.why, more)
        elif test not in found or found[test].how != "failed":
            found[test] = Outcome(word, more)
    return found


def copy(folder: Path, root: Path) -> Suite:
    """Copies the tests and generates their messages and stubs."""
    python = folder / "src/python"
    if not (python / "grpcio_tests/tests/unit").is_dir():
        raise SystemExit(f"{folder} is no source tree of gRPC: it has no {python}/grpcio_tests")
    for name in ("tests", "tests_aio", "tests_py3_only"):
        shutil.copytree(python / "grpcio_tests" / name, root / name)
        (root / name / "__init__.py").write_text("")  # theirs has a loader that needs coverage
    shutil.copytree(folder / "src/proto", root / "src/proto")
    for test in (root / "tests_py3_only").rglob("__init__.py"):
        test.write_text("")
    protos = [root / "src/proto/grpc/testing", root / "tests"]
    names = sorted(
        str(path.relative_to(root))
        for top in protos
        for path in top.rglob("*.proto")
        if "xds" not in path.parts and "duplicate" not in path.parts
    )
    for name in names:
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.",
             "--grpc_python_out=.", name],
            cwd=root, check=name.startswith("src/proto/grpc/testing/messages"),
            capture_output=True,
        )  # fmt: skip
    left_out = tomllib.loads((HERE / "expectations.toml").read_text())["left_out"]
    modules = sorted(
        path
        for top in ("tests", "tests_aio", "tests_py3_only")
        for path in (str(each.relative_to(root)) for each in (root / top).rglob("*_test.py"))
        if not any(part in path for part in left_out)
    )
    return Suite(root, [python / "grpcio_status", python / "grpcio_testing"], modules)


@dataclass
class Difference:
    """A test that passes with grpcio and not with a system.

    Attributes:
        test: its name.
        system: the system with which it failed.
        why: the reason of the failure.
        again: the numbers of repetitions that passed, with grpcio and with the system.
        expected: the known reason why it may fail, or "".
    """

    test: str
    system: str
    why: str
    again: tuple[int, int]
    expected: str

    @property
    def is_one(self) -> bool:
        """Whether the repetitions confirm it."""
        return self.again[0] == AGAIN and self.again[1] < AGAIN


def expected(test: str, name: str) -> str:
    """Returns the known reason why a test may fail with a system, or ""."""
    for each in tomllib.loads((HERE / "expectations.toml").read_text()).get("difference", ()):
        if each["test"] in test and name in each.get("systems", SYSTEMS):
            return str(each["why"])
    return ""


def compare(suite: Suite, name: str, outcomes: Outcomes, baseline: Outcomes) -> list[Difference]:
    """Returns the tests that pass with grpcio and not with a system; runs each again with both."""
    found = []
    for test, before in baseline.items():
        after = outcomes.get(test, Outcome("not run"))
        if before.how != "passed" or after.how == "passed":
            continue
        module, again = test.split("::")[0], []
        for factories in (SYSTEMS[BASELINE], SYSTEMS[name]):
            runs = [suite.run(factories, module, [test]) for _ in range(AGAIN)]
            again.append(sum(test in run and run[test].how == "passed" for run in runs))
        difference = Difference(test, name, after.why, (again[0], again[1]), expected(test, name))
        found.append(difference)
        print(f"  {'differs' if difference.is_one else 'not steady'}: {difference}", flush=True)
    return found


def count(outcomes: Outcomes, baseline: Outcomes, how: str = "passed", used: str = "") -> int:
    """Counts the tests that pass with grpcio, ended as `how` and had calls by `used`."""
    return sum(
        outcomes[test].how == how and used in outcomes[test].used
        for test, before in baseline.items()
        if before.how == "passed" and test in outcomes
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="an unpacked source tree of gRPC")
    parser.add_argument("--only", nargs="*", default=[""], help="words of paths of test modules")
    parser.add_argument(
        "--systems", nargs="*", default=list(SYSTEMS)[1:], choices=list(SYSTEMS)[1:]
    )
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    given = parser.parse_args()
    results: dict[str, Outcomes] = {}
    differences: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="grpcio-tests-") as root:
        suite = copy(given.folder.resolve(), Path(root))
        modules = [each for each in suite.modules if any(word in each for word in given.only)]
        if not modules:
            parser.error(f"no path of a test module there has one of {given.only} in it")
        for name in (BASELINE, *given.systems):
            results[name] = {}
            for module in modules:
                results[name] |= suite.run(SYSTEMS[name], module)
            baseline = results[BASELINE]
            print(f"{name}: {count(results[name], baseline)} passed", flush=True)
            if name == BASELINE:
                for test, outcome in baseline.items():
                    if outcome.how != "passed":
                        print(f"  {outcome.how} with grpcio: {test}: {outcome.why}")
            differences += compare(suite, name, results[name], baseline)
    if given.json:
        written = {
            name: {test: [each.how, each.why, each.used] for test, each in outcomes.items()}
            for name, outcomes in results.items()
        }
        given.json.write_text(json.dumps(written, indent=1))
    print(table(results, differences))
    return any(each.is_one and not each.expected for each in differences)


def table(results: dict[str, Outcomes], differences: list[Difference]) -> str:
    """Returns the results as Markdown tables."""
    baseline = results[BASELINE]
    lines = [
        "| system | passed | attached | ahead | by the runtime | differences | not steady |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, outcomes in results.items():
        here = [each for each in differences if each.system == name]
        steady = sum(each.is_one for each in here)
        numbers = (
            count(outcomes, baseline),
            count(outcomes, baseline, used="attached"),
            count(outcomes, baseline, used="ahead"),
            count(outcomes, baseline, used="runtime"),
            steady,
            len(here) - steady,
        )
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    lines += ["", "| test | systems | passed again (grpcio, this) | why |", "|---|---|---|---|"]
    lines += [
        f"| {each.test} | {each.system} | {each.again[0]}, {each.again[1]} of {AGAIN} "
        f"| {each.expected or each.why} |"
        for each in differences
        if each.is_one
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
