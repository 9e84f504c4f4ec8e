"""The threads of a run around the queue, with targets that fail or are slow."""

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from trainer import assembly
from trainer.compile_gate import CompileGate
from trainer.errors import WorkerError
from trainer.learning_rate import Schedule
from trainer.model.target import Target
from trainer.workers.drafter import StepDone
from trainer.workers.pace import PaceWatch
from trainer.workers.pipeline import Pipeline
from trainer.workers.place import cores_near, stay_near
from trainer.workers.supervisor import Pulse, StopRequest

MakeRun = Callable[..., Path]


@dataclass
class Story:
    """What a pipeline did.

    failures: targets that work wait until so many others have failed. costs: seconds a token that
    threads seem to have needed so far; nothing runs then. hangs: targets, by place, whose forward
    comes back when the event is set; those that work wait until all of these hang.
    """

    failures: int = 0
    hangs: dict[int, threading.Event] = field(default_factory=dict)
    hanging: list[int] = field(default_factory=list)  # those that were asked for a forward
    all_hang: threading.Event = field(default_factory=threading.Event)
    costs: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sound: list[int] = field(default_factory=list)  # which target was to be trusted after a step
    all_failed: threading.Event = field(default_factory=threading.Event)
    on_stuck: Callable[[], None] = lambda: None

    states: list[tuple[str, str, str]] = field(default_factory=list)  # thread, GPU, state

    def warn(self, text: str, **facts: Any) -> None:
        self.warnings.append(text)
        if facts.get("state") == "stuck" and len(self.states) == 1:
            self.on_stuck()  # both are
        if facts:
            self.states.append((facts["thread"], facts["device"], facts["state"]))
        if len(self.warnings) == self.failures:
            self.all_failed.set()

    def acting(self, target: Target, place: int) -> Target:
        """Return the target, which waits or hangs in its forward as the story has it."""

        def act(*_: object) -> None:
            if place in self.hangs:
                self.hanging.append(place)
                if set(self.hanging) == set(self.hangs):
                    self.all_hang.set()
                self.hangs[place].wait()
            elif self.hangs:
                self.all_hang.wait(20)
            elif self.failures:
                self.all_failed.wait(20)

        target.model.get_decoder().register_forward_pre_hook(act)
        return target


def _without_rows(target: Target, kept: int) -> Target:
    """Return the target with an embedding of ``kept`` rows: it fails on every other token."""
    target.model.resize_token_embeddings(kept)
    return Target(target.model, target.target_layer_ids)


def _run(run_dir: Path, broken: Sequence[bool], story: Story) -> None:
    """Run the pipeline of a run directory with one target a flag; True stands for a broken one."""
    manifest, config = assembly.read_manifest(run_dir)
    devices = assembly.devices_of(manifest, config)
    gate = CompileGate(assembly.gate_settings(config, 1))
    data = assembly.Data.load(manifest, config)
    steps = assembly.step_range(config, data.plan, 1)

    def load() -> Target:
        return next(iter(assembly.load_targets(config, devices.targets[:1]).values()))

    def made(place: int, bad: bool) -> Target:
        return _without_rows(load(), 2) if bad else story.acting(load(), place)

    def on_step(done: StepDone, _pulse: Pulse) -> None:
        story.batches += [batch.batch_index for batch in done.sums.batches]
        story.losses.append(done.sums.loss_sum)
        story.sound.append(pipeline.targets.index(pipeline.sound_target()))

    schedule = Schedule.from_config(config.optim, steps.num_steps)
    target, place = load(), (0, devices.drafters[0])
    attention = assembly.attention_of(config, assembly.draft_config(config, target), gate)
    replica = assembly.build_replica(config, target, place, attention, schedule, None)
    try:
        pipeline = Pipeline(
            config=config,
            gate=gate,
            maker=data.maker,
            targets=[made(place, bad) for place, bad in enumerate(broken)],
            replicas=[replica],
            steps=replace(steps, num_steps=8),
            stop=StopRequest(),
            run_dir=run_dir,
            report=story.warn,
            on_step=on_step,
            gpus=[f"GPU {3 + place}" for place in range(len(broken))],
        )
        story.sound.append(pipeline.targets.index(pipeline.sound_target()))
        if story.costs:
            pipeline.add_targets()
            for name, cost in story.costs.items():
                for _ in range(8):
                    pipeline.pace.note(name, cost, 1)
            story.sound.append(pipeline.targets.index(pipeline.sound_target()))
        else:
            pipeline.run()
    finally:
        gate.close()


def test_target_thread_that_fails_is_named_and_the_others_take_its_batches(
    make_run: MakeRun,
) -> None:
    whole, part = Story(), Story(failures=2)
    # Bounded by bytes alone, which changes neither order nor numbers.
    _run(make_run("whole", run={"queue_depth": None}), [False], whole)
    _run(make_run("part"), [True, False, True], part)
    assert part.batches == whole.batches == list(range(8))
    assert part.losses == whole.losses
    # Before anything runs the first one is taken, then the only one that has not failed.
    assert (whole.sound, part.sound) == ([0] * 9, [0] + [1] * 8)
    assert whole.warnings == []
    first_lines = sorted(text.splitlines()[0] for text in part.warnings)
    assert [line.split(" failed and is left out")[0] for line in first_lines] == [
        "target-0",
        "target-2",
    ]
    assert all("IndexError: index out of range in self" in line for line in first_lines)
    assert all("in _work" in text for text in part.warnings)  # the whole stack is in the log


