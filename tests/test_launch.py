"""Launching for real: accelerate's launcher, two ranks that talk through gloo, faults, interrupts, the config files."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_lab import launch as module
from grpo_lab.doctor import explain_failure
from grpo_lab.launch import CONFIGS, LaunchError, launch, run_command
from grpo_lab.runs import load_run, open_run, read_metrics

TRAINING = Path(__file__).with_name("launched_training.py")
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
RANKS = """
import os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} speaks")
for step in range(1, 4):
    dist.all_reduce(torch.ones(2))
    print(f"step {step}/3  loss 1")
if rank == 1:
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raise":
        raise ValueError("rank one dislikes this")
dist.barrier()  # the others sit in a collective
dist.destroy_process_group()
"""
TREE = """
import subprocess, sys, time
sleeps, own = "import time; time.sleep(100)", dict(start_new_session=True)
ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if "9" in sys.argv else ""
subprocess.Popen([sys.executable, "-c", ignores + sleeps], **own)
subprocess.Popen(["sleep", "100"], **own)
print("up", flush=True)
time.sleep(100)
"""


@pytest.fixture
def ranks(tmp_path):
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    return path


def test_a_rank_that_dies_ends_all_and_is_named(ranks, capsys):
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        launch(ranks, "kill", config="cpu_2")
    assert time.monotonic() - began < 60
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert caught.value.lines == ["rank 1 speaks", *(f"step {i}/3  loss 1" for i in (1, 2, 3))]
    assert explain_failure(caught.value)[0] == "rank died"
    lines = capsys.readouterr().out.splitlines()
    assert {"rank 0 speaks", "step 1/3  loss 1"} <= set(lines) and "rank 1 speaks" not in lines
    assert not any("elastic" in line for line in lines), "the launcher's own words are not shown"


def test_on_two_machines_both_stop_and_the_one_at_fault_names_its_rank(ranks, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shipped = yaml.safe_load((CONFIGS / "fsdp_nodes.yaml").read_text())
    shipped |= dict(distributed_type="MULTI_GPU", fsdp_config=None, use_cpu=True, num_processes=2, mixed_precision="no")
    config = tmp_path / "nodes.yaml"
    config.write_text(yaml.safe_dump(shipped | {"main_process_port": port}))
    code = f"""import sys; from grpo_lab.launch import launch
launch({str(ranks)!r}, "raise", config={str(config)!r}, options=("--machine_rank", sys.argv[1]))"""
    began = time.monotonic()
    machines = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=-1, stderr=-2, text=True) for rank in (0, 1)
    ]
    first, second = (machine.communicate(timeout=100)[0] for machine in machines)
    assert time.monotonic() - began < 60
    assert "LaunchError: rank 1 of 2 ended with exit code 1; its last lines" in second
    assert second.strip().endswith("ValueError: rank one dislikes this")
    assert "LaunchError: rank 0 of 2 ended with exit code 1 because another rank was gone" in first


@pytest.mark.parametrize("code, how", [
    ("raise SystemExit(7)", "the process ended with exit code 7; its last lines:\n  before"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the process was killed by SIGKILL"),
])  # fmt: skip
def test_a_single_process_that_fails_is_named_too(tmp_path, capsys, code, how):
    (tmp_path / "one.py").write_text(f"print('before')\n{code}\n")
    config = tmp_path / "one.yaml"
    config.write_text((CONFIGS / "gpu_1.yaml").read_text().replace("bf16", "'no'") + "use_cpu: true\n")
    with pytest.raises(LaunchError) as caught:
        launch(tmp_path / "one.py", config=config)
    assert how in str(caught.value) and "accelerate" not in str(caught.value)
    assert "accelerate" not in capsys.readouterr().out, "the launcher's own traceback is not shown"


@pytest.mark.parametrize("status", [1, -signal.SIGABRT, -signal.SIGTERM])
def test_the_rank_with_an_exception_is_named_however_it_was_ended_and_its_words_come_last(status):
    output, mark = module._Output(2), module.MARK
    said = "W1130 12:00:00.000000 1 torch/distributed/elastic/multiprocessing/api.py] Sending process 7 SIGTERM"
    for line in (
        f"{mark}1{mark}[rank1]: Traceback (most recent call last):",
        f"{mark}1{mark}[rank1]: ValueError: no",
        f"{mark}1{mark}what it said before",
        f"{mark}1{mark}terminate called without an active exception" if status == -signal.SIGABRT else said,
        f"{mark}0{mark}[rank0]: Traceback (most recent call last):",
        f"{mark}0{mark}[rank0]: RuntimeError: gloo: Connection closed by peer",
        said,
        "Traceback (most recent call last):",
        "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 6)",
        f"  rank      : 1 (local_rank: 1)\n  exitcode  : {int(status)} (pid: 7)",
    ):
        output.line(line)
    error = output.error(1)
    assert error.rank == 1 and str(error).startswith("rank 1 of 2 ended with exit code 1; its last lines:")
    assert error.lines[-2:] == ["[rank1]: Traceback (most recent call last):", "[rank1]: ValueError: no"]


def test_a_launcher_that_cannot_start_says_why(ranks):
    with pytest.raises(LaunchError, match="unrecognized arguments: --nonsense") as caught:
        launch(ranks, "end", config="cpu_2", options=("--nonsense",))
    assert caught.value.rank is None


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_interrupt_or_the_kernel(tmp_path, end):
    (tmp_path / "tree.py").write_text(TREE)
    code = f"""import sys; from grpo_lab.launch import run_command
