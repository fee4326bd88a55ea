"""Workers that die: their successors, with which state, how often, and how the job then ends."""

import contextlib
import os
import re
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import QUICK, Launched, Place, eventually, summary

from tensorwire import _core

WARM = {**QUICK, "standby_s": 1000.0, "goodbye_s": 10.0}

# A worker that could be replaced: it keeps its socket and a file with two numbers, of which the
# first one counts progress.
KEPT = """
import json
from tensorwire.durability.descriptor_store import DescriptorStore

number = int(os.environ["TENSORWIRE_DESCRIPTOR_STORE"])
term = int(os.environ.get("TENSORWIRE_TERM", "0"))
store = DescriptorStore.of_descriptor(number)

def become(progress=True):
    global door, file
    if not term:
        door = socket.create_server(("127.0.0.1", 0))
        file = os.memfd_create("numbers")
        os.truncate(file, 16)
        store.keep("listener", {}, door.fileno())
        store.keep("numbers", {"progress": 0} if progress else {}, file)
    else:
        takeover = store.wait_for_takeover()
        assert (takeover.arguments, takeover.term) == ([], term)
        door = socket.socket(fileno=store.take("listener").descriptor)
        file = store.take("numbers").descriptor
        assert store.left() == []

def count(place=0):
    number = int.from_bytes(os.pread(file, 8, 8 * place), "little") + 1
    os.pwrite(file, number.to_bytes(8, "little"), 8 * place)
    return number

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(10)
"""


def run(place: Place, text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"workers": 1, "durable": True, "patience": WARM, **options}
    return place.run(KEPT + textwrap.dedent(text), **options)


def start(place: Place, text: str, **options: Any) -> Launched:
    options = {"workers": 1, "durable": True, "patience": WARM, **options}
    return place.start(KEPT + textwrap.dedent(text), **options)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_is_killed_is_replaced(place: Place, workers: int) -> None:
    done = run(
        place,
        """
        become()
        print("term", term, "of", rank)
        if rank == int(os.environ["TENSORWIRE_WORKERS"]) - 1 and term < 2:
            count()
            die()
        goodbye()
        """,
        workers=workers,
    )
    assert done.returncode == 0, done.stderr
    last = workers - 1
    pattern = (
        rf"worker {last} \(pid (\d+)\) was killed by SIGKILL; worker {last} is started again as "
        r"pid (\d+) \(restart (\d)\)"
    )
    found = re.findall(pattern, done.stderr)
    assert [each[2] for each in found] == ["1", "2"]
    assert found[0][1] == found[1][0] != found[1][1]
    assert [f"term {term} of {last}" in done.stdout for term in range(4)] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM])
def test_other_signals_kill_too(place: Place, number: int) -> None:
    done = run(place, f"become(); term or die({number}); goodbye()")
    assert done.returncode == 0, done.stderr
    assert f"was killed by {signal.Signals(number).name}; worker 0" in done.stderr


