"""make setup says in one line what a machine lacks; pins and ranges agree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaaccum.cli import doctor
from tests import conftest

ROOT = Path(__file__).parents[2]
FILES = ("Makefile", "pyproject.toml", "constraints.txt")


@pytest.fixture
def bare_machine(tmp_path):
    """A folder with what make setup reads, and a PATH on which only the given commands are."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()

    def make_setup(**commands):
        for name, text in commands.items():
            tool = tools / name.replace("_", ".").replace("cxx", "c++")
            tool.write_text(f"#!/bin/sh\n{text}\n")
            tool.chmod(0o755)
        make = shutil.which("make")
        assert make, "these tests need make"
        return subprocess.run(
            [make, "setup"], cwd=tmp_path, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=60
        )

    return make_setup


def complaint(answer):
    assert answer.returncode != 0
    (line,) = [line for line in answer.stderr.splitlines() if line.startswith("make setup:")]
    return line


def test_no_compiler_is_one_clear_line(bare_machine):
    assert "no C++ compiler found" in complaint(bare_machine())


def test_no_python_is_one_clear_line(bare_machine):
    assert "Python 3.12 or newer is needed" in complaint(bare_machine(cxx="exit 0"))


def test_an_old_python_is_not_taken(bare_machine):
    # sys.version_info < (3, 12) makes the real one exit with 1.
    assert "Python 3.12 or newer is needed" in complaint(bare_machine(cxx="exit 0", python3="exit 1"))


def test_a_python_without_venv_is_one_clear_line(bare_machine):
    answer = bare_machine(cxx="exit 0", python3_12='test "$1" = -c')
    assert "python3.12 could not make .venv" in complaint(answer)


def test_make_test_runs_every_folder_of_tests_in_both_processes():
    make = shutil.which("make")
    assert make, "these tests need make"
    env = {"PATH": os.environ["PATH"]}  # under `make test` there is more, of the make above
    ran = subprocess.run([make, "-n", "test"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    assert [set(line.split()) for line in re.findall("-m pytest (.*)", ran.stdout)] == [set(folders)] * 2


def test_processes_that_take_turns_run_each_file_once_and_whole(tmp_path):
    items = [SimpleNamespace(path=file, number=number) for file in "abcdefg" for number in range(3)]
    ran: list[list] = [[], [], []]
    left = [(mine, conftest.in_turns(items, tmp_path)) for mine in ran]
    while left:
        mine, turns = left.pop(0)
        if (item := next(turns, None)) is not None:
            mine.append(item)
            left.append((mine, turns))
    assert all(len({item.path for item in mine}) > 1 for mine in ran)
    assert sorted((item.path, item.number) for mine in ran for item in mine) == [(i.path, i.number) for i in items]
    assert all([item.number for item in mine] == [0, 1, 2] * (len(mine) // 3) for mine in ran)


def test_a_process_whose_files_others_have_taken_runs_the_rest(tmp_path):
    """By pytest's own command: two files, of which the first is taken."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for name in ("first", "second"):
        (tmp_path / f"test_{name}.py").write_text("def test_one():\n    pass\n\n\ndef test_fails():\n    assert 0\n")
    turns = tmp_path / "turns"
    turns.mkdir()
    (turns / "0").touch()
    command = [sys.executable, *"-m pytest -q -p no:cacheprovider --rootdir . .".split()]
    env = os.environ | {"TEST_TURNS": str(turns), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "1 failed, 1 passed" in ran.stdout and "test_first" not in ran.stdout, ran.stdout
    assert {path.name for path in turns.iterdir()} == {"0", "1"}


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_are_exact_versions_only():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), line


def test_everything_that_is_asked_for_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["dist"]]
    names = {re.match(r"[A-Za-z0-9._-]+", text)[0].lower() for text in wanted}
    assert names - {project["name"]} <= set(pins())


def test_every_pin_has_its_hashes():
    """`make hashes` writes them; no address of a registry is among them."""
    text = (ROOT / "constraints.hashes.txt").read_text()
    blocks = text.replace(" \\\n", " ").splitlines()
    assert [block.split()[0] for block in blocks] == [f"{name}=={version}" for name, version in pins().items()]
    assert all(re.fullmatch(r"\S+( +--hash=sha256:[0-9a-f]{64})+", block) for block in blocks)


def test_no_deepspeed_is_installed_that_lacks_the_names_of_an_accumulated_step():
    """With 0.19.6 a start names what is missing; with 0.19.7 a step of ZeRO-3 in BF16 ends in a TypeError."""
    from megaaccum.upstream import TESTED

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"deepspeed>={TESTED['deepspeed']},<0.20" in wanted


def test_the_versions_that_names_are_looked_up_for_are_the_pinned_ones():
    from megaaccum.upstream import TESTED

    assert {name: pins()[name] for name in TESTED} == TESTED


def test_the_wheel_holds_what_the_readme_names(tmp_path):
    """Built from a copy of what git has, as `make dist` does it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.splitlines()):
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    ran = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    share = {name.partition("/share/megaaccum/")[2] for name in names if "/share/megaaccum/" in name}
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:configs|launch)/\w+\.(?:yaml|py)", readme))
    assert {"configs/llama3_70b.yaml", "launch/pretrain_gpt.py"} <= named <= share
    for folder in ("configs", "launch"):
        assert {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir() if path.is_file()} <= share
    assert "megaaccum/pretrain/data/text/SOURCE.md" in names
    assert {"megaaccum/pretrain/interop/shell/wrap.sh", "megaaccum/pretrain/interop/deepspeed/keys.yaml"} <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_doctor_and_pyproject_ask_for_the_same():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (least, below) in doctor.REQUIRED.items():
        text = f"{name}>={'.'.join(map(str, least))}" + (f",<{'.'.join(map(str, below))}" if below else "")
        assert text in dependencies
    assert all(finding.state == "ok" for finding in doctor.check_required(pins()))
