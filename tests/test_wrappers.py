"""Rows of ``wrappers.py`` on a CPU: two gloo processes against one, under every wrapper that runs there."""

import subprocess
import sys

import pytest
import wrappers

ROWS = """
ddp/full/sequence        ddp/lora-head/no_sync        ddp/saved-head          ddp/qlora
fsdp1/full/no_sync       fsdp1/lora-head/sequence     fsdp1/saved-head        fsdp1/full/checkpointing
fsdp1-flat/full          fsdp1-flat/lora-head         fsdp1-flat/saved-head   fsdp1-flat/full/bf16
fsdp2/tied               fsdp2/lora-head/no_sync      fsdp2/saved-head        fsdp2/full/offload      fsdp2/qlora
fsdp2-parts/tied         fsdp2-parts/lora-head/bf16   fsdp2-parts/saved-head  fsdp2-parts/full/sequence
fsdp2-parts/lora         fsdp2-parts/lora-head/checkpointing                  hsdp/saved-head         hsdp/lora-head
zero2/full               zero2/lora-head              zero3/full/sequence     zero3/tied              zero3/qlora
zero3/lora-head          zero3/saved-head             zero3/full/bf16         zero3/lora-head/offload
ddp/dora-head            ddp/quantised-head           tensor-parallel/full    fsdp2/checkpointed-head
trainer-ddp/full         trainer-ddp/lora-head        trainer-fsdp2/tied      trainer-fsdp2/full/bf16
trainer-fsdp2/lora-head  trainer-fsdp2/saved-head     trainer-zero3/full      trainer-zero3/saved-head
""".split()


@pytest.fixture(scope="module")
def table():
    """What the script printed of each row, and its errors."""
    command = [sys.executable, wrappers.__file__, "--cpu", *ROWS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = [[cell.strip() for cell in line.split("|")] for line in run.stdout.splitlines()]
    verdicts = {cells[0]: cells[-1] for cells in lines[1:]}
    assert (run.returncode == 0) == all(v == "ok" or v.startswith("skipped") for v in verdicts.values()), run.stderr
    return verdicts, run.stderr


@pytest.mark.parametrize("row", ROWS)
def test_two_ranks_are_one(table, row):
    verdicts, errors = table
    if verdicts[row].startswith("skipped"):
        pytest.skip(verdicts[row])
    assert verdicts[row] == "ok", errors


def test_a_row_that_fails_does_not_stop_the_others():
    results = {result["row"]: result["verdict"] for result in wrappers.run(["no-such/full", "ddp/tied"], "tiny", True)}
    assert "KeyError: 'no'" in results["no-such/full"] and results["ddp/tied"] == "ok"
