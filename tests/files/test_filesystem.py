"""`tw://` for fsspec: its own suite as far as nothing is written, and a job that trains."""

import contextlib
import errno
import io
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from files.outcomes import code_of
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from jobs import training
from programs import output_of

from tensorwire import ClosedError, Node
from tensorwire.files import JobReader
from tensorwire.files.filesystem import TensorwireFileSystem
from tensorwire.files.names import file_name, tensor_name
from tensorwire.files.tree_items import FileContent, TreeEntry


class FakeTree:
    """Files in memory, where fsspec's suite wants others than a job has."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders = {""}

    def entry(self, path: str) -> TreeEntry:
        if path in self.folders:
            return TreeEntry(path, is_folder=True)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "", path)
        return TreeEntry(path, size_bytes=len(self.files[path]), version=3)

    def entries(self, path: str) -> list[TreeEntry]:
        found = (self.folders | self.files.keys()) - {""}
        return [self.entry(each) for each in sorted(found) if each.rpartition("/")[0] == path]

    def open(self, path: str) -> FileContent:
        self.entry(path)
        return FileContent.of_bytes(self.files[path])


class Filled(TensorwireFileSystem):
    """The file system over a FakeTree; the suite's fixtures may fill and empty that."""

    protocol = "tw-filled"
    cachable = False

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.fake = FakeTree()

    @property
    def tree(self) -> Any:
        return self.fake

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        parts = path.split("/")
        self.fake.folders |= {"/".join(parts[: n + 1]) for n in range(len(parts))}

    makedirs = mkdir

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.mkdir(path.rpartition("/")[0])
        self.fake.files[path] = value

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        self.pipe_file(path, b"")

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in path if isinstance(path, list) else [path]:
            names = {n for n in {*self.fake.files, *self.fake.folders} if f"{n}/".startswith(each)}
            self.fake.folders -= names
            for name in names & self.fake.files.keys():
                del self.fake.files[name]


class ReadOnlyFixtures(AbstractFixtures):
    @pytest.fixture
    def fs(self) -> Filled:
        return Filled()

    @pytest.fixture
    def fs_path(self) -> str:
        return "all"

    @pytest.fixture
    def fs_sanitize_path(self) -> Any:
        return lambda path: path


# Left out, because they write: AbstractCopyTests, AbstractPutTests, AbstractPipeTests, mv, and
# AbstractOpenTests, which is about exclusive creation.
class TestGet(AbstractGetTests, ReadOnlyFixtures):
    pass


@pytest.mark.parametrize(
    "name", ["layer.weight", "a/b", ".", "..", "", "%", "%2F", "a*?[b]", "é::ü", "x\ny\0", "a b"]
)
def test_names_of_tensors_are_names_of_files(name: str) -> None:
    found = file_name(name)
    assert tensor_name(found) == name
    assert found
    assert not set(found) & set("/*?[]:\n\0")
    assert found not in (".", "..")


def test_urls() -> None:
    url = "tw://10.0.0.1:7/params/a.npy"
    assert TensorwireFileSystem._strip_protocol(url) == "params/a.npy"
    assert TensorwireFileSystem._get_kwargs_from_urls(url) == {"address": "10.0.0.1:7"}
    fs = TensorwireFileSystem("10.0.0.1:7", secret="s" * 32)
    assert fs.unstrip_protocol("params/a.npy") == url
    assert "s" * 32 not in repr(fs) + json.dumps(fs.to_dict(include_password=False))
    with pytest.raises(ValueError, match="no user and no secret") as caught:
        fsspec.open("tw://hidden-secret@10.0.0.1:7/params/a.npy")
    assert "hidden" not in str(caught.value)
    for wrong in ("", "10.0.0.1", "10.0.0.1:x"):
        with pytest.raises(ValueError, match="address"):
            TensorwireFileSystem(wrong)
    assert code_of(lambda: TensorwireFileSystem("127.0.0.1:1").ls("")) == errno.ENOTCONN


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_job_as_files(folder: Path) -> None:
    with training(folder, "--workers", "1", momentum=0.9, PAUSE="0.01") as job:
        check_tree(job.address)
        check_refusals(job.address)
        check_versions(job.address)
        check_safetensors(job.address)
        check_fork(job.address)
        fs = TensorwireFileSystem(job.address)
        held = fs.snapshot()
        file = fs.open("params/a.npy")
        file.read(1)
    # The job is over: what is asked says so, and nothing hangs.
    file.close()
    for attempt in (lambda: fs.ls("params"), lambda: fs.cat_file(f"{held}/params/b.npy")):
        assert code_of(attempt) == errno.ENOTCONN
    fs.close()


