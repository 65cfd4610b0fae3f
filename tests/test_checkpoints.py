"""Whole checkpoints: the seal, what a power cut or a clock can do, and whose weights they are."""

import os
import signal
import time

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_utils import rotate_checkpoints

from grpo_lab.runs import files
from grpo_lab.runs.checkpoints import begin, check_model, in_order, is_whole, last_checkpoint, seal


def checkpoint(folder, step, shape=(3, 2)):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"a.weight": torch.zeros(shape)}, path / "model.safetensors")
    for name in ("optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (path / name).write_bytes(bytes(100))
    (path / "trainer_state.json").write_text("{}")
    return path


def test_between_begin_and_seal_there_is_no_checkpoint(tmp_path):
    path = checkpoint(tmp_path, 2)
    assert is_whole(path), "a script without seals: by its files"
    begin(path)
    assert last_checkpoint(tmp_path) is None
    seal(path, 2)
    assert last_checkpoint(tmp_path) == path
    begin(path)  # written once more
    assert last_checkpoint(tmp_path) is None


CUT = ("optimizer.pt", "rng_state_1.pth", "model.safetensors", "trainer_state.json", "whole.json")


@pytest.mark.parametrize("name", CUT)
def test_a_sealed_checkpoint_with_a_file_cut_or_gone_is_none(tmp_path, name):
    seal(checkpoint(tmp_path, 2), 2)
    seal(path := checkpoint(tmp_path, 4), 4)
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: len(whole) // 2])
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    (path / name).write_bytes(whole)
    assert last_checkpoint(tmp_path) == path
    if name != "whole.json":
        (path / name).unlink()
        assert last_checkpoint(tmp_path).name == "checkpoint-2"


def test_every_file_lies_on_the_disk_before_the_seal_does(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noting(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    path = checkpoint(tmp_path, 2)
    seal(path, 2)
    names = [os.path.basename(name) for name in synced]
    assert names[-1].startswith(".whole.json") and set(names[:-1]) == {
        "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json",
        "checkpoint-2", tmp_path.name,
    }  # fmt: skip


def test_after_the_clock_went_back_the_newest_checkpoint_is_not_the_one_deleted(tmp_path):
    for step in (10, 20):
        seal(checkpoint(tmp_path, step), step)
    newest = checkpoint(tmp_path, 30)
    os.utime(newest, (10**9, 10**9))  # by a clock of 2001
    rotate_checkpoints(str(tmp_path), save_total_limit=2, use_mtime=True)  # as transformers' Trainer calls it
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-20", "checkpoint-30"}


def test_in_a_folder_that_was_copied_the_newest_checkpoint_is_not_the_one_deleted(tmp_path):
    for step in (9, 10):
        checkpoint(tmp_path, step)  # of the time of the copy
    in_order(tmp_path)
    for step in (11, 12):
        newest = checkpoint(tmp_path, step)
        rotate_checkpoints(str(tmp_path), save_total_limit=2, use_mtime=True)
        seal(newest, step)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-11", "checkpoint-12"}


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a = torch.nn.Linear(2, width, bias=False)

    path = checkpoint(tmp_path, 2)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    check_model(path, Net(3))
    said = r"of another model: its a.weight is \(3, 2\), and this model has it as \(4, 2\)"
    with pytest.raises(ValueError, match=said) as error:
        check_model(path, Net(4))
    assert "\n" not in str(error.value) and "--fresh" in str(error.value)
    with pytest.raises(ValueError, match="this model has no such weight"):
        check_model(path, torch.nn.Linear(2, 3))
    assert before == {p.name: p.read_bytes() for p in path.iterdir()}


def test_a_lora_checkpoint_fits_its_model_and_no_other_rank(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(rank):
        return get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=rank, target_modules=["0"]))

    path = tmp_path / "checkpoint-1"
    adapted(2).save_pretrained(path)
    check_model(path, adapted(2))
    with pytest.raises(ValueError, match=r"of another model: .*lora_A.weight is \(2, 4\)"):
        check_model(path, adapted(3))
    with pytest.raises(ValueError, match="has no such weight"):
        check_model(path, torch.nn.Linear(4, 4))
    whole = LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"])
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    model = get_peft_model(torch.nn.Sequential(*layers), whole)
    model.save_pretrained(tmp_path / "checkpoint-2")
    check_model(tmp_path / "checkpoint-2", model)


def test_a_lock_is_the_process_s_and_survives_a_second_handle(tmp_path):
    assert files.lock(tmp_path) is None and files.lock(tmp_path) is None
    assert files.holder(tmp_path) is None, "its own"
    child = os.fork()
    if not child:  # a data loader's worker: it neither holds the lock nor drops it
        os._exit(int(files._take(open(tmp_path / ".lock", "r+"))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (tmp_path / ".lock").read_bytes()  # as a copy of the folder does
    worker = os.fork()
    if not worker:
        time.sleep(60)
    try:
        for free in (0, 1):
            child = os.fork()
            if not child:
                os._exit(int(files.lock(tmp_path) is None))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == free
            files.unlock(tmp_path)  # as if the process had died, and its worker not yet
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_json_that_is_none_names_its_file(tmp_path):
    (tmp_path / "a.json").write_text('{"cut')
    with pytest.raises(ValueError, match=r"a\.json cannot be read as JSON") as error:
        files.read_json(tmp_path / "a.json")
    assert "\n" not in str(error.value)
    assert files.read_json(tmp_path / "b.json") is None
