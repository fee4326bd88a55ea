"""The workloads have the tensors that they are known for, and a step gives each of them a gradient.

The paper's networks are checked against its numbers; the shapes here are written down again.
"""

from collections import Counter

import pytest
from click.testing import CliRunner

from tensorwire.cli import main
from tensorwire_benchmarks.workloads.catalog import WORKLOADS, Workload, summary, workload

torch = pytest.importorskip("torch")

MIB = 1 << 20

# "RPC Considered Harmful": tensors, MiB, small/medium/large.
PAPER = {
    "alexnet": (16, 176.42, (3, 7, 6)),
    "inception-v3": (196, 92.90, (79, 96, 21)),
    "vgg16": (32, 512.32, (5, 16, 11)),
    "lstm": (14, 35.93, (0, 5, 9)),
    "gru": (11, 27.92, (0, 4, 7)),
    "fcn5": (10, 204.47, (1, 5, 4)),
}
# Tensors and parameters: of models that others publish, and of ours by the sizes written here.
KNOWN = {
    "resnet50": (161, 25_557_032),
    "gpt2-small": (148, 124_439_808),
    # Tables of Criteo's rows, at most 40,000, by 64; 13-512-256-64; 64 + 27 · 26 / 2-512-256-1.
    "dlrm": (38, 23_512_192 + 154_944 + 345_857),
    "dlrm-dense": (38, 23_512_192 + 154_944 + 345_857),
    # 4096 words by 512, in and out; attention; two norms; a router; 8 times 512-2048-512.
    "moe": (44, 2 * 4096 * 512 + 4096 + 4 * 512 * 513 + 4 * 512 + 8 * 512 + 8 * 2_099_712),
    # 20,000 words by 300; 4 gates of 512, 2 offsets each, both ways, on 300, then 1024; 45 tags.
    "bilstm": (19, 6_000_000 + 2 * 2048 * (300 + 1024 + 2 * 512 + 4) + 45 * 1025),
}

Shapes = list[tuple[int, ...]]


def layers(*weights: tuple[int, ...]) -> Shapes:
    """Each weight with its offset, one element per output."""
    return [shape for weight in weights for shape in (weight, weight[:1])]


def gates(count: int) -> Shapes:
    return [*[(1024, 1024), (1024, 1024), (1024,)] * count, (1000, 1024), (1000,)]


SHAPES = {
    "alexnet": layers(
        (64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (384, 384, 3, 3), (256, 384, 3, 3),
        (4096, 256, 5, 5), (4096, 4096, 1, 1), (10, 4096, 1, 1),
    ),
    "vgg16": layers(
        (64, 3, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3), (256, 128, 3, 3),
        (256, 256, 3, 3), (256, 256, 3, 3), (512, 256, 3, 3), *[(512, 512, 3, 3)] * 5,
        (4096, 7 * 7 * 512), (4096, 4096), (10, 4096),
    ),
    "fcn5": layers((4096, 784), *[(4096, 4096)] * 3, (10, 4096)),
    "lstm": gates(4),
    "gru": gates(3),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_networks_have_its_tensors_bytes_and_shapes(name: str) -> None:
    tensors = workload(name).tensors()
    found, (count, mib, classes) = summary(tensors), PAPER[name]
    assert (found.tensors, round(found.bytes / MIB, 2)) == (count, mib)
    assert (found.small, found.medium, found.large) == classes
    if name in SHAPES:
        assert Counter(tensor.shape for tensor in tensors) == Counter(SHAPES[name])


@pytest.mark.parametrize("name", KNOWN)
def test_the_others_have_the_tensors_and_bytes_they_are_known_for(name: str) -> None:
    tensors, elements = KNOWN[name]
    found = summary(workload(name).tensors())
    assert (found.tensors, found.bytes) == (tensors, 4 * elements)


@pytest.mark.parametrize("model", WORKLOADS, ids=lambda model: model.name)
def test_a_step_gives_every_parameter_a_gradient(model: Workload) -> None:
    """And every process has the same values, but batches of its own."""
    tiny = model.reduced()
    assert tiny.size_bytes < model.size_bytes / 50
    network, again, loss = tiny.build(torch), tiny.build(torch), tiny.loss(torch)
    assert all(map(torch.equal, network.parameters(), again.parameters()))
    assert sum(p.numel() for p in network.parameters()) == tiny.size_bytes // 4
    inputs, labels = tiny.batches(torch, 0)[0]
    assert repr(tiny.batches(torch, 0)[0]) != repr(tiny.batches(torch, 1)[0])
    value = loss(network(inputs), labels)
    assert value.isfinite()
    value.backward()
    for tensor, parameter in zip(tiny.tensors(), network.parameters(), strict=True):
        assert parameter.grad is not None, tensor.name
        assert parameter.grad.is_sparse == tensor.sparse, tensor.name


def test_an_lstm_computes_what_torch_s_own_does() -> None:
    model = workload("lstm").reduced()
    network, inputs = model.build(torch), model.batches(torch, 0)[0][0]
    cells = inputs.shape[2]
    own = torch.nn.LSTM(cells, cells, batch_first=True)
    with torch.no_grad():
        for name, part in (("W", own.weight_ih_l0), ("U", own.weight_hh_l0)):
            part.copy_(torch.cat([getattr(g, name).T for g in network.gates.values()]))
        own.bias_ih_l0.copy_(torch.cat([gate.b for gate in network.gates.values()]))
        own.bias_hh_l0.zero_()
        expected = network.last(own(inputs)[0][:, -1])
        torch.testing.assert_close(network(inputs), expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_moves_the_rows_that_its_gradients_have(workers: int) -> None:
    """Against the gradients themselves, as a worker would send them."""
    model = workload("dlrm").reduced()
    network, loss = model.build(torch), model.loss(torch)
    batches = [model.batches(torch, rank) for rank in range(workers)]
    up = down = 0
    applied = [0] * workers
    for step in range(4):
        rows: dict[str, list[int]] = {}
        for mine in batches:
            network.zero_grad()
            loss(network(mine[step][0]), mine[step][1]).backward()
            for name, parameter in network.named_parameters():
                if parameter.grad.is_sparse:
                    found = parameter.grad.coalesce()
                    up += found.indices().nbytes + found.values().nbytes
                    rows.setdefault(name, []).extend(found.indices()[0].tolist())
        for each in rows.values():
            for times in Counter(each).values():
                applied[times - 1] += 4
                down += 8 + 4 * 4
    dense = sum(tensor.size_bytes for tensor in model.tensors() if not tensor.sparse)
    applied[-1] += dense  # in four steps
    found = model.traffic(workers)
    assert found.up_bytes == pytest.approx(dense + up / 4 / workers, abs=1)
    assert found.down_bytes == pytest.approx(dense + down / 4, abs=1)
    assert found.applied == pytest.approx([elements / 4 for elements in applied], abs=1)
    assert found.looked_up


def test_the_command_shows_sizes() -> None:
    result = CliRunner().invoke(main, ["bench", "placement", "--list"])
    assert result.exit_code == 0, result.output
    for name, (tensors, mib, classes) in PAPER.items():
        (line,) = [each for each in result.output.splitlines() if each.split()[:1] == [name]]
        words = line.partition(":")[0].split()
        sizes = " + ".join(map(str, classes)).split()
        assert words == [name, str(tensors), "tensors,", f"{mib:.2f}", "MiB,", *sizes]
