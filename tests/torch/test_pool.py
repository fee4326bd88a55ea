"""Gradients that a prediction misses are produced in the pool: no copy, the same bits, no memory.

In a store alone, bit for bit against pushes; and in scripts whose steps differ from each other.
"""

import ctypes
import os
from typing import Any

import numpy as np
import pytest
import torch
from hosts import Host, two_hosts
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import digest
from team import Team
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import make_step

import tensorwire.torch as tw
from tensorwire.parameters import (
    ABSENT,
    APPLY,
    POOLED,
    PRODUCED,
    PUSHED,
    REDUCE,
    REDUCED,
    WANT_NORM,
    Commit,
    Layout,
    LocalStore,
    Place,
    Spec,
    TensorSpec,
)
from tensorwire.parameters.contributions import Contribution
from tensorwire.parameters.shard import Shard, ShardMemory
from tensorwire.torch.kernels import FusedKernel

STEPS = 6
SGD = "torch.optim.SGD:momentum_buffer"
HYPER = (0.1, 0.9, 0.0, 0.0, 0.0, 0.0)


# ---- a store alone


def spec_of(sizes: list[int], slices: int) -> Spec:
    tensors = tuple(TensorSpec(f"t{i}", "float32", (size,)) for i, size in enumerate(sizes))
    return Spec(SGD, FusedKernel(SGD).hyper, 1, slices, tensors)


def values_of(store: LocalStore) -> np.ndarray[Any, Any]:
    found = np.empty(store.layout.size_bytes, np.uint8)
    store.read_values(found)
    return found


def train(
    spec: Spec, ways: list[list[int]], order: list[int], clipped: bool
) -> tuple[list[float], np.ndarray[Any, Any]]:
    """Two steps; how each slice's gradients come, and in whose blocks those of the pool lie."""
    store = LocalStore(spec, FusedKernel(SGD))
    generator = np.random.default_rng(1)
    norms = []
    for version in (2, 3):
        for index in range(spec.slices):
            places = store.places(index)
            present, blocks = bytearray(), [0] * len(spec.tensors)
            for tensor, way in enumerate(ways[index]):
                values = generator.standard_normal(spec.tensors[tensor].elements, np.float32)
                data, place = values.view(np.uint8), places[tensor]
                assert isinstance(place, Place)
                if way == PUSHED:
                    store.push(index, tensor, data)
                elif way == PRODUCED:
                    place.memory[:] = data
                elif way == POOLED:
                    alike = [
                        o for o in order if spec.tensors[o].shape == spec.tensors[tensor].shape
                    ]
                    block = alike[alike.index(tensor) - 1]
                    free = ways[index][block] in (ABSENT, PUSHED)
                    blocks[tensor] = 2 * block + free
                    there = places[block]
                    assert isinstance(there, Place)
                    assert there.block is not None
                    (there.memory if free else there.block)[:] = data
                present.append(way)
            limit = 0.5 if clipped else float("inf")
            commit = Commit(
                version, APPLY, 0, 1.0, limit, 1.0 + index, (HYPER,), bytes(present), tuple(blocks)
            )
            store.commit(index, commit)
        norms.append(store.wait().norm)
    return norms, values_of(store)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    size = st.sampled_from([1, 3, 16, 17, 5000, 200_000])
    sizes = draw(st.lists(size, min_size=1, max_size=6))
    sizes += sizes[:1] * draw(st.integers(0, 2))
    way = st.sampled_from([ABSENT, PUSHED, PRODUCED, POOLED])
    row = st.lists(way, min_size=len(sizes), max_size=len(sizes))
    ways = draw(st.lists(row, min_size=1, max_size=3))
    return sizes, ways, draw(st.permutations(range(len(sizes))))


