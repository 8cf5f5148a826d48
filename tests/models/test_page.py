"""The page of models says what the matrix runs."""

import pytest
from page import PAGE, page
from transformers import __version__


def test_the_page_is_what_the_script_writes():
    written = PAGE.read_text()
    if f"transformers {__version__})" not in written:
        pytest.skip("the page was written with another release of transformers")
    assert written == page(), "python tests/models/page.py writes it anew"
