"""Two processes over gloo: a disagreement or a failure on one rank is an error on both, changes nothing, and ends.

The scenarios run in two child processes, both pools in one run; each of them returns what both ranks saw.
"""

from __future__ import annotations

from typing import Any

from b12x_pools import EXCHANGE_SECONDS, Rank

Logs = list[dict[str, Any]]


def scenario_ids(rank: Rank) -> None:
    with rank.error("prepare"):
        rank.pool.prepare_channels(["both", f"of rank {rank.rank}"])
    with rank.error("capture"), rank.pool.capture(1, channel_id=f"graph of rank {rank.rank}"):
        pass
    rank.log["after"] = [rank.catalog(), sorted(rank.pool._captured_channel_ids)]
    rank.pool.prepare_channels(["both", "c", "b"] if rank.rank else ["b", "c", "both"])
    # Of an agreed catalog, ranks capture in the order that they like.
    for name in ("b", "c") if rank.rank else ("c", "b"):
        with rank.pool.capture(1 + ord(name), channel_id=name):
            pass
    rank.log["retry"] = rank.catalog()


def scenario_groups(rank: Rank) -> None:
    named = {"replay_group": "g"}
    asked: dict[str, dict[str, Any]] = {
        "none": {} if rank.rank else named,
        "name": {"replay_group": f"g{rank.rank}"},
        "empty": {"replay_group": ""} if rank.rank else named,
    }
    for case, group in asked.items():
        with rank.error(f"prepare {case}"):
            rank.pool.prepare_channels(["a"], **group)
        with rank.error(f"capture {case}"), rank.pool.capture(1, channel_id="a", **group):
            pass
    rank.log["after"] = [rank.catalog(), len(rank.machine.channels)]
    rank.pool.prepare_channels(["a", "b"], **named)
    for name in ("b", "a") if rank.rank else ("a", "b"):
        with rank.pool.capture(1 + rank.rank, channel_id=name):
            pass
    inner = {"channel_id": ("d", "x")[rank.rank], **named}
    with rank.error("nested"), rank.pool.capture(1, channel_id="c", **named), rank.pool.capture(2, **inner):
        pass
    rank.pool.prepare_channels(["d", "x"], **named)
    with rank.pool.capture(1, channel_id="d") if rank.rank == 0 else rank.pool.capture(1, channel_id="x"):
        rank.log["retry"] = rank.catalog()


def scenario_catalogs(rank: Rank) -> None:
    """What must not happen, but is caught: one rank's catalog is in another group."""
    rank.pool.prepare_channels(["a", "b"], replay_group="g")
    if rank.rank:
        rank.pool._replay_groups["b"] = "h"
    with rank.error("prepare"):
        rank.pool.prepare_channels(["c"])
    rank.log["after"] = rank.catalog()


def scenario_release(rank: Rank) -> None:
    rank.pool.prepare_channels(["a", "b"], replay_group="g")
    rank.pool.prepare_channels(["c"])
    with rank.error("ids"):
        rank.pool.release([("a", "c")[rank.rank]])
    with rank.error("unknown"):
        rank.pool.release(["a", ("b", "nope")[rank.rank]])
    with rank.error("one releases, one prepares"):
        rank.pool.prepare_channels(["d"]) if rank.rank else rank.pool.release(["a"])
    rank.log["after"] = [rank.catalog(), rank.freed()]
    rank.machine.channels[0].unmap_fails = rank.rank == 1
    with rank.error("unmap"):
        rank.pool.release(["b", "a"])
    rank.log["after unmap"] = [rank.catalog(), rank.freed()]
    rank.machine.channels[0].unmap_fails = False
    rank.pool.release(["b", "a"] if rank.rank else ["a", "b"])
    rank.log["retry"] = [rank.catalog(), rank.freed()]


def scenario_allocation(rank: Rank) -> None:
    rank.machine.fail_allocation = rank.rank == 1
    with rank.error("prepare"):
        rank.pool.prepare_channels(["a", "b"], replay_group="g")
    with rank.error("capture"), rank.pool.capture(1, channel_id="c"):
        pass
    with rank.error("transient"), rank.pool.transient_captures(), rank.pool.capture(1, channel_id="c"):
        pass
    rank.log["after"] = [rank.catalog(), sorted(rank.pool._captured_channel_ids), len(rank.pool._all_channels)]
    rank.machine.fail_allocation = False
    rank.pool.prepare_channels(["a", "b"], replay_group="g")
    with rank.pool.capture(1, channel_id="c"):
        rank.log["retry"] = rank.catalog()


def scenario_rollback(rank: Rank) -> None:
    rank.pool.prepare_channels(["kept"])
    checkpoint = rank.pool.checkpoint_channels()
    with rank.pool.capture(1, channel_id="a"):
        pass
    rank.machine.channels[1].unmap_fails = rank.rank == 0
    with rank.error("unmap"):
        rank.pool.rollback_channels(checkpoint)
    rank.log["after"] = [rank.catalog(), rank.freed()]
    rank.machine.channels[1].unmap_fails = False
    rank.pool.rollback_channels(checkpoint)
    rank.log["retry"] = [rank.catalog(), rank.freed()]
    with rank.error("transient"), rank.pool.transient_captures() as inside, rank.pool.capture(1, channel_id="a"):
        rank.machine.channels[2].unmap_fails = rank.rank == 1
    rank.log["after transient"] = [rank.catalog(), rank.freed()]
    rank.machine.channels[2].unmap_fails = False
    rank.pool.rollback_channels(inside)
    rank.log["retry transient"] = [rank.catalog(), rank.freed()]


