"""The notes of a worker on its position, where that cannot be noted."""

from typing import Any

import pytest

from tensorwire.durability.history import HISTORY_BYTES, History, NoteKind
from tensorwire.memory import Node
from tensorwire.torch.rejoin import Rejoin


class Shy:
    """An object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise LookupError("not me")


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("where", ["state_dict", "pickle"])
def test_what_cannot_be_noted_ends_no_job(
    where: str, asked: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that cannot be replaced is reported if replacement was asked for."""

    def save() -> dict[str, Any]:
        if where == "state_dict":
            raise LookupError("not me")
        return {"epoch": 0, "kept": Shy()}

    with Node() as node:
        history = History(node.allocate(HISTORY_BYTES, access="none"), 0)
        rejoin = Rejoin(history, 0, asked)
        rejoin.use(save, lambda state: None, lambda began: None, lambda: True)
        for number in range(2):
            rejoin.end_pass("a loader", number)
        assert history.reason.startswith("what job.track has named cannot be noted: ")
        assert history.reason.endswith("not me")
        with pytest.raises(RuntimeError, match="no other process can take its place: what job"):
            history.check()
    assert capfd.readouterr().err.count("that is killed is not replaced, as what") == asked


def test_a_batch_before_the_epochs_is_not_inside_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for a bug: an optimizer made after it was forgotten at the next position."""
    monkeypatch.delenv("TENSORWIRE_FAIL", raising=False)
    counts = {"sums": 0, "versions": [0]}
    with Node() as node:
        region = node.allocate(HISTORY_BYTES, access="none")
        rejoin = Rejoin(history := History(region, 0), 0, False)
        rejoin.use(
            lambda: {"epoch": 0, **counts}, lambda state: None, lambda began: None, lambda: True
        )
        rejoin.begin_batch("job 0", 0, first=True)  # next(iter(loader))
        history.note(NoteKind.VERSION, b"opened", number=1)
        rejoin.begin_loop(0, 2)
        rejoin.begin_epoch()
        rejoin.begin_batch("job 1", 0, first=True)
        successor = History(region, 0)
        assert successor.take(NoteKind.VERSION, number=1) == b"opened"
        successor.reach()
