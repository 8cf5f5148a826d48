"""Answers of one model under many settings."""
