import pytest
from contract_worlds import FAKE, IN_PROCESS, PROCESSES, FakeWorld, HostPool, InProcessWorld, ProcessWorld

WORLDS = {
    FAKE: pytest.param(FAKE, id=FAKE),
    IN_PROCESS: pytest.param(IN_PROCESS, id=IN_PROCESS, marks=pytest.mark.nixl),
    PROCESSES: pytest.param(PROCESSES, id=PROCESSES, marks=[pytest.mark.nixl, pytest.mark.processes]),
}


def pytest_configure(config):
    config.addinivalue_line("markers", "without(world, reason): the test cannot be run in this world, and why")


def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames:
        excluded = {mark.args[0] for mark in metafunc.definition.iter_markers("without") if mark.kwargs["reason"]}
        params = [param for name, param in WORLDS.items() if name not in excluded]
        metafunc.parametrize("world", params, indirect=True)


@pytest.fixture(scope="session")
def _hosts():
    hosts = HostPool()
    yield hosts
    hosts.close()


@pytest.fixture
def world(request):
    if request.param == PROCESSES:
        world = ProcessWorld(request.getfixturevalue("_hosts"))
    else:
        world = {FAKE: FakeWorld, IN_PROCESS: InProcessWorld}[request.param]()
    yield world
    world.close()
