"""A secret in hosts.yaml is in no argument, log, manifest or word of dflashctl."""

from pathlib import Path

from tests.dflashctl.act.conftest import Project, wait_until

PRIVATE = "hf_5ecretT0kenThatNobodySees"


def holders(root: Path) -> list[Path]:
    """Return the files below ``root`` that hold the secret."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if PRIVATE.encode() in path.read_bytes()]


def command_lines_with_it() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # it ended
        if PRIVATE.encode() in line:
            found.append(path.parent.name)
    return found


def test_secret_of_hosts_yaml_is_in_private_files_alone(project: Project) -> None:
    hosts = project.root / "hosts.yaml"
    hosts.write_text(f"{hosts.read_text()}        env: {{HF_TOKEN: {PRIVATE}}}\n")
    said = []
    for verb in (["deploy"], ["launch", "--tag", "x"], ["launch", "--tag", "x"], ["status"]):
        with project.popen("--debug", "-v", *verb) as process:
            wait_until(lambda: process.poll() is not None or bool(command_lines_with_it()), 60)
            assert command_lines_with_it() == []
            out, err = process.communicate(timeout=60)
        said += [out, err]
    assert PRIVATE not in "".join(said)
    assert command_lines_with_it() == []
    workspace = Path(project.workspace)
    found = holders(workspace)
    assert workspace / "runs" / "x" / "environment.json" in found
    assert {path.name for path in found} == {"environment.json"}
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert holders(project.root) == [hosts]
    assert project.run("stop", "x").returncode == 0
