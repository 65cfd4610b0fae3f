"""A script of a test's own, run by two processes that talk through gloo."""

import subprocess
import sys
from pathlib import Path


def run_on_two_ranks(source, folder, *arguments):
    """Runs ``source``, from ``folder``, with tests/ importable; returns what both ranks wrote to stdout."""
    script = Path(folder) / "two_ranks.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{source}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command = [*launcher, "--rdzv_endpoint=localhost:0", str(script), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def fsdp_on_a_cpu():
    """Lets accelerate take FSDP for processes on a CPU, which torch can do and accelerate reserves for accelerators.
    For a launched script, before it makes its GRPOConfig; a module of its own for what accelerate says of FSDP."""
    import os

    import trl
    from accelerate import state
    from accelerate.utils import DistributedType

    def gloo(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_GPU

    def not_told_of_the_cpu(self):
        self.use_cpu = False
        post_init(self)

    post_init, trl.GRPOConfig.__post_init__ = trl.GRPOConfig.__post_init__, not_told_of_the_cpu
    state.PartialState._prepare_backend = gloo
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
