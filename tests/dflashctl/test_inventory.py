"""hosts.yaml: what it gives, where it is found, and how a mistake in it is shown."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.errors import ConfigurationError, ExitCode, UsageError
from dflashctl.inventory import (
    STARTER,
    Container,
    Expect,
    Host,
    Inventory,
    Place,
    find_inventory,
    load_inventory,
    parse_inventory,
)

FULL = """\
version: 1
hosts:
  kpro6:
    address: root@10.1.2.6
    port: 2206
    jump: admin@bastion:22
    backend: openssh
    connect_timeout_s: 2.5
    become: sudo
    identity_file: keys/id
    ssh_config: /etc/other
    known_hosts: known
    groups: [lab, "on"]
    containers:
      200:
        workspace: /data
        python: /opt/dflash/bin/python
        gpus: {target: [0, 1], drafter: [GPU-5f0c, cpu, cpu]}
        log_dir: /var/log/dflash
        env: {HF_HOME: /models/hf, OMP_NUM_THREADS: 8, EMPTY: ""}
        groups: [train]
        pip_args: ["--index-url", "https://x.example/simple"]
      self: {}
  near:
    backend: local
    containers:
      self: {groups: [train]}
"""


def parse(text: str) -> Inventory:
    return parse_inventory(text.encode(), Path("hosts.yaml"))


def host_with(line: str) -> str:
    """A hosts.yaml whose fifth line is ``line``, a setting of the host."""
    return f"version: 1\nhosts:\n  a:\n    address: x\n    {line}\n    containers: {{200: {{}}}}\n"


def container_with(line: str) -> str:
    """A hosts.yaml whose seventh line is ``line``, a setting of the container."""
    head = "version: 1\nhosts:\n  a:\n    address: x\n    containers:\n      200:\n"
    return f"{head}        {line}\n"


def test_every_setting_is_read() -> None:
    inventory = parse_inventory(FULL.encode(), Path("/site/hosts.yaml"))
    assert inventory.hosts[0] == Host(
        name="kpro6",
        address="root@10.1.2.6",
        port=2206,
        jump="admin@bastion:22",
        backend="openssh",
        identity_file="/site/keys/id",
        ssh_config="/etc/other",
        known_hosts="/site/known",
        connect_timeout_s=2.5,
        become="sudo",
        groups=("lab", "on"),
        containers=(
            Container(
                host_name="kpro6",
                vmid=200,
                workspace="/data",
                python="/opt/dflash/bin/python",
                target=("0", "1"),
                drafter=("GPU-5f0c", "cpu", "cpu"),
                log_dir="/var/log/dflash",
                env={"HF_HOME": "/models/hf", "OMP_NUM_THREADS": "8", "EMPTY": ""},
                groups=("train",),
                pip_args=("--index-url", "https://x.example/simple"),
            ),
            Container(host_name="kpro6", vmid=None),
        ),
    )
    assert (inventory.hosts[1].backend, inventory.hosts[1].address) == ("local", "")


def test_starter_is_valid_and_is_the_file_of_this_repository() -> None:
    place = parse(STARTER).one([])
    assert (place.label, place.host.address) == ("kpro6/200", "root@10.1.2.6")
    assert (len(place.container.target), len(place.container.drafter)) == (5, 3)
    assert (Path(__file__).parents[2] / "hosts.yaml").read_text() == STARTER


def test_every_setting_that_the_starter_comments_out_is_valid() -> None:
    text = re.sub(r"^( +)# (\w+: )", r"\1\2", STARTER, flags=re.MULTILINE)
    place = parse(text).one(["train"])
    assert (place.host.jump, place.host.become, place.host.port) == ("admin@bastion", "auto", 22)
    assert place.container.log_dir == "/var/log/dflash"


# (text, line:column, words of the message, words of the hint)
MISTAKES = [
    ("", "1:1", "the file is empty", "dflashctl init"),
    ("# only a comment\n", "1:1", "the file is empty", "dflashctl init"),
    ("[]", "1:1", "expected a mapping, found a list", ""),
    ("hosts: {}", "1:1", "'version' is missing", "version: 1"),
    ("version: 2\nhosts: {}", "1:10", "this dflashctl reads, 1, found '2'", ""),
    ('version: "1"\nhosts: {}', "1:10", "found '1'", "without quotes"),
    ("version: 1\n", "1:1", "'hosts' is missing", ""),
    ("version: 1\nhosts:\n", "2:7", "expected a mapping, found nothing", "indented"),
    ("version: 1\nhosts: {}\n", "2:8", "no host is named", ""),
    ("version: 1\nhosts:\n\tkpro6:\n", "3:1", "not YAML", "blanks, not tabs"),
    ("version: 1\nhosts: [", "2:9", "not YAML", ""),
    ("a: b: c\n", "1:5", "not YAML", ""),
    ("version: 1\n---\nversion: 1\n", "2:1", "not YAML", ""),
    ("a\x07b", "1:2", "not allowed", ""),
    ("[" * 5000, "1:1", "too deep", ""),
    (host_with("adress: y"), "5:5", "hosts.a: unknown key 'adress'", "did you mean 'address'?"),
    (host_with("<<: {port: 3}"), "5:5", "unknown key '<<'", "merge keys"),
    (host_with("address: y"), "5:5", "'address' stands already in line 4", ""),
    (host_with("? [a]\n    : 3"), "5:7", "plain name as key", ""),
    (host_with("port: 022"), "5:11", "found '022'", "octal in YAML; write 22"),
    (host_with("port: 0x16"), "5:11", "found '0x16'", ""),
    (host_with("port: 22:30"), "5:11", "found '22:30'", ""),
    (host_with("port: 1e3"), "5:11", "found '1e3'", ""),
    (host_with("port: 1_000"), "5:11", "found '1_000'", ""),
    (host_with("port: 65536"), "5:11", "from 1 to 65535", ""),
    (host_with("port: " + "9" * 5000), "5:11", "from 1 to 65535", ""),
    (host_with("port: yes"), "5:11", "found 'yes'", ""),
    (host_with("port:"), "5:10", "found nothing", ""),
    (host_with("backend: fabrik"), "5:14", "fabric, openssh, local", "did you mean 'fabric'?"),
    (host_with("become: no"), "5:13", "takes the bare no for a boolean", '"no"'),
    (host_with("connect_timeout_s: -1"), "5:24", "from 0.1 to 3600", ""),
    (host_with("connect_timeout_s: .inf"), "5:24", "found '.inf'", ""),
    (host_with("groups: [a, on]"), "5:17", "hosts.a.groups[1]", 'write it in quotes: "on"'),
    (host_with("groups: a"), "5:13", "expected a list, found 'a'", "write [a]"),
    (host_with("groups: [a]\n    groups: [b]"), "6:5", "stands already in line 5", ""),
    (host_with("groups: [a, b c]"), "5:17", "a group name", ""),
    (host_with("groups: [a]"), "3:3", "the group 'a' has the name of a host", ""),
    (host_with('jump: "-oProxyCommand=x"'), "5:11", "a jump host", ""),
    (host_with('identity_file: "a\\0b"'), "5:20", "on one line", ""),
    (host_with("known_hosts: ~no-such-user/k"), "5:18", "home directory", ""),
    (host_with("identity_file: !env X"), "5:20", "the tag !env", ""),
    ("version: 1\nhosts: {no: {}}", "2:9", "takes the bare no for a boolean", '"no"'),
    ("version: 1\nhosts: {1.10: {}}", "2:9", "takes the bare 1.10 for a number", '"1.10"'),
    ("version: 1\nhosts: {a b: {}}", "2:9", "a host name", ""),
    ("version: 1\nhosts: {a: {containers: {200: {}}}}", "2:9", "no 'address'", "address: "),
    ("version: 1\nhosts: {a: {address: -x}}", "2:22", "a host name or user@host", ""),
    ("version: 1\nhosts: {a: {address: a@b@c}}", "2:22", "a host name or user@host", ""),
    ("version: 1\nhosts: {a: {address: x}}", "2:9", "no 'containers'", ""),
    ("version: 1\nhosts: {a: {address: x, containers: {}}}", "2:37", "no container", "`self`"),
    ("version: 1\nhosts: {a: {address: x, containers: {99: {}}}}", "2:38", "from 100", ""),
    ("version: 1\nhosts: {a: {address: x, containers: {l01: {}}}}", "2:38", "'l01'", ""),
    ("version: 1\nhosts: {a: {address: x, containers: {0200: {}}}}", "2:38", "'0200'", "200"),
    (
        "version: 1\nhosts: {a: {address: x, containers: {200: {}, 200: {}}}}",
        "2:47",
        "the key '200' stands already in line 2",
        "",
    ),
    ("version: 1\nhosts: {a: {address: x, containers: {200: }}}", "2:42", "found nothing", "{}"),
    (container_with("workspace: work"), "7:20", "an absolute path", "begins with /"),
    (container_with("workspace: ~/work"), "7:20", "an absolute path", "~ is not expanded"),
    (container_with("python: bin/python"), "7:17", "a program on its PATH", ""),
    (container_with("gpus: [0]"), "7:15", "expected a mapping, found a list", ""),
    (container_with("gpus: {target: 0}"), "7:24", "a list of GPUs", "write [0]"),
    (container_with("gpus: {targets: [0]}"), "7:16", "'targets'", "did you mean 'target'?"),
    (container_with("gpus: {drafter: [0, 1, 0]}"), "7:32", "already under drafter", ""),
    (container_with("gpus: {target: [0, 0]}"), "7:28", "already under target", ""),
    (container_with("gpus: {target: [01]}"), "7:25", "found '01'", "write 1"),
    (container_with("gpus: {target: [-1]}"), "7:25", "found '-1'", ""),
    (container_with("gpus: {target: [gpu0]}"), "7:25", "GPU-... UUID", ""),
    (container_with("env: {A: no}"), "7:18", "bare no for a boolean", '"no"'),
    (container_with("env: {A: 012}"), "7:18", "bare 012 for a number", '"012"'),
    (container_with("env: {A: 22:30}"), "7:18", "bare 22:30 for a number", '"22:30"'),
    (container_with("env: {A: 1e3}"), "7:18", "bare 1e3 for a number", '"1e3"'),
    (container_with("env: {A: 2026-11-30}"), "7:18", "for a date", '"2026-11-30"'),
    (container_with("env: {A: }"), "7:17", "found nothing", ""),
    (container_with("env: {A-B: x}"), "7:15", "environment variable", ""),
    (container_with("pip_args: --pre"), "7:19", "expected a list", "write [--pre]"),
]


@pytest.mark.parametrize(
    ("text", "place", "words", "hint"), MISTAKES, ids=[f"{m[1]}-{m[2][:30]}" for m in MISTAKES]
)
def test_mistake_is_shown_with_its_line_and_column(
    text: str, place: str, words: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    error = caught.value
    assert error.exit_code == ExitCode.USAGE
    assert error.place == f"hosts.yaml:{place}"
    assert words in error.message
    assert hint in error.hint


def test_message_shows_the_line_with_a_caret_under_the_mistake() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(container_with("workspace: work"))
    assert str(caught.value) == (
        "error[config]: hosts.yaml:7:20: hosts.a.containers.200.workspace: "
        "expected an absolute path of the container, found 'work'\n"
        "    7 |         workspace: work\n"
        "      |                    ^^^^"
    )


def test_long_line_is_shown_around_the_mistake_only() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(container_with("env: {A: '" + "x" * 500 + "', B: no}"))
    picture = caught.value.message.splitlines()[1:]
    assert max(map(len, picture)) <= 110
    assert picture[0][picture[1].index("^") :].startswith("no")


def test_byte_that_is_not_utf8_is_shown_by_its_place() -> None:
    with pytest.raises(ConfigurationError, match="byte 0xff is not UTF-8") as caught:
        parse_inventory(b"version: 1\nhost\xff", Path("hosts.yaml"))
    assert caught.value.place == "hosts.yaml:2:5"


def test_file_that_cannot_be_read_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_inventory(tmp_path)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=80),
        st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.text("versionhosts:12 \n-[]{}&*!|>'\"#%@`,?~<", max_size=60).map(str.encode),
    )
)
def test_any_bytes_give_an_inventory_or_a_configuration_error(data: bytes) -> None:
    assert_sound(data)


@settings(max_examples=300, deadline=None)
@given(
    at=st.integers(0, len(FULL)), length=st.integers(0, 12), new=st.text(max_size=6), data=st.data()
)
def test_any_damage_to_a_good_file_gives_an_inventory_or_a_configuration_error(
    at: int, length: int, new: str, data: st.DataObject
) -> None:
    bits = st.sampled_from(
        ["no", "~", "{}", "[a]", "- ", ": ", "&a ", "*a", "? ", "1e3", "\t", "|"]
    )
    new = data.draw(st.one_of(st.just(new), bits))
    text = FULL[:at] + new + FULL[at + length :]
    assert_sound(text.encode("utf-8", "surrogatepass"))


def assert_sound(data: bytes) -> None:
    try:
        inventory = parse_inventory(data, Path("hosts.yaml"))
    except ConfigurationError as error:
        labels = [error.place]
        sound = error.place.startswith("hosts.yaml:")
    else:
        labels = [place.label for place in inventory.places]
        sound = len(set(labels)) == len(labels) > 0
    assert sound, labels


@pytest.mark.parametrize(
    ("limits", "labels"),
    [
        ([], ["kpro6/200", "kpro6/self", "near/self"]),
        (["kpro6"], ["kpro6/200", "kpro6/self"]),
        (["kpro6/200"], ["kpro6/200"]),
        (["near", "kpro6/200"], ["kpro6/200", "near/self"]),
        (["train"], ["kpro6/200", "near/self"]),
        (["lab"], ["kpro6/200", "kpro6/self"]),
        (["*/self"], ["kpro6/self", "near/self"]),
        (["kpro?"], ["kpro6/200", "kpro6/self"]),
        (["train", "near"], ["kpro6/200", "near/self"]),
    ],
)
def test_limits_select_hosts_containers_groups_and_patterns(
    limits: list[str], labels: list[str]
) -> None:
    places = parse(FULL).select(limits)
    assert [place.label for place in places] == labels
    assert all(isinstance(place, Place) for place in places)


@pytest.mark.parametrize(
    ("limit", "hint"),
    [
        ("kpro7", "did you mean kpro6?"),
        ("200", "did you mean kpro6/200?"),
        ("kpro6/201", "did you mean kpro6/200?"),
        ("trian", "did you mean train?"),
        ("zzz", "there are: kpro6, kpro6/200"),
        ("z*", "there are: kpro6, kpro6/200"),
    ],
)
def test_limit_that_names_nothing_is_answered_with_the_nearest_name(limit: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(FULL).select(["kpro6", limit])
    assert repr(limit) in caught.value.message
    assert caught.value.hint.startswith(hint)


def test_one_refuses_a_choice_and_names_it() -> None:
    with pytest.raises(UsageError, match="2 are selected: kpro6/200, kpro6/self") as caught:
        parse(FULL).one(["kpro6"])
    assert caught.value.hint == "name one: --limit kpro6/200"


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str], Path]:
    """Makes files below a directory and returns their paths."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STARTER)
        return path

    return make


