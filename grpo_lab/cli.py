"""The command line: ``python -m grpo_lab run 06 -p seed 3 -f params.yaml`` executes a notebook into its run folder.

``sweep 06 -g seed 0 1 2`` executes it with many (``runs/sweep.py``), ``compare RUNS...`` lays runs over one another
(``runs/compare.py``), ``bench`` measures loss heads side by side (``bench/``), ``predict`` says whether a training step
fits a card (``step_memory.py``), ``doctor`` looks this machine over, ``clock`` times the notebooks, ``exercises``
writes the exercise notebooks, and ``progress FOLDER...`` prints who has passed which.

papermill does the executing, in the notebooks' folder as JupyterLab does; the folder is the one that ``open_run`` in
the notebook names, so the same parameters again show a finished run and resume an interrupted one.
"""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

from grpo_lab.doctor import CLONE, examine, explain_failure, gpu_memory
from grpo_lab.lessons.exercises import write_exercises
from grpo_lab.lessons.progress import collected, table
from grpo_lab.runs import Run, executing, find_run, load_run, make_folder, open_run, run_folder, run_status, set_aside
from grpo_lab.runs.executed import to_html
from grpo_lab.runs.parameters import merged_parameters, notebook_parameters


def find_notebook(name):
    """The notebook's path for ``06``, ``06_train_single_gpu`` or a path. Raises ValueError where there is not one."""
    given, folder = Path(name), CLONE / "notebooks"
    if given.suffix == ".ipynb" and given.is_file():
        return given.resolve()
    if not folder.is_dir():
        raise ValueError(f"notebook = {name!r}: no notebooks lie beside the package in {CLONE}, since it was installed "
                         "without its repository; clone that and run `pip install -e .` there, or give the path of "
                         "an .ipynb file")  # fmt: skip
    found = sorted(folder.glob(f"{given.stem}*.ipynb")) if given.name == name else []
    if len(found) != 1:
        names = ", ".join(p.stem for p in found or sorted(folder.glob("*.ipynb")))
        what = "more than one begins so" if found else "no such notebook"
        raise ValueError(f"notebook = {name!r}: {what}; expected one of {names}, or the path of an .ipynb file")
    return found[0]


def show(folder):
    """Print what a finished run found and where it lies."""
    record = load_run(folder)
    summary = {k: v for k, v in (record.summary or {}).items() if v is None or isinstance(v, (str, int, float))}
    text = {k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in summary.items()}
    for name, value in text.items():
        stem = name.removesuffix("_before")
        if stem != name and f"{stem}_after" in text:
            print(f"  {stem}: {value} before, {text[f'{stem}_after']} after")
        elif not (name.endswith("_after") and name.removesuffix("_after") + "_before" in text):
            print(f"  {name}: {value}")
    print(f"  took: {record.status.get('seconds', '?')} s")
    here = Path.cwd()
    for path in [*(path for kind in ("ipynb", "html", "png") for path in sorted(folder.glob(f"*.{kind}"))), folder]:
        print(f"  {path.relative_to(here) if path.is_relative_to(here) else path}")


