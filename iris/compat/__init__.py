"""The private parts of torch and Triton that Iris relies on, a file for each subject.

Private is a name with a leading underscore, and a module or attribute that their documentation does not promise. The
rest of Iris mentions none (`tests/test_rules.py`). When a new release moves one, its file here is the place to mend.

Each docstring says in which releases the parts are there, and what happens where one is gone: another way, which the
docstring names, or `iris.errors.MissingPartError`. `tests/test_compat.py` takes each part away and looks.
"""