def check_tree(address: str) -> None:
    url = f"tw://{address}/"
    fs, root = fsspec.url_to_fs(url)
    assert isinstance(fs, TensorwireFileSystem)
    assert fs.ls(root, detail=False) == [
        "checkpoints", "control", "model.safetensors", "optimizer", "params", "snapshots", "status",
    ]  # fmt: skip
    assert fs.ls("params", detail=False) == ["params/a.npy", "params/b.npy", "params/h.npy"]
    assert fs.ls("optimizer/a", detail=False) == ["optimizer/a/momentum_buffer.npy"]
    assert fs.glob("params/*.npy") == fs.ls("params", detail=False)
    assert fs.find("optimizer") == [f"optimizer/{n}/momentum_buffer.npy" for n in "abh"]
    info = fs.info("params/a.npy")
    assert (info["dtype"], info["shape"], info["size"]) == ("float32", (300, 1000), 1200128)
    assert info["type"] == "file"
    assert info["version"] >= 2
    first, when = fs.ukey("params/a.npy"), fs.modified("params/a.npy")
    while fs.info("params/a.npy")["version"] == info["version"]:
        time.sleep(0.01)
    assert fs.ukey("params/a.npy") != first
    assert fs.modified("params/a.npy") >= when
    assert int(fs.cat_file("status/version")) > info["version"]
    assert fs.cat_file("status/optimizer").startswith(b"torch.optim.SGD:")
    assert fs.cat_file("status/workers").startswith(b"0 connected ")
    assert json.loads(fs.cat_file("status/job.json"))["address"] == address
    with fs.open("params/h.npy") as file:
        assert np.load(file).dtype == np.dtype("V2")
    with fsspec.open(f"{url}optimizer/b/momentum_buffer.npy") as file:
        assert np.load(file).shape == (7,)
    again = pickle.loads(pickle.dumps(fs))
    assert again.isfile("status/version")
    assert fs.isdir("params")
    with fs.open("params/b.npy") as file:
        assert file.size == fs.size("params/b.npy") == len(file.read())
    assert fs.read_block("params/b.npy", 0, 6) == b"\x93NUMPY"


def check_refusals(address: str) -> None:
    fs = TensorwireFileSystem(address)
    refused: list[tuple[Any, int]] = [
        (lambda: fs.info("params/none.npy"), errno.ENOENT),
        (lambda: fs.info("params/a"), errno.ENOENT),
        (lambda: fs.info("nothing"), errno.ENOENT),
        (lambda: fs.info("params/a.npy/b"), errno.ENOTDIR),
        (lambda: fs.info("optimizer/a/none.npy"), errno.ENOENT),
        (lambda: fs.info("snapshots/2"), errno.ENOENT),
        (lambda: fs.info("snapshots/" + "9" * 5000), errno.ENOENT),
        (lambda: fs.info("snapshots/-1"), errno.ENOENT),
        (lambda: fs.info("params/%2.npy"), errno.ENOENT),
        (lambda: fs.info("params/" + "x" * 100_000), errno.ENOENT),
        (lambda: fs.info("stores/7"), errno.ENOENT),
        (lambda: fs.info("params/../status"), errno.EINVAL),
        (lambda: fs.info("a\0b"), errno.EINVAL),
        (lambda: fs.cat_file("params"), errno.EISDIR),
        (lambda: fs.open("params/a.npy", "wb"), errno.EROFS),
        (lambda: fs.open("params/a.npy", "r+b"), errno.EROFS),
        (lambda: fs.pipe_file("params/a.npy", b""), errno.EROFS),
        (lambda: fs.rm("params/a.npy"), errno.EROFS),
        (lambda: fs.mkdir("x"), errno.EROFS),
        (lambda: fs.mv("params/a.npy", "params/b.npy"), errno.EROFS),
        (lambda: fs.cp_file("params/a.npy", "params/b.npy"), errno.EROFS),
        (lambda: fs.touch("x"), errno.EROFS),
        (lambda: fs.put_file(__file__, "x"), errno.EROFS),
        (lambda: fs.release("snapshots/2"), errno.ENOENT),
        (lambda: TensorwireFileSystem(address, secret="w" * 32).ls(""), errno.EACCES),
    ]
    for number, (attempt, code) in enumerate(refused):
        assert code_of(attempt) == code, number
    with pytest.raises(FileNotFoundError, match=r"the file is a\.npy"):
        fs.info("params/a")
    assert not fs.exists("params/none.npy")


