r"""Verifiable rewards in TRL's signature: ``f(completions, **columns) -> list[float | None]``.

Every reward takes plain strings or chat messages and returns ``None`` where it does not apply (TRL then leaves it out).
Numbers are compared exactly, as fractions; math-verify decides formulas (radicals, sets, intervals, equations), inside
bounds that hold in any thread, because its own timeouts are signals and fail outside the main one. Nothing is
evaluated as code, and hostile text costs linear time. Left out: word answers and multiple choice.
Run: ``GRPOTrainer(..., reward_funcs=[accuracy_reward, gsm8k_format_reward])``; the data set's column is ``answer``.

The rules, where public verifiers disagree:

- An answer is marked in one of three ways: GSM8K's ``#### number``, ``\boxed{...}`` or ``<answer>...</answer>``.
  The last well-formed one counts, so text after it does no harm; ``<answer>`` sets the scope where it occurs, and
  nothing inside a ``<think>`` does. Unmarked numbers are no answer.
- An answer is one number, with a currency sign, unit or percent sign that is dropped (``50%`` is 50, never 0.5).
  ``5 or 6``, ``5x`` and the unfinished ``2+3`` are not 5; one fraction or one power is a number, by its value.
- A comma separates thousands (``1,000``) only before three digits; ``[1,000]`` and ``8.124,12.852`` are lists.
- A gold answer that is a number is matched exactly (0.33 is not 1/3). One that cannot be read gives ``None``.
"""

import logging
import re
import sys
import threading
import warnings
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, count
from math import prod

MAX_ANSWER = 200  # characters; a longer answer is none
MAX_MARKS = 32  # how many marks, counted from the end of the text, are looked at
MAX_CALLS = 3_000_000  # Python calls that math-verify may make for one parse or comparison: under a second

_COMMA = r"(?:,(?:\\!)?|\{,\}|\\,|[\u00a0\u2009\u202f])"
_INT = rf"(?:[1-9][0-9]{{0,2}}(?:{_COMMA}[0-9]{{3}}){{1,12}}|[0-9]{{1,40}})(?![0-9])"
_EXPONENT = r"(?:\{\s?[-+−]?[0-9]{1,3}\s?\}|[-+−]?[0-9]{1,3}(?![0-9]))"
_SCALE = {"k": 10**3, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER = re.compile(
    rf"""(?P<sign>[-+−–]?)\s?(?:\\?\$|[€£¥₹])?\s?(?P<sign2>[-+−–]?)\s?
    (?:(?:(?P<whole>{_INT})(?:\s|(?=\\)))?
         (?:(?P<over>{_INT})\s?/\s?(?P<under>{_INT})
           |\\[dtc]?frac\s?\{{\s?(?P<over2>{_INT})\s?\}}\s?\{{\s?(?P<under2>{_INT})\s?\}}
           |\\[dtc]?frac\s?(?P<over3>[0-9])\s?(?P<under3>[0-9]))
      |(?P<base>{_INT})\s?\^\s?(?P<power>{_EXPONENT})
      |(?P<decimal>(?:{_INT})?\.[0-9]{{1,40}}(?![0-9])|{_INT})
         (?P<times>[eE][-+]?[0-9]{{1,3}}(?![0-9])|\s?(?:\\times|\\cdot|[×·*x])\s?10\s?\^\s?{_EXPONENT})?)
    (?P<scale>k\b|(?i:\s?(?:hundred|thousand|million|billion|trillion)\b))?""",
    re.VERBOSE,
)
_LEAD = re.compile(
    r"(?:the )?(?:final )?answer(?: is|:)\s?|(?:[A-Za-z][A-Za-z0-9_]{0,20}|[-0-9 .+*/×÷()$%]{1,80})\s?=\s?",
    re.IGNORECASE,
)
_GSM8K_LINE = re.compile(
    rf"^[ \t]*+\#{{4}}[ \t]*+{_NUMBER.pattern}[ \t]?(?:\\?%)?\.?[ \t\r]*+$", re.VERBOSE | re.MULTILINE
)
# What may follow a number that is the whole answer; what must not follow the number that opens a `####` line.
_UNIT = re.compile(r"(?:[^\W\d_]|[\s.%/$€£¥₹¢°²³'\"()-]|\\[%$]|\^\{?[23]\}?|\^\{?°\}?)*")
_NO_UNIT = frozenset("or and to plus minus times over pi half squared cubed".split())
_UNIT_LETTERS = frozenset("mghslLCFWVJN")
_GOES_ON = re.compile(
    r"""(?:\\?[%$]|[€£¥₹]|\*\*|\\\))?+
      (?: \.?\d | [A-Za-z_]{1,3}[0-9] | [a-z](?<![mghsl])(?![A-Za-z'])
        | \s{0,3}(?:[0-9] | [+*/^=×÷·±]\s{0,3}\S | [-−–~<>,;:&x]\s{0,3}[-+(\\$€£¥₹]{0,3}[0-9]
                  | \\(?!text|mathrm|mbox|quad|[%$)\],;!\s]))
        | (?:\s{1,3}[^\W\d_]{1,20}){0,3}?\s{1,3}(?:or\b[^.]{0,30}|(?:and|to|of|by)\s{1,3}[-+(\\$€£¥₹]{0,3})[0-9])""",
    re.VERBOSE,
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|boxed)\s?\{([^{}]*)\}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))

