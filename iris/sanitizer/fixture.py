"""For pytest: `iris_check`, where a conftest.py says ``pytest_plugins = ["iris.sanitizer.fixture"]``."""

from collections.abc import Callable

import pytest

from iris.sanitizer.check import findings_of
from iris.sanitizer.findings import Finding


@pytest.fixture
def iris_check() -> Callable[..., list[Finding]]:
    """Runs a program under the sanitizer: ``assert iris_check("program.py", "--rows", "8") == []``.

    The program starts its own ranks. With ``seed=`` the schedule of its kernels is random.
    """
    return findings_of
