"""The doctor: every fault is found and named with its repair, and a good machine is told so at once."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from grpo_lab import cli, doctor
from grpo_lab.doctor import examine

PIP = shlex.join([sys.executable, "-m", "pip", "install"])


def faults(tmp_path):
    return [finding for finding in examine(tmp_path) if finding.level == "FAULT"]


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    """nvidia-smi as a machine with GPUs has it."""

    def install(*lines):
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + "\n".join(f"echo '{line}'" for line in lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def test_a_good_machine_is_told_so_in_seconds(tmp_path):
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "grpo_lab", "doctor"], capture_output=True, text=True,
                          env=os.environ | {"GRPO_LAB_RUNS": str(tmp_path)})  # fmt: skip
    assert time.perf_counter() - began < 5
    assert done.returncode == 0 and "FAULT" not in done.stdout, done.stdout + done.stderr
    assert re.search(r"^ready, \d\.\d s$", done.stdout, re.M) and "live here, every cell: 00, 01," in done.stdout


def test_a_python_with_no_package_is_told_what_to_install(tmp_path):
    command, environment = "-S -m grpo_lab doctor", os.environ | {"PYTHONPATH": "", "GRPO_LAB_RUNS": str(tmp_path)}
    options = dict(cwd=doctor.CLONE, env=environment, capture_output=True, text=True)
    done = subprocess.run([sys.executable, *command.split()], **options)
    assert done.returncode == 1 and "FAULT  not installed: torch==" in done.stdout, done.stdout + done.stderr
    assert "live here, once repaired, every cell: 00" in done.stdout


def test_a_name_server_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    from huggingface_hub import constants

    def hang(host, *rest, lookup=socket.getaddrinfo, **options):
        if host == "127.0.0.1":
            return lookup(host, *rest, **options)
        time.sleep(5)
        raise OSError("no such host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    began = time.perf_counter()
    assert any("no more can be fetched" in finding.text for finding in examine(tmp_path))
    assert time.perf_counter() - began < 4.5


def test_another_python(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    (fault,) = faults(tmp_path)
    assert "3.11 or 3.12 is needed" in fault.text and fault.repair == "make PYTHON=python3.12"


def test_packages_that_are_missing_or_of_another_version(tmp_path, monkeypatch, capsys):
    real, pins = metadata.version, dict(doctor._pins())
    assert {"torch", "trl", "jupyterlab"} <= set(pins)
    other = {"trl": "1.15.2", "torch": "2.11.0+cu130", "plotly": "7.0.0"}

    def version(name):
        if name in ("peft", "papermill"):
            raise metadata.PackageNotFoundError(name)
        return other.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = examine(tmp_path)
    repairs = {finding.repair: finding for finding in found if finding.repair.startswith(PIP)}
    missing = f"{PIP} peft=={pins['peft']} papermill=={pins['papermill']}"
    assert repairs[missing].level == repairs[f"{PIP} trl=={pins['trl']}"].level == "FAULT"
    assert repairs[f"{PIP} plotly=={pins['plotly']}"].level == "note"
    assert any(finding.text.startswith("torch 2.11.0: not the pinned") and finding.level == "ok" for finding in found)
    assert "2 to repair first" in capsys.readouterr().out


def test_a_package_that_only_the_notebook_s_folder_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    monkeypatch.setattr(sys, "path", ["..", *(p for p in sys.path if p != str(doctor.CLONE) and p)])
    (fault,) = faults(tmp_path)
    assert fault.repair == f"{PIP} -e {shlex.quote(str(doctor.CLONE))}"


def test_a_kernel_of_another_python(tmp_path, monkeypatch):
    from jupyter_client.kernelspec import KernelSpecManager

    monkeypatch.setattr(
        KernelSpecManager, "get_kernel_spec", lambda *_: SimpleNamespace(argv=["/opt/other/bin/python", "-m"])
    )
    (fault,) = faults(tmp_path)
    assert "/opt/other/bin/python" in fault.text and fault.repair.endswith("-m ipykernel install --user")


def test_gpus(tmp_path, monkeypatch, fake_smi, capsys):
    fake_smi("NVIDIA H200, 143771, 143000, 580.1, 9.0", "NVIDIA H200, 143771, 9000, 580.1, 9.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    (fault,) = faults(tmp_path)
    assert "without CUDA" in fault.text and f"{PIP} --force-reinstall torch==" in fault.repair
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (fault,) = faults(tmp_path)
    assert "driver 580.1" in fault.text and "newer driver" in fault.repair
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert faults(tmp_path)[0].repair == "unset CUDA_VISIBLE_DEVICES"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capsys.readouterr()
    levels = [finding.level for finding in examine(tmp_path) if finding.text.startswith("GPU ")]
    out = capsys.readouterr().out
    assert levels == ["ok", "note"] and "another process holds the rest" in out and "tier   2 GPUs" in out
    assert "06 also trains Qwen3-0.6B" in out
    fake_smi("Tesla V100, 16384, 16000, 580.1, 7.0")
    assert any(finding.text.endswith("no bfloat16") for finding in examine(tmp_path))


def test_little_memory_and_little_disk(tmp_path, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 28))
    memory, disk = faults(tmp_path)
    assert "1.0 GiB free" in memory.text and "0.2 GiB free" in disk.text and "GRPO_LAB_RUNS" in disk.repair


def test_a_run_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    (fault,) = faults(tmp_path / "not" / "there")
    assert "Permission denied" in fault.text and "export GRPO_LAB_RUNS=" in fault.repair


def test_ports_and_hub(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(doctor, "VLLM_PORTS", (server.getsockname()[1],))
        (note,) = [finding for finding in examine(tmp_path) if "in use" in finding.text]
        assert note.level == "note" and "vllm_server_port" in note.repair

    def refused(*_, **__):
        raise OSError("blocked")

    monkeypatch.setattr(socket, "create_connection", refused)
    (fault,) = faults(tmp_path)
    assert "127.0.0.1 cannot be reached (blocked)" in fault.text
    assert any("no more can be fetched" in finding.text for finding in examine(tmp_path))


def test_the_exit_status_tells_of_faults(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_LAB_RUNS", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert cli.main(["doctor"]) == 1