# What math-verify gets to see: nothing in here can make an integer explode.
_FORMULA = re.compile(r"[0-9A-Za-z\s+\-*/^_=<>|.,;:(){}\[\]\\%$&]+")
_COMMANDS = frozenset(
    "frac dfrac tfrac sqrt pi cdot times div pm mp left right text mathrm mathbf ln log sin cos tan infty cup cap in le"
    " leq ge geq lt gt ne neq alpha beta gamma theta lambda mu phi omega circ degree quad begin end".split()
)
_POWER = re.compile(
    r"\^(?:\{-?(?:[0-9]{1,3}|[a-z]|[0-9]?[a-z][+-][0-9]|[0-9]{1,2}/[0-9]{1,2}|\\frac\{[0-9]{1,2}\}\{[0-9]{1,2}\}|\\circ)\}"
    r"|[0-9a-z]|\\circ)"
)
_LOCK = threading.Lock()  # neither sympy nor the LaTeX parser promises to be safe in threads


def accuracy_reward(completions, answer, **kwargs):
    """1.0 where a completion's answer equals the gold answer, else 0.0; None where the gold answer cannot be read.

    Args:
        completions: B strings, or B lists of chat messages (the last assistant message counts).
        answer: B gold answers: a number, a number's text, a formula, or a solution that marks one (GSM8K's own form).

    Raises:
        ValueError: the lengths differ, or a completion is neither form.
    """
    if len(completions) != len(answer):
        raise ValueError(f"answer has {len(answer)} rows, completions has {len(completions)}: pass one for each")
    return [_accuracy(_text(completion), gold) for completion, gold in zip(completions, answer, strict=True)]


def format_reward(completions, **kwargs):
    """1.0 for ``<think>...</think><answer>...</answer>`` and nothing else, 0.0 otherwise.

    Whitespace and newlines are free before, between, inside and after the blocks. Each of the four tags occurs exactly
    once, and neither block is blank: repeated and empty blocks are how a policy games a looser check.
    """
    return [float(_well_formed(_text(completion))) for completion in completions]


def gsm8k_format_reward(completions, **kwargs):
    """1.0 where some line reads ``#### number`` and no more (currency, percent and a full stop allowed), else 0.0."""
    return [float(_GSM8K_LINE.search(_text(completion)) is not None) for completion in completions]


def reward_len(completions, **kwargs):
    """``-abs(20 - characters)``: best at 20 characters. The example reward of TRL's documentation and 2025 posts."""
    return [-abs(20.0 - len(_text(completion))) for completion in completions]


def soft_overlong_reward(completion_ids, *, max_completion_len, cache, **kwargs):
    """DAPO's soft over-length punishment (arXiv 2503.14476, equation 13), on token counts: from 0 down to -1.

    0 up to ``max_completion_len - cache`` tokens, then linear, -1 at ``max_completion_len`` and beyond. Bind the two
    lengths first: ``functools.partial(soft_overlong_reward, max_completion_len=256, cache=64)``.

    Args:
        completion_ids: B lists of token ids, as TRL passes them.
        max_completion_len: tokens, at least 1.
        cache: tokens over which the punishment grows, 0 (a step) to ``max_completion_len``.
    """
    if max_completion_len < 1 or not 0 <= cache <= max_completion_len:
        raise ValueError(
            f"max_completion_len={max_completion_len}, cache={cache}: expected max_completion_len >= 1 and "
            "0 <= cache <= max_completion_len; set both in tokens"
        )
    over = [len(ids) - (max_completion_len - cache) for ids in completion_ids]
    return [0.0 if excess <= 0 else -1.0 if excess >= cache else -excess / cache for excess in over]


