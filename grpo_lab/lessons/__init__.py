"""What the notebooks teach with: exercises and their checks, the class's progress, widgets, an OOM that hurts nobody.

``exercises.py`` writes the exercise notebooks; ``checks.py`` has a check for each exercise, made of ``grading.py``;
``progress.py`` shows who has passed; ``clock.py`` times the notebooks. ``widgets.py`` and ``dashboard.py`` move in
JupyterLab, and ``widget_plots.py`` draws their pictures; ``oom.py`` runs a loss that may die of memory.
"""
