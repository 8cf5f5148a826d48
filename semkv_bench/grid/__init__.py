"""Levels and how their codes share machine bits: pure arithmetic."""
