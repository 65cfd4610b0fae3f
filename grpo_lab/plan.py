"""How many tokens the chunked head takes at a time, and what it keeps of them: time against memory.

``chunked.py`` has the arithmetic. A plan is wide where a chunk keeps whole rows of logits ``(C, V)``, or takes one tile
``(C, SLICE)`` after another. For a head that trains, dW is added up in fp32 as chunks go by (``slices`` 0), or written
slice by slice in a second sweep whose chunks have ``slices`` rows.
"""

import bisect
import math
from typing import NamedTuple

from grpo_lab import kernels, twins

# Microseconds per row by C, measured on an H200 with H 1024, V 151,936 in bf16; on row counts that are no multiple of
# 1024 cuBLAS is slower. A small chunk pays for the fp32 dW that it reads and writes.
_TRAINED = {3072: 1.68, 4096: 1.68, 2048: 1.8, 1024: 2.03}
_WIDE = {1024: 1.07, 2048: 1.07, 3072: 1.07, 4096: 1.07}  # dH alone; the 6 % that 1024 rows may lose buy much memory
_FIRST = {1024: 1.16, 2048: 1.07, 4096: 1.07}  # dH alone, with dW to follow
_NARROW = {8192: 1.2, 4096: 1.25, 2048: 1.3, 1536: 1.35, 1024: 1.4, 512: 1.5, 256: 1.7, 128: 2.0, 64: 3.0}
_SLICES = {8192: 1.1, 4096: 1.15, 1024: 1.4, 256: 1.7, 64: 3.0}  # dW alone
_UNEVEN = 1.06
_CALL, _TILE = 5000.0, 130.0  # microseconds of the host for a call, and for the launches of a tile
_OBJECTIVE = 1500.0  # for the many small launches of an objective whose coefficients depend on log-probs
# Rows of a frozen head, in wide chunks, whose sums of numerators wait for their coefficients: those that depend on
# log-probs are then paid for once, and while others are first calculated the GPU has work to do
_TOGETHER = 8192
_CPU_BYTES = 32 << 20  # of the buffer on a CPU: larger ones leave its cache
_CPU_SIZES = (4096, 1024, 256, 64, 16)