def code_of(notebook):
    """The sources of a notebook's code cells, without what papermill has put in; None where there is no whole one."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        own = [cell for cell in cells if "injected-parameters" not in cell["metadata"].get("tags", [])]
        return ["".join(cell["source"]) for cell in own if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def execute(path, folder, params, given):
    """Execute the notebook into ``folder``; the exit status, with one line that says what failed and what to do."""
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError

    output = folder / path.name
    failure = None
    try:
        options = {
            "kernel_name": "python3",
            "language": "python",
            "cwd": path.parent,
            "progress_bar": False,
            "extra_arguments": ["--log-level=ERROR"],  # else each kernel warns that its local sockets are not encrypted
            "stdout_file": sys.stdout,
        }
        papermill.execute_notebook(path, output, given, **options)
    except papermill.PapermillExecutionError as error:
        message = f"{error.ename}: {error.evalue}"
        failure = *explain_failure(type(error.ename, (Exception,), {})(error.evalue), folder), message
    except DeadKernelError as error:
        remedy = explain_failure(MemoryError())[1]
        failure = "kernel died", "Most often the system ended it for want of memory. " + remedy, str(error)
    except (RuntimeError, NoSuchKernel) as error:  # what jupyter_client says of a kernel that does not start
        remedy = "`jupyter kernelspec list` shows which python3 there is, `python -m grpo_lab doctor` what is missing."
        failure = "no kernel", remedy, str(error)
    except KeyboardInterrupt as error:
        failure = *explain_failure(error), "stopped from the keyboard"
    except OSError as error:
        failure = *explain_failure(error, folder), str(error)
    status = run_status(folder)
    if failure is None and status.get("status") == "finished":
        return 0
    if failure is None and not status and "open_run(" not in path.read_text(encoding="utf-8"):
        open_run(path.stem, params, folder.parent).finish({})
        return 0
    if failure is None:
        failure = "error", "Let the notebook hand open_run all of its parameters and call run.finish(summary).", (
            f"the notebook ended, and left its run {status.get('status', 'in another folder')}")  # fmt: skip
    if not status:
        open_run(path.stem, params, folder.parent).fail(*failure)
    elif status["status"] == "running" and not executing(folder):
        Run(folder, "interrupted").fail(*failure)
    reason, remedy, message = failure
    lines = message.strip().splitlines() or [""]
    print(f"{path.stem}: {reason}: {lines[0]}\n  {remedy}\n  {output}", file=sys.stderr)
    return 130 if reason == "interrupted" else 1


def run(arguments):
    path = find_notebook(arguments.notebook)
    defaults = notebook_parameters(path)
    given = merged_parameters(defaults, arguments.file, arguments.parameter)
    params = defaults | given
    folder = run_folder(path.stem, params, Path(arguments.root).resolve() if arguments.root else "runs")
    deadline = time.monotonic() + 3.0  # a kernel whose command was killed lives on for about a second
    while (other := executing(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if other:
        raise ValueError(f"{other} is executing this run in {folder}; wait for it, or change a parameter")
    if arguments.fresh and folder.exists():
        print(f"earlier run: {set_aside(folder)}")
    status, html = find_run(folder, params), (folder / path.name).with_suffix(".html")
    finished = status.get("status") == "finished"
    if status and (before := code_of(folder / path.name)) and before != code_of(path):
        print(f"{path.stem}: its code has changed since these parameters were run; --fresh runs it anew")
    if finished and (html.exists() or not (folder / path.name).exists() or not os.access(folder, os.W_OK)):
        print(f"{path.stem} has finished with these parameters (--fresh runs it anew):")
    else:
        how = ", finished, but for its executed notebook" if finished else ", resuming" if status else ""
        print(f"{path.stem} -> {folder}{how}", flush=True)
        os.environ |= {
            "GRPO_LAB_RUNS": str(folder.parent),
            "GRPO_LAB_HEADLESS": "1",
            "GRPO_LAB_COMMAND": shlex.join(["python", "-m", "grpo_lab", *sys.argv[1:]]),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else each kernel prints the debugger's start-up advice
        }
        make_folder(folder)
        html.unlink(missing_ok=True)  # from here to the end its absence tells that the notebook beside it may be cut
        code = execute(path, folder, params, given)
        try:
            to_html(folder / path.name)
        except (OSError, ValueError) as error:
            print(f"  no HTML copy: {str(error).splitlines()[0]}", file=sys.stderr)
        if code:
            return code
        print(f"{path.stem} has finished:")
    show(folder)
    return 0


def run_sweep(arguments):
    from grpo_lab.runs.sweep import parameter_sets, sweep  # needs psutil, which `doctor` does not

    path, root = find_notebook(arguments.notebook), Path(arguments.root).resolve() if arguments.root else "runs"
    grid = {name: values for name, *values in arguments.grid}
    if len(grid) < len(arguments.grid):
        raise ValueError("-g: a name is given twice; expected all of its values after one, as -g seed 0 1 2")
    if empty := [name for name, values in grid.items() if not values]:
        raise ValueError(f"-g {empty[0]}: expected a name and its values, as -g seed 0 1 2")
    sets = parameter_sets(notebook_parameters(path), arguments.file, arguments.parameter, grid, arguments.list)
    options = None
    if arguments.submitit is not None:
        pairs = [option.partition("=")[::2] for option in arguments.submitit]
        options = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    gpus = range(len(gpu_memory())) if arguments.gpus == ["all"] else arguments.gpus
    if arguments.gpus and not gpus:
        raise ValueError("--gpus all: nvidia-smi lists none; without --gpus the runs follow one another")
    try:
        runs = sweep(path, sets, root, gpus, options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return int(not all(run.finished for run in runs))


def main(argv=None):
    """Exit status 0 for a finished run, 1 for a failed one, 2 for a request that cannot be met, 130 when stopped."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:  # it reads its own options: `run` must not wait until torch is imported
        from grpo_lab.bench.command import main as bench

        return bench(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m grpo_lab", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="execute a notebook into its run folder, or show the finished run")
    command.add_argument("notebook", help="06, 06_train_single_gpu, or the path of an .ipynb file")
    command.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    command.add_argument("-f", "--file", action="append", default=[], help="YAML file of parameters; -p overrides it")
    command.add_argument("--root", help="folder of the run folders (default: $GRPO_LAB_RUNS, else the clone's runs/)")
    command.add_argument("--fresh", action="store_true", help="set an earlier run of these parameters aside")
    command = commands.add_parser("sweep", help="execute a notebook with many sets of parameters")
    command.add_argument("notebook", help="06, 06_train_single_gpu, or the path of an .ipynb file")
    command.add_argument("-g", "--grid", nargs="+", action="append", default=[], metavar=("NAME", "VALUE"))
    command.add_argument("--list", help="YAML file with a list of sets of parameters, each combined with the grid")
    command.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    command.add_argument("-f", "--file", action="append", default=[], help="YAML file of parameters for all runs")
    command.add_argument("--root", help="folder of the run folders (default: $GRPO_LAB_RUNS, else the clone's runs/)")
    command.add_argument("--gpus", nargs="+", default=[], metavar="N", help="one run on each: 0 1 2, or all")
    jobs = "as jobs of a cluster: slurm_partition=gpu timeout_min=240 gpus_per_node=1"
    command.add_argument("--submitit", nargs="*", metavar="OPTION=VALUE", help=jobs)
    command = commands.add_parser("compare", help="curves, differences, memory, throughput and receipts of runs")
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that hold some")
    command.add_argument("--key", default="reward", help="the logged quantity that is drawn and tabled")
    command.add_argument("--out", default="comparison", help="folder for tables and pictures (default: %(default)s)")
    commands.add_parser("bench", help="measure loss heads side by side (bench -h lists its options)")
    command = commands.add_parser(
        "predict", help="the memory of a training step, and whether it fits, before it is run"
    )
    command.add_argument("--model", default="Qwen3-4B", help="a model of the bench, a folder or a hub id (%(default)s)")
    command.add_argument("--batch", type=int, nargs="+", default=[64], metavar="B", help="sequences of a GPU (64)")
    command.add_argument("--card", type=float, default=80, metavar="GB", help="memory of a GPU (80)")
    command.add_argument("--processes", type=int, default=1, help="GPUs that FSDP shards the model over (1)")
    command.add_argument("--impl", choices=["chunked", "naive", "no head"], default="chunked", help="(%(default)s)")
    command.add_argument("--tuning", choices=["full", "lora"], default="full", help="(%(default)s)")
    command.add_argument("--rank", type=int, default=16, help="of lora (16)")
    command.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(%(default)s)")
    command.add_argument("--prompt", type=int, default=128, help="tokens (128)")
    command.add_argument("--completion", type=int, default=512, help="tokens (512)")
    command.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="keep all activations")
    commands.add_parser("doctor", help="what this machine has and lacks for the notebooks, each fault with its repair")
    command = commands.add_parser("clock", help="measure time and memory of the notebooks for the README's ladder")
    command.add_argument("numbers", nargs="*", help="00, 05, ... (default: those that have changed)")
    commands.add_parser("exercises", help="write notebooks/exercises/ from the solved notebooks")
    command = commands.add_parser("progress", help="who has passed which exercise, from the students' progress files")
    command.add_argument("paths", nargs="+", metavar="FOLDER", help="a folder of progress files, or one such file")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "clock":
            from grpo_lab.lessons import clock

            return clock.main(arguments.numbers)
        if arguments.command == "doctor":
            return int(any(finding.level == "FAULT" for finding in examine()))
        if arguments.command == "predict":
            from grpo_lab.step_memory import report

            options = {name: value for name, value in vars(arguments).items() if name not in ("command", "batch")}
            report(batches=arguments.batch, **options)
            return 0
        if arguments.command == "exercises":
            print(*(path.relative_to(CLONE) for path in write_exercises()), sep="\n")
            return 0
        if arguments.command == "progress":
            print(table(collected(arguments.paths)))
            return 0
        if arguments.command == "compare":
            from grpo_lab.runs.compare import compare

            compare(arguments.runs, arguments.out, arguments.key)
            return 0
        if arguments.command == "sweep":
            return run_sweep(arguments)
        return run(arguments)
    except ModuleNotFoundError as error:
        remedy = "`source .venv/bin/activate` if make has installed it, else `python -m grpo_lab doctor` says how to"
        print(f"error: {sys.executable} has no package {error.name}: {remedy}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
