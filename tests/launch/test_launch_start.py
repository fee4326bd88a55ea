"""How a job starts: commands, environments, servers that do not come up, wrong arguments."""

import json
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launching import FAKE_SERVER, Place, lines_of, summary

from tensorwire import launch
from tensorwire.cli import main
from tensorwire.launch.spec import JobSpec, reserve_port
from tensorwire.memory import cores
from tensorwire.testing import assert_no_leak

PRINT_ENVIRONMENT = "import json; print(json.dumps(dict(os.environ)))"


def environments(
    place: Place, environment: dict[str, str] | None = None, **options: Any
) -> list[dict[str, str]]:
    done = place.run(PRINT_ENVIRONMENT, environment=environment, **options)
    assert done.returncode == 0, done.stderr
    count = options.get("workers", 2)
    return [json.loads(lines_of(done.stdout, f"worker {rank}")[0]) for rank in range(count)]


def test_the_environment_of_workers(place: Place) -> None:
    found = environments(place, servers=2, slices=4, transports=["tcp", "shm"])
    for rank, environment in enumerate(found):
        assert environment["TENSORWIRE_RANK"] == environment["RANK"] == str(rank)
        assert environment["LOCAL_RANK"] == str(rank)
        assert environment["ROLE_RANK"] == str(rank)
        for name in ("TENSORWIRE_WORKERS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert environment[name] == "2"
        assert (environment["GROUP_RANK"], environment["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["MASTER_PORT"] == found[0]["MASTER_PORT"]
        first, second = environment["TENSORWIRE_SERVERS"].split(",")
        assert first != second
        assert first.startswith("127.0.0.1:")
        assert environment["TENSORWIRE_SLICES"] == "4"
        assert environment["TENSORWIRE_TRANSPORTS"] == "tcp,shm"
        assert environment["PYTHONUNBUFFERED"] == "1"
        assert environment["OMP_NUM_THREADS"] == str(max(1, int(cores()) // 2))
    secrets = {environment["TENSORWIRE_SECRET"] for environment in found}
    assert len(secrets) == 1
    assert len(bytes.fromhex(secrets.pop())) == 32


def test_the_environment_of_servers_has_no_ranks(place: Place) -> None:
    """The environment of workers has no ranks of another launcher either."""
    left = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "TORCHELASTIC_USE_AGENT_STORE": "1"}
    done = place.run(PRINT_ENVIRONMENT, environment=left, workers=1)
    assert lines_of(done.stdout, "server 0")[1] == "ranks in the environment: []"
    found = json.loads(lines_of(done.stdout, "worker 0")[0])
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found


def test_the_master_port_is_for_who_names_it() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as somebody, pytest.raises(OSError, match="in use"):
            somebody.bind(("", port))
        with socket.create_server(("", port)) as store:  # sets SO_REUSEADDR
            assert store.getsockname()[1] == port


def test_a_launcher_that_is_started_several_times_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When srun starts several, each would be a job of its own."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in {**step, "SLURM_STEP_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"SLURM_PROCID .* say that 2 processes run this command"):
        JobSpec(["-m", "this"], 1)


def test_each_job_has_its_own_secret(place: Place) -> None:
    first, second = (environments(place, workers=1)[0]["TENSORWIRE_SECRET"] for _ in range(2))
    assert first != second


def test_what_the_user_has_set_stays(place: Place) -> None:
    user = {"TENSORWIRE_SECRET_FILE": "/some/file", "OMP_NUM_THREADS": "7"}
    (found,) = environments(place, user, workers=1)
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["TENSORWIRE_SECRET_FILE"] == "/some/file"
    assert "TENSORWIRE_SECRET" not in found
    assert "TENSORWIRE_SLICES" not in found


def test_servers_know_those_before_them_and_no_secret_is_on_a_command_line(place: Place) -> None:
    done = place.run(
        """
        print("secret:", os.environ["TENSORWIRE_SECRET"], "servers:", os.environ[
            "TENSORWIRE_SERVERS"])
        for pid in os.listdir("/proc"):
            try:
                command = open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                continue
            assert os.environ["TENSORWIRE_SECRET"].encode() not in command
        """,
        servers=2,
        workers=1,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.partition("servers: ")[2].split("\n")[0].split(",")
    assert first != second
    assert "started with servers='' listen=127.0.0.1:0" in lines_of(done.stdout, "server 0")
    assert f"started with servers='{first}' listen=127.0.0.1:0" in lines_of(done.stdout, "server 1")


def test_a_server_listens_where_it_is_told(place: Place) -> None:
    done = place.run("", workers=1, listen="::1")
    assert "listen=[::1]:0" in done.stdout


def test_servers_are_told_what_they_may_import(place: Place) -> None:
    """From the folder of the script, too, or where a module is run."""
    script = place.script("print(os.environ['TENSORWIRE_IMPORT'])", "some_module.py")
    for command in (["-m", "some_module"], [str(script)]):
        started = place.command(*command, workers=1, imports=["one.two", "three"])
        done = place.call(started, cwd=place.folder)
        assert done.returncode == 0, done.stderr
        assert f"imports one.two,three from {str(place.folder)!r}" in done.stdout
        assert "[worker 0] one.two,three" in done.stdout


def test_nothing_is_imported_unless_it_is_asked_for(place: Place) -> None:
    assert "imports None from ''" in place.run("", workers=1).stdout


def test_arguments_and_modules(place: Place) -> None:
    place.script("print(__name__, sys.argv[1:])", "some_module.py")
    for command in (["-m", "some_module"], ["some_module.py"]):
        started = place.command(*command, "--lr", "0.1", "-h", "--", "x", workers=1)
        done = place.call(started, cwd=place.folder)
        assert "[worker 0] __main__ ['--lr', '0.1', '-h', '--', 'x']" in done.stdout, done.stderr


def test_worker_0_has_our_stdin(place: Place) -> None:
    script = place.script("print(rank, repr(sys.stdin.read()))")
    done = place.call(place.command(script), input="from outside")
    assert "[worker 0] 0 'from outside'" in done.stdout
    assert "[worker 1] 1 ''" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ("fails 0", 7, "server 0 (pid N) exited with code 7 before the workers were started"),
        ("fails 1", 7, "server 1 (pid N) exited with code 7 before the workers were started"),
        ("ends 1", 1, "server 1 (pid N) exited with code 0 before the workers were started"),
        ("silent", 1, "server 0 (pid N) gave no address within 1 s"),
        ("closes", 1, "server 0 (pid N) closed its address without one"),
        ("garbage 1", 1, "server 1 (pid N) gave no address but b'here I am\\n'"),
    ],
)
def test_a_server_does_not_come_up(place: Place, wrong: str, code: int, said: str) -> None:
    done = place.run(
        "print('never')",
        servers=2,
        environment={"FAKE_SERVER": wrong},
        patience={"start_s": 1 if wrong == "silent" else 30, "alone_s": 0.1, "kill_s": 0.5},
    )
    assert done.returncode == code
    assert "never" not in done.stdout
    first = next(summary(done.stderr))
    before, _, after = said.partition("N")
    assert first.startswith(before)
    assert first.endswith(f"{after}; this ended the job")
    if wrong == "fails 0":
        assert lines_of(done.stderr, "server 0") == ["no such luck"]


def test_a_server_program_that_does_not_exist(place: Place) -> None:
    done = place.run("", server_command=["/no/such/program"])
    assert done.returncode == 127
    assert "[server 0] cannot run /no/such/program: No such file or directory" in done.stderr


def test_too_few_descriptors_for_all_processes(place: Place) -> None:
    limited = f"import resource; resource.setrlimit({resource.RLIMIT_NOFILE}, (24, 24)); "
    code = (
        limited
        + "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], "
        + ("run_name='__main__')")
    )
    python, *command = place.command(place.script("wait()"), workers=16)
    environment = place.environment(PYTHONPATH=str(Path(__file__).parent))
    done = place.call([python, "-c", code, *command], env=environment)
    assert done.returncode == 1
    assert "a process cannot be started" in done.stderr
    assert "Too many open files" in done.stderr


def test_no_descriptor_and_no_process_is_left_here(place: Place) -> None:
    """In this process: once well, once with failures at each stage."""
    scripts = [place.script("goodbye()", "well.py"), place.script("sys.exit(3)", "ill.py")]
    servers = FAKE_SERVER
    with assert_no_leak():
        jobs = [JobSpec([s], 2, server_command=servers) for s in scripts]
        jobs.append(JobSpec([scripts[0]], 1, server_command=["/no/such/program"]))
        codes = [launch.run(job) for job in jobs]
    assert codes == [0, 3, 127]


WRONG = [
    (["--workers", "0", "SCRIPT"], "workers is 0"),
    (["--workers", "1", "--file-workers", "-1", "SCRIPT"], "file workers is -1"),
    (["--workers", "1", "--file-workers", "1", "--slices", "4", "SCRIPT"], "leave --slices out"),
    (
        ["--workers", "2", "--file-workers", "1", "--on-death", "takeover", "SCRIPT"],
        "cannot compute the slices of a file worker",
    ),
    (
        ["--workers", "1", "--file-workers", "1", "--transports", "tcp", "SCRIPT"],
        "file workers need shm",
    ),
    (["--workers", "2", "--servers", "0", "SCRIPT"], "servers is 0"),
    (["--workers", "2", "--slices", "3", "SCRIPT"], "not a multiple of the 2 workers"),
    (["--workers", "2", "--slices", "0", "SCRIPT"], "not a multiple"),
    (["--workers", "2", "--transports", "shm,ftp", "SCRIPT"], "unknown transport 'ftp'"),
    (["--workers", "2", "--transports", "shm,shm", "SCRIPT"], "at most once"),
    (["--workers", "2", "--listen", "a,b", "SCRIPT"], "listen is 'a,b'"),
    (["--workers", "2", "--import", "a-b", "SCRIPT"], "--import 'a-b': the name of a module"),
    (["--workers", "2", "no/such/script.py"], "'no/such/script.py' does not exist"),
    (["--workers", "2", "/"], "folder without __main__.py"),
    (["--workers", "2", "-m", "no_such_module.at_all"], "no module 'no_such_module.at_all'"),
    (["--workers", "2"], "Missing argument 'SCRIPT'"),
    (["SCRIPT"], "Missing option '--workers'"),
    (["--worker", "2", "SCRIPT"], "No such option"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_arguments_start_nothing(place: Place, arguments: list[str], said: str) -> None:
    script = place.script("")
    names = [script if argument == "SCRIPT" else argument for argument in arguments]
    with assert_no_leak():
        result = CliRunner().invoke(main, ["run", *names])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())


def test_the_command_passes_everything_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command; the program of the servers is the only thing replaced."""
    place.script("print(sys.argv[1:], os.environ['TENSORWIRE_SLICES'])\nsys.exit(rank)")
    code = (
        f"import sys, tensorwire.launch.spec as spec; spec.JobSpec.__init__.__defaults__ = "
        f"(*spec.JobSpec.__init__.__defaults__[:-1], tuple({FAKE_SERVER!r})); "
        "from tensorwire.cli import main; main(prog_name='tensorwire')"
    )
    arguments = ["--workers", "2", "--slices", "4", "--no-prefix", "script.py", "--workers", "9"]
    done = place.call([sys.executable, "-c", code, "run", *arguments], cwd=place.folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines().count("['--workers', '9'] 4") == 2
