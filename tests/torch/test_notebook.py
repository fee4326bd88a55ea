"""Cells that are run again, end with an error or are interrupted: the next ones go on.

A notebook is a job of one worker; what a cell does again works with several too. Real kernels are
in tests/engines.
"""

import copy
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from programs import output_of
from scripts import digest
from team import Team
from torch import nn
from twins import adamw, batch, loss, make_step, mean_gradients, net, same, sgd

import tensorwire.torch as tw
from tensorwire.torch import job as job_module


def train(model: nn.Module, opt: Any, rank: int, first: int, count: int = 2) -> None:
    for step in range(first, first + count):
        opt.zero_grad()
        loss(model, batch(step, rank)).backward()
        opt.step()


def train_plain(model: nn.Module, opt: Any, first: int, count: int = 2) -> None:
    for step in range(first, first + count):
        opt.zero_grad()
        mean_gradients(model, step)
        opt.step()


# ---- tw.init() again

OTHERS: dict[str, Any] = {
    "slices": 4,
    "seed": -1,
    "transports": ["tcp", "shm"],
    "pipeline": 2,
    "rank": 0,
}


def joined_again(job: tw.Job) -> list[str]:
    given = dict(job._given)
    torch.manual_seed(99)
    assert tw.init(**given) is job
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(0)))
    assert tw.current_job() is job
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    train(model, opt, job.rank, 0)
    errors = []
    for name, value in OTHERS.items():
        more = {"world_size": 1} if name == "rank" else {}
        text = re.escape(f"by tw.init({name}={given[name]!r}), and now {name} is ")
        with pytest.raises(RuntimeError, match=text):
            tw.init(**{**given, **more, name: value})
        errors.append(name)
    train(model, opt, job.rank, 2)  # nothing has changed
    job.close()
    with pytest.raises(RuntimeError, match=r"call tw\.init\(\) first"):
        tw.current_job()
    return errors


def test_a_job_is_joined_again(team: Team, transports: list[str] | None) -> None:
    """Named for a bug: a cell that was run again could not join."""
    assert team.run(joined_again, transports=transports) == [list(OTHERS)] * 2
    assert team.alone(joined_again) == list(OTHERS)


def all_cells(job: tw.Job) -> str:
    job = tw.init(**job._given)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    data = torch.randn(16, 5, dtype=torch.float64)
    opt = tw.DistributedOptimizer(adamw(model), model)
    for _ in job.epochs(2):
        for x in job.loader(data, batch_size=4, shuffle=True):  # type: ignore[arg-type]
            make_step(opt, loss(model, x))
    return digest(model)


def twice(job: tw.Job) -> bool:
    return all_cells(job) == all_cells(job)


def test_all_cells_again_give_the_same_bits(team: Team) -> None:
    assert team.alone(twice)
    assert team.run(twice) == [True, True]


