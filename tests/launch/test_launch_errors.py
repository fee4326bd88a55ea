"""One of the errors that end workers is shown whole and shortened, and the others are lines."""

import os
import re
import signal

import pytest
from launching import Place, lines_of, summary

HEADER = "Traceback (most recent call last):"

SEVERAL = """
import atexit
from tensorwire.errors import PeerLostError
folder = os.path.dirname(__file__)

def told(name):
    path = os.path.join(folder, name)
    while not os.path.exists(path):
        time.sleep(0.005)

def tell(name):  # runs when the error was reported, and before the process ends
    path = os.path.join(folder, name)
    atexit.register(lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)))

def deep():
    if rank == 2:
        tell("consequence")
        raise PeerLostError("worker 0 was lost")
    told("consequence")
    if rank == 0:
        tell("cause")
        raise KeyError("mine")
    told("cause")
    if rank == 1:
        raise KeyError("mine")
    raise ValueError("first\\n  second " + "x" * 9000)

atexit.register(lambda: told("cause"))
deep()
"""
PATIENT = {"grace_s": 30, "alone_s": 0.1}


def test_one_traceback_and_a_line_for_each_other_worker(place: Place) -> None:
    """The consequence comes first and is shown after its cause."""
    done = place.run(SEVERAL, workers=4, patience=PATIENT)
    assert done.returncode == 1
    assert done.stderr.count(HEADER) == 1
    cause = lines_of(done.stderr, "worker 0")
    assert cause[0] == HEADER
    assert cause[-1] == "KeyError: 'mine'"
    assert '    raise KeyError("mine")' in cause
    (same,) = lines_of(done.stderr, "worker 1")
    assert same.startswith("KeyError: 'mine', at ")
    assert same.endswith("in deep: the same error")
    (lost,) = lines_of(done.stderr, "worker 2")
    assert lost.startswith("tensorwire.errors.PeerLostError: worker 0 was lost, at ")
    assert lost.endswith("in deep: a consequence, not the cause")
    (other,) = lines_of(done.stderr, "worker 3")
    assert other.startswith("ValueError: first second xxx")
    assert other.endswith("in deep: another error")
    assert len(other) < 800
    assert done.stderr.index("[worker 0] KeyError") < done.stderr.index("[worker 2]")
    assert "worker 0 (pid " in next(
        line for line in summary(done.stderr) if "ended the job" in line
    )


FIRST = """
import atexit
said = f"{os.path.dirname(__file__)}/said"

def last():  # the error was reported, and this process goes on
    os.mkdir(said)
    goodbye()
    wait()

if rank == 0:
    atexit.register(last)
    raise KeyError("mine")
while not os.path.exists(said):
    time.sleep(0.005)
raise ValueError("later")
"""


@pytest.mark.parametrize(("workers", "sooner"), [(1, "server 0"), (2, "worker 1")])
def test_the_first_error_is_to_blame_though_another_process_ends_sooner(
    place: Place, workers: int, sooner: str
) -> None:
    """Python takes its time to end a worker: on a busy machine its server is gone before it."""
    done = place.run(FIRST, workers=workers, environment={"FAKE_SERVER": "lost"})
    assert done.returncode == 1
    assert lines_of(done.stderr, "worker 0")[-1] == "KeyError: 'mine'"
    blamed, after, *_ = summary(done.stderr)
    assert re.search(r"worker 0 \(pid \d+\) raised KeyError at .*:\d+; this ended", blamed)
    assert f"{sooner} exited with code 1" in after


@pytest.mark.parametrize("how", ["option", "variable"])
def test_whole_tracebacks_can_be_had(place: Place, how: str) -> None:
    done = place.run(
        SEVERAL,
        workers=4,
        patience=PATIENT,
        full_tracebacks=how == "option",
        environment={"TENSORWIRE_TRACEBACKS": "full"} if how == "variable" else {},
    )
    assert done.stderr.count(HEADER) == 4
    assert "x" * 9000 in done.stderr


def test_a_wrong_value_of_the_variable_starts_nothing(place: Place) -> None:
    done = place.run("print('never')", environment={"TENSORWIRE_TRACEBACKS": "long"})
    assert "TENSORWIRE_TRACEBACKS is 'long'; it may be short or full" in done.stderr
    assert "never" not in done.stdout


