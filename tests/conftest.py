"""What every test gets: a hypothesis profile, a clean environment, and a check that it leaves no thread behind."""

import os
import threading

import pytest
from hypothesis import settings

PROFILE_VARIABLE = "HYPOTHESIS_PROFILE"
THREAD_PATIENCE_S = 2.0  # for a thread that is on its way out when its test ends

# dev finds new inputs on every run; ci always tries the same ones, so that a red build is about the change
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get(PROFILE_VARIABLE, "dev"))


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside():
    """Config.from_env() refuses KVPUSH_* names that it does not know, ours among them, and would obey the others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KVPUSH_")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Fixtures of a wider scope are set up before this one, so their threads are not the test's."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(THREAD_PATIENCE_S)
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not left, f"threads left behind by the test: {', '.join(sorted(left))}"
