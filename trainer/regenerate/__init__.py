"""Answers written by the target itself: ``python -m trainer regenerate``.

A draft learns to guess the target, so every answer it is trained on must be the target's own. The
prompts of a JSONL file go to an OpenAI-compatible server (vLLM, SGLang) that serves the target.
Layout: ``options`` (what was asked for), ``conversation`` (a line in, questions, a line out),
``server`` (HTTP with retries), ``journal`` (what survives a kill), ``run`` (all together).
"""
