"""A notebook's parameters: names and defaults from its cell tagged ``parameters``, and the values that are given.

Values come from YAML files and from ``-p NAME VALUE``; a name that the notebook lacks is refused with the nearest that
it has, and a value of another type than the default's with that default.
"""

import ast
import difflib
import json
from pathlib import Path


def notebook_parameters(path):
    """Names and default values from the notebook's one cell tagged ``parameters``, which holds plain literals."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"notebook = {path}: is no notebook of Jupyter's format 4") from None
    if len(tagged) != 1:
        raise ValueError(f"notebook = {path}: {len(tagged)} cells are tagged `parameters`, expected exactly one")
    return assigned("".join(tagged[0]["source"]))


def assigned(source):
    """Names and values that a cell of plain assignments gives. Raises ValueError for a line that is none."""
    found = {}
    try:
        for node in ast.parse(source).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                (target,) = node.targets if isinstance(node, ast.Assign) else [node.target]
                found[target.id] = ast.literal_eval(node.value)
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else node.lineno
        raise ValueError(f"parameters cell, line {line}: expected `name = literal`, such as `seed = 0`") from None
    return found


def refuse_unknown(names, known):
    """Raises ValueError for a name that the notebook has not, with the nearest that it has."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"parameter {name}: the notebook has none of this name; {hint}It has: {', '.join(known)}")


def typed(name, value, default):
    """``value`` (text from -p, or from YAML) in the type of the notebook's default, so that a run has one name."""
    text = value.strip() if isinstance(value, str) else repr(value)
    literal = {"true": "True", "false": "False", "null": "None", "none": "None"}.get(text.lower(), text)
    try:
        if isinstance(default, str) and type(value) in (str, int, float):  # YAML takes `12` for a number
            return value if isinstance(value, str) else text
        parsed = float(text) if isinstance(default, float) else ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        parsed = value
    if default is not None and type(parsed) is not type(default):
        raise ValueError(f"{name} = {value!r}: expected {type(default).__name__}, as its default {default!r} in the "
                         "notebook's parameters cell")  # fmt: skip
    return parsed


def read_yaml(path, option="-f"):
    """The content of a YAML file. Raises ValueError, in one line, for a file that cannot be read as one, and for a
    name that is given twice, of which YAML's reader would take the last."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"{option} {path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        names = [key.value for key, _ in one.value] if isinstance(one, yaml.MappingNode) else []
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{option} {path}: {twice[0]} is given twice")
    return content


def merged_parameters(defaults, files, pairs):
    """The parameters given by YAML files, then by -p pairs, typed. Raises ValueError for a name the notebook lacks."""
    given = {}
    for file in files:
        content = read_yaml(file)
        if not isinstance(content, (dict, type(None))):
            raise ValueError(f"-f {file}: expected lines `name: value`, found a {type(content).__name__}")
        given |= content or {}
    given |= dict(pairs)
    refuse_unknown(given, defaults)
    return {name: typed(name, value, defaults[name]) for name, value in given.items()}
