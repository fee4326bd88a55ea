"""Which server gets which share when there are more or fewer of them, and when one is too slow."""

import random
from collections import Counter

from tensorwire.launch.balance import LEAST_VERSIONS, WINDOWS, Balance, Reading, suggest
from tensorwire.launch.dealt import deal_anew


def test_shares_are_dealt_equally_with_as_few_moves_as_can_be() -> None:
    chance = random.Random(1)
    for _ in range(300):
        shares = chance.randint(1, 12)
        before = {share: chance.randint(0, 5) for share in range(shares)}
        servers = chance.sample(range(8), chance.randint(1, min(shares, 8)))
        after = deal_anew(before, servers)
        counts = Counter(after.values())
        assert after.keys() == before.keys()
        assert set(counts) == set(servers)
        assert max(counts.values()) - min(counts.values()) <= 1
        most, more = divmod(shares, len(servers))
        has = sorted((sum(o == n for o in before.values()) for n in servers), reverse=True)
        stay = sum(min(each, most + (place < more)) for place, each in enumerate(has))
        assert sum(after[share] == before[share] for share in before) == stay


def test_nothing_moves_where_nothing_has_to() -> None:
    assert deal_anew({0: 0, 1: 0, 2: 3}, [0, 3]) == {0: 0, 1: 0, 2: 3}


EIGHT = dict.fromkeys(range(8), 1000)
HALVES = {share: share // 4 for share in range(8)}


def test_a_slow_server_gives_the_share_that_helps_most() -> None:
    worked = {share: 40 if share < 4 else 10 for share in range(8)}
    found = suggest(HALVES, worked, EIGHT)
    assert found is not None
    assert HALVES[found.share] == 0
    assert found.to == 1
    assert found.why == "server 0 took 4.0 times as long as 1"


def test_servers_that_are_alike_keep_what_they_have() -> None:
    assert suggest(HALVES, {share: 10 + share % 2 for share in range(8)}, EIGHT) is None
    assert suggest(dict.fromkeys(range(8), 0), EIGHT, EIGHT) is None


def test_the_last_share_stays() -> None:
    owners = {0: 0, 1: 1, 2: 1}
    assert suggest(owners, {0: 90, 1: 10, 2: 10}, {0: 5, 1: 5, 2: 5}) is None


def test_a_server_without_bytes_is_none_to_compare_with() -> None:
    assert suggest({0: 0, 1: 0, 2: 1}, {0: 9, 1: 9, 2: 0}, {0: 5, 1: 5, 2: 0}) is None
    assert suggest({0: 0, 1: 0, 2: 1}, {0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 0}) is None


def test_nothing_moves_where_no_work_was_measured() -> None:
    assert suggest(HALVES, dict.fromkeys(range(8), 0), EIGHT) is None


def test_moves_come_to_an_end() -> None:
    """A server that is four times as slow, with its shares one after the other or at once."""
    for at_once in (False, True):
        owners, moves = dict(HALVES), 0
        while True:
            counts = Counter(owners.values())
            worked = {
                share: (4 if owner == 0 else 1) * 10 * (1 if at_once else counts[owner])
                for share, owner in owners.items()
            }
            found = suggest(owners, worked, EIGHT)
            if found is None:
                break
            owners[found.share] = found.to
            moves += 1
            assert moves < 8
        assert Counter(owners.values())[0] == 1


def readings(window: int, slow: bool, versions: int = LEAST_VERSIONS) -> dict[int, Reading]:
    return {
        share: Reading(window * versions, window * (40 if slow and share < 4 else 10), 1000)
        for share in range(8)
    }


def test_it_has_to_be_slow_for_long() -> None:
    balance = Balance()
    found = [balance.look(HALVES, readings(window, True)) for window in range(WINDOWS + 1)]
    assert found[:-1] == [None] * WINDOWS
    assert found[-1] is not None


def test_measurements_begin_again_behind_a_move() -> None:
    balance = Balance()
    for window in range(WINDOWS):
        assert balance.look(HALVES, readings(window, True)) is None
    balance.begin_again()
    for window in range(WINDOWS):
        assert balance.look(HALVES, readings(window, True)) is None
    assert balance.look(HALVES, readings(WINDOWS, True)) is not None


def test_a_window_has_enough_versions() -> None:
    balance = Balance()
    for window in range(WINDOWS * LEAST_VERSIONS):
        assert balance.look(HALVES, readings(window, True, versions=1)) is None