@given(cases(), st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_where_a_gradient_lies_changes_no_bit(
    case: tuple[list[int], list[list[int]], list[int]], clipped: bool
) -> None:
    sizes, ways, order = case
    spec = spec_of(sizes, len(ways))
    pushed = [[PUSHED if way else ABSENT for way in row] for row in ways]
    norms, view = train(spec, ways, order, clipped)
    plain_norms, plain_view = train(spec, pushed, order, clipped)
    np.testing.assert_array_equal(norms, plain_norms)
    np.testing.assert_array_equal(view, plain_view)


def test_a_reduced_gradient_of_the_pool_is_applied() -> None:
    """The steps of synchronize() and then step()."""
    views = []
    for way in (PUSHED, POOLED):
        store = LocalStore(spec_of([40, 40], 1), FusedKernel(SGD))
        places = store.places(0)
        for tensor in range(2):
            data = np.arange(40, dtype=np.float32).view(np.uint8)
            block = places[1 - tensor]
            assert isinstance(block, Place)
            assert block.block is not None
            if way == PUSHED:
                store.push(0, tensor, data)
            else:
                block.block[:] = data
        for version, operation, flags in (2, REDUCE, WANT_NORM), (3, APPLY, REDUCED):
            present = bytes([way] * 2)
            commit = Commit(
                version, operation, flags, 1.0, float("inf"), 1.0, (HYPER,), present, (2, 0)
            )
            store.commit(0, commit)
            store.wait()
        assert values_of(store).any()
        views.append(values_of(store).tobytes())
    assert views[0] == views[1]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (4, "block 2"),
        (6, "block 3"),
        ((1 << 32) - 1, "block 2147"),
        (0, None),
        (1, None),
        (3, None),
    ],
)
def test_blocks_that_cannot_be_are_refused(block: int, says: str | None) -> None:
    spec = spec_of([40, 40, 80], 1)
    layout = Layout(spec)
    (share,) = layout.deal(1)
    size = share.size_bytes
    arrays = [np.zeros(size, np.uint8) for _ in range(5)]
    memory = ShardMemory(
        arrays[0], [Contribution(*arrays[1:4])], {"momentum_buffer": arrays[4]},
        np.zeros(3, np.int64),
    )  # fmt: skip
    shard = Shard(share, FusedKernel(SGD), memory)
    present = bytes([POOLED, PRODUCED, ABSENT])
    commit = Commit(2, APPLY, 0, 1.0, 1.0, 1.0, (HYPER,), present, (block, 0, 0))
    if says is None:
        shard.check(commit, True)
    else:
        with pytest.raises(ValueError, match=says):
            shard.check(commit, True)
    with pytest.raises(ValueError, match="to which this worker has no access"):
        shard.check(commit, False)


def test_blocks_of_another_server_are_refused() -> None:
    spec = spec_of([200_000] * 4, 1)
    shares = Layout(spec).deal(2)
    share = shares[0]
    arrays = [np.zeros(share.size_bytes, np.uint8) for _ in range(5)]
    memory = ShardMemory(
        arrays[0], [Contribution(*arrays[1:4])], {"momentum_buffer": arrays[4]},
        np.zeros(4, np.int64),
    )  # fmt: skip
    shard = Shard(share, FusedKernel(SGD), memory)
    commit = Commit(2, APPLY, 0, 1.0, 1.0, 1.0, (HYPER,), bytes([POOLED] * 4), (6, 4, 2, 0))
    with pytest.raises(ValueError, match="which is not here or has another size"):
        shard.check(commit, True)


# ---- scripts


