"""The receipt of a run: on its first batch, the active loss and its gradients against the naive head and TRL's loss.

Every implementation gets the same hidden states, detached, so that nothing but the head and the objective can differ.
Two cases: the batch as it will be trained on, in the run's dtype; and the same batch made off-policy by a seeded
perturbation, in fp32, since on-policy ratios are 1 and would hide a loss that ignores them. A mismatch raises
``ReceiptError``.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch
from transformers.modeling_outputs import ModelOutput

# Largest relative error between two right implementations, by the dtype of the logits: twice the worst that rounding
# made on random heads, far below what a dropped term makes.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
MEMORY_SHARE = 0.25  # of the free memory that the naive head's logits may take
CPU_BYTES = 1 << 30


class ReceiptError(RuntimeError):
    """The first batch's loss or gradient is not that of the references."""


def verify(trainer, inputs, hidden, head) -> dict:
    """The receipt for the batch ``inputs`` whose model gave ``hidden`` ``(B, P + T, H)``; also written to output_dir.

    Keys: passed, step, loss_impl, sequences (how many were compared), checks. A check names its case, dtype and
    reference, and the relative errors of the loss and of each gradient with the tolerance that they were held to.
    """
    head = head._replace(weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())
    inputs, hidden = _part_that_fits(inputs, hidden, head)
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and not trainer.args.cast_lm_head_to_fp32
    dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(hidden.dtype, head.weight.dtype)
    references = [impl for impl in ("naive", "trl") if impl != trainer.args.loss_impl]
    checks, logps = [], None
    for case in ("as trained", "off-policy"):
        if case == "off-policy":
            inputs, dtype = _off_policy(inputs, logps), torch.promote_types(dtype, torch.float32)
            hidden = hidden.to(dtype)
            head = head._replace(weight=head.weight.to(dtype), bias=None if head.bias is None else head.bias.to(dtype))
        with torch.autocast(device, enabled=autocast and case == "as trained"):
            loss, grads, logps = _loss_and_grads(trainer, inputs, hidden, head, trainer.args.loss_impl)
            for reference in references:
                expected, expected_grads, _ = _loss_and_grads(trainer, inputs, hidden, head, reference)
                # A loss is a mean of terms that cancel (advantages add up to 0): its error is relative to their size.
                size = max(abs(expected), inputs["advantages"].abs().mean().item(), 1e-6)
                errors = {"loss": abs(loss - expected) / size}
                errors |= {f"d_{name}": _relative(grads[name], expected_grads[name]) for name in grads}
                checks.append({
                    "case": case, "against": reference, "dtype": str(dtype).removeprefix("torch."), "loss": loss,
                    "reference_loss": expected, "errors": errors, "tolerance": TOLERANCE[dtype],
                    "passed": all(e <= TOLERANCE[dtype] for e in errors.values()),
                })  # fmt: skip
    receipt = {
        "passed": all(check["passed"] for check in checks),
        "step": trainer.state.global_step + 1,
        "loss_impl": trainer.args.loss_impl,
        "sequences": len(hidden),
        "checks": checks,
    }
    if trainer.accelerator.is_main_process:
        path = Path(trainer.args.output_dir)
        path.mkdir(parents=True, exist_ok=True)
        (path / "receipt.json").write_text(json.dumps(receipt, indent=1))
    for check in checks:
        if not check["passed"]:
            worst = max(check["errors"], key=check["errors"].get)
            raise ReceiptError(
                f"step {receipt['step']}: the {receipt['loss_impl']} loss does not agree with {check['against']} "
                f"({check['case']}, {check['dtype']}): the relative error of {worst} is {check['errors'][worst]:.2e}, "
                f"and {check['tolerance']:.0e} is allowed. Nothing has been trained. Compare impl='naive' and "
                "'chunked' of grpo_loss on this batch, or set loss_impl='trl' to train without this package's loss"
            )
    return receipt


def _loss_and_grads(trainer, inputs, hidden, head, impl):
    leaves = {"hidden": hidden.clone(), "weight": head.weight.clone()}
    if head.bias is not None:
        leaves["bias"] = head.bias.clone()
    for leaf in leaves.values():
        leaf.requires_grad_()
    head = head._replace(weight=leaves["weight"], bias=leaves.get("bias"))
    with torch.enable_grad():
        logps = None
        if impl == "trl":
            loss = _trl_loss(trainer, inputs, leaves["hidden"], head)
        else:
            loss, stats = trainer.head_loss(leaves["hidden"], head, inputs, impl)
            logps = stats.logps[:, :-1]  # from the last prompt token on
        grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, grads, strict=True)), logps


def _relative(x, expected):
    x, expected = x.double(), expected.double()
    return ((x - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def _trl_loss(trainer, inputs, hidden, head):
    """TRL's ``_compute_loss``, kernels and all, on these hidden states; the metrics that it logs are discarded."""

    from trl.kernels import ChunkedLogProbFunction  # after trainer.py has checked TRL's version

    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)

    def model(labels, **_):
        mask = labels[:, 1:] != -100
        with torch.autocast(device, enabled=autocast):  # TRL calls its model under the accelerator's
            log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
                hidden[:, :-1][mask], head.weight, head.bias, labels[:, 1:][mask], trainer.temperature, 32768,
                head.softcap, head.logit_scale, ("log_probs", "entropy"),
            )  # fmt: skip
        spread = [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (log_probs, entropy)]
        return ModelOutput(log_probs=spread[0], entropy=spread[1], aux_loss=hidden.new_zeros(()))

    metrics, trainer._metrics = trainer._metrics, {"train": defaultdict(list), "eval": defaultdict(list)}
    impl, trainer.args.loss_impl = trainer.args.loss_impl, "trl"
    try:
        loss = trainer._compute_loss(model, inputs)
    finally:
        trainer._metrics, trainer.args.loss_impl = metrics, impl
    accumulation = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    return loss * accumulation


def _part_that_fits(inputs, hidden, head):
    """As many whole sequences as the naive head can hold, those with an advantage first."""
    B, L, _ = hidden.shape
    if hidden.is_cuda:
        free = torch.cuda.mem_get_info(hidden.device)[0] * MEMORY_SHARE
    else:
        free = CPU_BYTES
    T = inputs["completion_ids"].shape[1]
    sequences = int(
        max(1, free // (4 * (T + 1) * len(head.weight) * 4))
    )  # four fp32 copies: logits, softmax, gradients
    advantages = inputs["advantages"].abs().reshape(B, -1).sum(-1)
    rows = advantages.argsort(descending=True)[:sequences]
    part = {k: v[rows] for k, v in inputs.items() if torch.is_tensor(v) and v.dim() and len(v) == B}
    part["num_items_in_batch"] = inputs["num_items_in_batch"]
    part["prompt_ids"], part["prompt_mask"] = part["prompt_ids"][:, -1:], part["prompt_mask"][:, -1:]
    return part, hidden[rows, L - T - 1 :]


def _off_policy(inputs, logps):
    """The batch with new advantages and old log-probs: ratios on both sides of 1, both signs, something to clip."""
    generator = torch.Generator().manual_seed(0)
    shape = inputs["completion_ids"].shape

    def noise(*size):
        return torch.randn(size, generator=generator).to(inputs["completion_ids"].device)

    return {**inputs, "advantages": noise(shape[0]), "old_per_token_logps": logps + 0.3 * noise(*shape)}
