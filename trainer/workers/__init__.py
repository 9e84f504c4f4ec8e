"""Threads of a run: targets produce hidden states, drafters train on them, one supervisor."""
