# SPDX-License-Identifier: Apache-2.0
"""Why graphs cannot share a channel in releases that choose a staging slot on the host."""

from __future__ import annotations


def refuse_replay_group(group: str | None) -> None:
    """Refuse a replay group; None passes.

    The host alternates the two slots when a launch is recorded, so a graph replays with the slots of its capture. Two
    graphs on one channel would write a slot that a peer still reads.

    Raises:
        RuntimeError: for any group.
    """
    if group is not None:
        raise RuntimeError(
            f"replay_group {group!r}: this release chooses a channel's staging slot on the host, and a graph replays "
            "the slot of its capture; graphs that share a channel would overwrite data that a peer still reads. Leave "
            "replay_group out, or use b12x 1.1.0 or newer"
        )