def scenario_none_against_one(rank: Rank) -> None:
    """A rank that has nothing to free takes part."""
    early = rank.pool.checkpoint_channels()
    rank.pool.prepare_channels(["a"])
    late = rank.pool.checkpoint_channels()
    with rank.error("rollback"):
        rank.pool.rollback_channels(late if rank.rank else early)
    with rank.error("one is none"):
        rank.pool.rollback_channels((9,) if rank.rank else early)
    rank.log["after"] = [rank.catalog(), len(rank.machine.alive())]
    rank.pool.rollback_channels(early)
    rank.pool.prepare_channels(["b"])
    rank.log["retry"] = [rank.catalog(), len(rank.machine.alive())]


def scenario_raise_in_a_capture(rank: Rank) -> None:
    """Without transient captures: the scope ends on its own rank, and the ranks go on."""
    rank.pool.prepare_channels(["a", "b"], replay_group="g")
    with rank.error("capture"), rank.pool.capture(1, channel_id="a"):
        if rank.rank:
            raise KeyError("in the body")
    with rank.pool.capture(2, channel_id="b"):
        pass
    rank.pool.release(["a"])
    with rank.pool.capture(3, channel_id="a", replay_group="g"):
        pass
    rank.pool.close()
    rank.log["freed"] = rank.freed()


def require_both(logs: Logs, name: str, *parts: str) -> None:
    """Both ranks have an error that says all of this; neither waited for a peer that had gone."""
    for log in logs:
        assert "raised" not in log, log["raised"]
        said = log[name]
        assert said is not None, f"{name}: no error"
        assert [part for part in parts if part not in said] == [], said
        assert "Timed out" not in said


def require_alike(logs: Logs, **wanted: Any) -> None:
    for log in logs:
        assert "raised" not in log, log["raised"]
        assert {name.replace(" ", "_"): log[name] for name in log if name.replace(" ", "_") in wanted} == wanted


def test_ids(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"ids-{kind}"]
    require_both(logs, "prepare", "differs across ranks", "of rank 0", "of rank 1")
    require_both(logs, "capture", "differing", "graph of rank 0", "graph of rank 1")
    require_alike(logs, after=[{}, []], retry={"b": 0, "both": 1, "c": 2})


def test_groups(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"groups-{kind}"]
    for way in ("prepare", "capture"):
        require_both(logs, f"{way} none", "differs across ranks", "'g'")
        require_both(logs, f"{way} name", "differs across ranks", "'g0'", "'g1'")
        require_both(logs, f"{way} empty", "group rank 1: ", "replay_group is empty")
    require_both(logs, "nested", "would be captured within a capture of its own replay group 'g'")
    require_alike(logs, after=[{}, 0], retry=dict.fromkeys("abcdx", 0))


def test_catalogs(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"catalogs-{kind}"]
    require_both(logs, "prepare", "differs across ranks", "('b', 'g')", "('b', 'h')")
    require_alike(logs, after={"a": 0, "b": 0})


def test_release(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"release-{kind}"]
    require_both(logs, "ids", "release differs across ranks", "'a'", "'c'")
    require_both(logs, "unknown", "group rank 1: ", "'nope' is not prepared")
    require_both(logs, "one releases, one prepares", "differs across ranks", "'release', 'a'", "'d'")
    require_both(logs, "unmap", "group rank 1: ", "unmap failed")
    before = [{"a": 0, "b": 0, "c": 1}, [False, False]]
    require_alike(logs, after=before, after_unmap=before, retry=[{"c": 1}, [True, False]])


def test_allocation(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"allocation-{kind}"]
    for name in ("prepare", "capture", "transient"):
        require_both(logs, name, "group rank 1: ", "no memory for a slab")
    require_alike(logs, after=[{}, [], 0], retry={"a": 0, "b": 0, "c": 1})


def test_rollback(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"rollback-{kind}"]
    require_both(logs, "unmap", "group rank 0: ", "unmap failed")
    require_both(logs, "transient", "group rank 1: ", "unmap failed")
    require_alike(
        logs,
        after=[{"a": 1, "kept": 0}, [False, False]], retry=[{"kept": 0}, [False, True]],
        after_transient=[{"a": 2, "kept": 0}, [False, True, False]],
        retry_transient=[{"kept": 0}, [False, True, True]],
    )  # fmt: skip


def test_raise_in_a_capture(runs: dict[str, Logs], kind: str) -> None:
    logs = runs[f"raise_in_a_capture-{kind}"]
    assert [log["capture"] for log in logs] == [None, "KeyError: 'in the body'"]
    require_alike(logs, freed=[True])


def test_nothing_waited(runs: dict[str, Logs]) -> None:
    slow = {name: seconds for name, (log, _) in runs.items() if (seconds := log["seconds"]) >= EXCHANGE_SECONDS}
    assert slow == {}


def test_a_rank_that_has_nothing_to_roll_back_takes_part(runs: dict[str, Logs], kind: str) -> None:
    for log in runs[f"none_against_one-{kind}"]:
        assert "do not free the same channels" in log["rollback"]
        assert "invalid channel checkpoint" in log["one is none"]
        assert log["after"] == [{"a": 0}, 1]
        assert log["retry"] == [{"b": 1}, 1]
        assert log["seconds"] < EXCHANGE_SECONDS