def explained(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    with pytest.raises(RuntimeError, match="explain_model trains in a job of its own"):
        tw.explain_model(model, lambda model: loss(model, batch(0, 0)))
    train(model, opt, job.rank, 0)
    tw.explain_optimizer(opt)


def test_what_makes_a_job_of_its_own_does_not_take_the_one_that_is_there(team: Team) -> None:
    """The library would close the job at its end, and the optimizer before."""
    team.alone(explained)


def other_jobs_afterwards(rank: int) -> list[str]:
    bits = []
    for seed in (3, 3, 4):
        with tw.init(seed=seed) as job:
            assert job.seed == seed
            bits.append(digest(nn.Linear(2, 2)))
    return bits


def test_a_job_that_was_closed_is_not_joined_again(team: Team) -> None:
    ((first, again, other),) = team.without_job(other_jobs_afterwards, workers=1)
    assert first == again != other


def asked_afterwards(job: tw.Job) -> None:
    job.close()
    for ask in (job.barrier, lambda: job.mean(3.0), lambda: job.sum([1.0, 2.0])):
        with pytest.raises(RuntimeError, match="this job was closed, and its workers"):
            ask()


def test_a_job_that_was_closed_sums_up_nothing(team: Team) -> None:
    """Named for a bug: alone it answered, as if all went on."""
    team.alone(asked_afterwards)
    team.run(asked_afterwards)


def kept_afterwards(rank: int) -> list[bool]:
    """Tells whether a job's store is there, while the collector sleeps, in another job."""
    found = []
    gc.disable()
    try:
        for _ in range(2):
            with tw.init():
                model = net()
                opt = tw.DistributedOptimizer(torch.optim.NAdam(model.parameters()), model, ema=0.9)
                train(model, opt, 0, 0)
                store = weakref.ref(opt._tensorwire.store)
            del model, opt
            with tw.init():
                found.append(store() is not None)
    finally:
        gc.enable()
    return found


def test_a_job_that_was_closed_keeps_no_memory(team: Team) -> None:
    """Named for a bug: it had the memory of its parameters until the collector came."""
    assert team.without_job(kept_afterwards, workers=1) == [[False, False]]


# ---- a cell that makes an optimizer


def made_again(job: tw.Job, referenced: bool) -> str:
    """With other options, after an error between backward and step."""
    model = net()
    twin = copy.deepcopy(model)
    opt = tw.DistributedOptimizer(sgd(model), model)
    plain: torch.optim.Optimizer = sgd(twin)
    train(model, opt, job.rank, 0)
    train_plain(twin, plain, 0)
    loss(model, batch(2, job.rank)).backward()
    opts = [opt] if referenced else []
    del opt
    gc.collect()
    opt = tw.DistributedOptimizer(adamw(model), model, max_norm=1e9)
    opts.append(opt)
    plain = adamw(twin)
    assert job.optimizers == [opt]
    train(model, opt, job.rank, 3)
    train_plain(twin, plain, 3)
    same(model, twin)
    for old in opts[:-1]:
        with pytest.raises(RuntimeError, match="another one was made for its parameters; use that"):
            old.step()
        old.close()
    train(model, opt, job.rank, 5)
    train_plain(twin, plain, 5)
    same(model, twin)
    return digest(model)


@pytest.mark.parametrize("referenced", [True, False])
def test_an_optimizer_is_made_again(
    team: Team, transports: list[str] | None, referenced: bool
) -> None:
    """Named for a bug: its parameters were trained by another optimizer, which was not reachable.

    Also that `.grad` of the error's step lies in memory of the optimizer that is gone.
    """
    first, second = team.run(made_again, referenced, transports=transports)
    assert first == second


def a_new_head(job: tw.Job) -> None:
    """Fine-tuning: the old optimizer has parameters that the model has no more, or froze."""
    model = net()
    tw.DistributedOptimizer(sgd(model), model)
    model[2] = nn.Linear(7, 3).double()
    opt = tw.DistributedOptimizer(sgd(model), model)
    train(model, opt, job.rank, 0)
    model[0].requires_grad_(False)
    before = model[0].weight.clone(), model[2].weight.clone()
    opt = tw.DistributedOptimizer(sgd(model[2]), model)
    train(model, opt, job.rank, 2)
    assert torch.equal(before[0], model[0].weight)
    assert not torch.equal(before[1], model[2].weight)
    assert job.optimizers == [opt]
    other = net()
    both = [opt, tw.DistributedOptimizer(sgd(other), other)]
    assert job.optimizers == both  # another model's is left alone


def test_another_head_and_a_frozen_body(team: Team, transports: list[str] | None) -> None:
    team.run(a_new_head, transports=transports)
    team.alone(a_new_head)


# ---- a cell that ends between the slices of a step


def left_between_slices(job: tw.Job) -> str:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    data = [batch(0, i)[0] for i in range(8)]
    loader = job.loader(data, batch_size=2)  # type: ignore[arg-type]
    for x in loader:
        make_step(opt, loss(model, x))
        break
    with torch.no_grad():
        next(iter(loader))  # to look at data is no pass
    with pytest.raises(RuntimeError, match="a new pass of a loader after slice 1 of 2") as caught:
        next(iter(loader))
    return str(caught.value)


def test_a_step_that_was_left_between_slices(team: Team) -> None:
    """Named for a bug: the next pass went on with the second half of the step before."""
    (text,) = team.run(left_between_slices, workers=1, slices=2)
    assert "close the job and begin anew" in text


# ---- interrupts


class Interrupt:
    """Raises KeyboardInterrupt where tensorwire calls the n-th function, as Ctrl-C may.

    Args:
        at: n, from 1 up.

    Attributes:
        where: the function; "" if there were fewer.
    """

    def __init__(self, at: int) -> None:
        self.where = ""
        self._left = at
        self._code = str(Path(tw.__file__).parents[1])

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        # An interrupt of a generator that is being closed goes nowhere.
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(self._code) and name != "<genexpr>":
            self._left -= 1
            if self._left == 0:
                self.where = f"{Path(frame.f_code.co_filename).stem}.{name}"
                raise KeyboardInterrupt


def wide() -> nn.Sequential:
    """With a gradient that is produced in the pool in the first step, and buffers."""
    torch.manual_seed(4)
    layers = nn.BatchNorm1d(5), nn.Linear(5, 2000), nn.Tanh(), nn.Linear(2000, 2)
    return nn.Sequential(*layers).double()


def one_step(model: nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    model(batch(step, 0)).square().mean().backward()
    opt.step()


def synchronized(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    with opt.accumulate():
        model(batch(1, 0)).square().mean().backward()
    model(batch(2, 0)).square().mean().backward()
    opt.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def edited(model: nn.Module, opt: Any) -> None:
    with tw.edit(model):
        torch._foreach_mul_([p.detach() for p in model.parameters()], 0.5)


def replaced(model: nn.Module, opt: Any) -> None:
    tw.DistributedOptimizer(adamw(model), model)


def closed_and_made(model: nn.Module, opt: Any) -> None:
    opt.close()
    tw.DistributedOptimizer(adamw(model), model)


CELLS: dict[str, Callable[[nn.Module, Any], None]] = {
    "step": lambda model, opt: one_step(model, opt, 1),
    "synchronize": synchronized,
    "edit": edited,
    "replace": replaced,
    "close": closed_and_made,
}


def interrupted(rank: int, name: str) -> int:
    """Interrupts a cell at one call after the other; returns how many there are."""
    at, every = 1, 5
    while True:
        with tw.init() as job:
            model = wide()
            opt = tw.DistributedOptimizer(adamw(model), model)
            one_step(model, opt, 0)
            with Interrupt(at) as interrupt:
                CELLS[name](model, opt)
            torch.set_grad_enabled(True)  # an interrupt may keep torch's own `with` from its end
            try:
                if name in ("replace", "close"):  # the cell is run again
                    opt = tw.DistributedOptimizer(adamw(model), model)
                assert job.optimizers == [opt]
                one_step(model, opt, 2)
                # From here on it is a plain optimizer with the same parameters and state.
                twin = copy.deepcopy(model)
                plain = adamw(twin)
                plain.load_state_dict(opt.state_dict())
                for step in range(3, 5):
                    one_step(model, opt, step)
                    one_step(twin, plain, step)
                same(model, twin)
                with tw.edit(model):
                    model[1].bias.data.zero_()
                opt.close()
            except Exception as error:
                error.add_note(f"after an interrupt at call {at} of {name}, of {interrupt.where}")
                raise
            if not interrupt.where:
                return at
        at += every


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_interrupted(team: Team, name: str) -> None:
    """Named for a bug: after an interrupt in `tw.edit` every step was an error."""
    (points,) = team.without_job(interrupted, name, workers=1)
    assert points > 150


def ends_of_slices(job: tw.Job) -> int:
    """Interrupts what ends a slice at each of its lines, as it makes no call; returns how many."""
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    code = type(opt._tensorwire.reducer).slice_committed.__code__
    lines = sorted({line for *_, line in code.co_lines() if line and line > code.co_firstlineno})
    for at in lines:

        def traced(frame: FrameType, event: str, argument: Any, at: int = at) -> Any:
            if event == "line" and frame.f_lineno == at:
                raise KeyboardInterrupt
            return traced if frame.f_code is code else None

        sys.settrace(traced)
        with pytest.raises(KeyboardInterrupt):
            train(model, opt, 0, 0)
        sys.settrace(None)
        train(model, opt, 0, 1)
    return len(lines)


def test_an_interrupt_at_the_end_of_a_slice(team: Team) -> None:
    """Named for a bug: the next step asked for a slice that the job does not have."""
    assert team.alone(ends_of_slices) > 3


# ---- loops that an error has left


class Bar:
    """A ProgressLine that tells what happens to it."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, epochs: int) -> None:
        self.closed = 0
        self.made.append(self)

    def begin(self, epoch: int) -> None:
        assert not self.closed

    def end(self, epoch: int, values: Any, seconds: float) -> None:
        assert not self.closed

    def show(self, values: Any) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed += 1


def test_a_loop_over_epochs_that_an_error_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a bug: its bar stayed on the terminal, and later took away the next loop's.

    The traceback, which a notebook keeps, has the loop.
    """
    monkeypatch.setattr(job_module, "ProgressLine", Bar)
    with tw.init() as job:
        kept = job.epochs(3)
        next(kept)
        epochs = []
        for epoch in job.epochs(2):
            epochs.append(epoch)
            first, second = Bar.made
            assert (bool(first.closed), bool(second.closed)) == (True, False)
            kept.close()
            job.log(loss=0.5)
        assert epochs == [0, 1]
        assert second.closed


# ---- the end of what a person types

TYPED = """
import os, sys
import torch, tensorwire.torch as tw
job = tw.init()
model = torch.nn.Linear(4, 2)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for i in range(3):
    opt.zero_grad(); model(torch.ones(3, 4)).sum().backward()
    if i == 1: raise LookupError("bad luck")
    opt.step()

assert tw.init() is job
opt.zero_grad(); model(torch.ones(3, 4)).sum().backward(); opt.step()
assert opt._tensorwire.steps == 2
other = torch.nn.Linear(4, 2)
never = tw.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)
other(torch.ones(3, 4)).sum().backward()
print("typed", os.getpid())
"""


@pytest.mark.slow
def test_what_is_typed_into_python(tmp_path: Path) -> None:
    """An error in a line is no error of the program; its end warns of no missing step."""
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=TYPED,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("typed ")
    assert done.stderr.count("Error") == 1, done.stderr
    assert "LookupError: bad luck" in done.stderr
    assert "was never called" not in done.stderr
    assert done.returncode == 0


CONSOLE = """
import code, sys
sys.ps1 = ">>> "  # as python and IPython do
person = code.InteractiveInterpreter()
for cell in open("cells").read().split("\\n\\n"):
    person.runcode(compile(cell, "cell", "exec"))
assert isinstance(sys.last_value, LookupError)
"""


@pytest.mark.slow
def test_an_error_in_a_cell_does_not_end_the_job_badly(tmp_path: Path) -> None:
    """Named for a bug: at its end the worker told the server that it had failed."""
    (tmp_path / "cells").write_text(TYPED)
    (tmp_path / "script.py").write_text(CONSOLE)
    command = [sys.executable, "-m", "tensorwire", "run", "--workers=1", "script.py"]
    text = output_of(command, tmp_path)
    assert "[worker 0] typed " in text
    assert "server 0" not in text
    assert "was never called" not in text


FORKED = """
import code, multiprocessing, os, sys
import torch
import tensorwire.torch as tw

def child():
    with tw.init(rank=0, world_size=1) as job:
        pass
    job = tw.init(rank=0, world_size=1)
    from tensorwire.torch.ending import ending_error
    os.write(1, f"ends with {ending_error()}\\n".encode())

sys.ps1 = ">>> "
code.InteractiveInterpreter().runcode(compile("1 / 0", "cell", "exec"))
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


def test_a_child_does_not_end_with_an_error_of_its_parent(tmp_path: Path) -> None:
    """Named for a bug: so it was where a notebook had started workers after an error in a cell."""
    (tmp_path / "script.py").write_text(FORKED)
    assert "ends with None" in output_of([sys.executable, "script.py"], tmp_path)


STARTED = """
import multiprocessing, os, sys, warnings

def child(queue):
    import tensorwire.torch as tw
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with tw.init() as job:
                queue.put(f"{job.size} {caught[0].category.__name__} {tw.init() is job}")
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")

def told(context):
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    return found

if __name__ == "__main__":
    import tensorwire.torch as tw
    context = multiprocessing.get_context(sys.argv[1])
    with tw.init() as job:
        print("joined:", told(context))
    print("closed:", told(context))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_one_with_a_job_starts(tmp_path: Path, method: str) -> None:
    """The process trains alone, and a warning says so; a fork comes before the job, or after it."""
    (tmp_path / "script.py").write_text(STARTED)
    text = output_of([sys.executable, "script.py", method], tmp_path)
    alone = "1 RuntimeWarning True"
    assert f"closed: {alone}" in text
    if method == "fork":
        assert "joined: RuntimeError: this process is a fork of process" in text
    else:
        assert f"joined: {alone}" in text


# ---- pytest

FIXTURES = """
import os
import pytest
import torch
import tensorwire.torch as tw

@pytest.fixture
def job():
    return tw.init()

def trained(job):
    model = torch.nn.Linear(4, 2)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    for (x,) in job.loader(data, batch_size=4, shuffle=True):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return model.weight.tolist()

@pytest.mark.parametrize("number", range(2))
def test_of_a_job(job, number):
    assert trained(job) == trained(tw.init())

def test_that_fails(job):
    model = torch.nn.Linear(4, 2)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(3, 4)).sum().backward()
    raise LookupError("bad luck")

@pytest.mark.parametrize("number", range(2))
def test_with_a_job_of_its_own(number):
    tw.current_job().close()
    with tw.init(seed=number) as job:
        trained(job)
    tw.init()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-n2", "--dist=loadfile"]])
def test_a_fixture_that_joins(tmp_path: Path, options: list[str]) -> None:
    """One test after another in one process, and in the processes of xdist; warnings are errors."""
    (tmp_path / "test_user.py").write_text(FIXTURES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *options]
    text = output_of([*command, "test_user.py"], tmp_path, code=1)
    assert "1 failed, 4 passed" in text
    assert "LookupError: bad luck" in text


@pytest.mark.slow
def test_xdist_inside_of_a_worker(tmp_path: Path) -> None:
    """Its processes are not the worker: one may be it, and the other is told."""
    (tmp_path / "test_user.py").write_text(FIXTURES)
    options = ["-p", "no:cacheprovider", "-n2", "--dist=each"]
    command = [sys.executable, "-m", "tensorwire", "run", "-w1", "-m", "pytest", *options]
    text = output_of([*command, "test_user.py"], tmp_path, code=1)
    assert "worker 0 of this job is process" in text
    assert "or call tw.init(rank=0, world_size=1) in it to train alone" in text
