# SPDX-License-Identifier: Apache-2.0
"""Which channel a call or a capture of a pool gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from .channel_catalog import NamedChannels
from .channel_rules import normalized_group


class ScopedChannels(NamedChannels):
    """Channels by stream and by capture scope."""

    def _entered(self, channel: Any, stream: object) -> AbstractContextManager[Any]:
        """What a capture scope enters on its channel."""
        return nullcontext()

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
