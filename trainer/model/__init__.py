"""Networks: the draft, the target's taps, attention masks and their backends."""
