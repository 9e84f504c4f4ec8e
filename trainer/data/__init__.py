"""Samples, their layout in batches, and the anchors drawn on them."""
