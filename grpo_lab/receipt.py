"""The receipt of a run: on its first batch, the active loss and its gradients against the naive head and TRL's loss.

Every implementation gets the same hidden states, detached, so that nothing but the head and the objective can differ.
Two cases. "on-policy", in the run's dtype, holds the kernels to the references: ratios are 1, so that no rounding
error decides what is clipped. "off-policy", in fp32, perturbs old log-probs and advantages, and holds the objective
with every option to TRL's. A mismatch raises ``ReceiptError`` before anything is trained. Compared are the gradients of
the hidden states and of what trains of the head; a LoRA adapter's A gets its gradient from that of its states.
"""

import math
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from grpo_lab.runs import write_json

# Largest relative error between two right implementations, by the dtype of the logits; bf16 heads of real size differ
# by 2e-3, fp32 ones by 2e-6 (tests/test_gpu.py), while a dropped term shows as 1e-1 or more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
MEMORY_SHARE = 0.25  # of the free device memory that the comparison may take
CPU_BYTES = 1 << 30
_MIN_TOKENS = 64
_TENSORS = ("weight", "bias", "lora_states", "lora_weight")  # of a head


class ReceiptError(RuntimeError):
    """The first batch's loss or gradient is not that of the references."""


def can_tell(trainer, inputs) -> bool:
    """Whether a batch shows anything. One process waits for scored tokens; several must all verify the same batch."""
    return trainer.accelerator.num_processes > 1 or bool((inputs["completion_mask"] * inputs.get("tool_mask", 1)).any())


@torch.compiler.disable
def verify(trainer, inputs, hidden, head) -> dict:
    """The receipt for the batch ``inputs`` whose model gave ``hidden`` ``(B, P + T, H)``; also written to output_dir.

    Keys: passed, step, loss_impl, sequences and tokens (how much was compared), checks. A check names its case, dtype
    and reference, and the relative errors of the loss and of each gradient with the tolerance that they were held to.
    Raises ReceiptError where a check fails on any rank.
    """
    accelerator = trainer.accelerator
    step = trainer.state.global_step + 1
    head = _cast(head)
    inputs, hidden, head = _part_that_fits(inputs, hidden, head)
    trainer.accelerator = _OneProcess(accelerator)  # ranks compare different numbers of sequences: nothing is gathered
    try:
        checks = _compare(trainer, inputs, hidden, head)
    finally:
        trainer.accelerator = accelerator
    failed = next((check for check in checks if not check["passed"]), None)
    verdicts = accelerator.gather(torch.tensor([failed is None], device=hidden.device))
    receipt = {
        "passed": bool(verdicts.all()),
        "step": step,
        "loss_impl": trainer.args.loss_impl,
        "sequences": len(hidden),
        "tokens": int(inputs["completion_mask"].sum()),
        "checks": checks,
    }
    if accelerator.is_main_process:
        folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "receipt.json", receipt)
    if failed is not None:
        worst = max(failed["errors"], key=lambda name: abs(failed["errors"][name]))
        raise ReceiptError(
            f"step {step}: the {receipt['loss_impl']} loss does not agree with {failed['against']} ({failed['case']}, "
            f"{failed['dtype']}): the relative error of {worst} is {failed['errors'][worst]:.2e}, and "
            f"{failed['tolerance']:.0e} is allowed. Nothing has been trained. Compare impl='naive' and 'chunked' of "
            "grpo_loss on this batch, or set loss_impl='trl' to train without this package's loss"
        )
    if not receipt["passed"]:
        ranks = ", ".join(str(rank) for rank in (~verdicts).nonzero().flatten().tolist())
        raise ReceiptError(f"step {step}: the loss of rank {ranks} does not agree with its references; see its log")
    return receipt


def _compare(trainer, inputs, hidden, head):
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and not trainer.args.cast_lm_head_to_fp32
    dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(hidden.dtype, head.weight.dtype)
    own, wide = dtype, torch.promote_types(dtype, torch.float32)
    if trainer.objective.top_entropy_quantile < 1.0:
        dtype, autocast = wide, False  # which tokens are the top ones would hang on rounding
    ours = trainer.args.loss_impl
    on_policy = {k: v for k, v in inputs.items() if k not in ("old_per_token_logps", "sampling_per_token_logps")}
    advantages, mask = inputs["advantages"], inputs["completion_mask"] * inputs.get("tool_mask", 1)
    if not (advantages.reshape(len(mask), -1) * mask).any():
        # Without advantages, a policy that is still its own reference has a gradient of rounding errors
        on_policy["advantages"] = torch.ones_like(advantages)
    checks, logps = [], None
    for case in ("on-policy", "off-policy"):
        batch = on_policy if case == "on-policy" else _off_policy(inputs, logps)
        if case == "off-policy" or dtype == wide:
            dtype, autocast, hidden, head = wide, False, hidden.to(wide), _cast(head, wide)
        budget = trainer.args.memory_budget
        if isinstance(budget, int):  # given for the run's dtype: wider, no tensor more than doubles
            budget = budget * dtype.itemsize // own.itemsize
        with torch.autocast(device, enabled=autocast), changed(trainer.args, memory_budget=budget):
            loss, grads, logps = _loss_and_grads(trainer, batch, hidden, head, ours)
            if not math.isfinite(loss) and not torch.isfinite(hidden).all():
                raise ReceiptError("the model's hidden states are not finite on the first batch: nothing to compare")
            for reference in (impl for impl in ("naive", "trl") if impl != ours):
                expected, expected_grads, _ = _loss_and_grads(trainer, batch, hidden, head, reference)
                # A loss is a mean of terms that cancel (advantages add up to 0): its error is relative to their size.
                size = max(abs(expected), batch["advantages"].abs().mean().item(), 1e-6)
                errors = {"loss": abs(loss - expected) / size}
                errors |= {f"d_{name}": _relative(grads[name], expected_grads[name]) for name in grads}
                checks.append({
                    "case": case, "against": reference, "dtype": str(dtype).removeprefix("torch."), "loss": loss,
                    "reference_loss": expected, "errors": errors, "tolerance": TOLERANCE[dtype],
                    "passed": all(e <= TOLERANCE[dtype] for e in errors.values()),
                })  # fmt: skip
    return checks