def test_all_die_at_once(place: Place) -> None:
    """Three workers, one by one after the other was replaced, and then all."""
    done = run(
        place,
        """
        become()
        count()
        if term == 0:
            time.sleep(0.2 * rank)
            die()
        if term == 1:
            os.kill(os.getppid(), 0)
            time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
            die()
        goodbye()
        """.replace("sys.argv[1]", "'%f'" % (__import__("time").time() + 4.0)),
        workers=3,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("(restart 2)") == 3


def test_deaths_without_progress_end_the_job(place: Place) -> None:
    done = run(place, "become(); count(1); die()", restarts=2)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.count("is started again") == 2
    last = "\n".join(summary(done.stderr))
    assert "after it had been replaced 2 times without getting any further" in last
    assert "so that the job begins anew: " in last


def test_progress_begins_the_count_again(place: Place) -> None:
    done = run(place, "become(); count(); term < 6 and die(); goodbye()", restarts=1)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is started again") == 6


@contextlib.contextmanager
def small_group(most: int) -> Iterator[Path]:
    """A control group of `most` bytes of memory, to which a process can be added."""
    places = [(Path(os.fsdecode(each[0])), each[2]) for each in _core.control_groups("memory")]
    with contextlib.ExitStack() as undo:
        for folder, version_2 in places:
            group = folder / f"tensorwire-{os.getpid()}"
            with contextlib.suppress(OSError), contextlib.ExitStack() as partly:
                group.mkdir()
                partly.callback(group.rmdir)
                (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(
                    str(most)
                )
                undo.push(partly.pop_all())
                break
        else:
            pytest.skip("no control group of memory can be made here")
        yield group
        assert eventually(lambda: not (group / "cgroup.procs").read_text())


@pytest.mark.parametrize("memory", [True, False])
def test_deaths_for_memory_end_the_job_despite_progress(place: Place, memory: bool) -> None:
    """A worker gets further each time, and the group has no memory for it."""
    text = "become(); count(); term < 4 or goodbye() or sys.exit(); "
    text += "bytes(range(256)) * (4 << 20)" if memory else "die()"
    with small_group(400 << 20) as group:
        into = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        options = {"workers": 1, "durable": True, "patience": WARM, "restarts": 2}
        command = place.command(place.script(KEPT + text), **options)
        done = place.call(["sh", "-c", into, str(group), *command])
    if not memory:  # somebody has sent SIGKILL: progress begins the count again
        assert done.returncode == 0, done.stderr
        assert "memory" not in done.stderr
        return
    assert done.returncode == 128 + signal.SIGKILL
    limit = f"the memory limit of the control group .*{group.name} is 400 MiB"
    how = rf"was killed by SIGKILL \(memory ran out: {limit}; \d process.* killed for memory\)"
    said = list(summary(done.stderr))
    assert all(re.search(how, line) for line in said[:3]), said
    assert "(restart 2)" in said[1]
    after = "after it had been replaced 2 times; deaths for memory count despite progress"
    assert f"{after} (give the job more memory, or let it use less" in said[2]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("die()", 137, "was killed by SIGKILL"),  # nothing is kept
        ("become(); sys.exit(3)", 3, "exited with code 3"),
        ("become(); raise ValueError('so')", 1, "raised ValueError"),
    ],
)
def test_what_is_not_replaced_ends_the_job(place: Place, text: str, code: int, words: str) -> None:
    done = run(place, text)
    assert done.returncode == code
    assert "is started again" not in done.stderr
    assert words in "\n".join(summary(done.stderr))


def test_the_error_of_a_successor_is_shown(place: Place) -> None:
    done = run(place, "become()\nif term: raise ValueError('it cannot go on')\ndie()")
    assert done.returncode == 1
    assert "ValueError: it cannot go on" in done.stderr
    assert "raised ValueError" in "\n".join(summary(done.stderr))


def test_nobody_holds_the_socket_of_one_that_is_not_replaced(place: Place) -> None:
    """The closed socket tells the others that no process comes in its place."""
    done = run(
        place,
        """
        path = os.path.join(os.path.dirname(__file__), "port")
        if rank == 0:
            become()
            with open(path + "~", "w") as file:
                file.write(str(door.getsockname()[1]))
            os.rename(path + "~", path)
            os._exit(0)
        while not os.path.exists(path):
            time.sleep(0.01)
        port, until = int(open(path).read()), time.time() + 10
        while time.time() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
            except ConnectionRefusedError:
                print("nobody")
                break
            except ConnectionResetError:
                pass  # it was closed at this moment
            time.sleep(0.02)
        goodbye()
        """,
        workers=2,
        patience={**WARM, "goodbye_s": 0.2},
    )
    assert "nobody" in done.stdout, done.stderr


def test_the_first_worker_gets_the_input_again(place: Place) -> None:
    """Its successor goes on to read where it was."""
    text = "become()\nprint('read', sys.stdin.buffer.raw.read(4))\nterm or die()\ngoodbye()"
    options: dict[str, Any] = {"workers": 1, "durable": True, "patience": WARM}
    launched = place.command(place.script(KEPT + text), **options)
    done = place.call(launched, input="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert "read b'one\\n'" in done.stdout
    assert "read b'two\\n'" in done.stdout


def test_only_workers_get_the_variables(place: Place) -> None:
    text = """
    for entry in os.listdir("/proc"):
        try:
            command = open(f"/proc/{entry}/cmdline").read()
            content = open(f"/proc/{entry}/environ").read()
        except (OSError, ValueError):
            continue
        if "fake_server" in command:
            print("server", "TENSORWIRE_DESCRIPTOR_STORE" in content, "TENSORWIRE_TERM" in content)
    goodbye()
    """
    done = run(
        place, text, environment={"TENSORWIRE_DESCRIPTOR_STORE": "7", "TENSORWIRE_TERM": "1"}
    )
    assert "server False False" in done.stdout, done.stderr
    done = place.run("print(os.environ.get('TENSORWIRE_DESCRIPTOR_STORE'))\ngoodbye()", workers=1)
    assert "None" in done.stdout
