# SPDX-License-Identifier: Apache-2.0
"""What the pools of PCIe channels share: which channel a call, a stream or a graph gets, and how long it lives.

A channel is one IPC slab with its signals. Everything that runs on it is ordered, alike on all ranks. The pools
differ in how they make a channel and in the operations that they offer; the rest is here.

Replay groups: graphs that are never in flight together may share a channel. Their ids stay unique, one for each
graph, and the caller promises that all ranks replay the members of a group in one order, one after another. The channel
lives as long as an id refers to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from .channel_rules import (
    Catalog,
    Checkpoint,
    PeerLeft,
    agree_on_closing,
    agree_on_leaving,
    agree_on_release,
    is_among,
    normalized_group,
)

# Pools whose transient captures are open in this process, outermost first.
_open_scopes: list[Any] = []


class ChannelPool:
    """Channels of one collective, by semantic id, by stream and by capture scope.

    A subclass sets, before any of these methods is called, ``device``, ``exchange_group``, ``single_channel``,
    ``_channel_factory``, ``_closed`` and the containers below, and makes channels in ``_new_channel``.

    Class keywords:
        owner: the pool's name in messages.
        closed: what a closed pool says.
        scope_required: whether a CUDA capture outside of any capture scope is refused.
    """

    device: Any
    exchange_group: Any
    single_channel: bool
    _channel_factory: Any
    _closed: bool
    _all_channels: list[Any]
    _channels: dict[int, Any]
    _logical_channels: dict[str, Any]
    _captured_channel_ids: set[str]
    _capture_channel_stack: list[Any]
    _replay_groups: dict[str, str]

    _seams: ClassVar[Any] = None
    _owner: ClassVar[str] = ""
    _closed_message: ClassVar[str] = ""
    _scope_required: ClassVar[bool] = True

    def __init_subclass__(
        cls, *, owner: str = "", closed: str = "", scope_required: bool | None = None, **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if owner:
            # Host exchanges and stream queries are the pool's own module's.
            cls._seams = sys.modules[cls.__module__]
            cls._owner, cls._closed_message = owner, closed
        if scope_required is not None:
            cls._scope_required = scope_required

    def _new_channel(self, stream_key: int | None) -> Any:
        raise NotImplementedError

    def _entered(self, channel: Any, stream: object) -> AbstractContextManager[Any]:
        """What a capture scope enters on its channel."""
        return nullcontext()

    # Catalog of named channels

    def _catalog(self) -> Catalog:
        return Catalog(self._logical_channels, self.__dict__.setdefault("_replay_groups", {}))

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed_message)

    def _agreed(self, what: str, local: Any) -> Any:
        """The result of a local step that may fail; a failure on one rank is an error on all of them."""
        if self._channel_factory is not None:
            return local()
        return self._seams._run_collective_preallocation_setup(
            owner=f"{self._owner} {what}", exchange_group=self.exchange_group, setup=local
        )

    def prepare_channels(self, channel_ids: Sequence[str], *, replay_group: str | None = None) -> None:
        """Make the channels of these ids that do not exist; collective.

        Args:
            channel_ids: semantic ids, the same set on every rank, in any order.
            replay_group: all of these ids share the group's one channel. The caller promises that their graphs are
                never in flight together, and that all ranks replay them in the same order.

        Raises:
            RuntimeError: on every rank, before anything is allocated, if ids, groups or catalogs differ.
            ValueError: an id that already belongs elsewhere (within a RuntimeError where ranks agree on it).
        """

        def checked() -> tuple[tuple[str, ...], str | None]:
            self._require_open()
            ids = sorted({self._seams._normalize_logical_channel_id(value) for value in channel_ids})
            group = normalized_group(replay_group, single=self.single_channel, factory=self._channel_factory)
            self._catalog().require_joinable(ids, group)
            return tuple(ids), group

        ids, group = self._agreed("logical channel validation", checked)
        if self._channel_factory is None:
            mine = self._catalog().state(ids, group)
            everyones = self._exchange(mine)
            if any(other != mine for other in everyones):
                raise RuntimeError(
                    f"{self._owner} logical channel preparation differs across ranks (ids, catalog and replay groups "
                    f"by rank): {everyones}; every rank has to prepare the same ids in the same groups"
                )
        for name in ids:
            if name not in self._logical_channels:
                self._add(name, group)

    def _add(self, name: str, group: str | None) -> None:
        catalog = self._catalog()
        channel = None if group is None else catalog.channel_of_group(group)
        catalog.add(name, group, self._new_channel(None) if channel is None else channel)

    # Which channel a call gets

    def _key(self, stream: object) -> tuple[int | None, int]:
        """The stream's handle, and the key of its alias."""
        handle = self._seams._current_stream_key(self.device, stream)
        return handle, 0 if handle is None else int(handle)

    def for_stream(self, stream: object = None, *, channel_id: str | None = None) -> Any:
        """The channel that a call on this stream uses.

        Within a capture scope its channel; else the one channel, or that of ``channel_id``. Never allocates in a
        distributed pool.

        Raises:
            RuntimeError: a closed pool, a missing or unprepared id, a stream or a channel that belongs to another.
        """
        self._require_open()
        capturing = self._seams._is_current_stream_capturing(self.device)
        if capturing and self._scope_required and not self._capture_channel_stack:
            raise RuntimeError(
                f"{self._owner}: a CUDA graph is being captured outside of any capture scope; it requires an active "
                "pool.capture()"
            )
        if self.single_channel:
            return (
                self._capture_channel_stack[-1]
                if capturing and self._capture_channel_stack
                else self._single(channel_id)
            )
        handle, key = self._key(stream)
        if self._capture_channel_stack:
            channel = self._capture_channel_stack[-1]
            # A capture's own stream is torch's and ephemeral: an alias, never an owner.
            if not capturing:
                channel._bind_stream_key(handle)
        elif self._channel_factory is None:
            channel = self._named(channel_id, handle, key)
        else:
            channel = self._made(handle, key, capturing)
        self._channels[key] = channel
        return channel

    def _single(self, channel_id: str | None) -> Any:
        channel = self._channels.get(0)
        if channel is None:
            if self._channel_factory is None:
                channel = self._logical_channels[self._seams._SINGLE_CHANNEL_ID]
            elif self._seams._is_current_stream_capturing(self.device):
                raise self._nothing_to_reuse()
            else:
                channel = self._new_channel(None)
            self._channels[0] = channel
        return channel

    def _named(self, channel_id: str | None, handle: int | None, key: int) -> Any:
        if channel_id is None:
            raise RuntimeError(
                f"{self._owner}: no channel_id; eager work in a distributed pool takes an explicit semantic "
                "channel_id, alike on all ranks"
            )
        name = self._seams._normalize_logical_channel_id(channel_id)
        channel = self._logical_channels.get(name)
        if channel is None:
            raise RuntimeError(
                f"logical channel {name!r} is not prepared; prepared are {sorted(self._logical_channels)}; call "
                "prepare_channels() on all ranks first"
            )
        if self._channels.get(key, channel) is not channel:
            raise RuntimeError(f"{self._owner}: stream {key} uses the channel of another id; a stream has one channel")
        channel._bind_stream_key(handle)
        return channel

    def _made(self, handle: int | None, key: int, capturing: bool) -> Any:
        channel = self._channels.get(key)
        if channel is None and capturing:
            # Without a capture scope.
            if not self._channels:
                raise self._nothing_to_reuse()
            channel = next(iter(self._channels.values()))
        return self._new_channel(handle) if channel is None else channel

    def _nothing_to_reuse(self) -> RuntimeError:
        """IPC memory cannot be allocated within a capture."""
        return RuntimeError(
            f"{self._owner}: no channel during CUDA graph capture, and none can be made there; use the pool eagerly "
            "once before capture starts"
        )

    # Capture scopes

    @contextmanager
    def capture(
        self, stream: object = None, *, channel_id: str | None = None, replay_group: str | None = None
    ) -> Iterator[Any]:
        """A scope in which warm-up and capture of one graph use one channel; entered before the capture starts.

        Args:
            channel_id: names the graph, unique in the pool and alike on all ranks; unprepared, it is prepared
                collectively. Ranks may capture prepared ids in different orders.
            replay_group: the group that an unprepared id joins; see :meth:`prepare_channels`.

        Yields:
            The channel. Aliases that the scope added are gone when it ends; the graph keeps the channel.

        Raises:
            RuntimeError: on every rank, if the id is missing, was captured, or differs unprepared between ranks.
        """
        if not self.single_channel and self._seams._is_current_stream_capturing(self.device):
            raise RuntimeError(
                f"{self._owner}: the scope is entered within a CUDA graph capture; enter it before capture starts"
            )
        if self.single_channel:
            normalized_group(replay_group, single=True, factory=self._channel_factory)
            with self._opened(self.for_stream(stream, channel_id=channel_id), stream) as channel:
                yield channel
            return
        name = self._prepared_for_capture(channel_id, replay_group)
        handle, key = self._key(stream)
        before = dict(self._channels)
        channel = self._new_channel(handle) if name is None else self._logical_channels[name]
        grouped = name is not None and name in self._catalog().groups
        with self._lent(channel, handle) if grouped else nullcontext():
            channel._bind_stream_key(handle)
            if name is not None:
                self._captured_channel_ids.add(name)
            self._channels[key] = channel
            try:
                with self._opened(channel, stream):
                    yield channel
            finally:
                # The graph keeps the channel. A recycled stream handle must not lead there.
                self._restore_aliases(channel, before)

    @contextmanager
    def _opened(self, channel: Any, stream: object) -> Iterator[Any]:
        """The channel on top of the capture stack."""
        with self._entered(channel, stream):
            self._capture_channel_stack.append(channel)
            try:
                yield channel
            finally:
                if self._capture_channel_stack.pop() is not channel:
                    raise RuntimeError(f"{self._owner}: capture scopes did not end in the reverse of their order")

    def _prepared_for_capture(self, channel_id: str | None, replay_group: str | None) -> str | None:
        """The id of a capture, its channel made if it had none; collective. None where a factory makes channels."""
        if self._channel_factory is not None:
            normalized_group(replay_group, single=False, factory=self._channel_factory)
            return None

        def checked() -> tuple[str, str | None]:
            if channel_id is None:
                raise RuntimeError(
                    f"{self._owner}: no channel_id; a capture in a distributed pool takes a stable semantic "
                    "channel_id, alike on all ranks"
                )
            name = self._seams._normalize_logical_channel_id(channel_id)
            if name in self._captured_channel_ids:
                raise RuntimeError(
                    f"logical channel {name!r} was already captured; each graph requires a unique id (release it "
                    "first, if its graph is gone)"
                )
            group = normalized_group(replay_group, single=False, factory=None)
            self._catalog().require_joinable([name], group, known_without_group=True)
            group = self._catalog().groups.get(name, group)
            if group is not None and self._catalog().channel_of_group(group) in self._capture_channel_stack:
                raise RuntimeError(
                    f"logical channel {name!r} would be captured within a capture of its own replay group {group!r}; "
                    "members of a group are never in flight together"
                )
            return name, group

        name, group = self._agreed("capture channel validation", checked)
        unprepared = self._seams._collective_capture_needs_preparation(
            owner=self._owner,
            logical_id=name,
            prepared_channel_ids=self._logical_channels,
            exchange_group=self.exchange_group,
        )
        if unprepared:
            self.prepare_channels((name,), replay_group=group)
        return str(name)

    @contextmanager
    def _lent(self, channel: Any, handle: int | None) -> Iterator[None]:
        """A group's channel, free for a capture's stream within the scope, and bound as before after it.

        The device is waited for where the channel was another stream's, and at the end: eager work of two streams
        must not meet on a channel.
        """
        owner = channel._owner_stream_key
        if owner is not None and handle is not None and owner != int(handle):
            self._wait_for_device()
        channel._owner_stream_key = None
        try:
            yield
        finally:
            try:
                self._wait_for_device()
            finally:
                channel._owner_stream_key = owner

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            self._seams.torch.cuda.synchronize(self.device)

    def _restore_aliases(self, channel: Any, before: Mapping[int, Any]) -> None:
        """Take back the aliases that a capture scope gave to its channel."""
        for key in [key for key, mapped in self._channels.items() if mapped is channel]:
            if key in before:
                self._channels[key] = before[key]
            else:
                del self._channels[key]

    # How long channels live

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
        kept = [channel for channel in self._all_channels if is_among(channel, then.channels)]
        self._close([channel for channel in self._all_channels if not is_among(channel, kept)], always=True)
        self._restore(then)

    def _restore(self, then: Checkpoint) -> None:
        """Ids, aliases and bindings of a checkpoint, for the channels that it had."""
        kept = [channel for channel in self._all_channels if is_among(channel, then.channels)]
        then = then.without_released(kept, self._now())
        self._all_channels, self._channels = kept, then.aliases
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
        self._require_one_group()
        failed: BaseException | None = None
        _open_scopes.append(self)
        try:
            yield checkpoint
        except GeneratorExit:
            # Abandoned, not left: garbage collection must not wait for peers. close() frees what was made.
            _open_scopes.remove(self)
            raise
        except BaseException as error:
            failed = error
            raise
        finally:
            if self in _open_scopes:
                _open_scopes.remove(self)
                self._leave(checkpoint, failed)

    def _require_one_group(self) -> None:
        """Refuse a scope within one of another group: a rank that leaves both would wait for peers in either."""
        for pool in _open_scopes:
            if (
                self._channel_factory is None is pool._channel_factory
                and pool.exchange_group is not self.exchange_group
            ):
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
                others = agree_on_leaving(self._exchange, self._owner, self._depth(), failed, made)
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

    def _depth(self) -> int:
        """Open scopes of the pools that exchange through this pool's group."""
        return sum(
            pool._channel_factory is None and pool.exchange_group is self.exchange_group for pool in _open_scopes
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
            agree_on_release(self._exchange, self._owner, names)
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
            agree_on_closing(self._exchange, self._owner, len(doomed))
        self._seams._coordinated_close_channels(doomed, exchange_group=self.exchange_group, device=self.device)

    def _exchange(self, state: object) -> Sequence[object]:
        """An object of every rank; collective."""
        gathered: Sequence[object] = self._seams._broadcast_gather_object(state, self.exchange_group)
        return gathered

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


class NamedSinglePool(ChannelPool):
    """A pool whose one channel is a named one like any other (the DCP exchange)."""

    def _single(self, channel_id: str | None) -> Any:
        if self._channel_factory is not None:
            return super()._single(channel_id)
        name = self._seams._SINGLE_CHANNEL_ID if channel_id is None else channel_id
        channel = self._channels[0] = self._named(name, None, 0)
        return channel


class EnteredPool(ChannelPool):
    """A pool whose channels register what a graph captures (the oneshot all-reduce)."""

    def _entered(self, channel: Any, stream: object) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = channel.capture(stream=stream)
        return entered
