"""The verbs: each takes a request, does one thing and returns a result; none prints."""
