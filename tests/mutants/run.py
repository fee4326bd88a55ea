"""`make mutants`: which of the faults that a seed draws do the tests find?

Each fault changes one line of a copy of the last commit below build/mutants and meets the tests of
its room, then all others. A test finds it if it fails with the fault, fails once more alone, and
passes without. Ends with 1 if fewer than 20 of 24 are found.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.machinery
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from faults import Drawing, Fault

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build/mutants"
TREE = WORK / "tree"
VENV = WORK / "venv"
CORE = f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}"
CORE_TEST = "core_test"
CLEAN_TEST = WORK / "clean_core_test"
ENOUGH = 20 / 24
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass
class Outcome:
    """The outcome of one fault."""

    number: int
    fault: Fault
    by: str  # the test that found it, or nothing
    seconds: int


class Broken(Exception):
    """The harness cannot go on."""


class Copy:
    """The last commit in a folder of its own, with an environment and a built core."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        path = os.pathsep.join([str(VENV / "bin"), str(ROOT / ".venv/bin"), os.environ["PATH"]])
        # The mark is in every process of a test, so that those that outlive it can be found.
        self._environment = {**os.environ, "PATH": path, "MUTANTS_OF": str(os.getpid())}
        self._mark = f"MUTANTS_OF={os.getpid()}".encode()
        self._clean = WORK / f"clean{CORE}"
        self.python = str(VENV / "bin/python")

    def check_out(self) -> str:
        """Puts the sources of the last commit there, and returns which it is."""
        commit = _output("git", "rev-parse", "HEAD")
        if not TREE.exists():
            _output("git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(TREE))
        _output("git", "-C", str(TREE), "checkout", "--quiet", "--force", "--detach", commit)
        return commit

    def prepare(self) -> None:
        """Makes everything that the tests need in addition to the sources."""
        self._make_environment()
        if reason := self._build():
            raise Broken(f"the last commit does not build:\n{reason}")
        shutil.copy(TREE / "src/tensorwire" / CORE, self._clean)
        shutil.copy(WORK / "cpp" / CORE_TEST, CLEAN_TEST)

    def apply(self, fault: Fault) -> str:
        """Makes a fault, and returns why it does not count, such as an error of the build."""
        fault.apply(TREE)
        if fault.path.startswith("cpp/"):
            return self._build()[-300:]
        module = fault.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
        code, said = self.run([self.python, "-c", f"import {module.replace('/', '.')}"], 100)
        return "" if code == 0 else said[-300:] or "a hang while it is imported"

    def _make_environment(self) -> None:
        """Makes an environment of .venv, but with the copy's tensorwire: reads no .pth of .venv."""
        shutil.rmtree(VENV, ignore_errors=True)
        _output(sys.executable, "-m", "venv", "--without-pip", str(VENV))
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        lines = f"{TREE / 'src'}\n{installed}\n"
        (VENV / "lib" / version / "site-packages/copy.pth").write_text(lines)
        command = VENV / "bin/tensorwire"
        command.write_text(f"#!{VENV}/bin/python\nfrom tensorwire.cli import main\nmain()\n")
        command.chmod(0o755)

    def _build(self) -> str:
        """Builds the core of the copy and its C++ tests, and returns why that is impossible."""
        nanobind = _output(sys.executable, "-m", "nanobind", "--cmake_dir")
        for command in (
            ["cmake", "-S", str(TREE), "-B", str(WORK / "cpp"), "-G", "Ninja",
             "-DTENSORWIRE_TESTS=ON", f"-Dnanobind_DIR={nanobind}",
             f"-DPython_EXECUTABLE={self.python}"],
            ["cmake", "--build", str(WORK / "cpp"), "--", "--quiet", f"-j{self._jobs}"],
        ):  # fmt: skip
            code, said = self.run(command, 1800)
            if code != 0:
                return said[-4000:]
        self._put(WORK / "cpp" / CORE)
        return ""

    def _put(self, core: Path) -> None:
        """Puts a built core into the copy, in one piece: another process may have the old one."""
        target = TREE / "src/tensorwire" / CORE
        shutil.copy(core, f"{target}.new")
        os.replace(f"{target}.new", target)

    @contextlib.contextmanager
    def without(self, fault: Fault) -> Iterator[None]:
        """The copy as it was committed, for as long as this lasts."""
        shutil.copy(TREE / "src/tensorwire" / CORE, WORK / f"faulty{CORE}")
        self.restore(fault)
        yield
        fault.apply(TREE)
        self._put(WORK / f"faulty{CORE}")

    def restore(self, fault: Fault) -> None:
        _output("git", "-C", str(TREE), "checkout", "--quiet", "--", fault.path)
        self._put(self._clean)

    def run(self, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """The exit code, or None if it did not end in time, and what it said; nothing is left."""
        # What a fault makes grow without end is what the kernel ends first.
        script = 'echo 1000 >/proc/self/oom_score_adj; exec "$@"'
        with (
            (WORK / "said").open("wb") as said,
            subprocess.Popen(
                ["sh", "-c", script, "sh", *command], cwd=TREE, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            ) as process,
        ):  # fmt: skip
            code = None
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                self._end_all()
        return code, (WORK / "said").read_text(errors="replace")

    def _end_all(self) -> None:
        """Kills the processes of tests that are still there, in whatever session they are."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)


class Judge:
    """Lets the tests look for a fault."""

    def __init__(self, copy: Copy, jobs: int, room_only: bool, limit_s: float) -> None:
        self._copy, self._jobs, self._room_only, self._limit_s = copy, jobs, room_only, limit_s
        self._set_aside: set[str] = set()  # tests that fail without a fault, or only sometimes

    def find(self, fault: Fault) -> str:
        """The test that finds a fault which has been applied; empty if none does."""
        if fault.path.startswith("cpp/"):
            built = WORK / "cpp" / CORE_TEST
            case = self._core_test(built)
            if case and self._core_test(built) and not self._core_test(CLEAN_TEST):
                return case
        room = fault.tests
        others = ["tests", *(f"--ignore={path}" for path in room)]
        for part, chosen in [
            ("everyday", room), ("everyday", others), ("rest", room), ("rest", others),
        ]:  # fmt: skip
            if chosen is room or not self._room_only:
                by = self._find_among(fault, ["--part", part, *chosen])
                if by:
                    return by
        return ""

    def _find_among(self, fault: Fault, chosen: list[str]) -> str:
        while failed := self._first_failure(
            ["-n", str(self._jobs), "--dist", "loadfile", *chosen,
             *(f"--deselect={test}" for test in sorted(self._set_aside))]
        ):  # fmt: skip
            if not failed.startswith("tests/"):
                return failed
            again = self._first_failure([failed])
            with self._copy.without(fault):
                anyway = self._first_failure([failed])
            if again and not anyway:
                return failed
            why = "fails without a fault" if anyway else "fails only sometimes"
            print(f"     set aside: {failed} {why}", flush=True)
            self._set_aside.add(failed)
        return ""

    def _first_failure(self, chosen: list[str]) -> str:
        """The first test that fails, or in words what went wrong instead."""
        code, said = self._copy.run(
            [self._copy.python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen],
            self._limit_s,
        )
        if code in (0, 5):  # 5: none was chosen
            return ""
        if code == 4 or (code and "unrecognized arguments" in said):
            raise Broken(f"pytest does not understand {chosen}:\n{said[-4000:]}")
        if tests := FAILED.findall(said):
            return tests[0]
        return f"a hang of {self._limit_s:g} s" if code is None else f"pytest's exit code {code}"

    def _core_test(self, binary: Path) -> str:
        """The first of the C++ tests that fails."""
        code, said = self._copy.run([str(binary), "--abort-after=1"], 300)
        if code == 0:
            return ""
        case = re.search(r"TEST CASE: +(.*)", said)
        return f"{CORE_TEST}: {case[1] if case else 'a hang' if code is None else said[-200:]}"


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise Broken(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def _described(number: int, fault: Fault) -> str:
    return (
        f"{number:3}  {fault.path}:{fault.line}: {fault.kind}\n"
        f"     - {fault.before.strip()}\n     + {fault.after.strip()}"
    )


def _table(outcomes: list[Outcome]) -> str:
    lines = [f"{'':3}  {'fault':20} {'where':50} found by"]
    for outcome in outcomes:
        where = f"{outcome.fault.path}:{outcome.fault.line}"
        by = outcome.by or "nobody: SURVIVED"
        lines.append(f"{outcome.number:3}  {outcome.fault.kind:20} {where:50} {by}")
    found = sum(bool(outcome.by) for outcome in outcomes)
    return "\n".join([*lines, f"{len(outcomes)} faults, {found} found"])


def _counting(copy: Copy, drawing: Drawing, number: int) -> Fault:
    """Applies and returns the fault of that number; draws anew if it does not build or import."""
    fault = drawing.faults[number - 1]
    print(_described(number, fault), flush=True)
    while reason := copy.apply(fault):
        copy.restore(fault)
        print(f"     drawn again, as it does not count: {reason}", flush=True)
        fault = drawing.again(number)
        print(_described(number, fault), flush=True)
    return fault


def _run(options: argparse.Namespace) -> list[Outcome]:
    copy = Copy(options.jobs)
    commit = copy.check_out()
    changed = " (what is not committed does not take part)" * bool(_output("git", "diff", "HEAD"))
    print(f"commit {commit[:8]}{changed}", flush=True)
    drawing = Drawing(TREE, options.seed, options.count)
    if options.list:
        print("\n".join(map(_described, range(1, options.count + 1), drawing.faults)))
        return []
    copy.prepare()
    judge = Judge(copy, options.jobs, options.room_only, options.limit_s)
    outcomes: list[Outcome] = []
    for number in [options.only] if options.only else range(1, options.count + 1):
        start = time.monotonic()
        fault = _counting(copy, drawing, number)
        outcome = Outcome(number, fault, judge.find(fault), round(time.monotonic() - start))
        copy.restore(fault)
        outcomes.append(outcome)
        verdict = f"found by {outcome.by}" if outcome.by else "SURVIVED"
        print(f"     {verdict}, {outcome.seconds} s", flush=True)
        if options.json:
            record = {"seed": options.seed, "commit": commit, "faults": list(map(asdict, outcomes))}
            Path(options.json).write_text(json.dumps(record, indent=1))
    print(f"\n{_table(outcomes)}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="", help="a number or word; default: a random one")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--only", type=int, help="the fault of this number alone")
    parser.add_argument("--list", action="store_true", help="draw them and stop")
    parser.add_argument("--room-only", action="store_true", help="no tests but those of the room")
    parser.add_argument("--json", help="write the outcomes to this file as well")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--limit-s", type=float, default=2400, help="a run of tests above it is a hang"
    )
    options = parser.parse_args()
    if options.only and not 1 <= options.only <= options.count:
        parser.error(f"--only {options.only}: there are {options.count} faults")
    options.seed = options.seed or str(secrets.randbelow(1_000_000))
    again = f" --count {options.count}" * (options.count != 24)
    print(f"SEED={options.seed}{again and f' ARGS={again.strip()!r}'}", flush=True)
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error("another `make mutants` is at work in this checkout")
        outcomes = _run(options)
    return int(sum(bool(outcome.by) for outcome in outcomes) < ENOUGH * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
