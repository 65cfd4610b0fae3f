"""Loss heads side by side: time, peak memory and gradient errors, of the head alone and of whole training steps.

    python -m grpo_lab bench --out results                    # every table: real shapes on a GPU, small ones on a CPU
    python -m grpo_lab bench --tables head,frontier --repeats 5 --out results
    python -m grpo_lab bench --tables step --models Qwen3-0.6B --dtypes bfloat16 --out results
    python -m grpo_lab bench --tables batch --cards 24,80 --out results     # on all GPUs, by accelerate's launcher

Each table is a file of its own, ``<table>_<device>.csv``. Tables: head (every provider), zero (shares of zero-advantage
sequences), off_policy (ratios against given log-probs, as with vLLM), wide (larger hidden sizes), peaked (a confident
policy: the errors), frontier (time against memory), step; and, only when they are asked for, peak (of whole steps, with
what was predicted), batch (the largest that trains), curves (rewards by who computes the loss), skip
(``skip_zero_advantage`` on a real batch), rollouts (vLLM beside transformers), joint (GRPO on GSM8K with vLLM's
rollouts).

``command.py`` reads the options and prints. ``heads.py`` measures the tables of the head alone, from head to frontier;
each other table is in a file of its name, joint in ``rollouts.py``. ``providers.py`` says who is compared,
``measure.py`` has what all of them share, ``files.py`` writes and reads the CSV files, ``plots.py`` draws them.
"""
