from tests.algorithms.conftest import scripted as scripted
