"""Measurements by hand; nothing here is a timed test."""
