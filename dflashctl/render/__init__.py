"""What the user sees: text for stdout and stderr, and JSON documents."""