run_command([sys.executable, {str(tmp_path / "tree.py")!r}, {end.value}], lambda line: print(line, flush=True))"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert kernel.stdout.readline() == "up\n"
    started = psutil.Process(kernel.pid).children(recursive=True)
    assert len(started) == 4
    kernel.send_signal(end)
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in kernel.communicate(timeout=20)[1]
        assert not [p for p in started if p.is_running()], "when the cell has ended, they have"
    else:
        kernel.communicate(timeout=20)
        assert not psutil.wait_procs(started, timeout=20)[1]


def test_lines_arrive_while_the_command_runs():
    arrived = []
    code = "import time; print('a', flush=True); time.sleep(1); print('b'); raise SystemExit(3)"
    assert run_command([sys.executable, "-c", code], lambda line: arrived.append((line, time.monotonic()))) == 3
    assert [line for line, _ in arrived] == ["a", "b"] and arrived[1][1] - arrived[0][1] > 0.5


def test_a_bar_is_drawn_in_place_and_its_text_is_no_line_of_the_error(monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(module, "progress_bar", lambda: "bar")
    monkeypatch.setattr(module, "show_progress", lambda *args: drawn.append(args))
    output, mark = module._Output(2), module.MARK
    for line in ("step 2/4  loss 1", " 40%|####      | 4/10 [00:01<00:01,  3.9it/s]", "plain"):
        output.line(f"{mark}0{mark}{line}")
        output.spoke = 0
    output.line(f"{mark}0{mark}in {mark}1{mark}other {mark}0{mark}two parts")
    assert [args[1:3] for args in drawn] == [(2, 4), (4, 10)]
    assert capsys.readouterr().out == "plain\nin two parts\n"
    assert list(output.ranks[0]) == ["step 2/4  loss 1", "plain", "in two parts"]


def test_requests_that_cannot_be_met_are_refused(ranks, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="config = 'fsdp_3': expected one of cpu_2, ddp_2, ddp_8, fsdp_2"):
        launch(ranks, config="fsdp_3")
    with pytest.raises(ValueError, match="script = .*no.py': no such file"):
        launch(tmp_path / "no.py", config="cpu_2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="config = 'fsdp_8' needs 8 GPUs and 4 can be seen here"):
        launch(ranks, config="fsdp_8")


def test_memory_that_the_kernel_holds_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (0, 3 << 30)[device])
    with pytest.warns(
        UserWarning, match="holds 3.0 GiB of GPU 1, which the processes it starts cannot use.*gc.collect"
    ):
        module._check_gpus(2, "fsdp_2")


def launched_environment(name, monkeypatch, *more):
    """What the ranks of ``accelerate launch --config_file`` would have in their environment, by accelerate itself."""
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import launch as utils

    parser = accelerate_launch.launch_command_parser()
    arguments = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--main_process_port", "0", *more, "train.py"]
    args, defaults, _ = accelerate_launch._validate_launch_command(parser.parse_args(arguments))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return args, utils.prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp:
        return args, utils.prepare_multi_gpu_env(args)
    return args, utils.prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_each_config_file_as_what_it_is_called(name, monkeypatch):
    more = ("--machine_rank", "1") if name == "fsdp_nodes" else ()
    args, environment = launched_environment(name, monkeypatch, *more)
    kind, _, count = name.partition("_")
    machines = 2 if name == "fsdp_nodes" else 1
    assert args.num_processes == (16 if name == "fsdp_nodes" else int(count)) and args.num_machines == machines
    if args.num_processes > 1:
        assert int(args.nproc_per_node) == args.num_processes // machines
    if machines > 1:
        assert args.node_rank == 1 and args.rdzv_endpoint.startswith("127.0.0.1:")
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("no" if kind == "cpu" else "bf16")
    assert ("ACCELERATE_USE_FSDP" in environment) == (kind == "fsdp")
    assert ("ACCELERATE_USE_DEEPSPEED" in environment) == (kind == "zero3")
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    if kind == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import StateDictType
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
        assert plugin.auto_wrap_policy is transformer_auto_wrap_policy and plugin.transformer_cls_names_to_wrap is None
        assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
        assert not plugin.activation_checkpointing and not plugin.cpu_ram_efficient_loading
    if kind == "zero3":
        expected = {"ZERO_STAGE": "3", "ZERO3_INIT": "true", "ZERO3_SAVE_16BIT_MODEL": "true"}
        expected |= {"OFFLOAD_OPTIMIZER_DEVICE": "none", "OFFLOAD_PARAM_DEVICE": "none"}
        assert {key: environment[f"ACCELERATE_DEEPSPEED_{key}"] for key in expected} == expected


def test_config_files_are_part_of_the_package():
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"] == {"grpo_lab": ["configs/*.yaml"]} and len(NAMES) == 9


def curves(folder):
    names = ("step", "loss", "grad_norm", "reward", "entropy", "kl")
    return [
        {name: row.get(name) for name in names} for row in read_metrics(folder / "metrics.jsonl") if "reward" in row
    ]


def trained(root, *words):
    """A run as a notebook has it, trained by two launched processes."""
    run = open_run("07_toy", {"seed": 0}, root)
    with run:
        launch(TRAINING, run.folder, 6, *words, config="cpu_2")
        run.finish({})
    return run.folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("unbroken"))


def test_a_killed_rank_is_named_and_the_same_launch_ends_as_an_unbroken_one(tmp_path, capsys, unbroken):
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        trained(tmp_path, "kill-5")
    (folder,) = tmp_path.iterdir()
    assert load_run(folder).status["reason"] == "rank died"
    assert trained(tmp_path) == folder and load_run(folder).status["status"] == "finished"
    out = capsys.readouterr().out
    assert "2 processes, from None" in out and f"2 processes, from {folder}/checkpoint-4" in out
    assert "step 6/6  loss" in out, "progress is shown"
    assert "in a group at the end: False" in out, "a script need not know that gloo might abort it"
    assert curves(folder) == curves(unbroken) and [row["step"] for row in curves(folder)] == [1, 2, 3, 4, 5, 6]
    weights, expected = (load_file(path / "policy" / "model.safetensors") for path in (folder, unbroken))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert json.loads((folder / "receipt.json").read_text())["passed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch would take the GPUs for FSDP")
def test_fsdp_2_of_the_shipped_file_trains_resumes_and_has_its_reference_model(tmp_path, monkeypatch, unbroken):
    monkeypatch.setattr(module, "_check_gpus", lambda *_: None)
    for steps in (2, 3):  # the second from checkpoint-2
        launch(TRAINING, tmp_path, steps, "fsdp", config="fsdp_2", options=("--mixed_precision", "no"))
    rows, expected = curves(tmp_path), curves(unbroken)[:3]
    assert expected[0]["kl"] == 0 and expected[2]["kl"] > 0
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, other in zip(rows, expected):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_that_uses_its_gpu_is_warned_and_the_launch_works_all_the_same(tmp_path, capsys):
    held = torch.zeros(1 << 28, device="cuda")  # 1 GiB
    (tmp_path / "one.py").write_text("import torch; print('on', torch.zeros(1, device='cuda').device)")
    with pytest.warns(UserWarning, match=r"this process holds 1\.\d GiB of GPU 0"):
        launch(tmp_path / "one.py", config="gpu_1")
    assert "on cuda:0" in capsys.readouterr().out and len(held)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", ["fsdp_2", "ddp_2"])
def test_on_two_gpus_a_killed_rank_ends_all_within_a_minute_and_training_resumes(tmp_path, config):
    with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(TRAINING, tmp_path, 6, "kill-5", config=config)
    assert time.time() - read_metrics(tmp_path / "metrics.jsonl")[-1]["time"] < 60
    launch(TRAINING, tmp_path, 6, config=config)
    assert [row["step"] for row in curves(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert curves(tmp_path)[0]["kl"] < 1e-3 and (tmp_path / "policy" / "model.safetensors").exists()
