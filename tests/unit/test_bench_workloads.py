"""The workloads have the tensors that they are known for, and a step gives each of them a gradient.

The paper's networks are checked against its numbers; the shapes here are written down again.
"""

import json
from collections import Counter
from pathlib import Path

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
def test_the_paper_s_networks_have_its_tensors_and_bytes(name: str) -> None:
    found = summary(workload(name).tensors())
    tensors, mib, classes = PAPER[name]
    assert found.tensors == tensors
    assert round(found.bytes / MIB, 2) == mib
    assert (found.small, found.medium, found.large) == classes


@pytest.mark.parametrize("name", SHAPES)
def test_the_paper_s_networks_have_its_shapes(name: str) -> None:
    found = [tensor.shape for tensor in workload(name).tensors()]
    assert Counter(found) == Counter(SHAPES[name])


def test_inception_has_94_convolutions_and_an_auxiliary_head() -> None:
    tensors = workload("inception-v3").tensors()
    kernels = [tensor.shape for tensor in tensors if len(tensor.shape) == 4]
    assert len(kernels) == 94 + 2 + 2  # two in the auxiliary head, and the end of both heads
    offsets = [tensor.shape for tensor in tensors if len(tensor.shape) == 1]
    assert Counter(offsets) == Counter((shape[0],) for shape in kernels)  # no scales
    assert sum(tensor.size_bytes for tensor in tensors) == 4 * 24_353_332
    assert max(tensor.size_bytes for tensor in tensors) == 4 * 768 * 128 * 5 * 5
    assert Counter(kernels)[160, 160, 7, 1] == Counter(kernels)[160, 160, 1, 7] == 4


@pytest.mark.parametrize("name", KNOWN)
def test_the_others_have_the_tensors_and_bytes_they_are_known_for(name: str) -> None:
    tensors, elements = KNOWN[name]
    found = summary(workload(name).tensors())
    assert (found.tensors, found.bytes) == (tensors, 4 * elements)


def test_what_is_sparse_is_said() -> None:
    looked_up = {
        model.name: sum(tensor.looked_up for tensor in model.tensors())
        for model in WORKLOADS
        if any(tensor.looked_up for tensor in model.tensors())
    }
    assert looked_up == {"dlrm": 26, "dlrm-dense": 26, "moe": 1, "bilstm": 1}
    for model in WORKLOADS:
        sparse = [tensor for tensor in model.tensors() if tensor.sparse]
        assert len(sparse) == (26 if model.name == "dlrm" else 0)
        assert all(tensor.looked_up for tensor in sparse)
        assert model.optimizer == ("plain-sgd" if sparse else None)


@pytest.mark.parametrize("model", WORKLOADS, ids=lambda model: model.name)
def test_a_tiny_one_has_the_same_structure(model: Workload) -> None:
    assert model.reduced().name == model.name
    assert model.reduced().size_bytes < model.size_bytes / 50
    if model.name == "gpt2-small":  # two layers of twelve
        assert len(model.reduced().tensors()) == 28
        return
    full, tiny = ([t.name for t in m.tensors()] for m in (model, model.reduced()))
    assert tiny == full


@pytest.mark.parametrize("model", WORKLOADS, ids=lambda model: model.name)
def test_a_step_gives_every_parameter_a_gradient(model: Workload) -> None:
    tiny = model.reduced()
    network, loss = tiny.build(torch), tiny.loss(torch)
    assert sum(p.numel() for p in network.parameters()) == tiny.size_bytes // 4
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for inputs, labels in tiny.batches(torch, 0)[:2]:
        optimizer.zero_grad()
        value = loss(network(inputs), labels)
        assert value.isfinite()
        value.backward()
        for tensor, parameter in zip(tiny.tensors(), network.parameters(), strict=True):
            assert parameter.grad is not None, tensor.name
            assert parameter.grad.is_sparse == tensor.sparse, tensor.name
        optimizer.step()


def leaves(batch: object) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    assert isinstance(batch, tuple)
    return [leaf for part in batch for leaf in leaves(part)]


@pytest.mark.parametrize("model", WORKLOADS, ids=lambda model: model.name)
def test_values_and_batches_are_the_same_in_every_process(model: Workload) -> None:
    tiny = model.reduced()
    first, second = tiny.build(torch), tiny.build(torch)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    once, again, other = (leaves(tiny.batches(torch, rank)[0]) for rank in (0, 0, 1))
    assert all(map(torch.equal, once, again))
    assert not all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(once, other, strict=True)
    )


# --- what is special ----------------------------------------------------------------------------


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


