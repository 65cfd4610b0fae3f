r"""Verifiable rewards in TRL's signature: ``f(completions, **columns) -> list[float | None]``.

Every reward takes plain strings or chat messages and returns ``None`` where it does not apply (TRL then leaves it out).
Numbers are compared exactly, as fractions; math-verify decides formulas (radicals, sets, intervals, equations), inside
bounds that hold in any thread, because its own timeouts are signals and fail outside the main one. Nothing is
evaluated as code, and hostile text costs linear time. Left out: word answers, equations beyond polynomials.
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
from inspect import CO_GENERATOR
from itertools import accumulate, count
from math import prod

MAX_ANSWER = 200  # characters; a longer answer is none
MAX_FORMULA = 120  # characters that math-verify gets to see
MAX_MARKS = 32  # how many marks, counted from the end of the text, are looked at
MAX_CALLS = 3_000_000  # Python calls that math-verify may make for one parse or comparison: about a second

_INT = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,12}|[0-9]{1,40})(?![0-9])"
_EXPONENT = r"(?:\{\s?[-+]?[0-9]{1,3}\s?\}|[-+]?[0-9]{1,3}(?![0-9]))"
_SCALE = {"k": 10**3, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER = re.compile(  # of text that _plain has made plain
    rf"""(?P<sign>[-+]?)\s?
    (?:(?:(?P<whole>{_INT})\s)?(?P<over>{_INT})\s?/\s?(?P<under>{_INT})
      |(?P<base>{_INT})\s?\^\s?(?P<power>{_EXPONENT})
      |(?P<decimal>(?:{_INT})?\.[0-9]{{1,40}}(?![0-9])|{_INT})
       (?:[eE](?P<e>{_EXPONENT})|\s?[×·*x]\s?10\s?\^\s?(?P<ten>{_EXPONENT}))?)
    (?P<scale>k\b|(?i:\s?(?:hundred|thousand|million|billion|trillion)\b))?""",
    re.VERBOSE,
)
_LEAD = re.compile(  # "the answer is", "x =", "40 + 2 ="
    r"(?:the )?(?:final )?answer(?: is)?:?\s?|(?:[A-Za-z][A-Za-z0-9_]{0,20}|[-0-9 .+*/×÷·()%]{1,80})\s?=\s?",
    re.IGNORECASE,
)
# After a number that is the whole answer only a unit may follow; after one that opens a `####` line, any text that
# does not make another value of it.
_UNIT = re.compile(r"(?:[^\W\d_]|[\s.%/¢°²³'\"()-]|\^\{?[23°]\}?)*")
_UNIT_LETTERS = frozenset("mghslLCFWVJN")
_ARITHMETIC = "plus|minus|times|over|pi|sqrt|squared|cubed|half|halves|thirds|tenths|hundredths|thousandths"
_NO_UNIT = re.compile(rf"\b(?:or|and|to|{_ARITHMETIC})\b", re.IGNORECASE)
_GOES_ON = re.compile(
    rf"""(?:%|\*\*)?+
      (?: \.?\d | [A-Za-z_]{{1,3}}\d | [a-z](?<![mghsl])(?![A-Za-z'])
        | \s?(?:\d | \\ | [+*/^=×÷·±]\s?\S | [-<>,;:&x]\s?[-+(]*+\d | (?:{_ARITHMETIC})\b)
        | (?:\s[^\W\d_]{{1,20}}){{0,3}}?\s(?:or\b[^.]{{0,30}}|(?:and|to|of|by)\s[-+(]*+)\d)""",
    re.VERBOSE,
)
_GSM8K_LINE = re.compile(rf"^[ \t]*+####[ \t]*+[-+]?\$?{_INT}(?:\.[0-9]{{1,40}})?%?\.?[ \t\r]*+$", re.MULTILINE)
_COMMA = re.compile(r"(?<=[0-9])(?:,\\!|\{,\}|\\,|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|boxed)\s?\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:\{\s?(-?[0-9,]+)\s?\}\s?\{\s?([0-9,]+)\s?\}|([0-9])\s?([0-9]))")
_LATEX = {"times": "×", "cdot": "·", "div": "÷", "circ": "°", "degree": "°", "%": "%"}  # every other name: a space
_LATEX_NAME = re.compile(r"\\((?:times|cdot|div|circ|degree|left|right|quad)(?![a-z])|[%$;:,! ()\[\]])")
_SYMBOLS = str.maketrans("−–$€£¥₹~`", "--       ")

# What math-verify gets to see: nothing in here can make an integer explode.
_FORMULA = re.compile(r"[0-9A-Za-z\s+\-*/^_=<>|.,;:(){}\[\]\\%$&]+")
_RELATIONS = frozenset("le leq ge geq lt gt ne neq".split())
_FUNCTIONS = frozenset("ln log sin cos tan".split())
_OTHERS = (
    "frac dfrac tfrac sqrt pi cdot times div pm mp left right text mathrm mathbf infty cup cap in alpha beta gamma"
)
_OTHERS += " theta lambda mu phi omega circ degree quad begin end"
_COMMANDS = _RELATIONS | _FUNCTIONS | frozenset(_OTHERS.split())
_POWER = re.compile(  # one small exponent, and no tower
    r"\^(?:\{-?(?:[0-9]{1,3}|[a-z]|[0-9]?[a-z][+-][0-9]|[0-9]{1,2}/[0-9]{1,2}|\\frac\{[0-9]{1,2}\}\{[0-9]{1,2}\}|\\circ)\}"
    r"|[0-9]{1,3}(?![0-9])|[a-z]|\\circ)(?![\s{}]*\^)"
)
_COSTLY = re.compile(r"[A-Za-z]{3}|[0-9]{13}|[0-9][eE][0-9]|(?:[(\[{]\s*){3}|(?:[-+*/=<>,]\s*){3}|\*\s*\*|(?:/.*){5}")
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
    line = _plain(tail.partition("\n")[0])
    lead = _LEAD.match(line)
    number = _NUMBER.match(line, lead.end() if lead else 0)
    if number is None or _GOES_ON.match(line, number.end()):
        return None
    return number[0] + ("%" if line[number.end() :].lstrip().startswith("%") else "")


def _boxed_answer(tail):
    depth, start = 0, re.match(r"\s{0,3}\{", tail)
    if start is None:
        return None
    for brace in re.finditer(r"\\.|[{}]", tail, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            content = tail[start.end() : brace.start()].strip()
            return content if 0 < len(content) <= MAX_ANSWER else None
    return None


def _plain(text):
    """``text`` undressed: ``a/b`` for a LaTeX fraction, one comma, one minus, no currency, single spaces."""
    text = _COMMA.sub(",", text).translate(_SYMBOLS)
    for _ in range(3):  # nested wrappers
        text = _WRAPPER.sub(r" \1 ", text)
    text = _LATEX_NAME.sub(lambda name: _LATEX.get(name[1], " "), _FRACTION.sub(r" \1\3/\2\4 ", text))
    return re.sub(r"^(?:\*\*|\s)+", "", " ".join(text.split()))


@lru_cache(maxsize=65536)
def _number(text):
    """The exact value of an answer that is one number, with or without its unit, else None."""
    if len(text) > MAX_ANSWER:
        return None
    text = _plain(text).removesuffix("**")
    lead = _LEAD.match(text)
    number = _NUMBER.match(text, lead.end() if lead else 0)
    return _value(number) if number and _is_unit(text[number.end() :]) else None


def _is_unit(rest):
    words = re.findall(r"[^\W\d_]+", rest)
    readable = _UNIT.fullmatch(rest) and not _NO_UNIT.search(rest)
    return readable and (not words or len(words[0]) > 1 or words[0] in _UNIT_LETTERS)


def _value(number):
    part = {name: text.replace(",", "").strip("{} ").lower() for name, text in number.groupdict().items() if text}
    try:
        if "over" in part:
            value = Fraction(int(part["over"]), int(part["under"])) + int(part.get("whole", 0))
        elif "base" in part:
            value = Fraction(part["base"]) ** int(part["power"])
        else:
            value = Fraction(part["decimal"]) * Fraction(10) ** int(part.get("e") or part.get("ten") or 0)
    except ZeroDivisionError:
        return None
    return value * _SCALE.get(part.get("scale"), 1) * (-1 if part.get("sign") == "-" else 1)


@lru_cache(maxsize=4096)
def _formula(text):
    """What math-verify reads in ``text``: a tuple of sympy objects, empty where it cannot or must not read it."""
    for wrap in ("$$", "$", "**"):
        text = text.strip().removeprefix(wrap).removesuffix(wrap)
    if not _is_harmless(text):
        return ()
    parse, _, undefined = _math_verify()
    found = _within_budget(lambda: [one for one in parse(rf"\boxed{{{text}}}") if not one.has(*undefined)])
    return tuple(found or ())


@lru_cache(maxsize=4096)
def _same_formula(gold, pred):
    ours, theirs = list(_formula(gold)), list(_formula(pred))
    return bool(ours and theirs and _within_budget(_verified, ours, theirs))


def _verified(ours, theirs):
    if not _math_verify()[1](ours, theirs):
        return False
    if ours[0] == theirs[0] or not all(getattr(one, "is_number", False) for one in (ours[0], theirs[0])):
        return True
    # math-verify takes two tiny numbers as equal whatever they are: constants must agree relatively as well
    return abs((ours[0] - theirs[0]).evalf()) <= 1e-6 * abs(ours[0].evalf())


def _is_harmless(text):
    """True where no number that math-verify could form from ``text`` is too large to compute with, and it is simple."""
    if len(text) > MAX_FORMULA or not _FORMULA.fullmatch(text) or text.lower() in ("na", "n/a"):
        return False
    bare = re.sub(r"\\(?:text|mathrm|mathbf)\s?\{[A-Za-z ]*\}|\\[A-Za-z]+|\{[bpv]?matrix\}", " ", text)
    commands = set(re.findall(r"\\([A-Za-z]+)", text))
    powers = [power[0] for power in _POWER.finditer(text)]
    depth = accumulate((char in "([{") - (char in ")]}") for char in text)
    if _COSTLY.search(bare) or not commands <= _COMMANDS or len(powers) != text.count("^") or max(depth, default=0) > 6:
        return False
    growth = prod(max(1, int(digits)) for power in powers for digits in re.findall("[0-9]+", power))
    if commands & _RELATIONS or re.search("[=<>]", text):  # these get solved, and log(x) < 999 would ask for e^999
        return growth <= 20 and not commands & _FUNCTIONS and not re.search("[a-z]", "".join(powers))
    return growth <= 1000


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
        # raised in a generator that is being thrown away, it would be ignored, and the hook lost
        if next(calls) > MAX_CALLS and not frame.f_code.co_flags & CO_GENERATOR:
            raise _OverBudget

    hook = sys.getprofile() is None  # somebody who is profiling keeps theirs, and watches the clock
    with _LOCK:
        try:
            if hook:
                sys.setprofile(spend)
            return work(*args)
        except (_OverBudget, Exception):
            return None
        finally:
            if hook:
                sys.setprofile(None)