def test_explicit_file_wins_over_the_environment_and_that_over_the_directory(
    tmp_path: Path, tree: Callable[[str], Path]
) -> None:
    here, named, given_file = tree("hosts.yaml"), tree("named.yaml"), tree("given.yaml")
    environ = {"DFLASHCTL_CONFIG": str(named)}
    assert find_inventory(given_file, tmp_path, environ) == given_file
    assert find_inventory(None, tmp_path, environ) == named
    assert find_inventory(None, tmp_path, {}) == here


def test_file_is_found_upward_as_far_as_the_root_of_the_repository(
    tmp_path: Path, tree: Callable[[str], Path]
) -> None:
    above, inside = tree("hosts.yaml"), tree("repo/hosts.yaml")
    (tmp_path / "repo/.git").mkdir()
    (tmp_path / "repo/a/b").mkdir(parents=True)
    assert find_inventory(None, tmp_path / "repo/a/b", {}) == inside
    inside.unlink()
    with pytest.raises(UsageError, match=r"no hosts\.yaml found"):
        find_inventory(None, tmp_path / "repo/a/b", {"XDG_CONFIG_HOME": str(tmp_path)})
    (tmp_path / "repo/.git").rmdir()
    assert find_inventory(None, tmp_path / "repo/a/b", {}) == above


