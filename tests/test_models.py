"""Model families beyond Qwen3, small and random: the head that is read, and whole runs against TRL's own loss.

Families differ in the head (tied or not, bias, softcap, scale) and in what the backbone returns; a fault in either
shows in the loss, the gradient norm or the trained weights. Weights are drawn wide, or a softcap would be the identity.
"""

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from test_trainer import WORDS, assert_same_training, logged, tiny, trained  # noqa: F401

from grpo_lab.bench.rollouts import varied
from grpo_lab.head import score_in_forward

SIZE = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0,
            initializer_range=0.2)  # fmt: skip
GPT = dict(vocab_size=len(WORDS), n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=1,
           pad_token_id=0, initializer_range=0.2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)  # fmt: skip
GEMMA = dict(SIZE, head_dim=8, final_logit_softcapping=3.0, sliding_window=8)
HYBRID = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
# Not output_router_logits=True: transformers' own generate() fails with it, and TRL asks for the logits by itself.
MOE = dict(SIZE, num_experts_per_tok=2, router_aux_loss_coef=0.1)
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}
TOWER = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, patch_size=4)
# Transformers' Gemma 3 with a vision tower ignores the softcap of its text config, which released ones leave unset.
UNCAPPED = dict(GEMMA, final_logit_softcapping=None)
SIGLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
              patch_size=4)  # fmt: skip
IMAGE = WORDS.index("<unk>")  # in no prompt
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZE),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZE),  # its head has a bias
    "cohere": ("CohereForCausalLM", "CohereConfig", dict(SIZE, logit_scale=0.25)),
    "gemma-2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma-3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "granite": ("GraniteForCausalLM", "GraniteConfig", dict(SIZE, logits_scaling=3.0)),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", dict(SIZE, lm_head_multiplier=0.4, **HYBRID)),
    "gpt-2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "qwen-3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(MOE, num_experts=4, moe_intermediate_size=16)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(MOE, num_local_experts=4)),
    "qwen-2.5-vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
                    dict(text_config=dict(SIZE, rope_scaling=MROPE), vision_config=TOWER, image_token_id=IMAGE)),
    "gemma-3-vl": ("Gemma3ForConditionalGeneration", "Gemma3Config",
                   dict(text_config=UNCAPPED, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE)),
}  # fmt: skip
# Two updates on a rollout, so that old log-probs and ratios off 1 are trained on too; two batches a step; several
# chunks a batch. SGD, since Adam makes a whole step of the rounding error where a gradient is 0 by construction.
RUN = dict(steps=3, per_device_train_batch_size=4, max_completion_length=8, num_iterations=2, learning_rate=0.1,
           gradient_accumulation_steps=2, optim="sgd")  # fmt: skip


def build(family, **changes):
    model_class, config_class, config = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config | changes))
    if family == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    if family == "gemma-3-vl":  # born as 0, where its RMS norm has gradients of 1e4
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def assert_same_runs(build, tmp_path, more):
    run = dict(RUN, reward=varied, more=more)
    reference = trained(build(), tmp_path, config=trl.GRPOConfig, cls=trl.GRPOTrainer, **run)
    assert all(row["grad_norm"] > 1e-2 for row in logged(reference))
    t = trained(build(), tmp_path, chunk_tokens=16, **run)
    assert_same_training(t, reference)
    assert t.receipt["passed"]
    return t


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scoring_forward_hands_over_what_makes_the_model_s_own_logits(family, seed):
    model = build(family).eval()
    ids = torch.randint(3, 40, (2, 7))
    expected = model(ids).logits
    score_in_forward(model)
    caches, scored = [], []
    model.base_model.register_forward_hook(lambda module, args, out: caches.append(out.past_key_values))
    model(ids, score=lambda *hidden_and_head: scored.append(hidden_and_head) or {})
    hidden, head = scored[0]
    z = hidden @ head.weight.T * head.logit_scale
    z = z if head.bias is None else z + head.bias
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    assert caches == [None], "a scoring forward has no use for a key-value cache"
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_trl_s_own(tiny, tmp_path, family):  # noqa: F811
    more = {"processing_class": transformers.AutoTokenizer.from_pretrained(tiny)}
    t = assert_same_runs(lambda: build(family), tmp_path, more)
    assert all(("aux_loss" in row) == (family in ("qwen-3-moe", "mixtral")) for row in logged(t))


TEMPLATE = """{% for part in messages[0]['content'] %}
{{ '<start>' if part['type'] == 'image' else part['text'] }} {% endfor %}"""


def test_training_on_images_is_trl_s_own(tiny, tmp_path):  # noqa: F811
    """The pixels and token types that TRL's batches carry reach the backbone."""
    from PIL import Image
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": "<start>", "image_token": "<image>", "eoi_token": "<end>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny, extra_special_tokens=names)
    processor = transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokenizer, TEMPLATE, image_seq_length=4
    )
    prompts = [[{"role": "user", "content": f"w{i} w3" if i % 2 else f"w{i}"}] for i in range(8)]
    images = [Image.new("RGB", (16, 16), (30 * i, 200 - 20 * i, 99)) for i in range(8)]
    more = {"processing_class": processor, "train_dataset": Dataset.from_dict({"prompt": prompts, "image": images})}
    text = dict(UNCAPPED, vocab_size=len(tokenizer))

    def model():
        return build("gemma-3-vl", text_config=text, image_token_index=tokenizer.image_token_id)

    t = assert_same_runs(model, tmp_path, more)
    batch = t._buffered_inputs[0]
    assert batch["pixel_values"].any() and batch["token_type_ids"].any()
