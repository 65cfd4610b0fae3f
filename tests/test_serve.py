"""The server manager against real processes that serve HTTP: health, death, slow starts, taken ports, interrupts."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
import pytest

from grpo_lab import serve
from grpo_lab.doctor import explain_failure
from grpo_lab.runs import open_run, read_json
from grpo_lab.serve import Server, ServerError, VllmServer

# A server with a worker process, as vLLM has one: python server.py PORT SECONDS_UNTIL_HEALTHY SECONDS_UNTIL_DEATH
SCRIPT = """
import http.server, os, subprocess, sys, threading, time
port, start, death = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("worker", worker.pid, flush=True)

def die():
    time.sleep(death)
    print("CUDA error: out of memory", flush=True)
    os._exit(7)

threading.Thread(target=die, daemon=True).start()
began = time.time()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" and time.time() - began > start else 503)
        self.end_headers()
    def log_message(self, *args): pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SCRIPT)
    started = []

    def make(start=0.0, death=600.0, **options):
        port = serve._free_port("127.0.0.1")
        command = [sys.executable, script, port, start, death]
        started.append(Server(command, f"http://127.0.0.1:{port}", **options))
        return started[-1]

    yield make
    for one in started:
        one.stop()


def worker(server):
    return int(next(line for line in server.lines if line.startswith("worker")).split()[1])


def gone(*pids):
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    return True


def test_it_is_there_inside_the_block_and_gone_after_it(server, capsys):
    with server(start=0.5) as running:
        assert urllib.request.urlopen(running.url + "/health").status == 200 and running.running
        pids = running.process.pid, worker(running)
        assert running.start() is running and running.process.pid == pids[0]
    assert gone(*pids) and not running.running
    assert f"the server answers at {running.url} after" in capsys.readouterr().out


def test_a_server_that_dies_before_it_answers_is_not_waited_for(server):
    began = time.monotonic()
    with pytest.raises(ServerError, match="died before it answered, exit code 7") as error:
        server(start=60, death=1).start()
    assert time.monotonic() - began < 10 and error.value.exit_code == 7
    assert error.value.lines[-1] == "CUDA error: out of memory" and error.value.lines[-1] in str(error.value)
    assert gone(int(error.value.lines[0].split()[1]))


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(ServerError, match="exit code [1-9]"):
        Server([tmp_path / "no_such_program"], "http://127.0.0.1:9").start()


def test_one_that_never_answers_is_ended(server):
    with pytest.raises(ServerError, match="has not answered at .*/health in 3 s") as error:
        server(start=600, timeout=3.0).start()
    assert error.value.exit_code is None and gone(int(error.value.lines[0].split()[1]))


def test_progress_while_it_starts(server, capsys):
    with server(start=5.5):
        pass
    assert "the server: 5 s  worker" in capsys.readouterr().out


def test_one_that_dies_in_the_middle_is_named_as_the_cause(server, tmp_path):
    with pytest.raises(ServerError, match="died during the run, exit code 7") as error:
        with server(death=1.5) as running, open_run("08_toy", {}, tmp_path) as run:
            while True:
                urllib.request.urlopen(running.url + "/health").close()
                time.sleep(0.05)
    assert "CUDA error" in str(error.value) and isinstance(error.value.__cause__, OSError)
    assert read_json(run.folder / "status.json")["reason"] == "server unreachable"
    assert explain_failure(error.value)[0] == "server died"


def test_an_error_of_the_block_itself_stays_what_it_is(server):
    with pytest.raises(ZeroDivisionError):
        with server():
            1 / 0  # noqa: B018


def test_an_interrupt_ends_it(server):
    running = server()
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        with running:
            pids = running.process.pid, worker(running)
            time.sleep(30)
    assert gone(*pids)


def test_an_interrupt_while_it_starts_ends_it(server):
    running = server(start=60)
    pids = []

    def interrupt():
        pids.extend([running.process.pid, worker(running)])
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1.5, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        running.start()
    assert gone(*pids) and not running.running


