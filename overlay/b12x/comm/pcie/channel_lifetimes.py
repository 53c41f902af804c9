# SPDX-License-Identifier: Apache-2.0
"""How long the channels of a pool live: checkpoint and rollback, transient captures, release, close."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .channel_agreements import PeerLeft, agree_on_leaving, require_alike
from .channel_catalog import NamedChannels
from .channel_rules import Checkpoint, is_among

# Distributed pools, of one exchange group, whose transient captures are open in this process.
_open_scopes: list[Any] = []


class OwnedChannels(NamedChannels):
    """Channels that are freed together, by all ranks."""

    def checkpoint_channels(self) -> Checkpoint:
        """What the pool holds now, for :meth:`rollback_channels`."""
        self._require_open()
        if self._capture_channel_stack:
            raise RuntimeError("no checkpoint during capture; end all capture scopes first")
        return self._now()

    def _now(self) -> Checkpoint:
        catalog = self._catalog()
        captured = self._captured_channel_ids
        return Checkpoint.of(self, self._all_channels, self._channels, catalog, captured, self._release_counts())

    def _release_counts(self) -> dict[str, int]:
        """How often each id has been released."""
        counts: dict[str, int] = self.__dict__.setdefault("_releases", {})
        return counts

    def rollback_channels(self, checkpoint: tuple[Any, ...]) -> None:
        """Close the channels made since ``checkpoint``; ids, aliases and stream bindings are as they were; collective.

        The graphs that refer to these channels have to be gone, and their work done. Nothing changes if a peer
        cannot unmap or free: call again.
        """

        def checked() -> Checkpoint:
            self._require_open()
            if self._capture_channel_stack:
                raise RuntimeError("no rollback during capture; end all capture scopes first")
            return Checkpoint.read(checkpoint, self._now())

        then = self._agreed("channel rollback validation", checked)
        self._close([channel for channel in self._all_channels if not is_among(channel, then.channels)], always=True)
        self._restore(then)

    def _restore(self, then: Checkpoint) -> None:
        """Ids, aliases and bindings of a checkpoint, for the channels that it had."""
        then = then.without_released(self._now())
        self._all_channels, self._channels = list(then.channels), then.aliases
        self._logical_channels, self._replay_groups = then.catalog.channels, then.catalog.groups
        self._captured_channel_ids = then.captured
        then.restore_bindings()

    @contextmanager
    def transient_captures(self) -> Iterator[Checkpoint]:
        """A scope for throwaway captures: what is made inside is freed at its end, in any case; collective.

        All ranks enter and leave it together. A rank that raises inside leaves early: its peers then find an error at
        their next collective of the pool, or here, and leave, too. Graphs captured inside must be gone at the end.

        Yields:
            The checkpoint. Should the freeing itself fail, ``rollback_channels(checkpoint)`` tries again.

        Raises:
            RuntimeError: on the other ranks, if one left with an exception.
        """
        checkpoint = self.checkpoint_channels()
        failed: BaseException | None = None
        if self._channel_factory is None:
            self._require_one_group()
            _open_scopes.append(self)
        try:
            yield checkpoint
        except BaseException as error:
            failed = error
            raise
        finally:
            if self._channel_factory is None:
                _open_scopes.remove(self)
            # Abandoned, it is not left: garbage collection must not wait for peers. close() frees what was made.
            if not isinstance(failed, GeneratorExit):
                self._leave(checkpoint, failed)

    def _require_one_group(self) -> None:
        """Refuse a scope within one of another group: a rank that leaves both would wait for peers in either."""
        if any(pool.exchange_group is not self.exchange_group for pool in _open_scopes):
            raise RuntimeError(
                f"{self._owner}: transient captures within those of a pool that exchanges through another group; a "
                "rank that leaves both early could not reach its peers. Open them one after another, or use "
                "checkpoint_channels() and rollback_channels() for one of the pools"
            )

    def _leave(self, checkpoint: Checkpoint, failed: BaseException | None) -> None:
        others: tuple[str, ...] = ()
        made = len([channel for channel in self._all_channels if not is_among(channel, checkpoint.channels)])
        if self._channel_factory is None:
            try:
                others = agree_on_leaving(self._exchange, self._owner, len(_open_scopes), failed, made)
            except PeerLeft:
                if not made:
                    self._restore(checkpoint)
                raise
        self.rollback_channels(checkpoint)
        if others and failed is None:
            raise RuntimeError(
                f"{self._owner}: what was captured was discarded, since a rank left the transient captures with an "
                f"exception: {'; '.join(others)}"
            )

    def release(self, channel_ids: Sequence[str]) -> None:
        """Forget these ids, and free the channels that no other id refers to; collective.

        The graphs captured under these ids have to be gone, and their work done. Nothing changes if ranks name
        different ids, or if a peer cannot unmap or free: call again.

        Raises:
            RuntimeError: on every rank, if ids differ, are not prepared, or are in use by a capture scope.
        """

        def checked() -> tuple[str, ...]:
            self._require_open()
            if self._capture_channel_stack:
                raise RuntimeError("no release during capture; end all capture scopes first")
            names = sorted({self._seams._normalize_logical_channel_id(value) for value in channel_ids})
            self._catalog().require_releasable(names, self._seams._SINGLE_CHANNEL_ID)
            return tuple(names)

        names = self._agreed("channel release validation", checked)
        if self._channel_factory is None:
            require_alike(
                self._exchange,
                ("release", *names),
                f"{self._owner} channel release differs across ranks",
                "every rank has to release the same ids",
            )
        unused = self._catalog().used_only_by(names)
        self._close(unused, always=True)
        self._all_channels = [channel for channel in self._all_channels if not is_among(channel, unused)]
        self._channels = {key: channel for key, channel in self._channels.items() if not is_among(channel, unused)}
        self._catalog().remove(names)
        self._captured_channel_ids.difference_update(names)
        counts = self._release_counts()
        counts.update({name: counts.get(name, 0) + 1 for name in names})

    def _close(self, channels: Iterable[Any], *, always: bool = False) -> None:
        """Free channels; collective, also for none with ``always``."""
        doomed = tuple(channels)
        if (doomed or always) and self._channel_factory is None:
            # Before a rank waits for its peers in a barrier.
            require_alike(
                self._exchange,
                ("close", str(len(doomed))),
                f"{self._owner}: ranks do not free the same channels (by rank)",
                "nothing was freed, call again together",
            )
        self._seams._coordinated_close_channels(doomed, exchange_group=self.exchange_group, device=self.device)

    def close(self) -> None:
        """Free all channels; collective. A pool that could not free all of them stays open: call again."""
        if self._closed:
            return
        self._close({id(c): c for c in (*self._all_channels, *self._channels.values())}.values())
        self._closed = True
        self._all_channels.clear()
        self._channels.clear()
        self._captured_channel_ids.clear()
        self._catalog().clear()