def test_target_of_a_slow_thread_is_not_decoded_with_while_another_is_sound(
    make_run: MakeRun,
) -> None:
    slow = Story(costs={"target-1": 10e-6, "target-0": 40e-6})
    _run(make_run(), [False, False], slow)
    assert slow.sound == [0, 1]


def test_last_target_thread_that_fails_ends_the_run_with_its_error(make_run: MakeRun) -> None:
    story = Story()
    with pytest.raises(WorkerError, match=r"thread target-\d: IndexError: index out of range"):
        _run(make_run(), [True, True], story)
    assert len(story.warnings) == 1
    assert story.batches == []


# A thread that is starved for longer than this may be told as well: it is back at once, and what it
# made is made again. So nothing below depends on the time.
_HANGS = {"watchdog_s": 0.5, "limit_s": 60.0}


def test_target_thread_that_hangs_is_named_and_the_others_take_its_batches(
    make_run: MakeRun,
) -> None:
    whole, part = Story(), Story(hangs={1: threading.Event()})
    _run(make_run("whole"), [False], whole)
    _run(make_run("part", compile=_HANGS), [False, False], part)
    part.hangs[1].set()
    assert part.batches == whole.batches == list(range(8))
    assert part.losses == whole.losses
    assert ("target-1", "GPU 4", "stuck") in part.states
    (text,) = [text for text in part.warnings if text.startswith("target-1 on GPU 4 has made")]
    assert re.search(r"^.* has made no progress for \d+ s \(prepares batch \d\); ", text)
    assert "in act\n" in text  # the whole stack is in the log


def test_last_target_thread_that_hangs_ends_the_run_and_every_one_was_named(
    make_run: MakeRun,
) -> None:
    story = Story(hangs={0: threading.Event(), 1: threading.Event()})
    with pytest.raises(WorkerError, match=r"thread target-\d: TimeoutError: .* no other is left"):
        _run(make_run(compile={"watchdog_s": 0.5, "limit_s": 1.0}), [False, False], story)
    for released in story.hangs.values():
        released.set()
    assert sorted(story.states) == [("target-0", "GPU 3", "stuck"), ("target-1", "GPU 4", "stuck")]


def test_target_thread_that_comes_back_goes_on_and_what_it_made_late_is_dropped(
    make_run: MakeRun,
) -> None:
    whole, part = Story(), Story(hangs={0: threading.Event(), 1: threading.Event()})
    _run(make_run("whole"), [False], whole)

    def come_back() -> None:
        for released in part.hangs.values():
            released.set()

    part.on_stuck = come_back
    _run(make_run("part", compile=_HANGS), [False, False], part)
    assert part.batches == whole.batches
    assert part.losses == whole.losses


def test_target_thread_three_times_slower_than_the_others_is_named_once() -> None:
    pace = PaceWatch()
    told = []
    for _ in range(20):
        told += [pace.note("target-0", 10e-6, 1), pace.note("target-1", 12e-6, 1)]
        told += [pace.note("target-2", 400e-6, 10)]
    texts = [text for text in told if text is not None]
    assert len(texts) == 1
    # The others' medians are 10 and 12 us, theirs is 11: 40 / 11 = 3.6.
    assert pace.slow == {"target-2"}
    assert texts[0].startswith("target-2 needs 40.0 us a token, 3.6 times the median of the other")


@pytest.mark.parametrize(("slow", "named"), [(29e-6, False), (31e-6, True)])
def test_of_two_target_threads_the_slow_one_can_be_told(slow: float, named: bool) -> None:
    pace = PaceWatch()
    told = []
    for batch in range(8):
        told.append(pace.note("target-0", 10e-6, 1))
        told.append(pace.note("target-1", 1.0 if batch == 0 else slow, 1))  # the first one compiles
    assert [text is not None for text in told] == [False] * 15 + [named]


def _sys_tree(root: Path, numa_node: str, cpulists: Sequence[str]) -> Path:
    """Write what sysfs shows of one device and of the memory nodes."""
    device = root / "bus" / "pci" / "devices" / "0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa_node}\n")
    for number, cpus in enumerate(cpulists):
        node = root / "devices" / "system" / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    return root


def test_cores_near_a_gpu_are_those_of_its_memory_node(tmp_path: Path) -> None:
    root = _sys_tree(tmp_path, "1", ["0-3,8", "4-6,9,12-13"])
    assert cores_near("0000:1b:00.0", root) == {4, 5, 6, 9, 12, 13}
    assert cores_near("0000:ff:00.0", root) == frozenset()  # no such device


@pytest.mark.parametrize(
    ("numa_node", "cpulists"), [("0", ["0-7"]), ("-1", ["0-3", "4-7"]), ("", ["0-3", "4-7"])]
)
def test_no_cores_are_near_where_the_machine_has_one_node_or_does_not_tell(
    tmp_path: Path, numa_node: str, cpulists: list[str]
) -> None:
    assert cores_near("0000:1b:00.0", _sys_tree(tmp_path, numa_node, cpulists)) == frozenset()


def test_thread_stays_on_those_near_cores_that_the_process_may_use(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    root = _sys_tree(tmp_path, "0", [f"{one},4000-4010", "5000"])
    found: list[object] = []

    def body() -> None:
        found.append(stay_near("0000:1b:00.0", root))
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(20)
    assert found == [{one}, {one}]
    assert os.sched_getaffinity(0) == before  # of this thread alone
    far = _sys_tree(tmp_path / "far", "0", ["4000-4010", "5000"])
    assert stay_near("0000:1b:00.0", far) == frozenset()
    assert os.sched_getaffinity(0) == before