def test_user_directory_is_the_last_place_looked_at(
    tmp_path: Path, tree: Callable[[str], Path]
) -> None:
    (tmp_path / ".git").mkdir()
    by_xdg, by_home = tree("xdg/dflashctl/hosts.yaml"), tree("home/.config/dflashctl/hosts.yaml")
    home = {"HOME": str(tmp_path / "home")}
    xdg = home | {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert find_inventory(None, tmp_path, xdg) == by_xdg
    assert find_inventory(None, tmp_path, home) == by_home


def test_missing_file_is_answered_with_dflashctl_init(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    with pytest.raises(UsageError) as caught:
        find_inventory(None, tmp_path, {"HOME": str(tmp_path)})
    assert "dflashctl init" in caught.value.hint


@pytest.mark.parametrize("origin", ["--config", "DFLASHCTL_CONFIG"])
def test_named_file_that_is_missing_is_never_replaced_by_another(
    tmp_path: Path, tree: Callable[[str], Path], origin: str
) -> None:
    tree("hosts.yaml")
    gone = tmp_path / "gone.yaml"
    environ = {"DFLASHCTL_CONFIG": str(gone)} if origin == "DFLASHCTL_CONFIG" else {}
    with pytest.raises(UsageError, match=f"{origin} names"):
        find_inventory(None if environ else gone, tmp_path, environ)


def test_ssh_line_of_a_hint_reaches_the_host_as_hosts_yaml_says() -> None:
    plain = Host("a", "root@10.1.2.6")
    full = Host(
        "a",
        "root@10.1.2.6",
        port=2222,
        jump="admin@bastion",
        identity_file="/keys/my key",
        ssh_config="/etc/site",
        known_hosts="/etc/known",
    )
    assert plain.ssh_line == "ssh root@10.1.2.6"
    assert full.ssh_line == (
        "ssh -F /etc/site -o UserKnownHostsFile=/etc/known -i '/keys/my key' "
        "-J admin@bastion -p 2222 root@10.1.2.6"
    )


def test_what_gpus_are_expected_is_read_for_hosts_and_containers() -> None:  # F44
    text = host_with("expect: {count: 8, model: RTX 3090}").replace("{}", "{expect: {count: 2}}")
    (host,) = parse(text).hosts
    assert host.expect == Expect(8, "RTX 3090")
    assert host.containers[0].expect == Expect(2, None)
    with pytest.raises(ConfigurationError, match="unknown key 'modell'"):
        parse(host_with("expect: {modell: RTX 3090}"))
    with pytest.raises(ConfigurationError, match=r"expect.count: expected a number of GPUs"):
        parse(host_with("expect: {count: -1}"))