KINDS = {
    "chained": (
        """
        try:
            {}["key"]
        except KeyError as error:
            error.add_note("a note of the user")
            raise ValueError("outer") from error
        """,
        ["KeyError: 'key'", "a note of the user", "direct cause", "ValueError: outer"],
    ),
    "group": (
        "raise ExceptionGroup('both', [KeyError('one'), OSError('two')])",
        ["ExceptionGroup: both (2 sub-exceptions)", "KeyError: 'one'", "OSError: two"],
    ),
    "syntax": (
        "exec(compile('if:', 'other.py', 'exec'))",
        ['  File "other.py", line 1', "SyntaxError: invalid syntax"],
    ),
    "printed": (
        """
        import traceback
        try:
            {}["caught"]
        except KeyError:
            traceback.print_exc()
        raise ValueError("the end")
        """,
        ["KeyError: 'caught'", "ValueError: the end"],
    ),
    "long": ("raise ValueError('begin' + 'x' * 3_000_000 + 'end')", ["begin", "left out", "end"]),
    "no text": (
        """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("inside")
        raise Odd
        """,
        ["Odd: <exception str() failed>"],
    ),
    "library": (
        """
        import importlib
        open("broken_module.py", "w").write("1/0")
        sys.path.insert(0, "")
        importlib.import_module("broken_module")
        """,
        ["broken_module.py", "ZeroDivisionError", "frames of libraries left out; TENSORWIRE_TR"],
    ),
    "own hook": (
        """
        sys.excepthook = lambda *_: print("the user's hook", file=sys.stderr)
        raise ValueError
        """,
        ["the user's hook"],
    ),
    "not text": (
        "raise ValueError('\\udcff \\u00e9')",
        ["ValueError: \\udcff \u00e9"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_comes_out(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    script, expected = KINDS[kind]
    done = place.run(script, workers=1)
    assert done.returncode == 1
    text = "\n".join(lines_of(done.stderr, "worker 0"))
    for part in expected:
        assert part in text
    assert "frozen importlib" not in text
    assert len(text) < 200_000
    assert sum(line.startswith("ValueError") for line in text.splitlines()) <= 1  # shown once


def test_a_script_that_does_not_parse_is_shown_once(place: Place) -> None:
    done = place.run("if:", workers=3)
    assert done.stderr.count("    if:") == 1
    assert done.stderr.count("SyntaxError: invalid syntax") == 3


def test_exit_codes_and_their_texts_stay(place: Place) -> None:
    done = place.run("sys.exit('said by the user' if rank == 0 else wait())")
    assert done.returncode == 1
    assert lines_of(done.stderr, "worker 0") == ["said by the user"]


def test_errors_kept_elsewhere_are_kept_there_too(place: Place) -> None:
    log = place.folder / "log"
    done = place.run("sys.stderr = open(sys.argv[1], 'w')\nraise ValueError", str(log), workers=1)
    assert HEADER in log.read_text()
    assert HEADER in lines_of(done.stderr, "worker 0")


@pytest.mark.slow
def test_a_process_group_makes_no_second_traceback(place: Place) -> None:
    """A process group sets a hook of its own, which also calls the former hook, for each rank."""
    pytest.importorskip("torch")
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    done = place.run(group + "raise KeyError('mine')")
    assert done.stderr.count(HEADER) == 1
    assert done.stderr.count("KeyError: 'mine'") == 2  # and a line for the other worker
    log = place.folder / "log"
    done = place.run(
        f"sys.stderr = open(sys.argv[1], 'w')\n{group}raise KeyError('mine')", str(log), workers=1
    )
    assert f"[rank0]: {HEADER}" in log.read_text()
    assert done.stderr.count(HEADER) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_report_that_fails_loses_nothing(place: Place, told: bool) -> None:
    """The worker prints its error itself, and why the launcher has not, unless that is gone."""
    spoil = "import json; json.dumps = None" if told else "os.closerange(3, 100)"
    done = place.run(f"{spoil}\nraise KeyError('mine')", workers=1)
    lines = lines_of(done.stderr, "worker 0")
    assert HEADER in lines
    assert "KeyError: 'mine'" in lines
    assert any("the launcher could not be told of this" in line for line in lines) == told


def test_an_error_is_shown_while_its_worker_hangs(place: Place) -> None:
    """A thread of the user keeps the process; the terminal shows the error at once."""
    with place.start(
        """
        import threading
        if rank == 1:
            threading.Thread(target=wait).start()
            print("before", file=sys.stderr)
            raise KeyError("shown early")
        wait()
        """,
    ) as job:
        job.wait_for("[worker 1] KeyError: 'shown early'")
        assert job.text.index("[worker 1] before") < job.text.index(HEADER)
        job.send(signal.SIGINT)
        assert job.end() == 130


def test_an_interrupt_shows_where_each_worker_was(place: Place) -> None:
    with place.start(
        """
        def training():
            print("ready", rank)
            wait()
        training()
        """
    ) as job:
        job.wait_for("ready 0", "ready 1")
        job.send(signal.SIGINT)
        assert job.end() == 130
        assert HEADER not in job.text
        for rank in range(2):
            (line,) = (x for x in lines_of(job.text, f"worker {rank}") if "Interrupt" in x)
            assert line.startswith("KeyboardInterrupt, at ")
            assert line.endswith((" in wait", " in training"))


def test_a_killed_worker_is_the_cause_and_the_others_are_lines(place: Place) -> None:
    done = place.run(
        """
        from tensorwire.errors import PeerLostError
        first = f"{os.path.dirname(__file__)}/first"
        if rank == 1:
            os.symlink(f"/proc/{os.getpid()}", first)
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.islink(first) or os.path.exists(first):
            time.sleep(0.005)  # until the launcher has seen its end
        raise PeerLostError("worker 1 was lost")
        """,
        workers=3,
        patience=PATIENT,
    )
    assert done.returncode == 137
    assert HEADER not in done.stderr
    for rank in (0, 2):
        (line,) = lines_of(done.stderr, f"worker {rank}")
        assert line.endswith(": a consequence, not the cause")


def test_the_worker_is_as_if_python_had_started_it(place: Place) -> None:
    """No trace of the launcher's way in is left, and the user's own sitecustomize runs."""
    (place.folder / "sitecustomize.py").write_text("import builtins; builtins.ours = 'ran'")
    done = place.run(
        """
        import sitecustomize
        print(ours, os.environ["PYTHONPATH"], sitecustomize.__file__)
        print([x for x in sys.path + list(os.environ) if "startup" in x or "REPORT" in x])
        fds = subprocess.run([sys.executable, "-c", "import os; print(sorted(map(int,"
            " os.listdir('/proc/self/fd'))))"], capture_output=True, text=True).stdout
        print(fds)
        goodbye()
        """,
        workers=1,
        environment={"PYTHONPATH": str(place.folder)},
    )
    first, way, descriptors, *_ = lines_of(done.stdout, "worker 0")
    assert first == f"ran {place.folder} {place.folder / 'sitecustomize.py'}"
    assert way == "[]"
    assert descriptors == "[0, 1, 2, 3]"  # 3 is the folder that it lists
    assert os.environ.get("TENSORWIRE_REPORT_FD") is None
