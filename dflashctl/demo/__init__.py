"""The demo's real language model and data set: converter, prompts, chats, training config."""
