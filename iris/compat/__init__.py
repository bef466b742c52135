"""The private parts of torch and Triton that Iris uses, a file for each subject.

A *part* is private if its name has a leading underscore, or if the documentation does not promise it. No other file of
Iris names one (`tests/test_rules.py`). When a new release moves a part, only its file here has to change.

Each docstring says which releases have the parts, and what happens where one is missing: another way is taken, which
the docstring names, or `iris.errors.MissingPartError` is raised. `tests/test_compat.py` removes each part and checks
that.
"""
