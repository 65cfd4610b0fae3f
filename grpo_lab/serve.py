"""A vLLM server beside the trainer: started on GPUs of its own, waited for, and ended with the block that needs it.

    with VllmServer("Qwen/Qwen3-0.6B", gpus="1") as server:
        config = GRPOConfig(..., **server.config)
        GRPOTrainer(..., args=config).train()

The command is TRL's own (``trl.scripts.vllm_serve``), so that its trainers find what they expect; weights are sent by
TRL. Nothing outlives the block, an interrupt or the kernel (``guard.py``). In a notebook ``start()`` and ``stop()`` do
the same, and the object itself is a button.
"""

import contextlib
import ipaddress
import re
import socket
import subprocess
import threading
import time
import urllib.request
import warnings
from collections import deque
from pathlib import Path

from grpo_lab import guard
from grpo_lab.launch import KEPT, child_environment
from grpo_lab.runs import progress_bar, show_progress


class ServerError(RuntimeError):
    """A server that did not start, or that died. ``lines``: the last that it wrote; ``exit_code``: None if it hung."""

    def __init__(self, message, exit_code, lines):
        super().__init__("\n".join([message, *("  " + line for line in lines)]))
        self.exit_code, self.lines = exit_code, lines


class Server:
    """A command that serves HTTP at ``url``, healthy when ``url/health`` answers 200.

    Context manager: starts it, waits, and ends it with all of its processes. An error that the block raises because the
    server has died becomes a ServerError with its last lines.
    """

    name = "the server"

    def __init__(self, command, url, env=None, timeout=600.0):
        self.command, self.url, self.env, self.timeout = command, url, env, timeout
        self.process, self.lines = None, deque(maxlen=KEPT)

    def start(self):
        """Start and wait until it is healthy. Raises ServerError the moment it dies, or after ``timeout`` seconds, and
        ValueError where another server answers at ``url``."""
        if self.running:
            return self
        if self._healthy():  # it would be taken for this one, while this one fails
            raise ValueError(f"another server answers at {self.url} already: end that one, or take another port")
        self.lines.clear()
        self.process = guard.start(self.command, self.env)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self):
        """End it, with whatever it has started. Nothing happens if it does not run."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    @property
    def running(self):
        return self.process is not None and self.process.poll() is None

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, error, traceback):
        code = None
        if isinstance(error, Exception) and self.process is not None and not self._healthy():
            with contextlib.suppress(subprocess.TimeoutExpired):  # its guard ends what it has left behind first
                code = self.process.wait(guard.GRACE + 1)
        self.stop()
        if code is not None:
            raise self._died(code, "during the run") from error

    def _read(self, process):
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _wait(self):
        began = spoke = time.monotonic()
        bar = progress_bar()
        while not self._healthy():
            code, now = self.process.poll(), time.monotonic()
            if code is not None:
                raise self._died(code, "before it answered")
            if now - began > self.timeout:
                message = f"{self.name} has not answered at {self.url}/health in {self.timeout:.0f} s. Its last lines:"
                raise ServerError(message, None, list(self.lines))
            last = self.lines[-1] if self.lines else "starting"
            text = f"{self.name}: {now - began:.0f} s  {last[-100:]}"
            if bar:
                show_progress(bar, int(now - began), int(self.timeout), text)
            elif now - spoke >= 5:
                spoke = now
                print(text, flush=True)
            time.sleep(0.2)
        print(f"{self.name} answers at {self.url} after {time.monotonic() - began:.0f} s", flush=True)

    def _healthy(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return answer.status == 200
        return False

    def _died(self, code, when):
        time.sleep(0.2)  # for the thread that reads what it wrote last
        return ServerError(f"{self.name} died {when}, exit code {code}; its last lines:", code, list(self.lines))

    def _ipython_display_(self):
        import ipywidgets
        from IPython.display import display

        button, state = ipywidgets.Button(), ipywidgets.Label()

        def show():
            button.description = "Stop the server" if self.running else "Start the server"
            state.value = f"{self.name}: " + (f"answers at {self.url}" if self.running else "does not run")

        def pressed(_):
            self.stop() if self.running else self.start()
            show()

        button.on_click(pressed)
        show()
        display(ipywidgets.HBox([button, state]))


class VllmServer(Server):
    """vLLM's server as TRL's trainers use it.

    Args:
        model: an id on the hub, or a folder: a run's checkpoint or its saved policy.
        gpus: indices of the GPUs that it runs on, as CUDA_VISIBLE_DEVICES takes them; one tensor-parallel rank each.
        memory: the share of each GPU that it takes. max_model_len: tokens of prompt and completion together.
        port: None for a free one. host: loopback, unless others are to reach it.
        eager: no CUDA graphs: a quicker start, slower generation.
        dtype: "auto" or vLLM's word for one. options: more options of ``vllm serve``. timeout: seconds that it may
        take to start.

    ``config`` holds the fields of GRPOConfig that point to it, for one trainer: the next one reads it anew.

    Raises:
        ImportError: no vLLM, or one that TRL does not support. ValueError: a folder that holds no model, a port in
        use, GPUs that are not there or have too little free memory.
    """

    def __init__(
        self, model, *, gpus="0", memory=0.9, max_model_len=None, port=None, host="127.0.0.1", eager=False,
        dtype="auto", options=(), timeout=600.0,
    ):  # fmt: skip
        from trl.scripts.vllm_serve import ScriptArguments, build_command

        from grpo_lab.rollouts import check_vllm

        check_vllm()
        model, gpus = check_model(model), str(gpus)
        _check_gpus(gpus, memory)
        if not is_loopback(host):
            warnings.warn(f"host={host!r}: whoever reaches this port can replace the weights, since the development "
                          "endpoints that TRL needs ask for no password. Keep 127.0.0.1, or a firewall before it",
                          stacklevel=2)  # fmt: skip
        port = _free_port(host) if port is None else port
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                raise ValueError(f"port = {port} is in use on {host}: end what listens there, or leave port out")
        self.host = host
        arguments = ScriptArguments(
            model=model, dtype=dtype, host=host, port=port, gpu_memory_utilization=memory,
            tensor_parallel_size=len(gpus.split(",")), max_model_len=max_model_len, enforce_eager=eager,
            log_level="warning",
        )  # fmt: skip
        env = child_environment()
        env |= {"CUDA_VISIBLE_DEVICES": gpus, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        super().__init__(build_command(arguments, list(options)), f"http://{host}:{port}", env, timeout)
        self.name = f"vLLM with {Path(model).name} on GPU {gpus}"
        self.lines = deque(maxlen=4 * KEPT)  # the engine's traceback stands before its front end's, as long as KEPT

    @property
    def config(self):
        port = _free_port(self.host)  # one trainer's group of weights keeps its port until the process ends
        return dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=self.url, vllm_group_port=port)


def check_model(name):
    """``name`` with ~ expanded. Raises ValueError for a folder that holds no model; an id on the hub is let through."""
    folder = Path(name).expanduser()
    if not (folder.is_absolute() or str(name).startswith((".", "~")) or folder.exists()):
        return str(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model = {str(name)!r}: no config.json there; give a folder that save_model or a checkpoint "
                         "has written, or the id of a model on the hub")  # fmt: skip
    return str(folder)


def check_free(gpu, memory, share, name):
    """Raises ValueError where a GPU whose ``memory`` is (free, total) bytes has less free than vLLM is to take."""
    free, total = (size / 2**30 for size in memory)
    if free < share * total:
        raise ValueError(
            f"{name} = {share} asks for {share * total:.0f} GiB, and {free:.0f} of {total:.0f} GiB of {gpu} are free: "
            f"end what holds the rest (nvidia-smi lists it), or lower {name}"
        )


def is_loopback(host):
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _free_port(host):
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def _check_gpus(gpus, memory):
    """Raises ValueError for GPUs that are not there, or have less free memory than is asked for."""
    from grpo_lab.doctor import gpu_memory

    found = gpu_memory()
    for index in gpus.split(","):
        if not re.fullmatch(r"\d+", index):  # a UUID, or an instance of a divided GPU
            continue
        if int(index) >= len(found):
            raise ValueError(f"gpus = {gpus!r}: there is no GPU {index}; nvidia-smi lists {len(found)}")
        check_free(f"GPU {index}", [gib * 2**30 for gib in found[int(index)]], memory, "memory")
