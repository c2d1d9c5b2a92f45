"""The page in a browser: only when asked for by name, as `make test-page` does."""

collect_ignore = ["test_page_browser.py"]
