"""A manifest for the tests of the contract."""

from dataclasses import replace
from typing import Any

from trainer.contract.manifest import Gpu, Manifest


def make_manifest(**changes: Any) -> Manifest:
    """Return a manifest of two target GPUs and a drafter; ``changes`` replace fields."""
    manifest = Manifest(
        run_id="fresh7-1",
        tag="fresh7",
        created_unix_s=1.5,
        dflashctl_version="0.1.0",
        release="ab" * 32,
        git_commit=None,
        git_dirty=None,
        packages={"torch": "2.13.0"},
        host="kpro6",
        vmid=200,
        gpus=(
            Gpu("target", 0, "GPU-a", "H200"),
            Gpu("drafter", 5, "GPU-b", "H200"),
            Gpu("target", 1, "GPU-c", "H200"),
        ),
        python="/opt/python",
        workspace="/workspace",
        log_path="/workspace/runs/fresh7/train_stdout_fresh7.log",
        cache_dir="/workspace/cache/x",
        target_revision="r",
        dataset_sha256="cd" * 32,
        config={"seed": 0},
        seed=0,
        argv=("dflashctl", "launch"),
    )
    return replace(manifest, **changes)