class Branches(nn.Module):
    """Layers of the same size; which ones run, and in which order, differs from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160, bias=False) for _ in range(6))
        self.chosen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.chosen:
            x = torch.tanh(self.layers[index](x))
        return x


def net() -> nn.Sequential:
    torch.manual_seed(3)
    first, second = nn.Linear(300, 900, bias=False), nn.Linear(900, 300, bias=False)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())


def wrap(model: nn.Module, placement: str, **options: Any) -> Any:
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return tw.DistributedOptimizer(opt, model, placement=placement, **options)


def batch(job: tw.Job, step: int, width: int = 300) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(9 * step + job.rank))


Found = tuple[str, list[list[bool]], int]


def in_place(opt: Any) -> list[bool]:
    return [row.in_place for row in tw.explain_optimizer(opt).gradients]


def from_the_first(job: tw.Job, placement: str) -> Found:
    model = net()
    opt = wrap(model, placement)
    places = []
    for step in range(STEPS):
        model(batch(job, step)).square().mean().backward()
        opt.step()
        places.append(in_place(opt))
        opt.zero_grad()
    return digest(model), places, job.report()["bytes_copied_per_step"]


def branching(job: tw.Job, placement: str) -> Found:
    torch.manual_seed(3)
    model = Branches()
    opt = wrap(model, placement)
    chooser = torch.Generator().manual_seed(5)
    places = []
    for step in range(6 * STEPS):
        count = int(torch.randint(1, 7, (), generator=chooser))
        model.chosen = torch.randperm(6, generator=chooser)[:count].tolist()
        model(batch(job, step, 160)).square().mean().backward()
        opt.step()
        found = in_place(opt)
        places.append([found[i] for i in model.chosen])
        opt.zero_grad()
    return digest(model), places, job.report()["bytes_copied_per_step"]


def kept(job: tw.Job, placement: str) -> Found:
    """Every gradient is kept for two steps."""
    model = net()
    opt = wrap(model, placement)
    places, gradients = [], []
    for step in range(2 * STEPS):
        model(batch(job, step)).square().mean().backward()
        new = [p.grad for p in model.parameters()]
        gradients.append((new, [g.clone() for g in new]))
        opt.step()
        opt.zero_grad()
        places.append(in_place(opt))
        if len(gradients) > 2:
            for gradient, clone in zip(*gradients.pop(0), strict=True):
                assert torch.equal(gradient, clone), "memory of a gradient was used again"
    return digest(model), places, job.report()["bytes_copied_per_step"]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_copied_from_the_first_step_on(team: Team, workers: int) -> None:
    planned = team.run(from_the_first, "plan", workers=workers)
    copied = team.run(from_the_first, "copy", workers=workers)
    assert [bits for bits, _, _ in planned] == [bits for bits, _, _ in copied]
    for _, places, bytes_copied in planned:
        assert all(all(each) for each in places), places
        assert bytes_copied == 0
    for _, places, bytes_copied in copied:
        assert not any(any(each) for each in places)
        assert bytes_copied > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_predicted_is_not_copied(team: Team, workers: int) -> None:
    planned = team.run(branching, "plan", workers=workers)
    copied = team.run(branching, "copy", workers=workers)
    assert [bits for bits, _, _ in planned] == [bits for bits, _, _ in copied]
    for (_, places, bytes_planned), (_, _, bytes_copied) in zip(planned, copied, strict=True):
        assert all(all(each) for each in places), places
        assert bytes_planned == 0 < bytes_copied


def test_kept_gradients_are_left_alone(team: Team) -> None:
    """There is room for two gradients of each size: in the slot and in the block."""
    planned, copied = team.run(kept, "plan"), team.run(kept, "copy")
    assert [bits for bits, _, _ in planned] == [bits for bits, _, _ in copied]
    for _, places, bytes_copied in planned:
        assert any(all(each) for each in places), places
        assert 0 < bytes_copied < sum(p.nbytes for p in net().parameters())


def pages_of_the_pool(job: tw.Job, kept: int) -> tuple[list[bool], list[str]]:
    """After each step whether the inner bytes of the largest block have a page.

    The gradients of the first step are kept for so many steps.
    """
    model = net()
    opt = wrap(model, "plan")
    place = opt._tensorwire.store.places(job.my_slices[0])[0]
    block = place.block
    address = block.__array_interface__["data"][0]
    page = -(-address // 4096) * 4096 + 4096
    here = (ctypes.c_ubyte * 1)()
    found: list[bool] = []
    gradients = []
    for step in range(2 * STEPS):
        opt.zero_grad()
        model(batch(job, step)).square().mean().backward()
        if step == 0:
            gradients = [p.grad for p in model.parameters()]
        if step == kept:
            gradients.clear()
        opt.step()
        opt.zero_grad()
        job.barrier()
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(page), 4096, here)
        if opt._tensorwire.store.path == "local":
            # malloc's memory has pages because of its neighbours; given back it is zero.
            here[0] = int(block[page - address : page - address + 4096].any())
        found.append(bool(here[0] & 1))
        job.barrier()
    return found, [row.reason for row in tw.explain_optimizer(opt).gradients]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_pool_takes_no_memory_when_predictions_hit(team: Team, workers: int) -> None:
    for found, reasons in team.run(pages_of_the_pool, 0, workers=workers):
        assert not any(found), found
        assert not any(reasons)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_pool_gives_its_memory_back(team: Team, workers: int) -> None:
    for found, reasons in team.run(pages_of_the_pool, 4, workers=workers):
        assert found[1:4] == [True] * 3, "gradients were not in the pool while slots were in use"
        assert not any(found[7:]), found
        assert not any(reasons)


def layers(width: int = 160) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))


def backward(job: tw.Job, step: int, chain: Any) -> None:
    x = batch(job, step, chain[0].weight.shape[0])
    for layer in chain:
        x = torch.tanh(layer(x))
    x.square().mean().backward()


def used_once(job: tw.Job) -> tuple[list[int], int]:
    """A layer without gradients after the first step, of the size of what comes and goes."""
    model = layers(300)
    opt = wrap(model, "plan")
    allocator = opt._tensorwire.reducer._slots._allocator
    counts = []
    for step in range(2 * STEPS):
        before = allocator.placed()
        x = model[1](torch.ones(300, 300, requires_grad=True) * 2.0)
        chain = [model[2], model[0]] if step == 0 else [model[2]]
        for layer in chain:
            x = torch.tanh(layer(x))
        make_step(opt, x.square().mean())
        counts.append(allocator.placed() - before)
    return counts, 2


def test_who_gets_no_gradient_does_not_keep_the_pool_open(team: Team) -> None:
    counts, gradients = team.alone(used_once)
    assert counts[0] > 3, counts
    assert counts[STEPS:] == [gradients] * STEPS, counts


# ---- gradients that do not count


def removed(job: tw.Job, opt: Any, model: nn.ModuleList) -> None:
    backward(job, 0, model)
    model[0].weight.grad = None


def removed_by_the_model(job: tw.Job, opt: Any, model: nn.ModuleList) -> None:
    backward(job, 0, model)
    model.zero_grad()
    backward(job, 1, model[1:])


def withdrawn_after_accumulating(job: tw.Job, opt: Any, model: nn.ModuleList) -> None:
    backward(job, 0, model)
    with opt.accumulate():
        backward(job, 0, model)
    opt.zero_grad()
    backward(job, 1, model[1:])


def removed_before_synchronizing(job: tw.Job, opt: Any, model: nn.ModuleList) -> None:
    backward(job, 0, model)
    model[0].weight.grad = None
    opt.synchronize()
    assert model[0].weight.grad is None


def without_the_first(job: tw.Job, placement: str, act: Any) -> tuple[str, bool]:
    model = layers()
    opt = wrap(model, placement)
    before = model[0].weight.detach().clone()
    act(job, opt, model)
    opt.step()
    return digest(model), torch.equal(before, model[0].weight)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "act",
    [removed, removed_by_the_model, withdrawn_after_accumulating, removed_before_synchronizing],
    ids=lambda act: act.__name__,
)
def test_what_was_taken_back_does_not_count(team: Team, act: Any, workers: int) -> None:
    planned = team.run(without_the_first, "plan", act, workers=workers)
    copied = team.run(without_the_first, "copy", act, workers=workers)
    assert planned == copied
    assert all(same for _, same in planned)


def of_another_dtype(job: tw.Job, placement: str) -> str:
    """The gradient lies in a block and has as many bytes as it should."""
    model = layers(200).to(torch.bfloat16)
    opt = wrap(model, placement)
    place = opt._tensorwire.store.places(job.my_slices[0])[2]
    for step in range(3):
        with opt.accumulate():
            model[1](batch(job, step, 200).to(torch.bfloat16)).square().mean().backward()
        weight = model[0].weight
        weight.grad_dtype = None
        weight.grad = torch.frombuffer(place.block, dtype=torch.float16).reshape(weight.shape)
        weight.grad.fill_(0.5 + step)
        opt.step()
        opt.zero_grad()
    return digest(model)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_gradient_of_another_dtype_is_converted(team: Team, workers: int) -> None:
    planned = team.run(of_another_dtype, "plan", workers=workers)
    assert planned == team.run(of_another_dtype, "copy", workers=workers)


# ---- beside and after training


def beside(job: tw.Job) -> list[float]:
    """Tensors of a gradient's size that the script makes, and a child of a fork reads."""
    model = layers()
    opt = wrap(model, "plan")
    copies = []
    for step in range(3):
        copies += [p.detach().clone() for p in model.parameters()]
        backward(job, step, model)
        opt.step()
        opt.zero_grad()
    blocks = opt._tensorwire.reducer._slots._blocks
    assert not any(each.data_ptr() in blocks for each in copies)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(torch.isfinite(each).all() for each in copies) else 1)
    assert os.waitpid(child, 0)[1] == 0
    data = DataLoader(
        TensorDataset(torch.randn(160, 160)), 10, num_workers=1, multiprocessing_context="fork"
    )
    return [float(x.square().mean()) for (x,) in data]