def test_a_port_in_use(server):
    with server() as first:
        with pytest.raises(ValueError, match=f"another server answers at {first.url} already"):
            Server(first.command, first.url).start()
        assert first.running
    with socket.create_server(("127.0.0.1", 0)) as silent:  # taken in between, by what is no HTTP server
        silent.settimeout(0.1)
        port = silent.getsockname()[1]
        with pytest.raises(ServerError, match="died before it answered") as error:
            Server([*first.command[:2], port, 0, 60], f"http://127.0.0.1:{port}").start()
    assert any("Address already in use" in line for line in error.value.lines)


def test_it_does_not_outlive_a_kernel_that_is_killed(server, tmp_path):
    command = server().command
    kernel = tmp_path / "kernel.py"
    kernel.write_text(f"""
import os, signal
from grpo_lab.serve import Server
server = Server({[str(c) for c in command]!r}, "http://127.0.0.1:{command[2]}").start()
print(server.process.pid, server.lines[0].split()[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    done = subprocess.run([sys.executable, kernel], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert gone(*map(int, done.stdout.splitlines()[-1].split()))


def test_the_button(server, monkeypatch):
    import IPython.display

    shown, running = [], server()
    monkeypatch.setattr(IPython.display, "display", shown.append)
    running._ipython_display_()
    button, state = shown[0].children
    assert button.description == "Start the server" and "does not run" in state.value
    button.click()
    assert running.running and button.description == "Stop the server" and running.url in state.value
    button.click()
    assert not running.running and button.description == "Start the server"


@pytest.fixture
def vllm(monkeypatch):
    """As where vLLM is installed, on a machine with two GPUs: what its command line would be."""
    monkeypatch.setattr("grpo_lab.rollouts.check_vllm", lambda: None)
    monkeypatch.setattr("trl.scripts.vllm_serve.is_vllm_available", lambda min_version: True)
    monkeypatch.setattr("grpo_lab.doctor.gpu_memory", lambda: [(10.0, 80.0), (79.0, 80.0)])


def test_what_vllm_is_told(vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "config.json").write_text("{}")
    server = VllmServer(tmp_path, gpus="1", max_model_len=1024, eager=True, dtype="half",
                        options=["--seed", "5"])  # fmt: skip
    command = " ".join(server.command)
    assert f"serve {tmp_path} --host 127.0.0.1 --port {server.url.rpartition(':')[2]} " in command
    for expected in ("--tensor-parallel-size 1", "--dtype half", "--max-model-len 1024", "--enforce-eager", "--seed 5",
                     "--logprobs-mode processed_logprobs", '--weight-transfer-config {"backend": "nccl"}'):  # fmt: skip
        assert expected in command
    assert server.env["CUDA_VISIBLE_DEVICES"] == "1" and server.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "RANK" not in server.env and server.env["PATH"] == os.environ["PATH"]
    config = server.config
    assert config["vllm_server_base_url"] == server.url and config["vllm_group_port"] != int(server.url[-5:])
    with socket.create_server(("127.0.0.1", config["vllm_group_port"])):  # held by a trainer that is still there
        assert server.config["vllm_group_port"] != config["vllm_group_port"]


def test_what_it_cannot_serve_is_said_before_it_starts(vllm, tmp_path):
    with pytest.raises(ValueError, match="no config.json there"):
        VllmServer(tmp_path, gpus="1")
    with pytest.raises(ValueError, match="there is no GPU 2; nvidia-smi lists 2"):
        VllmServer("Qwen/Qwen3-0.6B", gpus="1,2")
    with pytest.raises(ValueError, match="memory = 0.9 asks for 72 GiB, and 10 of 80 GiB of GPU 0 are free"):
        VllmServer("Qwen/Qwen3-0.6B", gpus="0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port = {port} is in use on 127.0.0.1"):
            VllmServer("Qwen/Qwen3-0.6B", gpus="1", port=port)
    with pytest.warns(UserWarning, match="whoever reaches this port can replace the weights"):
        VllmServer("Qwen/Qwen3-0.6B", gpus="1", host="0.0.0.0")
