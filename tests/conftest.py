"""Shared by all tests."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
