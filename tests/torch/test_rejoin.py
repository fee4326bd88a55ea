"""What a worker notes of its position, where that cannot be noted."""

from typing import Any

import pytest

from tensorwire.membership import History
from tensorwire.membership.history import HISTORY_BYTES
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
    """Nobody can take the place of such a worker, which is told to who has asked for it."""

    def save() -> dict[str, Any]:
        if where == "state_dict":
            raise LookupError("not me")
        return {"epoch": 0, "kept": Shy()}

    with Node() as node:
        history = History(node.allocate(HISTORY_BYTES, access="none"), 0)
        rejoin = Rejoin(history, 0, asked)
        rejoin.save = save
        for number in range(2):
            rejoin.end_pass("a loader", number)
        assert history.reason.startswith("what job.keep has named cannot be noted: ")
        assert history.reason.endswith("not me")
        with pytest.raises(RuntimeError, match="no other process can take its place: what job"):
            history.check()
    assert capfd.readouterr().err.count("that is killed is not replaced, as what") == asked
