"""Each fault that doctor knows, made on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megaaccum
from megaaccum.cli import doctor

TINY = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
GOOD = {"torch": "2.15.0+cu130", "deepspeed": "0.19.8", "megatron-core": "0.19.2"}
TE, CU13, CU12, TORCH = (
    "transformer-engine",
    "transformer-engine-cu13",
    "transformer-engine-cu12",
    "transformer-engine-torch",
)


def states(findings):
    return {finding.name: finding.state for finding in findings}


@pytest.mark.parametrize("command", ["doctor", "train"])
def test_a_torch_that_cannot_be_imported_is_named(tmp_path, command):
    """A library of the system that its wheel was built against is missing, say."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    arguments = [] if command == "doctor" else [str(TINY), "--output_dir", str(tmp_path / "run")]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "megaaccum", command, *arguments],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    told = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert "libcudart.so.13: cannot open shared object file" in told
    assert "torch for this machine" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data_path", "nowhere/corpus", "--vocab_size", "100"], "nowhere/corpus"),
        (["--tokenizer_model", "no-tokenizer.json"], "no-tokenizer.json"),
        (["--hidden_size", "61"], "hidden_size 61"),
    ],
)
def test_what_a_look_at_the_files_shows_comes_before_torch_is_imported(tmp_path, flags, words):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('torch is imported')")
    command = [sys.executable, "-m", "megaaccum", "train", str(TINY), "--output_dir", str(tmp_path / "run"), *flags]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [*command, "--nproc_per_node", "4"], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "torch is imported" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_start_says_so_before_it_imports_anything(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('torch is imported')")
    ended = subprocess.run(
        [sys.executable, "-m", "megaaccum", "train", str(TINY), "--output_dir", str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ended.stdout.splitlines()[0] == "starting 4 ranks, importing torch, DeepSpeed and Megatron"
    assert "torch is imported" in ended.stderr


def test_versions_in_range_are_ok():
    assert set(states(doctor.check_required(GOOD)).values()) == {"ok"}


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("torch", "2.9.1", "2.9.1, but >=2.10 is needed"),
        ("torch", None, "not installed"),
        ("deepspeed", "0.19.7", "0.19.7, but >=0.19.8,<0.20 is needed"),
        ("deepspeed", "0.20.0", "0.20.0, but >=0.19.8,<0.20 is needed"),
        ("megatron-core", "0.9.0", "0.9.0, but >=0.19,<0.20 is needed"),
    ],
)
def test_a_version_out_of_range_is_broken_and_names_the_range(name, version, words):
    findings = doctor.check_required(GOOD | {name: version})
    (broken,) = [finding for finding in findings if finding.state == "broken"]
    assert (broken.name, broken.value) == (name, words)
    assert name in broken.remedy


def test_an_old_python_is_broken():
    assert doctor.check_python((3, 11, 9)).state == "broken"
    assert doctor.check_python((3, 12, 0)).state == "ok"


@pytest.mark.parametrize(
    ("versions", "state", "words"),
    [
        ({}, "note", "not installed"),
        ({TE: "2.20.2", CU13: "2.20.2", TORCH: "2.20.2"}, "ok", "2.20.2"),
        ({TE: "2.20.2", CU12: "2.20.2", TORCH: "2.20.2"}, "ok", "2.20.2"),
        ({TE: "2.20.2", CU13: "2.20.2"}, "broken", "missing transformer-engine-torch"),
        ({TE: "2.20.2", TORCH: "2.20.2"}, "broken", "missing transformer-engine-cu13 or transformer-engine-cu12"),
        ({CU13: "2.20.2"}, "broken", "half installed: transformer-engine-cu13 2.20.2; missing transformer-engine, "),
        ({TE: "2.20.2", CU13: "2.20.2", TORCH: "2.19.0"}, "broken", "versions differ"),
        ({TE: "2.20.2", CU13: "2.20.2", CU12: "2.20.2", TORCH: "2.20.2"}, "broken", "two CUDA libraries"),
    ],
)
def test_transformer_engine_is_all_or_none(versions, state, words):
    finding = doctor.check_transformer_engine(versions)
    assert finding.state == state
    assert words in finding.value
    assert bool(finding.remedy) == (state == "broken")


GIB = 2**30


def test_the_machine_is_described_with_our_own_version():
    found = {finding.name: finding for finding in doctor.find_machine()}
    assert list(found) == ["memory", "disk", "shared memory", "limits", "interfaces"]
    assert "are free in /dev/shm" in found["shared memory"].value and "lo" in found["interfaces"].value
    assert doctor.Finding("megaaccum", "ok", megaaccum.__version__) in doctor.examine()


@pytest.mark.parametrize(("free", "state", "text"), [(GIB // 2, "note", "512.00 MiB"), (3 * GIB, "ok", "3.00 GiB")])
def test_little_space_is_a_note_with_its_reason(free, state, text):
    finding = doctor.check_space("shared memory", free, 8 * GIB, where="/dev/shm", least=GIB, why="NCCL needs it")
    assert finding.state == state and finding.value.startswith(f"{text} of 8.00 GiB are free in /dev/shm")
    assert ("NCCL needs it" in finding.value) == (state == "note")


@pytest.mark.parametrize(("files", "state"), [(1024, "note"), (4096, "ok"), (-1, "ok")])
def test_few_open_files_are_a_note(files, state):
    finding = doctor.check_limits(files, -1)
    assert finding.state == state and ("ulimit -n" in finding.value) == (state == "note")
    assert "unlimited of locked memory" in finding.value


@pytest.mark.parametrize(("gloo", "state"), [(None, "ok"), ("eth0", "ok"), ("eth0,ib0", "broken"), ("eth1", "broken")])
def test_an_interface_that_is_not_there_is_broken(gloo, state):
    finding = doctor.check_interfaces(["lo", "eth0"], gloo, "ib")
    assert finding.state == state and "NCCL_SOCKET_IFNAME=ib" in finding.value
    assert finding.remedy == ("Set GLOO_SOCKET_IFNAME to one of lo, eth0." if state == "broken" else "")


def fake_distribution(folder, name, version, summary, files):
    """A distribution as pip would leave it in `folder`."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_the_unrelated_apex_of_pypi_is_recognised(tmp_path, monkeypatch):
    fake_distribution(tmp_path, "apex", "0.9.10", "A web toolkit", ["apex/forms.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = doctor.find_apex()
    assert finding.state == "broken"
    assert "not NVIDIA's apex but an unrelated project (A web toolkit)" in finding.value
    assert "uninstall apex" in finding.remedy


def test_nvidias_apex_is_recognised(tmp_path, monkeypatch):
    fake_distribution(tmp_path, "apex", "0.1", "PyTorch Extensions", ["apex/optimizers/fused_adam.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.find_apex().state == "ok"


def test_half_a_transformer_engine_is_found_where_pip_would_put_it(tmp_path, monkeypatch):
    fake_distribution(tmp_path, "transformer_engine", "2.20.2", "", [])
    fake_distribution(tmp_path, "transformer_engine_cu13", "2.20.2", "", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    versions = {name: doctor.installed(name) for name in (TE, CU13, CU12, TORCH)}
    assert doctor.check_transformer_engine(versions).state == "broken"


def test_without_a_compiler_or_ninja_both_are_named(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    findings = doctor.check_tools(lambda name: None)
    assert states(findings) == {"C++ compiler": "broken", "ninja": "broken"}
    assert "apt-get install g++" in findings[0].remedy


def test_a_compiler_that_does_not_run_is_broken(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert states(doctor.check_tools(lambda name: name))["C++ compiler"] == "broken"


@pytest.mark.parametrize(
    ("count", "nccl", "gloo", "broken"),
    [(0, False, True, []), (0, True, False, ["gloo"]), (2, False, True, ["NCCL"]), (2, True, False, [])],
)
def test_the_backend_that_is_needed_has_to_be_there(count, nccl, gloo, broken):
    findings = doctor.check_accelerator(count, ["H200"] * count, nccl, gloo)
    assert [finding.name for finding in findings if finding.state == "broken"] == broken


def test_a_missing_private_name_is_broken(monkeypatch):
    from types import ModuleType

    import megaaccum

    module = ModuleType("megaaccum.upstream")
    module.check = lambda: ["Stage3.f is missing"]
    monkeypatch.setattr(doctor.preload, "libraries", lambda: None)
    monkeypatch.setitem(sys.modules, "megaaccum.upstream", module)
    monkeypatch.setattr(megaaccum, "upstream", module, raising=False)
    finding = doctor.check_private_names()
    assert (finding.state, finding.value) == ("broken", "Stage3.f is missing")


@pytest.mark.parametrize("broken", [True, False])
def test_the_exit_code_and_json_say_whether_something_is_broken(monkeypatch, capsys, broken):
    finding = doctor.Finding("ninja", "broken" if broken else "ok", "value", "Install it." if broken else "")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert doctor.main(["--json"]) == int(broken)
    answer = json.loads(capsys.readouterr().out)
    assert answer["broken"] == int(broken)
    assert answer["findings"][0]["name"] == "ninja"
    assert doctor.main([]) == int(broken)
    out = capsys.readouterr().out
    assert ("Install it." in out) == broken


def test_the_tools_beside_python_are_found(monkeypatch):
    from megaaccum.distributed import preload

    monkeypatch.setenv("PATH", "/usr/bin")
    preload.prepare()
    preload.prepare()
    folder = os.path.dirname(sys.executable)
    assert os.environ["PATH"].split(os.pathsep) == [folder, "/usr/bin"]
