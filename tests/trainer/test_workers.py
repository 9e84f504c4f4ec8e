"""The supervisor with real threads, and the small parts of the workers."""

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate, GateSettings
from trainer.errors import ChannelClosedError, WorkerError
from trainer.workers.drafter import StepRange
from trainer.workers.pipeline import most_batches
from trainer.workers.supervisor import (
    Patience,
    Pulse,
    Relief,
    State,
    StopRequest,
    Supervisor,
    WatchSettings,
)
from trainer.workers.target import FeatureCache

WATCHDOG_S, LIMIT_S = 60.0, 120.0


class World:
    """A supervisor over threads that share one channel.

    Threads grow old by ``_age``, not by waiting: how fast the machine is decides nothing.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self.reports: list[str] = []
        self.abandoned = threading.Event()
        self.stop = StopRequest()
        self.channel: OrderedChannel[int] = OrderedChannel(1)
        self.gate = CompileGate(GateSettings(compile=compiles, backend="eager"))
        self.supervisor = Supervisor(
            self.gate,
            WatchSettings(WATCHDOG_S, LIMIT_S),
            stop=self.stop,
            abandon=self._abandon,
            report=self.reports.append,
        )

    def _abandon(self, name: str, error: BaseException | None) -> None:
        self.abandoned.set()
        if error is None:
            self.channel.close()
        else:
            self.channel.fail(name, error)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.gate.close()


def _wait_for_item(world: World, pulse: Pulse, index: int) -> int:
    with pulse.wait(f"for item {index}"):
        return world.channel.get(index)


def _age(pulse: Pulse, seconds: float) -> None:
    pulse.since -= seconds


def _until_reported(world: World, count: int) -> None:
    while len(world.reports) < count:
        time.sleep(0.005)  # the time limit of the test ends this


def test_first_error_ends_all_threads_and_is_told_with_its_thread(world: World) -> None:
    ended: list[str] = []

    def waits(pulse: Pulse) -> None:
        try:
            _wait_for_item(world, pulse, 9)
        finally:
            ended.append("waiter")

    def breaks(pulse: Pulse) -> None:
        pulse.beat("breaks")
        time.sleep(0.1)
        raise ZeroDivisionError("no rows")

    world.supervisor.add("target-0", waits)
    world.supervisor.add("drafter-1", breaks)
    with pytest.raises(WorkerError, match="thread drafter-1: ZeroDivisionError: no rows") as info:
        world.supervisor.run_all()
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert ended == ["waiter"]


def test_hard_stop_wakes_threads_that_wait_and_is_no_error(world: World) -> None:
    ended: list[str] = []

    def waits(pulse: Pulse) -> None:
        try:
            _wait_for_item(world, pulse, 3)
        except ChannelClosedError as error:
            ended.append(str(error))
            raise

    world.supervisor.add("drafter-0", waits)
    threading.Timer(0.2, lambda: (world.stop.ask(), world.stop.ask())).start()
    world.supervisor.run_all()
    assert ended == ["the channel was closed; item 3 never came"]


def test_soft_stop_leaves_threads_to_finish_their_work(world: World) -> None:
    done: list[int] = []

    def works(pulse: Pulse) -> None:
        while not world.stop.soft.is_set():
            pulse.beat("works")
            time.sleep(0.01)
        time.sleep(0.2)
        done.append(1)

    world.supervisor.add("drafter-0", works)
    threading.Timer(0.1, world.stop.ask).start()
    world.supervisor.run_all()
    assert done == [1]


def test_asking_twice_turns_a_soft_stop_into_a_hard_one() -> None:
    stop = StopRequest()
    assert [stop.ask(), stop.ask(), stop.ask()] == ["soft", "hard", "hard"]


def test_standstill_is_reported_with_stacks_and_ends_the_run(world: World) -> None:
    def stands_still(pulse: Pulse) -> None:
        pulse.beat("computes for ever")
        _age(pulse, WATCHDOG_S)
        _until_reported(world, 1)
        _age(pulse, LIMIT_S)
        world.abandoned.wait()

    def waits(pulse: Pulse) -> None:
        _wait_for_item(world, pulse, 0)

    world.supervisor.add("target-0", stands_still)
    world.supervisor.add("drafter-0", waits)
    with pytest.raises(WorkerError, match=r"thread target-0: .*computes for ever.*limit_s"):
        world.supervisor.run_all()
    assert world.reports[0].startswith("target-0 has made no progress for ")
    assert "stands_still" in world.reports[0]


def test_threads_that_all_wait_on_each_other_are_a_standstill_too(world: World) -> None:
    def waits(pulse: Pulse) -> None:
        with pulse.wait("for item 5"):
            _age(pulse, LIMIT_S)
            world.channel.get(5)

    for number in range(2):
        world.supervisor.add(f"drafter-{number}", waits)
    with pytest.raises(WorkerError, match=r"waits, as all others do,.*for item 5"):
        world.supervisor.run_all()


def test_busy_thread_that_beats_is_never_reported(world: World) -> None:
    def works(pulse: Pulse) -> None:
        for _ in range(4):
            pulse.beat("works")
            _age(pulse, 0.4 * WATCHDOG_S)
            time.sleep(0.15)  # the supervisor looks every 0.1 s
        world.channel.put(0, 1)

    world.supervisor.add("target-0", works)
    world.supervisor.add("drafter-0", lambda pulse: _wait_for_item(world, pulse, 0) and None)
    world.supervisor.run_all()
    assert world.reports == []


class SeenMeanwhile(Pulse):
    """Looks at itself after each assignment, as the supervisor's thread may."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        seen = self.__dict__
        if len(seen) == 3:
            assert seen["waiting"] or self.age_s < WATCHDOG_S, f"works since long, after {name}"


