"""Remains that a job cannot clean up: one line each, and its outcome is not changed by them."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Place, summary

from tensorwire.jobs.claim import drop_claim, hold_claim
from tensorwire.jobs.job_file import JobFile, RunningServer
from tensorwire.jobs.job_log import JobLog
from tensorwire.jobs.lockfile import remove_own

# Who may write to any folder may do so no more.
BOUNDED = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"]


@pytest.fixture
def bounded() -> list[str]:
    if os.geteuid() != 0:
        return []
    try:
        subprocess.run([*BOUNDED, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("setpriv cannot take from root the right to write everywhere")
    return BOUNDED


@pytest.fixture
def read_only(place: Place) -> Iterator[Path]:
    """The folder of running jobs, which the job makes read-only; it is not afterwards."""
    folder = place.runtime / "tensorwire"
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(place.temporary / f"tensorwire-{os.geteuid()}", ignore_errors=True)


@pytest.mark.parametrize("code", [0, 7])
def test_a_folder_that_became_read_only_is_told_and_the_outcome_stays(
    place: Place, read_only: Path, bounded: list[str], code: int
) -> None:
    script = place.script(f"""
        from tensorwire.jobs.claim import drop_claim, hold_claim
        hold_claim("this job", rank, "a test")
        if rank == 0:
            while sum(name.startswith("claim-") for name in os.listdir({str(read_only)!r})) < 2:
                time.sleep(0.01)
            os.chmod({str(read_only)!r}, 0o500)
        while os.access({str(read_only)!r}, os.W_OK):
            time.sleep(0.01)
        drop_claim()
        goodbye()
        sys.exit({code} if rank == 0 else 0)
    """)
    done = place.call([*bounded, *place.command(script)])
    assert done.returncode == code, done.stderr
    told = [line for line in done.stderr.splitlines() if "cannot be removed and stays" in line]
    names = sorted(path.name.partition("-")[0] for path in read_only.iterdir())
    # The log of a job that failed is kept on purpose.
    assert names == ["claim", "claim", "control", "job"]
    assert len(told) == (4 if code == 0 else 3), done.stderr
    assert all(str(read_only) in line and "Permission denied" in line for line in told)
    assert "Traceback" not in done.stderr
    assert list(summary(done.stderr))


def test_each_name_is_removed_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    said: list[str] = []
    folder = tmp_path / "a folder"
    folder.mkdir()
    remove_own(folder, say=said.append)  # what nobody can unlink
    assert len(said) == 1
    assert str(folder) in said[0]
    for gone in (tmp_path / "nothing", Path(__file__) / "behind a file"):
        remove_own(gone, say=said.append)
    log = JobLog("train.py", False, said.append)
    log.close(keep=False)
    assert len(said) == 1
    assert not list((tmp_path / "tensorwire").iterdir())


def refuse(path: Path, missing_ok: bool = False) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_server_and_a_worker_tell_that_their_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = JobFile(RunningServer(0, "here:1", os.getpid(), 1, "train.py", 1.0, "", ""))
    hold_claim("a job", 3, "a test")
    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(2):
        file.close()
        drop_claim()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("cannot be removed and stays: Read-only file system" in line for line in told)
