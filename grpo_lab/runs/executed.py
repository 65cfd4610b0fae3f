"""What papermill does with a run's notebook: the parameters that it was given, and copies of what it has executed.

``check_injected`` looks, in the kernel, at what papermill put in: it warns of a misspelt parameter and goes on.
``to_html`` writes a copy that any browser opens without a network: pictures and formulas are in the file, and the
interactive figures, whose pictures stand beside them, are left out. ``keep_at_exit`` brings both into the run folder
where papermill was called by itself; ``python -m grpo_lab run`` needs it not.
"""

import atexit
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from grpo_lab.doctor import CLONE
from grpo_lab.runs.parameters import assigned, refuse_unknown, typed

_kept = set()
# pandoc's rule: no space inside the dollars, no empty line, no digit after them, so that prices are no formulas
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?![\s$])((?:[^$\n]|\n(?!\n))*[^$\s\\])\$(?!\d)", re.DOTALL)


def check_injected(params):
    """Raises ValueError for a parameter that papermill was given and the notebook, whose parameters are ``params``, has
    not, and for a value of another type than the default's."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = shell.user_ns.get("In", []) if shell else []
    for defaults, injected in zip(cells, cells[1:]):
        if injected.startswith("# Parameters\n"):  # papermill's words
            given = assigned(injected)
            refuse_unknown(given, params)
            known = assigned(defaults)
            for name, value in given.items():
                default = known.get(name)
                if isinstance(value, str) and not isinstance(default, (str, type(None))):
                    raise ValueError(f"{name} = {value!r} is text: expected {type(default).__name__}. papermill takes "
                                     "True, not true, and YAML 1.0e-6, not 1e-6")  # fmt: skip
                typed(name, value, default)
            return


def to_html(notebook):
    """Write an HTML copy beside an executed notebook, and return its path."""
    import nbformat
    from latex2mathml.converter import convert
    from nbconvert import HTMLExporter

    notebook = Path(notebook)
    content = nbformat.read(notebook, 4)
    formulas = []

    def put_aside(found):  # the exporter would take MathML apart
        formulas.append(convert(found[1] or found[2]))
        return f"formula{len(formulas) - 1}of{notebook.stem}."

    for cell in content.cells:
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(put_aside, cell.source)
        else:
            cell.outputs = [o for o in cell.outputs if "application/vnd.plotly.v1+json" not in o.get("data", {})]
    content.metadata.pop("widgets", None)
    exporter = HTMLExporter(embed_images=True, sanitize_html=False)
    text, _ = exporter.from_notebook_node(content, {"metadata": {"name": notebook.stem}})
    text = re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)  # all that would be fetched: MathJax and others
    text = re.sub(rf"formula(\d+)of{notebook.stem}\.", lambda found: formulas[int(found[1])], text)
    path = notebook.with_suffix(".html")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def keep_at_exit(folder):
    """When this kernel ends, copy the notebook that papermill has executed in it, with its HTML, into the run folder.

    Papermill saves the notebook after each cell; where it lies stands in the command that started this kernel. The
    copies are there some seconds later."""
    import psutil

    parent = psutil.Process().parent()
    words = [] if parent is None else parent.cmdline()
    notebooks = [word for word in words if word.endswith(".ipynb")]
    if "ipykernel" in sys.modules and any(Path(word).name == "papermill" for word in words[:3]) and len(notebooks) > 1:
        output = Path(os.environ.get("PWD") or parent.cwd(), notebooks[1])  # papermill's --cwd changes its own
        if folder not in _kept:
            _kept.add(folder)
            atexit.register(_keep, output, Path(folder, Path(notebooks[0]).name))


def _keep(output, copy):
    """In a process of its own: a kernel that takes more than some seconds to end is killed."""
    code = "import sys; from grpo_lab.runs.executed import copy_with_html; copy_with_html(*sys.argv[1:])"
    command = [sys.executable, "-c", code, output, copy]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(command, cwd=CLONE, start_new_session=True, **quiet)


def copy_with_html(output, copy):
    shutil.copyfile(output, copy)
    to_html(copy)