def test_end_of_a_long_wait_never_looks_like_long_work() -> None:
    pulse = SeenMeanwhile()
    with pulse.wait("for item 0"):
        _age(pulse, LIMIT_S)
    pulse.beat("works")


def _relief(patience: Callable[[], Patience], tell: Callable[[State, str, float], None]) -> Relief:
    return Relief("target-0 on GPU 3", "look at GPU 3", patience, lambda: True, tell)


def test_worker_that_stands_still_is_told_to_be_stuck_and_to_be_back(world: World) -> None:
    """And nobody waits for its end, but while it is at work again."""
    told: list[tuple[State, str]] = []
    stands, stuck, back = threading.Event(), threading.Event(), threading.Event()

    def tell(state: State, text: str, _age_s: float) -> None:
        told.append((state, re.sub(r"\d+ s", "N s", text.splitlines()[0])))
        {"stuck": stuck, "back": back}[state].set()

    def stands_still(pulse: Pulse) -> None:
        pulse.beat("runs the target on batch 7")
        stands.set()
        stuck.wait(20)
        pulse.beat("goes on")
        back.wait(20)

    def goes_on(pulse: Pulse) -> None:
        with pulse.wait("for the other"):
            back.wait(20)

    def patience() -> Patience:
        return Patience(0.0 if stands.is_set() and not stuck.is_set() else 1e9, 1e9)

    world.supervisor.add("target-0", stands_still, _relief(patience, tell))
    world.supervisor.add("drafter-0", goes_on)
    world.supervisor.run_all()
    stood = "target-0 on GPU 3 has made no progress for N s (runs the target on batch 7)"
    assert told == [
        ("stuck", f"{stood}; the others take over; look at GPU 3"),
        ("back", "target-0 on GPU 3 goes on after N s"),
    ]