def extract_answer(text):
    r"""The text of the answer that ``text`` marks, or None: the number of a ``####`` line, the content of ``\boxed{}``
    or of ``<answer>``. See the module's rules; the result is at most ``MAX_ANSWER`` characters.
    """
    if "</think>" in text:
        text = text[text.rindex("</think>") + len("</think>") :]
    elif "<think>" in text:
        return None
    opened = text.rfind("<answer>")
    scoped = opened >= 0
    if scoped:  # a stop string may have eaten the closing tag
        text = text[opened + len("<answer>") :].partition("</answer>")[0]
    found = max(_last(text, "####", _hash_answer), _last(text, r"\boxed", _boxed_answer))[1]
    if found is None and scoped and 0 < len(text.strip()) <= MAX_ANSWER:
        found = text.strip()
    return found


def answers_match(pred, gold):
    """True where the answer ``pred`` equals ``gold``, both as :func:`extract_answer` gives them (bool).

    Numbers are compared exactly. A gold answer that is no number goes to math-verify, which takes equal values as equal
    and decimals to six places; a gold answer that cannot be read matches nothing.
    """
    value = _number(gold)
    if value is not None:
        return _number(pred) == value
    return _same_formula(gold, pred)


def _accuracy(text, gold):
    if gold is None:
        return None
    marked = extract_answer(str(gold)) or str(gold).strip()
    if _number(marked) is None and not _formula(marked):
        warnings.warn(f"answer {str(gold)[:80]!r} is neither a number nor a formula: its reward is None", stacklevel=3)
        return None
    found = extract_answer(text)
    return float(found is not None and answers_match(found, marked))


def _text(completion):
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list | tuple) and all(isinstance(message, dict) for message in completion):
        content = next((m.get("content") for m in reversed(completion) if m.get("role") == "assistant"), None)
        if isinstance(content, list):  # multimodal chat: a list of parts
            content = "".join(part.get("text") or "" for part in content)
        return content or ""
    raise ValueError(f"completions holds {completion!r:.80}: expected a string or a list of chat messages")


def _well_formed(text):
    text = text.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if not (text.startswith(tags[0]) and text.endswith(tags[3]) and all(text.count(tag) == 1 for tag in tags)):
        return False
    thought, _, rest = text[len(tags[0]) :].partition(tags[1])
    between, _, answer = rest[: -len(tags[3])].partition(tags[2])
    return bool(thought.strip() and answer.strip()) and rest.count(tags[2]) == 1 and not between.strip()


def _last(text, mark, read):
    """(position, answer) of the last mark that ``read`` finds well-formed, else (-1, None)."""
    end = len(text)
    for _ in range(MAX_MARKS):
        end = text.rfind(mark, 0, end)
        if end < 0:
            break
        answer = read(text[end + len(mark) : end + len(mark) + MAX_ANSWER + 10])
        if answer is not None:
            return end, answer
    return -1, None


def _hash_answer(tail):
    line = re.sub(r"^(?:\*\*|\\\(|\\\[|\s)+", "", tail.partition("\n")[0])
    lead = _LEAD.match(line)
    number = _NUMBER.match(line, lead.end() if lead else 0)
    if number is None or _GOES_ON.match(line, number.end()):
        return None
    percent = re.compile(r"\s?\\?%").match(line, number.end())
    return line[number.start() : percent.end() if percent else number.end()].strip()


