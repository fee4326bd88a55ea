"""`tw.GradScaler` decides for all workers what torch's own decides for one."""

from collections.abc import Callable

import pytest
from scripts import digest
from team import Team
from torch import nn
from twins import adamw, batch, loss, mean_gradients, net, same, sgd

import tensorwire.torch as tw


def scaling(job: tw.Job, unscale: bool) -> tuple[str, float]:
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(adamw(model), model), adamw(twin)
    scaler = tw.GradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        before = digest(model)
        factor = float("inf") if step == 3 and job.rank == 1 else 1.0
        scaler.scale(loss(model, batch(step, job.rank)) * factor).backward()
        if unscale:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
        if step == 3:
            assert digest(model) == before, "a step that is not finite was applied"
            continue
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
    assert scales == [1024, 2048, 2048, 1024, 1024, 2048]
    same(model, twin, rtol=1e-9, atol=1e-12)
    return digest(model), scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_a_scaler_skips_for_all(team: Team, transports: list[str] | None, unscale: bool) -> None:
    first, second = team.run(scaling, unscale, transports=transports)
    assert first == second


def scaling_slices(job: tw.Job) -> tuple[str, list[float]]:
    model = net()
    opt = tw.DistributedOptimizer(adamw(model), model)
    scaler = tw.GradScaler(init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        for index in job.my_slices:
            factor = float("inf") if step == 3 and index == 1 else 1.0
            scaler.scale(loss(model, batch(step, index)) * factor).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        scales.append(scaler.get_scale())
    return digest(model), scales


def test_a_scaler_updates_once_per_step_of_several_slices(team: Team) -> None:
    """Named for a bug: it counted slices as steps, so that its scale grew too early."""
    assert team.alone(scaling_slices, slices=2) == team.run(scaling_slices)[0]


def scale_beyond_numbers(job: tw.Job, scale: float, unscale: bool) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    scaler = tw.GradScaler(init_scale=scale)
    scaler.scale(loss(model, batch(0, job.rank))).backward()
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("scale", [0.0, float("inf")])
def test_a_scale_without_an_inverse_is_an_error(team: Team, scale: float, unscale: bool) -> None:
    """Named for a bug: a bare ZeroDivisionError, or a scale of 0 that a server complained of."""
    for failure in team.failures(scale_beyond_numbers, scale, unscale):
        assert "init_scale=" in failure.text


def scaler_forgotten(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model)
    scaler = tw.GradScaler()
    scaler.scale(loss(model, batch(0, job.rank))).backward()
    tw.clip_grad_norm_(opt, 1.0)
    scaler.step(opt)


def test_clipping_scaled_gradients_is_an_error(team: Team) -> None:
    """Named for a bug: the step was applied with the scale in it."""
    for failure in team.failures(scaler_forgotten):
        assert "unscale_" in failure.text


def hooks_and_scaler(job: tw.Job, wrap: bool) -> list[tuple[int, str, bool]]:
    """(step, hook, parameters are still those of before) of every call of a hook."""
    model = net()
    opt = sgd(model)
    seen: list[tuple[int, str, bool]] = []
    before = digest(model)
    step = -1

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append((step, name, digest(model) == before))

    opt.register_step_pre_hook(note("before"))
    if wrap:
        opt = tw.DistributedOptimizer(opt, model)
    opt.register_step_post_hook(note("after"))
    scaler = tw.GradScaler(init_scale=1024.0)
    for step in range(4):
        before = digest(model)
        for index in job.my_slices if wrap else [0]:
            factor = float("inf") if step == 2 and index == 0 else 1.0
            scaler.scale(loss(model, batch(step, index)) * factor).backward()
            if step == 3 and len(job.my_slices) == 1:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert scaler.get_scale() == 512.0
    return seen


CALLS = [(step, name, name == "before") for step in range(4) for name in ("before", "after")]


def test_hooks_of_a_step_run_once(team: Team, transports: list[str] | None) -> None:
    """Named for a bug: a scaler's step left them out.

    Only the servers know that a step is skipped, so its hooks run too, around no change; torch
    knows it before and leaves them out.
    """
    torchs = team.alone(hooks_and_scaler, False)
    assert torchs == [call for call in CALLS if call[0] != 2]
    skipped = [(2, "before", True), (2, "after", True)]
    expected = [call for call in CALLS if call[0] != 2]
    expected[4:4] = skipped
    assert team.alone(hooks_and_scaler, True) == expected
    for seen in team.run(hooks_and_scaler, True, transports=transports):
        assert seen == expected


def test_hooks_of_a_step_of_several_slices_run_for_each(team: Team) -> None:
    seen = team.alone(hooks_and_scaler, True, slices=2)
    # The first slice of a step changes nothing yet, nor does the skipped step.
    assert [call[:2] for call in seen] == [
        (step, name) for step in range(4) for _ in range(2) for name in ("before", "after")
    ]
    assert [call for call in seen if not call[2]] == [(step, "after", False) for step in (0, 1, 3)]
