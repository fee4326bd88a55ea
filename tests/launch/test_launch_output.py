"""The output of processes arrives whole, by lines, and under their name, in any encoding."""

import os
import pty
import select
import signal
import subprocess
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import WAIT_S, Place, lines_of, summary

from tensorwire.launch.output import LONGEST_LINE, Lines, Output


class Kept(Output):
    """Keeps what it would write."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data += data


def cut(*pieces: bytes, prefix: str = "[w] ", colour: int | None = None) -> bytes:
    kept = Kept()
    lines = Lines(kept, prefix, colour)
    for piece in pieces:
        lines.feed(piece)
    lines.close()
    return kept.data


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([], b""),
        ([b"one\ntwo\n"], b"[w] one\n[w] two\n"),
        ([b"o", b"ne", b"\n", b"\n"], b"[w] one\n[w] \n"),
        ([b"no end"], b"[w] no end\n"),
        ([b"\xff\xfe\x00\n"], b"[w] \xff\xfe\x00\n"),
        ([b"10%\r", b"20%", b"\r30%\n"], b"[w] 30%\n"),
        ([b"10%\r20%\r"], b"[w] 20%\n"),
        ([b"windows\r", b"\nend\r\n"], b"[w] windows\n[w] end\n"),
    ],
)
def test_lines(pieces: list[bytes], shown: bytes) -> None:
    assert cut(*pieces) == shown


def test_without_prefix_bytes_stay() -> None:
    assert cut(b"10%\r20%\r\nend", prefix="") == b"10%\r20%\r\nend\n"


def test_a_very_long_line_is_cut() -> None:
    data = b"x" * (2 * LONGEST_LINE + 5)
    assert cut(data, b"\n") == b"".join(
        b"[w] " + b"x" * count + b"\n" for count in (LONGEST_LINE, LONGEST_LINE, 5)
    )


def test_colour_ends_with_the_line() -> None:
    shown = cut(b"\x1b[31mred\nplain\n", colour=36)
    assert shown == (b"\x1b[36m[w] \x1b[0m\x1b[31mred\x1b[0m\n" + b"\x1b[36m[w] \x1b[0mplain\n")


@given(
    st.lists(st.text(alphabet="ab\r\n", max_size=6).map(str.encode)), st.sampled_from(["", "> "])
)
def test_the_cuts_between_reads_do_not_matter(pieces: list[bytes], prefix: str) -> None:
    pieces = [piece for piece in pieces if piece]
    whole = b"".join(pieces)
    assert cut(*pieces, prefix=prefix) == cut(*([whole] if whole else []), prefix=prefix)


def test_nasty_output_of_processes(place: Place) -> None:
    done = place.run(
        r"""
        if rank == 0:
            os.write(1, b"\xff\xfe invalid\n")
            os.write(1, b"x" * 3_000_000)      # no newline
            os.write(1, b"\n10%\r20%\r30%\nlast")
        else:
            os.write(2, b"about to close\n")
            os.close(1)
            os.close(2)
            time.sleep(0.1)
        """
    )
    assert done.returncode == 0, done.stderr
    first, *long, bar, last = lines_of(done.stdout, "worker 0")
    assert first == "\ufffd\ufffd invalid"
    assert set("".join(long)) == {"x"}
    assert sum(map(len, long)) == 3_000_000
    assert (bar, last) == ("30%", "last")
    assert lines_of(done.stderr, "worker 1") == ["about to close"]


def test_lines_of_several_processes_do_not_mix(place: Place) -> None:
    done = place.run(
        """
        for i in range(500):
            print(str(rank) * 5000, file=sys.stderr if i % 2 else sys.stdout)
        """,
        workers=3,
    )
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        for rank in range(3):
            assert lines_of(text, f"worker {rank}") == [str(rank) * 5000] * 250


def test_stdout_and_stderr_into_one_pipe_do_not_mix(place: Place) -> None:
    with place.start(
        """
        for i in range(300):
            print(str(rank) * 9000, file=sys.stderr if i % 2 else sys.stdout)
        """
    ) as job:
        assert job.end() == 0
        for rank in range(2):
            assert lines_of(job.text, f"worker {rank}") == [str(rank) * 9000] * 300


def test_no_prefix(place: Place) -> None:
    done = place.run("print('plain')", prefix=False)
    assert done.stdout.splitlines().count("plain") == 2


def test_into_a_file(place: Place) -> None:
    path = place.folder / "log"
    with path.open("wb") as log:
        subprocess.run(
            place.command(place.script("print('x' * 10000)")),
            env=place.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=60,
        )
    for rank in range(2):
        assert lines_of(path.read_text(), f"worker {rank}") == ["x" * 10000]


def test_a_reader_that_goes_away_does_not_end_the_job(place: Place) -> None:
    """The same as in `tensorwire run ... | head`."""
    flag = place.folder / "finished"
    command = place.command(
        place.script("for i in range(5000): print('x' * 100)\nopen(sys.argv[1], 'w').close()"),
        str(flag),
        workers=1,
    )
    process = subprocess.Popen(
        command,
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(60) == 0
    assert flag.exists()
    assert "some output was lost: Broken pipe" in list(summary(said))


def test_without_stdout_at_all(place: Place) -> None:
    command = place.command(place.script("print('x')\nsys.exit(3)"), workers=1)
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command],
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 3


def on_terminal(place: Place, text: str, **options: Any) -> tuple[str, int]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        place.command(place.script(text), **options),
        env=place.environment(TERM="xterm"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    data, deadline = b"", time.monotonic() + WAIT_S
    try:
        while select.select([master], [], [], max(deadline - time.monotonic(), 0))[0]:
            try:
                data += os.read(master, 4096)
            except OSError:  # how a terminal ends
                break
        return data.decode(), process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_on_a_terminal_worker_0_prints_directly(place: Place) -> None:
    # With one write: `print` makes one for each value, and the launcher's lines may come between.
    text = 'sys.stdout.write(f"{rank} {sys.stdout.isatty()} {sys.stderr.isatty()}\\n")'
    shown, code = on_terminal(place, f"{text}\nsys.exit(3 if rank else 0)")
    assert code == 3
    lines = shown.replace("\r", "").split("\n")
    assert "0 True True" in lines
    assert "\x1b[32m[worker 1] \x1b[0m1 False False" in lines


def test_a_held_terminal_does_not_hold_the_launcher(place: Place) -> None:
    """The terminal is not read while worker 1 prints more than it takes."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        place.command(place.script("if rank == 0: wait()\nwhile True: print('x' * 200)")),
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        assert select.select([master], [], [], WAIT_S)[0]
        assert b"started" in os.read(master, 4096)  # the launcher handles signals by now
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(master)
