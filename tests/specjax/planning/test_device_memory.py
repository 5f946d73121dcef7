"""What steps take on a device that says so, from figures of one that is not there."""

import types
import warnings

import pytest

from specjax.planning.device_memory import MemoryWatch, available_bytes, read_memory


class FakeDevice:
    """Memory that is taken and given back, as a device reports it."""

    def __init__(self, in_use=0, peak=0):
        self.in_use, self.peak = in_use, max(in_use, peak)

    def run(self, workspace):
        """Runs a step that takes bytes while it runs."""
        self.peak = max(self.peak, self.in_use + workspace)

    def memory_stats(self):
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak}


def test_a_device_that_says_nothing_is_not_watched():
    silent = types.SimpleNamespace(memory_stats=lambda: None)
    assert read_memory(silent) == (None, None, None)
    assert MemoryWatch([silent], 100).look() is None


def test_the_most_that_any_step_took_on_any_device():
    devices = [FakeDevice(in_use=1000), FakeDevice(in_use=1200)]
    watch = MemoryWatch(devices, planned_workspace=500)
    assert watch.look() is None
    devices[0].run(300)
    assert watch.look() == 300
    devices[0].run(200)
    devices[1].run(400)
    assert watch.look() == watch.measured_workspace == 400


def test_what_rounding_adds_is_no_reason_to_warn(recwarn):
    device = FakeDevice(in_use=1000)
    watch = MemoryWatch([device], planned_workspace=500)
    device.run(505)
    assert watch.look() == 505
    assert not recwarn.list
    device.run(506)
    with pytest.warns(UserWarning, match="steps were seen to take"):
        watch.look()


def test_a_peak_from_before_is_not_the_steps():
    device = FakeDevice(in_use=1000, peak=5000)
    watch = MemoryWatch([device], planned_workspace=500)
    device.run(3000)
    assert watch.look() is None


def test_steps_are_counted_from_what_was_in_use_and_not_from_the_peak_of_loading():
    device = FakeDevice(in_use=1000, peak=1500)
    watch = MemoryWatch([device], planned_workspace=3000)
    device.run(2000)
    assert watch.look() == 2000


def test_more_than_was_planned_is_said_once():
    device = FakeDevice(in_use=10**9)
    watch = MemoryWatch([device], planned_workspace=5 * 10**6)
    device.run(5 * 10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.look()
    device.run(7 * 10**6)
    message = r"7\.0 MB .* 5\.0 MB were planned; raise batch_safety_margin"
    with pytest.warns(UserWarning, match=message):
        watch.look()
    device.run(9 * 10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert watch.look() == 9 * 10**6


@pytest.mark.parametrize("limit", [200, 9215, 80 * 10**9, 2**36, 2**36 - 1])
@pytest.mark.parametrize("own_bytes", [0, 100])
def test_a_few_bytes_less_do_not_change_what_is_available(limit, own_bytes):
    def available(of_others):
        stats = {"bytes_limit": limit, "bytes_in_use": own_bytes + of_others}
        return available_bytes(types.SimpleNamespace(memory_stats=lambda: stats), own_bytes)

    most, left = available(0), limit - own_bytes
    assert own_bytes + left * (1 - 1 / 64) < most <= limit
    spare = limit - most
    assert available(spare) == most
    # With a byte less, the next smaller number of 7 leading bits.
    below = most - own_bytes - 1
    unit = 1 << max(below.bit_length() - 7, 0)
    assert available(spare + 1) == own_bytes + below // unit * unit
    assert available(limit + 100) == max(own_bytes, 1)
