"""A scripted device, with torch's allocator and a driver: what warm-ups, captures and destroyed graphs leave."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.worker.graph_memory import Peaks, Reading

MIB = 1 << 20
DRIVER_STEP = 2 * MIB


@dataclass
class Graph:
    pool_bytes: int
    driver_bytes: int


@dataclass
class Machine:
    """Reads like ``MemoryReader``. ``live``: what torch has allocated, by name; ``cached``: freed, but kept."""

    total: int = 100 << 30
    live: dict[str, int] = field(default_factory=dict)
    cached: int = 0
    pool: int = 0
    driver: int = 0
    driver_idle: int = 0
    graphs: list[Graph] = field(default_factory=list)
    peak_allocated: int = 0
    peak_reserved: int = 0
    peak_taken: int = 0

    @property
    def allocated(self) -> int:
        return sum(self.live.values())

    @property
    def reserved(self) -> int:
        return self.allocated + self.cached + self.pool

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.driver

    def _peak(self, transient: int = 0) -> None:
        self.peak_allocated = max(self.peak_allocated, self.allocated + transient)
        reserved = self.allocated + max(transient, self.cached) + self.pool
        self.peak_reserved = max(self.peak_reserved, reserved)
        self.peak_taken = max(self.peak_taken, reserved + self.driver)

    def reading(self, *, collect: bool = True) -> Reading:
        self.cached = 0
        return Reading(free_bytes=self.free, reserved_bytes=self.reserved, allocated_bytes=self.allocated)

    def peaks(self) -> Peaks:
        return Peaks(reserved_bytes=self.peak_reserved, allocated_bytes=self.peak_allocated)

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        self.peak_taken = self.reserved + self.driver

    def allocate(self, name: str, size: int) -> None:
        self.live[name] = size
        self._peak()

    def release(self, *names: str) -> None:
        for name in names:
            self.cached += self.live.pop(name, 0)

    def take_driver(self, size: int) -> None:
        self.driver_idle -= size
        if self.driver_idle < 0:
            more = -(self.driver_idle // DRIVER_STEP) * DRIVER_STEP
            self.driver, self.driver_idle = self.driver + more, self.driver_idle + more

    def warm_up(self, transient: int, modules: int = 0) -> None:
        """An eager run: its activations stay in the cache; kernels that it loads stay in the driver."""
        self._peak(transient)
        self.cached = max(self.cached, transient)
        self.take_driver(modules)

    def capture(self, pool_bytes: int, driver_bytes: int = MIB) -> None:
        """A stream capture: torch empties its cache; the pool is as large as its largest graph."""
        self.cached = 0
        self.pool = max(self.pool, pool_bytes)
        self.peak_allocated = max(self.peak_allocated, self.allocated + pool_bytes)
        self._peak()
        self.take_driver(driver_bytes)
        self.graphs.append(Graph(pool_bytes, driver_bytes))

    def destroy_graphs(self) -> None:
        """The pool goes back; the driver keeps what it has for the next graphs."""
        self.pool = 0
        self.driver_idle += sum(graph.driver_bytes for graph in self.graphs)
        self.graphs.clear()