def _boxed_answer(tail):
    depth, start = 0, re.match(r"\s{0,3}\{", tail)
    if start is None:
        return None
    for brace in re.finditer(r"\\.|[{}]", tail, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return tail[start.end() : brace.start()].strip() or None
    return None


def _unwrap(text):
    text = " ".join(text.split())
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


@lru_cache(maxsize=65536)
def _number(text):
    """The exact value of an answer that is one number, with or without its unit, else None."""
    if len(text) > MAX_ANSWER:
        return None
    for _ in range(3):
        text = _WRAPPER.sub(r" \1 ", text)
    text = re.sub(r"\\(?:left|right|quad|degree|[;: ])|~", " ", _unwrap(text))
    text = " ".join(text.replace("\\circ", "°").split())
    lead = _LEAD.match(text)
    number = _NUMBER.match(text, lead.end() if lead else 0)
    if number is None or not _is_unit(text[number.end() :]):
        return None
    return _value(number)


def _is_unit(rest):
    words = re.findall(r"[^\W\d_]+", rest)
    if not _UNIT.fullmatch(rest) or _NO_UNIT.intersection(word.lower() for word in words):
        return False
    return not words or len(words[0]) > 1 or words[0] in _UNIT_LETTERS


def _value(number):
    part = {name: _digits(text) for name, text in number.groupdict().items() if text}
    if "decimal" in part:
        value = Fraction(part["decimal"])
        if "times" in part:
            value *= Fraction(10) ** int(re.sub(r".*(?:[eE]|\^)\s?", "", part["times"]).strip("{} "))
    elif "base" in part:
        base, power = int(part["base"]), int(part["power"].strip("{} "))
        if base == 0 and power < 0:
            return None
        value = Fraction(base) ** power
    else:
        over, under = (
            int(next(part[name + n] for n in ("", "2", "3") if name + n in part)) for name in ("over", "under")
        )
        if under == 0:
            return None
        value = Fraction(over, under) + int(part.get("whole", 0))
    if "scale" in part:
        value *= _SCALE[part["scale"].strip().lower()]
    return -value if (part.get("sign") == "-") != (part.get("sign2") == "-") else value


def _digits(text):
    return re.sub(rf"(?<=[0-9]){_COMMA}(?=[0-9])", "", text).translate({0x2212: "-", 0x2013: "-"})


@lru_cache(maxsize=4096)
def _formula(text):
    """What math-verify reads in ``text``: a tuple of sympy objects, empty where it cannot or must not read it."""
    text = _unwrap(text)
    if not _is_harmless(text):
        return ()
    parse, _, undefined = _math_verify()
    found = _within_budget(parse, rf"\boxed{{{text}}}") or ()
    return tuple(one for one in found if not one.has(*undefined))


@lru_cache(maxsize=4096)
def _same_formula(gold, pred):
    ours, theirs = _formula(gold), _formula(pred)
    if not (ours and theirs and _within_budget(_math_verify()[1], list(ours), list(theirs))):
        return False
    if not (ours[0].is_number and theirs[0].is_number):
        return True
    # math-verify takes two tiny numbers as equal whatever they are: constants must agree relatively as well
    return bool(_within_budget(lambda: abs((ours[0] - theirs[0]).evalf()) <= 1e-6 * abs(ours[0].evalf())))


def _is_harmless(text):
    if len(text) > MAX_ANSWER or not _FORMULA.fullmatch(text) or text.lower() in ("na", "n/a"):
        return False
    bare = re.sub(r"\\(?:text|mathrm|mathbf)\s?\{[A-Za-z ]*\}|\\[A-Za-z]+|\{[bpv]?matrix\}", " ", text)
    if re.search(r"[A-Za-z]{3}|[0-9]{21}|(?:[(\[{]\s*){3}", bare) or not _COMMANDS.issuperset(
        re.findall(r"\\([A-Za-z]+)", text)
    ):
        return False
    powers = [power[0] for power in _POWER.finditer(text)]
    growth = prod(max(1, int(digits)) for power in powers for digits in re.findall("[0-9]+", power))
    depth = accumulate((char in "([{") - (char in ")]}") for char in text)
    return len(powers) == text.count("^") and growth <= 10_000 and max(depth, default=0) <= 6


@lru_cache(maxsize=1)
def _math_verify():
    """math-verify's parse and verify without their signal timeouts, and sympy's undefined values."""
    import math_verify
    from sympy import nan, zoo

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no timeout is set; _within_budget is ours
    latex = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    parse = partial(math_verify.parse, extraction_config=latex, **options)
    return parse, partial(math_verify.verify, timeout_seconds=None), (nan, zoo)


class _OverBudget(BaseException):  # not an Exception: sympy and math-verify swallow those
    pass


def _within_budget(work, *args):
    """``work(*args)``, or None where it fails or makes more than MAX_CALLS calls. Works in every thread."""
    calls = count()

    def spend(frame, event, arg):
        if next(calls) > MAX_CALLS:
            raise _OverBudget

    profiler = sys.getprofile()
    with _LOCK:
        try:
            if profiler is None:  # somebody who is profiling keeps the hook, and watches the clock
                sys.setprofile(spend)
            return work(*args)
        except (_OverBudget, Exception):
            return None
        finally:
            sys.setprofile(profiler)