def test_worker_that_never_comes_back_does_not_keep_the_others_from_their_end(world: World) -> None:
    stuck, released = threading.Event(), threading.Event()
    relief = _relief(lambda: Patience(0.0, 1e9), lambda _state, _text, _age_s: stuck.set())
    world.supervisor.add("target-0", lambda _pulse: released.wait() and None, relief)
    world.supervisor.add("drafter-0", lambda _pulse: stuck.wait(20) and None)
    world.supervisor.run_all()
    assert world.supervisor.at_fault() == {"target-0"}
    released.set()


def test_worker_that_waits_for_the_compile_of_another_does_not_stand_still() -> None:
    world = World(compiles=True)
    told: list[State] = []
    compiles, looked_at = threading.Event(), threading.Event()
    looks = itertools.count()

    def patience() -> Patience:
        if not compiles.is_set() or looked_at.is_set():
            return Patience(1e9, 1e9)
        if next(looks) == 5:  # half a second at least
            looked_at.set()
        return Patience(0.2, 1e9)

    def compile_long(_pulse: Pulse) -> None:
        with world.gate.trace():
            compiles.set()
            looked_at.wait(20)

    relief = _relief(patience, lambda state, _text, _age_s: told.append(state))
    world.supervisor.add("target-0", lambda _pulse: looked_at.wait(20) and None, relief)
    world.supervisor.add("target-1", compile_long)
    world.supervisor.run_all()
    world.gate.close()
    assert (looked_at.is_set(), told) == (True, [])


def test_steps_deal_batches_to_drafters_in_turn() -> None:
    steps = StepRange(first=0, num_steps=2, num_drafters=3, accumulation=2)
    assert steps.batches_per_step == 6
    assert [steps.indices(0, rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [steps.indices(1, rank) for rank in range(3)] == [[6, 9], [7, 10], [8, 11]]


def test_feature_cache_keeps_what_fits_and_copies_it() -> None:
    cache = FeatureCache(100)
    rows = torch.arange(40, dtype=torch.float32).view(2, 20)
    cache.put(1, rows[0])  # 80 bytes
    cache.put(2, rows[1])  # does not fit any more
    rows.zero_()
    kept = cache.get(1)
    assert kept is not None
    assert kept.tolist() == [float(i) for i in range(20)]
    assert cache.get(2) is None
    assert cache.used_bytes == 80


class SlowToCopy(torch.Tensor):
    """Features on a busy GPU: before their copy is done another thread has come and gone."""

    cache: FeatureCache
    other_had_to_wait = True

    def to(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        other = threading.Thread(target=self.cache.put, args=(2, torch.ones(1)), daemon=True)
        other.start()
        other.join(20)
        self.other_had_to_wait = other.is_alive()
        return torch.ones(1)


def test_copy_into_the_feature_cache_keeps_no_other_thread_waiting() -> None:
    cache = FeatureCache(100)
    slow = torch.zeros(1).as_subclass(SlowToCopy)
    slow.cache = cache
    cache.put(1, slow)
    assert not slow.other_had_to_wait
    assert [cache.get(1), cache.get(2)] == [torch.ones(1), torch.ones(1)]


@pytest.mark.parametrize(
    ("targets", "drafters", "counts"),
    [
        ([0], [0], {0: 3 + 1 + 4 + 1}),  # both roles on one card
        ([0], [1], {0: 3, 1: 4 + 1}),
        ([0, 1, 1], [2, 3], {0: 3, 1: 6, 2: 2 + 1, 3: 2 + 1}),
        ([0], [1, 2, 2], {0: 3, 1: 2 + 1, 2: 2 * (2 + 1)}),  # 4 in the queue for 3 drafters
    ],
)
def test_room_is_made_for_what_a_card_can_hold_at_once(
    targets: list[int], drafters: list[int], counts: dict[int, int]
):
    target_cards, drafter_cards = (
        [torch.device("cuda", number) for number in numbers] for numbers in (targets, drafters)
    )
    found = most_batches(target_cards, drafter_cards, waiting=4)
    assert found == {torch.device("cuda", number): count for number, count in counts.items()}