def test_other_tensors_are_not_in_the_pool(team: Team) -> None:
    for means in team.run(beside):
        assert len(means) == 16


def after_the_end(job: tw.Job) -> bool:
    model = layers()
    opt = wrap(model, "plan")
    job.close()
    for step in range(4):
        opt.zero_grad()
        backward(job, step, model)
    return bool(torch.isfinite(model[0].weight.grad).all())


def after_a_failure(job: tw.Job) -> bool:
    model = layers()
    opt = wrap(model, "plan")
    with pytest.raises(ValueError, match="is not the model's"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for _ in range(4):
        opt.zero_grad()
    return True


@pytest.mark.parametrize("case", [after_the_end, after_a_failure], ids=lambda case: case.__name__)
def test_a_closed_pool_hands_out_nothing(team: Team, case: Any) -> None:
    assert team.alone(case)


def test_a_host_with_servers_here_and_elsewhere(team: Team) -> None:
    """A worker produces at the server of its host and sends to the other's."""
    with two_hosts() as pair:
        both: tuple[Host, Host] = pair
        options = {"hosts": both, "servers": 2, "transports": ["shm", "tcp"]}
        mixed = team.run(from_the_first, "plan", **options)
        copied = team.run(from_the_first, "copy")
        assert [bits for bits, _, _ in mixed] == [bits for bits, _, _ in copied]
        for _, places, _ in mixed:
            assert any(places[-1]), places
