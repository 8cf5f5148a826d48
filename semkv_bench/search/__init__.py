"""Levels by layer and side: what each is sensitive to, what a budget buys, and whether it holds on fresh examples."""
