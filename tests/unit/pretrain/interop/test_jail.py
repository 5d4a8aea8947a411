"""Attacks on the recorder's jail: what a script reads, writes and starts outside of it, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop import jail
from megaaccum.pretrain.interop.launch_script import recorded
from tests.support.jail import require_bwrap

LAUNCH = "torchrun pretrain_gpt.py --num-layers 4 --load"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a key and a start-up file."""
    require_bwrap()
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text("the planted key")
    (home / ".netrc").write_text("the planted key")
    (home / ".bashrc").write_text("whole")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def attack(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a script in a project below the home folder; returns the words after --load in the launch it records."""

    def run(text: str, folder: Path = home / "project") -> str:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        (folder / "train.sh").write_text("#!/bin/bash\n" + text)
        with recorded(["bash", "train.sh"]) as launch:
            return " ".join(launch.argv[3:])

    return run


def refusal(run, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*args)
    return str(caught.value)


WALK_OUT = (  # of a root folder, whose current folder stays outside of the next one
    '/usr/bin/python3 -c \'import os; os.mkdir("x"); os.chroot("x"); [os.chdir("..") for _ in range(99)];'
    ' os.chroot("."); print(open(os.environ["HOME"] + "/.netrc").read())\''
)


@pytest.mark.parametrize(
    "reads",
    [
        "cat ~/.ssh/id_rsa", "cat ~/.netrc", "cat ./.ssh/id_rsa", "cat link", "cat linked/id_rsa", "cat ../.netrc",
        "cat /proc/1/root$HOME/.netrc", "cat /proc/$PPID/root$HOME/.netrc", "cat /proc/1/cwd/../.netrc",
        "chroot /proc/1/root cat $HOME/.netrc", "find / -xdev -name id_rsa -exec cat {} +",
        "grep -rhs 'plante[d]' /megaaccum /tmp /root /home /var /run /mnt", WALK_OUT,
    ],
)  # fmt: skip
@pytest.mark.parametrize("project", ["below home", "is home", "a repository around home"])
def test_it_reads_no_key(attack, home, reads, project):
    folder = home if project == "is home" else home / "project"
    if project == "a repository around home":
        (home / ".git").mkdir()
    folder.mkdir(exist_ok=True)
    (folder / "link").symlink_to(home / ".netrc")
    (folder / "linked").symlink_to(home / ".ssh")
    assert "planted" not in attack(f'{LAUNCH} "$({reads})"', folder)


@pytest.mark.parametrize("name", ["shadow", "gshadow", "ssh", "ssl/private", "krb5.keytab", "sudoers"])
def test_it_does_not_see_the_systems_secrets(attack, name):
    assert attack(f"{LAUNCH} $([ -e /etc/{name} ] && echo seen || echo hidden)") == "hidden"


@pytest.mark.parametrize(
    "does",
    [
        "v=$(cat /proc/sys/vm/swappiness); echo $v > /proc/sys/vm/swappiness",
        "v=$(cat /proc/sys/kernel/core_pattern); echo $v > /proc/sys/kernel/core_pattern",
        "echo x > /usr/x", "echo x > /opt/x", "echo x > /etc/passwd", "rm /usr/bin/env", "echo x > /dev/shm/x",
        ": < /dev/tty", "unshare -U true", "unshare -Urm true", "unshare -n true", "chroot / true",
        "mount -t tmpfs tmpfs /tmp", "mknod /tmp/sda b 8 0 && head -c 1 /tmp/sda", "kill -0 -- $CALLER",
        "ls -d /proc/$CALLER",
    ],
)  # fmt: skip
def test_it_cannot_do(attack, does, monkeypatch):
    monkeypatch.setenv("CALLER", str(os.getpid()))
    assert attack(f"{LAUNCH} $(({does}) > /tmp/out 2>&1 && echo done || echo refused)") == "refused"


def test_it_writes_nothing_outside(attack, home):
    hostname = Path("/proc/sys/kernel/hostname").read_text()
    segments = Path("/proc/sysvipc/shm").read_text()
    victim = home / "project" / "victim"
    victim.parent.mkdir()
    victim.write_text("whole")
    attack(
        f"echo x >> ~/.bashrc; rm -rf {victim} /etc/passwd train.sh ~; echo x > /elsewhere; ipcmk -M 4096;"
        f" echo other > /proc/sys/kernel/hostname; hostname other; {LAUNCH} x"
    )
    assert (home / ".bashrc").read_text() == victim.read_text() == "whole"
    assert (home / "project" / "train.sh").exists() and not Path("/elsewhere").exists()
    assert Path("/proc/sys/kernel/hostname").read_text() == hostname
    assert Path("/proc/sysvipc/shm").read_text() == segments


def test_it_types_nothing_into_the_callers_terminal(attack):
    """A process whose terminal is a pseudo-terminal records a script that pushes characters into every terminal."""
    attack(f"{LAUNCH} x")
    push = "import fcntl, termios\nfor at in '/dev/tty', *(f'/proc/self/fd/{n}' for n in range(9)):\n"
    push += "    try: fcntl.ioctl(open(at), termios.TIOCSTI, b'X')\n    except OSError: pass\n"
    Path("push.py").write_text(push)
    Path("train.sh").write_text(f"/usr/bin/python3 push.py\n{LAUNCH} x")
    code = (
        "import sys, select; from megaaccum.pretrain.interop.launch_script import recorded\n"
        "with recorded(['bash', 'train.sh']): pass\n"
        "sys.exit(bool(select.select([0], [], [], 0.2)[0]))"
    )
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs):
        done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: os.login_tty(theirs), timeout=60)
    assert done.returncode == 0


def test_it_reaches_no_socket(attack, home):
    (home / "project").mkdir()
    connect = "import socket, sys; s = socket.socket(getattr(socket, sys.argv[1])); s.connect(eval(sys.argv[2]))"
    with contextlib.ExitStack() as opened:
        addresses = []
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, f"\0{uuid.uuid4()}"),
            (socket.AF_UNIX, os.path.relpath(home / "project" / "here")),
            (socket.AF_UNIX, f"/tmp/{uuid.uuid4()}"),
        ):
            server = opened.enter_context(socket.socket(family))
            server.bind(address)
            server.listen()
            if isinstance(address, str) and address.startswith("/"):
                opened.callback(os.unlink, address)
            at = server.getsockname() if family == socket.AF_INET else address.replace("\0", "\\0")
            addresses.append((family.name, at if family == socket.AF_INET else f"'{at}'"))
        tries = "; ".join(f'/usr/bin/python3 -c "{connect}" {f} "{a}" && reached={f}' for f, a in addresses)
        assert attack(f"{tries}; {LAUNCH} reached$reached") == "reached"


def _alive(mark: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.parametrize("jailed", [True, False])
def test_no_process_outlives_it(attack, jailed):
    attack(f"{LAUNCH} x")
    mark = f"0.{uuid.uuid4().int}"
    start = f"/bin/sleep 1000{mark[1:]}"
    Path("train.sh").write_text(f"{start} &\nsetsid {start} &\n(setsid sh -c '{start} & {start}' &)\n{LAUNCH} x")
    with recorded(["bash", "train.sh"], jail=jailed):
        assert _alive(f"sleep 1000{mark[1:]}") == []


def test_what_it_leaves_is_read_as_regular_files_alone(attack):
    """Links, pipes and a large file among the records and where a flag points."""
    text = (
        "ln -s /dev/zero /megaaccum/records/0; ln -s /etc/passwd /megaaccum/records/1; mkfifo /megaaccum/records/2\n"
        "mkdir /megaaccum/records/3; head -c 5000000 /dev/zero > /megaaccum/records/4\n"
        "ln -s /dev/zero ds.json; mkfifo pipe; mkfifo /tmp/pipe; ln -s / root; echo x > root/tmp/x; echo y > y\n"
    )
    attack(f"{text}{LAUNCH} x")
    with recorded(["bash", "train.sh"]) as launch:
        assert launch.argv[-1] == "x"
        assert launch.left is not None
        for name in ("ds.json", "pipe", "/tmp/pipe", "root"):
            assert not launch.path(name).is_relative_to(launch.left)
        assert launch.path("y").read_text() == "y\n"
        assert launch.path("../project/./y").read_text() == "y\n"
        assert launch.path("/tmp/x").read_text() == "x\n"
        assert not any(path.is_symlink() or path.is_fifo() for path in launch.left.rglob("*"))


def test_an_archive_of_its_own_writes_nothing_elsewhere(attack, home):
    """The script writes to the archive that is read after its end."""
    text = """/usr/bin/python3 - <<'EOF'
import glob, io, os, tarfile
data = io.BytesIO()
with tarfile.open(fileobj=data, mode="w") as made:
    for name in ("../../../../../../../../outside", os.environ["HOME"] + "/outside", "/outside"):
        info = tarfile.TarInfo(name)
        info.size = 4
        made.addfile(info, io.BytesIO(b"evil"))
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, os.environ["HOME"]
    made.addfile(link)
    info = tarfile.TarInfo("link/outside")
    info.size = 4
    made.addfile(info, io.BytesIO(b"evil"))
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        with open(path, "r+b", buffering=0) as file:
            file.write(data.getvalue())
    except OSError:
        pass
EOF
"""
    with contextlib.suppress(ConfigError):
        attack(f"{text}{LAUNCH} x")
    assert not (home / "outside").exists() and not Path("/outside").exists()


def test_twelve_files_of_64_mb_do_not_fill_the_disk(attack):
    text = "for i in $(seq 12); do head -c 67108864 /dev/zero > f$i; done 2> errors\n"
    assert "left more than 64 MB" in refusal(attack, f"{text}{LAUNCH} x")
    assert attack(f'{text}left=$(du -sm . | cut -f1); rm f*; {LAUNCH} "$left"').isdecimal()
    assert int(attack(f'{text}left=$(du -sm . | cut -f1); rm f*; {LAUNCH} "$left"')) <= jail.WRITTEN >> 20


def test_300_processes_are_too_many(attack):
    """The kernel limits those of an ordinary user, and the recorder those of root, whom the kernel exempts."""
    told = refusal(attack, f"for i in $(seq 300); do /bin/sleep 100 & done\nwait; {LAUNCH} x")
    assert "more than 200 processes" in told or (os.geteuid() and "did not end" in told)


def test_its_memory_is_limited(attack, monkeypatch):
    monkeypatch.setattr(jail, "MEMORY", 256 << 20)
    assert attack(f'/usr/bin/python3 -c "bytearray(400 << 20)" || {LAUNCH} failed') == "failed"
    monkeypatch.setattr(jail, "SECONDS", 60)  # the machine may be slow, and the limit of memory comes first
    hold = '/usr/bin/python3 -c "import time; held = bytearray(120 << 20); time.sleep(60)"'
    assert "they took more than" in refusal(attack, f"{hold} & {hold} & {hold} &\nwait; {LAUNCH} x")


def test_the_users_variables_are_recorded_as_they_are(attack, monkeypatch):
    names = ("WORK", "ROOT", "TOP", "FOLDER", "WRITTEN", "MEGAACCUM_RECORD", "top", "folder", "rest")
    for name in names:
        monkeypatch.setenv(name, f"/data/{name}")
    given = attack(f"{LAUNCH} {' '.join('$' + name for name in names)}")
    assert given.split() == [f"/data/{name}" for name in names]


def test_mounts_below_system_folders_do_not_disturb_it(attack):
    attack(f"{LAUNCH} x")
    mount = "mount -t tmpfs tmpfs /usr/share/doc && mount -t tmpfs tmpfs /etc/profile.d && "
    code = "from megaaccum.pretrain.interop.launch_script import recorded\nwith recorded(['bash', 'train.sh']): pass"
    words = ["unshare", "-m", "sh", "-c", mount + f'exec {sys.executable} -c "$0"', code]
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/usr/share/doc"], check=False).returncode:
        pytest.skip("mounting needs root")
    assert subprocess.run(words, timeout=60, check=False).returncode == 0


def test_the_project_is_a_copy_with_large_files_and_its_repository(attack, home):
    project = home / "project"
    (project / "data").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / ".git" / "config").write_text("a token")
    (project / ".env").write_text("LAYERS=7")
    (project / "data" / "large").write_bytes(b"x" * (2 << 20))
    (project / "data" / "twin").hardlink_to(project / "data" / "large")
    (project / "data" / "small").write_text("small")
    os.mkfifo(project / "pipe")
    words = attack(
        f". ./.env; {LAUNCH} $LAYERS $(wc -c < data/large) $(wc -c < data/twin) $(cat data/small)"
        " $(cd data && git rev-parse --show-toplevel) $(cat .git/config) $(ls pipe)"
    )
    assert words.split() == ["7", str(2 << 20), str(2 << 20), "small", str(project)]


@pytest.mark.parametrize("limit", ["ENTRIES", "COPIED", "BOUND"])
def test_a_project_beyond_a_limit_is_refused(attack, monkeypatch, home, limit):
    monkeypatch.setattr(jail, "COPIED_FILE", 1000)
    monkeypatch.setattr(jail, limit, 2)
    (home / "project").mkdir()
    for name in "abc":
        (home / "project" / f"small_{name}").touch()
        (home / "project" / name).write_text(f"{name:1001}")
    told = refusal(attack, f"{LAUNCH} x")
    assert "--trust-script" in told and str(home / "project") in told


@pytest.mark.parametrize("found", [None, "/bin/false"])
def test_without_bubblewrap_it_names_the_package_and_the_flag(attack, monkeypatch, found):
    attack(f"{LAUNCH} x")
    monkeypatch.setattr(jail.shutil, "which", lambda name: found if name == "bwrap" else None)
    with pytest.raises(ConfigError) as caught, recorded(["bash", "train.sh"]):
        pass
    (text,) = caught.value.problems
    assert all(word in text for word in ("bubblewrap", "--trust-script", "refused" if found else "not installed"))


def test_a_trusted_script_runs_as_it_is_in_its_own_session(attack):
    attack(f"{LAUNCH} x")
    Path("train.sh").write_text(f"touch written\n{LAUNCH} $(ps -o sid= -p $$)")
    with recorded(["bash", "train.sh"], jail=False) as launch:
        assert launch.argv[-1].isdecimal() and int(launch.argv[-1]) != os.getsid(0)
    assert Path("written").exists()