def _cast(head, dtype=None):
    """The head detached, in another dtype where one is given; what trains of it still asks for a gradient."""
    tensors = {k: getattr(head, k) for k in _TENSORS if getattr(head, k) is not None}
    for name, x in tensors.items():
        tensors[name] = x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad)
    return head._replace(**tensors)


@contextmanager
def changed(owner, **values):
    """The attributes of a module or an object have these values, for a while."""
    before = {name: vars(owner).get(name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


class _OneProcess:
    """An accelerator on which every rank is alone."""

    num_processes, is_main_process = 1, True

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def gather(self, x):
        return x

    def reduce(self, x, reduction="sum"):
        return x

    def pad_across_processes(self, x, **_):
        return x


def _loss_and_grads(trainer, inputs, hidden, head, impl):
    from trl.trainer import utils  # after trainer.py has checked TRL's version

    head = _cast(head)
    leaves = {k: getattr(head, k) for k in _TENSORS if getattr(getattr(head, k), "requires_grad", False)}
    leaves = {"hidden": hidden.detach().requires_grad_()} | leaves
    # Under ZeRO-3, TRL's kernel would have DeepSpeed gather the weight for its backward pass: this one is whole already
    with torch.enable_grad(), changed(utils, maybe_gather_lm_head_ctx=lambda *_: nullcontext()):
        logps = None
        if impl == "trl":
            loss = _trl_loss(trainer, inputs, leaves["hidden"], head)
        else:
            loss, stats = trainer.head_loss(leaves["hidden"], head, inputs, impl)
            loss, logps = trainer.accumulated(loss), stats.logps[:, : inputs["completion_ids"].shape[1]]
        grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, grads, strict=True)), logps


def _relative(x, expected):
    x, expected = x.double(), expected.double()
    return ((x - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def _trl_loss(trainer, inputs, hidden, head):
    """TRL's ``_compute_loss``, kernels and all, on these hidden states; the metrics that it logs are discarded."""

    import trl
    from trl.kernels import ChunkedLogProbFunction

    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    weight = head.weight
    if head.lora is not None:  # a sum of two products is one product of the factors side by side
        hidden = torch.cat([hidden, head.lora_states.to(hidden.dtype)], -1)
        weight = torch.cat([weight, head.lora_weight.to(weight.dtype)], -1)

    def model(labels, **_):
        mask = labels[:, 1:] != -100
        with torch.autocast(device, enabled=autocast):  # TRL calls its model under the accelerator's
            log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
                hidden[:, :-1][mask], weight, head.bias, labels[:, 1:][mask], trainer.objective.temperature, 32768,
                head.softcap, head.logit_scale, ("log_probs", "entropy"),
            )  # fmt: skip
        spread = [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (log_probs, entropy)]
        return SimpleNamespace(log_probs=spread[0], entropy=spread[1], aux_loss=hidden.new_zeros(()))

    metrics, trainer._metrics = trainer._metrics, {"train": defaultdict(list), "eval": defaultdict(list)}
    try:
        with changed(trainer.args, loss_impl="trl"):
            loss = trl.GRPOTrainer._compute_loss(trainer, model, inputs)
    finally:
        trainer._metrics = metrics
    return loss


def _part_that_fits(inputs, hidden, head):
    """As many sequences, those with an advantage first, and of one too long as many tokens as the naive head can hold;
    with hidden states from the last prompt token on."""
    B, L, H = hidden.shape
    V, T = len(head.weight), inputs["completion_ids"].shape[1]
    if hidden.is_cuda:
        cached = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
        free = (torch.cuda.mem_get_info(hidden.device)[0] + cached) * MEMORY_SHARE
    else:
        free = CPU_BYTES
    copies = 5 * V * H * 4  # the head in fp32, one with an adapter beside it, and gradients of two implementations
    tokens = max(
        _MIN_TOKENS, int((free - copies) // (5 * V * 4))
    )  # logits, softmax, their gradients and work space, in fp32
    sequences, t = max(1, tokens // (T + 1)), min(T, tokens)
    advantages = inputs["advantages"].abs().reshape(B, -1).sum(-1)
    rows = advantages.argsort(descending=True)[:sequences]
    part = {"num_items_in_batch": inputs["num_items_in_batch"]}
    for key in _PARTS & inputs.keys():
        x = inputs[key][rows]
        part[key] = x[:, -1:] if key.startswith("prompt") else x[:, :t] if x.dim() == 2 else x
    at = rows, slice(L - T - 1, L - T + t)
    return part, hidden[at], head.at(*at)


_PARTS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "old_per_token_logps",
    "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip


def _off_policy(inputs, logps):
    """The batch with new advantages and old log-probs: ratios on both sides of 1, both signs, something to clip."""
    generator = torch.Generator().manual_seed(0)
    shape = inputs["completion_ids"].shape

    def noise(*size):
        return torch.randn(size, generator=generator).to(inputs["completion_ids"].device)

    return {**inputs, "advantages": noise(shape[0]), "old_per_token_logps": logps + 0.3 * noise(*shape)}
