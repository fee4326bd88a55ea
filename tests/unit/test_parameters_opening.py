"""Regions of a store, and what a server makes of the workers' descriptions."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tensorwire.memory.mailbox import mailbox_bytes
from tensorwire.parameters import (
    ABSENT,
    APPLY,
    Commit,
    Layout,
    Spec,
    TensorSpec,
    checked_mode,
)
from tensorwire.parameters.messages import (
    Description,
    DisagreementError,
    follower_text,
    told_description,
)
from tensorwire.parameters.regions import RegionKind, ServerRegions, region_name, result_block
from tensorwire.parameters.server.opening import agreed, committers_of

SPEC = Spec("torch.optim.SGD", ("lr",), 1, 4, (TensorSpec("a", "float32", (600_000,)),))


class FakeMember:
    """Tells what it should allocate."""

    def allocate(
        self, size: int, *, name: str, access: str, **counters: int | None
    ) -> tuple[str, int, str]:
        return name, size, access


def regions(server: int, spec: Spec = SPEC) -> ServerRegions:
    return ServerRegions(7, Layout(spec).deal(2), server)


@pytest.mark.parametrize(
    ("kind", "which", "name", "access"),
    [
        (RegionKind.SLOT, 3, "7/slot/3", "rw"),
        (RegionKind.STATE, "exp_avg", "7/state/exp_avg", "rw"),
        (RegionKind.COMMIT, 1, "7/commit/1", "w"),
        (RegionKind.COUNTS, None, "7/counts", "rw"),
        (RegionKind.MASTER, None, "7/master", "none"),
    ],
)
def test_names_of_regions(
    kind: RegionKind, which: int | str | None, name: str, access: str
) -> None:
    found, size, may = regions(0).allocate(FakeMember(), kind, which)
    assert (found, may) == (name, access) == (region_name(7, kind, which), access)
    assert size >= 64


def test_pipelines_may_read_the_rest_of_a_model() -> None:
    split = regions(0, replace(SPEC, pipeline=2))
    assert split.allocate(FakeMember(), RegionKind.MASTER)[2] == "r"


def test_blocks_do_not_overlap() -> None:
    made = regions(1)
    for of in (made.norms_block, result_block):
        for one, other in pairwise(of(server) for server in range(4)):
            assert one.start % 64 == 0
            assert one.stop == other.start
    assert made.allocate(FakeMember(), RegionKind.NORMS)[1] == made.norms_block(1).stop


def test_stamps_lie_behind_the_commit() -> None:
    made = regions(0)
    commit = Commit(2, APPLY, 0, 1.0, math.inf, 1.0, ((0.1,),), bytes([ABSENT])).to_bytes()
    size = made.allocate(FakeMember(), RegionKind.COMMIT, 0)[1]
    assert size == 64 + commit.nbytes + 8 * len(made.units)
    assert len(made.unit_words) == len(made.units) > 0


def description(**changes: Any) -> Description:
    return Description(0, 0, None, SPEC)._replace(**changes)


def test_a_description_travels() -> None:
    made = description(home=-1, view=2, wants=[0], durable=True, device="cuda NVIDIA H200 1-2")
    assert Description.from_json(made.to_json(), 1) == made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"home": 1}, "it names server 1, and there are 1 servers"),
        ({"home": -2}, "it names server -2"),
        ({"wants": [1]}, r"numbers from 0 to 0, not \[1\]"),
        ({"spec": "no"}, "description of a model and optimizer cannot be read"),
        ({"device": 1}, "the name of its device is 1, not text"),
    ],
)
def test_a_wrong_description_is_refused(changes: dict[str, object], says: str) -> None:
    raw = json.loads(description().to_json()) | changes
    with pytest.raises(ValueError, match=says):
        Description.from_json(json.dumps(raw).encode(), 1)


def test_workers_agree() -> None:
    shared = {rank: description(home=-1, view=0) for rank in range(3)}
    assert agreed(shared) == SPEC
    other = replace(SPEC, hyper=("lr", "momentum"))
    with pytest.raises(DisagreementError, match="worker 1's model or optimizer is not worker 0's"):
        agreed({0: description(), 1: description(view=1, spec=other)})


@pytest.mark.parametrize(
    "owner",
    [{"home": 0}, {"home": -1, "wants": [0]}],
    ids=["has a home", "wants a part"],
)
def test_a_view_that_cannot_be_shared(owner: dict[str, Any]) -> None:
    told = {0: description(**owner), 1: description(home=-1, view=0)}
    with pytest.raises(ValueError, match="worker 1 cannot share the memory of worker 0"):
        agreed(told)
    with pytest.raises(ValueError, match="worker 1 cannot share the memory of worker 9"):
        agreed(told | {1: description(home=-1, view=9)})


def test_who_commits() -> None:
    assert committers_of(SPEC, 2) == [0, 0, 1, 1]
    assert committers_of(replace(SPEC, slices=2, pipeline=2), 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 slices cannot be dealt equally to 3 workers"):
        committers_of(SPEC, 3)


def test_a_worker_without_a_script_wants_what_worker_0_wants() -> None:
    first = description(home=-1, durable=True, device="cuda NVIDIA H200 1-2")
    found = told_description(follower_text(1, 3), 2, first)
    assert found == first._replace(home=1, view=3, device=""), "its gradients come from files"
    assert told_description(first.to_json(), 2) == first


@pytest.mark.parametrize(
    ("text", "first", "said"),
    [
        (follower_text(0, 0), None, "came before worker 0"),
        (follower_text(2, 1), description(), "as a file worker it names server 2"),
        (b'{"like": 0, "home": 0, "view": "x"}', description(), "and worker 'x'"),
        (b'{"like": 1, "home": 0}', description(), "spec"),
        (b"[", description(), "Expecting"),
        (follower_text(0, 1), description(mode=checked_mode("async", None)), "does not support"),
    ],
)
def test_one_that_cannot_follow(text: bytes, first: Description | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        told_description(text, 2, first)


def test_the_squares_of_every_server_have_a_place() -> None:
    """Also where one server has a few large cells, and another one many small ones."""
    sizes = [64_000, *[1000] * 64]
    tensors = tuple(
        TensorSpec(f"t{number}", "float32", (size,), "whole") for number, size in enumerate(sizes)
    )
    shares = Layout(Spec("sgd", (), 1, 1, tensors)).deal(2)
    counts = [len(share.cells) for share in shares]
    assert max(counts) > 4 * min(counts)
    for server in range(2):
        regions = ServerRegions(7, shares, server)
        for sender, count in enumerate(counts):
            block = regions.norms_block(sender)
            assert block.stop - block.start >= mailbox_bytes(8 * count, 2)
        assert regions.norms_block(0).stop <= regions.norms_block(1).start
