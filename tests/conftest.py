"""What every test relies on: no hub look-ups, figures drawn without a screen, kernels that run without a GPU, seeds."""

import functools
import gc
import os
import random
import re
import signal
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: a second thread costs more than it brings

import pytest
import torch

# Another in every run, the same in the processes of one run, where it stands in the tests' names
FRESH_SEED = int(os.environ.setdefault("GRPO_LAB_TEST_SEED", str(random.randrange(10**6))))
# A suite that a shell started in the background ignores interrupts, and so would the processes that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when grpo_lab.kernels is imported


def pytest_collection_finish():
    """A million objects of libraries outlive the tests: the collections that tests make, by the dozen, skip them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under ``-n 2`` a test goes to whichever process is free. The tests of a file with a fixture for all of them go
    together, so that it is made once, and so do those of a notebook; these groups come first.

    By their names: the mark xdist_group is without effect since pytest 9.2 (pytest-xdist, issue 1386).
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def shares_a_fixture(file):
        return re.search(r'\bscope="(module|session)"', (config.rootpath / file).read_text(encoding="utf-8"))

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if file.endswith("test_notebooks.py"):  # a fixture for each notebook
                return test.partition("[")[2] or test
            return file if shares_a_fixture(file) else nodeid

    return Scheduling(config, log)


@pytest.fixture
def seed(request):
    """Seeds torch with a number of the test's own: the same in every run, another for every parameter."""
    seed = zlib.crc32(request.node.name.encode())
    torch.manual_seed(seed)
    return seed
