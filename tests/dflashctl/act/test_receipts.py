"""Receipts: what a person reads, line by line."""

from dflashctl.gpus import GpuState, Owner
from dflashctl.operations.evaluate import EvaluateResult
from dflashctl.operations.gpus import GpuRow, HostGpus
from dflashctl.operations.stop import StopResult
from dflashctl.operations.warmup import WarmupResult
from dflashctl.render.gpus import gpus_text
from dflashctl.render.receipts import (
    evaluate_text,
    stop_text,
    warmup_progress,
    warmup_text,
)

EVALUATION = {
    "acceptance_length": 1.854,
    "acceptance_length_interval": [1.7, 2.0],
    "by_position": [0.5, 0.25, 0.125],
    "num_prompts": 20,
    "num_equal": 20,
    "num_near_ties": 0,
    "lossless": True,
    "target_dtype": "float32",
    "block_size": 4,
    "speed_up": None,
}


def test_an_evaluation_names_its_conditions_and_claims_no_speed_up() -> None:
    assert evaluate_text(EvaluateResult("demo1", EVALUATION, 2)) == (
        "demo1  measured by real decoding of 20 prompts, block size 4, target float32\n"
        "  acceptance length  1.85  (95 % of resampled prompts: 1.70 to 2.00)\n"
        "  by position        0.50  0.25  0.12\n"
        "  lossless           yes: 20 of 20 outputs equal plain greedy decoding\n"
    )


def test_an_inexact_evaluation_says_no_and_counts_near_ties() -> None:
    inexact = EVALUATION | {"lossless": False, "num_equal": 9, "num_near_ties": 11}
    text = evaluate_text(EvaluateResult("demo1", inexact, 2))
    assert "lossless           no: 9 of 20 outputs" in text
    assert "near-ties          11 of the first differences" in text


def test_the_table_of_gpus_is_aligned_and_shows_markup_as_it_is() -> None:
    owner = Owner(7, "[bold]python[/bold] x.py", 1, vmid=105)
    busy = GpuState(0, "GPU-0123456789ab", "H200", 1 << 30, 2 << 30, 0.5, "foreign", owner.text())
    hosts = [
        HostGpus("kpro6", (GpuRow(busy, ("200 target",)),)),
        HostGpus("k7", (), "no route to host", "", 4),
        HostGpus("k8", ()),
    ]
    assert gpus_text(hosts).splitlines() == [
        "HOST   GPU  NAME  UUID          UTIL  MEMORY       STATE    FOR         HELD BY",
        (
            "kpro6  0    H200  GPU-01234567  50%   1.0/2.0 GiB  foreign  200 target"
            "  CT 105 pid 7 [bold]python[/bold] x.py"
        ),
        "k7     ?                        ?     ?            UNKNOWN              no route to host",
        "k8     -                                           no GPU",
    ]


def stopped(**values: object) -> StopResult:
    facts = {
        "tag": "x",
        "ended_before": False,
        "signal": "SIGINT",
        "gone": True,
        "exit": {"state": "stopped", "last_step": 7, "last_checkpoint": "step_00000007"},
        "session_gone": True,
        "gpus_released": True,
    }
    return StopResult(**(facts | values))  # type: ignore[arg-type]


def test_stop_is_clean_only_when_everything_asked_for_was_proven() -> None:
    assert stopped().clean
    assert stopped(ended_before=True, exit={"state": "failed"}).clean
    for left in (
        {"gone": False},
        {"session_gone": False},
        {"gpus_released": False},
        {"exit": None},
        {"exit": {"state": "killed"}, "signal": "SIGKILL"},
        {"exit": {"state": "failed"}},
    ):
        assert not stopped(**left).clean, left
    assert "STILL HELD" in stop_text(stopped(gpus_released=False))
    assert "STILL THERE" in stop_text(stopped(session_gone=False))
    assert stop_text(stopped(gone=False)).startswith("x still lives after SIGKILL")


def test_warmup_tells_each_device_as_it_comes_and_no_json() -> None:
    loaded = {"kind": "warmup_loaded", "load_s": 3.21, "target": "/m"}
    assert warmup_progress(loaded) == "target and data loaded in 3.2 s\n"
    warm = {"kind": "warmup", "device": "cuda:5", "warmup_s": 41.25, "num_compiles": 9}
    assert warmup_progress(warm) == "cuda:5 is warm after 41.2 s\n"
    assert warmup_progress({"kind": "warmup_done", "total_s": 50.0}) == ""


def test_warmup_tells_seconds_compiles_and_notes() -> None:
    report = {"device": "cuda:5", "warmup_s": 41.2, "num_compiles": 9}
    text = warmup_text(WarmupResult("kpro6/200", "ab" * 32, "/w/cache/k", (report,), ("as is",), 4))
    assert text == (
        "kpro6/200  warm: release abababababab, cache /w/cache/k\n"
        "  cuda:5  41.2 s  9 compiles\n"
        "  as is\n"
    )