class Plan(NamedTuple):
    C: int
    wide: bool
    slices: int = 0

    @property
    def together(self) -> int:
        """Chunks that get their coefficients at once, where rows of logits do not become their gradient."""
        return max(1, _TOGETHER // self.C) if self.wide else 1


class Problem(NamedTuple):
    """What a plan depends on: ``scored`` N tokens of ``batch`` x ``length`` positions, bytes of an element of the
    gradients' dtype and of the logits, how many columns of the head train (H, an adapter's r, or 0); ``sequences``,
    ``(tokens, has a gradient)`` of each, where a coefficient depends on the whole sequence; bytes of an element of the
    hidden states and of the head where they differ from the products', and ``copied`` of inputs that are copied;
    ``known``: no coefficients that wait for the log-probs of their own chunk."""

    batch: int
    length: int
    scored: int
    hidden: int
    vocab: int
    itemsize: int
    logits_itemsize: int
    trained: int
    device: str
    sequences: tuple[tuple[int, bool], ...] | None = None
    hidden_itemsize: int | None = None
    head_itemsize: int | None = None
    copied: int = 0
    known: bool = True

    @property
    def trains(self) -> bool:
        return self.trained > 0

    def memory(self, plan: Plan) -> dict[str, int]:
        """The tensors that are alive together at a call's peak, beyond its inputs, in bytes."""
        B, T, N, H, V, s = *self[:5], self.itemsize
        wide_s, head_s = max(s, 4), self.head_itemsize or s
        kept = {
            "dH (B, T, H)": B * T * H * (self.hidden_itemsize or s),
            "vectors of the tokens (N,) and positions (B, T)": 96 * N + 26 * B * T,
        }
        always = kept | ({"inputs in another dtype or as rows": self.copied} if self.copied else {})

        def sweep(C, columns, weight, rows):
            tile = f"(C, {'V' if columns == V else columns})"
            chunk = {
                f"chunk of logits, then of their gradient {tile}": C * -(-columns * self.logits_itemsize // 128) * 128,
                "states of the chunk (C, H)": C * H * s,
            }
            if self.logits_itemsize != s:
                chunk[f"gradient of fp32 logits {tile}"] = C * -(-columns * s // 128) * 128
            name = "dH of the chunk in fp32 (C, H)" if rows == 1 else f"dH of {rows} chunks in fp32 ({rows}, C, H)"
            rows = {name: rows * C * H * wide_s} if rows else {}
            moments = [always | chunk | rows | weight]
            if self.device == "cpu":
                elements = min(C * columns, twins.ELEMENTS)
                held = 3 if rows else 4
                twin = {f"work space of the kernels' twins, {held} x up to 2 MiB": held * elements * wide_s}
                # What of dW is there while the twins of a whole chunk are at work
                names = [*weight] if N >= 2 * C or rows and N > C else [] if rows else [*weight][:1]
                moments.append(always | chunk | rows | twin | {name: weight[name] for name in names})
                if s < 4:
                    widened = {f"factors of a product in fp32, {tile} and ({tile[4:-1]}, H)": 4 * columns * (C + H)}
                    moments.append(always | chunk | rows | weight | widened)
            return moments

        one_chunk = plan.C >= N and s == 2  # dW is one product, rounded at once
        K = self.trained
        total = {"dW (V, H)": V * K * s} if one_chunk else {"dW in fp32 (V, H)": V * K * wide_s}
        columns = V if plan.wide else min(V, kernels.SLICE)
        together = max(1, min(self._together(plan), -(-N // plan.C)))
        moments = sweep(plan.C, columns, total if self.in_place(plan) else {}, together)
        if plan.slices:
            columns = min(V, kernels.SLICE)
            weight = {"dW (V, H)": V * K * head_s, f"slice of dW in fp32 ({columns}, H)": columns * K * wide_s}
            moments += sweep(plan.slices, columns, weight, rows=0)
        elif self.trains and head_s != (s if one_chunk else wide_s):
            moments.append(kept | total | {"dW in the head's dtype (V, H)": V * K * head_s})
        return max(moments, key=lambda moment: sum(moment.values()))

    def in_place(self, plan: Plan) -> bool:
        """Whether rows of logits become their gradient, for dW to be added up."""
        return self.trains and not plan.slices

    def _together(self, plan: Plan) -> int:
        return 1 if self.in_place(plan) else plan.together

    def peak(self, plan: Plan) -> int:
        return sum(self.memory(plan).values())

    def cost(self, plan: Plan) -> float:
        """About how long a plan takes, in microseconds of an H200; on a CPU, in rows of products."""
        C, trains = plan.C, self.trains
        chunks = -(-self.scored // C)
        rows = self.scored if self.sequences is None else chunks * C
        phases = 1.0
        if self.sequences and max(self.sequences)[0] > C:  # two phases: the logits are computed twice
            phases = 4 / 3 if trains else 3 / 2
        elif self.sequences is not None:
            chunks = len(bins(self.sequences, C))
            rows = chunks * C
        if self.device == "cpu":
            return rows * phases * (2 + trains + (plan.slices > 0)) + 64 * chunks
        wide = _TRAINED if self.in_place(plan) else _FIRST if plan.slices else _WIDE
        rate = _rate(wide if plan.wide else _NARROW, C)
        tiles = chunks * (1 if plan.wide else -(-self.vocab // kernels.SLICE))
        if plan.slices:
            rate += _rate(_SLICES, plan.slices)
            tiles += -(-self.scored // plan.slices) * -(-self.vocab // kernels.SLICE)
        on_gpu = rows * phases * rate * self.hidden * self.vocab / (1024 * 151_936)
        objectives = 0 if self.known else -(-chunks // self._together(plan))
        return max(on_gpu, _CALL + _TILE * tiles + _OBJECTIVE * objectives)


def _rate(rates, C):
    known = max((c for c in rates if c <= C), default=min(rates))
    return rates[known] * (1.0 if C % 1024 == 0 or C in rates else _UNEVEN)


def choose(problem: Problem, chunk_tokens="auto", memory_budget=None, free_bytes: int | None = None) -> Plan:
    """The fastest plan whose peak stays within ``memory_budget`` bytes; None: within ``free_bytes``, what the device
    has; ``"low"``: the leanest that is still fast. Raises ValueError where even the leanest needs more."""
    n, trains, on_cpu = max(problem.scored, 1), problem.trains, problem.device == "cpu"
    whole = -(-n // 16) * 16
    fixed = None if chunk_tokens == "auto" else chunk_tokens
    if memory_budget == "low":
        rows = min(fixed or (256 if on_cpu else 8192), whole)
        lean = min(fixed or (256 if on_cpu else 2048 if trains else 1536), whole)
        return Plan(lean, trains and not on_cpu, rows) if trains else Plan(lean, False)
    if on_cpu and fixed is None and memory_budget is None:
        columns = problem.vocab if trains else min(problem.vocab, kernels.SLICE)
        most = max(64, _CPU_BYTES // (columns * problem.logits_itemsize))
        fixed = -(-n // -(-n // most) // 16) * 16  # equal chunks
    kinds = [(False, True), (False, False)]  # slices, wide
    if trains:
        kinds = [(False, True), (True, True), (True, False)]
    elif on_cpu or fixed:
        kinds = [(False, False)]
    limit = memory_budget if memory_budget is not None else math.inf if free_bytes is None else 0.9 * free_bytes
    plans = set()
    for alike in [kinds] if on_cpu else [[kind] for kind in kinds]:  # on a GPU each kind is faster than the next
        found = {plan for kind in alike for plan in _plans(*kind, problem, fixed, whole)}
        for plan in sorted(found, key=lambda plan: (problem.cost(plan), plan)):
            if problem.peak(plan) <= limit:
                return plan
        plans |= found
    leanest = min(plans, key=problem.peak)
    if memory_budget is not None:
        raise ValueError(
            f"memory_budget={memory_budget:,} bytes: the leanest plan for this batch needs {problem.peak(leanest):,}"
        )
    return leanest


def _plans(sliced, wide, problem, fixed, whole):
    """The plans of a kind: of ``fixed`` rows if it is given, else of those measured; no more than ``whole``."""
    n, on_cpu = problem.scored, problem.device == "cpu"
    table = _NARROW if not wide else _FIRST if sliced else _TRAINED if problem.trains else _WIDE
    for C in [fixed] if fixed else _CPU_SIZES if on_cpu else table:
        sizes = [C]
        if n > C and not fixed:  # fewer empty rows in the last chunk
            sizes.append(-(-n // -(-n // C) // 256) * 256)
        for rows in sizes:
            for second in [0] if not sliced else [rows] if fixed or on_cpu else _SLICES:
                yield Plan(min(rows, whole), wide, min(second, whole))


def bins(sequences, C: int) -> list[tuple[int, bool, list[int]]]:
    """Chunks of whole sequences, ``(tokens, have a gradient, indices)``: the longest first, each where it leaves least
    room, those with and without a gradient apart."""
    packed, rooms = [], {True: [], False: []}  # (tokens that still fit, index of the bin), ordered
    for i in sorted((i for i, s in enumerate(sequences) if s[0]), key=lambda i: -sequences[i][0]):
        length, active = sequences[i]
        room = rooms[active]
        at = bisect.bisect_left(room, (length, -1))
        left, home = room.pop(at) if at < len(room) else (C, len(packed))
        if home == len(packed):
            packed.append([0, active, []])
        packed[home][0] += length
        packed[home][2].append(i)
        bisect.insort(room, (left - length, home))
    return packed
