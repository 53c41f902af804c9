# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet where a peer may have failed, and may never come.

A rank leaves what it has to say in the store of its group, and waits for one decision: all came, or somebody gave up.
The first decision stands, for every rank. Unlike a collective this cannot be taken for another one that a peer is in,
it works under inference mode, and a rank that waits in vain ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import ProcessGroup, Store, distributed_c10d

ALL_CAME = "all came"
GAVE_UP = "gave up: "


def group_store(group: ProcessGroup) -> Store | None:
    """The store of a group that torch.distributed made; None for another one, or one that was destroyed."""
    found = distributed_c10d._world.pg_map.get(group)
    return None if found is None else found[1]


class Meeting:
    """One meeting of the ranks of a group.

    Args:
        group: made by torch.distributed; the caller is one of its ranks.
        name: of this meeting, unique in the group and alike on its ranks.

    Raises:
        RuntimeError: the group was destroyed.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        store = group_store(group)
        if store is None:
            raise RuntimeError(f"no store for {name}: its process group was destroyed; destroy groups after captures")
        self._store: Store = store
        self._key, self._rank, self._size = f"neaptide/{name}", group.rank(), group.size()
        self._decision = f"{self._key}/decision"

    def arrive(self, text: str) -> None:
        """Say ``text`` to the others; waits for nobody."""
        self._store.set(f"{self._key}/{self._rank}", text)
        if self._store.add(f"{self._key}/arrived", 1) == self._size:
            self._store.compare_set(self._decision, "", ALL_CAME)

    def give_up(self, why: str) -> None:
        """End the meeting for every rank, unless all have come; waits for nobody."""
        self._store.compare_set(self._decision, "", f"{GAVE_UP}rank {self._rank} of the group {why}")

    def texts(self, deadline: float) -> tuple[str, ...]:
        """What each rank said, by group rank; the same result or error on all of them.

        Args:
            deadline: in seconds of ``time.monotonic()``; this rank then gives up.

        Raises:
            RuntimeError: a rank gave up.
        """
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([self._decision], timedelta(seconds=left))
        except RuntimeError:
            self.give_up(f"waited {left:.0f} s for {self._missing()}")
        decision = self._store.get(self._decision).decode()
        if decision != ALL_CAME:
            raise RuntimeError(decision.removeprefix(GAVE_UP))
        return tuple(self._store.get(f"{self._key}/{rank}").decode() for rank in range(self._size))

    def _missing(self) -> str:
        ranks = [rank for rank in range(self._size) if not self._store.check([f"{self._key}/{rank}"])]
        return f"ranks {ranks}" if ranks else "nobody"


@contextmanager
def giving_up(meetings: list[Meeting], doing: str) -> Iterator[None]:
    """Tell the peers of a failure in what has to be done before this rank arrives."""
    try:
        yield
    except BaseException as error:
        for meeting in meetings:
            meeting.give_up(f"failed {doing}: {type(error).__name__}: {error}")
        raise
