"""The train-serve parity gate: what a run is proven to do right before its first step."""