def check_fork(address: str) -> None:
    """A forked child makes a connection of its own, and the parent keeps its own."""
    fs, reader = TensorwireFileSystem(address), JobReader(address)
    assert fs.exists("params/a.npy")
    if (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(BaseException):
            found = fs.exists("params/a.npy"), fs.exists("params/none.npy")
            with pytest.raises(ClosedError, match="before a fork: make one in this process"):
                reader.stores()
            code = 0 if found == (True, False) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fs.exists("params/a.npy")
    reader.close()


def test_a_file_with_the_secret_that_is_not_there(tmp_path: Path) -> None:
    """The file is not taken for one of the job, for which `exists` would be False."""
    fs = TensorwireFileSystem("127.0.0.1:1", secret_file=str(tmp_path / "none"))
    for attempt in (lambda: fs.ls(""), lambda: fs.exists("params")):
        with pytest.raises(PermissionError, match=r"for reading, .*none, cannot be read"):
            attempt()


def test_a_reader_is_told_which_secret_is_meant() -> None:
    """Not the secret of a job's members, which a Node advises."""
    with Node("server-0", secret=b"s" * 32) as node:
        with pytest.raises(PermissionError, match="secret for readers than the one that was"):
            JobReader(node.address, secret="w" * 32)
        with pytest.raises(PermissionError, match="tensorwire ls --save-secret"):
            JobReader(node.address)


def check_versions(address: str) -> None:
    fs = TensorwireFileSystem(address, transports=("tcp",))
    for _ in range(30):
        data = fs.cat_file("params/a.npy")
        values = np.load(io.BytesIO(data))
        assert (values == values[0, 0]).all()
        size = len(data)
        part = np.frombuffer(fs.cat_file("params/a.npy", 128, 128 + 400_000), np.float32)
        assert (part == part[0]).all()
        assert fs.cat_file("params/a.npy", 3, 9) == data[3:9]
        ranges = fs.cat_ranges(["params/a.npy"] * 2, [128, size - 4], [132, size])
        assert ranges[0] == ranges[1]  # of one version
    assert fs.cat_file("params/a.npy", 10, 10) == b""
    assert fs.cat_file("params/a.npy", 2 * size) == b""
    (error,) = fs.cat_ranges(["none"], 0, 1)
    assert isinstance(error, FileNotFoundError)
    fs.close()


def check_safetensors(address: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    fs = TensorwireFileSystem(address)
    with fs.open("model.safetensors") as file:
        data = file.read()
        file.seek(-4, 2)
        assert file.read() == data[-4:]
    read = dict(safetensors.deserialize(data))
    assert sorted(read) == ["a", "b", "h"]
    values = np.frombuffer(read["a"]["data"], np.float32)
    assert (values == values[0]).all()
    held = fs.snapshot()
    step = held.rpartition("/")[2]
    while fs.ls("snapshots", detail=False) != [held]:  # the one of the file goes at its own time
        time.sleep(0.05)
    assert fs.ls(held, detail=False) == [
        f"{held}/model.safetensors", f"{held}/optimizer", f"{held}/params",
    ]  # fmt: skip
    model = dict(safetensors.deserialize(fs.cat_file(f"{held}/model.safetensors")))
    with fs.open(f"{held}/params/a.npy") as file:
        assert np.load(file).tobytes() == bytes(model["a"]["data"])
    state = np.load(fs.open(f"{held}/optimizer/a/momentum_buffer.npy"))
    assert (state == state[0, 0]).all()
    assert fs.info(f"{held}/params/a.npy")["version"] == int(step)
    other = TensorwireFileSystem(address, transports=["tcp"])
    assert other.cat_file(f"{held}/params/b.npy")[-28:] == bytes(model["b"]["data"])
    fs.release(held)
    with JobReader(address) as reader:
        while reader.status()["snapshots"]["0"]:
            time.sleep(0.05)
    with pytest.raises(FileNotFoundError):
        other.cat_file(f"{held}/params/b.npy")
    other.close()
    fs.close()


MODEL = """
import os
import fsspec, numpy as np, torch
from safetensors.torch import load
import tensorwire.torch as tw

torch.manual_seed(0)
torch.set_num_threads(1)
job = tw.init()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
last = torch.nn.Conv2d(2, 3, (2, 5)).to(memory_format=torch.channels_last)
both = torch.nn.ModuleDict({"model": model, "last": last})
opt = tw.DistributedOptimizer(torch.optim.SGD(both.parameters(), lr=0.1), both)
inputs = torch.randn(5, 3, 6, 6) + job.rank
(model(inputs).square().mean() + last(torch.randn(2, 2, 5, 5)).square().mean()).backward()
opt.step()
if job.rank == 0:
    address = os.environ["TENSORWIRE_SERVERS"].split(",")[0]
    fs = fsspec.filesystem("tw", address=address)
    found = load(fs.cat_file("model.safetensors"))
    name = next(each for each in found if "strides" in each)
    weight = last.weight.detach().numpy()
    for stored in (found.pop(name).numpy(), np.load(fs.open(f"params/{name}.npy"))):
        assert stored.shape == (3, 2, 5, 2)
        assert np.array_equal(stored.transpose(0, 3, 1, 2), weight)
    wanted = both.state_dict()
    del wanted["last.weight"]
    assert found.keys() == wanted.keys(), found.keys()
    assert all(torch.equal(found[each], value) for each, value in wanted.items())
    print("the same")
job.barrier()
"""


@pytest.mark.slow
def test_the_model_is_that_of_its_state_dict(folder: Path) -> None:
    """Named for two bugs: buffers had other names, and channels_last was told as contiguous."""
    (folder / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "tensorwire", "run", "--workers", "2", "--servers", "2"]
    assert "the same" in output_of([*command, "model.py"], folder)
