from tests.recipes.conftest import scripted as scripted
