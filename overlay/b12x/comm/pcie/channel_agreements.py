# SPDX-License-Identifier: Apache-2.0
"""What ranks compare before a pool of PCIe channels makes or frees anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A rank that leaves a scope early meets peers in at most this many other exchanges of the pool.
_LEAVE_ATTEMPTS = 4096
_LEAVING = "leaving transient captures"
Exchange = Callable[[object], Sequence[object]]


def require_alike(exchange: Exchange, mine: object, found: str, wanted: str) -> None:
    """Compare an object of every rank; collective.

    Raises:
        RuntimeError: on every rank, with what each rank has.
    """
    everyones = exchange(mine)
    if any(other != mine for other in everyones):
        raise RuntimeError(f"{found}: {everyones}; {wanted}")


class PeerLeft(RuntimeError):
    """A peer is leaving a scope around this one."""


def agree_on_leaving(
    exchange: Exchange, owner: str, depth: int, failed: BaseException | None, made: int
) -> tuple[str, ...]:
    """Wait until all ranks leave a scope, and compare how many channels each made in it.

    A peer that has not heard of this rank's exception is in another exchange of a pool. What it receives from here
    is an error to it there, whatever that exchange was for; so it comes here next.

    Args:
        exchange: gathers an object of every rank, in lockstep.
        depth: scopes that are open around this one, of the pools of its exchange group.
        failed: the exception that this rank leaves with.
        made: channels that this rank made in the scope.

    Returns:
        For each rank that leaves with an exception, its rank and what it is.

    Raises:
        PeerLeft: a peer leaves a scope around this one; it is not in this one, so it has made nothing here.
        RuntimeError: numbers that differ, or a peer that goes on in spite of its errors. Nothing was freed.
    """
    mine = (_LEAVING, str(depth), "" if failed is None else f"{type(failed).__name__}: {failed}", str(made))
    for _ in range(_LEAVE_ATTEMPTS):
        states = [tuple(other) if isinstance(other, (tuple, list)) else () for other in exchange(mine)]
        leaving = [state for state in states if state[:1] == (_LEAVING,)]
        around = [state for state in leaving if int(state[1]) < depth]
        if around:
            raise PeerLeft(f"{owner}: a peer left transient captures around these: {around[0][2]}")
        if len(leaving) == len(states) and all(state[1] == mine[1] for state in leaving):
            break
    else:
        raise RuntimeError(f"{owner}: a rank goes on while others leave their transient captures: {states}")
    if any(state[3] != mine[3] for state in states):
        raise RuntimeError(
            f"{owner}: ranks made different numbers of channels in their transient captures: "
            f"{[state[3] for state in states]}; nothing was freed"
        )
    return tuple(f"group rank {rank}: {state[2]}" for rank, state in enumerate(states) if state[2])
