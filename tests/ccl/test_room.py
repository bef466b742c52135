"""What launches take of the multiprocessors: pushes 5/16 of one, and the next may begin before its turn, or half;
messages from all others leave some."""

from types import SimpleNamespace

import pytest

from iris.ccl import communicator, kernel_launch

GPU = SimpleNamespace(num_sms=132)


@pytest.fixture
def share(monkeypatch):
    """By programs, warps of each, and registers that a thread takes as it is compiled."""

    def of(programs, num_warps, held):
        monkeypatch.setattr(kernel_launch, "simulator", SimpleNamespace(ACTIVE=False))
        monkeypatch.setattr(kernel_launch, "on_nvidia", lambda: True)
        monkeypatch.setattr(kernel_launch, "registers", lambda *given, **options: held)
        return kernel_launch._share(GPU, None, programs, num_warps, (), {})

    return of


@pytest.mark.parametrize(
    ("programs", "num_warps", "held", "early"),
    [(1, 1, 255, True), (264, 1, 176, True), (264, 2, 176, False), (264, 2, 103, True), (264, 4, 64, True),
     (264, 4, 101, False), (132, 4, 160, True), (132, 4, 161, False), (264, 8, 40, True), (264, 8, 41, False)],
)  # fmt: skip
def test_a_small_launch_lets_the_next_one_begin(share, programs, num_warps, held, early):
    assert share(programs, num_warps, held) == (early, {})


@pytest.mark.parametrize(("programs", "num_warps", "held", "most"), [(264, 8, 65, 64), (264, 4, 163, 128)])
def test_no_launch_takes_more_than_half(share, programs, num_warps, held, most):
    assert share(programs, num_warps, held) == (False, {"maxnreg": most})


@pytest.mark.parametrize(
    ("num_sms", "sizes", "programs"), [(132, [1, 2, 4, 5], 32), (132, [6, 8], 16), (108, [2, 4], 32), (108, [8], 8)]
)
def test_messages_from_all_others_leave_room_for_one_to_send(monkeypatch, num_sms, sizes, programs):
    monkeypatch.setattr(communicator, "P2P_PROGRAMS", 32)
    for size in sizes:
        assert communicator.message_programs(size, num_sms) == programs and (size - 1) * programs < num_sms