def test_a_gru_s_reset_gate_acts_before_u() -> None:
    model = workload("gru").reduced()
    network, inputs = model.build(torch), model.batches(torch, 0)[0][0]
    r, z, n = network.gates.values()
    with torch.no_grad():
        h = torch.zeros(inputs.shape[0], inputs.shape[2])
        for x in inputs.unbind(1):
            reset = torch.sigmoid(x @ r.W + h @ r.U + r.b)
            update = torch.sigmoid(x @ z.W + h @ z.U + z.b)
            new = torch.tanh(x @ n.W + (reset * h) @ n.U + n.b)
            h = (1 - update) * new + update * h
        torch.testing.assert_close(network(inputs), network.last(h))


def test_how_many_tokens_an_expert_gets_follows_from_the_data() -> None:
    model = workload("moe").reduced()
    network = model.build(torch)
    rows: list[list[int]] = []
    for expert in network.experts.experts:
        expert.register_forward_hook(lambda module, args, out: rows[-1].append(len(args[0])))
    for inputs, _ in model.batches(torch, 0):
        rows.append([])
        network(inputs)
    assert all(sum(counts) == 2 * inputs.numel() for counts in rows)
    assert len(set(map(tuple, rows))) > 1


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    model = workload("moe").reduced()
    network, loss = model.build(torch), model.loss(torch)
    inputs, labels = model.batches(torch, 0)[0]
    with torch.no_grad():
        network.experts.router.weight.zero_()  # then the first two are chosen
        _, choice = torch.zeros(1, 8).topk(2, -1)
    loss(network(inputs), labels).backward()
    experts = network.experts.experts
    unused = [e for i, e in enumerate(experts) if i not in choice.flatten()]
    assert len(unused) == 6
    for parameter in (p for expert in unused for p in expert.parameters()):
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_sentences_have_lengths_of_their_own_and_padding_counts_for_nothing() -> None:
    model = workload("bilstm").reduced()
    network, loss = model.build(torch), model.loss(torch)
    batches = model.batches(torch, 0)
    assert len({inputs[0].shape for inputs, _ in batches}) > 1
    (words, lengths), labels = batches[0]
    assert lengths.min() < lengths.max()
    other = torch.where(labels < 0, (words + 1) % 100, words)
    with torch.no_grad():
        assert loss(network((other, lengths)), labels) == loss(network((words, lengths)), labels)


@pytest.mark.parametrize("name", ["dlrm", "dlrm-dense"])
def test_rows_that_no_batch_looks_up_have_no_gradient(name: str) -> None:
    model = workload(name).reduced()
    network, loss = model.build(torch), model.loss(torch)
    (numbers, rows), labels = model.batches(torch, 0)[0]
    loss(network((numbers[:4], rows[:4])), labels[:4]).backward()
    for table, found in zip(network.tables, rows[:4].unbind(1), strict=True):
        touched = table.weight.grad.to_dense().abs().sum(1).nonzero().flatten().tolist()
        assert set(touched) <= set(found.tolist())


def test_sparse_and_dense_gradients_are_of_the_same_model() -> None:
    sparse, dense = (workload(name).reduced() for name in ("dlrm", "dlrm-dense"))
    networks = sparse.build(torch), dense.build(torch)
    for model, network in zip((sparse, dense), networks, strict=True):
        inputs, labels = model.batches(torch, 1)[2]
        model.loss(torch)(network(inputs), labels).backward()
    for a, b in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.grad.to_dense(), b.grad)


@pytest.mark.parametrize("workers", [1, 2, 3])
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


def test_a_dense_step_moves_all() -> None:
    model = workload("dlrm-dense").reduced()
    size_bytes = model.size_bytes
    assert model.traffic(2) == (size_bytes, size_bytes, (0, size_bytes // 4), False)


# --- the command --------------------------------------------------------------------------------


def test_the_command_shows_sizes_and_writes_tensors(tmp_path: Path) -> None:
    path = tmp_path / "tensors.json"
    result = CliRunner().invoke(main, ["bench", "workloads", "--json", str(path)])
    assert result.exit_code == 0, result.output
    data = {entry["name"]: entry for entry in json.loads(path.read_text())}
    assert set(data) == {model.name for model in WORKLOADS}
    for name, (tensors, mib, _) in PAPER.items():
        line = next(line for line in result.output.splitlines() if line.split()[:1] == [name])
        assert line.split()[1:3] == [str(tensors), f"{mib:.2f}"]
        assert len(data[name]["rows"]) == tensors
        assert sum(row["size_bytes"] for row in data[name]["rows"]) == data[name]["bytes"]


def test_an_unknown_workload_is_told_what_there_is() -> None:
    with pytest.raises(LookupError, match="known: alexnet, inception-v3"):
        workload("lenet")
    result = CliRunner().invoke(main, ["bench", "workloads", "--workload", "lenet"])
    assert result.exit_code == 2
    assert "choose from alexnet" in " ".join(result.output.split())
