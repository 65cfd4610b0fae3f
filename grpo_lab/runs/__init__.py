"""The experiment: a run's folder, written while it trains, resumed, swept over parameters and compared.

``run.py`` opens and reads a run folder; ``callback.py`` writes its metrics and ``checkpoints.py`` keeps its checkpoints
whole; ``resuming.py`` is what TRL forgets of them; ``files.py`` writes so that a crash leaves no half of a file;
``parameters.py`` and ``executed.py`` are what papermill is given and leaves. ``sweep.py`` makes many runs,
``compare.py`` lays them over one another. The names below are what others need: ``from grpo_lab.runs import open_run``.
"""

from grpo_lab.runs.files import plain, read_json, read_metrics, write_json  # noqa: F401
from grpo_lab.runs.run import (  # noqa: F401
    Run,
    RunRecord,
    canonical,
    executing,
    find_run,
    headless,
    load_run,
    make_folder,
    open_run,
    progress_bar,
    run_folder,
    run_status,
    set_aside,
    show_progress,
)
