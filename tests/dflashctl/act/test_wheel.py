"""A wheel in an environment without torch: everything the laptop needs comes out of the package."""

import importlib.metadata as metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.lab.site import Lab
from tests.dflashctl.act.conftest import REPOSITORY, write_project

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]


def dependencies(name: str, found: set[str]) -> set[str]:
    """Collect what ``name`` needs without extras, from what is installed here."""
    for text in metadata.requires(name) or []:
        if "extra ==" in text:
            continue
        needed = re.split(r"[\s;<>=!~\[(]", text, maxsplit=1)[0].lower()
        try:
            metadata.version(needed)
        except metadata.PackageNotFoundError:
            continue  # for another Python or system
        if needed not in found:
            found.add(needed)
            dependencies(needed, found)
    return found


def copy_distribution(name: str, site: Path) -> None:
    """Copy an installed distribution's files, so that no network is needed."""
    for file in metadata.files(name) or []:
        source, target = Path(str(file.locate())), site / file
        if ".." not in file.parts and source.is_file() and "__pycache__" not in file.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return the python of a new environment with the wheel and its declared dependencies."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(REPOSITORY)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", "-q", str(wheel)]
    subprocess.run(install, check=True)
    (site,) = home.glob("lib/python*/site-packages")
    for name in dependencies("dflashctl", set()):
        copy_distribution(name, site)
    return python


def test_the_wheel_runs_gpus_deploy_and_launch_without_torch_on_the_laptop(
    installed: Path, tmp_path: Path, lab_site: Lab
) -> None:
    torch = subprocess.run([installed, "-c", "import torch"], capture_output=True, check=False)
    assert b"No module named 'torch'" in torch.stderr
    project = tmp_path / "project"
    project.mkdir()
    workspace = "/workspace/wheel"
    hosts = lab_site.hosts_yaml(python=sys.executable)
    write_project(project, workspace, hosts.replace(": /workspace\n", f": {workspace}\n"))
    lab_site.in_container(
        "kpro7", 200, f"mkdir -p {workspace}/target; cd {workspace}; echo '{{}}' > chats.jsonl; "
        "cd target; echo '{\"model\": {}}' > tokenizer.json; "
        "echo '{\"model_type\": \"none\"}' > config.json; "
        "printf '\\2\\0\\0\\0\\0\\0\\0\\0{}' > model.safetensors",
    )  # fmt: skip
    command = [str(installed.with_name("dflashctl")), "-l", "kpro7/200"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=project, capture_output=True, text=True, check=False
        )

    shown = run("gpus")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("kpro7") == 2
    deployed = run("deploy")
    assert deployed.returncode == 0, deployed.stderr
    assert "files sent" in deployed.stdout
    # Real facts, a real start; the target is no model, which the trainer itself must tell.
    launched = run("launch", "--tag", "x", "--skip-check", "--set", "run.device=cpu")
    assert launched.returncode in (0, 1), launched.stderr  # 0: seen alive before it failed
    assert "installed package" not in launched.stderr
    followed = run("logs", "x", "--follow")
    assert followed.returncode == 1, followed.stderr
    assert "run x failed" in followed.stderr
    assert "target" in followed.stdout + followed.stderr
    manifest = (project / "runs" / "x" / "manifest.json").read_text()
    assert '"git_commit": null' in manifest
